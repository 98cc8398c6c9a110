"""History of an eventful run: its view at any time, however its tapes grow."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.protocol import MessageArrived
from atoll.core.types import SYNCER
from atoll.dashboard.curves import Curve, compute_curve, downsample, list_series, to_csv
from atoll.dashboard.run_history import RunHistory, read_story
from atoll.dashboard.view import rounds, timeline, view_at
from atoll.tape.files import TapeReader, TapeTail, tape_path
from atoll.tape.format import TapeError
from atoll.tape.syncer_tenures import SampleHistory, take_sample
from atoll.tape.time_shares import compute_time_shares
from atoll.tape.timeline import read_timeline
from tests.tiny_run import TinyRun, eventful_run

KILLED_AT, BACK_AT = 12.0, 14.0
SYNCER_KILLED_AT, SYNCER_BACK_AT = 20.0, 22.0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return eventful_run().save(tmp_path_factory.mktemp("eventful"))


@pytest.fixture(scope="module")
def history(run):
    found = RunHistory(run)
    while found.update():
        pass
    return found


def island(shown, learner):
    return next(each for each in shown["islands"] if each["learner"] == learner)


def as_json(value):
    """Return the value as a browser receives it. Fail on NaN and on values that JSON does not have."""
    return json.loads(json.dumps(value, allow_nan=False))


# --------------------------------------------------------------------------------------------------------------------
# Views now and at earlier times


def test_view_at_end_of_run(history):
    shown = as_json(view_at(history))
    assert (shown["stage"], shown["now"], shown["loading"]) == ("finished", True, None)
    assert {each["state"] for each in shown["islands"]} == {"left"}
    assert shown["headline"]["learners"] == 3
    assert shown["ledger"]["balanced"]
    ledger = shown["ledger"]
    assert ledger["trained"] == ledger["merged"] + ledger["pending"] + sum(ledger["dropped"].values())
    assert shown["syncer"]["epoch"] == 2


def test_view_at_earlier_time_shows_state_of_each_island(history):
    states = {at: island(view_at(history, at), 2)["state"] for at in (5.0, 13.0, 30.0)}
    assert states == {5.0: "training", 13.0: "gone", 30.0: "training"}
    assert island(view_at(history, 13.0), 1)["state"] == "training"
    before, after = view_at(history, 10.0), view_at(history, 40.0)
    assert before["headline"]["tokens"] < after["headline"]["tokens"]
    assert before["headline"]["merges"] < after["headline"]["merges"]
    assert not before["now"]


def test_learners_are_disconnected_while_syncer_is_down(history):
    shown = view_at(history, 21.0)
    assert shown["syncer"]["state"] == "down"
    assert {each["state"] for each in shown["islands"]} == {"alone"}
    assert {each["link"] for each in shown["islands"]} == {"down"}
    assert view_at(history, 30.0)["syncer"] == {
        "state": "up",
        "epoch": 2,
        "since": pytest.approx(SYNCER_BACK_AT, abs=0.1),
    }


def test_pause_is_shown_with_its_requester(tmp_path):
    run = TinyRun().run_until(10.0)
    run.request_control("pause", None, "mira@head")
    run.run_until(20.0)
    run.request_control("resume", None, "mira@head")
    run.request_control("quorum", 3, "otto@head")
    found = RunHistory(run.run_until(30.0).save(tmp_path))
    while found.update():
        pass
    assert not view_at(found, 5.0)["paused"], "before the pause"
    then, now = view_at(found, 15.0), view_at(found)
    assert then["paused"]
    assert {each["state"] for each in then["islands"]} == {"paused"}
    assert not now["paused"]
    assert {each["state"] for each in now["islands"]} == {"training"}
    assert (then["headline"]["quorum"], now["headline"]["quorum"]) == (2, 3)
    texts = [mark["text"] for mark in timeline(found, None, None, 500)["marks"] if mark["kind"] == "control"]
    assert ("paused" in texts[0], "mira@head" in texts[0]) == (True, True)
    assert any("resumed" in text for text in texts[1:])
    assert any("otto@head" in text for text in texts[1:])


@pytest.mark.parametrize("until", [20.6, 21.3, 21.9, 22.01, 22.06])
def test_live_view_shows_training_learners_while_syncer_is_down(tmp_path, until):
    """No learner counts as lost, whatever its own tape and that of the new syncer have by then."""
    run = TinyRun().run_until(SYNCER_KILLED_AT)
    run.kill(SYNCER)
    run.run_until(min(until, SYNCER_BACK_AT))
    if until > SYNCER_BACK_AT:
        run.start(SYNCER)
        run.run_until(until)
    found = RunHistory(run.save(tmp_path))
    while found.update():
        pass
    assert {each["state"] for each in view_at(found)["islands"]} == {"alone"}


def test_live_view_shows_killed_learner_at_once(tmp_path):
    run = TinyRun().run_until(12.5)
    run.kill(2)
    found = RunHistory(run.run_until(13.2).save(tmp_path))
    while found.update():
        pass
    assert [each["state"] for each in view_at(found)["islands"]] == ["training", "gone", "training"]


def read_history(run):
    found = RunHistory(run)
    while found.update():
        pass
    return found


def test_unfinished_step_does_not_count_as_lost(tmp_path):
    """A step takes 1 s. This one takes longer, and its end is not known yet."""
    run = TinyRun().run_until(40.5)
    run.suspend(1, 500.0)
    soon = island(view_at(read_history(run.run_until(42.6).save(tmp_path / "soon"))), 1)["time_split"]
    assert soon["gone"] == 0.0
    assert soon["stepping"] == pytest.approx(42.5, abs=0.5), "less than three times the usual step"
    run = TinyRun().run_until(40.5)
    run.suspend(1, 500.0)
    history = read_history(run.run_until(46.0).save(tmp_path / "later"))
    assert history.member_state(1, history.newest_at).state in ("live", "suspect")
    later = island(view_at(history), 1)["time_split"]
    assert later["gone"] == 0.0
    assert later["stepping"] == pytest.approx(40.8, abs=0.5)
    assert later["paused"] == pytest.approx(4.8, abs=0.5)


def test_staleness_is_time_since_last_merge_with_learner(tmp_path):
    run = TinyRun().run_until(30.0)
    run.kill(2)
    history = read_history(run.run_until(90.0).save(tmp_path))
    last = max(m.at for m in read_timeline(tmp_path).merges() if 2 in [learner for learner, _ in m.contributors])
    shown = view_at(history)
    assert island(shown, 2)["staleness_s"] == pytest.approx(history.newest_at - last)
    assert island(shown, 1)["staleness_s"] < 5.0
    assert island(view_at(history, 60.0), 2)["staleness_s"] == pytest.approx(60.0 - last, abs=1e-6)


@pytest.mark.parametrize("off_s", [7200.0, -7200.0])
def test_clock_offset_of_hours_changes_nothing(tmp_path, off_s):
    founded_at = 10_000.0  # on the other clocks; no clock may be negative

    def save_run(directory, off_s):
        clocks_s = dict.fromkeys(range(4), founded_at) | {2: founded_at + off_s}
        run = TinyRun(clocks_s=clocks_s).run_until(30.0)
        run.kill(2)
        run.run_until(33.0)
        run.start(2)
        saved = run.run_until(60.0).save(directory)
        (saved / "store").mkdir()
        (saved / "store" / "run.json").write_text(json.dumps({"value": {"founded_at": founded_at}}))
        (saved / "metrics").mkdir()
        lines = [
            {"at": clocks_s[2] + 1.2 + step, "learner": 2, "start": 1, "step": step, "loss": 9.0 - step / 10}
            for step in range(1, 25)
        ]
        lines[20]["at"] += 40_000.0  # the clock jumps once
        (saved / "metrics" / "learner-2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_history(saved)

    right, shifted = save_run(tmp_path / "right", 0.0), save_run(tmp_path / "shifted", off_s)
    assert shifted.processes[2][0].clock_offset_s == pytest.approx(off_s, abs=0.2), "the clock must be off"
    assert shifted.newest_at == pytest.approx(right.newest_at, abs=0.2)
    one, other = timeline(right, None, None, 500), timeline(shifted, None, None, 500)
    for mine, theirs in zip(one["islands"], other["islands"], strict=True):
        assert [band[2] for band in mine["bands"]] == [band[2] for band in theirs["bands"]]
        assert [band[0] for band in mine["bands"]] == pytest.approx([band[0] for band in theirs["bands"]], abs=0.7)
    assert island(view_at(shifted), 2)["time_split"] == pytest.approx(island(view_at(right), 2)["time_split"], abs=0.8)
    loss = compute_curve(shifted, "loss.learner.2")
    assert loss.y == compute_curve(right, "loss.learner.2").y
    assert len(loss.y) == 24
    assert loss.x == pytest.approx(compute_curve(right, "loss.learner.2").x, abs=1.1)
    then = founded_at + 20.0
    assert view_at(shifted, then)["headline"]["tokens"] == pytest.approx(
        view_at(right, then)["headline"]["tokens"], abs=100
    )
    lines = read_story(shifted, ("learner", 2), then, 3).lines
    assert lines
    assert all(then - 10.0 < line.at <= then for line in lines)


def test_unknown_clock_offset_does_not_stretch_run(tmp_path):
    """The syncer's tape does not have the learner's first message yet."""
    run = TinyRun(clocks_s={3: 7200.0}).run_until(20.0).save(tmp_path)
    path = tape_path(run, next(actor for actor in TinyRun().headers if actor.learner == SYNCER))
    events = ((e.tick, e.event) for e in TapeTail(TapeReader(path)).read_new_entries())
    first = next(tick for tick, event in events if isinstance(event, MessageArrived) and event.envelope.learner == 3)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:first]) + b"\n")
    found = read_history(run)
    assert found.newest_at < 100.0
    path.write_bytes(b"\n".join(lines))
    while found.update():
        pass
    assert found.newest_at == pytest.approx(20.0, abs=1.0)
    assert [each["state"] for each in view_at(found)["islands"]] == ["training"] * 3


def test_view_before_start_is_view_at_start(history):
    shown = as_json(view_at(history, -5.0))
    assert shown["at"] == history.started_at


def test_time_split_sums_to_allocated_time(history):
    shown = view_at(history, 50.0)
    since = history.training_started_at
    assert since is not None
    for each in shown["islands"]:
        assert sum(each["time_split"].values()) == pytest.approx(50.0 - since, abs=1e-6)
    assert island(shown, 2)["time_split"]["gone"] == pytest.approx(BACK_AT - KILLED_AT, abs=1.1)
    assert island(shown, 2)["goodput"] < island(shown, 1)["goodput"]


def test_late_and_drained_learner_counts_only_while_present(tmp_path):
    run = TinyRun(learners=2).run_until(100.0)
    run.start(3)
    run.run_until(140.0)
    run.request_control("drain", 3, "mira@head")
    found = RunHistory(run.run_until(200.0).save(tmp_path))
    while found.update():
        pass
    late = island(view_at(found), 3)
    assert late["state"] == "left"
    assert 30.0 < sum(late["time_split"].values()) < 45.0
    assert late["goodput"] > 0.9
    assert view_at(found)["headline"]["goodput"] > 0.95
    bands = next(each["bands"] for each in timeline(found, None, None, 500)["islands"] if each["learner"] == 3)
    assert bands[0][0] == pytest.approx(100.0, abs=0.1)
    kinds = [mark["kind"] for mark in timeline(found, None, None, 500)["marks"] if mark["subject"] == "learner 3"]
    assert kinds == ["joined", "control", "left"]


def test_weights_sum_to_one(history):
    shown = view_at(history, 50.0)
    assert sum(each["weight"] for each in shown["islands"]) == pytest.approx(1.0)


# --------------------------------------------------------------------------------------------------------------------
# Timeline


def test_bands_have_no_gaps_and_show_kill(history):
    shown = as_json(timeline(history, None, None, 500))
    for each in shown["islands"]:
        bands = each["bands"]
        assert bands[0][0] == pytest.approx(shown["from"], abs=0.1)
        assert bands[-1][1] == pytest.approx(shown["to"])
        assert all(before[1] == pytest.approx(after[0]) for before, after in pairwise(bands))
    second = next(each["bands"] for each in shown["islands"] if each["learner"] == 2)
    lost = [band for band in second if band[2] == "gone" and band[0] > 1.0]
    assert len(lost) == 1
    assert lost[0][0] == pytest.approx(KILLED_AT, abs=1.1)
    assert lost[0][1] == pytest.approx(BACK_AT, abs=0.1)


def test_marks_show_restarts(history):
    marks = {(each["subject"], each["kind"]) for each in timeline(history, None, None, 500)["marks"]}
    assert ("learner 2", "restarted") in marks
    assert ("syncer", "syncer-restarted") in marks


def test_rounds_are_combined_if_they_do_not_fit(history):
    single = timeline(history, None, None, 2000)["rounds"]
    combined = rounds(history, history.started_at, history.newest_at, 10)
    assert all(each["count"] == 1 for each in single)
    assert len(combined) <= 11 < len(single)
    assert sum(each["count"] for each in combined) == len(single) == read_timeline(history.run).merges_until(math.inf)
    assert {each["fragment"] for each in combined if each["count"] > 1} == {None}


def test_interval_of_timeline_equals_part_of_whole_timeline(history):
    full, part = timeline(history, None, None, 2000), timeline(history, 10.0, 20.0, 2000)
    assert part["rounds"] == [each for each in full["rounds"] if 10.0 < each["at"] <= 20.0]
    assert all(band[0] >= 10.0 and band[1] <= 20.0 for each in part["islands"] for band in each["bands"])


# --------------------------------------------------------------------------------------------------------------------
# Growing


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40_000), max_size=12))
def test_tail_of_growing_tape_reads_all_entries(tmp_path_factory, cuts):
    folder = tmp_path_factory.mktemp("growing")
    saved = eventful_run().save(folder / "whole")
    whole = tape_path(saved, next(iter(eventful_run().headers)))
    data, growing = whole.read_bytes(), folder / whole.name
    growing.write_bytes(b"")
    tail, found, positions = TapeTail(TapeReader(growing)), [], []
    for end in [*sorted(cuts), len(data)]:
        growing.write_bytes(data[:end])
        for entry in tail.read_new_entries():
            found.append(entry)
            positions.append(tail.position())
    assert found == list(TapeTail(TapeReader(whole)).read_new_entries())
    middle = len(found) // 2
    assert list(TapeTail(TapeReader(growing), positions[middle]).read_new_entries()) == found[middle + 1 :]


def test_incremental_reading_equals_reading_at_once(tmp_path):
    run = TinyRun()
    pieces = []
    for end in (5.0, 13.0, 40.0):
        run.run_until(end)
        pieces.append(len(run.entries))
    growing = None
    for number, count in enumerate(pieces):
        part = TinyRun()
        part.headers, part.entries = dict(run.headers), run.entries[:count]
        target = tmp_path / "growing"
        for tape in target.glob("tapes/*"):
            tape.unlink()
        part.save(target)
        growing = growing or RunHistory(target)
        before = growing.version
        while growing.update():
            pass
        assert growing.version > before, f"piece {number} added nothing"
    at_once = RunHistory(run.save(tmp_path / "once"))
    while at_once.update(0.0):  # the smallest possible pieces
        as_json(view_at(at_once))  # a partial history must have a view
    assert growing is not None
    one, other = (as_json(view_at(each)) for each in (growing, at_once))
    assert one == other


def test_damaged_tape_is_reported_and_others_are_read(tmp_path):
    run = eventful_run().save(tmp_path / "run")
    path = tape_path(run, next(actor for actor in eventful_run().headers if actor.learner == 3))
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:20], b"garbage", *lines[21:]]))
    found = RunHistory(run)
    while found.update():
        pass
    shown = view_at(found)
    assert len(shown["tape_errors"]) == 1
    assert path.name in shown["tape_errors"][0]
    assert shown["stage"] == "finished"


def test_folder_without_tapes_is_refused(tmp_path):
    with pytest.raises(TapeError, match="not a run directory"):
        RunHistory(tmp_path)
    (tmp_path / "tapes").mkdir()
    with pytest.raises(TapeError, match="no tapes"):
        RunHistory(tmp_path)


def test_remote_learners_are_shown_from_syncer_tape(tmp_path):
    """Learners on other hosts: the directory has only the syncer's tapes."""
    run = eventful_run().save(tmp_path / "run")
    for path in (run / "tapes").glob("learner-*"):
        path.unlink()
    found = RunHistory(run)
    while found.update():
        pass
    shown = as_json(view_at(found, 13.0))
    assert island(shown, 2)["state"] == "gone"
    assert island(shown, 1)["state"] == "training"
    assert island(shown, 1)["step"] > 5
    assert island(shown, 1)["step_s"] == pytest.approx(1.0)
    assert shown["headline"]["tokens"] > 0


def test_time_split_of_remote_learners_is_derived_from_syncer_tape(tmp_path):
    """A learner is stopped, one killed, and the syncer is down for a while: derived values match those of the tapes."""
    run = TinyRun().run_until(40.5)
    run.suspend(1, 30.0)
    run.run_until(100.0)
    run.kill(2)
    run.run_until(120.0)
    run.start(2)
    run.run_until(150.0)
    run.kill(SYNCER)
    run.run_until(170.0)
    run.start(SYNCER)
    own = RunHistory(run.run_until(260.0).save(tmp_path / "own"))
    run.save(tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere" / "tapes").glob("learner-*"):
        path.unlink()
    elsewhere = RunHistory(tmp_path / "elsewhere")
    for each in (own, elsewhere):
        while each.update():
            pass
    for at in (60.0, 110.0, 160.0, 250.0):
        ours, theirs = as_json(view_at(own, at)), as_json(view_at(elsewhere, at))
        assert not ours["headline"]["derived"]
        assert theirs["headline"]["derived"]
        for name in ("goodput", "uptime"):
            assert theirs["headline"][name] == pytest.approx(ours["headline"][name], abs=0.01)
        for mine, derived in zip(ours["islands"], theirs["islands"], strict=True):
            assert (mine["derived"], derived["derived"]) == (False, True)
            assert derived["time_split"] == pytest.approx(mine["time_split"], abs=0.2)


def test_tokens_of_remote_learners_are_summed_over_processes(tmp_path):
    run = eventful_run()
    whole, part = RunHistory(run.save(tmp_path / "whole")), RunHistory(run.save(tmp_path / "part"))
    for path in (tmp_path / "part" / "tapes").glob("learner-*"):
        path.unlink()
    part = RunHistory(tmp_path / "part")
    for each in (whole, part):
        while each.update():
            pass
    for at in (5.0, 11.9, 13.0, 30.0, 60.0):
        reported, trained = part.tokens_until(at), whole.tokens_until(at)
        assert trained - 3 * 300 <= reported <= trained, f"at {at}: reports are at most some steps behind"
    known = [part.tokens_until(second / 2.0) for second in range(240)]
    assert known == sorted(known)


def test_overlapping_processes_of_a_learner_are_separated(history, tmp_path):
    """The entries of both processes alternate, as after SIGCONT."""
    found = RunHistory(eventful_run().save(tmp_path))
    tails = {actor: list(found.entries(actor, 0.0, 1e9)) for actor in found._find_tapes() if actor.learner == 2}
    mixed = RunHistory(tmp_path)
    for number in range(max(map(len, tails.values()))):
        for actor, entries in tails.items():
            if number < len(entries):
                mixed.handle_learner_entry(2, actor.generation, entries[number])
    assert [process.incarnation for process in mixed.processes[2]] == [1, 2]
    assert [len(process.log) for process in mixed.processes[2]] == [
        len(process.log) for process in history.processes[2]
    ]


def test_invalid_tape_is_reported_and_others_are_shown(tmp_path):
    run = eventful_run().save(tmp_path / "run")
    (run / "tapes" / "learner-9-i1.tape").write_bytes(b"garbage\nmore of it\n")
    found = RunHistory(run)
    while found.update():
        pass
    shown = view_at(found)
    assert shown["stage"] == "finished"
    assert len(shown["tape_errors"]) == 1


def test_nan_loss_hides_previous_loss(tmp_path):
    found = RunHistory(TinyRun().run_until(120.0).save(tmp_path))
    while found.update():
        pass
    for at, loss in ((10.0, 2.0), (50.0, 1.9), (100.0, float("nan")), (110.0, None)):
        found.metrics._add("loss.learner.3", at, loss)
    shown = as_json(view_at(found))
    assert island(shown, 3)["loss"] is None
    assert [(each["rule"], each["severity"]) for each in shown["alerts"]] == [("loss-spike", "critical")]
    assert compute_curve(found, "loss.learner.3").y == [2.0, 1.9]


# --------------------------------------------------------------------------------------------------------------------
# SampleHistory, curves, stories


def test_samples_are_bounded_and_evenly_spaced(history):
    samples = SampleHistory(max_samples=16)
    tenure = history.current_tenure
    for tenth in range(5000):
        at = tenth / 10.0
        if samples.is_due(at):
            samples.add(take_sample(tenure, at))
    stored = [each.at for each in samples.all()]
    assert 8 <= len(stored) <= 16
    gaps = [after - before for before, after in pairwise(stored)]
    assert max(gaps) < 2.1 * min(gaps)
    found = samples.before(stored[3] + 0.01)
    assert found is not None
    assert found.at == stored[3]
    assert samples.before(-1.0) is None


def test_every_series_has_a_curve(history):
    for series in list_series(history):
        for x in ("time", "tokens"):
            found = compute_curve(history, series.name, x, points=50)
            assert len(found.x) == len(found.y) <= 50
            assert all(before <= after for before, after in pairwise(found.x)), series.name
            as_json([list(found.x), list(found.y)])
    assert max(compute_curve(history, "merges.contributions").y) == 3
    with pytest.raises(KeyError):
        compute_curve(history, "loss.learner.77")


def test_goodput_equals_time_shares(history):
    facts = read_timeline(history.run)
    shares = [
        compute_time_shares(n, processes, (history.training_started_at, 50.0))
        for n, processes in facts.processes.items()
    ]
    whole = sum(each.allocated_s for each in shares)
    assert history.goodput(50.0) == pytest.approx(sum(each.stepping_s for each in shares) / whole)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(2, 50))
def test_downsampled_curve_keeps_range(values, points):
    found = downsample(Curve(sorted(values), values), points)
    assert len(found.y) <= max(points, 1)
    assert min(values) - 1e-6 <= min(found.y) <= max(found.y) <= max(values) + 1e-6


def test_csv_has_one_line_per_point(history):
    text = to_csv(history, ["merges.contributions", "goodput"], "time")
    lines = text.splitlines()
    assert lines[0] == "series,time,value"
    assert sum(line.startswith("merges.contributions,") for line in lines) == read_timeline(history.run).merges_until(
        math.inf
    )


def test_story_page_is_end_of_whole_story(history):
    whole = read_story(history, ("learner", 2), None, 100_000)
    assert not whole.has_more
    page = read_story(history, ("learner", 2), None, 10)
    assert page.has_more
    assert page.lines == whole.lines[-10:]
    early = read_story(history, ("learner", 2), 15.0, 20)
    assert all(line.at <= 15.0 for line in early.lines)
    assert any("incarnation 2" in line.sentence for line in early.lines)
    assert read_story(history, ("run", SYNCER), None, 5).lines
