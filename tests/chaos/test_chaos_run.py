"""Every injector in a real run of real processes. The tapes, not the injectors, show that each fault happened."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.chaos import disks, netns
from atoll.chaos.fault_log import read_fault_log
from atoll.cli.main import main
from atoll.core.protocol import ShardLost, ShardReconnected
from atoll.core.types import SYNCER
from atoll.dashboard.run_history import RunHistory
from atoll.dashboard.view import view_at
from atoll.reference.job_settings import JobSettings
from atoll.reference.report import ModelEvaluation, decoupled_report
from atoll.tape.files import RunTapes
from atoll.tape.learner_processes import LearnerProcess
from atoll.tape.timeline import RunTimeline, read_timeline
from tests.chaos.small_chaos import schedule, small_scenario
from tests.reference.small_jobs import find_processes, small_text
from tests.shared_runs import make_once


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


def assert_nothing_is_left(run: Path, tool: int) -> None:
    """Check that no process, namespace, address or mount of the run exists."""
    assert find_processes(run) == []
    assert [path for _, path in disks.list_mounts() if path.startswith(str(run))] == []
    if os.geteuid() == 0:
        assert [name for name in netns.list_namespaces() if f"-{tool}-" in name] == []
        assert [address for pid, address in netns.list_addresses() if pid == tool] == []


class FinishedRun:
    """A finished run under fault, with its verdict and output."""

    def __init__(self, run: Path, code: int, verdict: dict[str, Any], lines: str) -> None:
        self.run = run
        self.code = code
        self.verdict = verdict
        self.lines = lines
        self.timeline: RunTimeline = read_timeline(run, keep=None)

    def fault(self, name: str, target: str) -> dict[str, Any]:
        found: dict[str, Any]
        (found,) = (each for each in self.verdict["faults"] if (each["fault"], each["target"]) == (name, target))
        assert found["was_injected"], found
        return found

    def process(self, learner: int, at: float) -> LearnerProcess:
        return next(
            process
            for process in self.timeline.processes[learner]
            if process.first_entry_at <= at <= process.last_entry_at
        )


def chaos(scenario: Path, run: Path, *arguments: str) -> FinishedRun:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = main(["chaos", str(scenario), "--out", str(run), "--json", *arguments])
    assert out.getvalue(), err.getvalue()
    assert_nothing_is_left(run, os.getpid())
    return FinishedRun(run, code, json.loads(out.getvalue()), err.getvalue())


@pytest.fixture(scope="module")
def faulted(text, tmp_path_factory):
    """Run every fault once, on three learners and their syncer, with relays. All test processes share this run."""
    folder, made = make_once(tmp_path_factory, "faulted", lambda folder: run_all_faults(text, folder))
    return FinishedRun(folder / "faulted", *made)


def run_all_faults(text, folder):
    scenario = small_scenario(
        folder / "faulted.toml",
        text,
        19,
        schedule("kill", "learner 1", 1.0, downtime="500ms"),
        schedule("stop", "learner 2", 1.0, for_="1500ms"),
        schedule("cut", "link 3", 1.0, for_="3s"),
        schedule("join", None, 2.0),
        schedule("full", "disk syncer", 3.5, for_="700ms"),
        schedule("full", "disk 3", 4.0, for_="1s"),
        schedule("throttle", "link 3", 4.5, for_="2s", rate="5 kB/s"),
        schedule("slow", "disk syncer", 5.0, for_="1s", wait="200ms"),
        schedule("nan", "payload 2", 6.0, count=2),
        schedule("delay", "link 3", 7.0, for_="1s", delay="100ms"),
        schedule("corrupt", "link 1", 7.0, for_="1500ms", every=1000),
        schedule("leave", "learner 4", 8.0),
        schedule("flap", "link 3", 8.5, for_="1500ms", period="300ms"),
        schedule("wild", "payload 1", 8.7, count=2),
        schedule("infinity", "payload 2", 9.2, count=1),
        schedule("read-only", "disk syncer", 10.5, for_="700ms"),
        schedule("kill", "syncer", 13.0, downtime="300ms"),  # last: the run may end before the syncer is back
    )
    done = chaos(scenario, folder / "faulted", "--links", "relay")
    return done.code, done.verdict, done.lines


def test_run_survives_every_fault(faulted):
    broken = [check for check in faulted.verdict["criteria"] if check["passed"] is False]
    # On a busy machine a step may be late without a fault.
    assert [each for each in broken if "independence" not in each["finding"]] == []
    assert len(faulted.verdict["faults"]) == 17
    assert all(fault["was_injected"] for fault in faulted.verdict["faults"])
    assert faulted.code == (1 if broken else 0)
    assert faulted.verdict["links"] == "relays in user space"


def test_every_fault_is_printed(faulted):
    for fault in faulted.verdict["faults"]:
        assert f"fault {fault['number']}: {fault['description']}" in faulted.lines


def test_killed_learner_is_replaced_by_new_process(faulted):
    fault = faulted.fault("kill", "learner 1")
    before, after = faulted.timeline.processes[1][:2]
    assert fault["ended_s"] >= fault["started_s"] + 0.5
    assert before.last_entry_at <= fault["ended_s"]
    assert after.first_entry_at >= fault["started_s"] + 0.5
    assert fault["kill_to_step_s"] == pytest.approx(after.log.ends[0] - fault["started_s"])
    assert fault["kill_to_merge_s"] >= fault["kill_to_step_s"]


def test_stopped_learner_pauses_for_planned_duration(faulted):
    fault = faulted.fault("stop", "learner 2")
    stopped_s = fault["ended_s"] - fault["started_s"]
    longest = max(end - begin for begin, end in faulted.process(2, fault["started_s"]).step_spans())
    assert stopped_s >= 1.5
    assert longest >= stopped_s - 0.1
    assert faulted.verdict["islands"][1]["stopped_s"] == pytest.approx(stopped_s, abs=0.4)
    assert faulted.verdict["worst_pause"]["gap_s"] < longest  # the stopped learner itself is not a survivor


def test_learner_with_cut_link_trains_and_is_not_merged(faulted):
    fault = faulted.fault("cut", "link 3")
    inside = (fault["started_s"] + 0.5, fault["ended_s"] - 0.1)
    merged = [
        m
        for m in faulted.timeline.merges()
        if inside[0] < m.at < inside[1] and 3 in [learner for learner, _ in m.contributors]
    ]
    assert merged == []
    steps = [end for end in faulted.process(3, inside[0]).log.ends if inside[0] < end < inside[1]]
    assert len(steps) > 5  # it trains on


def test_new_learner_joins_and_leaves_for_good(faulted):
    (process,) = faulted.timeline.processes[4]
    joined, left = faulted.fault("join", "learner 4"), faulted.fault("leave", "learner 4")
    assert joined["started_s"] < process.first_entry_at < left["started_s"]
    assert process.last_entry_at <= left["ended_s"], "its process had exited by then"
    assert any((4, 1) in merge.contributors for merge in faulted.timeline.merges())
    assert [each["learner"] for each in faulted.verdict["islands"]] == [1, 2, 3, 4]
    assert faulted.verdict["islands"][3]["allocated_s"] == pytest.approx(
        process.last_entry_at - process.first_entry_at, abs=0.5
    )


def test_verdict_report_and_page_agree_on_times(faulted):
    verdict, run = faulted.verdict, faulted.run
    settings = JobSettings.load(run / "config.json")
    report = decoupled_report(run, settings, ModelEvaluation(2.0, 1, 5.0, "", 1), 0.0)
    history = RunHistory(run)
    while history.update():
        pass
    shown = view_at(history)
    assert verdict["goodput"] == pytest.approx(report.goodput, abs=1e-9)
    assert verdict["goodput"] == pytest.approx(shown["headline"]["goodput"], abs=1e-9)
    assert verdict["uptime"] == pytest.approx(report.uptime, abs=1e-9)
    assert verdict["uptime"] == pytest.approx(shown["headline"]["uptime"], abs=1e-9)
    assert verdict["wall_s"] == pytest.approx(report.wall_s, abs=1e-9)
    for island, reported, seen in zip(verdict["islands"], report.islands, shown["islands"], strict=True):
        assert island["goodput"] == pytest.approx(reported.goodput, abs=1e-9)
        assert island["goodput"] == pytest.approx(seen["goodput"], abs=1e-9)
    fault = faulted.fault("stop", "learner 2")
    stopped_s = fault["ended_s"] - fault["started_s"]
    assert shown["islands"][1]["time_split"]["paused"] == pytest.approx(stopped_s, abs=0.4), "the stop counts as paused"


def test_disk_faults_refuse_writes_and_keep_tapes_complete(faulted):
    lines = [line for tenure in faulted.timeline.tenures for line in tenure.log_lines]
    sentences = [line.sentence for line in lines if line.code == "persist-failed"]
    assert any("No space" in each or "too large" in each for each in sentences), sentences
    if os.geteuid() == 0:
        assert any("Read-only" in each for each in sentences), sentences
    assert faulted.verdict["failed_writes"] >= 2
    assert faulted.fault("full", "disk 3")["method"] == faulted.fault("full", "disk syncer")["method"]
    assert (faulted.run / "tapes/learner-3-i1.tape").is_file()  # copied from its separate disk
    assert faulted.verdict["invariants"]["incomplete"] == []


def test_slow_disk_delays_fsync_of_the_syncer(faulted):
    fault = faulted.fault("slow", "disk syncer")
    notes = [json.loads(line) for line in (faulted.run / "chaos/syncer.done.jsonl").read_text().splitlines()]
    assert any(note["fault"] == fault["number"] for note in notes)


def test_poisoned_contribution_is_refused_with_reason(faulted):
    """A late contribution is refused as late, but the tape still records that its values are invalid."""
    log = (faulted.run / "chaos/learner-2.done.jsonl").read_text()
    assert len(log.splitlines()) == 3
    invalid = [sentence for tenure in faulted.timeline.tenures for sentence in tenure.invalid_values]
    kinds = {"not finite" if "not finite" in sentence else "wild" for sentence in invalid}
    assert kinds == {"not finite", "wild"}, invalid
    assert faulted.verdict["refused_contributions"].get("contribution-invalid", 0) <= len(invalid)
    assert faulted.verdict["unplanned_exits"] == []
    passed = {check["name"]: check["passed"] for check in faulted.verdict["criteria"]}
    assert passed["learned"]


def test_learner_reconnects_after_link_corruption(faulted):
    fault = faulted.fault("corrupt", "link 1")
    process = faulted.process(1, fault["started_s"])
    assert (
        any(begin >= fault["started_s"] for begin, _ in process.disconnected)
        or faulted.verdict["refused_contributions"]
    )
    assert fault["end_to_merge_s"] is not None


def test_killed_syncer_is_replaced_by_new_process(faulted):
    fault = faulted.fault("kill", "syncer")
    first, second = faulted.timeline.tenures
    assert fault["ended_s"] >= fault["started_s"] + 0.3
    assert first.last_entry_at <= fault["ended_s"]
    assert second.first_entry_at >= fault["started_s"] + 0.3
    assert fault["kill_to_merge_s"] > 0.3


def test_run_directory_has_plan_log_verdict_and_page(faulted):
    plan = json.loads((faulted.run / "chaos/plan.json").read_text())
    assert [fault["number"] for fault in plan["faults"]] == list(range(1, 18))
    started_at, log = read_fault_log(faulted.run)
    assert started_at is not None
    assert len(log) == 17
    saved = json.loads((faulted.run / "verdict.json").read_text())
    assert saved.pop("timeline")["rounds"]
    assert {**saved, "directory": str(faulted.run)} == faulted.verdict
    assert (faulted.run / "verdict.html").stat().st_size > 5000
    assert (faulted.run / "model.safetensors").is_file()


# --------------------------------------------------------------------------------------------------------------------
# Shards


def shard_changes(run: Path) -> list[tuple[float, str, tuple[int, ...]]]:
    """Return when the syncer lost a shard or connected to it again, with the fragments."""
    found = []
    for actor, reader in sorted(RunTapes(run).readers.items()):
        for entry in reader if actor.learner == SYNCER else ():
            if type(entry.event) is ShardLost:
                found.append((entry.at, "away", entry.event.fragments))
            elif type(entry.event) is ShardReconnected:
                found.append((entry.at, "back", tuple(p for p, _ in entry.event.versions)))
    return found


@pytest.mark.long
def test_shard_fault_delays_only_its_own_fragments(text, tmp_path):
    scenario = small_scenario(
        tmp_path / "shards.toml",
        text,
        14,
        schedule("kill", "shard 0", 1.5, downtime="2s"),
        schedule("stop", "shard 1", 6.0, for_="5s"),
        learners=2,
        shards=2,
    )
    done = chaos(scenario, tmp_path / "run", "--links", "relay")
    broken = [check for check in done.verdict["criteria"] if check["passed"] is False]
    assert [each for each in broken if "independence" not in each["finding"]] == []
    killed, stopped = done.fault("kill", "shard 0"), done.fault("stop", "shard 1")

    (lost_at, *lost), (back_at, *back) = shard_changes(done.run)
    assert (lost, back) == (["away", (0, 2)], ["back", (0, 2)])
    assert killed["started_s"] - 0.1 <= lost_at < back_at
    assert back_at >= killed["started_s"] + 2.0
    while_away = [m.fragment for m in done.timeline.merges() if lost_at < m.at < back_at]
    assert {1, 3} <= set(while_away)
    assert not {0, 2} & set(while_away)
    assert killed["kill_to_merge_s"] >= back_at - killed["started_s"] - 0.001, (
        "a merge may have been durable at the kill"
    )

    started_s, ended_s = stopped["started_s"], stopped["ended_s"]
    assert ended_s - started_s >= 5.0
    while_stopped = [m.fragment for m in done.timeline.merges() if started_s + 1.0 < m.at < ended_s]
    assert {0, 2} <= set(while_stopped)
    assert not {1, 3} & set(while_stopped)
    assert stopped["end_to_merge_s"] > 0
    assert done.verdict["worst_pause"]["gap_s"] < (ended_s - started_s) / 2, "no learner waits for a shard"


# --------------------------------------------------------------------------------------------------------------------
# In the kernel


@pytest.mark.needs_root
def test_kernel_link_faults_are_injected(text, tmp_path):
    scenario = small_scenario(
        tmp_path / "links.toml",
        text,
        5,
        schedule("cut", "link 1", 1.0, for_="1s", direction="up"),
        schedule("throttle", "link 2", 1.0, for_="1s", rate="20 kB/s"),
        schedule("corrupt", "link 2", 2.5, for_="1s", every=500),
        learners=2,
    )
    done = chaos(scenario, tmp_path / "run", "--links", "netns")
    methods = [fault["method"] for fault in done.verdict["faults"]]
    assert methods == ["network namespace, tc", "network namespace, tc", "relay"]
    assert all(fault["was_injected"] for fault in done.verdict["faults"])
    assert next(check for check in done.verdict["criteria"] if check["name"] == "ended")["passed"]


# --------------------------------------------------------------------------------------------------------------------
# Ctrl-C


@pytest.mark.long
def test_ctrl_c_ends_all_faults_and_writes_verdict(text, tmp_path):
    scenario = small_scenario(
        tmp_path / "long.toml",
        text,
        600,
        schedule("stop", "learner 1", 0.5, for_="300s"),
        schedule("cut", "link 2", 0.5, for_="300s"),
        schedule("full", "disk syncer", 0.5, for_="300s"),
        schedule("read-only", "disk 2", 0.5, for_="300s"),
        schedule("kill", "learner 2", 500.0),
        learners=2,
    )
    run = tmp_path / "run"
    arguments = [sys.executable, "-m", "atoll", "chaos", str(scenario), "--out", str(run)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        assert tool.stderr is not None
        lines = []
        while not (line := tool.stderr.readline()).startswith("fault 4:"):
            lines.append(line)
            assert tool.poll() is None, lines
        assert len(find_processes(run)) == 3
        tool.send_signal(signal.SIGINT)
        out, err = tool.communicate(timeout=300)
    assert tool.returncode == 130, err
    assert_nothing_is_left(run, tool.pid)
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["interrupted"]
    assert not verdict["survived"]
    assert [fault["was_injected"] for fault in verdict["faults"]] == [True, True, True, True, False]
    assert verdict["faults"][-1]["failure_cause"] == "the run ended before this fault was due"
    assert "the run was interrupted" in out
    assert (run / "verdict.html").is_file()
    assert (run / "tapes/learner-2-i1.tape").is_file()
