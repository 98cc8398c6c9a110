"""A syncer and learners as real processes, bounded in time, for tests that break them.

Children come from a fork server that has torch loaded. A learner trains on command and reports over a pipe. Tests read
the status of the run from the syncer, by GET /v1/status. Nothing here waits for a fixed time: a wait ends with its
condition, with the unexpected end of a child, or with a failure that shows the logs.
"""

from __future__ import annotations

import faulthandler
import http.client
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch._dynamo  # the first optimizer of a process imports it in seconds; the fork server imports it once for all
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll.cli.check import check_with_progress
from atoll.core.types import Limits, RunConfig
from atoll.learner.api import Learner
from atoll.sim.check_tapes import CheckResult
from atoll.sim.checkers import create_checkers
from atoll.store.run_settings import RunSettings
from atoll.syncer import main
from atoll.syncer.main import serve_syncer
from atoll.syncer.shards.process import serve_shard
from atoll.tape.files import RunTapes
from atoll.tape.replay import replay
from atoll.tensors.settings import Numerics
from atoll.transport.endpoint import parse_endpoint
from atoll.transport.tls import ClientTls, KeyFiles, find_key_files
from tests.learner import fault_injection
from tests.learner.small_models import BATCH, Work, values, work

LIMIT_S = 300.0
"""Limit of every single wait. It only ends a test that hangs: the end of a child is noticed at once.

On a busy machine the fork server alone needs more than 20 s to import torch.
"""

POLL_INTERVAL_S = 0.02

T = TypeVar("T")

QUICK = Limits(initial_wait_s=5.0, initial_backoff_s=0.05, max_backoff_s=0.5)
"""Limits of a run whose connections are broken on purpose: tests must not wait for the backoff."""


def config(**settings: Any) -> RunConfig:
    """Return the config of a run that ends after a few merges."""
    defaults: dict[str, Any] = {
        "run_id": "test",
        "fragments": 3,
        "every_steps": 3,
        "budget_merges": 12,
        "limits": QUICK,
    }
    return RunConfig(**(defaults | settings))


def endless(**settings: Any) -> RunConfig:
    """Return the config of a run that ends on request."""
    return config(budget_merges=None, **settings)


def processes() -> Any:
    """Return the multiprocessing context of all children."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.learner.runs"])
    return context


# --------------------------------------------------------------------------------------------------------------------
# The children


@dataclass(frozen=True)
class LearnerSpec:
    """Settings of a learner.

    `number` is also the seed: every learner starts with its own weights and data. `planted` names injected faults.
    """

    number: int
    model: str = "plain"
    dtype: str = "float32"
    flip: bool = False
    token: str | None = None
    pace_s: float = 0.002  # pause between two steps, in which the learner polls for commands
    join_timeout_s: float | None = LIMIT_S
    planted: str = ""
    has_run_directory: bool = True  # for its tape and parts
    max_rate: str | None = None
    streams: int | None = None
    notice_s: float | None = None
    disconnect_timeout_s: float | None = None
    draws: bool = False  # draw from the generator of torch after every step, and store the number in `extra_state`
    keys: Path | None = None
    ca: Path | None = None


def _begin(log: Path) -> None:
    torch.set_num_threads(1)
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115 - until the end of the process
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(name)s %(levelname)s %(message)s", force=True)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    threading.Thread(target=_end_with_the_test, daemon=True).start()


def _end_with_the_test() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def syncer_child(
    directory: Path,
    settings: RunSettings,
    port: int,
    token: str | None,
    bug: str,
    keys: KeyFiles | None,
    host: str,
    serve_end_s: float,
    log: Path,
    pipe: Connection,
) -> None:
    _begin(log)
    fault_injection.inject(bug, directory)
    main.LINGER_S = 0.2  # for the last acknowledgements; loopback is fast
    try:
        finished = serve_syncer(
            directory,
            settings,
            host=host,
            port=port,
            token=token,
            on_ready=lambda address: pipe.send(("ready", address)),
            on_finished=lambda syncer: save_file(syncer.published_model(), directory / "published.safetensors"),
            keys=keys,
            serve_end_s=serve_end_s,
        )
        pipe.send(("ended", finished))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("failed", type(error).__name__, str(error)))


def shard_child(
    directory: Path,
    shard: int,
    shards: int,
    head: str,
    token: str | None,
    bug: str,
    keys: Path | None,
    log: Path,
    pipe: Connection,
) -> None:
    _begin(log)
    fault_injection.inject(bug, directory)
    try:
        ready = partial(_send_ready, pipe)
        files = find_key_files(keys, for_syncer=True) if keys is not None else None
        serve_shard(
            directory, shard, shards, parse_endpoint(head, keys), port=0, token=token, on_ready=ready, keys=files
        )
        pipe.send(("ended", True))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("failed", type(error).__name__, str(error)))


def _send_ready(pipe: Connection, address: str) -> None:
    pipe.send(("ready", address))


def standby_child(
    directory: Path, settings: RunSettings, port: int, token: str | None, after_s: float, log: Path, pipe: Connection
) -> None:
    _begin(log)
    main.LINGER_S = 0.2
    try:
        takeover = main.wait_to_take_over(directory, after_s, lambda: pipe.send(("waits", True)))
        pipe.send(("turn", takeover))
        if takeover is None:
            return
        finished = serve_syncer(
            directory,
            settings,
            port=port,
            token=token,
            on_ready=lambda address: pipe.send(("ready", address)),
            on_finished=lambda syncer: save_file(syncer.published_model(), directory / "published.safetensors"),
            take_over=takeover.is_forced,
        )
        pipe.send(("ended", finished))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("failed", type(error).__name__, str(error)))


def learner_child(directory: Path, address: str, spec: LearnerSpec, log: Path, pipe: Connection) -> None:
    _begin(log)
    fault_injection.inject(spec.planted, directory)
    job = work(spec.model, spec.number, spec.dtype, spec.flip)
    random_numbers: list[float] = []
    try:
        with Learner(
            job.model,
            job.optimizer,
            address,
            spec.token,
            keys=spec.keys,
            ca=spec.ca,
            learner=spec.number,
            run_directory=directory if spec.has_run_directory else None,
            join_timeout_s=spec.join_timeout_s,
            extra_state=(lambda: {"drawn": random_numbers[-1:]}) if spec.draws else None,
            max_rate=spec.max_rate,
            streams=spec.streams,
            notice_s=spec.notice_s,
            disconnect_timeout_s=spec.disconnect_timeout_s,
        ) as learner:
            moments = [float(state["step"]) for state in job.optimizer.state.values()]
            report = {"learner": learner.id, "incarnation": learner.incarnation, "moments": max(moments, default=0.0)}
            report |= {"finished": learner.finished, "lr_scale": learner.lr_scale}
            next_drawn = float(torch.rand(1, generator=_same_generator()))
            report |= {"restored": learner.restored_state, "next_drawn": next_drawn}
            pipe.send(("joined", report))
            _train(learner, job, spec, pipe, random_numbers)
        save_file(_contiguous(values(job.model)), model_file(directory, learner.id))
        threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        last: dict[str, Any] = {
            "finished": learner.finished,
            "drained": learner.drained,
            "stats": learner.stats()._asdict(),
            "threads": threads,
        }
        pipe.send(("ended", last))
    except BaseException as error:
        traceback.print_exc()
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("atoll")]
        pipe.send(("failed", type(error).__name__, str(error), threads))


def _same_generator() -> torch.Generator:
    """Return a generator that draws the next numbers of torch without drawing them from torch."""
    same = torch.Generator()
    same.set_state(torch.get_rng_state())
    return same


def _train(learner: Learner, job: Work, spec: LearnerSpec, pipe: Connection, random_numbers: list[float]) -> None:
    """Execute commands: "go" trains on, ("train", n) takes n steps, "hold" waits, "break" leaves the loop."""
    steps_left, requested, number = 0.0, 0, 0
    boundaries_s: list[float] = []
    while not learner.finished:
        if pipe.poll(LIMIT_S if steps_left == 0 else spec.pace_s):
            command, count = pipe.recv()
            if command == "break":
                return
            if command == "raise":
                raise ArithmeticError("an error in the user's loop")
            if command == "poison":
                with torch.no_grad():
                    next(job.model.parameters()).fill_(float("nan"))
            if command == "wild":  # finite, and far from all values of training
                with torch.no_grad():
                    next(job.model.parameters()).add_(float(count))
            if command == "small files":  # a larger write fails in the middle, as on a full disk
                resource.setrlimit(resource.RLIMIT_FSIZE, (count, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            if command == "hold":
                steps_left = 0
                pipe.send(("held", number))
            elif command in ("go", "train"):
                steps_left, requested, boundaries_s = (float("inf") if command == "go" else count), count, []
            continue
        if steps_left == 0:
            raise TimeoutError("no command from the test")
        loss = job.step(number)
        if spec.draws:
            random_numbers.append(float(torch.rand(1)))
        before = learner.stats().boundary_s
        learner.step(tokens=BATCH, loss=loss)
        boundaries_s.append(learner.stats().boundary_s - before)
        number += 1
        steps_left -= 1
        if steps_left == 0:
            pipe.send(("trained", {"steps": requested, "boundaries_s": boundaries_s, "link": learner.stats().link}))


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def model_file(directory: Path, learner: int) -> Path:
    return directory / f"learner-{learner}.safetensors"


# --------------------------------------------------------------------------------------------------------------------
# Control by the test


class Child:
    """One process. Its end is an error unless `expected_to_end` is set."""

    def __init__(self, name: str, log: Path, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.name = name
        self.log = log
        self.address = ""
        self.expected_to_end = False
        context = processes()
        self.pipe, pipe_of_child = context.Pipe()
        self.process: BaseProcess = context.Process(target=target, args=(*args, log, pipe_of_child), name=name)
        self.process.start()
        pipe_of_child.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def expect(self, kind: str, limit_s: float = LIMIT_S) -> Any:
        """Return the payload of the next message, which must be of this kind."""
        message = self.receive_any(limit_s)
        assert message[0] == kind, f"{self.name} sent {message}, {kind!r} was expected\n{self.logged()}"
        return message[1] if len(message) == 2 else message[1:]

    def receive_any(self, limit_s: float = LIMIT_S) -> tuple[Any, ...]:
        if not self.pipe.poll(limit_s):
            os.kill(self.pid, signal.SIGUSR1)
            self.process.join(0.5)
            raise AssertionError(f"{self.name} sent nothing within {limit_s:g} s\n{self.logged()}")
        try:
            message: tuple[Any, ...] = self.pipe.recv()
        except EOFError:
            raise AssertionError(f"{self.name} ended without a message\n{self.logged()}") from None
        return message

    def command(self, command: str, count: int = 0) -> None:
        self.pipe.send((command, count))

    def ended(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end of the process. Return its exit code."""
        self.expected_to_end = True
        self.process.join(limit_s)
        if self.process.exitcode is None:
            os.kill(self.pid, signal.SIGUSR1)
            self.process.join(0.5)
        assert self.process.exitcode is not None, f"{self.name} does not end\n{self.logged()}"
        return self.process.exitcode

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self.expected_to_end = True
        self.process.kill()
        assert self.ended() == -signal.SIGKILL

    def logged(self) -> str:
        text = self.log.read_text() if self.log.exists() else ""
        return f"--- {self.log.name}\n{text[-6000:]}"

    def close(self) -> None:
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(LIMIT_S)
        self.process.close()
        self.pipe.close()


class Run:
    """Processes and directory of a run. The end of the block ends every process."""

    def __init__(
        self,
        directory: Path,
        run: RunConfig | None = None,
        numerics: Numerics | None = None,
        token: str | None = None,
        planted: str = "",
        extra: dict[str, Any] | None = None,
        keys: KeyFiles | None = None,
        host: str = "127.0.0.1",
        shards: int = 0,
        serve_end_s: float = 0.0,
    ) -> None:
        self.serve_end_s = serve_end_s
        self.directory = directory
        self.settings = RunSettings(run or config(), numerics or Numerics(), extra or {}, shards=shards)
        self.token = token
        self.planted = planted
        self.keys = keys
        self.host = host
        self.address = ""
        self.children: list[Child] = []
        self.syncer = self.start_syncer()
        self.shards = [self.start_shard(number) for number in range(shards)]

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.close()

    # ------------------------------------------------------------------------------------------ processes

    def start_syncer(self) -> Child:
        """Start the first syncer, or another one on the same directory and port."""
        port = int(self.address.rpartition(":")[2]) if self.address else 0
        log = self.directory / "logs" / f"syncer-{len(self.children)}.log"
        listener = (self.keys, self.host, self.serve_end_s)
        args = (self.directory, self.settings, port, self.token, self.planted, *listener)
        self.syncer = Child("syncer", log, syncer_child, args)
        self.children.append(self.syncer)
        self.address = self.syncer.expect("ready")
        return self.syncer

    def start_shard(
        self, number: int, folder: str = "", planted: str = "", keys: Path | None = None, plain: bool = False
    ) -> Child:
        """Start a shard with the key of the syncer, with `keys`, or without keys (`plain`)."""
        log = self.directory / "logs" / f"shard-{number}-{len(self.children)}.log"
        shard_directory = self.directory / "shards" / (folder or str(number))
        if keys is None and self.keys is not None and not plain:
            keys = self.keys.certificate.parent
        args = (shard_directory, number, self.settings.shards, self.address, self.token, planted, keys)
        child = Child(f"shard {number}", log, shard_child, args)
        self.children.append(child)
        child.address = child.expect("ready")
        return child

    def start_standby(self, port: int, after_s: float, directory: Path | None = None) -> Child:
        """Start a standby, which waits. `took_over` makes it the syncer of the run."""
        log = self.directory / "logs" / f"standby-{len(self.children)}.log"
        args = (directory or self.directory, self.settings, port, self.token, after_s)
        child = Child("standby", log, standby_child, args)
        self.children.append(child)
        return child

    def took_over(self, standby: Child) -> Any:
        """Wait until a standby serves the run. Return the cause of its takeover."""
        takeover = standby.expect("turn")
        self.address = standby.expect("ready")
        self.syncer = standby
        return takeover

    def start(self, spec: LearnerSpec | int, address: str = "") -> Child:
        """Start a learner, which joins and then waits for commands."""
        spec = LearnerSpec(spec, token=self.token) if isinstance(spec, int) else spec
        log = self.directory / "logs" / f"learner-{spec.number}-{len(self.children)}.log"
        args = (self.directory, address or self.address, spec)
        child = Child(f"learner {spec.number}", log, learner_child, args)
        self.children.append(child)
        return child

    def joined(self, *specs: LearnerSpec | int) -> list[Child]:
        """Start these learners and wait until all have joined. They do not train yet."""
        learners = [self.start(spec) for spec in specs]
        for learner in learners:
            learner.expect("joined")
        return learners

    def go(self, *learners: Child) -> None:
        for learner in learners:
            learner.command("go")

    def finish(self, *learners: Child) -> dict[str, Tensor]:
        """Wait until all learners have reached the end of the run. Return the published model."""
        for learner in learners:
            report = learner.expect("ended")
            assert report["finished"], report
            assert report["threads"] == ["Thread-1 (_end_with_the_test)"], report
            assert learner.ended() == 0
        assert self.syncer.expect("ended") is True
        assert self.syncer.ended() == 0
        return load_file(self.directory / "published.safetensors")

    # ------------------------------------------------------------------------------------------ requests

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        if self.token is not None:
            headers = {"Authorization": f"Bearer {self.token}"} | headers
        connection = http.client.HTTPConnection(self.address, timeout=LIMIT_S)
        if self.keys is not None:  # the keys of the syncer itself
            by_key = self.keys.authority is not None
            tls = ClientTls(self.keys.certificate.parent) if by_key else ClientTls(pinned=self.keys)
            context = tls.make_context()
            connection = http.client.HTTPSConnection(self.address, timeout=LIMIT_S, context=context)
        try:
            connection.request(method, path, body or None, headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        try:
            code, body = self.request("GET", "/v1/status")
        except (ConnectionResetError, http.client.RemoteDisconnected):
            if self.planted != "short-handshake-timeouts":
                raise
            return self.status()  # a busy machine is too slow for a timeout of half a second
        assert code == 200, body
        status: dict[str, Any] = json.loads(body)
        return status

    def until(self, condition: Callable[[dict[str, Any]], T | None], what: str, limit_s: float = LIMIT_S) -> T:
        """Poll the status of the run until the condition returns a true value. Return this value."""
        end = time.monotonic() + limit_s
        while True:
            status = self.status()
            found = condition(status)
            if found:
                return found
            message = f"{what}: timeout\n{json.dumps(status, indent=1)}\n{self.logs()}"
            assert time.monotonic() < end, message
            self.watch(POLL_INTERVAL_S)

    def watch(self, wait_s: float) -> None:
        """Wait, unless a child ends unexpectedly."""
        watched = {child.process.sentinel: child for child in self.children if not child.expected_to_end}
        for sentinel in multiprocessing.connection.wait(list(watched), wait_s):
            child = watched[sentinel]  # type: ignore[index]
            last = child.pipe.recv() if child.pipe.poll() else "nothing"
            if last == "nothing" or last[0] == "failed":
                raise AssertionError(f"{child.name} ended, its last message: {last}\n{child.logged()}")
            child.expected_to_end = True

    def learner(self, number: int, **expected: Any) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
        """Return a condition for `until`: the status of a learner, once it has all these values."""

        def find(status: dict[str, Any]) -> dict[str, Any] | None:
            found = [each for each in status["learners"] if each["learner"] == number]
            return next((each for each in found if expected.items() <= each.items()), None)

        return find

    def merges(self, count: int) -> Callable[[dict[str, Any]], bool]:
        return lambda status: bool(status["merges"] >= count)

    def logs(self) -> str:
        return "\n".join(child.logged() for child in self.children)

    def log_lines(self, child: Child, text: str) -> list[str]:
        log = child.log.read_text() if child.log.exists() else ""
        return [line for line in log.splitlines() if text in line]

    # ------------------------------------------------------------------------------------------ checks

    def end(self) -> None:
        """Request the end of a run that has no budget."""
        assert self.request("POST", "/v1/finish")[0] == 204

    def verdict(self) -> CheckResult:
        """Return the result of `atoll check` and `atoll replay` for the tapes."""
        tapes = RunTapes(self.directory)
        for reader in tapes.readers.values():
            replay(reader.header, reader)
        verdict = check_with_progress(tapes, create_checkers(tapes.config))
        assert verdict.violation is None, f"{verdict.violation}\n{self.logs()}"
        return verdict

    def assert_clean(self) -> None:
        """Assert that the tapes are complete up to the end of the run, without a violation."""
        verdict = self.verdict()
        assert verdict.finished
        assert verdict.gaps == []

    def assert_same(self, published: dict[str, Tensor], *numbers: int) -> None:
        """Assert that these learners have the published model, bit for bit in their own dtype."""
        for number in numbers:
            own = load_file(model_file(self.directory, number))
            shared = {name: tensor for name, tensor in own.items() if name in published}
            assert shared.keys() == published.keys()
            for name, tensor in shared.items():
                expected = published[name].to(tensor.dtype)
                assert torch.equal(tensor, expected), f"{name} at learner {number} is not the published one"


def versions_by_epoch(directory: Path) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield, for every syncer that left a tape, its epoch and the versions that it started from."""
    for actor, reader in RunTapes(directory).readers.items():
        if actor.learner == 0:
            restored = reader.header.restored
            found = {p: record.version for p, record in restored.versions.items()} if restored is not None else {}
            yield actor.generation, found


def ignore_missing(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()


__all__ = ["LIMIT_S", "Child", "LearnerSpec", "Run", "config", "endless", "field", "processes", "versions_by_epoch"]
