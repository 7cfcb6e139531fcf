"""Checkpoints in 8-bit floats with a scale for each block of a matrix, as DeepSeek-V3 (2024) is published."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors import safe_open

from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError

__all__ = ["SCALE_SUFFIX", "Scales", "multiplied_out"]

_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
SCALE_SUFFIX = "_scale_inv"
"""What a weight's name has behind it in the name of its scales."""


class Scales:
    """The scales of a checkpoint's 8-bit weights, wherever they are: a weight's may be in another file."""

    def __init__(self, files: Sequence[str], config: ModelConfig | EncoderConfig) -> None:
        """Reads all scales: they are few, one number for thousands of weights. Raises ModelError if some do not fit."""
        self._block = config.scale_block if isinstance(config, ModelConfig) else None
        self._found: dict[str, torch.Tensor] = {}
        shapes = {}
        for path in files:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():
                    if self._block is not None and name.endswith(SCALE_SUFFIX):
                        self._found[name] = file.get_tensor(name).float().clone()
                    elif file.get_slice(name).get_dtype() in _EIGHT_BITS:
                        shapes[name] = file.get_slice(name).get_shape()
        for name, shape in shapes.items():
            self._check(name, shape)

    def _check(self, name: str, shape: Sequence[int]) -> None:
        scale = self._found.get(f"{name}{SCALE_SUFFIX}")
        if self._block is None or scale is None:
            raise ModelError(f"{name} has 8-bit floats, and the checkpoint has no {name}{SCALE_SUFFIX} for it")
        wanted = [-(-size // of) for size, of in zip(shape, self._block, strict=False)]
        if len(shape) != 2 or list(scale.shape) != wanted:
            raise ModelError(f"{name}{SCALE_SUFFIX} is {list(scale.shape)}, and {name} of {list(shape)} wants {wanted}")

    def applied(self, name: str, tensor: torch.Tensor, first: tuple[int, int] = (0, 0)) -> torch.Tensor:
        """The values of a tensor, or of a part that begins at row and column `first`: float32 if it has scales."""
        scale = self._found.get(f"{name}{SCALE_SUFFIX}")
        if scale is None or self._block is None:
            return tensor
        return multiplied_out(tensor, scale, self._block, first)


def multiplied_out(
    tensor: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], first: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """float32 values of 8-bit floats [rows, columns] whose blocks have a scale each, [block rows, block columns].

    The tensor may be a part of what the scales are for: it begins at row and column `first`.
    """
    values = tensor.float()
    end, columns = first[0] + len(values), slice(first[1], first[1] + values.shape[1])
    for row in range(first[0] // block[0], -(-end // block[0])):
        # Block rows one by one: a matrix of all scales would be as large as the values.
        part = values[max(0, row * block[0] - first[0]) : (row + 1) * block[0] - first[0]]
        part *= scale[row].repeat_interleave(block[1])[columns]
    return values
