"""Text corpus as bytes: documents, a train/held-out split by document, and samples by number.

A sample depends only on the seed and its number. A restarted learner, a baseline and a replay therefore read the same
tokens. Whether a document is held out depends only on its name: a new file does not move other files between the two
parts.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PART_BYTES = 256 * 1024
"""Maximum size of a document: longer ones are split. A single file can therefore have train and held-out documents."""

SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Folders that are not part of the library text. The tests are a different kind of text, and two thirds of the
bytes."""

CACHED_PERMUTATIONS = 3
"""Epochs whose permutation is cached in memory."""

Tokens = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Corpus in memory: one array of training tokens and one array of held-out tokens."""

    name: str
    train: Tokens  # documents in the order of their names, each followed by a zero
    held_out: Tokens
    train_documents: int
    held_out_documents: int
    vocabulary: int
    digest: str  # of both arrays

    @staticmethod
    def load(path: str | os.PathLike[str] | None = None, held_out_share: float = 0.05) -> Corpus:
        """Load a folder of text, one text file or a token file (`.bin` bytes, `.npy`). None: Python's own library."""
        if not 0 < held_out_share < 1:
            raise ValueError(f"held_out_share must be between 0 and 1, got {held_out_share}")
        if path is None:
            root = Path(sysconfig.get_paths()["stdlib"])
            name = f"the standard library of Python {sysconfig.get_python_version()}"
            return Corpus.from_documents(_read_folder(root, STDLIB_SKIPPED, (".py",)), name, held_out_share)
        source = Path(path)
        if source.is_dir():
            return Corpus.from_documents(_read_folder(source, set(), None), str(path), held_out_share)
        if not source.is_file():
            raise ValueError(
                f"--data {path} is neither a folder nor a file; give one, or omit it to use Python's library"
            )
        return Corpus.from_documents({source.name: _read_tokens(source)}, str(path), held_out_share)

    @staticmethod
    def from_documents(documents: Mapping[str, Tokens], name: str = "text", held_out_share: float = 0.05) -> Corpus:
        """Make a corpus from tokens by document name."""
        parts = {
            part: tokens for n in sorted(documents) for part, tokens in _split_document(n, documents[n]) if len(tokens)
        }
        if len(parts) < 2:
            raise ValueError(f"{name} has {len(parts)} documents, but two are needed, one of them held out; add text")
        rank = {n: int.from_bytes(hashlib.blake2b(n.encode(), digest_size=8).digest(), "big") / 2**64 for n in parts}
        held_out_names = {n for n in parts if rank[n] < held_out_share}
        if not held_out_names or len(held_out_names) == len(parts):
            held_out_names = {min(parts, key=lambda n: rank[n])}
        train = _concatenate([t for n, t in parts.items() if n not in held_out_names])
        held_out = _concatenate([t for n, t in parts.items() if n in held_out_names])
        digest = hashlib.blake2b(digest_size=16)
        for array in (train, held_out):
            digest.update(array.dtype.str.encode() + np.ascontiguousarray(array).data)
        small = train.dtype == held_out.dtype == np.uint8
        vocabulary = 256 if small else 1 + int(max(train.max(), held_out.max()))
        held_out_count = len(held_out_names)
        return Corpus(
            name, train, held_out, len(parts) - held_out_count, held_out_count, vocabulary, digest.hexdigest()
        )

    def held_out_batches(self, context: int, batch: int, windows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of at most `windows` held-out windows: evenly spaced, the same in every call."""
        available = _window_count(self.held_out, context)
        starts = np.unique(np.linspace(0, available - 1, min(windows, available)).round().astype(np.int64)) * context
        for i in range(0, len(starts), batch):
            yield _cut_windows(self.held_out, starts[i : i + batch], context)

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.train) / 1e6:.1f} million tokens in {self.train_documents} documents, "
            f"{len(self.held_out) / 1e6:.2f} million in {self.held_out_documents} documents held out"
        )


class Sampler:
    """Samples by number, in endless epochs over the windows of the text.

    The order of an epoch is a permutation drawn from the seed and the epoch. A number means the same window in every
    process, and every window occurs once per epoch.
    """

    def __init__(self, corpus: Corpus, seed: int, context: int) -> None:
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        self.corpus = corpus
        self.seed = seed
        self.context = context
        self.windows = _window_count(corpus.train, context)
        self._permutations: dict[int, npt.NDArray[np.int64]] = {}  # by epoch

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these samples, [len(numbers), context] each."""
        starts = np.array([self.window(number) for number in numbers], dtype=np.int64) * self.context
        return _cut_windows(self.corpus.train, starts, self.context)

    def window(self, number: int) -> int:
        """Return the index of the window that a sample number means."""
        epoch, position = divmod(number, self.windows)
        order = self._permutations.get(epoch)
        if order is None:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
            if (
                len(self._permutations) >= CACHED_PERMUTATIONS
            ):  # not a ring: samples of an earlier epoch may be leased again
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = order
        return int(order[position])


def assigned_samples(step: int, learner: int, learners: int, batch: int) -> range:
    """Return the samples of a learner's step in a lockstep method, which has no leases. Steps count from 0.

    >>> [assigned_samples(step, learner, 2, 3) for step in (0, 1) for learner in (1, 2)]
    [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]
    """
    begin = (step * learners + learner - 1) * batch
    return range(begin, begin + batch)


def _window_count(tokens: Tokens, context: int) -> int:
    """Return the number of windows of `context` inputs, each with the target of its last token."""
    count = (len(tokens) - 1) // context
    if count < 1:
        raise ValueError(f"{len(tokens)} tokens are too few for one window of {context} tokens; give more text")
    return count


def _cut_windows(tokens: Tokens, starts: npt.NDArray[np.int64], context: int) -> tuple[Tensor, Tensor]:
    window = torch.from_numpy(tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64))
    return window[:, :-1], window[:, 1:]


def _concatenate(parts: list[Tokens]) -> Tokens:
    end = np.zeros(1, dtype=parts[0].dtype)
    return np.concatenate([x for part in parts for x in (part, end)])


def _split_document(name: str, tokens: Tokens) -> Iterator[tuple[str, Tokens]]:
    if len(tokens) <= PART_BYTES:
        yield name, tokens
        return
    for i in range(0, len(tokens), PART_BYTES):
        yield f"{name}#{i // PART_BYTES}", tokens[i : i + PART_BYTES]


def _read_tokens(file: Path) -> Tokens:
    if file.suffix == ".npy":
        found = np.load(file, allow_pickle=False)
        if found.ndim != 1 or found.dtype.kind not in "iu" or (found.size and found.min() < 0):
            raise ValueError(
                f"{file} contains {found.dtype} of shape {found.shape}; a token file must be a one-dimensional array"
                " of integers from 0 up"
            )
        return np.asarray(found)
    return np.frombuffer(file.read_bytes(), dtype=np.uint8)


def _read_folder(root: Path, skipped: set[str], suffixes: tuple[str, ...] | None) -> dict[str, Tokens]:
    """Return the tokens of every file that looks like text, by its path below the folder."""
    found: dict[str, Tokens] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS | skipped and not f.startswith("."))
        for file in sorted(files):
            if file.startswith(".") or (suffixes is not None and not file.endswith(suffixes)):
                continue
            with open(os.path.join(folder, file), "rb") as f:
                data = f.read()
            if b"\0" not in data[:4096]:
                name = os.path.relpath(os.path.join(folder, file), root).replace(os.sep, "/")
                found[name] = np.frombuffer(data, dtype=np.uint8)
    return found
