"""The LoRA matrices of all adapter places, in permanent memory for the operators of `forebay.gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from forebay.device import Device
from forebay.gpu.interface import Kernels
from forebay.gpu.low_rank import LowRankStack, PlacedTokens
from forebay.layers.adapted import AdaptedModules, Adapter

PREFIX = "model.layers."
"""The prefix of the names of modules that adapters may modify."""


@dataclass(frozen=True)
class _Part:
    """The part of a product's stack that belongs to one module."""

    stack: LowRankStack
    number: int
    """The module's index among the modules of the product."""
    first: int
    """The index of the module's first output."""
    outputs: int


class AdapterStacks:
    """The matrices of all places: one stack per product, in which every place has room for the largest rank."""

    def __init__(
        self, modules: AdaptedModules, places: int, rank: int, dtype: torch.dtype, device: Device, kernels: Kernels
    ) -> None:
        self.places = places
        self._rank = rank
        self._kernels = kernels
        self._stacks: dict[str, LowRankStack] = {}
        """Keyed by the first module of each product."""
        self._parts: dict[str, _Part] = {}
        for product, inputs in modules.products:
            if not all(name.startswith(PREFIX) for name in product):
                continue
            starts = [0, *accumulate(product.values())]
            stack = LowRankStack(
                device.zeros((places, len(product) * rank, inputs), dtype),
                device.zeros((places, starts[-1], rank), dtype),
                torch.from_numpy(np.array(starts, np.int32)).to(device.torch_device),
                max(product.values()),
            )
            self._stacks[next(iter(product))] = stack
            for number, (name, outputs) in enumerate(product.items()):
                self._parts[name] = _Part(stack, number, starts[number], outputs)

    @torch.inference_mode()
    def put(self, place: int, adapter: Adapter) -> None:
        """Copies an adapter from host memory to a place. The copy is complete on return.

        No queued step may use the place.
        """
        for name, part in self._parts.items():
            stack, rank = part.stack, self._rank
            a = torch.zeros(rank, stack.a.shape[2], dtype=stack.a.dtype)
            b = torch.zeros(part.outputs, rank, dtype=stack.b.dtype)
            pair = adapter.get(name)
            if pair is not None:
                a[: len(pair.a)], b[:, : len(pair.a)] = pair.a, pair.b
            stack.a[place, part.number * rank : (part.number + 1) * rank].copy_(a)
            stack.b[place, part.first : part.first + part.outputs].copy_(b)

    def of_tokens(self, places: torch.Tensor) -> StackedTokens:
        """Returns the adapters of tokens from their places int32 [n]; the value `self.places` means no adapter."""
        return StackedTokens(self._stacks, PlacedTokens(places), self._kernels)


@dataclass(frozen=True)
class StackedTokens:
    """Implements `layers.adapted.StepAdapters` with one operator per product, however many adapters the tokens have."""

    stacks: Mapping[str, LowRankStack]
    """Keyed by the first module of each product."""
    tokens: PlacedTokens
    kernels: Kernels

    def add(self, modules: Mapping[str, int], x: torch.Tensor, y: torch.Tensor) -> None:
        stack = self.stacks.get(next(iter(modules)))
        if stack is not None:
            self.kernels.add_low_rank(x, y, stack, self.tokens)
