"""Convolutions, recurrences and gated norms of packed rows, compared with their definitions in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from forebay.gpu.interface import Kernels
from forebay.gpu.recurrent import NO_STATE, StateRows, StateWeights
from tests.gpu.checks.memory import CPU, SINGLE, Numbers, nan, poisoned, rounding, spaced, within

EPS = 1e-5


@dataclass(frozen=True)
class Heads:
    """The heads of a state: `forebay.gpu.recurrent.StateHeads`."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    delta: bool = True
    channel_decay: bool = False
    tiled: bool = False

    @property
    def keys(self) -> int:
        """Elements of all key heads."""
        return self.key_heads * self.key_dim


@dataclass(frozen=True)
class Lines:
    """Rows with states in a table.

    Some begin at position 0, and some also store the state before their last position.
    """

    rows: StateRows
    lengths: list[int]
    source: list[int]
    kept: list[int]
    target: list[int]
    count: int
    """The number of lines in the table. The last one is for padding."""

    @classmethod
    def make(cls, lengths: list[int], padding: tuple[int, int], numbers: Numbers) -> Lines:
        """Makes rows of these lengths, and padding: further rows, and tokens of no row."""
        count, device = len(lengths), numbers.device
        order = numbers.order(2 * count + 1).tolist()
        fresh, apart = (numbers.below(2, count).tolist() for _ in range(2))
        own, other = order[:count], order[count : 2 * count]
        target = [other[row] if apart[row] else own[row] for row in range(count)]
        source = [NO_STATE if fresh[row] else own[row] for row in range(count)]
        more, nobody = padding
        null = 2 * count + 1
        places = torch.tensor([*zip(source, own, target, strict=True), *[(NO_STATE, null, null)] * more])
        # In a real step `places` has one more column.
        places = torch.cat((places, places[:, :1] * 0 + 77), dim=1).int().to(device)
        first = torch.tensor([0, *lengths, *[0] * more]).cumsum(0).int().to(device)
        tokens = sum(lengths) + nobody
        of_token = torch.searchsorted(first, torch.arange(tokens, device=device).int(), right=True).int() - 1
        chunks = nobody > 0 or any(length != 1 for length in lengths)
        return cls(StateRows(first, of_token, places, chunks), lengths, source, own, target, null + 1)

    def table(self, numbers: Numbers, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """States in the lines that are read, and NaN in all others."""
        table = nan(self.count, *shape, dtype=dtype, device=numbers.device)
        for line in self.source:
            if line != NO_STATE:
                table[line] = numbers.normal(*shape, dtype=dtype)
        return table

    def check_table(self, table: torch.Tensor, before: torch.Tensor) -> None:
        """Checks that no other line has changed."""
        ours = {*self.target, *self.kept, self.count - 1}
        others = [line for line in range(self.count) if line not in ours]
        assert table[others].nan_to_num(7).equal(before[others].nan_to_num(7)), "states of other lines are unchanged"


def check_convolve(
    operators: Kernels,
    lengths: list[int],
    channels: int,
    taps: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    biased: bool = False,
    padding: tuple[int, int] = (0, 0),
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """Checks convolutions with gates (`gated`) or with a SiLU.

    Stored inputs are exact, except for products with a gate.
    """
    numbers = Numbers(device, seed)
    lines = Lines.make(lengths, padding, numbers)
    tokens, used = len(lines.rows.of_token), sum(lengths)
    # The parts of one projection.
    whole = spaced(numbers.normal(tokens, 3 * channels, dtype=dtype))
    behind, before, x = whole[:, : 3 * channels].split(channels, dim=1)
    weight = numbers.normal(channels, taps, dtype=dtype)
    bias = numbers.normal(channels, dtype=dtype) if biased else None
    table = lines.table(numbers, taps - 1, channels, dtype=dtype)
    old = table.clone()
    inputs = (x.float() * before.float()).to(dtype) if gated else x
    with poisoned():
        gates = (before, behind) if gated else None
        out = operators.convolve(x, weight, bias, table, lines.rows, silu=not gated, gates=gates)
    begin = 0
    once = rounding(dtype)
    for row, length in enumerate(lengths):
        source = lines.source[row]
        state = old[source] * 0 if source == NO_STATE else old[source]
        state = state.nan_to_num()
        window = torch.cat((state, inputs[begin : begin + length])).double()
        total = torch.zeros(length, channels, dtype=torch.float64, device=device)
        size = torch.zeros_like(total)
        if bias is not None:
            total, size = total + bias.double(), size + bias.double().abs()
        for tap in range(taps):
            term = window[tap : tap + length] * weight[:, tap].double()
            total, size = total + term, size + term.abs()
        room = size * (3 * once + SINGLE)
        expected = total * behind[begin : begin + length].double() if gated else torch.nn.functional.silu(total)
        factor = behind[begin : begin + length].double().abs() if gated else 1.1
        within(out[begin : begin + length], expected, room * factor + expected.abs() * once * 2)
        for line, seen in ((lines.target[row], length), (lines.kept[row], length - 1)):
            if line == lines.target[row] and seen < length:
                continue
            wanted = window[seen : seen + taps - 1]
            within(table[line], wanted, wanted.abs() * (once if gated else 0))
        begin += length
    assert not out[used:].any()
    lines.check_table(table, old)


def check_recur(
    operators: Kernels,
    lengths: list[int],
    shape: Heads,
    dtype: torch.dtype,
    *,
    skip: bool = False,
    padding: tuple[int, int] = (0, 0),
    device: torch.device = CPU,
    seed: int = 0,
    alike: bool = False,
) -> None:
    """Compares outputs and states with the recurrence, one position at a time. `alike`: all keys of a row are equal."""
    numbers = Numbers(device, seed)
    lines = Lines.make(lengths, padding, numbers)
    tokens, keys, heads = len(lines.rows.of_token), shape.keys, shape.heads
    mixed = numbers.normal(tokens, 2 * keys + heads * shape.value_dim, dtype=dtype)
    if alike:
        mixed[:, keys : 2 * keys] = mixed[:1, keys : 2 * keys]
    if not shape.delta:
        mixed[:, : 2 * keys] *= shape.key_dim**-0.25
    decays = heads * (shape.key_dim if shape.channel_decay else 1)
    a, b = (numbers.normal(tokens, count, dtype=dtype) for count in (decays, heads))
    weights = StateWeights(
        numbers.normal(heads) * 0.7 - 1, numbers.normal(decays) - 1, numbers.normal(heads) if skip else None
    )
    table = lines.table(numbers, heads, shape.key_dim, shape.value_dim)
    old = table.clone()
    with poisoned():
        of_strengths = spaced(b) if shape.delta else None
        out = operators.recur(spaced(mixed), spaced(a), of_strengths, weights, shape, table, lines.rows)
    # Products of tiles are in the model's type, and other operations are float32.
    share = 2.0**-13 if dtype == torch.float32 else 8 * rounding(dtype)
    begin = 0
    for row, length in enumerate(lengths):
        source = lines.source[row]
        state = torch.zeros_like(old[0]) if source == NO_STATE else old[source]
        own = slice(begin, begin + length)
        wanted, size, before, state = _expected(mixed[own], a[own], b[own], weights, shape, state.double())
        room = size.amax(dim=(0, 2), keepdim=True) * share
        given = out[own].unflatten(1, (heads, shape.value_dim))
        within(given, wanted, room.expand_as(wanted))
        states = [(lines.target[row], state)]
        if lines.kept[row] != lines.target[row]:
            states.append((lines.kept[row], before))
        for line, exact in states:
            largest = exact.abs().amax(dim=(1, 2), keepdim=True)
            within(table[line], exact, (largest * share + 1e-30).expand_as(exact))
        begin += length
    lines.check_table(table, old)


def _expected(
    mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weights: StateWeights, shape: Heads, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs and sums of absolute terms [n, heads, value_dim], and the states before and after the last position.

    All are float64.
    """
    q, k, v = mixed.double().split((shape.keys, shape.keys, shape.heads * shape.value_dim), dim=1)
    q, k = (one.unflatten(1, (shape.key_heads, shape.key_dim)) for one in (q, k))
    if shape.delta:
        q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
        q = q / shape.key_dim**0.5
    number = torch.arange(shape.heads, device=mixed.device)
    each = shape.heads // shape.key_heads
    key_head = number % shape.key_heads if shape.tiled else number // each
    q, k, v = q[:, key_head], k[:, key_head], v.unflatten(1, (shape.heads, shape.value_dim))
    steps = torch.nn.functional.softplus(a.double() + weights.step_bias.double(), threshold=50)
    steps = steps.unflatten(1, (shape.heads, -1))
    decays = (-weights.decay.double().exp()[:, None] * steps).exp()
    strengths = b.double().sigmoid() if shape.delta else steps[..., 0]
    outputs, sizes, before = [], [], state
    for at in range(len(mixed)):
        before = state
        state = state * decays[at][..., None]
        new = v[at] - (k[at][..., None] * state).sum(1) if shape.delta else v[at]
        state = state + k[at][..., None] * (strengths[at][:, None] * new)[:, None]
        terms, beside = q[at][..., None] * state, 0 * v[at]
        if weights.skip is not None:
            beside = weights.skip.double()[:, None] * v[at]
        outputs.append(terms.sum(1) + beside)
        sizes.append(terms.abs().sum(1) + beside.abs())
    return torch.stack(outputs), torch.stack(sizes), before, state


def check_gated_norm(
    operators: Kernels,
    tokens: int,
    values: int,
    size: int,
    norm: str,
    sigmoid: bool,
    dtype: torch.dtype,
    *,
    shared: bool = True,
    nobody: int = 0,
    device: torch.device = CPU,
    seed: int = 0,
) -> None:
    """`nobody`: the number of padding tokens, without a row, whose results are 0.

    `shared`: whether groups share a weight.
    """
    numbers = Numbers(device, seed)
    y = numbers.normal(tokens + nobody, values) * 3
    gate = numbers.normal(tokens + nobody, values, dtype=dtype)
    weight = None if norm == "none" else (numbers.normal(size if shared else values) * 0.3 + 1).to(dtype)
    first = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    with poisoned():
        out = operators.gated_norm(y, spaced(gate), weight, EPS, norm, size, sigmoid, first)
    strength = gate.double().sigmoid() if sigmoid else torch.nn.functional.silu(gate.double())
    expected = y.double()
    if norm != "before_gate":
        expected = expected * strength
    if weight is not None:
        groups = expected.unflatten(1, (-1, size))
        groups = groups / (groups.square().mean(-1, keepdim=True) + EPS).sqrt()
        expected = groups.flatten(1) * weight.double().repeat(values // len(weight))
    if norm == "before_gate":
        expected = expected * strength
    assert out.dtype == dtype
    within(out[:tokens], expected[:tokens], expected[:tokens].abs() * (rounding(dtype) + SINGLE))
    assert not out[tokens:].any()


def published() -> dict[str, dict[str, Any]]:
    """Heads, channels and norms of published models, by name."""
    return {
        "Qwen3-Next-80B-A3B": {"shape": Heads(32, 16, 128, 128), "taps": 4, "norm": ("before_gate", 128)},
        "Kimi-Linear-48B-A3B": {
            "shape": Heads(32, 32, 128, 128, channel_decay=True),
            "taps": 4,
            "norm": ("before_gate", 128),
        },
        "Granite-4.0-H-Tiny": {"shape": Heads(48, 1, 128, 64, delta=False), "taps": 4, "norm": ("after_gate", 3072)},
        "Falcon-H1-0.5B": {"shape": Heads(24, 1, 128, 64, delta=False), "taps": 4, "norm": ("none", 0)},
        "Falcon-H1-34B": {"shape": Heads(32, 2, 256, 128, delta=False), "taps": 4, "norm": ("after_gate", 2048)},
    }
