"""The shared library `crates/kernels` and its C interface."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

VERSION = 15
PARTS = ("norm", "qkv", "keep", "attend", "output", "gate_up", "down", "head")
"""The timed parts of a step."""
LEVELS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "baseline")
"""Levels of instructions with kernels, best first. The library knows those of its own kind of processor."""
WITH_BYTES = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2")
"""The levels with products of bytes, for quantised matrices."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "swigluoai")
"""The functions of gates, by their numbers in the library."""
SCORES = ("softmax", "sigmoid")
"""The ways to score experts, by their numbers in the library."""
FORMATS = {"INT8": 1, "Q8_0": 2, "Q4_0": 3, "Q4_1": 4, "MXFP4": 5, "IQ4_NL": 6}
"""The numbers of quantised formats. 0 is a matrix of the model's dtype."""
CHOICES = ("native", "torch", *LEVELS)
"""The values of FOREBAY_KERNELS."""
NAME = {"darwin": "libforebay_kernels.dylib"}.get(sys.platform, "libforebay_kernels.so")


class KernelsUnavailableError(RuntimeError):
    """The library is missing, or has another version than this code."""


class TeamSpec(Structure):
    """Entry points of the running OpenMP. All are null if there is none."""

    _fields_ = [(name, c_void_p) for name in ("parallel", "barrier", "thread", "threads")]


class ExpertsSpec(Structure):
    """The experts of one layer; see `crates/kernels/src/experts/mod.rs`."""

    _fields_ = [
        *((name, c_void_p) for name in ("router", "correction", "gate_up", "down")),
        ("formats", c_uint32 * 2),
        *((name, c_void_p) for name in ("shared_gate", "router_bias", "gate_up_bias", "down_bias")),
    ]


class RoutingSpec(Structure):
    """The experts of a model and the rule of their choice; see `crates/kernels/src/experts/routing.rs`."""

    _fields_ = [
        *(
            (name, c_uint32)
            for name in (
                "count",
                "per_token",
                "intermediate",
                "shared",
                "scores",
                "in_float32",
                "groups",
                "kept_groups",
                "best_of_group",
                "normalise",
            )
        ),
        ("scaling", c_float),
    ]


class AttentionSpec(Structure):
    """A kind of attention; see `crates/kernels/src/layer.rs`."""

    _fields_ = [
        *((name, c_uint32) for name in ("heads", "kv_heads", "head_dim", "rotary_dim", "window", "chunk", "norm_rows")),
        *((name, c_float) for name in ("scale", "cap")),
        ("gate", c_uint32),
        *((name, c_void_p) for name in ("cos", "sin")),
    ]


class LayerSpec(Structure):
    """One layer; see `crates/kernels/src/layer.rs`."""

    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                "input_norm",
                "qkv",
                "qkv_bias",
                "q_norm",
                "k_norm",
                "output",
                "output_bias",
                "post_norm",
                "gate_up",
                "gate_up_bias",
                "down",
                "down_bias",
                "keys",
                "values",
                "attended_norm",
                "fed_norm",
                "sinks",
            )
        ),
        ("formats", c_uint32 * 4),
        ("attention", c_uint32),
        ("parallel", c_uint32),
        ("experts", ExpertsSpec),
        ("recurrence", c_void_p),
    ]


class ModelSpec(Structure):
    """A decoder; see `crates/kernels/src/model.rs`."""

    _fields_ = [
        *(
            (name, c_uint32)
            for name in (
                "dtype",
                "layers",
                "hidden",
                "intermediate",
                "vocabulary",
                "positions",
                "page_size",
                "page_count",
                "threads",
                "attentions",
                "mean_norms",
                "wide_norms",
                "activation",
            )
        ),
        *(
            (name, c_float)
            for name in ("eps", "embedding_scale", "input_scale", "residual_scale", "logit_scale", "logit_cap")
        ),
        *((name, c_void_p) for name in ("embedding", "final_norm", "head")),
        ("layer", POINTER(LayerSpec)),
        ("attention", POINTER(AttentionSpec)),
        ("head_format", c_uint32),
        ("routing", RoutingSpec),
        ("kv_codes", c_uint32),
        ("query_scales", c_void_p),
    ]


class StepSpec(Structure):
    """A step; see `crates/kernels/src/model.rs`."""

    _fields_ = [
        ("rows", c_uint64),
        *((name, c_void_p) for name in ("slot", "start", "length")),
        ("tokens", c_void_p),
        ("token_stride", c_uint64),
        ("pages", c_void_p),
        ("page_stride", c_uint64),
        ("sample", c_void_p),
        ("sampled", c_uint64),
        *((name, c_void_p) for name in ("given", "given_until")),
        *((name, c_void_p) for name in ("logits", "best", "finite", "times", "states", "vectors", "state_rows")),
    ]


class EncoderLayerSpec(Structure):
    """One layer of an encoder; see `crates/kernels/src/encoder/mod.rs`."""

    _fields_ = [
        *(
            (name, c_void_p)
            for part in ("qkv", "output", "attention_norm", "up", "down", "output_norm")
            for name in (part, f"{part}_bias")
        ),
        ("formats", c_uint32 * 4),
    ]


class EncoderSpec(Structure):
    """An encoder; see `crates/kernels/src/encoder/mod.rs`."""

    _fields_ = [
        *(
            (name, c_uint32)
            for name in (
                "dtype",
                "layers",
                "hidden",
                "heads",
                "intermediate",
                "vocabulary",
                "positions",
                "kinds",
                "activation",
                "pooling",
                "scores",
                "threads",
            )
        ),
        ("eps", c_float),
        *((name, c_void_p) for name in ("words", "places", "texts")),
        *((name, c_void_p) for part in ("norm", "pooler", "classifier") for name in (part, f"{part}_bias")),
        ("layer", POINTER(EncoderLayerSpec)),
    ]


class BatchSpec(Structure):
    """Prompts for an encoder; see `crates/kernels/src/encoder/mod.rs`."""

    _fields_ = [
        ("rows", c_uint64),
        *((name, c_void_p) for name in ("slot", "length", "segment", "tokens")),
        ("token_stride", c_uint64),
        ("vectors", c_void_p),
    ]


@cache
def library() -> ctypes.CDLL:
    """The loaded library; raises `KernelsUnavailableError`."""
    path = Path(__file__).with_name(NAME)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailableError(f"the compiled kernels cannot be loaded: {error}") from error
    if loaded.fb_version() != VERSION:
        raise KernelsUnavailableError(
            f"{path} has version {loaded.fb_version()}, this code needs {VERSION}: rebuild it"
        )
    loaded.fb_level.restype = c_char_p
    loaded.fb_build.restype = c_char_p
    loaded.fb_limit.argtypes = [c_char_p]
    loaded.fb_limit.restype = c_bool
    loaded.fb_packed_len.argtypes = [c_size_t, c_size_t, c_bool]
    loaded.fb_packed_len.restype = c_size_t
    loaded.fb_pack.argtypes = [c_uint32, c_void_p, c_size_t, c_size_t, c_bool, c_void_p]
    loaded.fb_pack.restype = None
    loaded.fb_quantised_bytes.argtypes = [c_uint32, c_size_t, c_size_t, c_bool]
    loaded.fb_quantised_bytes.restype = c_size_t
    loaded.fb_quantise.argtypes = [c_uint32, c_void_p, c_size_t, c_size_t, c_bool, c_void_p]
    loaded.fb_quantise.restype = None
    loaded.fb_pack_blocks.argtypes = [c_uint32, c_void_p, c_size_t, c_size_t, c_size_t, c_bool, c_void_p]
    loaded.fb_pack_blocks.restype = c_bool
    loaded.fb_model_new.argtypes = [POINTER(ModelSpec), POINTER(TeamSpec)]
    loaded.fb_model_new.restype = c_void_p
    loaded.fb_model_free.argtypes = [c_void_p]
    loaded.fb_model_free.restype = None
    loaded.fb_step.argtypes = [c_void_p, POINTER(StepSpec)]
    loaded.fb_step.restype = c_int32
    loaded.fb_head.argtypes = [c_void_p, c_void_p, c_size_t, c_void_p]
    loaded.fb_head.restype = None
    loaded.fb_encoder_new.argtypes = [POINTER(EncoderSpec), POINTER(TeamSpec)]
    loaded.fb_encoder_new.restype = c_void_p
    loaded.fb_encoder_free.argtypes = [c_void_p]
    loaded.fb_encoder_free.restype = None
    loaded.fb_encode.argtypes = [c_void_p, POINTER(BatchSpec)]
    loaded.fb_encode.restype = c_int32
    return loaded


def native_wanted() -> bool:
    """True if the compiled kernels compute: by FOREBAY_KERNELS (native, torch), or else if they are there.

    A level (`LEVELS`) in its place means the compiled kernels, with no better instructions than these.
    """
    choice = os.environ.get("FOREBAY_KERNELS")
    if choice == "torch":
        return False
    if choice not in (None, *CHOICES):
        raise ValueError(f"FOREBAY_KERNELS is {choice!r}: use {' or '.join(CHOICES)}")
    try:
        loaded = library()
    except KernelsUnavailableError as error:
        if choice is not None:
            raise
        print(f"computing with PyTorch's operators only, which is slower: {error}", file=sys.stderr)
        return False
    if choice in LEVELS and not loaded.fb_limit(choice.encode()):
        raise ValueError(f"FOREBAY_KERNELS is {choice!r}, which this kind of processor does not have")
    return True


def level() -> str:
    """The instructions that the kernels use on this processor."""
    name: bytes = library().fb_level()
    return name.decode()


def build() -> str:
    """The name of the order of packed weights. Libraries and programs of the same sources have the same name."""
    name: bytes = library().fb_build()
    return name.decode()


def open_mp() -> TeamSpec:
    """The GNU OpenMP that PyTorch has loaded.

    Kernels share its threads, and do not compete with them for processors.
    """
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return TeamSpec()
    paths = {line.split(maxsplit=5)[5] for line in mapped.splitlines() if "libgomp" in line}
    if len(paths) != 1:
        # None, or several teams of threads and no telling which of them PyTorch computes with.
        return TeamSpec()
    gomp = ctypes.CDLL(paths.pop())
    names = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
    return TeamSpec(*(ctypes.cast(getattr(gomp, name), c_void_p) for name in names))
