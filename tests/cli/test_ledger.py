"""`atoll ledger`: every sample has exactly one status, and tapes that violate this are reported."""

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
    """A run in which learner 2 and then the syncer are killed and restarted."""
    return eventful_run(**LEASES).save(tmp_path_factory.mktemp("run"))


def ledger_fields(run: Path, capsys, code: int = 0) -> dict:
    assert main(["ledger", str(run), "--json"]) == code
    fields: dict = json.loads(capsys.readouterr().out)
    return fields


def test_every_sample_has_one_history_and_one_status(saved, capsys):
    fields = ledger_fields(saved, capsys)
    ranges = fields["ranges"]
    assert [each["begin"] for each in ranges[1:]] == [each["end"] for each in ranges[:-1]]
    assert (ranges[0]["begin"], ranges[-1]["end"]) == (0, fields["samples"]["leased"])
    places = {place: sum(e["end"] - e["begin"] for e in ranges if e["place"] == place) for place in ("merged", "held")}
    assert places == {"merged": fields["samples"]["merged"], "held": fields["samples"]["held"]}
    assert places["merged"] > 100
    for each in ranges:
        assert sum(lease["outcome"] == "merged" for lease in each["history"]) <= 1
        if each["place"] == "merged":
            assert each["history"][-1]["version"] >= 1


def test_samples_of_killed_learner_are_returned_and_merged_by_others(saved, capsys):
    ranges = ledger_fields(saved, capsys)["ranges"]
    returned = [each for each in ranges if each["history"][0]["outcome"] == "returned"]
    assert any(each["history"][0]["trained"] for each in returned)
    for each in returned:
        assert (each["history"][0]["learner"], each["history"][0]["cause"]) == (2, "replaced by incarnation 2")
        assert each["place"] == "merged"


def test_tokens_agree_with_the_ledger_of_the_syncer(saved, capsys):
    fields = ledger_fields(saved, capsys)
    core = eventful_run(**LEASES).syncer
    for line in fields["tokens"]:
        ledger = core.state.ledger.fragment_totals(line["fragment"])
        assert line["merged"] == ledger.merged
        assert line["trained"] == line["merged"] + line["pending"] + sum(line["dropped"].values())
        assert line["trained"] >= ledger.trained  # steps after the last report are on the tape of the learner only
        assert set(line["dropped"]) == {"superseded"}


def test_printed_parts_of_the_tokens_add_up_to_the_printed_sum(tmp_path, capsys):
    """The means over 7 fragments are 17,214.3 merged, 514.3 pending and 471.4 dropped."""
    run = eventful_run(fragments=7, every_steps=11).save(tmp_path)
    assert main(["ledger", str(run)]) == 0
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens: "))
    trained, *parts = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?= [tmpd])", printed))
    assert len(parts) == 3
    assert trained == sum(parts) == 18_200, printed


def test_ledger_without_the_tape_of_one_learner_balances(saved, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(saved, run)
    (run / "tapes" / "learner-1-i1.tape").unlink()
    fields = ledger_fields(run, capsys)
    assert (fields["balanced"], fields["problems"]) == (True, [])
    lacking = "no step of learner 1 incarnation 1 is on a tape here: only its merged tokens are known"
    assert fields["incomplete"][-1] == lacking
    assert main(["ledger", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the ledger of these tapes balances"


def test_text_output_has_one_row_for_adjacent_ranges_with_equal_history(saved, capsys):
    assert main(["ledger", str(saved)]) == 0
    shown = capsys.readouterr().out.splitlines()
    tapes = RunTapes(saved)
    ranges = read_history(tapes).ranges()
    groups = group_ranges(ranges)
    assert len(groups) < len(ranges)
    assert sum(" to " in line for line in shown if not line.startswith("tokens")) == min(len(groups), 40)
    assert any("trained, returned: replaced by incarnation 2; then learner" in line for line in shown)
    assert shown[-1] == "the ledger balances"
    assert main(["ledger", str(saved), "--rows", "3"]) == 0
    assert f"... and {len(groups) - 3:,} more" in capsys.readouterr().out


def test_run_without_leases_has_a_token_ledger(tmp_path, capsys):
    run = eventful_run().save(tmp_path)
    fields = ledger_fields(run, capsys)
    assert fields["ranges"] == []
    assert fields["lease_samples"] == 0
    assert main(["ledger", str(run)]) == 0
    assert "this run has no leases" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------------------
# A ledger that does not balance


def change_records(record_type, change):
    """Return a change of every durable record of one type, including restored records."""

    def apply(header, entries):
        restored = header.restored
        if restored is not None and restored.leases is not None and record_type is LeaseRecord:
            header = dataclasses.replace(header, restored=dataclasses.replace(restored, leases=change(restored.leases)))
        for place, entry in enumerate(entries):
            effects = tuple(
                Persist(change(e.record)) if type(e) is Persist and type(e.record) is record_type else e
                for e in entry.effects
            )
            entries[place] = entry._replace(effects=effects)
        return header, entries

    return apply


def lease_to_both(record: LeaseRecord) -> LeaseRecord:
    """Lease the first interval of learner 1 to learner 3, too."""
    first = next((h.intervals[0] for h in record.holdings if h.learner == 1 and h.first_lease == 0), None)
    holdings = [
        structs.replace(h, intervals=(first, *h.intervals[1:]))
        if first and h.first_lease == 0 and h.learner == 3
        else h
        for h in record.holdings
    ]
    return structs.replace(record, holdings=tuple(holdings))


def skip_lease(record: LeaseRecord) -> LeaseRecord:
    return structs.replace(record, next_sample=record.next_sample + 5)


def change_merged_tokens(record: VersionRecord) -> VersionRecord:
    return structs.replace(record, merged_tokens=record.merged_tokens + 1)


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        (LeaseRecord, lease_to_both, "but was leased to"),
        (LeaseRecord, skip_lease, "was never leased"),
        (VersionRecord, change_merged_tokens, "its contributions"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unbalanced_ledger_is_printed_with_exit_code_1(saved, tmp_path, capsys, kind, change, sentence):
    run = saved
    for number, epoch in enumerate((1, 2)):
        run = rewritten(run, tmp_path / str(number), Actor(0, epoch), change_records(kind, change))
    fields = ledger_fields(run, capsys, code=1)
    assert not fields["balanced"]
    assert any(sentence in problem for problem in fields["problems"]), fields["problems"]
    assert main(["ledger", str(run)]) == 1
    assert "the ledger does not balance" in capsys.readouterr().out


def test_consumed_sample_without_a_lease_is_reported(saved, tmp_path, capsys):
    def greedy(header, entries):
        last = max(place for place, entry in enumerate(entries) if getattr(entry.event, "new_samples", 0))
        event = entries[last].event
        entries[last] = entries[last]._replace(event=structs.replace(event, new_samples=event.new_samples + 10_000))
        return header, entries

    fields = ledger_fields(rewritten(saved, tmp_path, Actor(1, 1), greedy), capsys, code=1)
    assert any("were leased to it" in problem for problem in fields["problems"])


def test_sums_agree_with_the_core(saved):
    """Compare the leases of the core with the sums from its tapes."""
    tapes = RunTapes(saved)
    history = read_history(tapes)
    sums = count_samples(history, history.ranges())
    ledger = eventful_run(**LEASES).syncer.state.leases.sums()
    assert (sums.leased, sums.merged, sums.held, sums.waiting) == (
        ledger.leased,
        ledger.merged,
        ledger.held,
        ledger.pool,
    )


# --------------------------------------------------------------------------------------------------------------------
# Hostile worlds


@pytest.mark.parametrize("seed", range(0, 96, 8))
def test_ledger_from_tapes_agrees_with_the_core_in_hostile_worlds(seed):
    """The worlds have killed learners, zombie processes and replaced syncers."""
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
    ledger = core.state.leases.sums()
    undurable = sum(holder.count - holder.durable for holder in core.state.leases.holders.values())
    assert (sums.merged, sums.waiting) == (ledger.merged, ledger.pool)
    assert (sums.leased == ledger.leased) or undurable, "a lease that is not durable is on no tape"
    assert [line.merged for line in history.token_ledger().values()] == [
        core.state.ledger.merged(p) for p in core.state.fragments
    ]


def test_tapes_of_a_swarm_seed_have_a_ledger(tmp_path, capsys):
    assert main(["swarm", "--seeds", "1", "--start", "67", "--small", "--tape", str(tmp_path / "world")]) == 0
    assert main(["ledger", str(tmp_path / "world")]) == 0
    shown = capsys.readouterr().out
    assert "returned" in shown
    assert "the ledger balances" in shown
