"""Root mean square normalisation (Zhang & Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.layers.params import Parameters


class RMSNorm:
    """Normalises the last dimension and scales it. It computes in float32 for any dtype of x."""

    def __init__(self, params: Parameters, name: str, size: int, eps: float) -> None:
        self.weight = params.tensor((size,), {f"{name}.weight": size})
        self._shape = (size,)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self.weight, self._eps)


class LayerNorm:
    """Layer normalisation (Ba et al. 2016) of the last dimension, with scale and shift."""

    def __init__(self, params: Parameters, name: str, size: int, eps: float) -> None:
        self.weight = params.tensor((size,), {f"{name}.weight": size})
        self.bias = params.tensor((size,), {f"{name}.bias": size})
        self._shape = (size,)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self.weight, self.bias, self._eps)
