"""Data that goes on where it was: places of loaders, leased samples, and processes that are killed in between."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from atoll.cli.main import main
from atoll.integrations.data import (
    decode_state,
    encode_state,
    epochs,
    leased_batches,
    loader_position,
    restore_position,
    shuffled_index,
)
from tests.integrations.reading_islands import (
    BATCH,
    ROWS,
    SEED,
    PartWanted,
    Rows,
    lines_of,
    loader_of,
    numbers_read,
    read_file,
    start,
)
from tests.learner.runs import Run, endless

# --------------------------------------------------------------------------------------------------------------------
# Places


def test_a_place_is_json_and_comes_back_as_it_was() -> None:
    place: dict[Any, Any] = {
        "plain": [None, True, 3, -1.5, "text"],
        "bytes": b"\x00\xff pickled by somebody else",
        "drawn": torch.get_rng_state(),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4, dtype=torch.int16),
        "scalar": torch.tensor(7),
        "keys": numpy.arange(6, dtype="uint32").reshape(2, 3),
        "one": numpy.float64(0.5),
        ("a", 1): ({2: math.inf}, [], {}),
    }
    back = decode_state(json.loads(json.dumps(encode_state(place), allow_nan=False)))
    assert back.keys() == place.keys()
    for name in ("plain", "bytes", ("a", 1)):
        assert back[name] == place[name]
    for name in ("drawn", "half", "empty", "scalar"):
        assert back[name].dtype == place[name].dtype
        assert torch.equal(back[name], place[name])
    assert numpy.array_equal(back["keys"], place["keys"])
    assert back["keys"].dtype == numpy.dtype("uint32")
    assert back["one"] == 0.5
    assert type(back["one"]) is numpy.float64
    assert math.isnan(decode_state(encode_state(math.nan)))


def test_what_has_no_place_or_cannot_be_kept_is_said() -> None:
    with pytest.raises(ValueError, match=r"a DataLoader does not know its place.*StatefulDataLoader"):
        loader_position(DataLoader(Rows()))
    with pytest.raises(ValueError, match=r"the place\['deep'\]\[1\] is a object"):
        encode_state({"deep": [1, object()]}, "the place")
    with pytest.raises(ValueError, match="was not written by loader_position"):
        decode_state(["what", 1])


def test_epochs_of_a_generator_end_with_a_sentence_instead_of_a_hang() -> None:
    batches = epochs(number for number in range(3))
    assert list(itertools.islice(batches, 3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="this generator has no batch any more: give a loader"):
        next(batches)


def test_an_iterable_of_datasets_goes_on_and_its_epochs_must_be_numbered() -> None:
    first, again, unnumbered = (loader_of("bare") for _ in range(3))
    batches = epochs(first)
    for _ in range(20):  # five into the second epoch
        next(batches)
    place = json.loads(json.dumps(loader_position(first)))
    followed = [next(batches)["n"].tolist() for _ in range(ROWS // BATCH)]
    restore_position(again, place)
    assert [batch["n"].tolist() for batch in itertools.islice(epochs(again), ROWS // BATCH)] == followed
    restore_position(unnumbered, place)
    forever = itertools.chain.from_iterable(itertools.repeat(unnumbered))
    assert [batch["n"].tolist() for batch in itertools.islice(forever, ROWS // BATCH)] != followed, "it comes back"


# --------------------------------------------------------------------------------------------------------------------
# The order of an epoch


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 30, 97, 1000, 4097])
def test_every_epoch_has_every_sample_once(size: int) -> None:
    assert sorted(shuffled_index(place, size, 7, 3) for place in range(size)) == list(range(size))


def test_orders_differ_by_seed_and_epoch_and_need_no_table() -> None:
    orders = {
        tuple(shuffled_index(place, 50, seed, epoch) for place in range(50)) for seed in range(8) for epoch in range(8)
    }
    assert len(orders) == 64
    found = {shuffled_index(place, 10**15, 0, 0) for place in range(1000)}
    assert len(found) == 1000
    assert max(found) > 9 * 10**14
    with pytest.raises(ValueError, match="position 50 is not one of 50"):
        shuffled_index(50, 50, 0, 0)


def test_an_order_looks_drawn() -> None:
    """As often as chance would have it: a sample near its own place, and neighbours that stay neighbours."""
    size = 20_000
    order = [shuffled_index(place, size, 1, 0) for place in range(size)]
    near = sum(abs(place - index) < size // 10 for place, index in enumerate(order)) / size
    assert near == pytest.approx(0.19, abs=0.02)
    together = sum(abs(one - other) < size // 10 for one, other in itertools.pairwise(order)) / size
    assert together == pytest.approx(0.19, abs=0.02)


class Counting:
    """Gives numbers one after the other."""

    def __init__(self, first: int, last: int) -> None:
        self.next, self.last = first, last

    def take(self, count: int) -> tuple[int, ...]:
        begin, self.next = self.next, min(self.next + count, self.last)
        return tuple(range(begin, self.next))


def test_numbers_become_batches_whoever_holds_the_samples() -> None:
    import datasets  # type: ignore[import-untyped]

    rows = list(leased_batches(Rows(), Counting(0, 2 * ROWS), BATCH, SEED))
    assert len(rows) == 2 * len(leased_batches(Rows(), Counting(0, 1), BATCH))
    seen = [int(row) for batch in rows for row in batch]
    assert sorted(seen[:ROWS]) == sorted(seen[ROWS:]) == list(range(ROWS))
    assert seen[:ROWS] != seen[ROWS:]
    table = datasets.Dataset.from_dict({"n": [float(n) for n in range(ROWS)]}).with_format("torch")
    together = list(leased_batches(table, Counting(ROWS, 2 * ROWS), BATCH, SEED))
    assert [int(row) for batch in together for row in batch["n"]] == seen[ROWS:]
    with pytest.raises(ValueError, match="60 samples in batches of 0: both must be at least 1"):
        leased_batches(Rows(), Counting(0, 1), 0)


# --------------------------------------------------------------------------------------------------------------------
# Exactly once


LEASE = 20 * BATCH


def ledger_of(run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(["ledger", str(run), "--json"])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def merged_numbers(told: dict[str, Any]) -> Counter[int]:
    merged = [each for each in told["ranges"] if each["place"] == "merged"]
    return Counter(number for each in merged for number in range(each["begin"], each["end"]))


def wrongly_read(told: dict[str, Any], read_by: dict[tuple[int, int], Counter[int]]) -> list[str]:
    """What the ledger says of each number that is merged, against what the islands have really read."""
    wrong = [f"{number} is merged {times} times" for number, times in merged_numbers(told).items() if times != 1]
    for each in told["ranges"]:
        for stay in each["history"]:
            if stay["fate"] == "merged":
                read_here = read_by[stay["learner"], stay["incarnation"]]
                numbers = range(each["begin"], each["end"])
                wrong += [f"{n} is merged and was read {read_here[n]} times" for n in numbers if read_here[n] != 1]
    return wrong


@pytest.mark.parametrize("kind", ["leases", "planted"])
def test_an_island_is_killed_and_every_sample_is_merged_once(tmp_path, capsys, kind):
    """The planted one reads the rows in its own order, whatever the run gives to it."""
    with Run(tmp_path, endless(quorum=1, lease_samples=LEASE, leases_ahead=3)) as run:
        one, two = start(run, 1, "leases"), start(run, 2, kind)
        assert one.hear("joined") is two.hear("joined") is None
        run.until(lambda status: all(each["step"] > 20 for each in status["learners"]), "both train")
        two.kill()
        leased_by_then = run.status()["leases"]["leased"]
        again = start(run, 2, kind)
        again.hear("joined")
        everything = set(range(leased_by_then))
        run.until(lambda status: status["leases"]["merged"] >= leased_by_then, "as many are merged as were leased")
        run.until(
            lambda _: everything <= merged_numbers(ledger_of(tmp_path, capsys)).keys(), "and these are among them"
        )
        run.end()
        one.hear("ended")
        again.hear("ended")
        assert run.syncer.hear("ended") is True
    told = ledger_of(tmp_path, capsys)
    assert told["balanced"]
    assert told["problems"] == []
    returned = [each for each in told["ranges"] if any(stay["fate"] == "returned" for stay in each["history"])]
    assert returned, "the island that was killed had samples"
    wrong = wrongly_read(told, numbers_read(tmp_path))
    assert bool(wrong) is (kind == "planted"), wrong[:5]
    line = leased_batches(Rows(), Counting(0, 1), BATCH, SEED)
    epochs = leased_by_then // ROWS
    rows = Counter(line.sample_index(number) for number in merged_numbers(told) if number < epochs * ROWS)
    assert rows == dict.fromkeys(range(ROWS), epochs), "each row once in every epoch"


# --------------------------------------------------------------------------------------------------------------------
# Stopped and resumed


@pytest.mark.parametrize("kind", ["stateful", pytest.param("datasets", marks=pytest.mark.long), "plain"])
def test_a_run_that_is_resumed_reads_on_at_the_right_place(tmp_path, kind):
    """Everybody is killed, islands and syncer; the island starts from its own part. A loader without state repeats."""
    with Run(tmp_path, endless(quorum=1)) as run:
        island = start(run, 1, kind)
        assert island.hear("joined") is None
        run.until(run.merges(8), "the run is under way")
        run.until(PartWanted(run), "the part is written")
        written_by = read_file(tmp_path, 1, 1)
        kept = len(lines_of(written_by))
        run.until(lambda _: len(lines_of(written_by)) > kept + ROWS // BATCH, "it has gone on, into the next epoch")
        island.kill()
        run.syncer.kill()
        run.start_syncer()
        island = start(run, 1, kind)
        steps = island.hear("joined")
        again = read_file(tmp_path, 1, 2)
        run.until(lambda _: again.exists() and len(lines_of(again)) > ROWS // BATCH, "it reads on")
        run.end()
        island.hear("ended")
    first, then = ([step.rows for step in lines_of(path)] for path in (written_by, again))
    assert 0 < steps < len(first)
    followed = first[steps:]
    compared = min(len(followed), len(then))
    assert compared > ROWS // BATCH, "more than what was left of that epoch"
    assert (then[:compared] == followed[:compared]) is (kind != "plain"), (steps, followed, then)
    if kind == "plain":
        assert then[0] == first[0], "it has begun anew"
