"""What a batch counts for."""

import torch
from torch import Tensor

from atoll.integrations.batches import NOT_A_LABEL, tokens_of


def ids(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


def test_only_labels_in_the_loss_count() -> None:
    labels = ids(2, 5)
    labels[0, :3] = NOT_A_LABEL
    assert tokens_of({"input_ids": ids(2, 5), "attention_mask": ids(2, 5), "labels": labels}) == 7


def test_padding_does_not_count() -> None:
    mask = ids(2, 5)
    mask[1, 2:] = 0
    assert tokens_of({"input_ids": ids(2, 5), "attention_mask": mask}) == 7


def test_of_a_batch_of_classes_the_text_counts() -> None:
    """Labels are one for each sample there: they say nothing of how long the text was."""
    assert tokens_of({"input_ids": ids(4, 6), "labels": ids(4)}) == 24


def test_what_is_not_text_counts_its_samples() -> None:
    assert tokens_of({"pixels": torch.zeros(8, 3, 4, 4), "labels": ids(8)}) == 8
    assert tokens_of((torch.zeros(8, 3), ids(8))) == 8
    assert tokens_of(torch.zeros(8, 3)) == 8


def test_bare_ids_count_all_of_them() -> None:
    assert tokens_of(ids(4, 6)) == 24
    assert tokens_of([ids(4, 6), ids(4)]) == 24


def test_a_step_is_never_nothing() -> None:
    assert tokens_of({"input_ids": ids(1, 3), "labels": torch.full((1, 3), NOT_A_LABEL)}) == 1
    assert tokens_of(None) == 1
