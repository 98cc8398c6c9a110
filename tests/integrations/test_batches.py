"""Token counts of batches."""

import pytest
import torch
from torch import Tensor

from atoll.integrations.batches import IGNORE_INDEX, TokenCounter, count_tokens, count_tokens_on_device


def ids(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


def test_only_labels_in_the_loss_count() -> None:
    labels = ids(2, 5)
    labels[0, :3] = IGNORE_INDEX
    assert count_tokens({"input_ids": ids(2, 5), "attention_mask": ids(2, 5), "labels": labels}) == 7


def test_padding_does_not_count() -> None:
    mask = ids(2, 5)
    mask[1, 2:] = 0
    assert count_tokens({"input_ids": ids(2, 5), "attention_mask": mask}) == 7


def test_text_of_a_classification_batch_counts() -> None:
    """There is one label for each sample, so labels do not tell the length of the text."""
    assert count_tokens({"input_ids": ids(4, 6), "labels": ids(4)}) == 24


def test_a_mask_that_is_added_to_scores_is_not_counted() -> None:
    added = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    for mask in (added, added[:, 0], torch.full((2, 5), float("-inf")), ids(2, 1, 5, 5)):
        assert count_tokens({"input_ids": ids(2, 5), "attention_mask": mask}) == 10
    assert count_tokens({"input_ids": ids(2, 5), "attention_mask": ids(2, 5).bool()}) == 10
    packed = torch.tensor([[1, 1, 2, 2, 0], [1, 2, 3, 4, 0]])  # numbers of the texts in a row
    assert count_tokens({"input_ids": ids(2, 5), "attention_mask": packed}) == 8


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_labels_per_class_are_not_counted_as_tokens(kind: torch.dtype) -> None:
    assert count_tokens({"input_ids": ids(4, 6), "labels": torch.ones(4, 19).to(kind)}) == 24
    assert count_tokens({"pixels": torch.zeros(8, 3, 4, 4), "labels": torch.ones(8, 19).to(kind)}) == 8


def test_batch_without_text_counts_its_samples() -> None:
    assert count_tokens({"pixels": torch.zeros(8, 3, 4, 4), "labels": ids(8)}) == 8
    assert count_tokens((torch.zeros(8, 3), ids(8))) == 8
    assert count_tokens(torch.zeros(8, 3)) == 8


def test_bare_ids_count_all_of_them() -> None:
    assert count_tokens(ids(4, 6)) == 24
    assert count_tokens([ids(4, 6), ids(4)]) == 24


def test_count_is_at_least_one() -> None:
    assert count_tokens({"input_ids": ids(1, 3), "labels": torch.full((1, 3), IGNORE_INDEX)}) == 1
    assert count_tokens(None) == 1


def test_counts_on_a_device_are_not_read_before_the_step() -> None:
    """A tensor on the device `meta` has no values, so reading it raises an error."""
    batch = {"input_ids": ids(2, 5).to("meta"), "labels": ids(2, 5).to("meta")}
    counted = TokenCounter()
    counted.add(batch)
    counted.add(batch, shared=2)
    assert isinstance(count_tokens_on_device(batch), Tensor)
    with pytest.raises(RuntimeError, match="meta"):
        counted.pop_total()
    assert counted.pop_total() == 0


def test_counts_are_added_up_on_host_and_device() -> None:
    counted = TokenCounter(lambda batch: batch)
    for count in (torch.tensor(5), 3, torch.tensor(7)):
        counted.add(count)
    assert counted.pop_total() == 15
    counted.add(5, shared=2)
    counted.add(torch.tensor(1), shared=2)
    assert counted.pop_total() == 3
    counted.add(9)
    counted.reset()
    assert counted.pop_total() == 0
