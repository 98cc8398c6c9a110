"""The verdict: a valid run survives, and every kind of invalid run fails its criterion."""

from __future__ import annotations

import json
import math
import re
import shutil
import typing
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from atoll.chaos import verdict as verdicts
from atoll.chaos.fault_log import FaultLog, FaultRecord
from atoll.chaos.faults import FAULT_KINDS, Target
from atoll.chaos.page import render_page
from atoll.chaos.plan import Plan, PlannedFault
from atoll.chaos.scenario import EXPECTABLE_FIGURES, Expectation, shipped_scenarios
from atoll.chaos.verdict import Criterion, FaultReport, Loss, RunOutcome, Verdict, WorstPause, evaluate_run
from atoll.core.protocol import MergeRound, StepTaken
from atoll.reference.report import record_fault
from atoll.tape.files import tape_path
from atoll.tape.format import Actor
from atoll.tape.learner_processes import LearnerProcess
from atoll.tape.time_shares import TimeShares, clip, compute_time_shares, overlap_s
from atoll.tape.timeline import RunTimeline, read_timeline
from tests.tiny_run import STEP_S, TinyRun, eventful_run

ALWAYS = ["ended", "faults", "unplanned ends", "ledger", "invariants", "learned"]
"""Criteria of every run under fault."""

EPOCH = 1000.0
PAGE = (Path(__file__).resolve().parents[2] / "docs/chaos.md").read_text(encoding="utf-8")

KILL = PlannedFault(1, 11.0, "kill", Target("learner", 2), {"downtime": 2.0}, "schedule 1")
KILL_SYNCER = PlannedFault(2, 19.0, "kill", Target("syncer", 0), {"downtime": 2.0}, "schedule 2")
PLAN = Plan("tiny", "A test.", 7, 60.0, 3, (KILL, KILL_SYNCER), 0)
RECORDS = (
    FaultRecord(1, True, EPOCH + 12.0, EPOCH + 14.0, "SIGKILL"),
    FaultRecord(2, True, EPOCH + 20.0, EPOCH + 22.0, "SIGKILL"),
)
LOSS = Loss(2.0, 5.0, 1.95, "there")
FINISHED = RunOutcome("relays", loss=LOSS)


def expected(figure: str, bound: float) -> dict[str, Expectation]:
    return {figure: Expectation(figure, bound, "it is a test")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a run: learner 2 is killed at 12 s and restarts at 14 s, the syncer is away from 20 to 22 s."""
    run = eventful_run().save(tmp_path_factory.mktemp("eventful") / "run")
    write_faults(run, RECORDS)
    record_fault(run, EPOCH + 12.0, "learner 2", "SIGKILL", True)
    record_fault(run, EPOCH + 20.0, "syncer", "SIGKILL", True)
    return run


def write_faults(run: Path, records: tuple[FaultRecord, ...]) -> Path:
    log = FaultLog(run)
    log.record_start(EPOCH + 1.0)
    for each in records:
        log.record_fault(each)
    return run


def verdict_of(
    run: Path, expect: dict[str, Expectation] | None = None, outcome: RunOutcome = FINISHED, plan: Plan = PLAN
):
    return evaluate_run(run, plan, expect or {}, outcome, EPOCH)


def line(verdict: Verdict, name: str) -> Criterion:
    return next(check for check in verdict.criteria if check.name == name)


# --------------------------------------------------------------------------------------------------------------------
# A valid run


def test_valid_run_survives(saved):
    found = verdict_of(saved, {**expected("goodput", 0.5), **expected("loss_within", 0.1)})
    assert [check for check in found.criteria if not check.passed] == []
    assert found.survived
    assert [check.name for check in found.criteria][: len(ALWAYS)] == ALWAYS


def test_fault_times_match_tapes(saved):
    found = verdict_of(saved)
    kill, kill_syncer = found.faults
    timeline = read_timeline(saved)
    first, second = timeline.processes[2]
    assert (kill.started_s, kill.ended_s, kill.planned_s) == (12.0, 14.0, 12.0)
    assert kill.kill_to_step_s == pytest.approx(second.log.ends[0] - 12.0)
    merged = next((merge.at for merge in timeline.merges() if (2, 2) in merge.contributors), None)
    assert merged is not None
    assert kill.kill_to_merge_s == pytest.approx(merged - 12.0)
    assert kill.kill_to_merge_s >= kill.kill_to_step_s > 2.0
    assert kill_syncer.kill_to_step_s is None
    assert kill_syncer.kill_to_merge_s > 2.0
    assert first.last_entry_at <= 12.0


def test_time_shares_of_learner_add_up(saved):
    found = verdict_of(saved)
    for each in found.islands:
        parts = each.stepping_s + each.stopped_s + each.away_s + each.joining_s + each.between_s
        assert parts == pytest.approx(each.allocated_s, abs=0.01)
    killed = found.islands[1]
    assert 1.5 < killed.away_s < 4.5
    assert found.islands[0].away_s < 0.5
    assert found.goodput == pytest.approx(
        sum(e.in_steps_s for e in found.islands) / sum(e.allocated_s for e in found.islands)
    )
    assert found.uptime == pytest.approx(1.0, abs=0.02)


def test_every_merge_has_alive_pulled_and_merged_counts(saved):
    found = verdict_of(saved)
    rounds = found.timeline["rounds"]
    assert len(rounds) == found.merges > 10
    for _, alive, pulled, merged in rounds:
        assert merged <= pulled <= 3
        assert alive <= 3
    assert min(alive for at, alive, *_ in rounds if 13.0 < at < 14.5) == 2  # while learner 2 was away


def test_bands_cover_the_run_without_gaps(saved):
    timeline = verdict_of(saved).timeline
    for band in timeline["bands"]:
        states = band["states"]
        assert states[0][0] == timeline["started_s"]
        assert states[-1][1] == timeline["ended_s"]
        assert all(before[1] == after[0] for before, after in pairwise(states))
    assert "gone" in {state for _, _, state in timeline["bands"][1]["states"]}
    assert "alone" in {state for _, _, state in timeline["bands"][0]["states"]}  # while the syncer was away


def test_verdict_is_valid_json(saved, tmp_path):
    found = verdict_of(saved)
    path = found.save(tmp_path)
    assert json.loads(path.read_text()) == json.loads(json.dumps(found.to_json()))
    assert json.loads(path.read_text())["islands"][0]["goodput"] == found.islands[0].goodput


# --------------------------------------------------------------------------------------------------------------------
# Invalid runs


def save_with_faults(run: TinyRun, where: Path) -> Path:
    write_faults(run.save(where), RECORDS)
    return where


def test_pause_of_survivor_fails_verdict(tmp_path):
    run = eventful_run()
    run.entries = [e._replace(at=e.at + 5.0) if e.actor == Actor(3, 1) and e.at > 13.0 else e for e in run.entries]
    found = verdict_of(save_with_faults(run, tmp_path / "run"), expected("worst_pause_s", 2.0))
    assert found.worst_pause is not None
    assert found.worst_pause.learner == 3
    assert found.worst_pause.gap_s == pytest.approx(5.0 + STEP_S, abs=0.1)
    assert found.worst_pause.typical_s == STEP_S
    assert found.worst_pause.during == (1,)  # learner 2 had been killed
    assert line(found, "worst pause").passed is False
    assert not found.survived


def test_stopped_learner_is_not_a_survivor(tmp_path):
    run = TinyRun().run_until(12.9)
    run.suspend(3, 5.1)
    run.run_until(60.0)
    run.finish()
    stop = PlannedFault(1, 11.9, "stop", Target("learner", 3), {"for": 5.1}, "schedule 1")
    where = write_faults(
        run.run_until(120.0).save(tmp_path / "run"), (FaultRecord(1, True, EPOCH + 12.9, EPOCH + 18.0, "STOP"),)
    )
    found = verdict_of(where, expected("worst_pause_s", 2.0), plan=replace(PLAN, faults=(stop,)))
    assert line(found, "worst pause").passed
    assert found.islands[2].stopped_s == pytest.approx(5.1, abs=STEP_S)
    assert not line(verdict_of(where, expected("worst_pause_s", 2.0)), "worst pause").passed, (
        "without the stop it is a pause"
    )


def test_ledger_with_untrained_tokens_fails_verdict(tmp_path):
    run = eventful_run()
    run.entries = [
        e._replace(event=structs.replace(e.event, tokens=1))
        if isinstance(e.event, StepTaken) and e.actor.learner == 1 and e.at > 30
        else e
        for e in run.entries
    ]
    found = verdict_of(save_with_faults(run, tmp_path / "run"))
    assert line(found, "ledger").passed is False
    assert "on no learner's tape" in line(found, "ledger").finding
    assert not found.ledger["balanced"]
    assert not found.survived


def test_unbalanced_ledger_fails_criterion(saved):
    timeline = read_timeline(saved)
    assert timeline.current_tenure is not None
    lines = timeline.current_tenure.ledger_lines()
    on_tapes = sum(process.tokens for processes in timeline.processes.values() for process in processes)
    assert verdicts._check_ledger(verdicts._ledger(lines, on_tapes)).passed is True
    lines[0] = lines[0]._replace(merged=lines[0].merged + 1)
    check = verdicts._check_ledger(verdicts._ledger(lines, on_tapes))
    assert check.passed is False
    assert "does not balance" in check.finding


@pytest.mark.parametrize(
    ("records", "finding"),
    [
        (RECORDS[:1], "the first is 2, kill syncer downtime 2 s: the run ended before this fault was due"),
        ((RECORDS[0], FaultRecord(2, False, None, None, "", "syncer was not there")), "syncer was not there"),
        ((RECORDS[0], replace(RECORDS[1], was_injected=False, failure_cause="nothing shows it")), "nothing shows it"),
    ],
)
def test_missed_fault_fails_verdict(saved, tmp_path, records, finding):
    run = shutil.copytree(saved, tmp_path / "run")
    (run / "chaos/faults.jsonl").unlink()
    found = verdict_of(write_faults(run, records))
    assert line(found, "faults").passed is False
    assert finding in line(found, "faults").finding
    assert not found.survived


def test_plan_without_faults_fails_criterion(saved):
    assert line(verdict_of(saved, plan=replace(PLAN, faults=())), "faults").passed is False


def test_unplanned_exit_fails_verdict(saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "run")
    record_fault(run, EPOCH + 30.0, "learner 3", "exit code 1", False)
    found = verdict_of(run)
    assert (
        line(found, "unplanned ends").finding
        == "1 processes exited unplanned; the first: learner 3 ended by exit code 1"
    )
    assert not found.survived
    poison = PlannedFault(3, 25.0, "nan", Target("payload", 3), {"count": 3.0}, "schedule 3")
    assert line(verdict_of(run, plan=replace(PLAN, faults=(*PLAN.faults, poison))), "unplanned ends").passed


def test_protocol_violation_fails_verdict(tmp_path):
    run = eventful_run()
    for index, entry in enumerate(run.entries):
        if any(isinstance(effect, MergeRound) and len(effect.contributions) > 1 for effect in entry.effects):
            effects = tuple(
                structs.replace(e, contributions=e.contributions[:1]) if isinstance(e, MergeRound) else e
                for e in entry.effects
            )
            run.entries[index] = entry._replace(effects=effects)
            break
    found = verdict_of(save_with_faults(run, tmp_path / "run"))
    assert line(found, "invariants").passed is False
    assert "quorum" in line(found, "invariants").finding
    assert not found.survived


def test_missing_tape_fails_invariants(saved, tmp_path):
    run = shutil.copytree(saved, tmp_path / "run")
    tape_path(run, Actor(1, 1)).unlink()
    found = verdict_of(run)
    assert line(found, "invariants").passed is False
    assert "evaluated only up to" in line(found, "invariants").finding


def test_learner_that_never_returns_fails_recovery_criteria(tmp_path):
    run = TinyRun()
    run.run_until(12.0)
    run.kill(2)
    run.run_until(40.0)
    run.finish()
    where = save_with_faults(run.run_until(80.0), tmp_path / "run")
    found = verdict_of(where, {**expected("kill_to_step_s", 60.0), **expected("kill_to_merge_s", 60.0)})
    assert line(found, "kill to step").finding == "after fault 1 (kill learner 2 downtime 2 s): never"
    assert line(found, "kill to merge").passed is False
    assert found.islands[1].away_s > 20.0


def test_unfinished_run_fails_verdict(tmp_path):
    found = verdict_of(save_with_faults(TinyRun().run_until(20.0), tmp_path / "run"))
    assert line(found, "ended").finding == "the syncer has not finished the run"
    assert not found.survived


@pytest.mark.parametrize(
    ("outcome", "name", "finding"),
    [
        (replace(FINISHED, interrupted=True), "ended", "the run was interrupted"),
        (replace(FINISHED, failed="no disk"), "ended", "the run failed: no disk"),
        (
            replace(FINISHED, loss=replace(LOSS, final=6.0)),
            "learned",
            "worse than at the start: loss 6.000 after 5.000",
        ),
        (
            replace(FINISHED, loss=replace(LOSS, final=2.5)),
            "loss",
            "2.500 against 1.950 without faults: +28.21 %, at most +10 %",
        ),
    ],
)
def test_outcome_and_loss_can_fail_verdict(saved, outcome, name, finding):
    found = verdict_of(saved, expected("loss_within", 0.1), outcome)
    assert line(found, name).passed is False
    assert finding in line(found, name).finding
    assert not found.survived


def test_criterion_without_value_is_not_evaluated(saved):
    found = verdict_of(saved, expected("loss_within", 0.1), replace(FINISHED, loss=replace(LOSS, baseline=None)))
    assert line(found, "loss").passed is None
    assert "use --baseline" in line(found, "loss").finding
    assert found.survived


@pytest.mark.parametrize(
    ("figure", "passing", "failing"),
    [
        ("goodput", 0.5, 0.9999),
        ("goodput_up", 0.9, 1.5),
        ("uptime", 0.9, 1.5),
        ("merge_participation", 0.2, 1.5),
        ("worst_pause_s", 1.5, 0.5),
        ("kill_to_step_s", 20.0, 1.0),
        ("kill_to_merge_s", 30.0, 1.0),
        ("loss_within", 0.1, 0.01),
    ],
)
def test_every_expectation_can_pass_and_fail(saved, figure, passing, failing):
    assert verdict_of(saved, expected(figure, passing)).survived
    assert not verdict_of(saved, expected(figure, failing)).survived


def test_every_figure_has_a_test():
    marks = next(m for m in test_every_expectation_can_pass_and_fail.pytestmark if m.name == "parametrize")
    assert {figure for figure, _, _ in marks.args[1]} == set(EXPECTABLE_FIGURES)


def test_run_that_never_started_has_verdict(tmp_path):
    found = evaluate_run(tmp_path, PLAN, expected("goodput", 0.5), replace(FINISHED, failed="no port"), None)
    assert not found.survived
    assert found.goodput == 0.0
    assert "no port" in render_page(found)


# --------------------------------------------------------------------------------------------------------------------
# Time


SPANS = st.tuples(st.floats(0, 50), st.floats(0.1, 20)).map(lambda each: (each[0], each[0] + each[1]))


@given(st.lists(SPANS, max_size=4), SPANS, st.integers(1, 60))
def test_time_shares_always_add_up(stops, span, steps):
    process = LearnerProcess(1, 1.0, 2.0 + 0.5 * steps, 2.0)
    for number in range(1, steps):
        process.add_step(2.0 + 0.5 * number, 0.45, 1, 10)
    apart = [stop for n, stop in enumerate(stops) if all(overlap_s(stop, other) == 0 for other in stops[:n])]
    found = compute_time_shares(1, [process], span, apart)
    assert all(getattr(found, each.name) >= 0 for each in fields(TimeShares))
    parts = (getattr(found, each.name) for each in fields(TimeShares) if each.name not in ("learner", "allocated_s"))
    assert sum(parts) == pytest.approx(found.allocated_s)
    assert math.isfinite(found.goodput)
    timeline = RunTimeline(keep=None)
    timeline.processes[1] = [process]
    timeline.refresh()
    bands = timeline.state_spans(1, span[0], span[1], apart)
    assert all(before.end == after.begin for before, after in pairwise(bands))
    there_s = overlap_s(span, (process.first_entry_at, process.last_entry_at))
    assert sum(band.end - band.begin for band in bands) == pytest.approx(there_s)


@given(SPANS, SPANS)
def test_clipped_span_is_as_long_as_the_overlap(one, other):
    found = clip(one, other)
    assert (found[1] - found[0] if found else 0.0) == overlap_s(one, other) == overlap_s(other, one)


# --------------------------------------------------------------------------------------------------------------------
# The page


class Balanced(HTMLParser):
    """Check that every tag is closed in order; collect text and attributes."""

    VOID = frozenset({"meta", "br", "line", "rect", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parse_page(text: str) -> Balanced:
    found = Balanced()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


def test_page_is_self_contained(saved):
    found = verdict_of(saved, expected("goodput", 0.9999))
    text = render_page(found)
    read = parse_page(text)
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", text)
    assert not [name for name, _ in read.attributes if name in ("src", "href", "onclick")]
    assert "prefers-color-scheme: dark" in text
    for part in ("did not survive", "learner 3", "kill syncer downtime 2 s", "it is a test", "tiny"):
        assert part in read.text
    ticks = next(value for name, value in read.attributes if name == "d" and value and "v16" in value)
    assert ticks.count("M") == found.merges


def test_every_color_of_the_page_is_defined(saved):
    text = render_page(verdict_of(saved))
    used = set(re.findall(r"var\(--(\w+)\)", text))
    assert {"training", "gone", "line"} <= used <= set(re.findall(r"--(\w+):", text))


def test_page_escapes_html(saved):
    plan = replace(PLAN, about="<script>alert(1)</script>", scenario="a&b")
    text = render_page(verdict_of(saved, plan=plan, outcome=replace(FINISHED, links="<b>")))
    parse_page(text)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


# --------------------------------------------------------------------------------------------------------------------
# docs/chaos.md


SECTIONS = {
    "verdict.json": Verdict,
    "`criteria`": Criterion,
    "`worst_pause`": WorstPause,
    "`islands`": TimeShares,
    "`faults`": FaultReport,
    "`loss`": Loss,
}


def documented_names(heading: str, page: str = PAGE) -> list[str]:
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page, re.DOTALL | re.MULTILINE)
    assert found, f"docs/chaos.md has no section {heading}"
    return re.findall(r"^\| `([\w-]+)` \|", found[1], re.MULTILINE)


@pytest.mark.parametrize(("heading", "kind"), SECTIONS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_docs_list_exactly_the_fields_of_the_verdict(heading, kind):
    extra = ["goodput"] if kind is TimeShares else []
    assert documented_names(heading) == [each.name for each in fields(kind)] + extra


def test_every_part_of_the_verdict_has_a_section():
    hints = typing.get_type_hints(Verdict)
    parts = {part for hint in hints.values() for part in (hint, *typing.get_args(hint)) if is_dataclass(part)}
    assert parts <= set(SECTIONS.values())


def test_docs_list_every_fault_scenario_figure_and_criterion():
    assert documented_names("Faults") == list(FAULT_KINDS)
    assert documented_names("Shipped scenarios") == list(shipped_scenarios())
    assert documented_names("What a scenario may expect") == list(EXPECTABLE_FIGURES)
    assert [name.replace("-", " ") for name in documented_names("What is always asked")] == ALWAYS
    assert documented_names("Faults", PAGE.replace("| `kill` |", "| `murder` |")) != list(FAULT_KINDS)
