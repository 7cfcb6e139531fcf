"""The matrices of all places of adapters, in permanent memory for the operators of `forebay.gpu`."""

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
"""The prefix of the names of modules that adapters may change."""


@dataclass(frozen=True)
class _Part:
    """The memory of a module in the stack of its product."""

    stack: LowRankStack
    number: int
    """The module's index among the modules of the product."""
    first: int
    """The index of the module's first output."""
    outputs: int


class AdapterStacks:
    """The matrices of all places, one tensor per product for all of them, at the largest rank."""

    def __init__(
        self, modules: AdaptedModules, places: int, rank: int, dtype: torch.dtype, device: Device, kernels: Kernels
    ) -> None:
        self.places = places
        self._rank = rank
        self._kernels = kernels
        self._stacks: dict[str, LowRankStack] = {}
        """By the first module of a product."""
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
        """Copies an adapter in the host's memory to a place. The copy has ended on return.

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
        """The adapters of tokens, from int32 places [n]; `self.places` stands for none."""
        return StackedTokens(self._stacks, PlacedTokens(places), self._kernels)


@dataclass(frozen=True)
class StackedTokens:
    """Implements `layers.adapted.StepAdapters` with one operator per product, however many adapters the tokens have."""

    stacks: Mapping[str, LowRankStack]
    """By the first module of a product."""
    tokens: PlacedTokens
    kernels: Kernels

    def add(self, modules: Mapping[str, int], x: torch.Tensor, y: torch.Tensor) -> None:
        stack = self.stacks.get(next(iter(modules)))
        if stack is not None:
            self.kernels.add_low_rank(x, y, stack, self.tokens)
