"""Tiny quantised checkpoints in the layouts of the hub, and the float weights that they represent.

The packing follows the formats' own tools, in loops over words, and uses no code of Forebay.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from benchmarks.described import handshake_model

Weights = dict[str, torch.Tensor]
Words = npt.NDArray[np.uint32]
_AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]
"""The neighbour in each 4-bit field of a word, lowest bits first. A word holds eight neighbours."""
_STORED = ("_proj.weight", ".wq_b.weight", ".wk.weight", ".w1.weight", ".w2.weight", ".w3.weight")


@dataclass(frozen=True)
class Format:
    """A storage format of matrices."""

    config: dict[str, Any]
    store: Callable[[str, torch.Tensor, torch.Generator], tuple[Weights, torch.Tensor]]
    """Returns the tensors of a module's weight [rows, inputs], and the weight that they represent."""


def _packed(codes: npt.NDArray[np.int64], axis: int, places: list[int] | None = None) -> torch.Tensor:
    """Packs 4-bit codes into int32 words.

    A word holds eight neighbours along an axis, and the last word is padded with 0.
    """
    moved = np.moveaxis(codes, axis, 0)
    words: Words = np.zeros((-(-len(moved) // 8), *moved.shape[1:]), np.uint32)
    for index, line in enumerate(moved):
        place = (places or list(range(8))).index(index % 8)
        words[index // 8] |= line.astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words.view(np.int32), 0, axis)))


def _rounded(
    weight: torch.Tensor, group: int, symmetric: bool, dtype: torch.dtype, order: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and values [rows, inputs], scales and zero points [rows, groups]. `order` lists inputs by group."""
    rows, inputs = weight.shape
    columns = torch.arange(inputs) if order is None else order
    codes, values = torch.empty(rows, inputs, dtype=torch.int64), torch.empty(rows, inputs)
    scales = torch.empty(rows, inputs // group, dtype=dtype)
    zeros = torch.empty(rows, inputs // group, dtype=torch.int64)
    for number in range(inputs // group):
        at = columns[number * group : (number + 1) * group]
        part = weight[:, at].float()
        if symmetric:
            scale, zero = (part.abs().amax(1) / 7).to(dtype), torch.full((rows,), 8)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / 15).to(dtype)
            zero = (-low / scale.float()).round().clamp(0, 15).long()
        code = (part / scale.float()[:, None] + zero[:, None]).round().clamp(0, 15).long()
        codes[:, at], values[:, at] = code, (code - zero[:, None]).float() * scale.float()[:, None]
        scales[:, number], zeros[:, number] = scale, zero
    return codes, values, scales, zeros


def fp8_blocks(block: int) -> Format:
    """DeepSeek's format: a scale for each block, in `weight_scale_inv`."""

    def store(module: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Weights, torch.Tensor]:
        rows, columns = (math.ceil(size / block) for size in weight.shape)
        scale = torch.rand(rows, columns, generator=generator) * 0.01 + 0.001
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale}, codes.float() * spread

    return Format({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}, store)


def _fp8(scale: str, shape: Callable[[int], tuple[int, ...]], config: dict[str, Any]) -> Format:
    def store(module: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Weights, torch.Tensor]:
        of_rows = len(shape(5)) == 2
        largest = weight.abs().amax(1, keepdim=True) if of_rows else weight.abs().amax()
        scales = (largest.float() / 448).reshape(shape(len(weight)))
        codes = (weight.float() / scales).to(torch.float8_e4m3fn)
        tensors = {f"{module}.weight": codes, f"{module}.{scale}": scales}
        tensors[f"{module}.input_scale"] = torch.tensor([0.05])
        return tensors, codes.float() * scales

    return Format(config, store)


def fp8_channels() -> Format:
    """compressed-tensors: weights have a scale for each row, and activations one for each token."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }
    return _fp8("weight_scale", lambda rows: (rows, 1), config)


def fp8_tensors() -> Format:
    """AutoFP8: one scale for each matrix, and one for its activations."""
    return _fp8("weight_scale", lambda rows: (), {"quant_method": "fp8", "activation_scheme": "static"})


def awq(group: int) -> Format:
    """Each word holds neighbouring outputs, in the order of AWQ."""

    def store(module: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Weights, torch.Tensor]:
        codes, values, scales, zeros = _rounded(weight, group, symmetric=False, dtype=torch.float16)
        tensors = {
            f"{module}.qweight": _packed(codes.T.numpy(), 1, _AWQ_PLACES),
            f"{module}.qzeros": _packed(zeros.T.numpy(), 1, _AWQ_PLACES),
            f"{module}.scales": scales.T.contiguous(),
        }
        return tensors, values

    return Format({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}, store)


def gptq(group: int, *, desc_act: bool = False, version: int = 1) -> Format:
    """Each word holds neighbouring inputs. With `desc_act` inputs are assigned to groups in random order.

    The order is the same for all matrices with the same number of inputs.
    """

    def store(module: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Weights, torch.Tensor]:
        inputs = weight.shape[1]
        of_inputs = torch.arange(inputs) // group
        order = None
        if desc_act:
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
            of_inputs = torch.empty_like(of_inputs).index_copy_(0, order, of_inputs)
        codes, values, scales, zeros = _rounded(weight, group, False, torch.float16, order)
        stored = (zeros - 1) % 16 if version == 1 else zeros
        tensors = {
            f"{module}.qweight": _packed(codes.T.numpy(), 0),
            f"{module}.qzeros": _packed(stored.T.numpy(), 1),
            f"{module}.scales": scales.T.contiguous(),
            f"{module}.g_idx": of_inputs.int(),
        }
        return tensors, values

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": desc_act, "sym": False}
    return Format(config | ({} if version == 1 else {"checkpoint_format": "gptq_v2"}), store)


def pack_quantized(group: int | None, *, symmetric: bool = True, actorder: bool = False) -> Format:
    """compressed-tensors: words hold neighbouring inputs, or, for zero points, neighbouring outputs.

    Without `group` a row has one scale.
    """

    def store(module: str, weight: torch.Tensor, generator: torch.Generator) -> tuple[Weights, torch.Tensor]:
        rows, inputs = weight.shape
        size = group or inputs
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) if actorder else None
        codes, values, scales, zeros = _rounded(weight, size, symmetric, torch.bfloat16, order)
        tensors = {
            f"{module}.weight_packed": _packed(codes.numpy(), 1),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": torch.tensor([rows, inputs]),
        }
        if not symmetric:
            tensors[f"{module}.weight_zero_point"] = _packed(zeros.numpy(), 0)
        if order is not None:
            of_inputs = torch.empty(inputs, dtype=torch.int32)
            of_inputs[order] = (torch.arange(inputs) // size).int()
            tensors[f"{module}.weight_g_idx"] = of_inputs
        return tensors, values

    weights = {"num_bits": 4, "type": "int", "strategy": "group" if group else "channel", "group_size": group}
    weights |= {"symmetric": symmetric, "actorder": "group" if actorder else None}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }
    return Format(config, store)


def quantised(
    directory: Path,
    model: Any,
    format_: Format,
    left_out: Callable[[str], bool] = lambda name: False,
    change: Callable[[Weights], Any] | None = None,
) -> dict[str, Any]:
    """A checkpoint of a transformers model in two files, as the brain describes it to a hand.

    The model's own weights become those that the checkpoint represents. `left_out`: names of weights that are not
    quantised. `change`: changes the tensors.
    """
    generator = torch.Generator().manual_seed(11)
    model.save_pretrained(directory)
    found = load_file(directory / "model.safetensors")
    values, tensors = dict(found), dict(found)
    for name in found:
        if name.endswith(_STORED) and "weights_proj" not in name and not left_out(name):
            del tensors[name]
            parts, values[name] = format_.store(name.removesuffix(".weight"), found[name], generator)
            tensors |= parts
    if change is not None:
        change(tensors)
    whole = directory / "whole"
    whole.mkdir()
    save_file({name: value.contiguous() for name, value in values.items()}, whole / "model.safetensors")
    (whole / "config.json").write_text((directory / "config.json").read_text())
    model.load_state_dict(type(model).from_pretrained(whole, dtype=torch.float32).state_dict())
    # The tensors of one matrix may be in different files.
    names = sorted(tensors)
    (directory / "model.safetensors").unlink()
    files = []
    for part in range(2):
        files.append(str(directory / f"{part}.safetensors"))
        save_file({name: tensors[name].contiguous() for name in names[part::2]}, files[-1])
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": format_.config}
    return handshake_model(config, files)
