"""Tests of the text corpus: the held-out split by document, and samples by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.reference.data import CACHED_PERMUTATIONS, PART_BYTES, Corpus, Sampler, assigned_samples

CONTEXT = 4


def document(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.from_documents({f"{i:03}.txt": document(f"document {i} says {'abc' * (i % 7)}.") for i in range(200)})


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return Corpus.load()


def test_standard_library_has_enough_text_to_train_and_evaluate(stdlib):
    assert len(stdlib.train) > 5e6
    assert 0.01 < len(stdlib.held_out) / len(stdlib.train) < 0.1
    assert stdlib.vocabulary == 256
    assert "documents held out" in str(stdlib)


def test_new_document_does_not_move_others_between_train_and_held_out(corpus):
    held = {i for i in range(200) if f"document {i} says".encode() in corpus.held_out.tobytes()}
    assert len(held) == corpus.held_out_documents
    assert 0 < len(held) < 40
    more = {f"{i:03}.txt": document(f"document {i} says {'abc' * (i % 7)}.") for i in range(200)}
    larger = Corpus.from_documents({**more, "new.txt": document("something new")})
    assert {i for i in range(200) if f"document {i} says".encode() in larger.held_out.tobytes()} == held
    assert larger.digest != corpus.digest


def test_sample_depends_on_the_seed_and_its_number_only(corpus):
    def sample(seed: int, number: int) -> torch.Tensor:
        return Sampler(corpus, seed, CONTEXT).batch([number])[0]

    assert torch.equal(sample(1, 5), sample(1, 5))
    assert not any(torch.equal(sample(1, 5), other) for other in (sample(2, 5), sample(1, 6)))


def test_sample_does_not_depend_on_the_order_of_requests(corpus):
    """Samples of an earlier epoch may be returned and leased again."""
    sampler = Sampler(corpus, 3, CONTEXT)
    numbers = [e * sampler.windows + i for e in range(CACHED_PERMUTATIONS + 2) for i in (0, 7, sampler.windows - 1)]
    first = {number: sampler.window(number) for number in numbers}
    assert {number: sampler.window(number) for number in reversed(numbers)} == first


def test_targets_are_the_inputs_one_token_later(corpus):
    x, y = Sampler(corpus, 0, CONTEXT).batch(range(8))
    assert x.shape == y.shape == (8, CONTEXT)
    assert x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_every_window_occurs_once_per_epoch():
    tokens = np.arange(0, 1001, dtype=np.uint16)
    corpus = Corpus.from_documents({"a": tokens, "b": tokens[:50] + 2000, "c": tokens[:50] + 3000})
    sampler = Sampler(corpus, 0, 10)
    count = (len(corpus.train) - 1) // 10
    assert sampler.windows == count
    first = [tuple(row.tolist()) for row in sampler.batch(range(count))[0]]
    second = [tuple(row.tolist()) for row in sampler.batch(range(count, 2 * count))[0]]
    assert len(set(first)) == count
    assert sorted(first) == sorted(second)
    assert first != second


def test_assigned_samples_of_all_learners_are_consecutive():
    numbers = [n for step in range(4) for learner in (1, 2, 3) for n in assigned_samples(step, learner, 3, 2)]
    assert numbers == list(range(24))


def test_held_out_batches_are_evenly_spaced_and_always_the_same(corpus):
    once = list(corpus.held_out_batches(CONTEXT, 4, 10))
    again = list(corpus.held_out_batches(CONTEXT, 4, 10))
    assert sum(len(x) for x, _ in once) == 10
    assert all(torch.equal(a[0], b[0]) for a, b in zip(once, again, strict=True))
    everything = list(corpus.held_out_batches(CONTEXT, 64, 10**6))
    assert sum(len(x) for x, _ in everything) == (len(corpus.held_out) - 1) // CONTEXT


def test_folder_is_read_by_name_without_hidden_and_binary_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b.txt").write_text("bbb" * 10)
    (tmp_path / "sub" / "a.md").write_text("aaa" * 10)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (tmp_path / ".hidden" / "c.txt").write_text("ccc")
    text = Corpus.load(tmp_path)
    assert text.train_documents + text.held_out_documents == 2
    assert sorted([text.train.tobytes(), text.held_out.tobytes()]) == [b"aaa" * 10 + b"\0", b"bbb" * 10 + b"\0"]


def test_one_large_file_is_split_into_train_and_held_out(tmp_path):
    file = tmp_path / "tokens.bin"
    file.write_bytes(bytes(range(256)) * (4 * PART_BYTES // 256))
    text = Corpus.load(file)
    assert text.train_documents == 3
    assert text.held_out_documents == 1


def test_token_file_may_have_a_larger_vocabulary(tmp_path):
    file = tmp_path / "tokens.npy"
    np.save(file, np.arange(2 * PART_BYTES, dtype=np.int32) % 50_000)
    text = Corpus.load(file)
    assert text.vocabulary == 50_000
    assert Sampler(text, 0, 8).batch(range(2))[0].max() > 255


def test_invalid_data_is_refused_with_the_cause(tmp_path, corpus):
    with pytest.raises(ValueError, match="neither a folder nor a file"):
        Corpus.load(tmp_path / "nothing")
    np.save(tmp_path / "floats.npy", np.zeros(10))
    with pytest.raises(ValueError, match="a token file must be a one-dimensional array"):
        Corpus.load(tmp_path / "floats.npy")
    with pytest.raises(ValueError, match="two are needed"):
        Corpus.from_documents({"a": document("only one")})
    with pytest.raises(ValueError, match="context must be at least 1"):
        Sampler(corpus, 0, 0)
    with pytest.raises(ValueError, match="too few"):
        Sampler(corpus, 0, 100_000)
