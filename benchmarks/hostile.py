"""The hostile at a syncer's port, for tests and benchmarks: each kind of docs/security.md, as visits at a pace.

A visit is one try of one kind, from its connection to its end; it returns what became of it. A storm begins so many
visits per second and keeps at most so many open. The syncer asks for keys and a token, so that every kind means
something; what the hostile have got hold of is in `AttackTarget`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp

from atoll.core.protocol import Contribution, Ping, Pong, Pull, Ready, Report
from atoll.core.reasons import Reason
from atoll.core.types import RoundId
from atoll.store.run_settings import RunSettings
from atoll.tensors.plan import FragmentPlan
from atoll.transport.tls import ClientTls
from atoll.transport.wire import FrameKind, encode_frame_head
from tests.syncer.scripted_learner import ScriptedLearner

SCHEDULE_INTERVAL_S = 0.02
HEADER_INTERVAL_S = 0.5
"""Between two headers of a request that never ends."""

REPORT_INTERVAL_S = 0.02
VISIT_TIMEOUT_S = 90.0
"""More than a syncer gives anybody who does not say who it is."""

LONG_HEADER = 100 * 2**10
LONG_BODY = 2**20
LONG_MESSAGE = 5 * 2**20
CLAIMED_BYTES = 2**60

TALLY_TIMEOUT_S = 30.0
BASELINE_FILES = 256

DISCONNECTED = "cut off"
"""Before it was answered, as happens to the oldest of too many."""

NETWORK_ERRORS = (aiohttp.ClientError, asyncio.IncompleteReadError, OSError, TimeoutError)


class AttackTarget(NamedTuple):
    """A syncer that asks for keys and a token, and what the hostile know of it."""

    address: str
    token: str  # used with the key `own` only
    settings: RunSettings
    plan: FragmentPlan
    ca: Path  # the certificate of the authority, which is no secret
    own: Path  # the key of an island that is let in as `learner`, and means harm
    learner: int
    victim: int  # the learner as which it would like to speak
    foreign: Path  # a key of another authority
    records: tuple[bytes, ...] = ()  # what others have sent, connection by connection


class Attacker:
    """Its methods are visits. Each is given its number, by which it varies."""

    def __init__(self, prey: AttackTarget) -> None:
        self.prey = prey
        host, _, port = prey.address.rpartition(":")
        self._place = host.strip("[]"), int(port)
        self._nobody = ClientTls(ca=prey.ca).make_context()
        self._own = ClientTls(prey.own).make_context()
        self._foreign = ClientTls(prey.foreign, prey.ca).make_context()

    # ------------------------------------------------------------------------------------------ without being let in

    async def no_token(self, number: int) -> str:
        """With a key and without the token, with a wrong one, and with neither key nor token."""
        header = "Authorization: Bearer wrong horse battery staple\r\n" if number % 3 == 1 else ""
        head = f"GET /v1/run HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode()
        return await self._asked(self._nobody if number % 3 == 2 else self._own, head)

    async def wrong_key(self, number: int) -> str:
        try:
            return await self._asked(self._foreign, b"GET /v1/run HTTP/1.1\r\nHost: x\r\n\r\n")
        except ssl.SSLError:
            return "alert"

    async def slow_loris(self, number: int) -> str:
        """A request whose headers never end."""
        reader, writer = await self._opened(self._nobody)
        try:
            writer.write(b"GET /v1/run HTTP/1.1\r\nHost: x\r\n")
            while True:
                try:
                    async with asyncio.timeout(HEADER_INTERVAL_S):
                        await reader.read(4096)
                    return DISCONNECTED
                except TimeoutError:
                    writer.write(b"X-A: b\r\n")
        finally:
            writer.transport.abort()

    async def half_open(self, number: int) -> str:
        """A connection, and not a word."""
        return await self._silent(b"")

    async def random_bytes(self, number: int) -> str:
        """Half of them begin as TLS does."""
        draw = Random(number)
        start = b"\x16\x03\x01" if number % 2 else b""
        return await self._silent(start + draw.randbytes(draw.randint(1, 4096)))

    async def replayed_session(self, number: int) -> str:
        """What an honest learner has sent on one connection, to the last byte."""
        return await self._silent(self.prey.records[number % len(self.prey.records)])

    async def oversize(self, number: int) -> str:
        """Headers, bodies, frames and messages beyond every limit, the last two with a key that is good."""
        if number % 4 == 0:
            long = b"X-A: " + b"a" * LONG_HEADER
            return await self._asked(self._nobody, b"GET /v1/run HTTP/1.1\r\nHost: x\r\n" + long + b"\r\n\r\n")
        if number % 4 == 1:
            head = f"PUT /v1/contribution HTTP/1.1\r\nHost: x\r\nContent-Length: {CLAIMED_BYTES}\r\n\r\n"
            return await self._asked(self._nobody, head.encode() + bytes(LONG_BODY))
        if number % 4 == 2:
            async with self._stranger(self.prey.learner).without_link() as one:
                frame = encode_frame_head(FrameKind.CONTRIBUTION, 1, b"", b"")
                claimed = frame[:12] + CLAIMED_BYTES.to_bytes(8, "little") + frame[20:]
                return str((await one.put("/v1/contribution", claimed))[0])
        async with self._stranger(self.prey.learner) as one:
            await one.socket.send_bytes(b"ATLL\x04" + b" " * LONG_MESSAGE)
            return str((await one.wait_closed())[0] or DISCONNECTED)

    # ------------------------------------------------------------------------------------------ with a key of one's own

    async def another_identity(self, number: int) -> str:
        """With its own good key: joins, says hello, and contributes as another learner."""
        one = self._stranger(self.prey.victim)
        if number % 3 == 0:
            async with one.without_link(), one.http.post("/v1/join", json={"learner": self.prey.victim}) as answer:
                return str(answer.status)
        if number % 3 == 1:
            body = Contribution(RoundId(0, 0, 1, 1), 1, 1, 16, 16, 0)
            async with one.without_link():
                return str((await one.put("/v1/contribution", one.frame(body, one.values(0))))[0])
        async with one:
            await one.send(one.hello())
            return str((await one.wait_closed())[0])

    async def wild_values(self, number: int) -> str:
        """As itself, in perfect frames: what is not finite, or far from anything that training does."""
        one = self._stranger(self.prey.learner)
        async with one.without_link(), one.http.post("/v1/join", json={"learner": one.learner}) as answer:
            one.incarnation = int((await answer.json())["incarnation"])
        async with one:
            await one.join()
            await one.send(Ready(Reason("state-kept")))
            with contextlib.suppress(ConnectionError):  # the syncer hangs up in the middle of a word
                for step in range(1, 10**6):
                    await one.send(Report(step, 16 * step, REPORT_INTERVAL_S))
                    await one.send(Ping(step))
                    while isinstance(found := await one.receive(Pull, Pong), Pull):
                        values = one.values(found.round.fragment, (float("nan"), 1e30)[number % 2])
                        await one.put("/v1/contribution", one.frame(one.contribution(found, step), values))
                    if found is None:
                        break
                    await asyncio.sleep(REPORT_INTERVAL_S)
        return "hung up"

    # ------------------------------------------------------------------------------------------ how

    def _stranger(self, learner: int) -> ScriptedLearner:
        prey = self.prey
        return ScriptedLearner(prey.address, prey.settings, prey.plan, learner, token=prey.token, tls=self._own)

    async def _opened(self, tls: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._place, ssl=tls)

    async def _asked(self, tls: ssl.SSLContext, said: bytes) -> str:
        """The status of the answer."""
        reader, writer = await self._opened(tls)
        try:
            writer.write(said)
            line = await reader.readline()
            return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else DISCONNECTED
        finally:
            writer.transport.abort()

    async def _silent(self, said: bytes) -> str:
        """Bytes without TLS, and then nothing more, until the syncer hangs up."""
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, self._place)
            if said:
                await loop.sock_sendall(sock, said)
            reply = b""
            while data := await loop.sock_recv(sock, 65536):
                reply += data
            return "answered" if b"HTTP/1.1 2" in reply else "hung up"


class Attack(NamedTuple):
    """`ends`: all that may become of a visit, besides being cut off."""

    attempt: Callable[[Attacker, int], Awaitable[str]]
    expected_outcomes: frozenset[str]
    attempts_per_s: float  # visits that a benchmark begins
    max_concurrent: int  # and how many it keeps at once


ATTACKS: dict[str, Attack] = {
    "no token": Attack(Attacker.no_token, frozenset({"401"}), 40.0, 40),
    "wrong key": Attack(Attacker.wrong_key, frozenset({"alert"}), 40.0, 40),
    "slow-loris": Attack(Attacker.slow_loris, frozenset(), 60.0, 1000),
    "oversize": Attack(Attacker.oversize, frozenset({"400", "401", "1009"}), 20.0, 20),
    "half-open": Attack(Attacker.half_open, frozenset({"hung up"}), 400.0, 4000),
    "random bytes": Attack(Attacker.random_bytes, frozenset({"hung up"}), 100.0, 100),
    "wild values": Attack(Attacker.wild_values, frozenset({"hung up"}), 1.0, 1),
    "replayed session": Attack(Attacker.replayed_session, frozenset({"hung up"}), 40.0, 40),
    "another's identity": Attack(Attacker.another_identity, frozenset({"403", "1008"}), 40.0, 40),
}


# --------------------------------------------------------------------------------------------------------------------
# Many visits


@dataclass
class AttackTally:
    begun: int = 0
    most_at_once: int = 0
    ends: Counter[str] = field(default_factory=Counter)  # what became of those that are over

    def to_json(self) -> dict[str, Any]:
        return {"begun": self.begun, "most_at_once": self.most_at_once, "ends": dict(sorted(self.ends.items()))}


async def run_attempt(hostile: Attacker, attack: Attack, number: int, tally: AttackTally) -> None:
    try:
        async with asyncio.timeout(VISIT_TIMEOUT_S):
            end = await attack.attempt(hostile, number)
    except NETWORK_ERRORS:
        end = DISCONNECTED
    tally.ends[end] += 1


async def run_storm(
    hostile: Attacker,
    attack: Attack,
    tally: AttackTally,
    stop: asyncio.Event,
    attempts_per_s: float,
    max_concurrent: int,
) -> None:
    """Visits that are late because the processor was busy are not made up for: a pace, not a burst."""
    loop = asyncio.get_running_loop()
    there: set[asyncio.Task[None]] = set()
    due, last = 0.0, loop.time()
    while not stop.is_set():
        now = loop.time()
        due, last = min(due + (now - last) * attempts_per_s, max(1.0, 5 * SCHEDULE_INTERVAL_S * attempts_per_s)), now
        while due >= 1.0 and len(there) < max_concurrent:
            due -= 1.0
            tally.begun += 1
            task = loop.create_task(run_attempt(hostile, attack, tally.begun, tally))
            there.add(task)
            task.add_done_callback(there.discard)
        tally.most_at_once = max(tally.most_at_once, len(there))
        try:
            async with asyncio.timeout(max(SCHEDULE_INTERVAL_S, min(1.0, (1.0 - due) / attempts_per_s))):
                await stop.wait()
        except TimeoutError:
            continue
    for task in there:
        task.cancel()
    await asyncio.gather(*there, return_exceptions=True)


class AttackProcess:
    """A storm in a process of its own, from the beginning of a `with` to its end. `context` makes processes."""

    def __init__(
        self, context: Any, prey: AttackTarget, name: str, per_s: float | None = None, held: int | None = None
    ) -> None:
        attack = ATTACKS[name]
        pace = per_s if per_s is not None else attack.attempts_per_s
        most = held if held is not None else attack.max_concurrent
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_storm_child, args=(prey, name, pace, most, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        found: int = self._process.pid
        return found

    def tally(self) -> AttackTally:
        """So far."""
        self._pipe.send("tally")
        if not self._pipe.poll(TALLY_TIMEOUT_S):
            raise TimeoutError("the storm does not answer")
        found: AttackTally = self._pipe.recv()
        return found

    def __enter__(self) -> AttackProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, wrong: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # unauthenticated clients do not close their connections
        self._process.join()
        self._process.close()
        self._pipe.close()


def _storm_child(prey: AttackTarget, name: str, per_s: float, held: int, pipe: Connection) -> None:
    logging.disable()  # asyncio would log every closed connection
    warnings.simplefilter("ignore")
    raise_file_limit(held)
    asyncio.run(_storm_until_stopped(Attacker(prey), ATTACKS[name], per_s, held, pipe))


async def _storm_until_stopped(hostile: Attacker, attack: Attack, per_s: float, held: int, pipe: Connection) -> None:
    tally, stop = AttackTally(), asyncio.Event()

    def answer() -> None:
        try:
            pipe.recv()
            pipe.send(tally)
        except (EOFError, OSError):  # the process that began it has exited
            stop.set()

    asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
    await run_storm(hostile, attack, tally, stop, per_s, held)


def raise_file_limit(files: int) -> None:
    """This process may have so many files open besides the usual ones, or it is an OSError."""
    wanted = files + BASELINE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < wanted:
            raise OSError(f"{wanted} open files are needed, and this system allows {hard}")
