"""Sizes of published models."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Model:
    """A published model's sizes."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    layers: int
    turned: int
    norms: bool = False
    experts: tuple[int, int, int] | None = None
    """The number of experts, how many a token uses, and their width."""
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    eight_bits: bool = False
    """True if the KV cache has 8-bit floats."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of the KV cache's elements."""
        return torch.uint8 if self.eight_bits else self.dtype


QWEN3_0_6B = Model("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936, 28, 128, norms=True)
MODELS = [
    QWEN3_0_6B,
    replace(QWEN3_0_6B, name="Qwen3-0.6B in float32", dtype=torch.float32),
    Model("Llama-3.1-8B", 4096, 14336, 32, 8, 128, 128256, 32, 128),
    Model("SmolLM2-135M", 576, 1536, 9, 3, 64, 49152, 30, 64),
    Model("Qwen3-30B-A3B", 2048, 6144, 32, 4, 128, 151936, 48, 128, norms=True, experts=(128, 8, 768)),
    Model("GLM-4.5-Air", 4096, 10944, 96, 8, 128, 151552, 46, 64, norms=True, experts=(128, 8, 1408)),
]
RANK, ROTARY, INDEX_HEADS, INDEX_DIM, TOP_K = 512, 64, 64, 128, 2048
