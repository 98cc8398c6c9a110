"""Logs that stay bounded: the newest rows are exact, and what is twice as old is half as dense.

    level 2        level 1        level 0
    4 entries each, 2 entries each, 1 entry each      oldest first, as the rows of a log lie

When a level has more than `keep` rows, the older half of it is joined pairwise and becomes the newest of the next one.
So a log of n entries has at most about `keep` times log2(n / keep) rows.
"""

from __future__ import annotations

KEEP = 2048
"""Rows of a level. A month of steps of one second are some 20,000 rows."""


class Levels:
    """Says which rows are to be joined, and where exact ones begin. The rows themselves are somebody else's."""

    __slots__ = ("_keep", "_sizes", "joined")

    def __init__(self, keep: int | None = KEEP) -> None:
        """`keep`: a multiple of 4; None keeps everything."""
        assert keep is None or keep % 4 == 0, f"{keep} rows cannot be halved twice"
        self._keep = keep
        self._sizes = [0]
        self.joined = 0  # so many rows at the beginning stand for more than one entry each

    def add(self) -> list[tuple[int, int]]:
        """One row more. Slices of even length whose rows are to be joined pairwise, one slice after the other."""
        sizes, keep = self._sizes, self._keep
        sizes[0] += 1
        if keep is None or sizes[0] <= keep:
            return []
        slices, level = [], 0
        while sizes[level] > keep:
            begin = sum(sizes[level + 1 :])
            slices.append((begin, begin + keep // 2))
            sizes[level] -= keep // 2
            if level + 1 == len(sizes):
                sizes.append(0)
            sizes[level + 1] += keep // 4
            level += 1
        self.joined = sum(sizes) - sizes[0]
        return slices

    def halve(self) -> tuple[int, int]:
        """As many rows as can be are joined, wherever they stand; an odd one at the end stays as it is."""
        rows = sum(self._sizes)
        self._sizes = [rows % 2, rows // 2]
        self.joined = rows // 2
        return 0, rows - rows % 2
