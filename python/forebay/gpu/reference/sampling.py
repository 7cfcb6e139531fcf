"""The computation from logits to tokens in PyTorch's operators, which sort each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forebay.gpu.sampling import FIXED_POINT, MOST_LIKELY, Wishes
from forebay.gpu.tables import StepBuffers, Tables
from forebay.protocol.constants import SlotFloats, SlotRecord

_PENALTIES = (SlotFloats.REPETITION_PENALTY, SlotFloats.PRESENCE_PENALTY, SlotFloats.FREQUENCY_PENALTY)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `interface.Sampling`."""
    known = logits.masked_fill(logits.isnan(), -torch.inf)
    return known.argmax(dim=-1), logits.isfinite().all(dim=-1)


def draw(logits: torch.Tensor, wishes: Wishes, tokens: torch.Tensor) -> None:
    """See `interface.Sampling`."""
    vocabulary = logits.shape[1]
    drawn = wishes.temperature > 0
    logits = logits.masked_fill(logits.isnan(), -torch.inf).float()
    distance = (logits.amax(dim=-1, keepdim=True) - logits) / wishes.temperature.masked_fill(~drawn, 1)[:, None]
    distance = distance.masked_fill(~(distance >= 0), torch.inf)
    weight = distance.neg().exp()
    mass = (weight * (1 << FIXED_POINT)).long()

    order = distance.sort(dim=-1, stable=True).indices
    ranked = mass.gather(1, order)
    rank = torch.arange(vocabulary, device=logits.device)
    limited = (wishes.top_k > 0) & (wishes.top_k < vocabulary)
    kept = rank < wishes.top_k.masked_fill(~limited, vocabulary)[:, None]
    before = (ranked * kept).cumsum(dim=-1) - ranked * kept
    goal = (wishes.top_p.double() * (ranked * kept).sum(dim=-1).double()).ceil().long()[:, None]
    kept &= (before < goal) | (rank == 0) | (wishes.top_p >= 1)[:, None]
    keep = torch.zeros_like(kept).scatter_(1, order, kept) & (weight >= wishes.min_p[:, None])

    mass = mass * keep
    behind = mass.cumsum(dim=-1)
    # `argmax` returns the first of equal values, which `max` need not do.
    token = (behind > _share(wishes.bits, behind[:, -1])[:, None]).int().argmax(dim=-1)
    tokens.copy_(torch.where(drawn, token, tokens))


def _share(bits: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Returns floor(u * total), exactly: u is the upper 53 of `bits`, and total has at most 58 bits."""
    u = (bits >> 11) & ((1 << 53) - 1)
    u_high, u_low = u >> 27, u & ((1 << 27) - 1)
    t_high, t_low = total >> 29, total & ((1 << 29) - 1)
    middle = u_high * t_low + 4 * u_low * t_high + (u_low * t_low >> 27)
    return 8 * u_high * t_high + (middle >> 26)


def ask(tables: Tables, buffers: StepBuffers) -> Wishes:
    """See `interface.Sampling`."""
    words = tables.words.index_select(0, buffers.sampling)
    floats = tables.floats.index_select(0, buffers.sampling)
    low, high = words[:, SlotRecord.SEED_LO].long() & 0xFFFFFFFF, words[:, SlotRecord.SEED_HI].long()
    return Wishes(
        temperature=floats[:, SlotFloats.TEMPERATURE].contiguous(),
        top_k=words[:, SlotRecord.TOP_K].contiguous(),
        top_p=floats[:, SlotFloats.TOP_P].contiguous(),
        min_p=floats[:, SlotFloats.MIN_P].contiguous(),
        bits=splitmix64((low | high << 32) + buffers.ends.long() * _GOLDEN),
    )


def splitmix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014) of int64, which represent numbers modulo 2^64."""
    z = x + _GOLDEN
    z = (z ^ _shifted(z, 30)) * _FIRST_FACTOR
    z = (z ^ _shifted(z, 27)) * _SECOND_FACTOR
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts right, as an unsigned number."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def keep(
    tokens: torch.Tensor,
    finite: torch.Tensor,
    tables: Tables,
    buffers: StepBuffers,
    errors: torch.Tensor,
    block: torch.Tensor,
) -> torch.Tensor:
    """See `interface.Sampling`."""
    rows, stride = len(tokens), tables.token_pool.shape[1]
    told, kept, flags = block[:1], block[1 : 1 + rows], block[1 + rows : 1 + 2 * rows]
    kept.copy_(tokens.masked_fill(~finite, 0))
    flags.copy_(finite)
    cells = buffers.sampling.long() * stride + buffers.ends
    tables.token_pool.view(-1).index_copy_(0, cells, kept)
    told.copy_(errors)
    errors.zero_()
    return kept


def likely(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `interface.Sampling`."""
    ids = torch.cat((tokens, logits.topk(most, dim=-1).indices), dim=1)
    return ids, logits.float().log_softmax(dim=-1).gather(1, ids)


def tell_likely(
    logits: torch.Tensor, tokens: torch.Tensor, tables: Tables, buffers: StepBuffers, told: torch.Tensor
) -> None:
    """See `interface.Sampling`. Each row gets the largest possible number of entries, however many it requests."""
    most = min(MOST_LIKELY, logits.shape[1])
    ids, logprobs = likely(logits, tokens.long()[:, None], most)
    told[:, 0, : 1 + most].copy_(ids)
    told[:, 1, : 1 + most].copy_(logprobs.view(torch.int32))


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, lines: torch.Tensor, penalties: torch.Tensor
) -> None:
    """See `interface.Sampling`."""
    own = _penalised(logits.index_select(0, rows), counts.index_select(0, lines), penalties.unbind(1))
    logits.index_copy_(0, rows, own)


def adjust(
    logits: torch.Tensor, lines: torch.Tensor, counts: torch.Tensor, tables: Tables, buffers: StepBuffers
) -> torch.Tensor:
    """See `interface.Sampling`."""
    floats = tables.floats.index_select(0, buffers.sampling)
    penalties = [floats[:, at] for at in _PENALTIES]
    own = _penalised(logits, counts.index_select(0, lines.clamp(min=0)), penalties)
    return torch.where((lines >= 0)[:, None], own, logits)


def _penalised(logits: torch.Tensor, counts: torch.Tensor, penalties: Sequence[torch.Tensor]) -> torch.Tensor:
    """Applies the three penalties [p] to logits [p, vocabulary], by counts [p, 2, vocabulary]."""
    repetition, presence, frequency = (penalty[:, None] for penalty in penalties)
    seen, generated = counts.unbind(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen > 0, repeated, logits) - frequency * generated - presence * (generated > 0)


def count_tokens(tokens: torch.Tensor, lines: torch.Tensor, counts: torch.Tensor) -> None:
    """See `interface.Sampling`."""
    vocabulary = counts.shape[2]
    entries = lines.clamp(min=0).long() * (2 * vocabulary) + tokens
    amounts = (lines >= 0).int().repeat(2)
    counts.view(-1).index_add_(0, torch.cat((entries, entries + vocabulary)), amounts)
