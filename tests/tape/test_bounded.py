"""A run of a month: what is kept of it is bounded, sums stay exact, and its past can still be looked at."""

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
    who = ((1, 1), (2, 1)) if int(at) % 3 else ((1, 1),)
    weights = (0.75, 0.25) if len(who) == 2 else (1.0,)
    return MergeRow(at, 1, int(at) % 7, int(at), 3, 3, len(who), who, weights, 10.0, 0.2, 0.5 if int(at) % 2 else None)


def life_of(steps: int) -> LearnerProcess:
    process = LearnerProcess(1, 0.0, 0.0, 0.0, KEEP)
    for number in range(1, steps + 1):
        process.add_step(1.0 * number, 0.9, 1, 100)
    process.last_entry_at = float(steps)
    return process


@given(st.integers(1, 3000))
def test_levels_are_bounded_and_stand_for_every_entry(count):
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
    assert [len(row) for row in rows] == sorted((len(row) for row in rows), reverse=True), "the older the coarser"
    assert levels.joined == sum(len(row) > 1 for row in rows)


def test_a_hundred_times_as_many_steps_are_hardly_more_rows_and_the_same_sums():
    short, long = life_of(2_000), life_of(200_000)
    assert len(long.log) < 3 * len(short.log) < 20 * KEEP
    for process, count in ((short, 2_000), (long, 200_000)):
        assert (process.steps, process.tokens) == (count, 100 * count)
        shares = compute_time_shares(1, [process], (0.0, float(count)))
        assert shares.in_steps_s == pytest.approx(0.9 * count)
        assert shares.stepping_s + shares.between_s == pytest.approx(count)
    assert len(long.stepping_spans) == 1


def test_a_moment_of_the_old_part_is_coarser_and_not_wrong():
    process = life_of(200_000)
    for at in (10.0, 5_000.0, 77_777.0, 150_000.5, 199_990.0):
        coarse = max(2.0, 4 * (200_000 - at) / KEEP)
        assert process.log.steps_until(at) == pytest.approx(at, abs=coarse)
        assert process.log.tokens_until(at) == pytest.approx(100 * at, abs=100 * coarse)
        shares = compute_time_shares(1, [process], (0.0, at))
        assert shares.stepping_s + shares.between_s + shares.away_s == pytest.approx(at)
        assert shares.in_steps_s == pytest.approx(0.9 * at, abs=coarse)
    known = [process.log.tokens_until(at) for at in range(0, 200_000, 500)]
    assert known == sorted(known)


def test_merges_are_joined_by_their_means_and_counted_exactly():
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


def test_curves_are_joined_and_keep_their_means_gaps_and_ends():
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
# Pictures


def kept(picture: RunHistory) -> int:
    processes = [
        process
        for processes in (*picture.processes.values(), *picture.untaped_processes.values())
        for process in processes
    ]
    return (
        sum(len(process.log) + len(process.stepping_spans) + len(process.disconnected) for process in processes)
        + sum(len(tenure.merges.rows) + len(tenure.log_lines) for tenure in picture.tenures)
        + sum(len(track.at) for track in picture.metrics.series.values())
        + sum(map(len, picture.seek_points.values()))
    )


def pictured(run, keep):
    found = RunHistory(run, keep=keep)
    while found.update():
        pass
    return found


def saved(where, until):
    run = TinyRun().run_until(until).save(where)
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
def test_what_a_picture_keeps_is_bounded_and_its_totals_are_exact(tmp_path):
    short = pictured(saved(tmp_path / "short", 150.0), 16)
    run = saved(tmp_path / "long", 1500.0)
    thin, whole = pictured(run, 16), pictured(run, None)
    assert kept(thin) < 3 * kept(short)
    assert kept(whole) > 8 * kept(thin)
    one, other = view_at(thin), view_at(whole)
    for name in ("tokens", "goodput", "uptime", "merges", "loss", "alive"):
        assert one["headline"][name] == pytest.approx(other["headline"][name])
    for mine, theirs in zip(one["islands"], other["islands"], strict=True):
        assert mine["time_split"] == pytest.approx(theirs["time_split"])
        assert (mine["step"], mine["tokens"]) == (theirs["step"], theirs["tokens"])
    then, truth = view_at(thin, 300.0), view_at(whole, 300.0)
    assert then["headline"]["tokens"] == pytest.approx(truth["headline"]["tokens"], rel=0.2)
    assert then["headline"]["goodput"] == pytest.approx(truth["headline"]["goodput"], abs=0.05)
    assert {each["state"] for each in then["islands"]} == {"training"}
    assert sum(each["weight"] for each in then["islands"]) == pytest.approx(1.0)
    told = timeline(thin, None, None, 2000)["rounds"]
    assert sum(each["count"] for each in told) == one["headline"]["merges"]
    assert read_story(thin, ("learner", 1), 300.0, 5).lines == read_story(whole, ("learner", 1), 300.0, 5).lines


def test_a_past_epoch_gives_its_core_up(tmp_path):
    run = TinyRun().run_until(20.0)
    for at in (30.0, 40.0, 50.0):
        run.kill(0)
        run.run_until(at - 5.0)
        run.start(0)
        run.run_until(at)
    picture = pictured(run.save(tmp_path), 16)
    assert [tenure.is_over for tenure in picture.tenures] == [True, True, True, False]
    assert view_at(picture, 35.0)["ledger"]["balanced"]
    assert view_at(picture)["syncer"]["epoch"] == 4


@pytest.mark.long
def test_metrics_of_a_month_are_read_in_slices(tmp_path):
    run = saved(tmp_path, 1000.0)
    picture = RunHistory(run)
    looks = 0
    while picture.update(0.0):  # as little at a time as it can
        assert picture.metrics.lines_read <= 64 * (looks + 1)
        looks += 1
    assert looks >= 999 // 64
    assert picture.metrics.lines_read == 999
    assert picture.metrics.value("loss", 1, 998.0) == 3.0


def test_a_long_look_is_not_cut(tmp_path):
    picture = RunHistory(saved(tmp_path, 300.0))
    assert picture.metrics.read_new(time.monotonic() + 60.0) is False
    assert picture.metrics.lines_read == 299
