"""Long runs: stored rows are bounded, sums stay exact, and past states stay available."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.dashboard.run_history import RunHistory, read_story
from atoll.dashboard.view import timeline, view_at
from atoll.tape.bounded_logs import Downsampler, MergeLog, MergeRow, TimeSeries
from atoll.tape.learner_processes import LearnerProcess
from atoll.tape.time_shares import compute_time_shares
from tests.tiny_run import TinyRun

KEEP = 64


def merge_at(at: float) -> MergeRow:
    contributors = ((1, 1), (2, 1)) if int(at) % 3 else ((1, 1),)
    weights = (0.75, 0.25) if len(contributors) == 2 else (1.0,)
    return MergeRow(
        at,
        1,
        int(at) % 7,
        int(at),
        3,
        3,
        len(contributors),
        contributors,
        weights,
        10.0,
        0.2,
        0.5 if int(at) % 2 else None,
    )


def run_process(steps: int) -> LearnerProcess:
    process = LearnerProcess(1, 0.0, 0.0, 0.0, KEEP)
    for number in range(1, steps + 1):
        process.add_step(1.0 * number, 0.9, 1, 100)
    process.last_entry_at = float(steps)
    return process


@given(st.integers(1, 3000))
def test_levels_are_bounded_and_cover_all_entries(count):
    levels, rows = Downsampler(8), []
    for number in range(count):
        rows.append([number])
        for first, stop in levels.add():
            assert (stop - first) % 2 == 0
            rows[first:stop] = [
                one + other for one, other in zip(rows[first:stop:2], rows[first + 1 : stop : 2], strict=True)
            ]
    assert [each for row in rows for each in row] == list(range(count))
    assert len(rows) <= 8 * max(1.0, math.log2(count) + 1)
    assert [len(row) for row in rows] == sorted((len(row) for row in rows), reverse=True), "older rows are coarser"
    assert levels.joined == sum(len(row) > 1 for row in rows)


def test_row_count_is_bounded_and_sums_are_exact():
    short, long = run_process(2_000), run_process(200_000)
    assert len(long.log) < 3 * len(short.log) < 20 * KEEP
    for process, count in ((short, 2_000), (long, 200_000)):
        assert (process.steps, process.tokens) == (count, 100 * count)
        shares = compute_time_shares(1, [process], (0.0, float(count)))
        assert shares.in_steps_s == pytest.approx(0.9 * count)
        assert shares.stepping_s + shares.between_s == pytest.approx(count)
    assert len(long.stepping_spans) == 1


def test_old_times_are_approximated():
    process = run_process(200_000)
    for at in (10.0, 5_000.0, 77_777.0, 150_000.5, 199_990.0):
        coarse = max(2.0, 4 * (200_000 - at) / KEEP)
        assert process.log.steps_until(at) == pytest.approx(at, abs=coarse)
        assert process.log.tokens_until(at) == pytest.approx(100 * at, abs=100 * coarse)
        shares = compute_time_shares(1, [process], (0.0, at))
        assert shares.stepping_s + shares.between_s + shares.away_s == pytest.approx(at)
        assert shares.in_steps_s == pytest.approx(0.9 * at, abs=coarse)
    known = [process.log.tokens_until(at) for at in range(0, 200_000, 500)]
    assert known == sorted(known)


def test_joined_merges_have_means_and_exact_count():
    log, whole = MergeLog(KEEP), MergeLog(None)
    for number in range(1, 20_001):
        for each in (log, whole):
            each.add(merge_at(float(number)))
    assert len(log.rows) < 12 * KEEP < len(whole.rows)
    assert log.total == whole.total == 20_000
    assert log.contributions == whole.contributions
    assert sum(row.merged * row.merge_count for row in log.rows) == pytest.approx(log.contributions)
    assert all(sum(row.weights) == pytest.approx(1.0) for row in log.rows)
    assert all(before.at < after.at for before, after in pairwise(log.rows))
    assert log.newest(20_000.0, 5) == whole.newest(20_000.0, 5), "the newest are exact"
    old = log.newest(3_000.0, 21)
    assert sum(each.merge_count for each in old) >= 21
    assert log.until(3_000.0) == pytest.approx(3_000, abs=600)


def test_joined_series_keep_means_gaps_and_ends():
    loss, sums = TimeSeries(keep=KEEP), TimeSeries(is_cumulative=True, keep=KEEP)
    for number in range(50_000):
        loss.add(float(number), math.nan if 1000 <= number < 9000 else 2.0)
        sums.add(float(number), float(number))
    assert len(loss.at) == len(sums.at) < 12 * KEEP
    assert {value for value in loss.value if value == value} == {2.0}
    assert loss.value_at(5_000.0) is None
    assert sums.value_at(49_999.0) == 49_999.0
    assert sums.rate(10_000.0, 40_000.0) == pytest.approx(1.0)


# --------------------------------------------------------------------------------------------------------------------
# Histories


def stored_rows(history: RunHistory) -> int:
    processes = [
        process
        for processes in (*history.processes.values(), *history.untaped_processes.values())
        for process in processes
    ]
    return (
        sum(len(process.log) + len(process.stepping_spans) + len(process.disconnected) for process in processes)
        + sum(len(tenure.merges.rows) + len(tenure.log_lines) for tenure in history.tenures)
        + sum(len(track.at) for track in history.metrics.series.values())
        + sum(map(len, history.seek_points.values()))
    )


def read_history(run, keep):
    found = RunHistory(run, keep=keep)
    while found.update():
        pass
    return found


def save_run(directory, until):
    run = TinyRun().run_until(until).save(directory)
    (run / "store").mkdir()
    (run / "store" / "run.json").write_text(json.dumps({"value": {"founded_at": 0.0}}))
    (run / "metrics").mkdir()
    lines = [
        json.dumps({"at": float(step), "learner": 1, "start": 1, "step": step, "loss": 3.0, "bytes_up": step * 10})
        for step in range(1, int(until))
    ]
    (run / "metrics" / "learner-1.jsonl").write_text("\n".join(lines) + "\n")
    return run


@pytest.mark.long
def test_history_is_bounded_with_exact_totals(tmp_path):
    short = read_history(save_run(tmp_path / "short", 150.0), 16)
    run = save_run(tmp_path / "long", 1500.0)
    bounded, whole = read_history(run, 16), read_history(run, None)
    assert stored_rows(bounded) < 3 * stored_rows(short)
    assert stored_rows(whole) > 8 * stored_rows(bounded)
    one, other = view_at(bounded), view_at(whole)
    for name in ("tokens", "goodput", "uptime", "merges", "loss", "alive"):
        assert one["headline"][name] == pytest.approx(other["headline"][name])
    for mine, theirs in zip(one["islands"], other["islands"], strict=True):
        assert mine["time_split"] == pytest.approx(theirs["time_split"])
        assert (mine["step"], mine["tokens"]) == (theirs["step"], theirs["tokens"])
    then, expected = view_at(bounded, 300.0), view_at(whole, 300.0)
    assert then["headline"]["tokens"] == pytest.approx(expected["headline"]["tokens"], rel=0.2)
    assert then["headline"]["goodput"] == pytest.approx(expected["headline"]["goodput"], abs=0.05)
    assert {each["state"] for each in then["islands"]} == {"training"}
    assert sum(each["weight"] for each in then["islands"]) == pytest.approx(1.0)
    rounds = timeline(bounded, None, None, 2000)["rounds"]
    assert sum(each["count"] for each in rounds) == one["headline"]["merges"]
    assert read_story(bounded, ("learner", 1), 300.0, 5).lines == read_story(whole, ("learner", 1), 300.0, 5).lines


def test_past_tenure_releases_core(tmp_path):
    run = TinyRun().run_until(20.0)
    for at in (30.0, 40.0, 50.0):
        run.kill(0)
        run.run_until(at - 5.0)
        run.start(0)
        run.run_until(at)
    history = read_history(run.save(tmp_path), 16)
    assert [tenure.is_over for tenure in history.tenures] == [True, True, True, False]
    assert view_at(history, 35.0)["ledger"]["balanced"]
    assert view_at(history)["syncer"]["epoch"] == 4


@pytest.mark.long
def test_metrics_are_read_in_batches(tmp_path):
    run = save_run(tmp_path, 1000.0)
    history = RunHistory(run)
    updates = 0
    while history.update(0.0):  # the smallest possible batch
        assert history.metrics.lines_read <= 64 * (updates + 1)
        updates += 1
    assert updates >= 999 // 64
    assert history.metrics.lines_read == 999
    assert history.metrics.value("loss", 1, 998.0) == 3.0


def test_long_read_is_complete(tmp_path):
    history = RunHistory(save_run(tmp_path, 300.0))
    assert history.metrics.read_new(time.monotonic() + 60.0) is False
    assert history.metrics.lines_read == 299
