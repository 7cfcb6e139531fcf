"""Models with images: the shape of their vision tower, their rotary positions, and the input of the tower."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.files import read_json
from forebay.weights.sizes import MOST, MOST_HEADS, MOST_LAYERS, real, size

__all__ = [
    "DECODERS",
    "PREPROCESSOR_FILES",
    "QWEN3_VL_MOE",
    "TOWER",
    "Preprocessing",
    "Sections",
    "Vision",
    "decoder_config",
    "own_name",
    "read_preprocessing",
    "sections_of",
    "vision_of",
]

_QWEN3_VL = "Qwen3VLForConditionalGeneration"
_QWEN25_VL = "Qwen2_5_VLForConditionalGeneration"

QWEN3_VL_MOE = "Qwen3VLMoeForConditionalGeneration"
_OF_QWEN3 = (_QWEN3_VL, QWEN3_VL_MOE)

DECODERS = {_QWEN3_VL: "Qwen3ForCausalLM", QWEN3_VL_MOE: "Qwen3MoeForCausalLM", _QWEN25_VL: "Qwen2ForCausalLM"}
"""Architectures with a vision tower, and the architecture of their decoder."""
TOWER = "visual"
"""The prefix of the names of a tower's weights."""
PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that `read_preprocessing` reads. transformers 5 writes the second."""

_CHANNELS = 3
_MOST_SIDE = 1 << 10
_MOST_OF_TOWER = {
    "depth": MOST_LAYERS,
    "num_heads": MOST_HEADS,
    "patch_size": _MOST_SIDE,
    "spatial_merge_size": _MOST_SIDE,
    "temporal_patch_size": _MOST_SIDE,
}
"""The largest sizes of a tower that have bounds of their own."""
_MOST_PIXELS = 1 << 31
_ACTIVATIONS = {_QWEN3_VL: "gelu_pytorch_tanh", QWEN3_VL_MOE: "gelu_pytorch_tanh", _QWEN25_VL: "silu"}
_DEFAULT_SECTIONS = {_QWEN3_VL: (24, 20, 20), QWEN3_VL_MOE: (24, 20, 20), _QWEN25_VL: (16, 24, 24)}
"""The default sections of transformers for a config without `mrope_section`."""
_DEFAULT_DEEPSTACK = (8, 16, 24)
_DEFAULT_WHOLE = (7, 15, 23, 31)
_ROPE_THETA = 10000.0
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")
_BICUBIC = 3


@dataclass(frozen=True)
class Vision:
    """A vision tower (Qwen2.5-VL and Qwen3-VL, 2025). Sizes are numbers of elements, patches or pixels."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    patch: int
    """Pixels of a side of a patch."""
    temporal: int
    """The number of times that a patch of a still image is repeated."""
    merge: int
    """Patches of a side of a square, which becomes one position of the decoder."""
    out_size: int
    """Elements of a position for the decoder, as many as its states have."""
    theta: float
    """The base of its rotary frequencies."""
    deepstack: tuple[int, ...] = ()
    """Layers whose states the decoder also gets, behind its own first layers (DeepStack, 2024)."""
    table_side: int | None = None
    """Rows and columns of the learned table of positions; None: there is none."""
    window: int | None = None
    """Decoder positions of a side of a window; None: every layer attends to the whole image."""
    whole: tuple[int, ...] = ()
    """The layers that attend to the whole image; the others attend within windows."""

    @property
    def patch_bytes(self) -> int:
        """Bytes of a patch: three colours of each pixel, once."""
        return _CHANNELS * self.patch**2

    @property
    def channels(self) -> int:
        """Colours of a pixel."""
        return _CHANNELS

    @property
    def position_elements(self) -> int:
        """Elements of one position on an image page."""
        return self.out_size * (1 + len(self.deepstack))


@dataclass(frozen=True)
class Sections:
    """The shares of a position's three numbers in the rotary frequencies (M-RoPE, Qwen2-VL, 2024)."""

    counts: tuple[int, int, int]
    """Frequencies of time, row and column."""
    interleaved: bool
    """True if rows and columns take every third of the first frequencies, and time the rest.

    Otherwise they follow another.
    """

    def axes(self, frequencies: int) -> list[int]:
        """The number that each frequency uses: 0 time, 1 row, 2 column."""
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.counts) for _ in range(count)]
        axes = [0] * frequencies
        for axis in (1, 2):
            for at in range(axis, min(3 * self.counts[axis], frequencies), 3):
                axes[at] = axis
        return axes


@dataclass(frozen=True)
class Preprocessing:
    """The way from an image to a tower's input. A decoder of images needs all of it."""

    patch: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    """The mean of each colour, for colours in 0 .. 1. It is subtracted."""
    std: tuple[float, float, float]
    """The divisor of the differences."""
    rescale: float
    """The factor that makes 0 .. 1 of 0 .. 255."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Reads the output of `to_dict`; further keys are ignored."""
        chosen = {field.name: values[field.name] for field in fields(cls)}
        return cls(**{**chosen, "mean": tuple(chosen["mean"]), "std": tuple(chosen["std"])})

    def to_dict(self) -> dict[str, Any]:
        """The preprocessing, in JSON's types."""
        return asdict(self)

    @property
    def most_positions(self) -> int:
        """Decoder positions of the largest image."""
        return self.max_pixels // (self.patch * self.merge) ** 2


def own_name(name: str) -> str:
    """A tensor's name here, in models with a tower. Releases of transformers have several names for it."""
    name = name.removeprefix("model.") if name.startswith(f"model.{TOWER}.") else name
    return name.replace("model.language_model.", "model.", 1)


def decoder_config(d: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The `config.json` of such a model's decoder. Older checkpoints do not nest it."""
    text = d.get("text_config") or {}
    flat = {key: value for key, value in d.items() if key not in ("text_config", "vision_config")}
    flat |= {key: value for key, value in text.items() if value is not None}
    tied = bool(d.get("tie_word_embeddings", False))
    flat["tie_word_embeddings"] = tied or (architecture == _QWEN25_VL and bool(text.get("tie_word_embeddings")))
    rope = dict(flat.get("rope_parameters") or flat.pop("rope_scaling", None) or {})
    for key in ("mrope_section", "mrope_interleaved"):
        rope.pop(key, None)
    for key in ("type", "rope_type"):
        if rope.get(key) == "mrope":
            rope[key] = "default"
    flat["rope_parameters"] = rope
    return flat


def sections_of(d: Mapping[str, Any], architecture: str, frequencies: int) -> Sections | None:
    """The shares of the decoder's `frequencies`; None: each position has one number. Raises UnsupportedModelError."""
    if architecture not in DECODERS:
        return None
    flat = {**d, **(d.get("text_config") or {})}
    rope = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    counts = tuple(int(count) for count in rope.get("mrope_section") or _DEFAULT_SECTIONS[architecture])
    if len(counts) != 3 or min(counts) < 1 or sum(counts) != frequencies:
        raise UnsupportedModelError(
            f"mrope_section {list(counts)} does not share the {frequencies} rotary frequencies of a head among three"
        )
    time, row, column = counts
    return Sections((time, row, column), interleaved=architecture in _OF_QWEN3)


def vision_of(d: Mapping[str, Any], architecture: str, hidden: int, layers: int) -> Vision | None:
    """The tower before a decoder of `layers` with states of `hidden` elements; None: there is none.

    Raises UnsupportedModelError for a tower that would be computed wrongly.
    """
    if architecture not in DECODERS:
        return None
    v = d.get("vision_config")
    if not isinstance(v, Mapping):
        raise UnsupportedModelError("the model's config has no 'vision_config'")
    sizes = {
        key: size(v, key, *others, most=_MOST_OF_TOWER.get(key, MOST))
        for key, *others in (
            ("depth", "num_hidden_layers"),
            ("hidden_size",),
            ("intermediate_size",),
            ("num_heads", "num_attention_heads"),
            ("patch_size",),
            ("spatial_merge_size",),
            ("temporal_patch_size",),
            ("out_hidden_size",),
        )
    }
    _known(v, "hidden_act", _ACTIVATIONS[architecture])
    for key in ("in_channels", "in_chans"):
        _known(v, key, _CHANNELS)
    if sizes["hidden_size"] % (4 * sizes["num_heads"]):
        raise UnsupportedModelError(
            f"a tower of {sizes['num_heads']} heads (num_heads) can't turn a quarter of each head's share of "
            f"{sizes['hidden_size']} elements (hidden_size) by rows"
        )
    if sizes["out_hidden_size"] != hidden:
        raise UnsupportedModelError(
            f"the tower gives {sizes['out_hidden_size']} elements (out_hidden_size), and the decoder takes {hidden}"
        )
    own = _of_qwen3(v, sizes["depth"], layers) if architecture in _OF_QWEN3 else _of_qwen25(v, sizes)
    return Vision(
        layers=sizes["depth"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        heads=sizes["num_heads"],
        patch=sizes["patch_size"],
        temporal=sizes["temporal_patch_size"],
        merge=sizes["spatial_merge_size"],
        out_size=hidden,
        theta=real(v.get("rope_parameters") or {}, "rope_theta", _ROPE_THETA),
        **own,
    )


def read_preprocessing(directory: Path, vision: Vision) -> Preprocessing:
    """The preprocessing of a repository for its tower. Raises ModelError, also for unsupported values."""
    found: dict[str, Any] = {}
    for name in PREPROCESSOR_FILES:
        values = read_json(directory / name, optional=True)
        found = values.get("image_processor") or values
        if "image_mean" in found:
            break
    else:
        raise ModelError(f"{directory} has no {PREPROCESSOR_FILES[0]}, which says how images become patches")
    _known(found, "image_processor_type", *_PROCESSORS)
    _known(found, "resample", _BICUBIC)
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        _known(found, key, True)
    edges = found.get("size") or {}
    try:
        smallest = int(found.get("min_pixels") or edges.get("shortest_edge") or edges["min_pixels"])
        largest = int(found.get("max_pixels") or edges.get("longest_edge") or edges["max_pixels"])
        read = Preprocessing(
            patch=int(found["patch_size"]),
            merge=int(found["merge_size"]),
            temporal=int(found["temporal_patch_size"]),
            min_pixels=smallest,
            max_pixels=largest,
            mean=_three(found["image_mean"]),
            std=_three(found["image_std"]),
            rescale=float(found.get("rescale_factor", 1 / 255)),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ModelError(f"{directory} says about images what can't be read: {error}") from error
    if not 1 <= smallest <= largest <= _MOST_PIXELS:
        raise ModelError(f"{directory} has images of {smallest} to {largest} pixels (size, min_pixels, max_pixels)")
    if min(read.std) <= 0:
        raise ModelError(f"{directory} divides colours by {min(read.std)} (image_std)")
    towers = vision.patch, vision.merge, vision.temporal
    if (read.patch, read.merge, read.temporal) != towers:
        raise ModelError(
            f"{directory} makes patches of {read.patch} pixels, {read.merge} a side and {read.temporal} times, "
            f"and the tower wants {', '.join(map(str, towers))}"
        )
    return read


def _of_qwen3(v: Mapping[str, Any], depth: int, layers: int) -> dict[str, Any]:
    deepstack = _layers(v, "deepstack_visual_indexes", _DEFAULT_DEEPSTACK)
    if list(deepstack) != sorted(set(deepstack)) or any(not 0 <= layer < depth for layer in deepstack):
        raise UnsupportedModelError(f"deepstack_visual_indexes {list(deepstack)} are no layers of {depth}, ascending")
    if len(deepstack) > layers:
        raise UnsupportedModelError(f"a decoder of {layers} layers can't take {len(deepstack)} deepstack outputs")
    positions = size(v, "num_position_embeddings")
    side = math.isqrt(positions)
    if side * side != positions:
        raise UnsupportedModelError(f"a table of {positions} positions (num_position_embeddings) is no square")
    return {"deepstack": deepstack, "table_side": side}


def _of_qwen25(v: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    window = size(v, "window_size") // sizes["spatial_merge_size"] // sizes["patch_size"]
    if window < 1:
        raise UnsupportedModelError(f"a window of {v['window_size']} pixels (window_size) has no position in it")
    return {"window": window, "whole": _layers(v, "fullatt_block_indexes", _DEFAULT_WHOLE)}


def _layers(v: Mapping[str, Any], key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of layers. Absent ones are transformers' defaults."""
    found = v.get(key)
    return default if found is None else tuple(size({key: layer}, key, least=0) for layer in found)


def _known(values: Mapping[str, Any], key: str, *supported: Any) -> None:
    value = values.get(key)
    if value is not None and value not in supported:
        names = ", ".join(map(str, supported))
        raise UnsupportedModelError(f"{key} {value!r} of images is not supported; supported here: {names}")


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue
