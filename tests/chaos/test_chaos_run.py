"""Every injector in a real run of real processes: that it did what it says is read from the tapes, not from itself."""

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
from tests.reference.small_jobs import processes_of, small_text
from tests.shared_runs import make_once


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("data") / "text")


def assert_nothing_is_left(run: Path, tool: int) -> None:
    """No process, no namespace, no address, no mount."""
    assert processes_of(run) == []
    assert [where for _, where in disks.list_mounts() if where.startswith(str(run))] == []
    if os.geteuid() == 0:
        assert [name for name in netns.list_namespaces() if f"-{tool}-" in name] == []
        assert [address for maker, address in netns.list_addresses() if maker == tool] == []


class Done:
    """A run under fault that is over."""

    def __init__(self, run: Path, code: int, told: dict[str, Any], lines: str) -> None:
        self.run = run
        self.code = code
        self.told = told
        self.lines = lines
        self.timeline: RunTimeline = read_timeline(run, keep=None)

    def fault(self, name: str, target: str) -> dict[str, Any]:
        found: dict[str, Any]
        (found,) = (each for each in self.told["faults"] if (each["fault"], each["target"]) == (name, target))
        assert found["was_injected"], found
        return found

    def process(self, learner: int, at: float) -> LearnerProcess:
        return next(
            process
            for process in self.timeline.processes[learner]
            if process.first_entry_at <= at <= process.last_entry_at
        )


def chaos(scenario: Path, run: Path, *words: str) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code = main(["chaos", str(scenario), "--out", str(run), "--json", *words])
    assert out.getvalue(), err.getvalue()
    assert_nothing_is_left(run, os.getpid())
    return Done(run, code, json.loads(out.getvalue()), err.getvalue())


@pytest.fixture(scope="module")
def struck(text, tmp_path_factory):
    """Every fault once, on three learners and their syncer, through relays. One run for all processes of the tests."""
    folder, made = make_once(tmp_path_factory, "struck", lambda folder: strike(text, folder))
    return Done(folder / "struck", *made)


def strike(text, folder):
    scenario = small_scenario(
        folder / "struck.toml",
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
        schedule("kill", "syncer", 13.0, downtime="300ms"),  # last: the run may be at its end when the syncer is back
    )
    done = chaos(scenario, folder / "struck", "--links", "relay")
    return done.code, done.told, done.lines


def test_every_fault_fired_and_the_run_stood(struck):
    broken = [check for check in struck.told["criteria"] if check["passed"] is False]
    # On a machine that others use a step may be late through no fault of ours.
    assert [each for each in broken if "independence" not in each["finding"]] == []
    assert len(struck.told["faults"]) == 17
    assert all(fault["was_injected"] for fault in struck.told["faults"])
    assert struck.code == (1 if broken else 0)
    assert struck.told["links"] == "relays in user space"


def test_the_view_tells_of_every_fault(struck):
    for fault in struck.told["faults"]:
        assert f"fault {fault['number']}: {fault['description']}" in struck.lines


def test_a_killed_learner_is_another_process_afterwards(struck):
    fault = struck.fault("kill", "learner 1")
    before, after = struck.timeline.processes[1][:2]
    assert fault["ended_s"] >= fault["started_s"] + 0.5
    assert before.last_entry_at <= fault["ended_s"]
    assert after.first_entry_at >= fault["started_s"] + 0.5
    assert fault["kill_to_step_s"] == pytest.approx(after.log.ends[0] - fault["started_s"])
    assert fault["kill_to_merge_s"] >= fault["kill_to_step_s"]


def test_a_stopped_learner_stands_for_as_long_as_it_was_told(struck):
    fault = struck.fault("stop", "learner 2")
    stood = fault["ended_s"] - fault["started_s"]
    longest = max(end - begin for begin, end in struck.process(2, fault["started_s"]).step_spans())
    assert stood >= 1.5
    assert longest >= stood - 0.1
    assert struck.told["islands"][1]["stopped_s"] == pytest.approx(stood, abs=0.4)
    assert struck.told["worst_pause"]["gap_s"] < longest  # it was struck itself: that is no pause of a survivor


def test_nothing_of_a_learner_arrives_while_its_link_is_cut(struck):
    fault = struck.fault("cut", "link 3")
    inside = (fault["started_s"] + 0.5, fault["ended_s"] - 0.1)
    merged = [
        m for m in struck.timeline.merges() if inside[0] < m.at < inside[1] and 3 in [who for who, _ in m.contributors]
    ]
    assert merged == []
    steps = [end for end in struck.process(3, inside[0]).log.ends if inside[0] < end < inside[1]]
    assert len(steps) > 5  # it trains on


def test_a_new_learner_joins_and_leaves_for_good(struck):
    (process,) = struck.timeline.processes[4]
    joined, left = struck.fault("join", "learner 4"), struck.fault("leave", "learner 4")
    assert joined["started_s"] < process.first_entry_at < left["started_s"]
    assert process.last_entry_at <= left["ended_s"], "its process was gone then"
    assert any((4, 1) in merge.contributors for merge in struck.timeline.merges())
    assert [each["learner"] for each in struck.told["islands"]] == [1, 2, 3, 4]
    assert struck.told["islands"][3]["allocated_s"] == pytest.approx(
        process.last_entry_at - process.first_entry_at, abs=0.5
    )


def test_verdict_report_and_page_tell_the_same_of_its_time(struck):
    told, run = struck.told, struck.run
    settings = JobSettings.load(run / "config.json")
    report = decoupled_report(run, settings, ModelEvaluation(2.0, 1, 5.0, "", 1), 0.0)
    picture = RunHistory(run)
    while picture.update():
        pass
    shown = view_at(picture)
    assert told["goodput"] == pytest.approx(report.goodput, abs=1e-9)
    assert told["goodput"] == pytest.approx(shown["headline"]["goodput"], abs=1e-9)
    assert told["uptime"] == pytest.approx(report.uptime, abs=1e-9)
    assert told["uptime"] == pytest.approx(shown["headline"]["uptime"], abs=1e-9)
    assert told["wall_s"] == pytest.approx(report.wall_s, abs=1e-9)
    for island, reported, seen in zip(told["islands"], report.islands, shown["islands"], strict=True):
        assert island["goodput"] == pytest.approx(reported.goodput, abs=1e-9)
        assert island["goodput"] == pytest.approx(seen["goodput"], abs=1e-9)
    fault = struck.fault("stop", "learner 2")
    stood = fault["ended_s"] - fault["started_s"]
    assert shown["islands"][1]["time_split"]["paused"] == pytest.approx(stood, abs=0.4), "it was stopped for so long"


def test_disks_refused_writes_and_the_records_are_whole(struck):
    lines = [line for tenure in struck.timeline.tenures for line in tenure.log_lines]
    words = [line.sentence for line in lines if line.code == "persist-failed"]
    assert any("No space" in word or "too large" in word for word in words), words
    if os.geteuid() == 0:
        assert any("Read-only" in word for word in words), words
    assert struck.told["failed_writes"] >= 2
    assert struck.fault("full", "disk 3")["method"] == struck.fault("full", "disk syncer")["method"]
    assert (struck.run / "tapes/learner-3-i1.tape").is_file()  # it was on a disk of its own
    assert struck.told["invariants"]["incomplete"] == []


def test_a_slow_disk_makes_the_syncer_slow_and_nobody_else(struck):
    fault = struck.fault("slow", "disk syncer")
    notes = [json.loads(line) for line in (struck.run / "chaos/syncer.done.jsonl").read_text().splitlines()]
    assert any(note["fault"] == fault["number"] for note in notes)


def test_poison_is_refused_with_its_reason(struck):
    """One that comes too late is refused for that; that its values are unfit is on the tape all the same."""
    log = (struck.run / "chaos/learner-2.done.jsonl").read_text()
    assert len(log.splitlines()) == 3
    unfit = [sentence for tenure in struck.timeline.tenures for sentence in tenure.invalid_values]
    kinds = {"not finite" if "not finite" in sentence else "wild" for sentence in unfit}
    assert kinds == {"not finite", "wild"}, unfit
    assert struck.told["refused_contributions"].get("contribution-invalid", 0) <= len(unfit)
    assert struck.told["unplanned_exits"] == []
    told = {check["name"]: check["passed"] for check in struck.told["criteria"]}
    assert told["learned"]


def test_a_damaged_link_breaks_and_heals(struck):
    fault = struck.fault("corrupt", "link 1")
    process = struck.process(1, fault["started_s"])
    assert any(begin >= fault["started_s"] for begin, _ in process.disconnected) or struck.told["refused_contributions"]
    assert fault["end_to_merge_s"] is not None


def test_the_syncer_is_another_process_after_its_kill(struck):
    fault = struck.fault("kill", "syncer")
    first, second = struck.timeline.tenures
    assert fault["ended_s"] >= fault["started_s"] + 0.3
    assert first.last_entry_at <= fault["ended_s"]
    assert second.first_entry_at >= fault["started_s"] + 0.3
    assert fault["kill_to_merge_s"] > 0.3


def test_the_run_leaves_its_plan_its_log_a_verdict_and_a_page(struck):
    plan = json.loads((struck.run / "chaos/plan.json").read_text())
    assert [fault["number"] for fault in plan["faults"]] == list(range(1, 18))
    began, log = read_fault_log(struck.run)
    assert began is not None
    assert len(log) == 17
    kept = json.loads((struck.run / "verdict.json").read_text())
    assert kept.pop("timeline")["rounds"]
    assert {**kept, "directory": str(struck.run)} == struck.told
    assert (struck.run / "verdict.html").stat().st_size > 5000
    assert (struck.run / "model.safetensors").is_file()


# --------------------------------------------------------------------------------------------------------------------
# Shards


def told_of_shards(run: Path) -> list[tuple[float, str, tuple[int, ...]]]:
    """When the syncer noticed that one was away or back, and of which fragments."""
    found = []
    for actor, reader in sorted(RunTapes(run).readers.items()):
        for entry in reader if actor.learner == SYNCER else ():
            if type(entry.event) is ShardLost:
                found.append((entry.at, "away", entry.event.fragments))
            elif type(entry.event) is ShardReconnected:
                found.append((entry.at, "back", tuple(p for p, _ in entry.event.versions)))
    return found


@pytest.mark.long
def test_a_struck_shard_holds_up_its_own_fragments_and_no_learner(text, tmp_path):
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
    broken = [check for check in done.told["criteria"] if check["passed"] is False]
    assert [each for each in broken if "independence" not in each["finding"]] == []
    killed, stopped = done.fault("kill", "shard 0"), done.fault("stop", "shard 1")

    (lost_at, *lost), (back_at, *back) = told_of_shards(done.run)
    assert (lost, back) == (["away", (0, 2)], ["back", (0, 2)])
    assert killed["started_s"] - 0.1 <= lost_at < back_at
    assert back_at >= killed["started_s"] + 2.0
    while_away = [m.fragment for m in done.timeline.merges() if lost_at < m.at < back_at]
    assert {1, 3} <= set(while_away)
    assert not {0, 2} & set(while_away)
    assert killed["kill_to_merge_s"] >= back_at - killed["started_s"] - 0.001, "it may have been durable when it died"

    began, ended = stopped["started_s"], stopped["ended_s"]
    assert ended - began >= 5.0
    while_standing = [m.fragment for m in done.timeline.merges() if began + 1.0 < m.at < ended]
    assert {0, 2} <= set(while_standing)
    assert not {1, 3} & set(while_standing)
    assert stopped["end_to_merge_s"] > 0
    assert done.told["worst_pause"]["gap_s"] < (ended - began) / 2, "nobody waits for a shard"


# --------------------------------------------------------------------------------------------------------------------
# In the kernel


@pytest.mark.needs_root
def test_links_in_the_kernel(text, tmp_path):
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
    how = [fault["method"] for fault in done.told["faults"]]
    assert how == ["network namespace, tc", "network namespace, tc", "relay"]
    assert all(fault["was_injected"] for fault in done.told["faults"])
    assert next(check for check in done.told["criteria"] if check["name"] == "ended")["passed"]


# --------------------------------------------------------------------------------------------------------------------
# Ctrl-C


@pytest.mark.long
def test_ctrl_c_heals_everything_and_leaves_a_verdict(text, tmp_path):
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
    words = [sys.executable, "-m", "atoll", "chaos", str(scenario), "--out", str(run)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        assert tool.stderr is not None
        lines = []
        while not (line := tool.stderr.readline()).startswith("fault 4:"):
            lines.append(line)
            assert tool.poll() is None, lines
        assert len(processes_of(run)) == 3
        tool.send_signal(signal.SIGINT)
        out, err = tool.communicate(timeout=300)
    assert tool.returncode == 130, err
    assert_nothing_is_left(run, tool.pid)
    told = json.loads((run / "verdict.json").read_text())
    assert told["interrupted"]
    assert not told["survived"]
    assert [fault["was_injected"] for fault in told["faults"]] == [True, True, True, True, False]
    assert told["faults"][-1]["failure_cause"] == "the run ended before its time came"
    assert "the run was interrupted" in out
    assert (run / "verdict.html").is_file()
    assert (run / "tapes/learner-2-i1.tape").is_file()
