"""Text as bytes: documents, a split by document, and samples by number.

A sample is a function of the seed and its number and nothing else, so that a learner that was started again, a baseline
that joins all batches in one, and a replay read the very same tokens. Which documents are held out follows from their
names alone: adding a file moves no other from one side to the other.
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
"""A longer document is cut into parts, each of which counts as a document: one large file has a held-out side too."""

SKIPPED_FOLDERS = {"__pycache__", "node_modules"}
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Installed packages are not the library; its tests are another kind of text, and two thirds of the bytes."""

CACHED_ORDERS = 3
"""Epochs whose order is kept in memory."""

Tokens = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus in memory: one array of tokens to train on, one that is held out."""

    name: str
    train: Tokens  # documents one after the other, in the order of their names, a zero after each
    held_out: Tokens
    train_documents: int
    held_out_documents: int
    vocabulary: int
    digest: str  # of both arrays

    @staticmethod
    def load(path: str | os.PathLike[str] | None = None, held_out_share: float = 0.05) -> Corpus:
        """Python's own library (None), a folder of text, one text file, or a token file (`.bin` bytes, `.npy`)."""
        if not 0 < held_out_share < 1:
            raise ValueError(f"held_out_share must be between 0 and 1, got {held_out_share}")
        if path is None:
            root = Path(sysconfig.get_paths()["stdlib"])
            name = f"the standard library of Python {sysconfig.get_python_version()}"
            return Corpus.from_documents(_read_folder(root, STDLIB_SKIPPED, (".py",)), name, held_out_share)
        place = Path(path)
        if place.is_dir():
            return Corpus.from_documents(_read_folder(place, set(), None), str(path), held_out_share)
        if not place.is_file():
            raise ValueError(f"{path} is neither a folder nor a file: give one, or nothing for Python's library")
        return Corpus.from_documents({place.name: _read_tokens(place)}, str(path), held_out_share)

    @staticmethod
    def from_documents(documents: Mapping[str, Tokens], name: str = "text", held_out_share: float = 0.05) -> Corpus:
        """A corpus of named documents."""
        parts = {
            part: tokens for n in sorted(documents) for part, tokens in _split_document(n, documents[n]) if len(tokens)
        }
        if len(parts) < 2:
            raise ValueError(f"{name} holds {len(parts)} documents: two are needed, one of them to be held out")
        rank = {n: int.from_bytes(hashlib.blake2b(n.encode(), digest_size=8).digest(), "big") / 2**64 for n in parts}
        held = {n for n in parts if rank[n] < held_out_share}
        if not held or len(held) == len(parts):
            held = {min(parts, key=lambda n: rank[n])}
        train = _concatenate([t for n, t in parts.items() if n not in held])
        held_out = _concatenate([t for n, t in parts.items() if n in held])
        digest = hashlib.blake2b(digest_size=16)
        for side in (train, held_out):
            digest.update(side.dtype.str.encode() + np.ascontiguousarray(side).data)
        small = train.dtype == held_out.dtype == np.uint8
        vocabulary = 256 if small else 1 + int(max(train.max(), held_out.max()))
        return Corpus(name, train, held_out, len(parts) - len(held), len(held), vocabulary, digest.hexdigest())

    def held_out_batches(self, context: int, batch: int, windows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """At most `windows` windows, evenly spread over everything that is held out, always the same."""
        there = _window_count(self.held_out, context)
        starts = np.unique(np.linspace(0, there - 1, min(windows, there)).round().astype(np.int64)) * context
        for i in range(0, len(starts), batch):
            yield _cut_windows(self.held_out, starts[i : i + batch], context)

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.train) / 1e6:.1f} million tokens in {self.train_documents} documents, "
            f"{len(self.held_out) / 1e6:.2f} million in {self.held_out_documents} documents held out"
        )


class Sampler:
    """Samples by number, without end: the windows of the text, in each epoch in another order, drawn from the seed and
    the epoch. A number is the same window for everybody, and no two of one epoch are."""

    def __init__(self, corpus: Corpus, seed: int, context: int) -> None:
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        self.corpus = corpus
        self.seed = seed
        self.context = context
        self.windows = _window_count(corpus.train, context)
        self._orders: dict[int, npt.NDArray[np.int64]] = {}  # of the epochs that were wanted last

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples, [len(numbers), context] each."""
        starts = np.array([self.window(number) for number in numbers], dtype=np.int64) * self.context
        return _cut_windows(self.corpus.train, starts, self.context)

    def window(self, number: int) -> int:
        epoch, place = divmod(number, self.windows)
        order = self._orders.get(epoch)
        if order is None:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.windows)
            if len(self._orders) >= CACHED_ORDERS:  # samples of an earlier epoch may be returned and leased again
                del self._orders[min(self._orders)]
            self._orders[epoch] = order
        return int(order[place])


def assigned_samples(step: int, learner: int, learners: int, batch: int) -> range:
    """The samples of a learner's step, counted from 0, where all learners take as many steps and nobody leases.

    >>> [dealt(step, learner, 2, 3) for step in (0, 1) for learner in (1, 2)]
    [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]
    """
    begin = (step * learners + learner - 1) * batch
    return range(begin, begin + batch)


def _window_count(tokens: Tokens, context: int) -> int:
    """Windows of `context` inputs, each with the target of its last token."""
    count = (len(tokens) - 1) // context
    if count < 1:
        raise ValueError(f"{len(tokens)} tokens are too few for one window of {context}: give more text")
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
            raise ValueError(f"{file} holds {found.dtype} {found.shape}: a token file is one row of whole numbers")
        return np.asarray(found)
    return np.frombuffer(file.read_bytes(), dtype=np.uint8)


def _read_folder(root: Path, skipped: set[str], suffixes: tuple[str, ...] | None) -> dict[str, Tokens]:
    """Every file that looks like text, by its path below the folder."""
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
