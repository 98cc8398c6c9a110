"""Preemption notices: the work of a preempted learner is merged before its machine ends.

Scheduled rounds of these runs come every million steps. Without a drain only the first fragment would be merged.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.learner import LearnerProgress
from atoll.cli.ledger import read_history
from atoll.core.protocol import DrainRequest, Stop
from atoll.core.types import RunConfig
from atoll.learner.api import Learner
from atoll.learner.background import MAX_CONCURRENT_UPLOADS
from atoll.learner.preemption import DUPLICATE_SIGNAL_S, GOODBYE_TIMEOUT_S, Preemption
from atoll.reference.child_processes import sigterm_as_interrupt
from atoll.tape.files import RunTapes
from atoll.tensors.settings import Numerics
from atoll.transport.http_client import READ_TIMEOUT_S
from tests.island.rank_runs import IslandSpec, RankedIsland
from tests.learner.in_process import learner_of, train
from tests.learner.run_tapes import entries, sent_together
from tests.learner.runs import LIMIT_S, Child, LearnerSpec, Run, endless
from tests.learner.small_models import BATCH, work
from tests.syncer.test_controls import apply_control

LONG_S = 60.0


def rare_rounds(**settings: Any) -> RunConfig:
    """Return the config of a run with a scheduled round every million steps."""
    return endless(every_steps=1_000_000, **settings)


def spec(number: int, notice_s: float | None = LONG_S) -> LearnerSpec:
    return LearnerSpec(number, notice_s=notice_s)


def trained(run: Run, *numbers: int, steps: int = 5) -> None:
    """Wait until each of these learners has taken more than this number of steps."""

    def have_trained(status: dict[str, Any]) -> bool:
        return {each["learner"] for each in status["learners"] if each["step"] > steps} >= {*numbers}

    run.until(have_trained, "they train")


def left(child: Child, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Wait until a drained learner has left and ended. Return its report."""
    child.expected_to_end = True
    report: dict[str, Any] = child.expect("ended", limit_s)
    assert (report["finished"], report["drained"]) == (True, True)
    assert report["threads"] == ["Thread-1 (_end_with_the_test)"]
    assert child.ended() == 0
    return report


def assert_all_merged(run: Run) -> None:
    """Assert that learner 1, the only one, has left without unmerged work."""
    run.until(run.learner(1, standing="left"), "the syncer knows that it has left")
    for line in run.status()["ledger"]:
        assert (line["pending"], line["dropped"]) == (0, {})
    run.verdict()


def stop_code(run: Run, number: int) -> str:
    """Return the reason code with which a learner has stopped."""
    codes = [effect.reason.code for entry in entries(run, number) for effect in entry.effects if type(effect) is Stop]
    assert len(codes) == 1
    return str(codes[0])


def dropped(run: Run) -> list[dict[str, int]]:
    """Return the dropped tokens of every fragment, computed from the tapes alone, as `atoll ledger` does."""
    lines = [line for _, line in sorted(read_history(RunTapes(run.directory)).token_ledger().items())]
    assert all(line.is_balanced() for line in lines)
    return [line.dropped for line in lines]


# --------------------------------------------------------------------------------------------------------------------
# Notices that are long enough


def test_unmerged_work_of_a_draining_learner_is_merged_and_the_run_continues(tmp_path):
    with Run(tmp_path, rare_rounds()) as run:
        one, two = run.joined(spec(1), 2)
        run.go(one, two)
        trained(run, 1, 2)
        one.send(signal.SIGTERM)
        report = left(one)
        assert report["stats"]["unmerged_tokens"] == 0
        status = run.until(run.learner(1, standing="left"), "the syncer knows that it has left")
        assert [line["dropped"] for line in run.status()["ledger"]] == [{}, {}, {}]
        (line,) = run.log_lines(one, "This learner was drained; the run continues.")
        before = int(line.partition("Unmerged tokens: ")[2].split()[0])
        assert before > 0, "all tokens were merged before the notice"
        assert line.endswith(f"{before} then, 0 now")
        trained(run, 2, steps=status["step"] + 20)
        run.end()
        run.assert_same(run.finish(two), 2)
        run.assert_clean()
        assert stop_code(run, 1) == "learner-drained"
        assert dropped(run) == [{}, {}, {}]


def test_sigterm_without_notice_s_is_not_handled_and_tokens_are_lost(tmp_path):
    """Control for the other tests: without a notice the tokens are not merged."""
    with Run(tmp_path, rare_rounds()) as run:
        one, two = run.joined(spec(1, None), 2)
        run.go(one, two)
        trained(run, 1, 2)
        one.send(signal.SIGTERM)
        assert one.ended() == -signal.SIGTERM
        pending = [line["pending"] for line in run.status()["ledger"]]
        assert min(pending[1:]) >= 5 * BATCH


@pytest.mark.parametrize("paused", [False, True])
def test_only_learner_leaves_after_all_its_work_is_merged(tmp_path, paused):
    with Run(tmp_path, rare_rounds()) as run:
        (one,) = run.joined(spec(1))
        run.go(one)
        trained(run, 1)
        if paused:
            apply_control(run, "pause")
            run.until(lambda status: "paused" in status["learners"][0]["reason"], "it is paused")
        one.send(signal.SIGTERM)
        assert left(one)["stats"]["unmerged_tokens"] == 0
        run.until(run.learner(1, standing="left"), "the syncer knows that it has left")
        for line in run.status()["ledger"]:
            assert (line["pending"], line["dropped"]) == (0, {})
            assert line["trained"] == line["merged"] > 0
        run.verdict()


def test_two_learners_that_drain_concurrently_are_both_merged(tmp_path):
    with Run(tmp_path, rare_rounds()) as run:
        one, two = run.joined(spec(1), spec(2))
        run.go(one, two)
        trained(run, 1, 2)
        one.send(signal.SIGTERM)
        two.send(signal.SIGTERM)
        assert [left(each)["stats"]["unmerged_tokens"] for each in (one, two)] == [0, 0]
        run.until(lambda status: all(each["standing"] == "left" for each in status["learners"]), "both have left")
        for line in run.status()["ledger"]:
            assert (line["pending"], line["dropped"]) == (0, {})
        run.verdict()


@pytest.mark.long
def test_many_large_fragments_are_uploaded_a_few_at_a_time_and_none_is_dropped(tmp_path):
    """Fragments are sent in slices. The syncer stores the slices of a fragment until all have arrived."""
    with Run(tmp_path, rare_rounds(fragments=12), Numerics(plan="rows")) as run:
        planted = "small-slices counted-uploads"
        (one,) = run.joined(LearnerSpec(1, "wide", notice_s=LONG_S, planted=planted, max_rate="16mbit"))
        run.go(one)
        trained(run, 1)
        one.send(signal.SIGTERM)
        assert left(one)["stats"]["unmerged_tokens"] == 0
        assert run.log_lines(one, "syncer refused contribution") == []
        assert (tmp_path / "max-uploads").read_text() == str(MAX_CONCURRENT_UPLOADS)
        run.verdict()


def test_small_fragments_are_uploaded_concurrently_and_accepted(tmp_path):
    with Run(tmp_path, rare_rounds(fragments=12), Numerics(plan="rows")) as run:
        (one,) = run.joined(LearnerSpec(1, "wide", notice_s=LONG_S, planted="small-slices", max_rate="16mbit"))
        run.go(one)
        trained(run, 1)
        one.send(signal.SIGTERM)
        assert left(one)["stats"]["unmerged_tokens"] == 0
        assert run.log_lines(one, "syncer refused contribution") == []


@pytest.mark.long
def test_drain_request_is_repeated_to_a_restarted_syncer(tmp_path):
    with Run(tmp_path, rare_rounds(quorum=2)) as run:
        one, two = run.joined(spec(1), 2)
        run.go(one, two)
        trained(run, 1, 2)
        two.command("hold")
        two.expect("held")
        one.send(signal.SIGTERM)
        run.until(
            lambda status: status["learners"][0]["reason"].startswith("leaving; "),
            "the syncer has received the drain request",
        )
        run.syncer.kill()
        run.start_syncer()
        run.until(lambda status: len(status["learners"]) == 2, "the new syncer knows both")
        run.go(two)
        assert left(one)["stats"]["unmerged_tokens"] == 0
        assert len(sent_together(run, 1, DrainRequest)) > 1
        run.end()
        run.finish(two)
        run.verdict()


# --------------------------------------------------------------------------------------------------------------------
# Notices that are too short


def test_notice_shorter_than_a_round_is_respected_and_the_loss_is_counted(tmp_path):
    """The quorum needs the other learner, which does not reach a step boundary in time."""
    with Run(tmp_path, rare_rounds(quorum=2)) as run:
        one, two = run.joined(spec(1, 1.5), 2)
        run.go(one, two)
        trained(run, 1, 2)
        two.command("hold")
        two.expect("held")
        before = run.status()["ledger"][1]
        one.send(signal.SIGTERM)
        lost = left(one)["stats"]["unmerged_tokens"]
        assert lost >= 5 * BATCH
        run.until(run.learner(1, standing="left"), "the syncer knows that it has left")
        after = run.status()["ledger"][1]
        assert after["dropped"] == {"left": lost}
        assert after["merged"] == before["merged"] == 0
        assert run.log_lines(one, f"{lost} then, {lost} now")
        run.go(two)
        run.verdict()
        assert stop_code(run, 1) == "learner-left-early"
        recorded = run.until(lambda status: dropped(run)[1], "the tape has the durable record of the leave")
        assert recorded == {"left": lost}


def test_stalled_syncer_does_not_delay_a_preempted_learner(tmp_path):
    with Run(tmp_path, rare_rounds()) as run:
        (one,) = run.joined(spec(1, 2.0))
        run.go(one)
        trained(run, 1)
        run.syncer.send(signal.SIGSTOP)
        try:
            started_at = time.monotonic()
            one.send(signal.SIGTERM)
            assert left(one)["stats"]["unmerged_tokens"] > 0
            assert time.monotonic() - started_at < READ_TIMEOUT_S, "it waited for the read timeout"
        finally:
            run.syncer.send(signal.SIGCONT)
        assert stop_code(run, 1) == "learner-left-early"


def test_second_signal_ends_the_drain_at_once():
    now = [100.0]
    notice = Preemption(LONG_S, logging.getLogger("test"), clock=lambda: now[0])
    notice.on_signal()
    now[0] += DUPLICATE_SIGNAL_S
    notice.on_signal()
    assert not notice.has_expired(), "torchrun forwards a signal that its ranks have already received"
    now[0] += 0.1
    notice.on_signal()
    assert notice.has_expired()
    assert notice.level == 2


def test_the_notice_of_another_rank_is_counted_from_the_boundary_before():
    """The other machine received its notice after that boundary."""
    now = [100.0]
    notice = Preemption(LONG_S, logging.getLogger("test"), clock=lambda: now[0])
    notice.merge_rank_level(0)
    now[0] += 10.0
    notice.merge_rank_level(1)
    now[0] = 100.0 + LONG_S - GOODBYE_TIMEOUT_S - 0.1
    assert (notice.level, notice.has_expired()) == (1, False)
    now[0] += 0.1
    assert notice.has_expired()


def test_second_signal_at_another_rank_ends_the_drain_at_once():
    notice = Preemption(LONG_S, logging.getLogger("test"), clock=lambda: 100.0)
    notice.merge_rank_level(2)
    assert notice.has_expired()


# --------------------------------------------------------------------------------------------------------------------
# Signal handlers


def test_signal_handler_of_the_script_is_called_and_restored(tmp_path):
    """The loop ends before the learner reaches another step boundary."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        with Run(tmp_path, rare_rounds()) as run:
            job = work()
            with learner_of(run, job, 1, notice_s=LONG_S) as learner:
                train(learner, job, 5)
                signal.raise_signal(signal.SIGTERM)
                assert received == [signal.SIGTERM]
            assert signal.getsignal(signal.SIGTERM) is handle
            assert learner.drained
            assert learner.stats().unmerged_tokens == 0
            run.until(run.learner(1, standing="left"), "the syncer knows that it has left")
            assert [line["dropped"] for line in run.status()["ledger"]] == [{}, {}, {}]
            run.verdict()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_preemption_outside_of_the_main_thread_is_logged_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    found: list[object] = []

    def island(run: Run) -> None:
        job = work()
        with learner_of(run, job, 1, notice_s=LONG_S) as learner:
            train(learner, job, 3)
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    with Run(tmp_path, rare_rounds()) as run:
        thread = threading.Thread(target=island, args=(run,))
        thread.start()
        thread.join(LIMIT_S)
    assert found == [before]
    assert len([record for record in caplog.records if "SIGTERM is not handled" in record.message]) == 1


def test_command_forwards_the_first_signal_and_ends_at_a_later_one():
    watch = LearnerProgress("text", is_shown=False, has_preemption_notice=True)
    assert not watch.handles_preemption(), "a joining learner has no work to merge"
    watch.steps = 1
    with sigterm_as_interrupt(watch.handles_preemption):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert watch.preempted_at is not None
        watch.preempted_at -= 2 * DUPLICATE_SIGNAL_S
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    without_notice = LearnerProgress("text", is_shown=False, has_preemption_notice=False)
    without_notice.steps = 1
    with sigterm_as_interrupt(without_notice.handles_preemption), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("seconds", ["soon", "0", "-3", "inf"])
def test_invalid_notice_s_is_refused(monkeypatch, seconds):
    monkeypatch.setenv("ATOLL_NOTICE_S", seconds)
    job = work()
    with pytest.raises(ValueError, match="from SIGTERM to the end"):
        Learner(job.model, job.optimizer, "127.0.0.1:1")


# --------------------------------------------------------------------------------------------------------------------
# Islands of several ranks


def test_notice_at_any_rank_drains_the_island(tmp_path):
    with Run(tmp_path, rare_rounds()) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", notice_s=LONG_S))
        island.joined()
        island.command("go")
        trained(run, 1)
        island.ranks[1].send(signal.SIGTERM)
        report = island.left()
        assert [(each["finished"], each["drained"]) for each in report] == [(True, True)] * 2
        assert_all_merged(run)


def test_loop_of_many_ranks_that_ends_by_the_notice_is_drained_on_exit(tmp_path):
    """The ranks leave their loops before their next step boundary."""
    with Run(tmp_path, rare_rounds()) as run:
        island = RankedIsland(run, IslandSpec(1, "fsdp", notice_s=LONG_S))
        island.joined()
        island.command("go")
        trained(run, 1)
        island.command("hold")
        island.expect("held")
        assert min(line["pending"] for line in run.status()["ledger"][1:]) > 0
        island.ranks[1].send(signal.SIGTERM)
        island.command("break")
        report = island.left()
        assert [(each["finished"], each["drained"]) for each in report] == [(True, True)] * 2
        assert_all_merged(run)


@pytest.mark.long
def test_sigterm_to_torchrun_and_its_ranks_drains_all_of_them(tmp_path):
    """A launcher signals every process, so the ranks receive the signal twice."""
    report = tmp_path / "report"
    report.mkdir()
    with Run(tmp_path, rare_rounds()) as run:
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
        run_variables = {"ATOLL_SYNCER": run.address, "ATOLL_LEARNER": "1", "ATOLL_RUN_DIRECTORY": str(run.directory)}
        settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ATOLL_NOTICE_S": "25"}
        with (tmp_path / "torchrun.log").open("w") as log:
            torchrun = subprocess.Popen(
                [*command, "--nproc-per-node", "2", "-m", "tests.learner.preempted_island", str(report)],
                env={**os.environ, **run_variables, **settings},
                stdout=log,
                stderr=log,
            )
        try:
            run.until(lambda status: status["learners"] and status["learners"][0]["step"] > 5, "it trains", LONG_S)
            for process in (torchrun.pid, *_pids(report)):
                os.kill(process, signal.SIGTERM)
            torchrun.wait(LONG_S)
        finally:
            if torchrun.poll() is None:
                torchrun.kill()
                torchrun.wait()
        output = (tmp_path / "torchrun.log").read_text()
        assert [path.read_text() for path in sorted(report.glob("*.left"))] == ["True True", "True True"], output
        assert_all_merged(run)


def _pids(report: Path) -> list[int]:
    pids = [int(path.read_text()) for path in report.glob("*.pid")]
    assert len(pids) == 2
    return pids
