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
    """With `expired`, which was a key of the syncer until yesterday."""
    ring = KeyRing(tmp_path_factory.mktemp("keys") / "keys")
    ring.authority.add("boss", is_operator=True)
    with days_ago(3):
        ring.authority.renew("syncer", days=2)
    shutil.copytree(ring["syncer"], ring["expired"])
    ring.authority.renew("syncer")
    return ring


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, ring: KeyRing) -> KeyRing:
    """Keys of another authority, which trusts ours."""
    other = KeyRing(tmp_path_factory.mktemp("others") / "keys")
    shutil.copy(ring["syncer"] / "authority.pem", other["syncer"] / "authority.pem")
    return other


@pytest.fixture(scope="module")
def run(ring: KeyRing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for all of it: it trains from the first test to the last, and must not notice any of them."""
    directory, settings = tmp_path_factory.mktemp("run"), endless(fragments=FRAGMENTS, every_steps=2)
    with Run(directory, settings, keys=ring.syncer, shards=2, planted="hurried-listener") as run:
        learners = run.joined(*(LearnerSpec(n, pace_s=0.005, keys=ring[name]) for n, name in ((1, "one"), (2, "two"))))
        run.go(*learners)
        run.until(run.merges(FRAGMENTS), "the run is under way")
        yield run
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        for child in (run.syncer, *run.shards):
            assert run.log_lines(child, " ERROR ") == []
            assert run.log_lines(child, "never retrieved") == []
        run.assert_clean()


@pytest.fixture
def unhurt(run: Run) -> Iterator[None]:
    before = run.status()
    yield
    run.until(run.merges(before["merges"] + 2 * FRAGMENTS), "the run goes on")
    after = run.status()
    learners = [(each["standing"], each["link"], each["incarnation"]) for each in after["learners"]]
    assert learners == [("live", "up", 1)] * 2
    for old, new in zip(before["fragments"], after["fragments"], strict=True):
        assert new["version"] > old["version"]
    assert run.log_lines(run.syncer, "disconnected") == []


async def let_go(http: aiohttp.ClientSession) -> None:
    """Until its connections are gone: those with TLS say goodbye to each other first."""
    await http.close()
    async with asyncio.timeout(LIMIT_S):
        while len(asyncio.get_running_loop()._selector.get_map()) > 1:  # type: ignore[attr-defined] # the loop's own
            turn = asyncio.Event()
            asyncio.get_running_loop().call_later(0.01, turn.set)
            await turn.wait()


def counted(run: Run, code: str) -> int:
    return int(run.status()["refused"].get(code, 0))


def assert_refused(run: Run, shard: Child, code: str, told: str) -> None:
    """Check that the syncer counts the refusal and the shard logs the reason. The shard keeps retrying."""
    run.until(lambda _: counted(run, code) >= 2, "it is counted")
    run.until(lambda _: run.log_lines(shard, told), "the shard is told")
    shard.kill()


@pytest.mark.usefixtures("unhurt")
def test_a_run_with_keys_trains_over_tls(run):
    assert run.log_lines(run.syncer, "TLS, for clients with a key")
    run.until(lambda status: status["bytes"]["up"] and status["bytes"]["down"], "values go by way of the shards")


@pytest.mark.usefixtures("unhurt")
def test_the_key_of_an_island_is_not_one_of_a_shard(run, ring):
    shard = run.start_shard(0, "of-an-island", keys=ring["one"])
    assert_refused(run, shard, "role", "the key of one is not one of an operator")
    assert run.log_lines(run.syncer, "the key of one is not one of an operator")


@pytest.mark.usefixtures("unhurt")
def test_an_expired_key_is_refused_by_name(run, ring):
    shard = run.start_shard(0, "expired", keys=ring["expired"])
    assert_refused(run, shard, "expired", "the key of syncer expired on")
    assert run.log_lines(run.syncer, "the key of syncer expired on")


@pytest.mark.usefixtures("unhurt")
def test_a_key_of_another_authority_is_refused(run, other):
    shard = run.start_shard(0, "of-others", keys=other["syncer"])
    assert_refused(run, shard, "authority", "it does not trust the authority of this key")
    assert run.log_lines(run.syncer, "not of an authority that is trusted here")


@pytest.mark.usefixtures("unhurt")
def test_a_shard_without_a_key_is_refused(run):
    shard = run.start_shard(0, "without", plain=True)
    assert_refused(run, shard, "plain-text", "this port speaks TLS, and plain text came")


@pytest.mark.usefixtures("unhurt")
def test_the_link_of_a_key_that_is_revoked_is_closed(run, ring):
    """One that has said that it is shard 0, and not yet what it holds: the one that is here stays."""

    async def knock() -> tuple[str, str]:
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
            await let_go(http)
            return last.type.name, str(last.extra)

    assert asyncio.run(knock()) == ("CLOSE", "the key of boss is revoked: ask for a new one")
    assert counted(run, "revoked") == 1


def test_learner_refuses_shard_without_syncer_key(run, ring):
    """A learner's certificate is not valid for a server: a stolen one cannot be used to collect models."""
    shard = run.start_shard(0, "posing", keys=ring["one"])

    async def knock() -> None:
        connector = aiohttp.TCPConnector(ssl=ClientTls(ring["two"]).make_context())
        async with aiohttp.ClientSession(connector=connector) as http:
            with pytest.raises(aiohttp.ClientConnectorCertificateError, match="unsuitable certificate purpose"):
                await http.get(f"https://{shard.address}/v1/fragment/0/0")
            await let_go(http)

    asyncio.run(knock())
    shard.kill()


@pytest.mark.long
def test_without_keys_of_an_authority_there_is_no_tls_between_shards(ring, tmp_path, capsys):
    files = ["--certificate", str(ring["syncer"] / "certificate.pem"), "--private-key", str(ring["syncer"] / "key.pem")]
    assert main(["syncer", "--out", str(tmp_path / "run"), "--token", "a long secret", "--shards", "2", *files]) == 2
    assert "authenticate each other by keys: give --keys in place of --certificate" in capsys.readouterr().err
