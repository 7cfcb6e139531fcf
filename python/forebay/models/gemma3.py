"""Gemma 3 (2025): a SigLIP tower (Zhai et al. 2023) for images of one size, which averages squares of patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from forebay.attention.backend import AttentionBackend
from forebay.attention.whole import Group, attend
from forebay.layers.blocks import decoder_blocks
from forebay.layers.linear import Linear
from forebay.layers.norm import LayerNorm, RMSNorm
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.layers.rotary import Rotation
from forebay.layers.vision import Grid, ImageDecoder, PatchEmbedding, Tower, TowerBlock, TowerState
from forebay.weights.config import ModelConfig
from forebay.weights.vision import TOWER, Vision


class SiglipTower(Tower):
    """The tower of Gemma 3. The patches have learned positions."""

    def __init__(self, vision: Vision, params: Parameters) -> None:
        assert vision.table_side is not None
        self._side, entries = vision.table_side, vision.table_side**2
        embedding = PatchEmbedding(params, f"{TOWER}.embeddings.patch_embedding", vision, bias=True, frames=False)
        name = f"{TOWER}.embeddings.position_embedding.weight"
        self._table = params.tensor((entries, vision.hidden_size), {name: entries})
        blocks = [_block(vision, params, f"{TOWER}.encoder.layers.{number}") for number in range(vision.layers)]
        super().__init__(vision, embedding, blocks, _Projector(vision, params), {}, params.device)

    def _arrange(self, x: torch.Tensor, grid: Grid, rows: torch.Tensor, columns: torch.Tensor) -> TowerState:
        positions = F.embedding(rows * self._side + columns, self._table)
        return TowerState(x + positions, None, [Group(0, 1, len(x))])


class _Attention:
    """Attention of every patch to all patches of its image, without rotation."""

    def __init__(self, vision: Vision, params: Parameters, prefix: str) -> None:
        hidden = vision.hidden_size
        self._heads = vision.heads
        self._qkv = Linear(params, prefix, hidden, {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden}, bias=True)
        self._output = Linear(params, prefix, hidden, {"out_proj": hidden}, bias=True)

    def __call__(self, x: torch.Tensor, rotation: Rotation | None, groups: Sequence[Group]) -> torch.Tensor:
        """Computes attention for x [n, hidden]."""
        q, k, v = self._qkv(x).view(len(x), 3 * self._heads, -1).split(self._heads, dim=1)
        return self._output(attend(q, k, v, groups))


class _Mlp:
    """`fc2(gelu(fc1(x)))`, with the tanh approximation of GELU."""

    def __init__(self, vision: Vision, params: Parameters, prefix: str) -> None:
        self._up = Linear(params, prefix, vision.hidden_size, {"fc1": vision.intermediate_size}, bias=True)
        self._down = Linear(params, prefix, vision.intermediate_size, {"fc2": vision.hidden_size}, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(F.gelu(self._up(x), approximate="tanh"))


class _Projector:
    """Maps the mean of each square of patches, which are consecutive, to one decoder position."""

    def __init__(self, vision: Vision, params: Parameters) -> None:
        self._square = vision.merge**2
        self._last_norm = LayerNorm(params, f"{TOWER}.post_layernorm", vision.hidden_size, vision.norm_eps)
        self._norm = RMSNorm(params, f"{TOWER}.projector.norm", vision.hidden_size, vision.norm_eps, wide=True)
        self._output = Linear(params, TOWER, vision.hidden_size, {"projector": vision.out_size})

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [n, hidden] to [n / merge^2, hidden size of the decoder]."""
        means = self._last_norm(x).unflatten(0, (-1, self._square)).mean(dim=1)
        return self._output(self._norm(means))


def _block(vision: Vision, params: Parameters, prefix: str) -> TowerBlock:
    return TowerBlock(
        _Attention(vision, params, f"{prefix}.self_attn"),
        _Mlp(vision, params, f"{prefix}.mlp"),
        LayerNorm(params, f"{prefix}.layer_norm1", vision.hidden_size, vision.norm_eps),
        LayerNorm(params, f"{prefix}.layer_norm2", vision.hidden_size, vision.norm_eps),
    )


def build(config: ModelConfig, params: Parameters, backend: AttentionBackend, ops: Ops) -> ImageDecoder:
    """Builds a Gemma 3 model, with its weights allocated in `params`."""
    assert config.vision is not None
    blocks = decoder_blocks(config, params)
    return ImageDecoder(config, params, blocks, backend, ops, SiglipTower(config.vision, params))
