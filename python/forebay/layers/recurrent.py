"""Layers with a fixed-size state per slot: gated delta nets (Yang et al. 2024), Mamba 2, short convolutions.

The delta nets of Kimi Linear (2025) have a decay per channel of a key.

All of them share one recurrence. At each position, a head's state `S` [key_dim, value_dim] becomes `decay * S + k u`,
and the output is `q S`. With the delta rule `u` is `beta (v - k S)`, otherwise `step v`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.attention.states import LayerStates, PlannedStates, StepStates
from forebay.layers.linear import Linear
from forebay.layers.params import Parameters
from forebay.layers.step import Step
from forebay.weights.parts import Recurrence

__all__ = ["RecurrentLayer", "advance"]

_CHUNK = 64
"""The number of positions of a row that are computed together."""
_CHANNEL_CHUNK = 16
"""The chunk length with per-channel decays: the decay between two positions is then a vector as long as a key."""
_EPSILON = 1e-6
"""The term added under the square root of a key's norm, as in the reference implementation."""


class RecurrentLayer:
    """A recurrence between two projections, with a convolution before it and a gated norm after it.

    Without heads it is a convolution between two gates. `number` is the layer's index among the recurrent layers.
    """

    def __init__(
        self, params: Parameters, prefix: str, number: int, hidden: int, shape: Recurrence, norm_eps: float
    ) -> None:
        self._number = number
        self._shape = shape
        self._eps = norm_eps
        keys, values, heads = shape.keys, shape.values, shape.heads
        names = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values}
        self.low: tuple[Linear, Linear, Linear] | None = None
        """Projections to the low ranks, from there to gates, and to decays; None: `input` computes gates and decays."""
        if shape.low_rank:
            self.low = (
                Linear(params, prefix, hidden, {"low_z": shape.low_rank, "low_a": shape.low_rank}),
                Linear(params, prefix, shape.low_rank, {"in_proj_z": values}),
                Linear(params, prefix, shape.low_rank, {"in_proj_a": shape.decays}),
            )
        else:
            names |= {"in_proj_z": values, "in_proj_a": shape.decays}
        if shape.delta:
            names["in_proj_b"] = heads
        if not heads:
            names = {"in_proj_q": values, "in_proj_k": values, "in_proj_v": values}
        self.input = Linear(params, prefix, hidden, names, shape.bias)
        self._widths = list(names.values())
        channels = {"conv_q": keys, "conv_k": keys, "conv_v": values} if heads else {"conv_v": values}
        weights = {f"{prefix}.{name}.weight": size for name, size in channels.items()}
        self.conv = params.tensor((shape.channels, shape.taps), weights)
        self.conv_bias: torch.Tensor | None = None
        if shape.conv_bias:
            biases = {f"{prefix}.{name}.bias": size for name, size in channels.items()}
            self.conv_bias = params.tensor((shape.channels,), biases)
        self.output = Linear(params, prefix, values, {"out_proj": hidden}, shape.bias)

        def vector(name: str, size: int) -> torch.Tensor:
            return params.tensor((size,), {f"{prefix}.{name}": size}, torch.float32)

        if heads:
            self.decay, self.step_bias = vector("A_log", heads), vector("dt_bias", shape.decays)
        self.skip = vector("D", heads) if heads and not shape.delta else None
        self.norm: torch.Tensor | None = None
        if shape.norm != "none":
            # One weight shared by all heads, or separate weights for all elements.
            size = shape.value_dim if shape.delta else values
            self.norm = params.tensor((size,), {f"{prefix}.norm.weight": size})

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Computes the layer for x [tokens, hidden]."""
        states = step.states
        assert states is not None
        if isinstance(states, PlannedStates):
            return self._by_kernels(x, states)
        shape, layer = self._shape, states.layers[self._number]
        parts = self.input(x).split(self._widths, dim=1)
        if not shape.heads:
            behind, before, values = parts
            return self.output(behind * self._convolved(before * values, states, layer))
        gate, a = parts[3:5] if self.low is None else self._of_low_ranks(x, *self.low)
        mixed = F.silu(self._convolved(torch.cat(parts[:3], dim=1), states, layer)).float()
        steps = F.softplus(a.float() + self.step_bias)
        strengths = parts[-1].float().sigmoid() if shape.delta else steps
        if shape.channel_decay:
            decays = -self.decay.exp()[:, None] * steps.unflatten(1, (shape.heads, shape.key_dim))
        else:
            decays = -self.decay.exp() * steps
        inputs = self._inputs(mixed)
        y = self._scan((*inputs, decays, strengths), states, layer)
        if self.skip is not None:
            y = y + self.skip[:, None] * inputs[2]
        return self.output(self._gated(y.flatten(1), gate).to(x.dtype))

    def _by_kernels(self, x: torch.Tensor, states: PlannedStates) -> torch.Tensor:
        """Computes the layer with operators that need no decision of the host."""
        shape, number = self._shape, self._number
        fused = self.input(x)
        parts = fused.split(self._widths, dim=1)
        if not shape.heads:
            behind, before, values = parts
            return self.output(states.convolve(number, values, self.conv, self.conv_bias, (before, behind)))
        gate, a = parts[3:5] if self.low is None else self._of_low_ranks(x, *self.low)
        mixed = states.convolve(number, fused[:, : shape.channels], self.conv, self.conv_bias)
        weights = self.decay, self.step_bias, self.skip
        y = states.recur(number, mixed, a, parts[-1] if shape.delta else None, weights, shape)
        how = self._eps, shape.norm, shape.norm_size, shape.sigmoid_gate
        return self.output(states.gated_norm(y, gate, self.norm, *how))

    @staticmethod
    def _of_low_ranks(x: torch.Tensor, low: Linear, gates: Linear, decays: Linear) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gates [tokens, values], and the inputs of the decays."""
        of_gates, of_decays = (one.contiguous() for one in low(x).chunk(2, dim=1))
        return gates(of_gates), decays(of_decays)

    def _inputs(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries and keys [tokens, heads, key_dim], and values [tokens, heads, value_dim], all float32."""
        shape = self._shape
        q, k, v = mixed.split([shape.keys, shape.keys, shape.values], dim=1)
        q, k = (one.unflatten(1, (shape.key_heads, shape.key_dim)) for one in (q, k))
        if shape.delta:
            q, k = (one * torch.rsqrt(one.square().sum(dim=-1, keepdim=True) + _EPSILON) for one in (q, k))
            q = q * shape.key_dim**-0.5
        shared = shape.heads // shape.key_heads
        if shape.tiled:
            q, k = (one.repeat(1, shared, 1) for one in (q, k))
        else:
            q, k = (one.repeat_interleave(shared, dim=1) for one in (q, k))
        return q, k, v.unflatten(1, (shape.heads, shape.value_dim))

    def _convolved(self, x: torch.Tensor, states: StepStates, layer: LayerStates) -> torch.Tensor:
        """Returns the causal convolution of each channel of x [tokens, channels], continuing the slots' last inputs."""
        y = torch.empty_like(x)

        def singles(tokens: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
            window = torch.cat((layer.inputs.index_select(0, source), x.index_select(0, tokens)[:, None]), dim=1)
            y.index_copy_(0, tokens, self._taps(window, 1)[:, 0])
            layer.inputs.index_copy_(0, target, window[:, 1:])

        if len(states.singles[0]):
            singles(*states.singles)
        for first, count, source, target in states.chunks:
            window = torch.cat((layer.inputs[source], x[first : first + count]))[None]
            y[first : first + count] = self._taps(window, count)[0]
            layer.inputs[target] = window[0, count:]
        if len(states.late[0]):
            singles(*states.late)
        return y

    def _taps(self, window: torch.Tensor, count: int) -> torch.Tensor:
        """Returns weighted sums [r, count, channels] of a window [r, taps - 1 + count, channels], oldest first."""
        weights = self.conv.float()
        terms = [window[:, tap : tap + count].float() * weights[:, tap] for tap in range(self._shape.taps)]
        total = terms[0] if self.conv_bias is None else terms[0] + self.conv_bias.float()
        for term in terms[1:]:
            total = total + term
        return total.to(window.dtype)

    def _scan(self, inputs: tuple[torch.Tensor, ...], states: StepStates, layer: LayerStates) -> torch.Tensor:
        """Runs `advance` over all tokens. Returns the outputs [tokens, heads, value_dim]."""
        table = layer.heads
        assert table is not None
        chunk = _CHANNEL_CHUNK if self._shape.channel_decay else _CHUNK
        y = torch.empty_like(inputs[2])

        def singles(tokens: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
            some = tuple(one.index_select(0, tokens)[:, None] for one in inputs)
            out, state = advance(some, table.index_select(0, source), self._shape.delta)
            y.index_copy_(0, tokens, out[:, 0])
            table.index_copy_(0, target, state)

        if len(states.singles[0]):
            singles(*states.singles)
        for first, count, source, target in states.chunks:
            state = table[source][None]
            for at in range(first, first + count, chunk):
                end = min(at + chunk, first + count)
                out, state = advance(tuple(one[None, at:end] for one in inputs), state, self._shape.delta)
                y[at:end] = out[0]
            table[target] = state[0]
        if len(states.late[0]):
            singles(*states.late)
        return y

    def _gated(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalises and gates the outputs [tokens, values], in float32."""
        shape = self._shape
        gate = gate.float().sigmoid() if shape.sigmoid_gate else F.silu(gate.float())
        if self.norm is None:
            return y * gate
        if shape.norm == "after_gate":
            y = y * gate
        groups = y.unflatten(1, (-1, shape.norm_size))
        groups = groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + self._eps)
        weight = self.norm.float()
        y = (groups * weight).flatten(1) if len(weight) == shape.norm_size else groups.flatten(1) * weight
        return y * gate if shape.norm == "before_gate" else y


def advance(inputs: tuple[torch.Tensor, ...], state: torch.Tensor, delta: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances rows by some positions. Returns outputs [r, t, heads, value_dim], and the new states.

    `inputs` are float32: queries and keys [r, t, heads, key_dim], values [r, t, heads, value_dim], logarithms of
    decays, and strengths [r, t, heads]. Decays are [r, t, heads], or [r, t, heads, key_dim] if they are per channel.
    `state` is [r, heads, key_dim, value_dim].
    """
    q, k, v, decays, strengths = (one.transpose(1, 2) for one in inputs)
    count = q.shape[2]
    of_channels = decays.dim() == 4
    # The decay of the state up to each position, and from each position to each later one. The last dimension is the
    # channels, or 1.
    total = (decays if of_channels else decays[..., None]).cumsum(dim=2)
    left = total.exp()
    between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill_(
        _later(count, q.device)[..., None], -torch.inf
    )
    between = between.exp_() if of_channels else between.exp_()[..., 0]

    def products(x: torch.Tensor) -> torch.Tensor:
        """Returns products [r, heads, t, t] of x at each position with the decayed earlier keys."""
        if of_channels:
            return torch.einsum("rhik,rhijk,rhjk->rhij", x, between, k)
        return between * (x @ k.transpose(2, 3))

    u = strengths[..., None] * v
    if delta:
        u = u - strengths[..., None] * ((left * k) @ state)
        if count > 1:
            # Each position subtracts the value that earlier positions of the chunk have stored for its key.
            mixing = (strengths[..., None] * products(k)).tril(-1)
            identity = torch.eye(count, dtype=mixing.dtype, device=mixing.device)
            u = torch.linalg.solve_triangular(mixing + identity, u, upper=False, unitriangular=True)
    out = (left * q) @ state + products(q) @ u
    rest = (total[:, :, -1:] - total).exp()
    state = left[:, :, -1, :, None] * state + (rest * k).transpose(2, 3) @ u
    return out.transpose(1, 2), state


def _later(count: int, device: torch.device) -> torch.Tensor:
    return torch.ones(count, count, dtype=torch.bool, device=device).triu(1)
