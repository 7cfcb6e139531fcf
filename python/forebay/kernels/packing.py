"""The room for a decoder's packed matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from forebay.kernels.library import FORMATS, library
from forebay.layers.attention import Attention
from forebay.layers.decoder import HEAD, Block, Decoder
from forebay.layers.linear import Linear
from forebay.layers.mlp import DenseFeed
from forebay.layers.moe import MixtureOfExperts, Stack

MADE = FORMATS["INT8"]
"""The format that is made of a matrix of the model's dtype. Other formats are a file's."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The types of weights and activations, by the library's numbers."""


@dataclass(frozen=True)
class Packing:
    """The kind of a matrix to be packed, without its values."""

    name: str
    outputs: int
    inputs: int
    dtype: torch.dtype
    """The type of a matrix that is not quantised."""
    format: str | None
    """The format, one of `FORMATS`; None: the matrix stays in its dtype."""
    interleaved: bool = False
    """True if the first half of the outputs gates the second."""
    count: int = 1
    """The number of matrices of this shape, one behind the other."""

    @property
    def shape(self) -> tuple[int, int, bool]:
        """The shape in the library's form."""
        return self.outputs, self.inputs, self.interleaved

    @property
    def room(self) -> tuple[int, torch.dtype]:
        """Elements of the packed matrices, and their type: bytes if they are quantised."""
        if self.format is None:
            return self.count * library().fb_packed_len(*self.shape), self.dtype
        return self.count * library().fb_quantised_bytes(FORMATS[self.format], *self.shape), torch.uint8

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        elements, dtype = self.room
        return elements * dtype.itemsize


def format_number(format_: str | None) -> int:
    """The library's number of a matrix's format; None: the model's dtype."""
    return 0 if format_ is None else FORMATS[format_]


def pack(weight: torch.Tensor, packing: Packing, packed: torch.Tensor) -> None:
    """Packs the contiguous `weight` into `packed`, of `packing.room`. It quantises if the format is not its own yet."""
    matrices = weight.view(packing.count, packing.outputs, -1)
    for matrix, to in zip(matrices, packed.view(packing.count, -1), strict=True):
        _pack(matrix, packing, to)


def _pack(weight: torch.Tensor, packing: Packing, packed: torch.Tensor) -> None:
    """The same with one matrix."""
    format_, shape = packing.format, packing.shape
    source, to = weight.data_ptr(), packed.data_ptr()
    if format_ is None:
        library().fb_pack(DTYPES[weight.dtype], source, *shape, to)
    elif FORMATS[format_] == MADE:
        library().fb_quantise(DTYPES[weight.dtype], source, *shape, to)
    elif not library().fb_pack_blocks(FORMATS[format_], source, weight.nbytes, *shape, to):
        raise ValueError(f"{weight.nbytes} bytes are no {format_} matrix of {packing.outputs} x {packing.inputs}")


def compiled_parts(block: Block) -> tuple[Attention, DenseFeed | None, MixtureOfExperts | None]:
    """The parts of a block: its attention, the dense part for every token, and its experts."""
    attention, mlp = block.attention, block.mlp
    if isinstance(attention, Attention):
        if isinstance(mlp, DenseFeed):
            return attention, mlp, None
        if isinstance(mlp, MixtureOfExperts) and mlp.stacks is not None:
            return attention, mlp.shared, mlp
    raise TypeError(f"no kernel computes {type(attention).__name__} and {type(mlp).__name__}")


def plain_parts(block: Block) -> tuple[Attention, DenseFeed]:
    """The two parts of a block that has no experts."""
    attention, mlp, experts = compiled_parts(block)
    assert mlp is not None
    assert experts is None
    return attention, mlp


def stack_packing(stack: Stack, dtype: torch.dtype, *, interleaved: bool = False) -> Packing:
    """The packing of a matrix of all experts of a layer."""
    count, outputs = stack.weight.shape[:2]
    return Packing(stack.name, outputs, stack.inputs, dtype, stack.format, interleaved, count)


def linear_packing(linear: Linear, dtype: torch.dtype, *, interleaved: bool = False) -> Packing:
    """The packing of a layer's matrix, which need not have memory. `dtype` is the model's."""
    return Packing(linear.name, len(linear.weight), linear.inputs, dtype, linear.format, interleaved)


def head_packing(model: Decoder) -> Packing:
    """The packing of the head.

    It is a matrix of its own, also if the head is the embedding, whose rows are looked up.
    """
    return Packing(HEAD, len(model.head), model.config.hidden_size, model.params.dtype, model.head_format)


def packings(model: Decoder) -> Iterator[Packing]:
    """Every matrix of a model that is not packed yet."""
    dtype = model.params.dtype
    for block in model.blocks:
        attention, mlp, experts = compiled_parts(block)
        for linear in (attention.qkv, attention.output):
            yield linear_packing(linear, dtype)
        if mlp is not None:
            yield linear_packing(mlp.down, dtype)
            yield linear_packing(mlp.gate_up, dtype, interleaved=True)
        if experts is not None and experts.stacks is not None:
            gate_up, down = experts.stacks
            yield stack_packing(gate_up, dtype, interleaved=True)
            yield stack_packing(down, dtype)
    if not model.config.headless:
        yield head_packing(model)


def packed_bytes(model: Decoder) -> int:
    """Bytes of the weights of a model after its matrices are packed. The model is not packed yet."""
    others = sum(tensor.nbytes for tensor in model.params.others.values())
    return others + sum(packing.nbytes for packing in packings(model))
