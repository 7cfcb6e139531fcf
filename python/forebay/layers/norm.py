"""RMS normalisation (Zhang & Sennrich 2019), and layer normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forebay.layers.params import Parameters


class RMSNorm:
    """Divides the last dimension by its RMS and scales it. It computes in float32 for any dtype of x."""

    def __init__(self, params: Parameters, name: str, size: int, eps: float, wide: bool = False) -> None:
        """`wide`: the weight is float32, whatever the model's dtype."""
        dtype = torch.float32 if wide else None
        self.weight = params.tensor((size,), {f"{name}.weight": size}, dtype)
        self._shape = (size,)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            return F.rms_norm(x.float(), self._shape, self.weight, self._eps).to(x.dtype)
        return F.rms_norm(x, self._shape, self.weight, self._eps)


def unweighted(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides the last dimension by its RMS, without weights. It computes in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class MeanNorm:
    """Layer normalisation without a bias. It computes in float32 for any dtype of x."""

    def __init__(self, params: Parameters, name: str, size: int, eps: float) -> None:
        self.weight = params.tensor((size,), {f"{name}.weight": size})
        self._shape = (size,)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.float(), self._shape, self.weight.float(), None, self._eps).to(x.dtype)


Norm = RMSNorm | MeanNorm
"""A norm of states."""


class LayerNorm:
    """Layer normalisation (Ba et al. 2016) of the last dimension, with scale and shift."""

    def __init__(self, params: Parameters, name: str, size: int, eps: float) -> None:
        self.weight = params.tensor((size,), {f"{name}.weight": size})
        self.bias = params.tensor((size,), {f"{name}.bias": size})
        self._shape = (size,)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self.weight, self.bias, self._eps)
