"""The computation from logits to tokens, in the order of `docs/protocol.md`: adjust, filter, draw.

It works on all rows at once.

The host decides the parameters of a step's rows (`Sampler.ask`, from the host's tables). The device samples the rows
(`Sampler.sample`, as queued work). The host's next action does not depend on the device's results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.compute.uniform import uniform
from forebay.device import Device, host_array
from forebay.gpu.sampling import MOST_LIKELY
from forebay.layers.ops import Draw, Ops
from forebay.protocol.constants import SlotFloats
from forebay.protocol.frames import Float32s, Int32s
from forebay.protocol.masks import UInt32s
from forebay.state.slots import Int64s, SlotTables, penalised
from forebay.weights.shards import Part

NO_MASKS: Mapping[int, UInt32s] = MappingProxyType({})
_BY_SLOT = frozenset(("entries", "penalised", "lines", "counters", "penalties", "logprob_rows"))
"""The columns of the parameters that the device can read by slot."""
_PENALTIES = (SlotFloats.REPETITION_PENALTY, SlotFloats.PRESENCE_PENALTY, SlotFloats.FREQUENCY_PENALTY)


@dataclass
class Ask:
    """The sampling parameters of a step's rows, on the host; `s` rows."""

    slots: Int64s  # [s]
    positions: Int64s  # [s]
    plain: bool  # True if all rows take the largest logit, and nothing else
    simple: bool = False  # True if all rows take the largest logit or draw after the filters, and nothing else
    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    by_slot: bool = False
    """True if the device reads all of the rows' parameters by slot: `simple` ones, penalties and log-probabilities."""
    all_drawn: bool = False
    """True if every row has a temperature above 0."""
    width: int = 0
    logprobs: AskedLogprobs | None = None
    levels: list[int] = field(default_factory=list)
    """The number of rows after one draft, then after two, and so on. Empty unless a row after a draft has a penalty."""
    rows: Int64s | None = None
    """The computed rows that have these parameters, [s]; other rows sample no token. None: all rows."""


@dataclass(frozen=True)
class Chains:
    """The drafts among the computed rows of a step; `s` rows that sample.

    A row after a draft assumes that the row before it samples the draft's token.
    """

    before: Int64s  # [s]: the row before it in its chain, which has a smaller index; -1: none
    drafts: Int32s  # [s]: the token that the row before is assumed to sample

    def of(self, rows: Int64s) -> Chains:
        """Returns the chains among `rows`.

        For each of its rows, `rows` has to contain all earlier rows of the chain.
        """
        number = np.full(len(self.before) + 1, -1, np.int64)
        number[rows] = np.arange(len(rows))
        return Chains(number[self.before[rows]], self.drafts[rows])

    def without(self, rows: Int64s) -> Int64s:
        """Returns all rows except `rows` and the rows after them in a chain."""
        gone = np.zeros(len(self.before) + 1, np.bool_)
        gone[rows] = True
        for row, before in enumerate(self.before.tolist()):
            gone[row] |= gone[before]
        return np.flatnonzero(~gone[:-1])

    def granted(self, rows: Int64s) -> tuple[Int64s, Int64s]:
        """Returns the drafts that `rows` assume.

        For each draft: the index in `rows` of the row that assumes it, and the token.
        """
        numbers, tokens = [], []
        for number, row in enumerate(rows.tolist()):
            while self.before[row] >= 0:
                numbers.append(number)
                tokens.append(self.drafts[row])
                row = self.before[row]
        return np.array(numbers, np.int64), np.array(tokens, np.int64)

    def levels(self) -> list[Int64s]:
        """Returns the rows with one row before them in a chain, then those with two, and so on."""
        depth = np.zeros(len(self.before), np.int64)
        for row, before in enumerate(self.before.tolist()):
            depth[row] = 0 if before < 0 else depth[before] + 1
        return [np.flatnonzero(depth == level) for level in range(1, 1 + int(depth.max(initial=0)))]


@dataclass(frozen=True)
class AskedLogprobs:
    """Log-probabilities of the unmodified distribution, for the `a` rows that requested them."""

    counts: Int32s  # [s]: entries per row
    most: int  # the largest number of most likely tokens that a row requests
    wanted: npt.NDArray[np.bool_]  # [a, 1 + most]: True for the entries that the row requests


@dataclass(frozen=True)
class Sampled:
    """The result of sampling, on the device; `s` rows."""

    tokens: torch.Tensor  # int32 [s]; 0 where the logits were not finite
    finite: torch.Tensor  # bool [s]
    logprobs: tuple[torch.Tensor, torch.Tensor] | None
    """Ids int64 [a, 1 + most] of the sampled and the likeliest tokens, and values float32; None: not requested."""


class SampledColumns:
    """Host memory for a step's samples. It is complete at the step's last event."""

    def __init__(self, ask: Ask, device: Device) -> None:
        self._device = device
        self._asked = ask.logprobs
        rows = len(ask.slots)
        self.tokens: Int32s = host_array(device, (rows,), np.int32)
        self.finite: npt.NDArray[np.bool_] = host_array(device, (rows,), np.bool_)
        self._logprobs: tuple[Int64s, Float32s] | None = None
        if self._asked is not None:
            shape = self._asked.wanted.shape
            self._logprobs = host_array(device, shape, np.int64), host_array(device, shape, np.float32)

    def check(self) -> None:
        """Does nothing, since the operators raise for a wrong plan."""

    def fill(self, sampled: Sampled) -> None:
        """Copies the samples. Runs as queued work."""
        self._device.copy_out(sampled.tokens, self.tokens)
        self._device.copy_out(sampled.finite, self.finite)
        if sampled.logprobs is not None:
            assert self._logprobs is not None
            self._device.copy_out(sampled.logprobs[0], self._logprobs[0])
            self._device.copy_out(sampled.logprobs[1], self._logprobs[1])

    def logprobs(self) -> tuple[Int32s, Int32s, Float32s] | None:
        """The result's three columns: counts, ids, values; None: no row requested them."""
        if self._asked is None or self._logprobs is None:
            return None
        ids, values = self._logprobs
        wanted = self._asked.wanted
        return self._asked.counts, ids[wanted].astype(np.int32), values[wanted]


class Sampler:
    """Samples rows by the parameters in the slot tables. The tokens are written where the next step reads them."""

    def __init__(self, tables: SlotTables, vocabulary: int, ops: Ops, device: Device, own: Part | None = None) -> None:
        """`own`: the tokens whose logits this rank has, with `ops` that communicate with the other ranks; None: all."""
        self._tables = tables
        self._vocabulary = vocabulary
        self._own = own
        self._ops = ops
        self._device = device

    def ask(
        self,
        slots: Int64s,
        positions: Int64s,
        masks: Mapping[int, UInt32s] = NO_MASKS,
        by_slot: bool = False,
        chains: Chains | None = None,
    ) -> Ask:
        """Returns the parameters of `positions` [s] of `slots` [s]. `masks` are keyed by row. Called on the host.

        `by_slot`: the device reads the parameters of draws, penalties and log-probabilities by itself, unless a row
        requires other parameters. `chains`: those of the rows; None: no row follows a draft.
        """
        tables = self._tables
        plain = not masks and bool(tables.plain[slots].all())
        untouched = plain or (not masks and bool(tables.untouched[slots].all()))
        ask = Ask(slots, positions, plain, untouched)
        ask.columns["entries"] = slots * tables.stride + positions
        if not untouched:
            self._ask_adjusted(ask, masks, chains)
            self._ask_logprobs(ask)
            ask.simple = len(ask.columns) == 1
            few = ask.logprobs is None or ask.logprobs.most <= MOST_LIKELY
            ask.by_slot = by_slot and few and ask.columns.keys() <= _BY_SLOT
        if not (plain or (by_slot and ask.simple) or ask.by_slot):
            self._ask_drawn(ask)
        return ask

    def ask_some(
        self, rows: Int64s, slots: Int64s, positions: Int64s, masks: Mapping[int, UInt32s], chains: Chains | None = None
    ) -> Ask:
        """Returns `ask` for a subset `rows` [s] of the computed rows. `chains` are those of all rows."""
        ask = self.ask(slots[rows], positions[rows], masks, chains=None if chains is None else chains.of(rows))
        # The fast path samples all rows by their slots, including rows outside the subset.
        ask.simple, ask.rows = False, rows
        return ask

    def greedy(self, best: torch.Tensor, finite: torch.Tensor, ask: Ask) -> Sampled:
        """The tokens of rows that need only the largest logit. Runs as queued work."""
        (entries,) = self._device.copy_in(ask.columns["entries"])
        tokens = _where_finite(finite, best)
        self._tables.token_pool.view(-1).index_copy_(0, entries, tokens)
        return Sampled(tokens, finite, None)

    def sample(self, logits: torch.Tensor, ask: Ask) -> Sampled:
        """Tokens from float32 logits [s, vocabulary]. Runs as queued work."""
        columns = dict(zip(ask.columns, self._device.copy_in(*ask.columns.values()), strict=True))
        adjusted = self._adjust(logits, columns)
        finite = self._ops.finite(logits)
        tokens = _where_finite(finite, self._choose(adjusted, ask, columns))
        self._tables.token_pool.view(-1).index_copy_(0, columns["entries"], tokens)
        if "penalised" in columns:
            rows = columns["penalised"]
            given = _given(tokens, finite, ask.levels, columns).index_select(0, rows) if ask.levels else None
            self._tables.counts.add(columns["counters"], tokens.long().index_select(0, rows), given)
        return Sampled(tokens, finite, self._logprobs(logits, tokens, ask.logprobs, columns))

    def _choose(self, logits: torch.Tensor, ask: Ask, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns tokens int64 [s] from adjusted logits: drawn if the row has a temperature, else the most likely."""
        if ask.all_drawn:
            return self._ops.sample(logits, _draw(columns, ask.width))
        tokens, _ = self._ops.greedy(logits)
        if "drawn" in columns:
            rows = columns["drawn"]
            tokens.index_copy_(0, rows, self._ops.sample(logits.index_select(0, rows), _draw(columns, ask.width)))
        return tokens

    def _ask_adjusted(self, ask: Ask, masks: Mapping[int, UInt32s], chains: Chains | None) -> None:
        tables, slots, columns = self._tables, ask.slots, ask.columns
        biased = [row for row, slot in enumerate(slots.tolist()) if slot in tables.biases] if tables.biases else []
        if biased:
            parts = [tables.biases[int(slots[row])] for row in biased]
            columns["bias_rows"], columns["bias_ids"], columns["bias_values"] = self._owned(
                *_ragged_ids(biased, [ids for ids, _ in parts]), np.concatenate([values for _, values in parts])
            )
        rows = np.flatnonzero(penalised(tables.floats[slots]))
        if len(rows):
            lines = tables.counts.lines(slots[rows])
            columns["penalised"], columns["lines"] = rows, lines
            columns["counters"] = tables.counts.begin(lines)
            columns["penalties"] = tables.floats[slots[rows]][:, list(_PENALTIES)]
            if chains is not None and (chains.before[rows] >= 0).any():
                columns["granted_rows"], columns["granted_ids"] = chains.granted(rows)
                levels = chains.levels()
                ask.levels = [len(level) for level in levels]
                behind = np.concatenate(levels)
                columns["behind"], columns["before"] = behind, chains.before[behind]
                columns["drafts"] = chains.drafts[behind]
        if tables.stop_ids:
            below = np.flatnonzero(ask.positions < tables.min_total[slots]).tolist()
            wanted = tables.stop_ids.keys() - tables.only_stops
            # Leave out rows with masks: a mask already decides whether the request may finish.
            early = [row for row in below if int(slots[row]) in wanted and row not in masks]
            if early:
                ids = [tables.stop_ids[int(slots[row])] for row in early]
                columns["early_rows"], columns["early_ids"] = self._owned(*_ragged_ids(early, ids))
        held = [row for row, slot in enumerate(slots.tolist()) if slot in tables.allowed] if tables.allowed else []
        if held:
            ids = [tables.allowed[int(slots[row])] for row in held]
            columns["held"] = np.asarray(held, np.int64)
            columns["allowed_rows"], columns["allowed_ids"] = self._owned(*_ragged_ids(held, ids))
        if masks:
            columns["masked"] = np.fromiter(masks, np.int64, len(masks))
            columns["masks"] = np.stack(list(masks.values())).view(np.int32)

    def _owned(self, rows: Int64s, ids: Int64s, *values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
        """Keeps the entries of tokens whose logits this rank has, with ids relative to this rank's first token."""
        if self._own is None:
            return rows, ids, *values
        here = (ids >= self._own.first) & (ids < self._own.end)
        return rows[here], ids[here] - self._own.first, *(value[here] for value in values)

    def _ask_drawn(self, ask: Ask) -> None:
        tables, columns = self._tables, ask.columns
        drawn = np.flatnonzero(tables.floats[ask.slots, SlotFloats.TEMPERATURE] > 0)
        if not len(drawn):
            return
        slots, floats = ask.slots[drawn], tables.floats[ask.slots[drawn]]
        ask.all_drawn = len(drawn) == len(ask.slots)
        columns["drawn"] = drawn
        columns["temperature"] = floats[:, SlotFloats.TEMPERATURE]
        columns["u"] = uniform(tables.seed[slots], ask.positions[drawn])
        top_k, top_p, min_p = tables.top_k[slots], floats[:, SlotFloats.TOP_P], floats[:, SlotFloats.MIN_P]
        limited = (top_k > 0) & (top_k < self._vocabulary)
        if limited.any():
            columns["limited"] = np.flatnonzero(limited)
            columns["top_k"] = top_k[limited].astype(np.int64)
            columns["top_p"] = top_p[limited]
            ask.width = int(top_k[limited].max())
        nucleus = ~limited & (top_p < 1)
        if nucleus.any():
            columns["nucleus"] = np.flatnonzero(nucleus)
            columns["nucleus_p"] = top_p[nucleus]
        if (min_p > 0).any():
            columns["min_p"] = min_p

    def _ask_logprobs(self, ask: Ask) -> None:
        asked = self._tables.logprobs[ask.slots]
        rows = np.flatnonzero(asked >= 0)
        if not len(rows):
            return
        most = min(int(asked.max()), self._vocabulary)
        counts = (np.minimum(asked, most) + 1).astype(np.int32)
        ask.columns["logprob_rows"] = rows
        ask.logprobs = AskedLogprobs(counts, most, np.arange(1 + most) < counts[rows][:, None])

    def _adjust(self, logits: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        """Applies biases, penalties, suppressed stop ids, allowed ids and masks. Returns `logits` if no row has any."""
        if not columns.keys() & {"bias_rows", "penalised", "early_rows", "held", "masked"}:
            return logits
        logits = logits.clone()
        if "bias_rows" in columns:
            where = columns["bias_rows"], columns["bias_ids"]
            logits.index_put_(where, columns["bias_values"], accumulate=True)
        if "penalised" in columns:
            counts, lines = self._counted(columns)
            self._ops.penalise(logits, columns["penalised"], counts, lines, columns["penalties"])
        if "early_rows" in columns:
            never = logits.new_full((), -torch.inf)
            logits.index_put_((columns["early_rows"], columns["early_ids"]), never)
        if "held" in columns:
            where = columns["allowed_rows"], columns["allowed_ids"]
            kept = logits[where]
            logits.index_fill_(0, columns["held"], -torch.inf)
            logits.index_put_(where, kept)
        if "masked" in columns:
            rows = columns["masked"]
            forbidden = self._of_own(self._ops.forbidden(columns["masks"], self._vocabulary))
            logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))
        return logits

    def _counted(self, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the counts of this rank's tokens, int32 [lines, 2, vocabulary], and the lines of penalised rows."""
        counts, lines = self._tables.counts.table, columns["lines"]
        if self._own is None and "granted_rows" not in columns:
            return counts, lines
        counts = counts.index_select(0, lines)
        if "granted_rows" in columns:
            where = columns["granted_rows"], columns["granted_ids"]
            for count in counts.unbind(1):
                count.index_put_(where, count.new_ones(()), accumulate=True)
        if self._own is not None:
            counts = counts[..., self._own.place].contiguous()
        return counts, torch.arange(len(counts), device=lines.device)

    def _of_own(self, values: torch.Tensor) -> torch.Tensor:
        """Selects the tokens whose logits this rank has from values [r, vocabulary]."""
        return values if self._own is None else values[:, self._own.place]

    def _logprobs(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        asked: AskedLogprobs | None,
        columns: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if asked is None:
            return None
        rows = columns["logprob_rows"]
        sampled = tokens.index_select(0, rows).long()[:, None]
        return self._ops.likely(logits.index_select(0, rows), sampled, asked.most)


def _given(
    tokens: torch.Tensor, finite: torch.Tensor, levels: list[int], columns: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Returns, for each token [s], true if no draft before it is wrong."""
    given = torch.ones_like(finite)
    parts = (columns[name].split(levels) for name in ("behind", "before", "drafts"))
    for behind, before, drafts in zip(*parts, strict=True):
        right = tokens.index_select(0, before) == drafts
        right &= given.index_select(0, before) & finite.index_select(0, before) & finite.index_select(0, behind)
        given.index_copy_(0, behind, right)
    return given


def _draw(columns: dict[str, torch.Tensor], width: int) -> Draw:
    limited = (columns["limited"], columns["top_k"], columns["top_p"]) if "limited" in columns else None
    nucleus = (columns["nucleus"], columns["nucleus_p"]) if "nucleus" in columns else None
    return Draw(columns["temperature"], columns["u"], limited, width, nucleus, columns.get("min_p"))


def _ragged_ids(rows: list[int], ids: list[Int32s]) -> tuple[Int64s, Int64s]:
    """Returns the row and the column in the logits of each of the `ids`, an array per row in `rows`."""
    repeated = np.repeat(np.asarray(rows, np.int64), [len(part) for part in ids])
    return repeated, np.concatenate(ids).astype(np.int64)


def _where_finite(finite: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return tokens.masked_fill(~finite, 0).int()
