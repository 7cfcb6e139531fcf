"""Qwen2.5-VL (Bai et al. 2025): a Qwen2 decoder, and a vision tower in which most layers attend within windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.attention.backend import AttentionBackend
from forebay.attention.whole import Group
from forebay.layers.blocks import decoder_blocks
from forebay.layers.linear import Linear
from forebay.layers.norm import RMSNorm
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.layers.vision import (
    Grid,
    ImageDecoder,
    Merger,
    PatchEmbedding,
    Tower,
    TowerAttention,
    TowerBlock,
    TowerState,
)
from forebay.weights.config import ModelConfig
from forebay.weights.vision import TOWER, Vision


class Qwen25Tower(Tower):
    """The tower of Qwen2.5-VL. Its patches are sorted by window."""

    def __init__(self, vision: Vision, params: Parameters) -> None:
        embedding = PatchEmbedding(params, f"{TOWER}.patch_embed.proj", vision, bias=False)
        blocks = [_block(vision, params, f"{TOWER}.blocks.{number}") for number in range(vision.layers)]
        joined, prefix = vision.hidden_size * vision.merge**2, f"{TOWER}.merger"
        merger = Merger(
            vision,
            RMSNorm(params, f"{prefix}.ln_q", vision.hidden_size, vision.norm_eps),
            Linear(params, f"{prefix}.mlp", joined, {"0": joined}, bias=True),
            Linear(params, f"{prefix}.mlp", joined, {"2": vision.out_size}, bias=True),
        )
        super().__init__(vision, embedding, blocks, merger, {}, params.device)

    def _arrange(self, x: torch.Tensor, grid: Grid, rows: torch.Tensor, columns: torch.Tensor) -> TowerState:
        assert self.vision.window is not None
        of_position = self.vision.merge**2
        order, groups = windows(grid, self.vision.window, of_position, x.device)

        def ordered(values: torch.Tensor) -> torch.Tensor:
            squares: torch.Tensor = values.unflatten(0, (-1, of_position))
            return squares.index_select(0, order).flatten(0, 1)

        back = torch.empty_like(order).index_copy_(0, order, torch.arange(grid.positions, device=x.device))
        return TowerState(ordered(x), self._rotation(ordered(rows), ordered(columns)), groups, back)


def windows(grid: Grid, side: int, of_position: int, device: torch.device) -> tuple[torch.Tensor, list[Group]]:
    """Returns an image's positions sorted by window, int64 [positions], and the windows as groups of patches.

    Windows of equal size are adjacent, so that they share a call. Windows of `side` rows and columns come first, then
    the smaller ones at the right and at the bottom. A position has `of_position` patches.
    """
    positions = torch.arange(grid.positions, device=device).view(grid)
    down, right = grid.height // side, grid.width // side
    order, groups, first = [], [], 0
    for vertical, height, rows in (
        (down, side, slice(0, down * side)),
        (1, grid.height % side, slice(down * side, None)),
    ):
        for across, width, columns in (
            (right, side, slice(0, right * side)),
            (1, grid.width % side, slice(right * side, None)),
        ):
            count, length = vertical * across, height * width * of_position
            if count and length:
                part = positions[rows, columns].reshape(vertical, height, across, width)
                order.append(part.transpose(1, 2).flatten())
                groups.append(Group(first, count, length))
                first += count * length
    return torch.cat(order), groups


class _Mlp:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, vision: Vision, params: Parameters, prefix: str) -> None:
        inner = vision.intermediate_size
        widths = {"gate_proj": inner, "up_proj": inner}
        self._gate_up = Linear(params, prefix, vision.hidden_size, widths, bias=True)
        self._down = Linear(params, prefix, inner, {"down_proj": vision.hidden_size}, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))


def _block(vision: Vision, params: Parameters, prefix: str) -> TowerBlock:
    return TowerBlock(
        TowerAttention(params, f"{prefix}.attn", vision),
        _Mlp(vision, params, f"{prefix}.mlp"),
        RMSNorm(params, f"{prefix}.norm1", vision.hidden_size, vision.norm_eps),
        RMSNorm(params, f"{prefix}.norm2", vision.hidden_size, vision.norm_eps),
    )


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops) -> ImageDecoder:
    """Builds a Qwen2.5-VL model, with its weights allocated in `params`."""
    assert config.vision is not None
    blocks = decoder_blocks(config, params)
    return ImageDecoder(config, params, blocks, backend, ops, Qwen25Tower(config.vision, params))
