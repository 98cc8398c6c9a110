"""The report: its page tells every field, and its figures follow from tapes, metrics and faults."""

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

JUDGED = ModelEvaluation(2.0, 4096, 5.5, "00" * 16, 1000)


def told_fields(page: str, heading: str) -> list[str]:
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page, re.DOTALL | re.MULTILINE)
    assert found, f"docs/report.md has no section {heading}"
    return re.findall(r"^\| `(\w+)` \|", found[1], re.MULTILINE)


@pytest.mark.parametrize(("heading", "kind"), SECTIONS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_the_page_tells_exactly_the_fields_of_the_report_in_their_order(heading, kind):
    assert told_fields(PAGE, heading) == [each.name for each in fields(kind)]


def test_the_comparison_with_the_page_can_fail():
    assert told_fields(PAGE.replace("| `goodput` |", "| `goodness` |"), "report.json") != [
        each.name for each in fields(JobReport)
    ]


def test_every_part_of_the_report_has_a_section_of_the_page():
    hints = typing.get_type_hints(JobReport)
    parts = {part for hint in hints.values() for part in (hint, *typing.get_args(hint)) if is_dataclass(part)}
    assert parts <= set(SECTIONS.values())


def test_the_names_that_were_promised_are_there():
    promised = (
        "method learners seed wall_s goodput uptime steps tokens rounds contributions_per_merge effective_h bytes"
        " eval_loss eval_tokens final_digest faults islands"
    )
    assert set(promised.split()) <= {each.name for each in fields(JobReport)}


# --------------------------------------------------------------------------------------------------------------------
# A decoupled run


@pytest.fixture(scope="module")
def eventful(tmp_path_factory) -> Path:
    """Learner 2 is killed and comes back, the syncer too, then the run ends in order."""
    return eventful_run().save(tmp_path_factory.mktemp("eventful"))


def test_steps_and_lives_are_what_the_learners_were_told(eventful):
    books = read_timeline(eventful)
    assert sorted(books.processes) == [1, 2, 3]
    assert [len(processes) for _, processes in sorted(books.processes.items())] == [1, 2, 1]
    for processes in books.processes.values():
        assert all(process.tokens == process.steps * TOKENS_PER_STEP for process in processes)
        assert median_step_s(processes) == pytest.approx(STEP_S)
    assert books.is_finished


def test_the_books_are_the_syncers_and_balance(eventful):
    books = read_timeline(eventful)
    assert books.current_tenure is not None
    ledger = mean_ledger_line(books.current_tenure.ledger_lines())
    assert ledger.trained == sum(process.tokens for processes in books.processes.values() for process in processes)
    assert ledger.is_balanced()
    assert sum(ledger.dropped.values()) > 0, "the tokens of the killed learner must be lost somewhere"


def test_goodput_lacks_the_time_in_which_a_learner_was_away(eventful):
    books = read_timeline(eventful)
    before, after = books.processes[2]
    away_s = after.joined_at - before.log.ends[-1]
    assert away_s > 2.0, "the fault must have fired"
    goodput, uptime = books.goodput(), books.uptime()
    assert goodput is not None
    assert 1.0 - goodput == pytest.approx(away_s / (3 * books.wall_s()), abs=0.01)
    assert uptime is not None
    assert uptime > 0.99


def test_effective_h_is_that_of_the_protocol(eventful):
    books = read_timeline(eventful)
    found = books.effective_h()
    assert found is not None
    assert books.current_tenure is not None
    every = books.current_tenure.core.state.config.every_steps
    assert every <= found < every + 2


def test_the_pause_of_a_whole_job_is_no_time_of_the_run(tmp_path):
    run = TinyRun()
    run.run_until(20.0)
    for who in (1, 2, 3, SYNCER):
        run.kill(who)
    run.run_until(1020.0)
    for who in (SYNCER, 1, 2, 3):
        run.start(who)
    run.run_until(1040.0)
    books = read_timeline(run.save(tmp_path))
    assert 30.0 < books.wall_s() < 41.0
    goodput = books.goodput()
    assert goodput is not None
    assert goodput > 0.9
    assert not books.is_finished


def decoupled(run: Path, **settings) -> JobReport:
    return reports.decoupled_report(run, JobSettings(learners=3, **settings), JUDGED, founded_at=0.0)


def test_a_fault_says_what_it_cost_and_that_the_others_went_on(eventful):
    reports.record_fault(eventful, 12.0, "learner 2", "SIGKILL", planned=True)
    report = decoupled(eventful)
    (fault,) = report.faults
    assert (fault.who, fault.what, fault.planned) == ("learner 2", "SIGKILL", True)
    assert fault.away_s is not None
    assert fault.away_s > 2.0
    assert fault.came_back_with is not None
    assert "optimizer state from learner" in fault.came_back_with
    assert fault.others_step_s_before == fault.others_step_s_during == STEP_S


def test_summary_calls_tokens_of_a_learner_that_did_not_come_back_lost(tmp_path):
    run = TinyRun()
    run.run_until(20.0)
    run.kill(2)
    run.finish()
    run.run_until(60.0).save(tmp_path)
    with LearnerMetricsWriter(tmp_path, 1, 1, {"bytes_up": 100, "bytes_down": 200}.copy) as metrics:
        metrics.record_step(InnerStep(3.0, TOKENS_PER_STEP, 0.1, 0.2, 0.3))
    reports.record_fault(tmp_path, 20.0, "learner 2", "SIGKILL", planned=True)
    report = decoupled(tmp_path)
    assert report.tokens.pending > 0 == report.tokens.dropped, "its account must be open at the end"
    said = " ".join(" ".join(summary_lines(report, JobSettings(learners=3), tmp_path)).split())
    assert "It did not train again before the run ended. Its unmerged work is lost." in said
    assert "are in no version: trained while the last merges were made, or lost with learner 2, which did not" in said
    assert "0 % were lost" not in said


def test_bytes_are_those_of_the_last_line_of_each_process(eventful):
    for start, told in ((1, {"bytes_up": 100, "bytes_down": 200}), (2, {"bytes_up": 10, "bytes_down": 20})):
        with LearnerMetricsWriter(eventful, 2, start, told.copy) as metrics:
            metrics.record_step(InnerStep(3.0 + start, TOKENS_PER_STEP, 0.1, 0.2, 0.3))
    report = decoupled(eventful)
    assert (report.islands[1].bytes_up, report.islands[1].bytes_down) == (110, 220)
    assert report.islands[1].loss == 5.0
    assert report.bytes == ByteTotals(110, 220, 330 / report.tokens.trained)


def test_a_report_is_json_with_these_fields_and_no_others(eventful, tmp_path):
    report = decoupled(eventful, step_time_s=0.05, speeds=(1.0, 1.0, 0.5))
    kept = json.loads(report.save(tmp_path).read_text(encoding="utf-8"))
    assert list(kept) == [each.name for each in fields(JobReport)]
    assert kept["paced"] == {"step_time_s": 0.05, "speeds": [1.0, 1.0, 0.5]}
    assert list(kept["islands"][0]) == [each.name for each in fields(IslandReport)]
    assert kept["tokens"]["trained"] == report.tokens.trained


def test_overlapping_spans_are_counted_once():
    assert union_length_s([]) == 0.0
    assert union_length_s([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (2.0, 2.5)]) == 4.0
