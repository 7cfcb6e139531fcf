"""The model's shape, in the form that the brain sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.parts import (
    Dense,
    Experts,
    GroupedQuery,
    Indexer,
    Latent,
    LayerInputs,
    LayerKind,
    QueryScale,
    Recurrence,
    Rope,
    Routing,
    Scales,
)
from forebay.weights.stored import Mxfp4, Stored
from forebay.weights.vision import Sections, Vision

__all__ = ["ModelConfig", "config_of", "has_mxfp4"]

_ROUTING = ("scores", "in_float32", "corrected", "groups", "kept_groups", "best_of_group")
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "clamped_swiglu": "swigluoai",
    "squared_relu": "relu2",
}
_PLAIN = {"squared_relu"}
"""The activations of feed-forward layers without gates."""
_KNOWN = {
    "shape": "family vocab_size hidden_size norm norm_eps embedding_norm scales factors ropes mixers feeds layers "
    "layer_inputs tower quantised max_positions tied headless eos_token_ids",
    "scales": "embeddings inputs residuals logits logit_cap",
    "rope": "dim theta scaling interleaved sections",
    "layer": "mixer rope feed norms keys_of scaled",
    "layer_inputs": "vocab_size size",
    "attention": "kind heads kv_heads head_dim value_dim scale window chunk sinks cap qk_norm value_norm "
    "keys_are_values gate qkv_bias output_bias query_scale both_ways",
    "latent": "kind heads query_rank rank nope_dim rotary_dim value_dim bias scale query_scale chosen",
    "beside": "kind attention recurrence",
    "recurrence": "kind heads key_heads tiled key_dim value_dim channel_decay delta taps conv_bias bias norm "
    "sigmoid_gate low_rank norm_size",
    "none": "kind",
    "dense": "kind intermediate_size activation gated bias",
    "experts": "kind count per_token intermediate_size shared_size gated latent_size shared_gate beside weighs_inputs "
    "activation bias routing normalise scaling",
    "routing": " ".join(_ROUTING),
}
"""The fields of each part of the shape that are read here. If another field has a value, the model needs a feature that
the hand in Python lacks.
"""


@dataclass(frozen=True)
class ModelConfig:
    """The data from which model code builds a model. Sizes count elements; `max_position_embeddings` counts tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    attention: GroupedQuery | Latent
    """The attention of the first layer with attention. `heads` returns that of each layer."""
    feeds: tuple[Dense | Experts | None, ...]
    """The feed-forward part of each layer, after the attention; None: the layer has none."""
    rms_norm_eps: float
    kinds: tuple[LayerKind, ...]
    """Other differences between layers, one entry per layer."""
    ropes: tuple[Rope, ...]
    """The rotary embeddings."""
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: str
    """The activation of feed-forward parts, by its name in Transformers, or in vLLM (`swigluoai`)."""
    eos_token_ids: tuple[int, ...]
    stored: Stored | None = None
    """The quantisation of the checkpoint's matrices; None: they are not quantised."""
    indexer: Indexer | None = None
    """The indexer; None: queries attend to their whole context."""
    vision: Vision | None = None
    """The vision tower; None: the model takes no images."""
    sections: Sections | None = None
    """How RoPE uses the three numbers of a position; None: a position has one number."""
    scales: Scales = Scales()
    """Factors of states and logits."""
    wide_norms: bool = False
    """True if norms are float32 for any dtype of the model."""
    mean_norms: bool = False
    """True if norms subtract the mean."""
    headless: bool = False
    """True if the model returns its final states, and has no output head."""
    recurrences: tuple[Recurrence | None, ...] = ()
    """The recurrent part of each layer; None: the layer has none. (): no layer has one."""
    attends: tuple[bool, ...] = ()
    """For each layer, true if it has attention; (): all layers have it."""
    layer_inputs: LayerInputs | None = None
    """The sizes of additional per-layer inputs; None: there are no such inputs."""
    features: int = 0
    """The number of elements of a position's feature, from which a head drafts; 0: no features are stored."""
    embedding_norm: bool = False
    """True if embeddings are normalised before the first layer."""

    @classmethod
    def from_shape(cls, shape: Mapping[str, Any]) -> ModelConfig:
        """Reads the shape of a decoder in the handshake.

        Raises UnsupportedModelError for a part that `forebay.models` can't compute.
        """
        _check(shape)
        first = next(found for found in map(_attending, shape["mixers"]) if found is not None)
        activations = [feed["activation"] for feed in shape["feeds"] if feed["kind"] != "none"]
        layers = shape["layers"]
        rope = next(iter(shape["ropes"]), None) or _no_rope(first)
        return cls(
            architecture=shape["family"],
            vocab_size=shape["vocab_size"],
            hidden_size=shape["hidden_size"],
            attention=_latent(first, rope) if "rank" in first else _grouped(first, rope),
            feeds=tuple(_feed(shape["feeds"][layer["feed"]]) for layer in layers),
            rms_norm_eps=shape["norm_eps"],
            kinds=tuple(_kind(shape, layer) for layer in layers),
            ropes=tuple(Rope(rope["dim"], rope["theta"], rope["scaling"]) for rope in shape["ropes"] or [rope]),
            max_position_embeddings=shape["max_positions"],
            tie_word_embeddings=shape["tied"],
            hidden_act=_ACTIVATIONS[activations[0]],
            eos_token_ids=tuple(shape["eos_token_ids"]),
            stored=None if shape["quantised"] is None else Stored.from_dict(shape["quantised"]),
            indexer=_indexer(shape),
            vision=None if shape["tower"] is None else Vision.from_dict(shape["tower"]),
            sections=None if rope["sections"] is None else Sections.from_dict(rope["sections"]),
            scales=Scales(**shape["scales"]),
            wide_norms=shape["norm"] == "rms_beside_one",
            mean_norms=shape["norm"] == "mean",
            headless=shape["headless"],
            recurrences=_recurrences(shape),
            layer_inputs=None if shape["layer_inputs"] is None else LayerInputs(**shape["layer_inputs"]),
            attends=_attends(shape),
            embedding_norm=shape["embedding_norm"],
        )

    @property
    def both_ways(self) -> bool:
        """True if attention is bidirectional in all layers. Such a model keeps nothing between steps."""
        return isinstance(self.attention, GroupedQuery) and self.attention.both_ways

    @property
    def whole_images(self) -> bool:
        """True if attention within an image is bidirectional."""
        return self.vision is not None and self.vision.both_ways

    @property
    def recurrent(self) -> list[Recurrence]:
        """The recurrences of all recurrent layers."""
        return [one for one in self.recurrences if one is not None]

    @property
    def attending_layers(self) -> int:
        """The number of layers that keep keys and values, or latent rows."""
        return sum(self.attends) if self.attends else self.num_hidden_layers

    def heads(self, layer: int) -> GroupedQuery:
        """Returns the attention of a layer that keeps keys and values per head, not latent rows."""
        own = self.kinds[layer].heads
        if own is not None:
            return own
        assert isinstance(self.attention, GroupedQuery)
        return self.attention

    @property
    def query_scale(self) -> QueryScale | None:
        """The position-dependent factor of queries, in the layers that use it; None: no layer does."""
        if isinstance(self.attention, Latent):
            return self.attention.query_scale
        scales = (self.heads(layer).query_scale for layer in range(len(self.kinds)))
        return next((scale for scale in scales if scale is not None), None)

    @property
    def kept_heads(self) -> list[GroupedQuery]:
        """The attention of each layer that keeps separate keys and values of heads."""
        return [
            self.heads(layer)
            for layer, kind in enumerate(self.kinds)
            if kind.keys_of is None and (not self.attends or self.attends[layer])
        ]

    def number(self, layer: int) -> int:
        """Returns the index of a layer among the layers with attention. Other layers have no pages."""
        return sum(self.attends[:layer]) if self.attends else layer

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the recurrent states of one slot over all layers; 0: there are none."""
        return sum(one.state_bytes(dtype.itemsize) for one in self.recurrent)

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers that are computed. A checkpoint may contain more."""
        return len(self.feeds)

    def feed(self, layer: int) -> Dense | Experts | None:
        """Returns the feed-forward part after the attention of a layer; None: there is none."""
        return self.feeds[layer]

    @property
    def longest_context(self) -> int:
        """The largest number of positions of a request.

        With YaRN it may exceed `max_position_embeddings`, as in vLLM.
        """
        longest = self.max_position_embeddings
        for rope in self.ropes:
            scaling = rope.scaling or {}
            if scaling.get("rope_type") == "yarn":
                original = float(scaling.get("original_max_position_embeddings") or self.max_position_embeddings)
                longest = max(longest, int(original * float(scaling["factor"])))
        return longest


def has_mxfp4(model: ModelConfig | EncoderConfig) -> bool:
    """True if the checkpoint's experts are MXFP4 blocks in safetensors."""
    return isinstance(model, ModelConfig) and model.stored is not None and isinstance(model.stored.scheme, Mxfp4)


def config_of(shape: Mapping[str, Any]) -> ModelConfig | EncoderConfig:
    """Reads the configuration of a model of any kind. Raises UnsupportedModelError."""
    try:
        if "encoder" in shape:
            return EncoderConfig.from_shape(shape["encoder"])
        return ModelConfig.from_shape(shape["decoder"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"the config has a shape that makes no sense: {type(error).__name__}: {error}") from error


def _check(shape: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for parts that the hand in Python does not compute."""
    _only("shape", shape)
    _only("scales", shape["scales"])
    _known("norms", shape["norm"], "rms", "rms_beside_one", "mean")
    for rope in shape["ropes"]:
        _only("rope", rope)
    for layer in shape["layers"]:
        _only("layer", layer)
        _known("norms of layers", layer["norms"], "before", "before_feed", "after", "around", "parallel")
    mixers, feeds = shape["mixers"], shape["feeds"]
    for mixer in mixers:
        _known("layers", mixer["kind"], "attention", "latent", "recurrence", "beside", "none")
        _only(mixer["kind"], mixer)
        if mixer["kind"] == "beside":
            _only("attention", mixer["attention"])
            _only("recurrence", mixer["recurrence"])
    mixers = [found for found in map(_attending, mixers) if found is not None]
    if not mixers:
        raise UnsupportedModelError("layers without attention alone are not supported by PyTorch's hand")
    kinds = {"latent" if "rank" in mixer else "attention" for mixer in mixers}
    if len(kinds) > 1:
        raise UnsupportedModelError("attention of several kinds is not supported by PyTorch's hand")
    if kinds == {"attention"}:
        factors = [mixer["query_scale"] for mixer in mixers if mixer["query_scale"] is not None]
        if any(factor != factors[0] for factor in factors):
            raise UnsupportedModelError("factors of queries that differ are not supported by PyTorch's hand")
        for mixer in mixers:
            _known("norms of queries and keys", mixer["qk_norm"], "none", "heads", "rows", "plain")
            _known("lengths of values", mixer["value_dim"], mixer["head_dim"])
        for rope in shape["ropes"]:
            _known("rotated neighbours", rope["interleaved"], False)
        if shape["layer_inputs"] is not None:
            _only("layer_inputs", shape["layer_inputs"])
    elif any(layer["rope"] not in (0, None) or layer["norms"] != "before" for layer in shape["layers"]):
        raise UnsupportedModelError(
            "latent attention with positions or norms of other kinds is not supported by PyTorch's hand"
        )
    for feed in feeds:
        _known("feed-forward parts", feed["kind"], "dense", "experts", "none")
        _only(feed["kind"], feed)
        if feed["kind"] == "none":
            continue
        gated = _ACTIVATIONS.keys() - _PLAIN if feed["kind"] == "dense" else ("silu", "gelu_tanh", "clamped_swiglu")
        _known("activations", feed["activation"], *(gated if feed["gated"] else _PLAIN))
        if feed["kind"] == "experts":
            _only("routing", feed["routing"])


def _only(part: str, values: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError if a part has a value in a field that is not read here."""
    known = _KNOWN[part].split()
    for key, value in values.items():
        # 0 may be a layer's index, so it counts as a value; False counts as absent.
        is_absent = value is None or value is False or value in ([], {})
        if key not in known and not is_absent:
            raise UnsupportedModelError(f"{key} {value!r} of {part} is not supported by PyTorch's hand")


def _known(what: str, value: Any, *supported: Any) -> None:
    if value not in supported:
        raise UnsupportedModelError(f"{what} of the kind {value!r} are not supported by PyTorch's hand")


def _kind(shape: Mapping[str, Any], layer: Mapping[str, Any]) -> LayerKind:
    attention = _attending(shape["mixers"][layer["mixer"]])
    if attention is None:
        return LayerKind(layer["rope"], None, None, layer["norms"], scaled=layer["scaled"])
    first = next(found for found in map(_attending, shape["mixers"]) if found is not None)
    heads = None
    if "rank" not in attention and not _alike(attention, first):
        heads = _grouped(attention, _no_rope(attention) if layer["rope"] is None else shape["ropes"][layer["rope"]])
    return LayerKind(
        layer["rope"],
        attention.get("window"),
        attention.get("chunk"),
        layer["norms"],
        heads=heads,
        keys_of=layer["keys_of"],
        scaled=layer["scaled"],
    )


def _alike(attention: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two attentions differ only in the mask."""
    ignored = {"kind": None, "window": None, "chunk": None}
    return {**attention, **ignored} == {**other, **ignored}


def _attending(mixer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the attention of a mixer, with heads or latent; None: the mixer has no attention."""
    if mixer["kind"] == "beside":
        beside: Mapping[str, Any] = mixer["attention"]
        return beside
    return mixer if mixer["kind"] in ("attention", "latent") else None


def _recurring(mixer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the recurrence of a mixer; None: the mixer has no state."""
    if mixer["kind"] == "beside":
        beside: Mapping[str, Any] = mixer["recurrence"]
        return beside
    return mixer if mixer["kind"] == "recurrence" else None


def _no_rope(mixer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a placeholder rotary embedding for a model without rotation. It is never applied."""
    dim = mixer["rotary_dim"] if "rank" in mixer else mixer["head_dim"]
    return {"dim": dim, "theta": 10000.0, "scaling": None, "interleaved": False, "sections": None}


def _grouped(mixer: Mapping[str, Any], rope: Mapping[str, Any]) -> GroupedQuery:
    return GroupedQuery(
        heads=mixer["heads"],
        kv_heads=mixer["kv_heads"],
        head_dim=mixer["head_dim"],
        rotary_dim=rope["dim"],
        qkv_bias=mixer["qkv_bias"],
        output_bias=mixer["output_bias"],
        qk_norm=mixer["qk_norm"] == "heads",
        query_scale=_query_scale(mixer),
        scale=mixer["scale"],
        row_norms=mixer["qk_norm"] == "rows",
        cap=mixer["cap"],
        sinks=mixer["sinks"],
        gate=mixer["gate"],
        plain_norms=mixer["qk_norm"] == "plain",
        value_norm=mixer["value_norm"],
        keys_are_values=mixer["keys_are_values"],
        both_ways=mixer["both_ways"],
    )


def _recurrences(shape: Mapping[str, Any]) -> tuple[Recurrence | None, ...]:
    found = [_recurring(shape["mixers"][layer["mixer"]]) for layer in shape["layers"]]
    if all(one is None for one in found):
        return ()
    names = _KNOWN["recurrence"].split()[1:]
    return tuple(None if one is None else Recurrence(**{name: one[name] for name in names}) for one in found)


def _attends(shape: Mapping[str, Any]) -> tuple[bool, ...]:
    found = tuple(_attending(shape["mixers"][layer["mixer"]]) is not None for layer in shape["layers"])
    return () if all(found) else found


def _latent(mixer: Mapping[str, Any], rope: Mapping[str, Any]) -> Latent:
    names = ("heads", "query_rank", "rank", "nope_dim", "rotary_dim", "value_dim", "bias", "scale")
    own = {name: mixer[name] for name in names}
    return Latent(**own, interleaved=rope["interleaved"], query_scale=_query_scale(mixer))


def _query_scale(mixer: Mapping[str, Any]) -> QueryScale | None:
    found = mixer["query_scale"]
    return None if found is None else QueryScale(found["beta"], found["every"], found["first"])


def _feed(feed: Mapping[str, Any]) -> Dense | Experts | None:
    if feed["kind"] == "none":
        return None
    if feed["kind"] == "dense":
        return Dense(feed["intermediate_size"], feed["bias"], feed["gated"])
    rule = {name: feed["routing"][name] for name in _ROUTING}
    routing = Routing(**rule, normalise=feed["normalise"], scaling=feed["scaling"])
    names = (
        *("count", "per_token", "intermediate_size", "shared_size", "shared_gate", "bias", "gated", "latent_size"),
        *("beside", "weighs_inputs"),
    )
    return Experts(**{name: feed[name] for name in names}, routing=routing)


def _indexer(shape: Mapping[str, Any]) -> Indexer | None:
    choices = [shape["mixers"][layer["mixer"]].get("chosen", {"kind": "all"}) for layer in shape["layers"]]
    indexed = [(layer, choice) for layer, choice in enumerate(choices) if choice["kind"] == "indexed"]
    if not indexed:
        return None
    found = {name: indexed[0][1][name] for name in ("heads", "head_dim", "interleaved", "top_k")}
    return Indexer(**found, layers=tuple(layer for layer, _ in indexed))
