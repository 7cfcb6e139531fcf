"""The tower of Qwen3-VL (2025) and Qwen3.5: a table of positions, and optional deepstack outputs (Meng et al. 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.attention.backend import AttentionBackend
from forebay.attention.whole import Group
from forebay.layers.blocks import decoder_blocks
from forebay.layers.linear import Linear
from forebay.layers.norm import LayerNorm
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


class Qwen3Tower(Tower):
    """The tower. Every layer attends to the whole image."""

    def __init__(self, vision: Vision, params: Parameters) -> None:
        assert vision.table_side is not None
        hidden, self._side = vision.hidden_size, vision.table_side
        embedding = PatchEmbedding(params, f"{TOWER}.patch_embed.proj", vision, bias=True)
        entries = self._side**2
        self._table = params.tensor((entries, hidden), {f"{TOWER}.pos_embed.weight": entries})
        blocks = [_block(vision, params, f"{TOWER}.blocks.{number}") for number in range(vision.layers)]
        deepstack = {
            layer: _merger(vision, params, f"{TOWER}.deepstack_merger_list.{number}", norm_joined=True)
            for number, layer in enumerate(vision.deepstack)
        }
        merger = _merger(vision, params, f"{TOWER}.merger", norm_joined=False)
        super().__init__(vision, embedding, blocks, merger, deepstack, params.device)

    def _arrange(self, x: torch.Tensor, grid: Grid, rows: torch.Tensor, columns: torch.Tensor) -> TowerState:
        positions = self._positions(grid, rows, columns).to(x.dtype)
        return TowerState(x + positions, self._rotation(rows, columns), [Group(0, 1, len(x))])

    def _positions(self, grid: Grid, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Returns the table, interpolated to the size of the image with aligned corners, float32 [n, hidden]."""
        merge = self.vision.merge
        vertical = self._neighbours(rows, grid.height * merge)
        horizontal = self._neighbours(columns, grid.width * merge)
        total = torch.zeros((), device=rows.device)
        for row, of_row in vertical:
            for column, of_column in horizontal:
                entries = F.embedding(row * self._side + column, self._table)
                total = total + entries * (of_row * of_column)[:, None]
        return total

    def _neighbours(self, at: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the two table indices around each coordinate `at` of an axis of `size`, and their float32 weights."""
        exact = at.float() * (self._side - 1) / max(size - 1, 1)
        below = exact.floor()
        share = exact - below
        entry = below.long()
        return [(entry, 1 - share), ((entry + 1).clamp(max=self._side - 1), share)]


class _Mlp:
    """`fc2(gelu(fc1(x)))`, with the tanh approximation of GELU."""

    def __init__(self, vision: Vision, params: Parameters, prefix: str) -> None:
        self._up = Linear(params, prefix, vision.hidden_size, {"linear_fc1": vision.intermediate_size}, bias=True)
        self._down = Linear(params, prefix, vision.intermediate_size, {"linear_fc2": vision.hidden_size}, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(F.gelu(self._up(x), approximate="tanh"))


def _block(vision: Vision, params: Parameters, prefix: str) -> TowerBlock:
    return TowerBlock(
        TowerAttention(params, f"{prefix}.attn", vision),
        _Mlp(vision, params, f"{prefix}.mlp"),
        LayerNorm(params, f"{prefix}.norm1", vision.hidden_size, vision.norm_eps),
        LayerNorm(params, f"{prefix}.norm2", vision.hidden_size, vision.norm_eps),
    )


def _merger(vision: Vision, params: Parameters, prefix: str, norm_joined: bool) -> Merger:
    joined = vision.hidden_size * vision.merge**2
    return Merger(
        vision,
        LayerNorm(params, f"{prefix}.norm", joined if norm_joined else vision.hidden_size, vision.norm_eps),
        Linear(params, prefix, joined, {"linear_fc1": joined}, bias=True),
        Linear(params, prefix, joined, {"linear_fc2": vision.out_size}, bias=True),
        norm_joined,
    )


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops) -> ImageDecoder:
    """Builds a decoder with this tower, with its weights allocated in `params`."""
    assert config.vision is not None
    blocks = decoder_blocks(config, params)
    return ImageDecoder(config, params, blocks, backend, ops, Qwen3Tower(config.vision, params))
