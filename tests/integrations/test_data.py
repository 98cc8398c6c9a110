"""Resumed data: positions of loaders, leased samples, and learners that are killed."""

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
    PartRequest,
    Rows,
    lines_of,
    loader_of,
    numbers_read,
    read_file,
    start,
)
from tests.learner.runs import Run, endless

# --------------------------------------------------------------------------------------------------------------------
# Positions of loaders


def test_position_is_json_and_round_trips() -> None:
    position: dict[Any, Any] = {
        "plain": [None, True, 3, -1.5, "text"],
        "bytes": b"\x00\xff pickled elsewhere",
        "drawn": torch.get_rng_state(),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4, dtype=torch.int16),
        "scalar": torch.tensor(7),
        "keys": numpy.arange(6, dtype="uint32").reshape(2, 3),
        "one": numpy.float64(0.5),
        ("a", 1): ({2: math.inf}, [], {}),
    }
    back = decode_state(json.loads(json.dumps(encode_state(position), allow_nan=False)))
    assert back.keys() == position.keys()
    for name in ("plain", "bytes", ("a", 1)):
        assert back[name] == position[name]
    for name in ("drawn", "half", "empty", "scalar"):
        assert back[name].dtype == position[name].dtype
        assert torch.equal(back[name], position[name])
    assert numpy.array_equal(back["keys"], position["keys"])
    assert back["keys"].dtype == numpy.dtype("uint32")
    assert back["one"] == 0.5
    assert type(back["one"]) is numpy.float64
    assert math.isnan(decode_state(encode_state(math.nan)))


def test_loader_without_position_or_unknown_value_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"a DataLoader cannot save its position.*StatefulDataLoader"):
        loader_position(DataLoader(Rows()))
    with pytest.raises(ValueError, match=r"the position\['deep'\]\[1\] is a object"):
        encode_state({"deep": [1, object()]}, "the position")
    with pytest.raises(ValueError, match="was not written by loader_position"):
        decode_state(["what", 1])


def test_epochs_of_a_generator_raise_value_error_instead_of_a_hang() -> None:
    batches = epochs(number for number in range(3))
    assert list(itertools.islice(batches, 3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="this generator has no more batches: pass a loader"):
        next(batches)


def test_iterable_dataset_resumes_and_its_epochs_must_be_numbered() -> None:
    first, again, unnumbered = (loader_of("bare") for _ in range(3))
    batches = epochs(first)
    for _ in range(20):  # five into the second epoch
        next(batches)
    position = json.loads(json.dumps(loader_position(first)))
    followed = [next(batches)["n"].tolist() for _ in range(ROWS // BATCH)]
    restore_position(again, position)
    assert [batch["n"].tolist() for batch in itertools.islice(epochs(again), ROWS // BATCH)] == followed
    restore_position(unnumbered, position)
    forever = itertools.chain.from_iterable(itertools.repeat(unnumbered))
    assert [batch["n"].tolist() for batch in itertools.islice(forever, ROWS // BATCH)] != followed, (
        "epochs without a number continued at the position too"
    )


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


def test_order_looks_random() -> None:
    """Samples stay near their position, and neighbors stay neighbors, as often as in a random order."""
    size = 20_000
    order = [shuffled_index(place, size, 1, 0) for place in range(size)]
    near = sum(abs(place - index) < size // 10 for place, index in enumerate(order)) / size
    assert near == pytest.approx(0.19, abs=0.02)
    together = sum(abs(one - other) < size // 10 for one, other in itertools.pairwise(order)) / size
    assert together == pytest.approx(0.19, abs=0.02)


class Counting:
    """Source of successive sample numbers."""

    def __init__(self, first: int, last: int) -> None:
        self.next, self.last = first, last

    def take(self, count: int) -> tuple[int, ...]:
        begin, self.next = self.next, min(self.next + count, self.last)
        return tuple(range(begin, self.next))


def test_numbers_become_batches_for_any_dataset() -> None:
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
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def merged_numbers(report: dict[str, Any]) -> Counter[int]:
    merged = [each for each in report["ranges"] if each["place"] == "merged"]
    return Counter(number for each in merged for number in range(each["begin"], each["end"]))


def wrongly_read(report: dict[str, Any], read_by: dict[tuple[int, int], Counter[int]]) -> list[str]:
    """Compare the merged numbers of the ledger with what the learners have read. Return the differences."""
    invalid = [f"{number} is merged {times} times" for number, times in merged_numbers(report).items() if times != 1]
    for each in report["ranges"]:
        for lease in each["history"]:
            if lease["outcome"] == "merged":
                read_here = read_by[lease["learner"], lease["incarnation"]]
                numbers = range(each["begin"], each["end"])
                invalid += [f"{n} is merged and was read {read_here[n]} times" for n in numbers if read_here[n] != 1]
    return invalid


@pytest.mark.parametrize("kind", ["leases", "planted"])
def test_every_sample_is_merged_once_when_a_learner_is_killed(tmp_path, capsys, kind):
    """The learner with a planted bug ignores its leases and reads the rows in order."""
    with Run(tmp_path, endless(quorum=1, lease_samples=LEASE, leases_ahead=3)) as run:
        one, two = start(run, 1, "leases"), start(run, 2, kind)
        assert one.expect("joined") is two.expect("joined") is None
        run.until(lambda status: all(each["step"] > 20 for each in status["learners"]), "both train")
        two.kill()
        leased_by_then = run.status()["leases"]["leased"]
        again = start(run, 2, kind)
        again.expect("joined")
        expected = set(range(leased_by_then))
        run.until(lambda status: status["leases"]["merged"] >= leased_by_then, "as many are merged as were leased")
        run.until(lambda _: expected <= merged_numbers(ledger_of(tmp_path, capsys)).keys(), "and these are among them")
        run.end()
        one.expect("ended")
        again.expect("ended")
        assert run.syncer.expect("ended") is True
    report = ledger_of(tmp_path, capsys)
    assert report["balanced"]
    assert report["problems"] == []
    returned = [each for each in report["ranges"] if any(lease["outcome"] == "returned" for lease in each["history"])]
    assert returned, "the killed learner had no samples"
    invalid = wrongly_read(report, numbers_read(tmp_path))
    assert bool(invalid) is (kind == "planted"), invalid[:5]
    batches = leased_batches(Rows(), Counting(0, 1), BATCH, SEED)
    epochs = leased_by_then // ROWS
    rows = Counter(batches.sample_index(number) for number in merged_numbers(report) if number < epochs * ROWS)
    assert rows == dict.fromkeys(range(ROWS), epochs), "each row once in every epoch"


# --------------------------------------------------------------------------------------------------------------------
# Stopped and resumed


@pytest.mark.parametrize("kind", ["stateful", pytest.param("datasets", marks=pytest.mark.long), "plain"])
def test_resumed_run_reads_on_at_the_stored_position(tmp_path, kind):
    """Kill the learner and the syncer. The learner resumes from its part. A loader without a position starts anew."""
    with Run(tmp_path, endless(quorum=1)) as run:
        island = start(run, 1, kind)
        assert island.expect("joined") is None
        run.until(run.merges(8), "the run is under way")
        run.until(PartRequest(run), "the part is written")
        written_by = read_file(tmp_path, 1, 1)
        stored = len(lines_of(written_by))
        run.until(lambda _: len(lines_of(written_by)) > stored + ROWS // BATCH, "it has continued into the next epoch")
        island.kill()
        run.syncer.kill()
        run.start_syncer()
        island = start(run, 1, kind)
        steps = island.expect("joined")
        again = read_file(tmp_path, 1, 2)
        run.until(lambda _: again.exists() and len(lines_of(again)) > ROWS // BATCH, "it reads on")
        run.end()
        island.expect("ended")
    first, then = ([step.rows for step in lines_of(path)] for path in (written_by, again))
    assert 0 < steps < len(first)
    followed = first[steps:]
    compared = min(len(followed), len(then))
    assert compared > ROWS // BATCH, "the comparison does not reach the next epoch"
    assert (then[:compared] == followed[:compared]) is (kind != "plain"), (steps, followed, then)
    if kind == "plain":
        assert then[0] == first[0], "it did not start anew"
