"""One run under fault from its plan to its verdict, and the run without faults that it is compared with."""

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
"""A run that takes longer than so many times its duration, and the time to start, will not end."""


def choose_links(requested: str, learners: int) -> tuple[str, str]:
    """`relay` or `netns`, and the words for the verdict. Namespaces where they can be had, unless told otherwise."""
    if requested == "relay":
        return "relay", "relays in user space"
    why_not = (
        netns.unavailable_reason() if learners <= netns.MAX_LINKS else f"not for more than {netns.MAX_LINKS} learners"
    )
    if why_not is None:
        return "netns", "a network namespace per learner, shaped by tc"
    if requested == "netns":
        raise ValueError(f"no network namespaces here ({why_not}): use --links relay")
    return "relay", f"relays in user space (no network namespaces: {why_not})"


def run_chaos(
    scenario: Scenario,
    plan: Plan,
    run: Path,
    view: LiveView,
    links: str = "auto",
    baseline: bool = False,
) -> Verdict:
    """Ctrl-C ends everything in order, writes the verdict of what there was, and passes on as `KeyboardInterrupt`."""
    check_is_new_run(run)
    how, words = choose_links(links, max([scenario.run.learners, *(fault.target.number for fault in plan.faults)]))
    settings = scenario.run.settings(plan.duration_s)
    corpus = Corpus.load(settings.data)
    settings = replace(settings, vocabulary=max(settings.vocabulary, corpus.vocabulary))
    run.mkdir(parents=True, exist_ok=True)
    settings.save(run / CONFIG_FILE)
    (run / CHAOS_FOLDER).mkdir()
    (run / CHAOS_FOLDER / PLAN_FILE).write_text(plan.to_text(), encoding="utf-8")
    ending = RunOutcome(words)
    with sigterm_as_interrupt():
        try:
            without = _baseline_loss(settings, run, view, corpus, baseline)
            ending = replace(ending, loss=without)
            title = f"{scenario.name}, seed {plan.seed}: {_counted(len(plan.faults))}, {settings.learners} islands"
            limit_s = START_TIMEOUT_S + MAX_SLOWDOWN * plan.duration_s
            with view:
                ChaosSupervisor(settings, run, view, title, plan, how, limit_s).train()
            view.print_line("The run is over; its tapes and its model are judged.")
            report = finish_job(settings, run, corpus)
            loss = replace(without, final=report.eval_loss, initial=report.eval_loss_before)
            ending = replace(ending, loss=loss)
        except (JobFailedError, ValueError) as failed:  # a model whose loss is not a number has no report
            ending = replace(ending, failed=str(failed))
        except KeyboardInterrupt:
            ending = replace(ending, interrupted=True)
    with defer_interrupts():
        verdict = _write_verdict(run, plan, scenario, ending)
    if ending.interrupted:
        raise ChaosInterrupt(verdict)
    return verdict


def _counted(faults: int) -> str:
    return "1 fault" if faults == 1 else f"{faults} faults"


class ChaosInterrupt(KeyboardInterrupt):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__()
        self.verdict = verdict


def _write_verdict(run: Path, plan: Plan, scenario: Scenario, ending: RunOutcome) -> Verdict:
    kept = read_run_settings(run)
    founded_at = kept.founded_at if kept is not None and any((run / "tapes").glob("*.tape")) else None
    try:
        verdict = evaluate_run(run, plan, scenario.expect, ending, founded_at)
    except TapeError as wrong:
        ending = replace(ending, failed=f"its tapes cannot be read: {wrong}")
        verdict = evaluate_run(run, plan, scenario.expect, ending, None)
    verdict.save(run)
    save_page(verdict, run)
    return verdict


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """A second Ctrl-C waits until the verdict is written."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread, where nobody is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --------------------------------------------------------------------------------------------------------------------
# The same run without faults


def baseline_directory(settings: JobSettings, run: Path) -> Path:
    """Where the run without faults of these settings is kept: beside the run, for all that have the same settings."""
    text = json.dumps(settings.to_json(), sort_keys=True)
    return run.parent / f"chaos-baseline-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _baseline_loss(settings: JobSettings, run: Path, view: LiveView, corpus: Corpus, wanted: bool) -> Loss:
    """Its loss: from an earlier run of the same settings, or trained now where that is wanted."""
    place = baseline_directory(settings, run)
    kept = place / REPORT
    if not kept.is_file():
        if not wanted:
            return Loss(None, None, None, "")
        if place.exists():
            shutil.rmtree(place)  # it was interrupted
        view.print_line("First the same run without faults.")
        start_job(settings, place, view, corpus)
    report = json.loads(kept.read_text(encoding="utf-8"))
    return Loss(None, None, report["eval_loss"], str(place))
