"""Linear layers. Matrices of the checkpoint that multiply the same input are joined into one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from forebay.layers.ops import Ops
from forebay.layers.params import Parameters, part_of, size_of
from forebay.weights.shards import Cut, Part


def _reorders(dtype: torch.dtype) -> bool:
    """True if oneDNN has a special weight layout for this type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Linear:
    """`y = x W^T + b`; x is [tokens, inputs], y is [tokens, outputs]. Outputs of fused projections are concatenated."""

    def __init__(
        self,
        params: Parameters,
        prefix: str,
        inputs: int | Part,
        outputs: Mapping[str, int | Part],
        bias: bool = False,
    ) -> None:
        """`outputs` maps names below `prefix` to widths. If `prefix` is "", names have no prefix.

        If this rank has a part of the outputs, other ranks have the rest. If it has a part of the inputs, y is a term
        of a sum over ranks, and only the first rank adds the bias.
        """
        prefix = f"{prefix}." if prefix else ""
        parts = {f"{prefix}{name}.weight": n for name, n in outputs.items()}
        self.inputs = size_of(inputs)
        self._products, self.kept = params.products, params.kept_matrix(inputs, parts)
        if self.kept is None:
            self.weight = params.matrix(inputs, parts)
        self._adapted = params.adapted
        self._modules = {f"{prefix}{name}": size_of(n) for name, n in outputs.items()}
        if self._adapted is not None:
            columns = part_of(inputs)
            self._adapted.register({f"{prefix}{name}": Cut(part_of(n), columns) for name, n in outputs.items()})
        self.bias: torch.Tensor | None = None
        if bias:
            biases = {f"{prefix}{name}.bias": n for name, n in outputs.items()}
            if isinstance(inputs, Part) and inputs.first > 0:
                params.tensor((0,), {name: Part(size_of(n), 0, 0) for name, n in biases.items()})
            else:
                self.bias = params.tensor((sum(map(size_of, outputs.values())),), biases)
        self._packed: torch.Tensor | None = None
        params.when_packed(self._pack)

    def _pack(self) -> None:
        """Keeps the weight only in oneDNN's layout. Otherwise F.linear would convert it in each call."""
        if self.kept is None and self.weight.device.type == "cpu" and _reorders(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            self.weight = self.weight.new_empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._product(x)
        return y if self._adapted is None else self._adapted.add(self._modules, x, y)

    def gated(self, x: torch.Tensor, ops: Ops, activation: str) -> torch.Tensor:
        """Returns `ops.gate` of the product, [tokens, outputs / 2]."""
        # No fused operator with adapters, which modify the product before the gate, or with a kept or packed matrix.
        own = self.kept is None and self._packed is None and self._adapted is None
        if self._products is not None and own:
            found = self._products.gated(x, self.weight, self.bias, activation)
            if found is not None:
                return found
        return ops.gate(self(x), activation)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is not None:
            assert self._products is not None
            return self._products.product(x, self.kept, self.bias)
        if self._packed is None:
            if self._products is not None:
                return self._products.dense(x, self.weight, self.bias)
            return F.linear(x, self.weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y
