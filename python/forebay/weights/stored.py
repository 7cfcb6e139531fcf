"""The storage of a checkpoint's quantised matrices: the `quantization_config` of a `config.json`.

FP8 has a scale for each block in DeepSeek-V3 (2024). In compressed-tensors, FBGEMM and AutoFP8 each row or matrix has
one. 4-bit formats are GPTQ (Frantar et al. 2022), AWQ (Lin et al. 2023), and compressed-tensors, which has a packing of
its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from forebay.weights.errors import UnsupportedModelError

__all__ = ["COMPRESSED", "METHODS", "Fp8", "Int4", "Scheme", "Stored", "stored_of"]

COMPRESSED = "compressed-tensors"
METHODS = ("fp8", "fbgemm_fp8", "awq", "gptq", COMPRESSED)
"""Supported values of `quant_method`."""
_PATTERN = re.compile(r"(?:re:|-:)")


@dataclass(frozen=True)
class Fp8:
    """8-bit floats."""

    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: each row has one, or the whole matrix."""


@dataclass(frozen=True)
class Int4:
    """4-bit integers. Several inputs of a row share a scale and a zero point."""

    packing: str
    """The format of words of eight codes: `gptq`, `awq` or `compressed-tensors`."""
    group: int | None
    """The number of inputs that share a scale; None: all of a row."""
    ordered: bool = False
    """True if groups are of inputs in an order of their own (GPTQ's `desc_act`)."""
    less_one: bool = False
    """True if zero points are stored less 1."""


Scheme: TypeAlias = Fp8 | Int4


@dataclass(frozen=True)
class Stored:
    """The configuration's statement about matrices. The files decide which matrices are quantised."""

    method: str
    """`quant_method`."""
    scheme: Scheme
    left_out: tuple[str, ...] = ()
    """Modules that are not quantised: names, parts of names, or regular expressions behind `re:` or `-:`."""

    def leaves_out(self, module: str) -> bool:
        """True if a module, such as `model.layers.0.self_attn.q_proj`, is not quantised."""
        return any(_fits(pattern, module) for pattern in self.left_out)


def _fits(pattern: str, module: str) -> bool:
    expression = _PATTERN.match(pattern)
    if expression is not None:
        return re.match(pattern[expression.end() :], module) is not None
    return f".{pattern}." in f".{module}."


def stored_of(d: Mapping[str, Any]) -> Stored | None:
    """Reads the `quantization_config` of a `config.json`; None: nothing is quantised.

    Raises UnsupportedModelError for a configuration that would be read wrongly.
    """
    stored = d.get("quantization_config")
    if not stored:
        return None
    method = stored.get("quant_method")
    if method == "fp8":
        return Stored(method, Fp8(_block(stored.get("weight_block_size"))), _left_out(stored))
    if method == "fbgemm_fp8":
        return Stored(method, Fp8(), _left_out(stored))
    if method == "awq":
        return Stored(method, _awq(stored), _left_out(stored))
    if method == "gptq":
        return Stored(method, _gptq(stored), tuple(stored.get("dynamic") or ()))
    if method == COMPRESSED:
        return Stored(method, _compressed(stored), tuple(stored.get("ignore") or ()))
    raise UnsupportedModelError(
        f"weights quantised by {method!r} (quant_method) are not supported; supported: {', '.join(METHODS)}"
    )


def _left_out(stored: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(stored.get("modules_to_not_convert") or stored.get("ignored_layers") or ())


def _block(sizes: Any) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size >= 1 for size in sizes)):
        raise UnsupportedModelError(f"weight_block_size {sizes!r} is not supported: it is no rows and columns")
    return sizes[0], sizes[1]


def _awq(stored: Mapping[str, Any]) -> Int4:
    _only(stored, "awq", "bits", 4)
    _only(stored, "awq", "version", "gemm", None)
    _only(stored, "awq", "zero_point", True, None)
    return Int4("awq", _group(stored.get("group_size", 128), "awq"))


def _gptq(stored: Mapping[str, Any]) -> Int4:
    _only(stored, "gptq", "bits", 4)
    _only(stored, "gptq", "checkpoint_format", "gptq", "gptq_v2", None)
    others = [pattern for pattern in stored.get("dynamic") or () if not pattern.startswith("-:")]
    if others:
        raise UnsupportedModelError(
            f"gptq with modules that are quantised otherwise than the rest is not supported: dynamic has {others[0]!r}"
        )
    less_one = stored.get("checkpoint_format") != "gptq_v2"
    return Int4("gptq", _group(stored.get("group_size", 128), "gptq"), bool(stored.get("desc_act")), less_one)


def _compressed(stored: Mapping[str, Any]) -> Scheme:
    for key in ("sparsity_config", "transform_config"):
        found = stored.get(key) or {}
        if found and found.get("format") != "dense":
            raise UnsupportedModelError(f"{COMPRESSED} with a {key} is not supported")
    groups = list((stored.get("config_groups") or {}).values())
    formats = {group.get("format") or stored.get("format") for group in groups}
    schemes = {_of_group(group, next(iter(formats))) for group in groups} if len(formats) == 1 else set()
    if len(schemes) != 1:
        raise UnsupportedModelError(
            f"{COMPRESSED} wants one way for all matrices: config_groups has {len(groups)} groups, "
            f"of the formats {sorted(map(str, formats))}"
        )
    return schemes.pop()


def _of_group(group: Mapping[str, Any], format_: Any) -> Scheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("strategy")
    if kind == "float" and bits == 8 and format_ in ("float-quantized", "naive-quantized"):
        if inputs is not None and (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
            raise UnsupportedModelError(f"{COMPRESSED} with activations of another kind than weights is not supported")
        if strategy in ("channel", "tensor"):
            return Fp8()
        if strategy == "block":
            return Fp8(_block(weights.get("block_structure")))
    elif kind == "int" and bits == 4 and format_ == "pack-quantized":
        if inputs is not None:
            raise UnsupportedModelError(f"{COMPRESSED} with 4-bit weights and quantised activations is not supported")
        ordered = weights.get("actorder") in ("group", True)
        if strategy == "channel":
            return Int4(COMPRESSED, None, ordered)
        if strategy == "group":
            return Int4(COMPRESSED, _group(weights.get("group_size"), COMPRESSED), ordered)
    raise UnsupportedModelError(
        f"{COMPRESSED} with {bits}-bit weights ({kind}, {strategy}) in the format {format_!r} is not supported; "
        "supported: 8-bit floats in float-quantized, a scale a channel, tensor or block, and 4-bit integers in "
        "pack-quantized, a scale a group or channel"
    )


def _group(size: Any, method: str) -> int | None:
    """Inputs of a group; -1 stands for all."""
    if size == -1:
        return None
    if not isinstance(size, int) or size < 8 or size % 8:
        raise UnsupportedModelError(
            f"{method} with a group_size of {size!r} is not supported: use a multiple of 8, or -1"
        )
    return size


def _only(stored: Mapping[str, Any], method: str, key: str, *supported: Any) -> None:
    value = stored.get(key)
    if isinstance(value, str):
        value = value.lower()
    if value not in supported:
        known = ", ".join(repr(known) for known in supported if known is not None)
        raise UnsupportedModelError(f"{method} with {key} {value!r} is not supported; supported: {known}")
