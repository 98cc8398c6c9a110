"""Tests of the report: docs/report.md lists every field, and the values follow from tapes, metrics and faults."""

from __future__ import annotations

import json
import re
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from atoll.cli.train import summary_lines
from atoll.core.types import SYNCER
from atoll.reference import report as reports
from atoll.reference.job_settings import JobSettings
from atoll.reference.loop import InnerStep, LearnerMetricsWriter
from atoll.reference.report import (
    ByteTotals,
    IslandReport,
    JobReport,
    ModelEvaluation,
    PaceSettings,
    ProcessFault,
    TokenTotals,
)
from atoll.tape.learner_processes import median_step_s
from atoll.tape.syncer_tenures import mean_ledger_line
from atoll.tape.time_shares import union_length_s
from atoll.tape.timeline import read_timeline
from tests.tiny_run import STEP_S, TOKENS_PER_STEP, TinyRun, eventful_run

PAGE = (Path(__file__).resolve().parents[2] / "docs/report.md").read_text(encoding="utf-8")
SECTIONS = {
    "report.json": JobReport,
    "`tokens`": TokenTotals,
    "`bytes`": ByteTotals,
    "`paced`": PaceSettings,
    "`faults`": ProcessFault,
}
SECTIONS["`islands`"] = IslandReport

EVALUATION = ModelEvaluation(2.0, 4096, 5.5, "00" * 16, 1000)


def documented_fields(page: str, heading: str) -> list[str]:
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page, re.DOTALL | re.MULTILINE)
    assert found, f"docs/report.md has no section {heading}"
    return re.findall(r"^\| `(\w+)` \|", found[1], re.MULTILINE)


@pytest.mark.parametrize(("heading", "kind"), SECTIONS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_page_lists_exactly_the_fields_of_the_report_in_order(heading, kind):
    assert documented_fields(PAGE, heading) == [each.name for each in fields(kind)]


def test_comparison_with_the_page_detects_a_renamed_field():
    assert documented_fields(PAGE.replace("| `goodput` |", "| `goodness` |"), "report.json") != [
        each.name for each in fields(JobReport)
    ]


def test_every_part_of_the_report_has_a_section_in_the_page():
    hints = typing.get_type_hints(JobReport)
    parts = {part for hint in hints.values() for part in (hint, *typing.get_args(hint)) if is_dataclass(part)}
    assert parts <= set(SECTIONS.values())


def test_report_has_all_stable_field_names():
    stable = (
        "method learners seed wall_s goodput uptime steps tokens rounds contributions_per_merge effective_h bytes"
        " eval_loss eval_tokens final_digest faults islands"
    )
    assert set(stable.split()) <= {each.name for each in fields(JobReport)}


# --------------------------------------------------------------------------------------------------------------------
# A decoupled run


@pytest.fixture(scope="module")
def eventful(tmp_path_factory) -> Path:
    """Run in which learner 2 and the syncer are killed and restarted, and which then finishes."""
    return eventful_run().save(tmp_path_factory.mktemp("eventful"))


def test_timeline_has_the_steps_and_incarnations_of_every_learner(eventful):
    timeline = read_timeline(eventful)
    assert sorted(timeline.processes) == [1, 2, 3]
    assert [len(processes) for _, processes in sorted(timeline.processes.items())] == [1, 2, 1]
    for processes in timeline.processes.values():
        assert all(process.tokens == process.steps * TOKENS_PER_STEP for process in processes)
        assert median_step_s(processes) == pytest.approx(STEP_S)
    assert timeline.is_finished


def test_ledger_is_that_of_the_syncer_and_balances(eventful):
    timeline = read_timeline(eventful)
    assert timeline.current_tenure is not None
    ledger = mean_ledger_line(timeline.current_tenure.ledger_lines())
    assert ledger.trained == sum(process.tokens for processes in timeline.processes.values() for process in processes)
    assert ledger.is_balanced()
    assert sum(ledger.dropped.values()) > 0, "no tokens of the killed learner were dropped"


def test_goodput_excludes_the_time_in_which_a_learner_was_down(eventful):
    timeline = read_timeline(eventful)
    before, after = timeline.processes[2]
    away_s = after.joined_at - before.log.ends[-1]
    assert away_s > 2.0, "learner 2 was not killed"
    goodput, uptime = timeline.goodput(), timeline.uptime()
    assert goodput is not None
    assert 1.0 - goodput == pytest.approx(away_s / (3 * timeline.wall_s()), abs=0.01)
    assert uptime is not None
    assert uptime > 0.99


def test_effective_h_is_close_to_every_steps(eventful):
    timeline = read_timeline(eventful)
    found = timeline.effective_h()
    assert found is not None
    assert timeline.current_tenure is not None
    every = timeline.current_tenure.core.state.config.every_steps
    assert every <= found < every + 2


def test_time_between_stop_and_resume_does_not_count(tmp_path):
    run = TinyRun()
    run.run_until(20.0)
    for process in (1, 2, 3, SYNCER):
        run.kill(process)
    run.run_until(1020.0)
    for process in (SYNCER, 1, 2, 3):
        run.start(process)
    run.run_until(1040.0)
    timeline = read_timeline(run.save(tmp_path))
    assert 30.0 < timeline.wall_s() < 41.0
    goodput = timeline.goodput()
    assert goodput is not None
    assert goodput > 0.9
    assert not timeline.is_finished


def decoupled(run: Path, **settings) -> JobReport:
    return reports.decoupled_report(run, JobSettings(learners=3, **settings), EVALUATION, founded_at=0.0)


def test_fault_has_its_downtime_and_the_step_times_of_the_others(eventful):
    reports.record_fault(eventful, 12.0, "learner 2", "SIGKILL", planned=True)
    report = decoupled(eventful)
    (fault,) = report.faults
    assert (fault.who, fault.what, fault.planned) == ("learner 2", "SIGKILL", True)
    assert fault.away_s is not None
    assert fault.away_s > 2.0
    assert fault.came_back_with is not None
    assert "optimizer state from learner" in fault.came_back_with
    assert fault.others_step_s_before == fault.others_step_s_during == STEP_S


def test_summary_reports_tokens_of_a_learner_that_did_not_return_as_lost(tmp_path):
    run = TinyRun()
    run.run_until(20.0)
    run.kill(2)
    run.finish()
    run.run_until(60.0).save(tmp_path)
    with LearnerMetricsWriter(tmp_path, 1, 1, {"bytes_up": 100, "bytes_down": 200}.copy) as metrics:
        metrics.record_step(InnerStep(3.0, TOKENS_PER_STEP, 0.1, 0.2, 0.3))
    reports.record_fault(tmp_path, 20.0, "learner 2", "SIGKILL", planned=True)
    report = decoupled(tmp_path)
    assert report.tokens.pending > 0 == report.tokens.dropped, "the killed learner has no unmerged tokens"
    summary = " ".join(" ".join(summary_lines(report, JobSettings(learners=3), tmp_path)).split())
    assert "It did not train again before the run ended. Its unmerged work is lost." in summary
    assert "are in no version: trained during the last merges, or lost with learner 2, which did not" in summary
    assert "0 % were lost" not in summary


def test_bytes_are_summed_from_the_last_line_of_each_incarnation(eventful):
    for start, counts in ((1, {"bytes_up": 100, "bytes_down": 200}), (2, {"bytes_up": 10, "bytes_down": 20})):
        with LearnerMetricsWriter(eventful, 2, start, counts.copy) as metrics:
            metrics.record_step(InnerStep(3.0 + start, TOKENS_PER_STEP, 0.1, 0.2, 0.3))
    report = decoupled(eventful)
    assert (report.islands[1].bytes_up, report.islands[1].bytes_down) == (110, 220)
    assert report.islands[1].loss == 5.0
    assert report.bytes == ByteTotals(110, 220, 330 / report.tokens.trained)


def test_saved_report_has_exactly_the_documented_fields(eventful, tmp_path):
    report = decoupled(eventful, step_time_s=0.05, speeds=(1.0, 1.0, 0.5))
    saved = json.loads(report.save(tmp_path).read_text(encoding="utf-8"))
    assert list(saved) == [each.name for each in fields(JobReport)]
    assert saved["paced"] == {"step_time_s": 0.05, "speeds": [1.0, 1.0, 0.5]}
    assert list(saved["islands"][0]) == [each.name for each in fields(IslandReport)]
    assert saved["tokens"]["trained"] == report.tokens.trained


def test_union_length_counts_overlapping_spans_once():
    assert union_length_s([]) == 0.0
    assert union_length_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (2.0, 2.5)]) == 4.0
