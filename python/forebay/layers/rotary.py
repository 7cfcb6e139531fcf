"""Rotary position embedding (Su et al. 2021) and its scaling methods.

These are linear, llama3, YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024) and proportional (Gemma 4, 2026).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from forebay.weights.errors import UnsupportedModelError
from forebay.weights.vision import Sections


class Rotation(NamedTuple):
    """The cos and sin of a step's tokens, shared by all layers: [tokens, 1, rotary_dim] in the model's dtype."""

    cos: torch.Tensor
    signed_sin: torch.Tensor  # sin with the first half negated, so that `rotate` need not negate its input

    def of(self, tokens: slice) -> Rotation:
        """Returns the rotation of some of the tokens."""
        return Rotation(self.cos[tokens], self.signed_sin[tokens])


class Rotary:
    """Computes rotations from positions. Pairs are (i, i + rotary_dim / 2), as in Hugging Face checkpoints."""

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.inverse_frequencies, self.attention_factor = frequencies(rotary_dim, theta, scaling, max_positions)
        self._frequencies = self.inverse_frequencies.to(device)
        self._dtype = dtype
        self._kept: Rotation | None = None

    def keep(self, positions: int) -> None:
        """Precomputes cos and sin for this many positions, from 0 on.

        A step then reads them with two operators. Otherwise it computes them with eleven, each a separate kernel launch
        on a GPU.
        """
        if self._kept is None:
            every = torch.arange(positions, device=self._frequencies.device)
            self._kept = self._rotation(every[:, None].float() * self._frequencies)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Returns the rotation for `positions`, int64 [tokens]. The trigonometric functions are computed in float32."""
        if self._kept is not None:
            cos, signed_sin = self._kept
            return Rotation(cos.index_select(0, positions), signed_sin.index_select(0, positions))
        return self._rotation(positions[:, None].float() * self._frequencies)

    def _rotation(self, angles: torch.Tensor) -> Rotation:
        """Returns the rotation by angles float32 [tokens, rotary_dim / 2]."""
        return rotation_of(*self._turns(angles))

    def _turns(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos = angles.cos() * self.attention_factor
        sin = angles.sin() * self.attention_factor
        return cos.to(self._dtype), sin.to(self._dtype)


class SectionedRotary(Rotary):
    """RoPE for positions of three numbers. Each frequency uses one of the numbers (M-RoPE, Qwen2-VL, 2024)."""

    def __init__(
        self,
        sections: Sections,
        rotary_dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(rotary_dim, theta, scaling, max_positions, dtype, device)
        self._axes = torch.tensor(sections.axes(rotary_dim // 2), device=device)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Returns the rotation for `positions`, int64 [3, tokens] (time, row, column), or [tokens] if all are equal."""
        if positions.dim() == 1:
            return super().__call__(positions)
        return self._rotation(positions.float().index_select(0, self._axes).T * self._frequencies)


def rotation_of(cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    """Returns the rotation with these cosines and sines, [tokens, rotary_dim / 2] each."""
    return Rotation(torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None])


def unrotated(rotation: Rotation) -> Rotation:
    """Returns a rotation of the same tokens by the angle 0."""
    return Rotation(torch.ones_like(rotation.cos), torch.zeros_like(rotation.signed_sin))


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates heads x, [tokens, heads, head_dim]. If there are fewer angles, only leading elements are rotated."""
    turned = rotation.cos.shape[-1]
    if turned == 0:
        return x
    if turned < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], rotation), x[..., turned:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1).mul_(rotation.signed_sin)
    return swapped.add_(x * rotation.cos)


def rotate_pairs(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates pairs (2i, 2i + 1) of x, [tokens, heads, head_dim]. Returns the even elements, then the odd elements.

    If there are fewer angles, only leading elements are rotated.
    """
    turned = rotation.cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((rotate_pairs(x[..., :turned], rotation), x[..., turned:]), dim=-1)
    return rotate(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1), rotation)


def frequencies(
    rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Returns inverse frequencies, float32 [rotary_dim / 2], and the factor of cos and sin; `scaling` as in `Rope`."""
    scaling = scaling or {}
    kind = scaling.get("rope_type", "default")
    powers = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if kind == "default":
        return 1.0 / powers, 1.0
    if kind == "proportional":
        inverse = (1.0 / powers).where(torch.arange(len(powers)) < scaling["turned"], 0.0)
        return inverse / scaling["factor"], 1.0
    if kind == "linear":
        return 1.0 / powers / scaling["factor"], 1.0
    original = scaling.get("original_max_position_embeddings") or max_positions
    if kind == "llama3":
        return _llama3(1.0 / powers, scaling, original), 1.0
    if kind == "longrope":
        divisors = torch.tensor(scaling["divisors"], dtype=torch.float32)
        return 1.0 / (divisors * powers), scaling["attention_factor"]
    if kind == "yarn":
        return _yarn(powers, theta, scaling, original, max_positions)
    raise UnsupportedModelError(
        f"rope scaling {kind!r} is not supported: only default, linear, llama3, yarn, longrope and proportional are"
    )


def at_context(scaling: Mapping[str, Any] | None, context_length: int) -> Mapping[str, Any] | None:
    """Returns the scaling for requests of at most this many positions, with one of LongRoPE's two sets of divisors.

    All requests use the same set, because keys may be shared as cached prefixes.
    """
    if scaling is None or scaling["rope_type"] != "longrope":
        return scaling
    beyond = context_length > scaling["original_max_position_embeddings"]
    divisors = scaling["long_factor" if beyond else "short_factor"]
    return {"rope_type": "longrope", "divisors": divisors, "attention_factor": scaling["attention_factor"]}


def _llama3(inverse: torch.Tensor, scaling: Mapping[str, Any], original: int) -> torch.Tensor:
    """Divides low frequencies by `factor`, keeps high ones, and interpolates those in between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, between)
    return torch.where(wavelength < original / high, inverse, scaled)


def _yarn(
    powers: torch.Tensor, theta: float, scaling: Mapping[str, Any], original: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Interpolates slowly rotating dimensions; keeps those with over `beta_fast` turns in the original context."""
    half = len(powers)
    factor = scaling.get("factor") or max_positions / original

    def dimension(turns: float) -> float:
        return 2 * half * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    interpolated = torch.clamp((torch.arange(half, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - interpolated
    inverse = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        else:
            attention_factor = _mscale(factor, 1.0)
    return inverse, float(attention_factor)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
