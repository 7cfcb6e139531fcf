"""The part of each weight that belongs to a rank, and that it reads from the file (Shoeybi et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["ALONE", "WHOLE", "Cut", "Cuts", "Part", "Shard"]


class Part(NamedTuple):
    """A range of the rows, or columns, of a checkpoint's weight."""

    whole: int
    first: int
    end: int

    @property
    def size(self) -> int:
        """The number of rows or columns."""
        return self.end - self.first

    @property
    def place(self) -> slice:
        """The slice of the whole that the part covers."""
        return slice(self.first, self.end)

    @property
    def is_whole(self) -> bool:
        """True if the part is the whole."""
        return self.size == self.whole


@dataclass(frozen=True)
class Shard:
    """One of `world` shares of a weight or of heads."""

    rank: int
    world: int

    def of(self, size: int) -> Part:
        """Returns the shard's part of a dimension.

        Parts are contiguous, in the order of ranks, and differ in length by at most one.
        """
        each, over = divmod(size, self.world)
        first = self.rank * each + min(self.rank, over)
        return Part(size, first, first + each + (self.rank < over))

    def of_heads(self, heads: int) -> Shard:
        """Returns the shard of heads. With fewer heads than ranks, consecutive ranks have the same shard."""
        return self if heads >= self.world else Shard(self.rank * heads // self.world, heads)


ALONE = Shard(0, 1)
"""The shard of a single rank, which has everything."""


@dataclass(frozen=True)
class Cut:
    """The part of a weight [rows] or [rows, columns] that a rank reads."""

    rows: Part
    columns: Part | None = None
    """The columns; None: all columns, or the weight has only one dimension."""

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the weight in the checkpoint."""
        return (self.rows.whole,) if self.columns is None else (self.rows.whole, self.columns.whole)

    @property
    def places(self) -> tuple[slice, ...]:
        """The slices of the checkpoint's tensor that the cut covers."""
        return (self.rows.place,) if self.columns is None else (self.rows.place, self.columns.place)

    @property
    def first(self) -> tuple[int, int]:
        """The first row and column."""
        return self.rows.first, 0 if self.columns is None else self.columns.first

    @property
    def is_whole(self) -> bool:
        """True if the cut is the whole weight."""
        return self.rows.is_whole and (self.columns is None or self.columns.is_whole)


@dataclass
class Cuts:
    """The parts of a checkpoint that a rank reads, by name. A weight without an entry is read whole."""

    parts: dict[str, Cut] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    """Weights that belong to other ranks. This rank does not read them."""


WHOLE = Cuts()
"""The cuts of a single rank, which reads everything."""
