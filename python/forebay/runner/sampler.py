"""From logits to tokens, as `docs/protocol.md` orders it: adjust, filter, draw. Vectorised over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forebay.device import Device
from forebay.runner.compute import finite_rows
from forebay.runner.slots import Int64s, SlotTables, penalised, ragged
from forebay.runner.uniform import uniform
from forebay.worker.wire import Float32s, Int32s, SlotFloat

CANDIDATES = 256
"""Most likely tokens that `top_p` looks at first: nearly always enough, and far cheaper than sorting a vocabulary."""


@dataclass(frozen=True)
class Sampled:
    """What sampling gave; `s` rows."""

    tokens: torch.Tensor  # int32 [s]; 0 where the logits were not finite
    finite: torch.Tensor  # bool [s]
    logprobs: Logprobs | None  # None when no row asked


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the unmodified distribution, of the `a` rows that asked."""

    counts: Int32s  # [s], entries a row
    ids: torch.Tensor  # int64 [a, 1 + n]: the sampled token, then the n most likely
    values: torch.Tensor  # float32, the same
    wanted: npt.NDArray[np.bool_]  # [a, 1 + n]: the entries that the row asked for

    def columns(self, device: Device) -> tuple[Int32s, Int32s, Float32s]:
        """The result's three columns: counts, ids, values."""
        ids, values = device.download(self.ids), device.download(self.values)
        return self.counts, ids[self.wanted].astype(np.int32), values[self.wanted]


def plain(tokens: torch.Tensor, finite: torch.Tensor) -> Sampled:
    """What greedy rows that ask for nothing else sampled."""
    return Sampled(_where_finite(finite, tokens), finite, None)


class Sampler:
    """Samples rows by the parameters in the slot tables."""

    def __init__(self, tables: SlotTables, device: Device) -> None:
        self._tables = tables
        self._device = device

    def sample(self, logits: torch.Tensor, slots: Int64s, positions: Int64s) -> Sampled:
        """Tokens for `positions` [s] of `slots` [s] from float32 logits [s, vocabulary]."""
        finite = finite_rows(logits)
        adjusted = self._adjust(logits, slots, positions)
        drawn = self._tables.floats[slots, SlotFloat.TEMPERATURE] > 0
        if drawn.all():
            tokens = self._draw(adjusted, slots, positions)
        else:
            tokens = adjusted.argmax(dim=-1)
            if drawn.any():
                rows = self._upload(np.flatnonzero(drawn))
                tokens[rows] = self._draw(adjusted[rows], slots[drawn], positions[drawn])
        tokens = _where_finite(finite, tokens)
        return Sampled(tokens, finite, self._logprobs(logits, tokens, slots))

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return self._device.upload(array)

    def _adjust(self, logits: torch.Tensor, slots: Int64s, positions: Int64s) -> torch.Tensor:
        """Biases, penalties and suppressed stop ids; the logits themselves where no row asks for any."""
        tables = self._tables
        biased = [row for row, slot in enumerate(slots.tolist()) if slot in tables.biases] if tables.biases else []
        early: list[int] = []
        if tables.stop_ids:
            below = np.flatnonzero(positions < tables.min_total[slots]).tolist()
            early = [row for row in below if int(slots[row]) in tables.stop_ids]
        penalties = np.flatnonzero(penalised(tables.floats[slots]))
        if not biased and not early and not len(penalties):
            return logits
        logits = logits.clone()
        if biased:
            parts = [tables.biases[int(slots[row])] for row in biased]
            where = self._entries(biased, [ids for ids, _ in parts])
            logits.index_put_(where, self._upload(np.concatenate([values for _, values in parts])), accumulate=True)
        if len(penalties):
            rows = self._upload(penalties)
            logits[rows] = self._penalise(logits[rows], slots[penalties], positions[penalties])
        if early:
            where = self._entries(early, [tables.stop_ids[int(slots[row])] for row in early])
            logits[where] = -torch.inf
        return logits

    def _entries(self, rows: list[int], ids: list[Int32s]) -> tuple[torch.Tensor, torch.Tensor]:
        """Index of ragged `ids` of `rows` in the logits."""
        repeated = np.repeat(np.asarray(rows, np.int64), [len(part) for part in ids])
        return self._upload(repeated), self._upload(np.concatenate(ids).astype(np.int64))

    def _penalise(self, logits: torch.Tensor, slots: Int64s, positions: Int64s) -> torch.Tensor:
        tables = self._tables
        rows, vocabulary = logits.shape
        # The tokens of a prompt that came as embeddings say nothing, and are not seen.
        first = np.where(tables.embeds[slots] >= 0, tables.prompt_len[slots], 0).astype(np.int64)
        counted = positions - first
        entries = self._upload(ragged(slots * tables.stride + first, counted))
        tokens = tables.token_pool.view(-1).index_select(0, entries).long()
        flat = self._upload(np.repeat(np.arange(rows, dtype=np.int64) * vocabulary, counted)) + tokens
        generated = ragged(first, counted) >= np.repeat(tables.prompt_len[slots], counted)
        seen = torch.zeros(rows * vocabulary, dtype=torch.bool, device=logits.device).index_fill_(0, flat, True)
        counts = torch.zeros(rows * vocabulary, device=logits.device)
        counts.index_add_(0, flat, self._upload(generated.astype(np.float32)))
        seen, counts = seen.view(rows, vocabulary), counts.view(rows, vocabulary)

        repetition, presence, frequency = (
            self._column(slots, which)
            for which in (SlotFloat.REPETITION_PENALTY, SlotFloat.PRESENCE_PENALTY, SlotFloat.FREQUENCY_PENALTY)
        )
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - frequency * counts - presence * (counts > 0)

    def _column(self, slots: Int64s, which: SlotFloat) -> torch.Tensor:
        return self._upload(self._tables.floats[slots, which])[:, None]

    def _draw(self, logits: torch.Tensor, slots: Int64s, positions: Int64s) -> torch.Tensor:
        """Tokens int64 [r] from logits [r, vocabulary] of rows with a temperature."""
        tables = self._tables
        # Relative to the largest, so that a tiny temperature can't overflow.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / self._column(slots, SlotFloat.TEMPERATURE)
        weights = scaled.exp()
        top_k, top_p = tables.top_k[slots], tables.floats[slots, SlotFloat.TOP_P]
        filtered = ((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1)
        if filtered.any():
            rows = self._upload(np.flatnonzero(filtered))
            keep = most_likely(scaled[rows], self._upload(top_k[filtered]), self._upload(top_p[filtered]))
            weights[rows] = weights[rows].where(keep, 0)
        if (tables.floats[slots, SlotFloat.MIN_P] > 0).any():
            # The largest weight is 1.
            weights.masked_fill_(weights < self._column(slots, SlotFloat.MIN_P), 0)
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        u = self._upload(uniform(tables.seed[slots], positions))[:, None]
        below = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
        found = torch.searchsorted(cumulative, below, right=True)
        # Only a row that is not finite finds nothing; its token does not count.
        return found[:, 0].clamp_(max=logits.shape[1] - 1)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, slots: Int64s) -> Logprobs | None:
        asked = self._tables.logprobs[slots]
        rows = np.flatnonzero(asked >= 0)
        if not len(rows):
            return None
        index = self._upload(rows)
        raw = logits[index]
        most = min(int(asked.max()), raw.shape[1])
        ids = torch.cat((tokens[index].long()[:, None], raw.topk(most, dim=-1).indices), dim=1)
        values = raw.log_softmax(dim=-1).gather(1, ids)
        counts = np.minimum(asked, most) + 1
        wanted = np.arange(1 + most) < counts[rows][:, None]
        return Logprobs(counts.astype(np.int32), ids, values, wanted)


def most_likely(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Which tokens `top_k` (0: off) and then `top_p` (of what `top_k` kept; 1: off) keep; bool [r, vocabulary].

    `scaled` [r, vocabulary] are logits whose largest is 0. Of equal ones the lower ids are kept.
    """
    vocabulary = scaled.shape[1]
    top_k = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).long()[:, None]
    all_limited = bool((top_k < vocabulary).all())
    mass = scaled.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    share = torch.where(top_p < 1, top_p.double(), torch.inf)[:, None]
    width = int(top_k.max()) if all_limited else min(vocabulary, CANDIDATES)
    while True:
        values = scaled.topk(width, dim=-1).values
        ranked = torch.arange(width, device=scaled.device) < top_k
        weights = values.exp().double() * ranked
        cumulative = weights.cumsum(dim=-1)
        goal = share * torch.where(top_k <= width, cumulative[:, -1:], mass)
        # Reached within the candidates, or nothing is kept beyond them anyway.
        if width == vocabulary or bool(((top_k <= width) | (cumulative[:, -1:] >= goal)).all()):
            break
        width = min(vocabulary, 8 * width)
    kept = (ranked & (cumulative - weights < goal)).sum(dim=-1, keepdim=True).clamp_(min=1)
    threshold = values.gather(1, kept - 1)
    larger = scaled > threshold
    ties = scaled == threshold
    return larger | (ties & (ties.cumsum(dim=-1) <= kept - larger.sum(dim=-1, keepdim=True)))


def _where_finite(finite: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.where(finite, tokens, 0).int()
