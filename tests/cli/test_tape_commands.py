"""`atoll check` and `atoll replay` on correct, incorrect and damaged tapes."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL

import pytest
from msgspec import structs

from atoll.cli.check import check_with_progress, violation_story
from atoll.cli.main import main
from atoll.core.protocol import CopyFragment, MergeRound, MessageArrived
from atoll.sim.checkers import Checker, create_checkers, on
from atoll.tape.files import RunTapes, TapeReader, TapeWriter, tape_path
from atoll.tape.format import Actor
from tests.tiny_run import TinyRun, eventful_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return eventful_run().save(tmp_path_factory.mktemp("run"))


def rewritten(run: Path, to: Path, actor: Actor | None, change) -> Path:
    """Write a copy of the run with `change(header, entries)` applied to one tape, or to all."""
    for other, reader in RunTapes(run).readers.items():
        header, entries = reader.header, list(reader)
        if actor in (None, other):
            header, entries = change(header, entries)
        with TapeWriter(tape_path(to, other), header) as writer:
            for entry in entries:
                writer.write(entry)
    return to


class NoCopyAtStep(Checker):
    """Checker that reports something that every run does."""

    name = "no-copy"
    invariant = "no copy at step 9"

    def __init__(self, config) -> None:
        super().__init__(config)
        self.begun: list[Actor] = []
        self.ended = False

    def on_process_started(self, actor, restored) -> None:
        self.begun.append(actor)

    def finish(self) -> None:
        self.ended = True

    @on("effects", CopyFragment)
    def _on_copy(self, entry, effect) -> None:
        if effect.copied_at == 9:
            self.fail(entry, ("learner", entry.actor.learner), "a copy at step 9")


# --------------------------------------------------------------------------------------------------------------------
# check


def test_a_good_run_is_clean(saved, capsys):
    assert main(["check", str(saved)]) == 0
    entries = sum(1 for _ in RunTapes(saved).merged_entries())
    checkers = len(create_checkers(RunTapes(saved).config))
    assert capsys.readouterr() == (f"6 tapes, {entries:,} entries, {checkers} checkers: no violation\n", "")


def test_a_good_run_as_json(saved, capsys):
    assert main(["check", str(saved), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["tapes"], out["finished"], out["violation"], out["missing"]) == (6, True, None, [])
    assert len(out["checkers"]) >= 10


def test_conditions_at_the_end_are_not_checked_for_an_unfinished_run(tmp_path, capsys):
    assert main(["check", str(TinyRun().run_until(6.0).save(tmp_path))]) == 0
    assert "the run has not finished, so the conditions at its end were not checked" in capsys.readouterr().out


def test_checkers_see_starts_entries_and_the_end_and_the_first_violation_ends_it(saved):
    tapes = RunTapes(saved)
    calm, strict = NoCopyAtStep(tapes.config), NoCopyAtStep(tapes.config)
    calm.handlers.clear()
    assert check_with_progress(tapes, [calm]).violation is None
    assert sorted(calm.begun) == list(tapes.readers)
    assert calm.ended
    verdict = check_with_progress(tapes, [strict])
    assert verdict.violation is not None
    assert verdict.violation.entry is not None
    assert verdict.violation.subject == ("learner", verdict.violation.entry.actor.learner)
    assert not strict.ended
    lines = violation_story(tapes, verdict.violation, 3)
    assert len(lines) == 3
    assert any("at step 9" in line.sentence for line in lines)
    last = verdict.violation.entry
    assert (lines[-1].actor, lines[-1].tick) == (last.actor, last.tick)  # the story ends at the violation


def below_quorum(header, entries):
    """The syncer merges with one contribution where two are the quorum."""
    for place, entry in enumerate(entries):
        for effect in entry.effects:
            if isinstance(effect, MergeRound) and effect.round.base == 1:
                poor = structs.replace(effect, contributions=effect.contributions[:1])
                effects = tuple(poor if each is effect else each for each in entry.effects)
                entries[place] = entry._replace(effects=effects)
                return header, entries
    raise AssertionError("no merge to change")


def test_violation_is_printed_with_its_story(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path, Actor(0, 1), below_quorum)
    assert main(["check", str(run)]) == 1
    first, second, third, fourth, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("checkers: a violation")
    assert second.startswith("quorum: 1 contributions, the quorum is 2")
    assert third.startswith("found at ")
    assert "syncer epoch 1" in third
    assert fourth == "the story of fragment 0:"
    assert lines[-1].endswith("fragment 0: sealed: all 3 pulled learners have contributed")


def test_a_violation_as_json(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path, Actor(0, 1), below_quorum)
    assert main(["check", str(run), "--json", "--last", "5"]) == 1
    violation = json.loads(capsys.readouterr().out)["violation"]
    assert violation["checker"] == "quorum"
    assert violation["subject"] == ["fragment", 0]
    assert violation["actor"] == "syncer epoch 1"
    assert len(violation["story"]) == 5


# --------------------------------------------------------------------------------------------------------------------
# check on incomplete tapes


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to, dirs_exist_ok=True)
    return to


def cut(run: Path, actor: Actor, lines: int, more: int = 0) -> None:
    """Keep this many lines of a tape, and this many bytes of the next line."""
    path = tape_path(run, actor)
    lines_kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines_kept[:lines]) + lines_kept[lines][:more])


@pytest.mark.parametrize("actor", [Actor(0, 1), Actor(0, 2), Actor(2, 1), Actor(2, 2), Actor(3, 1)])
def test_a_deleted_tape_is_no_violation(saved, tmp_path, capsys, actor):
    run = copied(saved, tmp_path)
    tape_path(run, actor).unlink()
    assert main(["check", str(run)]) == 0
    out, err = capsys.readouterr()
    assert f"incomplete: there is no tape of {actor}\n" in out
    assert "checkers: no violation up to " in out
    assert err == ""


@pytest.mark.parametrize("actor", [Actor(0, 1), Actor(0, 2), Actor(2, 1), Actor(3, 1)])
@pytest.mark.parametrize("more", [0, 30])
def test_truncated_tape_is_no_violation_and_is_checked_up_to_the_cut(saved, tmp_path, actor, more):
    lines = len(tape_path(saved, actor).read_bytes().splitlines())
    for lines_kept in sorted({1, 2, 5, lines // 3, lines // 2, lines - 20, lines - 1} & set(range(lines))):
        run = copied(saved, tmp_path / str(lines_kept))
        cut(run, actor, lines_kept, more)
        tapes = RunTapes(run)
        verdict = check_with_progress(tapes, create_checkers(tapes.config))
        assert verdict.violation is None, (lines_kept, verdict.violation)
        assert bool(tapes.truncated_files()) == (more > 0)
        assert verdict.gaps or not more
        if verdict.stopped_at is not None:
            assert f"the tape of {actor} ends at tick {lines_kept - 1}" in verdict.gaps
            assert verdict.entries < sum(1 for _ in tapes.merged_entries())


def test_truncated_tape_is_reported_as_text_and_as_json(saved, tmp_path, capsys):
    run = copied(saved, tmp_path)
    path = tape_path(run, Actor(0, 1))
    path.write_bytes(path.read_bytes()[:-7])
    assert main(["check", str(run)]) == 0
    assert "incomplete: syncer-e1.tape ends with an incomplete line\n" in capsys.readouterr().out
    assert main(["check", str(run), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["violation"] is None
    assert out["complete"] is False
    assert out["truncated"] == ["syncer-e1.tape"]
    assert "syncer-e1.tape ends with an incomplete line" in out["incomplete"]


def test_end_of_the_checked_part_is_reported(saved, tmp_path, capsys):
    run = copied(saved, tmp_path)
    cut(run, Actor(3, 1), 41)
    assert main(["check", str(run)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert " s; later entries were not checked" in first
    assert second == "incomplete: the tape of learner 3 incarnation 1 ends at tick 40"
    assert third.startswith("checked up to syncer epoch 1, tick ")
    assert main(["check", str(run), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["complete"], out["incomplete"]) == (False, [second.removeprefix("incomplete: ")])
    assert f"no violation up to {out['judged_until']:.3f} s" in first


def test_violation_before_the_cut_is_found_and_after_it_is_not(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path / "late", Actor(0, 1), below_quorum)
    lines = len(tape_path(run, Actor(3, 1)).read_bytes().splitlines())
    cut(run, Actor(3, 1), lines - 30, 9)
    assert main(["check", str(run)]) == 1
    out = capsys.readouterr().out
    assert "\nquorum: 1 contributions, the quorum is 2" in out
    assert out.endswith("incomplete: learner-3-i1.tape ends with an incomplete line\n")
    run = rewritten(saved, tmp_path / "early", Actor(0, 1), below_quorum)
    cut(run, Actor(3, 1), 3)
    assert main(["check", str(run)]) == 0


def test_contradicting_tapes_are_a_violation(saved, tmp_path, capsys):
    def early(header, entries):
        """Deliver the syncer's first reply to learner 3 before its request."""
        place = next(i for i, entry in enumerate(entries) if type(entry.event) is MessageArrived)
        arrived = entries[place].event
        envelope = structs.replace(arrived.envelope, tick=arrived.envelope.tick + 200)
        entries[place] = entries[place]._replace(event=MessageArrived(envelope))
        return header, entries

    run = rewritten(saved, tmp_path, Actor(3, 1), early)
    assert main(["check", str(run)]) == 1
    assert "\nclocks: a message of tick " in capsys.readouterr().out


def test_tapes_can_be_checked_while_they_are_written(tmp_path):
    """Buffers of different sizes reach the files at different times, so the tapes end at different moments."""
    run = eventful_run()
    written = {
        header.actor: TapeWriter(tape_path(tmp_path, header.actor), header, 3000 * (1 + place % 3))
        for place, (header, _) in enumerate(run.tapes())
    }
    stopped = 0
    for number, entry in enumerate(run.entries):
        written[entry.actor].write(entry)
        if number % 97 == 0:
            tapes = RunTapes(tmp_path)
            verdict = check_with_progress(tapes, create_checkers(tapes.config))
            assert verdict.violation is None
            stopped += verdict.stopped_at is not None
    assert stopped > 5
    for writer in written.values():
        writer.close()
    tapes = RunTapes(tmp_path)
    verdict = check_with_progress(tapes, create_checkers(tapes.config))
    assert (verdict.violation, verdict.gaps, verdict.stopped_at) == (None, [], None)


@pytest.mark.long
def test_tapes_of_a_killed_simulation_can_be_checked(tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["simulate", "--learners", "4", "--chips", "40000", "--days", "3", "--full", "--tape", str(run)]
    done = subprocess.Popen([sys.executable, "-m", "atoll", *arguments], stdout=subprocess.DEVNULL)
    path = tape_path(run, Actor(4, 1))  # learners write less than the syncer, and all of them about as much
    while done.poll() is None and not (path.exists() and path.stat().st_size > 200_000):
        pass
    done.kill()
    done.wait()
    assert done.returncode == -SIGKILL, "it ended before it could be killed"
    assert main(["check", str(run), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["complete"] is False
    assert out["entries"] > 100
    assert main(["replay", str(run)]) == 0


@pytest.mark.parametrize("command", ["check", "replay"])
def test_damage_is_one_line_and_exit_code_2(saved, tmp_path, capsys, command):
    run = rewritten(saved, tmp_path, Actor(0, 1), lambda header, entries: (header, entries))
    path = tape_path(run, Actor(2, 1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], *lines[6:]]))
    assert main([command, str(run)]) == 2
    assert capsys.readouterr() == ("", f"atoll: {path}:6: tick 6 instead of 5: lines are missing\n")


@pytest.mark.parametrize("command", ["check", "replay"])
def test_a_directory_without_tapes_is_one_line_and_exit_code_2(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"atoll: {tmp_path}: not a run directory: it has no folder 'tapes'\n")


# --------------------------------------------------------------------------------------------------------------------
# replay


def test_a_good_run_replays(saved, capsys):
    assert main(["replay", str(saved)]) == 0
    entries = sum(1 for _ in RunTapes(saved).merged_entries())
    assert capsys.readouterr() == (f"6 tapes, {entries:,} entries: every effect is as recorded\n", "")
    assert main(["replay", str(saved), "--json"]) == 0
    whole = {"complete": True, "incomplete": []}
    assert json.loads(capsys.readouterr().out) == {
        "tapes": 6,
        "entries": entries,
        "difference": None,
        "training": None,  # simulated tapes have no training
        "not_trained": None,
        **whole,
    }


def test_a_cut_tape_replays_as_far_as_it_goes(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path, Actor(0, 1), lambda header, entries: (header, entries))
    path = tape_path(run, Actor(3, 1))
    path.write_bytes(path.read_bytes()[:-7])
    tape_path(run, Actor(2, 1)).unlink()
    tape_path(run, Actor(9, 1)).write_bytes(b"")
    assert main(["replay", str(run)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith("every effect is as recorded, up to the end of the tapes")
    gaps = [
        "learner-3-i1.tape ends with an incomplete line",
        "learner-9-i1.tape has no header: its process ended before it wrote one",
        "there is no tape of learner 2 incarnation 1",
    ]
    assert rest == [f"incomplete: {gap}" for gap in gaps]
    assert main(["replay", str(run), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["complete"], out["incomplete"]) == (False, gaps)


def test_a_difference_is_shown_with_both_sides(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path, Actor(0, 1), below_quorum)
    assert main(["replay", str(run)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("syncer epoch 1, tick ")
    assert "the replay produces other effects" in out
    marked = [line for line in out.splitlines() if line.startswith("  >")]
    assert len(marked) == 2
    assert marked[0].count('"AcceptedContribution"') == 1
    assert marked[1].count('"AcceptedContribution"') == 3


def test_a_difference_as_json(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path, Actor(0, 1), below_quorum)
    assert main(["replay", str(run), "--json"]) == 1
    difference = json.loads(capsys.readouterr().out)["difference"]
    assert difference["actor"] == "syncer epoch 1"
    first = difference["first"]
    assert difference["recorded"][first][0] == difference["derived"][first][0] == "MergeRound"
    assert difference["recorded"][first] != difference["derived"][first]


def test_other_settings_in_the_header_are_a_difference(saved, tmp_path, capsys):
    def slower(header, entries):
        return dataclasses.replace(header, config=dataclasses.replace(header.config, every_steps=9)), entries

    run = rewritten(saved, tmp_path, None, slower)
    assert TapeReader(tape_path(run, Actor(0, 2))).header.config.every_steps == 9
    assert main(["replay", str(run)]) == 1
    assert ", tick " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda header: dataclasses.replace(header, seed=8), "seed is 7 in syncer-e1.tape, 8 here"),
        (
            lambda header: dataclasses.replace(header, config=dataclasses.replace(header.config, every_steps=9)),
            "setting every_steps is ",
        ),
    ],
)
@pytest.mark.parametrize("command", ["check", "replay"])
def test_a_tape_of_another_run_is_named(saved, tmp_path, capsys, command, change, expected):
    for actor in (Actor(0, 1), Actor(3, 1)):
        run = rewritten(saved, tmp_path / str(actor), actor, lambda header, entries: (change(header), entries))
        assert main([command, str(run)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"atoll: {tape_path(run, actor)}:1: tapes of different runs: ")
        assert expected.replace("syncer-e1", "syncer-e2" if actor == Actor(0, 1) else "syncer-e1") in err
