"""An encoder's batch as one call into the compiled kernels."""

from __future__ import annotations

import ctypes
import weakref

import torch

from forebay.compute.rows import Launch
from forebay.device.memory import HugePages
from forebay.kernels.library import BatchSpec, EncoderLayerSpec, EncoderSpec, library, open_mp
from forebay.kernels.packing import DTYPES, format_number, linear_packing, pack
from forebay.layers.linear import Linear
from forebay.models.bert import Bert
from forebay.state.slots import PlanError, SlotTables
from forebay.weights.encoder_config import EncoderConfig

ACTIVATIONS = {"gelu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "relu": 2}
ERRORS = {
    2: "a row has a token that is not of the vocabulary",
    3: "a row is empty, or longer than the model",
    4: "a row has a second text, and the model knows one",
}


def why_no_encoder(config: EncoderConfig) -> str | None:
    """The part of an encoder without a kernel; None: all have one. Inner dimensions have to be even."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads == 0 and not any(size % 2 for size in (hidden // heads, config.intermediate_size)):
        return None
    return "heads or inner layers with an odd number of elements"


class NativeEncoder:
    """Implements `Pooler`. The matrices of the model are moved: its own forward pass can't be used afterwards."""

    def __init__(self, model: Bert, tables: SlotTables, threads: int) -> None:
        self._library = library()
        self._tables = tables
        self._size = model.size
        self._dtype = model.params.dtype
        linears = [part for block in model.blocks for part in (block.qkv, block.output, block.up, block.down)]
        linears += model.head or ()
        self._room = HugePages(linear_packing(linear, self._dtype).nbytes for linear in linears)
        # It knows the matrices as well, and none of them would be freed as long as it does.
        model.params.forget()
        # Everything that the description points to.
        self._kept: list[object] = [model, tables]
        config = model.config
        spec = EncoderSpec(
            dtype=DTYPES[self._dtype],
            layers=len(model.blocks),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            positions=config.max_position_embeddings,
            kinds=config.type_vocab_size,
            activation=ACTIVATIONS[config.hidden_act],
            pooling=int(model.pooling.kind == "cls"),
            scores=model.size if model.head is not None else 0,
            threads=threads,
            eps=config.layer_norm_eps,
            words=model.words.data_ptr(),
            places=model.positions.data_ptr(),
            texts=model.types.data_ptr(),
            norm=model.norm.weight.data_ptr(),
            norm_bias=model.norm.bias.data_ptr(),
        )
        if model.head is not None:
            (spec.pooler, spec.pooler_bias), (spec.classifier, spec.classifier_bias) = map(self._matrix, model.head)
        layers = (EncoderLayerSpec * len(model.blocks))()
        for layer, block in zip(layers, model.blocks, strict=True):
            layer.qkv, layer.qkv_bias = self._matrix(block.qkv)
            layer.output, layer.output_bias = self._matrix(block.output)
            layer.up, layer.up_bias = self._matrix(block.up)
            layer.down, layer.down_bias = self._matrix(block.down)
            layer.formats[:] = [
                format_number(linear.format) for linear in (block.qkv, block.output, block.up, block.down)
            ]
            layer.attention_norm = block.attention_norm.weight.data_ptr()
            layer.attention_norm_bias = block.attention_norm.bias.data_ptr()
            layer.output_norm = block.output_norm.weight.data_ptr()
            layer.output_norm_bias = block.output_norm.bias.data_ptr()
        spec.layer = layers
        self._encoder = self._library.fb_encoder_new(ctypes.byref(spec), ctypes.byref(open_mp()))
        if not self._encoder:
            raise ValueError(f"the compiled kernels can't compute {config}")
        weakref.finalize(self, self._library.fb_encoder_free, self._encoder)

    def pool(self, launch: Launch) -> torch.Tensor:
        rows, tables = launch.rows, self._tables
        assert rows.segment is not None
        columns = [torch.from_numpy(column).contiguous() for column in (rows.slot, rows.length, rows.segment)]
        vectors = torch.empty(len(rows.slot), self._size)
        slot, length, segment = (column.data_ptr() for column in columns)
        batch = BatchSpec(
            rows=len(rows.slot),
            slot=slot,
            length=length,
            segment=segment,
            tokens=tables.token_pool.data_ptr(),
            token_stride=tables.stride,
            vectors=vectors.data_ptr(),
        )
        error = self._library.fb_encode(self._encoder, ctypes.byref(batch))
        if error:
            raise PlanError(ERRORS[error])
        return vectors

    def _matrix(self, linear: Linear) -> tuple[int, int]:
        """The addresses of the packed matrix and its bias."""
        packing = linear_packing(linear, self._dtype)
        room, dtype = packing.room
        packed = self._room.take((room,), dtype)
        weight = linear.weight.contiguous()
        pack(weight, packing, packed)
        # The packed copy is the one that is used: free this one before the next is packed.
        linear.weight = linear.weight.new_empty(0)
        assert linear.bias is not None
        self._kept.append(packed)
        return packed.data_ptr(), linear.bias.data_ptr()
