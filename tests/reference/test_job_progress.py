"""Tests of the progress of a job in the terminal view, with and without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from atoll.dashboard.terminal import LiveView, format_line, render
from atoll.reference.job_progress import GoodputMeter, JobProgress, job_view

STATUS = {
    "stage": "running",
    "merges": 1234,
    "progress": 0.43,
    "alive": 2,
    "pulled": 2,
    "merged": 1,
    "quorum": 1,
    "contributions_per_merge": 1.9,
    "learners": [
        {"learner": 1, "incarnation": 1, "standing": "live", "step": 410, "loss": 2.31, "tokens_per_s": 4120.4},
        {"learner": 2, "incarnation": 2, "standing": "joining", "step": 0, "link": "up"},
        {"learner": 3, "incarnation": 1, "standing": "disconnected", "step": 300, "loss": 2.4, "link": "down"},
    ],
}


def progress(**changes):
    values = {"elapsed_s": 52.0, "goodput": 0.971, "down": {3: "killed on purpose"}, "news": ["learner 3 was killed"]}
    return JobProgress("decoupled, 4 learners", 4, **{**values, **changes})


def rendered(status, job, width=100):
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(render(job_view(status, job), width))
    return stream.getvalue()


def row(text, learner):
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [str(learner)])


def test_view_has_one_row_per_learner():
    text = rendered(STATUS, progress())
    assert row(text, 1)[:4] == ["1", "training", "410", "4,120"]
    assert row(text, 2)[1] == "joining"
    assert "start 2" in text
    assert row(text, 3)[1:3] == ["lost", "300"]
    assert "killed on purpose" in text
    assert row(text, 4)[:2] == ["4", "starting"]


def test_view_shows_quorum_merges_goodput_and_news():
    text = rendered(STATUS, progress(), 200)
    for part in ("merges 1,234", "alive/pulled/merged 2/2/1", "quorum 1", "goodput 97.1 %", " 43 %", "ends in 1:08"):
        assert part in text
    assert text.rstrip().endswith("learner 3 was killed")


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("status", [{}, {"learners": []}, {"learners": [{"learner": 7}]}, STATUS])
def test_any_status_is_rendered_at_any_width(status, width):
    assert rendered(status, progress(), width)
    assert format_line(job_view(status, progress()))


def test_log_line_has_the_state_of_every_learner():
    line = format_line(job_view(STATUS, progress()))
    assert line == (
        "52 s   43 % | 1: step 410 loss 2.31 | 2: joining | 3: lost | 4: starting | 4,120 tokens/s | 1,234 merges"
        " | goodput 97.1 %"
    )
    assert " | 1 merge | " in format_line(job_view({**STATUS, "merges": 1}, progress()))


def test_log_line_summarizes_many_learners():
    status = {
        "progress": 0.5,
        "learners": [{"learner": n, "standing": "live", "step": n, "loss": 2.0} for n in range(1, 65)],
    }
    line = format_line(job_view(status, JobProgress("", 64, down={64: "killed"})))
    assert line == "0 s   50 % | 63 training, 1 lost, loss 2.00, step 1 to 63"


def test_view_without_a_terminal_prints_lines_at_intervals_and_news_at_once():
    stream = io.StringIO()
    job = progress()
    with LiveView(stream, interval_s=5.0) as view:
        for now in (0.0, 1.0, 4.9, 5.0, 6.0):
            if now == 1.0:
                job.news.append("learner 3 is restarted")
            view.show(job_view(STATUS, job), now=now)
    lines = stream.getvalue().splitlines()
    assert lines[0] == job.title
    assert [line[:12] for line in lines[1:]] == ["learner 3 wa", "52 s   43 % ", "learner 3 is", "52 s   43 % "]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_view_on_a_terminal_draws_in_place():
    stream = Terminal()
    with LiveView(stream) as view:
        view.show(job_view(STATUS, progress()))
        view.show(job_view(STATUS, progress()))
    text = stream.getvalue()
    assert "training" in text
    assert "\x1b[" in text


def test_goodput_is_training_time_over_allocated_time():
    meter = GoodputMeter(learners=4)
    assert meter.update(0.0, 0) is None
    assert meter.update(10.0, 4) is None  # the first learners start to train
    assert meter.update(20.0, 3) == 1.0
    assert meter.update(30.0, 4) == pytest.approx(0.875)
    assert meter.update(50.0, 0) == pytest.approx(0.9375)


def test_view_of_a_second_run_prints_its_title_and_all_its_news():
    stream = io.StringIO()
    view = LiveView(stream)
    for title, news in (("first", ["one", "two"]), ("second", ["three"])):
        with view:
            view.show(job_view({}, JobProgress(title, 1, news=news)))
    assert [line for line in stream.getvalue().splitlines() if not line.startswith("0 s ")] == [
        "first",
        "one",
        "two",
        "second",
        "three",
    ]
