"""`atoll ledger`: every sample is somewhere and nowhere twice, and a tape that says otherwise is noticed."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from msgspec import structs

from atoll.cli.ledger import count_samples, group_ranges, read_history
from atoll.cli.main import main
from atoll.core.protocol import LeaseRecord, Persist, VersionRecord
from atoll.sim.scenarios import draw_scenario
from atoll.sim.world import SwarmWorld
from atoll.tape.files import RunTapes
from atoll.tape.format import Actor
from atoll.tape.samples import DataHistory
from tests.cli.test_tape_commands import rewritten
from tests.tiny_run import eventful_run

LEASES = {"lease_samples": 8, "leases_ahead": 2, "fragments": 2, "every_steps": 5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Learner 2 is killed and comes back, then the syncer."""
    return eventful_run(**LEASES).save(tmp_path_factory.mktemp("run"))


def told_of(run: Path, capsys, code: int = 0) -> dict:
    assert main(["ledger", str(run), "--json"]) == code
    told: dict = json.loads(capsys.readouterr().out)
    return told


def test_every_sample_has_a_history_and_one_place(saved, capsys):
    told = told_of(saved, capsys)
    ranges = told["ranges"]
    assert [each["begin"] for each in ranges[1:]] == [each["end"] for each in ranges[:-1]]
    assert (ranges[0]["begin"], ranges[-1]["end"]) == (0, told["samples"]["leased"])
    places = {place: sum(e["end"] - e["begin"] for e in ranges if e["place"] == place) for place in ("merged", "held")}
    assert places == {"merged": told["samples"]["merged"], "held": told["samples"]["held"]}
    assert places["merged"] > 100
    for each in ranges:
        assert sum(stay["fate"] == "merged" for stay in each["history"]) <= 1
        if each["place"] == "merged":
            assert each["history"][-1]["version"] >= 1


def test_what_the_killed_learner_had_is_returned_and_merged_by_somebody(saved, capsys):
    ranges = told_of(saved, capsys)["ranges"]
    returned = [each for each in ranges if each["history"][0]["fate"] == "returned"]
    assert any(each["history"][0]["trained"] for each in returned)
    for each in returned:
        assert (each["history"][0]["learner"], each["history"][0]["why"]) == (2, "replaced by incarnation 2")
        assert each["place"] == "merged"


def test_tokens_are_what_the_syncers_books_say(saved, capsys):
    told = told_of(saved, capsys)
    core = eventful_run(**LEASES).syncer
    for line in told["tokens"]:
        books = core.state.ledger.line(line["fragment"])
        assert line["merged"] == books.merged
        assert line["trained"] == line["merged"] + line["pending"] + sum(line["dropped"].values())
        assert line["trained"] >= books.trained  # what a process trained after its last word is on its tape alone
        assert set(line["dropped"]) == {"superseded"}


def test_printed_parts_of_the_tokens_add_up_to_the_printed_sum(tmp_path, capsys):
    """The means over 7 fragments are 17,214.3 merged, 514.3 pending and 471.4 dropped."""
    run = eventful_run(fragments=7, every_steps=11).save(tmp_path)
    assert main(["ledger", str(run)]) == 0
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens: "))
    trained, *parts = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?= [tmpd])", printed))
    assert len(parts) == 3
    assert trained == sum(parts) == 18_200, printed


def test_an_island_whose_tape_is_elsewhere_is_no_reason_to_call_the_books_wrong(saved, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "tapes" / "learner-1-i1.tape").unlink()
    told = told_of(run, capsys)
    assert (told["balanced"], told["problems"]) == (True, [])
    lacking = "no step of learner 1 incarnation 1 is on a tape here: only what was merged is known of it"
    assert told["incomplete"][-1] == lacking
    assert main(["ledger", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "what is on these tapes balances"


def test_people_get_one_row_for_neighbours_with_the_same_fate(saved, capsys):
    assert main(["ledger", str(saved)]) == 0
    shown = capsys.readouterr().out.splitlines()
    tapes = RunTapes(saved)
    ranges = read_history(tapes).ranges()
    groups = group_ranges(ranges)
    assert len(groups) < len(ranges)
    assert sum(" to " in line for line in shown if not line.startswith("tokens")) == min(len(groups), 40)
    assert any("trained, returned: replaced by incarnation 2; then learner" in line for line in shown)
    assert shown[-1] == "everything balances"
    assert main(["ledger", str(saved), "--rows", "3"]) == 0
    assert f"... and {len(groups) - 3:,} more" in capsys.readouterr().out


def test_a_run_without_leases_still_has_its_tokens(tmp_path, capsys):
    run = eventful_run().save(tmp_path)
    told = told_of(run, capsys)
    assert told["ranges"] == []
    assert told["lease_samples"] == 0
    assert main(["ledger", str(run)]) == 0
    assert "this run has no leases" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------------------
# A ledger that does not balance


def changed(record_type, change):
    """A change of every record of one type that the syncer asked to be durable, also of what it found."""

    def at(header, entries):
        found = header.restored
        if found is not None and found.leases is not None and record_type is LeaseRecord:
            header = dataclasses.replace(header, restored=dataclasses.replace(found, leases=change(found.leases)))
        for place, entry in enumerate(entries):
            effects = tuple(
                Persist(change(e.record)) if type(e) is Persist and type(e.record) is record_type else e
                for e in entry.effects
            )
            entries[place] = entry._replace(effects=effects)
        return header, entries

    return at


def leased_to_both(record: LeaseRecord) -> LeaseRecord:
    """Everybody's first lease is that of learner 1."""
    first = next((h.intervals[0] for h in record.holdings if h.learner == 1 and h.first_lease == 0), None)
    holdings = [
        structs.replace(h, intervals=(first, *h.intervals[1:]))
        if first and h.first_lease == 0 and h.learner == 3
        else h
        for h in record.holdings
    ]
    return structs.replace(record, holdings=tuple(holdings))


def never_leased(record: LeaseRecord) -> LeaseRecord:
    return structs.replace(record, next=record.next_sample + 5)


def another_total(record: VersionRecord) -> VersionRecord:
    return structs.replace(record, merged_tokens=record.merged_tokens + 1)


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        (LeaseRecord, leased_to_both, "and was leased to"),
        (LeaseRecord, never_leased, "was leased to nobody"),
        (VersionRecord, another_total, "its contributions of"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_balance_is_said_and_is_exit_code_1(saved, tmp_path, capsys, kind, change, sentence):
    run = saved
    for number, epoch in enumerate((1, 2)):
        run = rewritten(run, tmp_path / str(number), Actor(0, epoch), changed(kind, change))
    told = told_of(run, capsys, code=1)
    assert not told["balanced"]
    assert any(sentence in problem for problem in told["problems"]), told["problems"]
    assert main(["ledger", str(run)]) == 1
    assert "the books do not balance" in capsys.readouterr().out


def test_a_sample_that_a_learner_took_without_having_it_is_noticed(saved, tmp_path, capsys):
    def greedy(header, entries):
        last = max(place for place, entry in enumerate(entries) if getattr(entry.event, "samples", 0))
        event = entries[last].event
        entries[last] = entries[last]._replace(event=structs.replace(event, samples=event.samples + 10_000))
        return header, entries

    told = told_of(rewritten(saved, tmp_path, Actor(1, 1), greedy), capsys, code=1)
    assert any("were leased to it" in problem for problem in told["problems"])


def test_the_sums_are_those_of_the_core(saved):
    """The books in memory, and what the tapes alone say."""
    tapes = RunTapes(saved)
    history = read_history(tapes)
    sums = count_samples(history, history.ranges())
    books = eventful_run(**LEASES).syncer.state.leases.sums()
    assert (sums.leased, sums.merged, sums.held, sums.waiting) == (books.leased, books.merged, books.held, books.pool)


# --------------------------------------------------------------------------------------------------------------------
# Hostile worlds


@pytest.mark.parametrize("seed", range(0, 96, 8))
def test_the_tapes_of_a_hostile_world_say_what_its_books_say(seed):
    """Killed learners, zombies, syncers that were replaced: everything is found again, from entries alone."""
    drawn = draw_scenario(seed)
    assert drawn.config.lease_samples
    history = DataHistory(drawn.config)
    world = SwarmWorld(drawn, on_entry=history.observe, on_start=history.on_process_started)
    world.run()
    sums = count_samples(history, history.ranges())
    assert sums.is_balanced()
    assert all(line.is_balanced() for line in history.token_ledger().values())
    assert history.problems == []
    assert world.driver.syncer is not None
    core = world.driver.syncer.core
    books = core.state.leases.sums()
    undurable = sum(holder.count - holder.durable for holder in core.state.leases.holders.values())
    assert (sums.merged, sums.waiting) == (books.merged, books.pool)
    assert (sums.leased == books.leased) or undurable, "what is not durable is on no tape as leased"
    assert [line.merged for line in history.token_ledger().values()] == [
        core.state.ledger.merged(p) for p in core.state.fragments
    ]


def test_the_tapes_of_a_seed_have_a_ledger(tmp_path, capsys):
    assert main(["swarm", "--seeds", "1", "--start", "67", "--small", "--tape", str(tmp_path / "world")]) == 0
    assert main(["ledger", str(tmp_path / "world")]) == 0
    shown = capsys.readouterr().out
    assert "returned" in shown
    assert "everything balances" in shown
