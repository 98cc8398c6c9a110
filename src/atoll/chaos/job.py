"""Run a plan of faults and evaluate it, and train the baseline run without faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from atoll.chaos import netns
from atoll.chaos.fault_log import PLAN_FILE
from atoll.chaos.in_process import CHAOS_FOLDER
from atoll.chaos.page import save_page
from atoll.chaos.plan import Plan
from atoll.chaos.scenario import Scenario
from atoll.chaos.supervisor import ChaosSupervisor
from atoll.chaos.verdict import Loss, RunOutcome, Verdict, evaluate_run
from atoll.checkpoint.published_model import read_run_settings
from atoll.dashboard.terminal import LiveView
from atoll.reference.child_processes import JobFailedError, sigterm_as_interrupt
from atoll.reference.data import Corpus
from atoll.reference.job import finish_job, start_job
from atoll.reference.job_settings import JobSettings
from atoll.reference.report import REPORT
from atoll.store.run_settings import CONFIG_FILE, check_is_new_run
from atoll.tape.format import TapeError

LINK_MODES = ("auto", "relay", "netns")
START_TIMEOUT_S = 90.0
MAX_SLOWDOWN = 5.0
"""A run fails if it takes longer than this multiple of its duration, plus the time to start."""


def choose_links(requested: str, learners: int) -> tuple[str, str]:
    """Return `relay` or `netns`, and a description for the verdict. `auto` prefers namespaces."""
    if requested == "relay":
        return "relay", "relays in user space"
    if learners <= netns.MAX_LINKS:
        problem = netns.unavailable_reason()
    else:
        problem = f"{learners} learners, the limit is {netns.MAX_LINKS}"
    if problem is None:
        return "netns", "a network namespace per learner, shaped by tc"
    if requested == "netns":
        raise ValueError(f"network namespaces are not available ({problem}); use --links relay")
    return "relay", f"relays in user space (no network namespaces: {problem})"


def run_chaos(
    scenario: Scenario,
    plan: Plan,
    run: Path,
    view: LiveView,
    links: str = "auto",
    baseline: bool = False,
) -> Verdict:
    """Train the scenario's job while injecting the plan's faults, and write the verdict.

    After Ctrl-C the faults end, the processes exit in order, and the verdict of the partial run is written.

    Args:
        run: directory of the run; must be new.
        links: "relay", "netns" or "auto".
        baseline: train the same run without faults first, unless the result of an earlier one exists.

    Raises:
        ChaosInterrupt: Ctrl-C or SIGTERM; has the verdict.
    """
    check_is_new_run(run)
    last_number = max([scenario.run.learners, *(fault.target.number for fault in plan.faults)])
    mode, description = choose_links(links, last_number)
    settings = scenario.run.settings(plan.duration_s)
    corpus = Corpus.load(settings.data)
    settings = replace(settings, vocabulary=max(settings.vocabulary, corpus.vocabulary))
    run.mkdir(parents=True, exist_ok=True)
    settings.save(run / CONFIG_FILE)
    (run / CHAOS_FOLDER).mkdir()
    (run / CHAOS_FOLDER / PLAN_FILE).write_text(plan.to_text(), encoding="utf-8")
    outcome = RunOutcome(description)
    with sigterm_as_interrupt():
        try:
            baseline_loss = _baseline_loss(settings, run, view, corpus, baseline)
            outcome = replace(outcome, loss=baseline_loss)
            faults = _format_fault_count(len(plan.faults))
            title = f"{scenario.name}, seed {plan.seed}: {faults}, {settings.learners} learners"
            limit_s = START_TIMEOUT_S + MAX_SLOWDOWN * plan.duration_s
            with view:
                ChaosSupervisor(settings, run, view, title, plan, mode, limit_s).train()
            view.print_line("The run has ended; evaluating its tapes and its model.")
            report = finish_job(settings, run, corpus)
            loss = replace(baseline_loss, final=report.eval_loss, initial=report.eval_loss_before)
            outcome = replace(outcome, loss=loss)
        except (JobFailedError, ValueError) as error:  # a model whose loss is NaN has no report
            outcome = replace(outcome, failed=str(error))
        except KeyboardInterrupt:
            outcome = replace(outcome, interrupted=True)
    with ignore_interrupts():
        verdict = _write_verdict(run, plan, scenario, outcome)
    if outcome.interrupted:
        raise ChaosInterrupt(verdict)
    return verdict


def _format_fault_count(faults: int) -> str:
    return "1 fault" if faults == 1 else f"{faults} faults"


class ChaosInterrupt(KeyboardInterrupt):
    """Interrupt of a run under fault, raised after its verdict was written."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self.verdict = verdict


def _write_verdict(run: Path, plan: Plan, scenario: Scenario, outcome: RunOutcome) -> Verdict:
    stored = read_run_settings(run)
    epoch_at = stored.founded_at if stored is not None and any((run / "tapes").glob("*.tape")) else None
    try:
        verdict = evaluate_run(run, plan, scenario.expect, outcome, epoch_at)
    except TapeError as error:
        outcome = replace(outcome, failed=f"the tapes cannot be read: {error}")
        verdict = evaluate_run(run, plan, scenario.expect, outcome, None)
    verdict.save(run)
    save_page(verdict, run)
    return verdict


@contextlib.contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C in the block, so that a second one does not prevent the verdict."""
    caught: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    try:
        before = signal.signal(signal.SIGINT, record)
    except ValueError:  # not the main thread: only the main thread receives interrupts
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --------------------------------------------------------------------------------------------------------------------
# Baseline: the same run without faults


def baseline_directory(settings: JobSettings, run: Path) -> Path:
    """Return the directory of the baseline with these settings, next to the run. Runs with equal settings share it."""
    text = json.dumps(settings.to_json(), sort_keys=True)
    return run.parent / f"chaos-baseline-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _baseline_loss(settings: JobSettings, run: Path, view: LiveView, corpus: Corpus, train: bool) -> Loss:
    """Return the loss of the baseline: of an earlier run with the same settings, or of one that is trained now."""
    directory = baseline_directory(settings, run)
    report_path = directory / REPORT
    if not report_path.is_file():
        if not train:
            return Loss(None, None, None, "")
        if directory.exists():
            shutil.rmtree(directory)  # an earlier baseline was interrupted
        view.print_line("Training the baseline: the same run without faults.")
        start_job(settings, directory, view, corpus)
    report = json.loads(report_path.read_text(encoding="utf-8"))
    return Loss(None, None, report["eval_loss"], str(directory))
