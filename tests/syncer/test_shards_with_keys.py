"""Shards over TLS: they use the key of the syncer, learners use theirs for both, and invalid keys are refused."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import aiohttp
import pytest

from atoll.cli.main import main
from atoll.syncer.shards.messages import ShardHello, SyncerHello, decode, encode
from atoll.transport.tls import ClientTls
from tests.learner.runs import LIMIT_S, Child, LearnerSpec, Run, endless
from tests.transport.key_rings import KeyRing, days_ago

FRAGMENTS = 4


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    """Return a key ring with `expired`, a syncer key that expired yesterday."""
    ring = KeyRing(tmp_path_factory.mktemp("keys") / "keys")
    ring.authority.add("boss", is_operator=True)
    with days_ago(3):
        ring.authority.renew("syncer", days=2)
    shutil.copytree(ring["syncer"], ring["expired"])
    ring.authority.renew("syncer")
    return ring


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, ring: KeyRing) -> KeyRing:
    """Return keys of another authority. Their syncer trusts ours."""
    other = KeyRing(tmp_path_factory.mktemp("others") / "keys")
    shutil.copy(ring["syncer"] / "authority.pem", other["syncer"] / "authority.pem")
    return other


@pytest.fixture(scope="module")
def run(ring: KeyRing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Start one run for all tests. It trains during all of them, and no test may affect it."""
    directory, settings = tmp_path_factory.mktemp("run"), endless(fragments=FRAGMENTS, every_steps=2)
    with Run(directory, settings, keys=ring.syncer, shards=2, planted="short-handshake-timeouts") as run:
        learners = run.joined(*(LearnerSpec(n, pace_s=0.005, keys=ring[name]) for n, name in ((1, "one"), (2, "two"))))
        run.go(*learners)
        run.until(run.merges(FRAGMENTS), "the run trains")
        yield run
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        for child in (run.syncer, *run.shards):
            assert run.log_lines(child, " ERROR ") == []
            assert run.log_lines(child, "never retrieved") == []
        run.assert_clean()


@pytest.fixture
def run_is_unaffected(run: Run) -> Iterator[None]:
    before = run.status()
    yield
    run.until(run.merges(before["merges"] + 2 * FRAGMENTS), "the run continues")
    after = run.status()
    learners = [(each["standing"], each["link"], each["incarnation"]) for each in after["learners"]]
    assert learners == [("live", "up", 1)] * 2
    for old, new in zip(before["fragments"], after["fragments"], strict=True):
        assert new["version"] > old["version"]
    assert run.log_lines(run.syncer, "disconnected") == []


async def close_session(http: aiohttp.ClientSession) -> None:
    """Close the session, and wait until its connections are closed, with the closing handshake of TLS."""
    await http.close()
    async with asyncio.timeout(LIMIT_S):
        while len(asyncio.get_running_loop()._selector.get_map()) > 1:  # type: ignore[attr-defined] # its own pipe
            timer = asyncio.Event()
            asyncio.get_running_loop().call_later(0.01, timer.set)
            await timer.wait()


def refused_count(run: Run, code: str) -> int:
    return int(run.status()["refused"].get(code, 0))


def assert_refused(run: Run, shard: Child, code: str, message: str) -> None:
    """Check that the syncer counts the refusal and the shard logs the reason. The shard keeps retrying."""
    run.until(lambda _: refused_count(run, code) >= 2, "the refusal is counted")
    run.until(lambda _: run.log_lines(shard, message), "the shard logs the reason")
    shard.kill()


@pytest.mark.usefixtures("run_is_unaffected")
def test_run_with_keys_trains_over_tls(run):
    assert run.log_lines(run.syncer, "TLS, for clients with a key")
    run.until(lambda status: status["bytes"]["up"] and status["bytes"]["down"], "the shards transfer values")


@pytest.mark.usefixtures("run_is_unaffected")
def test_learner_key_is_refused_for_shard(run, ring):
    shard = run.start_shard(0, "learner-key", keys=ring["one"])
    assert_refused(run, shard, "role", "the key of one is not one of an operator")
    assert run.log_lines(run.syncer, "the key of one is not one of an operator")


@pytest.mark.usefixtures("run_is_unaffected")
def test_expired_shard_key_is_refused_by_name(run, ring):
    shard = run.start_shard(0, "expired", keys=ring["expired"])
    assert_refused(run, shard, "expired", "the key of syncer expired on")
    assert run.log_lines(run.syncer, "the key of syncer expired on")


@pytest.mark.usefixtures("run_is_unaffected")
def test_shard_key_of_another_authority_is_refused(run, other):
    shard = run.start_shard(0, "of-others", keys=other["syncer"])
    assert_refused(run, shard, "authority", "it does not trust the authority of this key")
    assert run.log_lines(run.syncer, "not signed by an authority that is trusted here")


@pytest.mark.usefixtures("run_is_unaffected")
def test_shard_without_key_is_refused(run):
    shard = run.start_shard(0, "without", plain=True)
    assert_refused(run, shard, "plain-text", "this port requires TLS, and the client sent plain text")


@pytest.mark.usefixtures("run_is_unaffected")
def test_revoked_key_closes_shard_link(run, ring):
    """Revoke the key of a second shard 0 before it sends its inventory. The connected shard 0 stays connected."""

    async def connect() -> tuple[str, str]:
        connector = aiohttp.TCPConnector(ssl=ClientTls(ring["boss"]).make_context())
        async with aiohttp.ClientSession(f"https://{run.address}", connector=connector) as http:
            settings = await (await http.get("/v1/run")).json()
            async with http.ws_connect("/v1/head") as socket:
                hello = ShardHello(0, 2, "127.0.0.1:1", run.settings.config.run_id, settings["founded_at"], True)
                await socket.send_str(encode(hello))
                answer = decode((await socket.receive(LIMIT_S)).data, "syncer")
                assert type(answer) is SyncerHello
                ring.authority.revoke("boss")
                last = await socket.receive(LIMIT_S)
            await close_session(http)
            return last.type.name, str(last.extra)

    assert asyncio.run(connect()) == ("CLOSE", "the key of boss is revoked: ask for a new one")
    assert refused_count(run, "revoked") == 1


def test_learner_refuses_shard_without_syncer_key(run, ring):
    """A learner's certificate is not valid for a server: a stolen one cannot be used to collect models."""
    shard = run.start_shard(0, "false", keys=ring["one"])

    async def connect() -> None:
        connector = aiohttp.TCPConnector(ssl=ClientTls(ring["two"]).make_context())
        async with aiohttp.ClientSession(connector=connector) as http:
            with pytest.raises(aiohttp.ClientConnectorCertificateError, match="unsuitable certificate purpose"):
                await http.get(f"https://{shard.address}/v1/fragment/0/0")
            await close_session(http)

    asyncio.run(connect())
    shard.kill()


@pytest.mark.long
def test_shards_with_certificate_but_no_keys_are_refused(ring, tmp_path, capsys):
    files = ["--certificate", str(ring["syncer"] / "certificate.pem"), "--private-key", str(ring["syncer"] / "key.pem")]
    assert main(["syncer", "--out", str(tmp_path / "run"), "--token", "a long secret", "--shards", "2", *files]) == 2
    assert "authenticate each other by keys: give --keys in place of --certificate" in capsys.readouterr().err
