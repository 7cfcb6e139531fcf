"""The parts of vision towers: from pixels to patches, and to the decoder's inputs at an image's positions.

A tower runs in groups of layers (`begin`, `layers`, `finish`). Layers attend to the whole image, so the work can't be
split by positions. Splitting it by layers gives the same bits as a whole run. No operator here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from forebay.attention.backend import AttentionBackend
from forebay.attention.whole import Group, attend
from forebay.layers.decoder import Block, Decoder
from forebay.layers.linear import Linear
from forebay.layers.norm import LayerNorm, RMSNorm
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters
from forebay.layers.rotary import Rotation, rotate, rotation_of
from forebay.weights.config import ModelConfig
from forebay.weights.vision import Preprocessing, Vision

_BLOCK = 4096
"""The number of patches whose pixels are converted to floats at once. All patches of the largest image would take a
gigabyte.
"""
_CPU_BLOCK = 1024
"""The number of patches at once on a CPU, where a block of floats then fits in the processor's cache."""


class Grid(NamedTuple):
    """The size of an image in decoder positions: its rows and columns."""

    height: int
    width: int

    @property
    def positions(self) -> int:
        return self.height * self.width


class Pixels:
    """Converts bytes of pixels to a tower's input: `(x - mean * 255) / (std * 255)`, bit-equal to Transformers.

    Subtraction and division are two operators, because a fused operator would round once instead of twice.
    """

    def __init__(self, images: Preprocessing, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is the tower's data type. Values are computed in float32 and then rounded to it."""
        scale = 1.0 / images.rescale
        mean, std = (torch.tensor(values)[:, None] * scale for values in (images.mean, images.std))
        self._mean, self._std = mean.to(device), std.to(device)
        self._temporal, self._dtype = images.temporal, dtype
        self._block = _CPU_BLOCK if device.type == "cpu" else _BLOCK

    def blocks(self, patches: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields the converted patches, a block at a time."""
        return (self(block) for block in patches.split(self._block))

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Converts pixels uint8 [n, 3 * side * side] to frames [n, 3 * frames * side * side] of `dtype`.

        Colours are planar. Each colour plane is repeated for the frames of a still image.
        """
        values = patches.view(len(patches), len(self._mean), -1).float().sub_(self._mean).div_(self._std)
        frames = values.to(self._dtype)[:, :, None].expand(-1, -1, self._temporal, -1)
        return frames.reshape(len(patches), -1)


class PatchEmbedding:
    """The first layer: a convolution whose stride equals the kernel size, so it is a matrix product."""

    def __init__(self, params: Parameters, name: str, vision: Vision, bias: bool, frames: bool = True) -> None:
        """`frames`: the kernel has a time dimension."""
        hidden, side = vision.hidden_size, vision.patch
        shape = (hidden, vision.channels, *((vision.temporal,) if frames else ()), side, side)
        self._weight = params.tensor(shape, {f"{name}.weight": hidden})
        self._bias = params.tensor((hidden,), {f"{name}.bias": hidden}) if bias else None

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns states [n, hidden] for the output of `Pixels`."""
        return F.linear(pixels.to(self._weight.dtype), self._weight.flatten(1), self._bias)


class TowerAttention:
    """Attention of every patch to all patches of its group. RoPE uses row and column, in float32."""

    def __init__(self, params: Parameters, prefix: str, vision: Vision) -> None:
        hidden = vision.hidden_size
        self._heads = vision.heads
        self._qkv = Linear(params, prefix, hidden, {"qkv": 3 * hidden}, bias=True)
        self._output = Linear(params, prefix, hidden, {"proj": hidden}, bias=True)

    def __call__(self, x: torch.Tensor, rotation: Rotation | None, groups: Sequence[Group]) -> torch.Tensor:
        """Computes attention for x [n, hidden]."""
        assert rotation is not None
        qkv = self._qkv(x).view(len(x), 3 * self._heads, -1)
        turned = rotate(qkv[:, : 2 * self._heads].float(), rotation).to(x.dtype)
        q, k = turned.split(self._heads, dim=1)
        return self._output(attend(q, k, qkv[:, 2 * self._heads :], groups))


class TowerAttends(Protocol):
    """The part of a tower's layer in which patches attend to each other."""

    def __call__(self, x: torch.Tensor, rotation: Rotation | None, groups: Sequence[Group], /) -> torch.Tensor:
        """Computes the part for x [n, hidden]. The result has the same shape."""


@dataclass(frozen=True)
class TowerBlock:
    """One layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    attention: TowerAttends
    mlp: Callable[[torch.Tensor], torch.Tensor]
    attention_norm: LayerNorm | RMSNorm
    mlp_norm: LayerNorm | RMSNorm

    def __call__(self, x: torch.Tensor, rotation: Rotation | None, groups: Sequence[Group]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, groups)
        return x + self.mlp(self.mlp_norm(x))


class Merger:
    """Joins neighbouring patches into one decoder position. Their rows must be consecutive."""

    def __init__(
        self,
        vision: Vision,
        norm: LayerNorm | RMSNorm,
        up: Linear,
        down: Linear,
        norm_joined: bool = False,
    ) -> None:
        """`norm_joined`: the joined patches are normalised together, rather than each patch separately."""
        self._width = vision.hidden_size * vision.merge**2
        self._norm, self._up, self._down = norm, up, down
        self._norm_joined = norm_joined

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [n, hidden] to [n / merge^2, hidden size of the decoder]."""
        x = self._norm(x.view(-1, self._width)) if self._norm_joined else self._norm(x).view(-1, self._width)
        return self._down(F.gelu(self._up(x)))


@dataclass
class TowerState:
    """The state of an image in a tower; `n` patches."""

    x: torch.Tensor  # [n, hidden]
    rotation: Rotation | None  # float32; None: no RoPE
    groups: Sequence[Group]
    """The groups of patches that attend to each other in layers with windows."""
    back: torch.Tensor | None = None
    """The merged row for each position of the image, int64 [n / merge^2]; None: rows are in the order of positions."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """The deepstack outputs so far, [n / merge^2, hidden size of the decoder] each."""


class Tower:
    """A vision tower. A subclass in the family's file defines the order of patches and the layers."""

    def __init__(
        self,
        vision: Vision,
        embedding: PatchEmbedding,
        blocks: Sequence[TowerBlock],
        merger: Callable[[torch.Tensor], torch.Tensor],
        deepstack: Mapping[int, Merger],
        device: torch.device,
    ) -> None:
        """`deepstack`: modules that compute an output from a layer's states, by the layer's index."""
        self.vision = vision
        self._embedding, self._blocks, self._merger, self._deepstack = embedding, blocks, merger, deepstack
        self._frequencies: torch.Tensor | None = None
        if vision.theta is not None:
            quarter = vision.hidden_size // vision.heads // 4
            powers = torch.arange(0, 2 * quarter, 2, dtype=torch.float32, device=device) / (2 * quarter)
            self._frequencies = 1.0 / vision.theta**powers

    @property
    def fixed_grid(self) -> Grid | None:
        """The grid of every image; None: the grid depends on the image's size."""
        side = self.vision.fixed_side
        return None if side is None else Grid(side, side)

    def begin(self, pixels: Iterable[torch.Tensor], grid: Grid) -> TowerState:
        """Starts an image. `pixels` are blocks of patches: merged squares row by row, each with all its patches."""
        x = torch.cat([self._embedding(block) for block in pixels])
        rows, columns = places(grid, self.vision.merge, x.device)
        return self._arrange(x, grid, rows, columns)

    def layers(self, state: TowerState, first: int, end: int) -> None:
        """Computes the layers `first .. end`. The layers before them must have been computed."""
        whole = [Group(0, 1, len(state.x))]
        for number in range(first, end):
            has_windows = self.vision.window is not None and number not in self.vision.whole
            state.x = self._blocks[number](state.x, state.rotation, state.groups if has_windows else whole)
            if number in self._deepstack:
                state.kept.append(self._deepstack[number](state.x))

    def finish(self, state: TowerState) -> torch.Tensor:
        """Finishes an image. Returns rows [positions, hidden * (1 + deepstack)], in row-major order of positions."""
        rows = torch.cat((self._merger(state.x), *state.kept), dim=1)
        return rows if state.back is None else rows.index_select(0, state.back)

    def _arrange(self, x: torch.Tensor, grid: Grid, rows: torch.Tensor, columns: torch.Tensor) -> TowerState:
        """Returns the state before layer 0, from embedded patches [n, hidden] at rows and columns int64 [n]."""
        raise NotImplementedError

    def _rotation(self, rows: torch.Tensor, columns: torch.Tensor) -> Rotation:
        """Returns the rotation in which half of a head's frequencies use the row, and half the column."""
        frequencies = self._frequencies
        assert frequencies is not None
        angles = torch.cat([at[:, None].float() * frequencies for at in (rows, columns)], dim=1)
        return rotation_of(angles.cos(), angles.sin())


def places(grid: Grid, merge: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the row and the column of each patch, int64 [n] each, in patch order."""
    height, width = grid.height * merge, grid.width * merge
    squares = (grid.height, merge, grid.width, merge)

    def ordered(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.expand(height, width).reshape(squares).transpose(1, 2).flatten()

    return ordered(torch.arange(height, device=device)[:, None]), ordered(torch.arange(width, device=device))


class ImageDecoder(Decoder):
    """A decoder with a vision tower."""

    def __init__(
        self,
        config: ModelConfig,
        params: Parameters,
        blocks: Sequence[Block],
        backend: AttentionBackend,
        ops: Ops,
        tower: Tower,
    ) -> None:
        super().__init__(config, params, blocks, backend, ops)
        self.tower = tower
