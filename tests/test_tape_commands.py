"""`atoll check` and `atoll replay`: what they say of a good run, of a wrong one and of a damaged one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from atoll.cli import main
from atoll.commands.check import judge, story_of
from atoll.core.protocol import CopyFragment, MergeRound
from atoll.core.tape import Actor
from atoll.sim.checkers import Checker, all_checkers
from atoll.tape_files import RunTapes, TapeReader, TapeWriter, tape_path
from tests.tiny_run import TinyRun, eventful_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return eventful_run().save(tmp_path_factory.mktemp("run"))


def rewritten(run: Path, to: Path, actor: Actor, change) -> Path:
    """A copy of the run in which `change(header, entries)` has been at one tape."""
    for other, reader in RunTapes(run).readers.items():
        header, entries = reader.header, list(reader)
        if other == actor:
            header, entries = change(header, entries)
        with TapeWriter(tape_path(to, other), header) as writer:
            for entry in entries:
                writer.write(entry)
    return to


class NoCopyAtStep(Checker):
    """A checker that objects to something that every run does."""

    name = "no-copy"
    sentence = "nobody copies at step 9"

    def __init__(self, config) -> None:
        super().__init__(config)
        self.begun: list[Actor] = []
        self.ended = False
        self.effects = {CopyFragment: self._on_copy}

    def started(self, actor, restored) -> None:
        self.begun.append(actor)

    def finish(self) -> None:
        self.ended = True

    def _on_copy(self, entry, effect) -> None:
        if effect.copied_at == 9:
            self.fail(entry, ("learner", entry.actor.learner), "a copy at step 9")


# --------------------------------------------------------------------------------------------------------------------
# check


def test_a_good_run_is_clean(saved, capsys):
    assert main(["check", str(saved)]) == 0
    entries = sum(1 for _ in RunTapes(saved).merged())
    checkers = len(all_checkers(RunTapes(saved).config))
    assert capsys.readouterr() == (f"6 tapes, {entries:,} entries, {checkers} checkers: no violation\n", "")


def test_a_good_run_as_json(saved, capsys):
    assert main(["check", str(saved), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["tapes"], out["finished"], out["violation"], out["missing"]) == (6, True, None, [])
    assert len(out["checkers"]) >= 10


def test_a_run_that_has_not_ended_is_not_asked_for_its_end(tmp_path, capsys):
    assert main(["check", str(TinyRun().until(6.0).save(tmp_path))]) == 0
    assert "the run has not finished, so what must hold at its end was not asked" in capsys.readouterr().out


def test_checkers_see_starts_entries_and_the_end_and_the_first_violation_ends_it(saved):
    tapes = RunTapes(saved)
    calm, strict = NoCopyAtStep(tapes.config), NoCopyAtStep(tapes.config)
    calm.effects = {}
    assert judge(tapes, [calm]).violation is None
    assert sorted(calm.begun) == list(tapes.readers)
    assert calm.ended
    verdict = judge(tapes, [strict])
    assert verdict.violation is not None
    assert verdict.violation.entry is not None
    assert verdict.violation.subject == ("learner", verdict.violation.entry.actor.learner)
    assert not strict.ended
    lines = story_of(tapes, verdict.violation, 3)
    assert len(lines) == 3
    assert any("at step 9" in line.sentence for line in lines)
    last = verdict.violation.entry
    assert (lines[-1].actor, lines[-1].tick) == (last.actor, last.tick)  # the story ends where it was seen


def below_quorum(header, entries):
    """The syncer merges with one contribution where two are the quorum."""
    for place, entry in enumerate(entries):
        for effect in entry.effects:
            if isinstance(effect, MergeRound) and effect.round.base == 1:
                poor = effect._replace(contributions=effect.contributions[:1])
                effects = tuple(poor if each is effect else each for each in entry.effects)
                entries[place] = entry._replace(effects=effects)
                return header, entries
    raise AssertionError("no merge to spoil")


def test_a_violation_is_told_with_its_story(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path, Actor(0, 1), below_quorum)
    assert main(["check", str(run)]) == 1
    first, second, third, fourth, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("checkers: a violation")
    assert second.startswith("quorum: 1 contributions, the quorum is 2")
    assert third.startswith("seen at ")
    assert "syncer epoch 1" in third
    assert fourth == "the story of fragment 0:"
    assert lines[-1].endswith("fragment 0: sealed: all 3 who were asked have answered")


def test_a_violation_as_json(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path, Actor(0, 1), below_quorum)
    assert main(["check", str(run), "--json", "--last", "5"]) == 1
    violation = json.loads(capsys.readouterr().out)["violation"]
    assert violation["checker"] == "quorum"
    assert violation["subject"] == ["fragment", 0]
    assert violation["actor"] == "syncer epoch 1"
    assert len(violation["story"]) == 5


def test_a_lost_tape_is_said(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path, Actor(0, 1), lambda header, entries: (header, entries))
    (run / "tapes/learner-3-i1.tape").unlink()
    main(["check", str(run)])
    err = capsys.readouterr().err
    assert "entries have no cause on any tape; the first: syncer epoch 1, tick" in err


@pytest.mark.parametrize("command", ["check", "replay"])
def test_damage_is_one_line_and_exit_code_2(saved, tmp_path, capsys, command):
    run = rewritten(saved, tmp_path, Actor(0, 1), lambda header, entries: (header, entries))
    path = tape_path(run, Actor(2, 1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], *lines[6:]]))
    assert main([command, str(run)]) == 2
    assert capsys.readouterr() == ("", f"atoll: {path}:6: tick 6 where 5 was due: lines are missing\n")


@pytest.mark.parametrize("command", ["check", "replay"])
def test_a_directory_without_tapes_is_one_line_and_exit_code_2(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"atoll: {tmp_path}: not a run directory: it has no folder 'tapes'\n")


# --------------------------------------------------------------------------------------------------------------------
# replay


def test_a_good_run_replays(saved, capsys):
    assert main(["replay", str(saved)]) == 0
    entries = sum(1 for _ in RunTapes(saved).merged())
    assert capsys.readouterr() == (f"6 tapes, {entries:,} entries: every effect came out as recorded\n", "")
    assert main(["replay", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tapes": 6, "entries": entries, "difference": None}


def test_a_cut_tape_replays_as_far_as_it_goes(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path, Actor(0, 1), lambda header, entries: (header, entries))
    path = tape_path(run, Actor(3, 1))
    path.write_bytes(path.read_bytes()[:-7])
    assert main(["replay", str(run)]) == 0
    assert "every effect came out as recorded" in capsys.readouterr().out


def test_a_difference_is_shown_with_both_sides(saved, tmp_path, capsys):
    run = rewritten(saved, tmp_path, Actor(0, 1), below_quorum)
    assert main(["replay", str(run)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("syncer epoch 1, tick ")
    assert "the replay does something else" in out
    marked = [line for line in out.splitlines() if line.startswith("  >")]
    assert len(marked) == 2
    assert marked[0].count('"Accepted"') == 1
    assert marked[1].count('"Accepted"') == 3


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

    run = rewritten(saved, tmp_path, Actor(0, 2), slower)
    assert TapeReader(tape_path(run, Actor(0, 2))).header.config.every_steps == 9
    assert main(["replay", str(run)]) == 1
    assert capsys.readouterr().out.startswith("syncer epoch 2, tick ")
