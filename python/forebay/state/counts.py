"""Counts of each token in each slot, for penalties."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from forebay.device import Device

Int64s = npt.NDArray[np.int64]
_FIRST = 4
"""The number of lines of the first table that is allocated."""


def ragged(first: Int64s, counts: Int64s) -> Int64s:
    """Concatenates the ranges `first[i] .. first[i] + counts[i]`."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum(), dtype=np.int64)


@dataclass(frozen=True)
class Recount:
    """The lines of the table whose counts are recomputed from a slot's tokens."""

    lines: Int64s  # [l]
    tokens: Int64s  # the entries of the token pool to count
    counters: Int64s  # one per entry: the index of the first counter of its line
    capacity: int  # the number of lines that the table has from now on


class TokenCounts:
    """Counters int32 `[lines, 2, vocabulary]` on the device, with a line for every slot that has a penalty.

    A line has two rows: the counts of all tokens, and those of generated tokens. The host assigns lines and counts
    tokens when a slot is written. The sampler adds each sampled token.
    """

    def __init__(self, slots: int, vocabulary: int, device: Device) -> None:
        self._device = device
        self._vocabulary = vocabulary
        self._line = np.full(slots, -1, np.int64)
        self._free: list[int] = []
        self._capacity = 0
        self._table = device.zeros((0, 2, vocabulary), torch.int32)

    @property
    def table(self) -> torch.Tensor:
        """The counters int32 [lines, 2, vocabulary] of all and of generated tokens. Read by queued work."""
        return self._table

    @property
    def nbytes(self) -> int:
        """Bytes of all counters."""
        return self._table.nbytes

    def keep(self) -> None:
        """Allocates all slots' lines, since graphs refer to the table by address. Called on the host before `renew`."""
        self._capacity = len(self._line)
        self._free = list(range(self._capacity))
        self._table = self._device.zeros((self._capacity, 2, self._vocabulary), torch.int32)

    def lines(self, slots: Int64s) -> Int64s:
        """Returns the lines of `slots` [r]; -1: none. Called on the host."""
        return self._line[slots]

    def renew(self, slots: Int64s, penalised: npt.NDArray[np.bool_]) -> Int64s:
        """Frees the lines of `slots` [n], and assigns lines [l] to those that are `penalised`.

        Called on the host.
        """
        if not penalised.any() and len(self._free) == self._capacity:
            return np.zeros(0, np.int64)
        old = self._line[slots]
        self._free += old[old >= 0].tolist()
        self._line[slots] = -1
        wanted = slots[penalised]
        while len(self._free) < len(wanted):
            grown = min(max(_FIRST, 2 * self._capacity), len(self._line))
            self._free += range(self._capacity, grown)
            self._capacity = grown
        self._line[wanted] = [self._free.pop() for _ in wanted]
        return self._line[wanted]

    def recount(self, lines: Int64s, stride: Int64s, first: Int64s, prompt_len: Int64s, counts: Int64s) -> Recount:
        """Returns the input of `write` for new slots [l]. Called on the host.

        The tokens of each slot begin at entry `stride` of the token pool. Tokens `first .. counts` are counted,
        and those from `prompt_len` on also as generated.
        """
        begin = self.begin(lines)
        own = np.maximum(prompt_len, first)
        seen, generated = counts - first, np.maximum(counts - own, 0)
        tokens = np.concatenate((ragged(stride + first, seen), ragged(stride + own, generated)))
        repeated = np.repeat(begin, seen), np.repeat(begin + self._vocabulary, generated)
        return Recount(lines, tokens, np.concatenate(repeated), self._capacity)

    def write(self, recount: Recount, token_pool: torch.Tensor) -> None:
        """Counts the tokens of new slots. Runs as queued work."""
        if recount.capacity > len(self._table):
            grown = self._device.zeros((recount.capacity, 2, self._vocabulary), torch.int32)
            grown[: len(self._table)] = self._table
            self._table = grown
        lines, tokens, counters = self._device.copy_in(recount.lines, recount.tokens, recount.counters)
        self._table.index_fill_(0, lines, 0)
        self._add(counters + token_pool.view(-1).index_select(0, tokens))

    def add(self, begin: torch.Tensor, tokens: torch.Tensor, given: torch.Tensor | None = None) -> None:
        """Counts one sampled token [l] per line. `begin` [l]: the first counter of each line. Runs as queued work.

        `given`, bool [l]: true for tokens that are counted. None: all are.
        """
        entries = begin + tokens
        amounts = None if given is None else given.int().repeat(2)
        self._add(torch.cat((entries, entries + self._vocabulary)), amounts)

    def begin(self, lines: Int64s) -> Int64s:
        """Returns the index of the first counter of each of `lines`. Called on the host."""
        return lines * (2 * self._vocabulary)

    def _add(self, entries: torch.Tensor, amounts: torch.Tensor | None = None) -> None:
        if amounts is None:
            amounts = torch.ones(1, dtype=torch.int32, device=entries.device).expand(len(entries))
        self._table.view(-1).index_add_(0, entries, amounts)
