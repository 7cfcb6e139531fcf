"""A trainer's tensors, written as a safetensors file."""

from __future__ import annotations

import torch
from safetensors.torch import load

from forebay.llm.weights import serialize


def test_tensors_of_any_layout_are_written() -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "whole": whole,
        "again": whole,
        "part": whole[1],
        "turned": whole.T,
        "narrow": whole.bfloat16().requires_grad_(),
        "empty": torch.empty(0),
        "empty too": torch.empty(0),
    }
    found = load(serialize(tensors))
    assert found.keys() == tensors.keys() - {"again"}
    for name, tensor in found.items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
