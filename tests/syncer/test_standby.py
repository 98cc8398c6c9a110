"""Standby syncer: it waits, takes over, and an old syncer is fenced."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from atoll.core.types import Limits
from atoll.files import write_file
from atoll.store import fencing
from atoll.store.fencing import (
    Heartbeat,
    HeartbeatWatcher,
    TakeoverDecision,
    machine_id,
    read_heartbeat,
    write_heartbeat,
)
from atoll.store.version_store import FencedError, Store, StoreInUseError
from atoll.transport.endpoint import parse_addresses, read_address_file
from tests.learner.runs import Run, config, endless, versions_by_epoch
from tests.store.store_samples import NoClaimsStore, create_store, make_members, make_tensors, make_version
from tests.store.test_store_faults import run_kills

BRISK = Limits(initial_wait_s=1.0, min_wait_s=0.25, initial_backoff_s=0.05, max_backoff_s=0.5)
AFTER_S = 2.5


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


# --------------------------------------------------------------------------------------------------------------------
# Real processes


def test_standby_takes_over_and_frozen_syncer_is_fenced(tmp_path):
    with Run(tmp_path, endless(limits=BRISK)) as run:
        port = free_port()
        addresses = f"{run.address},127.0.0.1:{port}"
        learners = [run.start(number, addresses) for number in (1, 2)]
        for learner in learners:
            learner.expect("joined")
        run.go(*learners)
        run.until(run.merges(6), "the run trains")
        standby = run.start_standby(port, AFTER_S)
        standby.expect("waits")
        before = run.status()["merges"]
        first = run.syncer
        first.send(signal.SIGSTOP)
        decision = run.took_over(standby)
        assert decision.is_forced
        assert f"has sent no heartbeat for {AFTER_S:g} s" in decision.reason
        assert run.address == f"127.0.0.1:{port}"
        status = run.until(lambda status: status if status["alive"] == 2 else None, "learners use the standby")
        assert status["epoch"] == 2
        assert status["merges"] >= before, "versions were lost"
        run.until(run.merges(status["merges"] + 6), "the run continues")
        merged = run.status()["merges"]
        first.expected_to_end = True
        first.send(signal.SIGCONT)
        kind, sentence = first.expect("failed")
        assert kind == "SupersededError"
        assert sentence.endswith("belongs to a syncer of epoch 2; this one, epoch 1, has to stop")
        assert first.ended() == 0
        assert read_heartbeat(tmp_path / "store") is not None, "it has removed the heartbeat of its successor"
        found = read_address_file(tmp_path)
        assert found is not None
        assert found.address == run.address, "commands find the old syncer"
        run.until(run.merges(merged + 6), "the run continues undisturbed")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        assert run.verdict().finished
        started = dict(versions_by_epoch(tmp_path))
        assert sum(started[2].values()) >= before


def test_standby_takes_over_address_of_killed_syncer(tmp_path):
    with Run(tmp_path, endless(limits=BRISK)) as run:
        learners = run.joined(1, 2)
        run.go(*learners)
        run.until(run.merges(6), "the run trains")
        standby = run.start_standby(int(run.address.rpartition(":")[2]), 600.0)
        standby.expect("waits")
        merges = run.status()["merges"]
        run.syncer.kill()
        assert run.took_over(standby) == TakeoverDecision("no syncer is there", False)
        run.until(run.merges(merges + 6), "the run continues")
        run.end()
        run.assert_same(run.finish(*learners), 1, 2)
        run.assert_clean()


def test_standby_exits_when_run_ends(tmp_path):
    with Run(tmp_path, config(budget_merges=6)) as run:
        learners = run.joined(1)
        standby = run.start_standby(0, 600.0)
        standby.expect("waits")
        run.go(*learners)
        run.finish(*learners)
        assert standby.expect("turn") is None
        assert standby.ended() == 0


def test_copied_directory_serves_durable_versions(tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    with Run(here, endless(limits=BRISK)) as run:
        port = free_port()
        learners = [run.start(number, f"{run.address},127.0.0.1:{port}") for number in (1, 2)]
        for learner in learners:
            learner.expect("joined")
        run.go(*learners)
        run.until(run.merges(6), "the run trains")
        run.syncer.kill()
        shutil.copytree(here / "store", elsewhere / "store")
        standby = run.start_standby(port, 600.0, elsewhere)
        assert run.took_over(standby) == TakeoverDecision("no syncer is there", False)
        merges = run.until(lambda status: status["merges"] if status["alive"] == 2 else None, "they have come over")
        run.until(run.merges(merges + 6), "the run continues")
        run.end()
        for learner in learners:
            assert learner.expect("ended")["finished"]
        assert standby.expect("ended") is True
        run.syncer.expected_to_end = True


@pytest.mark.long
def test_standby_commands_of_the_manual(tmp_path):
    """Run `atoll syncer --standby` next to `atoll syncer`, and check output and exit codes."""
    run, atoll = tmp_path / "run", [sys.executable, "-m", "atoll", "syncer", "--out", str(tmp_path / "run")]
    ports = [free_port(), free_port()]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen([*atoll, "--port", str(ports[0])], **piped)
    second = None
    try:
        assert first.stdout is not None
        assert f"listens on 127.0.0.1:{ports[0]}" in first.stdout.readline()
        line = [*atoll, "--standby", "--take-over-after", "3", "--port", str(ports[1])]
        second = subprocess.Popen(line, **piped)
        assert second.stderr is not None
        assert "Standing by" in second.stderr.readline()
        os.kill(first.pid, signal.SIGSTOP)
        assert "no heartbeat for 3 s" in second.stderr.readline()
        assert second.stdout is not None
        assert f"listens on 127.0.0.1:{ports[1]}" in second.stdout.readline()
        os.kill(first.pid, signal.SIGCONT)
        _, errors = first.communicate(timeout=300)
        assert first.returncode == 1
        assert "belongs to a syncer of epoch 2; this one, epoch 1, has to stop" in errors
        assert "Traceback" not in errors
        assert (run / "syncer.json").stat().st_mode & 0o777 == 0o600
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate(timeout=300)


# --------------------------------------------------------------------------------------------------------------------
# Heartbeats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_standby_measures_heartbeats_with_its_own_clock(tmp_path):
    clock = Clock()
    with create_store(tmp_path) as store:
        watcher = HeartbeatWatcher(tmp_path, 10.0, clock)
        for _ in range(5):
            clock.now += 9.0
            store.send_heartbeat()
            assert watcher.poll() is None
        clock.now += 9.9
        assert watcher.poll() is None
        clock.now += 0.2
        decision = watcher.poll()
        assert decision is not None
        assert decision.is_forced


def test_exited_owner_is_detected_only_on_same_machine(tmp_path, monkeypatch):
    clock = Clock()
    create_store(tmp_path).close()
    assert read_heartbeat(tmp_path) is None, "an orderly end leaves no sign"
    assert HeartbeatWatcher(tmp_path, 10.0, clock).poll() == TakeoverDecision("no syncer is there", False)
    write_heartbeat(tmp_path, 1, 1)  # as one that was killed leaves it
    assert HeartbeatWatcher(tmp_path, 10.0, clock).poll() == TakeoverDecision("no syncer is there", False)
    monkeypatch.setattr(fencing, "machine_id", lambda: "other/boot")
    watcher = HeartbeatWatcher(tmp_path, 10.0, clock)
    assert watcher.poll() is None
    clock.now += 10.0
    decision = watcher.poll()
    assert decision is not None
    assert decision.is_forced


@pytest.mark.parametrize("text", ["", "x", "a b c d", "host/boot 1 2", "host/boot 1 2 3 4", "\x00" * 200])
def test_invalid_heartbeat_is_ignored(tmp_path, text):
    (tmp_path / "alive").write_text(text)
    assert read_heartbeat(tmp_path) is None


def test_live_syncer_on_another_machine_blocks_start(tmp_path, monkeypatch):
    """Simulate a network file system without locks between machines."""
    create_store(tmp_path, 1).close()
    monkeypatch.setattr(fencing, "HEARTBEAT_INTERVAL_S", 0.1)
    over = threading.Event()

    def write_heartbeats() -> None:
        serial = 0
        while not over.wait(0.05):
            serial += 1
            (tmp_path / "alive").write_text(f"elsewhere/boot 77 1 {serial}".ljust(200))

    writer = threading.Thread(target=write_heartbeats)
    writer.start()
    try:
        while read_heartbeat(tmp_path) is None:
            pass
        with pytest.raises(StoreInUseError, match=r"in use by process 77 on elsewhere: .* --standby"):
            Store.open(tmp_path)
    finally:
        over.set()
        writer.join()
    monkeypatch.setattr(fencing, "REMOTE_HEARTBEAT_WAIT_S", 0.3)
    with Store.open(tmp_path) as store:  # the owner has exited, and its heartbeat does not change
        sign = read_heartbeat(tmp_path)
        assert sign == Heartbeat(machine_id(), os.getpid(), store.epoch, 1)


# --------------------------------------------------------------------------------------------------------------------
# Fencing


@pytest.mark.long
def test_concurrent_takeovers_leave_at_most_one_owner():
    rows = run_kills("race", "20", "Store")
    assert len(rows) == 20
    for row in rows:
        assert set(row["codes"]) <= {0, 1}, "a process failed with another error than the fencing error"
        assert row["codes"].count(0) <= 1, "two syncers have written valid versions"
        assert row["versions"] == [2 if 0 in row["codes"] else 1, 1], row
    assert sum(0 in row["codes"] for row in rows) > 0


@pytest.mark.parametrize(("kind", "left"), [(Store, 1), (NoClaimsStore, 2)])
def test_concurrent_claims_get_different_epochs(tmp_path, kind, left):
    """The second store claims an epoch between the read and the claim of the first. NoClaimsStore has the race."""
    create_store(tmp_path, 1).close()
    stores: list[Store] = []

    class Slow(kind):  # type: ignore[misc, valid-type]
        def _claim(self, epoch: int) -> int:
            stores.append(kind.open(tmp_path, is_takeover=True))
            found: int = super()._claim(epoch)
            return found

    stores.append(Slow.open(tmp_path, is_takeover=True))
    may_write = []
    for store in stores:
        try:
            store.check_epoch()
            may_write.append(store.epoch)
        except FencedError:
            continue
    assert len(may_write) == left
    for store in stores:
        store.close()


@pytest.mark.parametrize("kind", ["version", "members"])
def test_write_checked_before_takeover_fails(tmp_path, kind):
    """Fail a write whose last check was before the takeover.

    1. The old syncer checks the epoch for the last time and stalls.
    2. Another syncer takes over and reads.
    3. The old syncer continues and renames its file.
    """
    old = create_store(tmp_path, 1)
    successors: list[Store] = []
    name = tmp_path / ("fragments/000/000000002.safetensors" if kind == "version" else "members.json")
    before = name.read_bytes() if name.exists() else None
    record = make_version(0, 2) if kind == "version" else make_members(2)
    check_epoch = old.check_epoch

    def check_and_stall() -> None:
        check_epoch()
        if [*tmp_path.rglob(".*.unfinished")] and not successors:
            successors.append(Store.open(tmp_path, is_takeover=True))

    old.check_epoch = check_and_stall  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        old.write(record, make_tensors(2) if kind == "version" else None)
    assert len(successors) == 1, "no takeover happened during the write"
    assert (name.read_bytes() if name.exists() else None) == before
    with pytest.raises(FencedError):
        check_epoch()
    successors[0].write(make_version(0, 2, 2), make_tensors(5))
    assert successors[0].read_newest(0)[0] == 2
    successors[0].close()
    old.close()


def test_concurrent_writers_use_separate_temporary_files(tmp_path):
    """One process must not rename the unfinished file of another."""
    names: list[str] = []

    def list_names() -> None:
        names.extend(path.name for path in tmp_path.glob(".*"))

    write_file(tmp_path / "x", [b"ours"], before_rename=list_names)
    child = os.fork()
    if child == 0:
        write_file(tmp_path / "x", [b"theirs"], before_rename=list_names)
        os.write(2, b"")
        os._exit(0 if len(set(names)) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_several_syncer_addresses_are_parsed():
    assert parse_addresses("head:7400") == "head:7400"
    assert parse_addresses(" a:1 , b:2,a:1") == "a:1,b:2"
    for invalid in ("", ",", "a:1,b", "a:1,:2", "a:1,b:99999"):
        with pytest.raises(ValueError, match=r"give host:port"):
            parse_addresses(invalid)


def test_lock_of_stalled_process_is_replaced(tmp_path):
    with create_store(tmp_path, 1) as frozen:
        with pytest.raises(StoreInUseError):
            Store.open(tmp_path)
        with Store.open(tmp_path, is_takeover=True) as successor:
            with pytest.raises(StoreInUseError, match=f"process {os.getpid()}"):
                Store.open(tmp_path)
            assert successor.epoch == frozen.epoch + 1
            with pytest.raises(FencedError):
                frozen.send_heartbeat()
            assert Path(tmp_path / "alive").exists()
