"""TLS between learners and syncer: authentication, authorization, refusal messages and counters."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from atoll.chaos.relay import Relays
from atoll.core.protocol import Contribution, Left
from atoll.core.types import RoundId
from atoll.errors import KeysRefusedError, LearnerRefusedError
from atoll.learner.api import Learner
from atoll.tensors.settings import Numerics
from atoll.transport.auth import check_access
from atoll.transport.endpoint import TlsVerificationError, read_address_file, send_request
from atoll.transport.tls import ClientTls, KeyFiles, ServerTls
from atoll.transport.wire import FrameKind, SliceHeader, encode_frame_head
from tests.chaos.relays import relay_to
from tests.learner.in_process import learner_of, train
from tests.learner.runs import LIMIT_S, LearnerSpec, Run, endless
from tests.learner.small_models import work
from tests.syncer.raw_learner import RawLearner
from tests.transport.key_rings import KeyRing, days_ago

TOKEN = "correct horse battery staple"


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    ring = KeyRing(tmp_path_factory.mktemp("keys") / "keys")
    ring.add("old", 7, is_expired=True)
    ring.add("stolen", 8)
    ring.authority.revoke("stolen")
    ring.authority.add("boss", is_operator=True)
    ring.authority.add("both", (21, 22))
    ring.authority.add("fleet", is_any_learner=True)
    return ring


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    """Return keys of another authority."""
    return KeyRing(tmp_path_factory.mktemp("others") / "keys")


@pytest.fixture(scope="module")
def run(ring: KeyRing, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Start one run for all tests. A learner trains during all of them, and no test may affect it."""
    directory, settings = tmp_path_factory.mktemp("run"), endless(fragments=2, every_steps=2)
    with Run(directory, settings, keys=ring.syncer, planted="short-handshake-timeouts") as run:
        (good,) = run.joined(LearnerSpec(1, pace_s=0.005, keys=ring["one"]))
        run.go(good)
        run.until(run.merges(2), "the run trains")
        yield run
        run.end()
        run.assert_same(run.finish(good), 1)
        assert run.log_lines(good, "connection closed: ") == []
        assert run.log_lines(run.syncer, " ERROR ") == []
        assert run.log_lines(run.syncer, "never retrieved") == []
        run.verdict()


@pytest.fixture
def run_is_unaffected(run: Run) -> Iterator[None]:
    before = run.status()
    yield
    run.until(run.merges(before["merges"] + 2), "the run continues")
    one = run.until(run.learner(1), "learner 1 is shown")
    assert (one["standing"], one["link"], one["incarnation"]) == ("live", "up", 1)


def refused_count(run: Run, code: str) -> int:
    return int(run.status()["refused"].get(code, 0))


def join_briefly(run: Run, address: str = "", **settings: Any) -> None:
    """Join with a learner of this process, and leave at once."""
    job = work()
    with Learner(job.model, job.optimizer, address or run.address, join_timeout_s=LIMIT_S, **settings):
        pass


# --------------------------------------------------------------------------------------------------------------------
# Invalid keys

INVALID_KEYS = {
    "expired": (
        "old",
        7,
        LearnerRefusedError,
        r"the key of old expired on \d{4}",
        "expired",
        "the key of old expired",
    ),
    "revoked": (
        "stolen",
        8,
        LearnerRefusedError,
        "the key of stolen is revoked",
        "revoked",
        "the key of stolen is revoked",
    ),
    "another's identity": (
        "two",
        1,
        LearnerRefusedError,
        "key of two is for 2",
        "identity",
        "cannot act as learner 1",
    ),
    "an operator's": ("boss", None, LearnerRefusedError, "the key of boss names no learner", "role", "the key of boss"),
}


def test_refused_key_creates_no_run(tmp_path, ring):
    with Run(tmp_path, endless(), keys=ring.syncer) as run:
        with pytest.raises(LearnerRefusedError, match="key of two is for 2"):
            join_briefly(run, learner=1, keys=ring["two"])
        assert not run.status()["founded"]
        assert not (tmp_path / "store" / "run.json").exists()
        other = work("taller")  # the model of the refused learner is not that of the run
        with learner_of(run, other, 1, keys=ring["one"]) as learner:
            assert learner.incarnation == 1


@pytest.mark.parametrize("name", INVALID_KEYS)
@pytest.mark.usefixtures("run_is_unaffected")
def test_invalid_key_is_refused_by_name(run, ring, name):
    keys, number, error, message, code, logged = INVALID_KEYS[name]
    before = refused_count(run, code)
    with pytest.raises(error, match=message):
        join_briefly(run, keys=ring[keys], learner=number)
    assert refused_count(run, code) == before + 1
    assert run.log_lines(run.syncer, logged)


@pytest.mark.usefixtures("run_is_unaffected")
def test_missing_key_is_refused_with_message(run, ring):
    before = refused_count(run, "no-key")
    with pytest.raises(LearnerRefusedError, match="requires a key, and the client sent none"):
        join_briefly(run, ca=ring["authority.pem"], token=TOKEN)
    assert refused_count(run, "no-key") == before + 1


@pytest.mark.usefixtures("run_is_unaffected")
def test_key_of_another_authority_is_refused_with_reason(run, ring, other):
    before = refused_count(run, "authority")
    with pytest.raises(KeysRefusedError, match="it does not trust the authority of this key"):
        join_briefly(run, keys=other["one"], ca=ring["authority.pem"])
    assert refused_count(run, "authority") > before
    assert run.log_lines(run.syncer, "not signed by an authority that is trusted here")


@pytest.mark.usefixtures("run_is_unaffected")
def test_learner_refuses_syncer_of_another_authority(run, other):
    with pytest.raises(KeysRefusedError, match="its certificate is of an authority that is not trusted here"):
        join_briefly(run, keys=other["one"])


@pytest.mark.usefixtures("run_is_unaffected")
def test_learner_refuses_syncer_with_another_name(run, ring):
    with (
        closing(Relays()) as relays,
        pytest.raises(KeysRefusedError, match="its certificate does not name this address"),
    ):
        join_briefly(run, relays.open(run.address, host="127.0.0.2").address, keys=ring["two"])


@pytest.mark.usefixtures("run_is_unaffected")
def test_learner_key_is_refused_as_syncer(run, ring, tmp_path):
    """Its key is of the same authority, but not valid for a server."""
    with (
        Run(tmp_path, keys=KeyFiles(ring["two"] / "certificate.pem", ring["two"] / "key.pem"), token=TOKEN) as false,
        pytest.raises(KeysRefusedError, match=r"not one of a syncer|unsuitable|does not name"),
    ):
        join_briefly(run, false.address, ca=ring["authority.pem"], token=TOKEN)


def test_learner_refuses_expired_syncer(tmp_path):
    with days_ago(400):
        ring = KeyRing(tmp_path / "keys")
    with (
        Run(tmp_path / "run", keys=ring.syncer) as run,
        pytest.raises(KeysRefusedError, match="its certificate has expired: renew it"),
    ):
        join_briefly(run, keys=ring["one"])


@pytest.mark.usefixtures("run_is_unaffected")
def test_plain_text_on_tls_port_is_refused(run):
    before = refused_count(run, "plain-text")
    with pytest.raises(
        LearnerRefusedError, match=r"this port requires TLS, and the client sent plain text: give --keys"
    ):
        join_briefly(run)
    assert refused_count(run, "plain-text") == before + 1


def test_tls_on_plain_text_port_is_refused(tmp_path, ring):
    with Run(tmp_path) as run:
        with pytest.raises(KeysRefusedError, match="the server answers in plain text, not TLS"):
            join_briefly(run, keys=ring["one"])
        assert run.status()["refused"] == {"tls-to-plain": 1}


@pytest.mark.usefixtures("run_is_unaffected")
def test_older_tls_version_is_refused(run, ring):
    before = refused_count(run, "tls-version")
    context = ssl.create_default_context(cafile=str(ring["authority.pem"]))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, _, port = run.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=LIMIT_S) as raw,
        pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"),
    ):
        context.wrap_socket(raw, server_hostname="localhost")
    assert refused_count(run, "tls-version") == before + 1


# --------------------------------------------------------------------------------------------------------------------
# Identity


def as_raw_learner(run: Run, keys: Path, learner: int, test: Callable[[RawLearner], Awaitable[Any]]) -> Any:
    async def run_test() -> Any:
        async with RawLearner(run, learner, keys=keys) as client:
            return await test(client)

    return asyncio.run(run_test())


@pytest.mark.usefixtures("run_is_unaffected")
def test_hello_of_another_learner_closes_the_link(run, ring):
    before = refused_count(run, "identity")

    async def test(client: RawLearner) -> tuple[int, str]:
        await client.send(client.hello())
        return await client.wait_closed()

    closing, sentence = as_raw_learner(run, ring["two"], 1, test)
    assert (closing, sentence) == (1008, "the key of two is for 2, and cannot act as learner 1")
    assert refused_count(run, "identity") == before + 1


@pytest.mark.usefixtures("run_is_unaffected")
@pytest.mark.parametrize("kind", ["single", "slice"])
def test_values_of_another_connected_learner_are_refused(run, ring, kind):
    """The message names the number, incarnation and session of the open link."""
    before = refused_count(run, "identity")

    async def test(client: RawLearner) -> tuple[int, dict[str, Any]]:
        body, values = Contribution(RoundId(0, 0, 1, 1), 1, 1, 16, 16, 0), client.values(0)
        if kind == "single":
            return await client.put("/v1/contribution", client.frame(body, values))
        header = SliceHeader(1, 1, 1, body.round, 0, values.numel()).encode()
        raw = values.numpy().tobytes()
        return await client.put("/v1/slice", encode_frame_head(FrameKind.SLICE, 0, header, raw) + header + raw)

    status, reply = as_raw_learner(run, ring["two"], 1, test)
    assert (status, reply["code"]) == (403, "identity")
    assert refused_count(run, "identity") == before + 1


@pytest.mark.usefixtures("run_is_unaffected")
def test_optimizer_state_of_another_learner_is_not_served(run, ring):
    async def test(client: RawLearner) -> tuple[int, int]:
        async with client.http.get("/v1/state/1/1") as theirs, client.http.get("/v1/state/2/1") as own:
            return theirs.status, own.status

    assert as_raw_learner(run, ring["two"], 2, test) == (403, 404)


def request(run: Run, keys: Path, method: str, path: str, body: Any = None) -> int:
    async def send() -> int:
        async with (
            RawLearner(run, 1, keys=keys).without_link() as client,
            client.http.request(method, path, json=body) as answer,
        ):
            await answer.read()
            return answer.status

    return asyncio.run(send())


@pytest.mark.usefixtures("run_is_unaffected")
def test_learner_key_is_refused_for_operator_paths(run, ring):
    control = {"kind": "grace", "value": 0.5, "requested_by": "a test"}
    assert request(run, ring["two"], "POST", "/v1/control", control) == 403
    assert request(run, ring["two"], "POST", "/v1/finish") == 403
    assert request(run, ring["two"], "GET", "/metrics") == 403
    assert request(run, ring["two"], "GET", "/v1/status") == 200
    assert request(run, ring["boss"], "GET", "/v1/status") == 200
    assert request(run, ring["boss"], "POST", "/v1/control", control) == 200
    assert request(run, ring["boss"], "POST", "/v1/join", {"learner": 1}) == 403


def join(run: Run, keys: Path, wanted: int | None) -> Any:
    async def send() -> Any:
        async with (
            RawLearner(run, 1, keys=keys).without_link() as client,
            client.http.post("/v1/join", json={"learner": wanted}) as answer,
        ):
            reply = await answer.json()
            return reply.get("learner", answer.status)

    return asyncio.run(send())


@pytest.mark.usefixtures("run_is_unaffected")
def test_key_determines_learner_number(run, ring):
    assert join(run, ring["two"], None) == 2
    assert join(run, ring["two"], None) == 2, "it keeps its number"
    assert join(run, ring["both"], None) == 21
    assert join(run, ring["both"], None) == 22
    assert join(run, ring["both"], None) == 403
    assert join(run, ring["both"], 21) == 21
    assert join(run, ring["fleet"], 77) == 77


# --------------------------------------------------------------------------------------------------------------------
# Unauthenticated connections. `short-handshake-timeouts` gives them less time.


def connect(run: Run) -> socket.socket:
    host, _, port = run.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


@pytest.mark.usefixtures("run_is_unaffected")
def test_silent_connections_are_limited_and_closed(run):
    before = refused_count(run, "unfinished")
    silent = [connect(run) for _ in range(300)]
    try:
        assert run.status()["wall_s"] > 0  # an authenticated request succeeds
        run.until(lambda status: status["refused"].get("unfinished", 0) - before >= 300, "all are closed")
        assert all(each.recv(1) == b"" for each in silent), "closed by the syncer"
    finally:
        for each in silent:
            each.close()
    assert len(run.log_lines(run.syncer, "authentication timed out")) < 50, "the log was filled by clients"


@pytest.mark.usefixtures("run_is_unaffected")
def test_incomplete_handshake_is_closed(run, ring):
    before = refused_count(run, "unfinished")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    half = ClientTls(ring["two"]).make_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        half.do_handshake()
    with connect(run) as raw:
        raw.sendall(outgoing.read())
        while raw.recv(65536):
            pass
    assert refused_count(run, "unfinished") == before + 1


@pytest.mark.usefixtures("run_is_unaffected")
def test_endless_headers_are_closed(run, ring):
    before = refused_count(run, "unfinished")
    context = ClientTls(ring["two"]).make_context()
    with connect(run) as raw, context.wrap_socket(raw, server_hostname="localhost") as safe:
        safe.sendall(b"GET /v1/run HTTP/1.1\r\nHost: x\r\n")
        began = time.monotonic()
        with pytest.raises((ConnectionError, ssl.SSLError)):  # noqa: PT012 - until the syncer closes it
            while time.monotonic() - began < LIMIT_S:
                safe.sendall(b"X-A: b\r\n")
                if select.select([safe], [], [], 0.05)[0]:  # a slow client
                    raise ConnectionError(safe.recv(1))
    assert refused_count(run, "unfinished") == before + 1


@pytest.mark.usefixtures("run_is_unaffected")
def test_random_bytes_are_refused(run):
    before = refused_count(run, "handshake")
    for data in (b"\x00" * 100, bytes(range(256)), b"\x16\x03\x01\xff\xff" + bytes(600), b"\x16\x03\x03\x00\x05hello"):
        with connect(run) as raw:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(65536):
                pass
    run.until(lambda status: status["refused"].get("handshake", 0) >= before + 4, "each is counted")


# --------------------------------------------------------------------------------------------------------------------
# Other combinations


def test_key_and_token_are_both_required(tmp_path, ring):
    with Run(tmp_path, keys=ring.syncer, token=TOKEN) as run:
        with pytest.raises(LearnerRefusedError, match="the token is missing or wrong"):
            join_briefly(run, keys=ring["one"], learner=1)
        with pytest.raises(LearnerRefusedError, match="requires a key"):
            join_briefly(run, ca=ring["authority.pem"], token=TOKEN)
        learners = run.joined(LearnerSpec(1, keys=ring["one"], token=TOKEN))
        run.go(*learners)
        run.assert_same(run.finish(*learners), 1)


def test_run_with_certificate_and_token_trains(tmp_path, ring):
    """Without learner keys, the token authenticates any learner number."""
    served = KeyFiles(ring["syncer"] / "certificate.pem", ring["syncer"] / "key.pem")
    with Run(tmp_path, keys=served, token=TOKEN) as run:
        assert run.log_lines(run.syncer, "TLS, for clients with the token")
        with pytest.raises(LearnerRefusedError, match="the token is missing or wrong"):
            join_briefly(run, ca=ring["authority.pem"], token="another token")
        with pytest.raises(KeysRefusedError, match="authority that is not trusted here"):
            join_briefly(run, f"https://{run.address}", token=TOKEN)  # the system's authorities do not include ours
        learners = run.joined(LearnerSpec(5, ca=ring["authority.pem"], token=TOKEN))
        run.go(*learners)
        run.assert_same(run.finish(*learners), 5)
        run.assert_clean()
    check_access("0.0.0.0", TOKEN, ServerTls(served))
    with pytest.raises(ValueError, match="without a token"):
        check_access("0.0.0.0", None, ServerTls(served))
    check_access("0.0.0.0", None, ServerTls(ring.syncer))


def test_local_commands_find_syncer_and_key(run, ring):
    found = read_address_file(run.directory)
    assert found is not None
    assert found.tls is not None
    status = send_request(found.address, found.token, "GET", "/v1/status", LIMIT_S, tls=found.tls)
    assert status["stage"] == "running"
    with pytest.raises(TlsVerificationError, match="authority that is not trusted"):
        send_request(found.address, None, "GET", "/v1/status", LIMIT_S, tls=ClientTls())


@pytest.mark.long
def test_slices_over_tls_survive_connection_resets(tmp_path, ring):
    settings = endless(fragments=2, every_steps=8)
    with Run(tmp_path, settings, Numerics(plan="rows"), keys=ring.syncer) as run, relay_to(run.address) as relay:
        spec = LearnerSpec(1, "wide", pace_s=0.01, planted="small-slices", keys=ring["one"])
        one = run.start(spec, relay.address)
        one.expect("joined")
        run.go(one)
        for _ in range(3):
            run.until(run.merges(run.status()["merges"] + 2), "merges go on")
            relay.reset()
            run.until(run.learner(1, standing="live", link="up", incarnation=1), "it has reconnected")
        run.end()
        run.assert_same(run.finish(one), 1)
        run.assert_clean()


def test_syncer_serves_ipv6(tmp_path, ring):
    with Run(tmp_path, keys=ring.syncer, host="::1") as run:
        assert run.address.startswith("[::1]:")
        learners = run.joined(LearnerSpec(1, keys=ring["one"]))
        run.go(*learners)
        run.assert_same(run.finish(*learners), 1)


def test_changed_dns_address_is_used_on_reconnect(tmp_path, monkeypatch):
    """The address of `head.test` changes during the run. All traffic passes a relay that forwards bytes, like a TLS
    proxy."""
    ring = KeyRing(tmp_path / "keys", ("head.test",))
    addresses: list[str] = []
    lookups: list[str] = []
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host == "head.test":
            host, _, port = addresses[-1].rpartition(":")
            lookups.append(host)
        return real(host, int(port), *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with (
        Run(tmp_path / "run", endless(), keys=ring.syncer) as run,
        closing(Relays()) as before,
        closing(Relays()) as after,
    ):
        addresses.append(before.open(run.address, host="127.0.0.2").address)
        job = work()
        with learner_of(run, job, 1, keys=ring["one"], address="head.test:7400") as learner:
            train(learner, job, 10)
            assert lookups.count("127.0.0.3") == 0
            addresses.append(after.open(run.address, host="127.0.0.3").address)
            before.close()
            while not lookups.count("127.0.0.3"):
                train(learner, job, 10)
            run.until(run.learner(1, link="up", incarnation=1), "it has reconnected at the new address")
            run.end()
            train(learner, job)
            assert learner.finished


@pytest.mark.parametrize(
    ("syncer", "settings", "sentence"),
    [
        ("head:7400", {}, r"head:7400 is another machine.*--keys DIR.*--ca FILE.*http://head:7400 is plain text"),
        ("http://head:7400", {"keys": "k"}, "plain text, and keys are for TLS"),
        ("head:7400", {"keys": "nowhere"}, r"nowhere holds no key.*atoll keys add"),
        ("head:7400", {"ca": "nowhere.pem"}, "nowhere.pem"),
    ],
)
def test_unsafe_endpoint_is_refused_before_any_request(syncer, settings, sentence):
    job = work()
    with pytest.raises((ValueError, OSError), match=sentence):  # noqa: SIM117 - the error may come from __enter__
        with Learner(job.model, job.optimizer, syncer, TOKEN, **settings):
            pass


def test_authority_directory_is_refused_as_key(ring):
    with pytest.raises(ValueError, match=r"is an authority with the keys of all: give the directory of one.*one.*two"):
        ClientTls(ring.directory).make_context()


def test_learner_key_is_enforced_on_the_link(run, ring):
    async def test(client: RawLearner) -> tuple[int, str]:
        await client.join()
        client.learner = 1
        await client.send(Left("I am learner 1, believe me"))
        return await client.wait_closed()

    assert join(run, ring["fleet"], 60) == 60
    assert as_raw_learner(run, ring["fleet"], 60, test)[0] == 1008
    assert json.dumps(run.status()["refused"])
