"""The vector that a model makes of a prompt in place of tokens, by the files of its repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forebay.weights.encoder_config import is_encoder
from forebay.weights.errors import UnsupportedModelError
from forebay.weights.files import read_json, read_json_list

__all__ = ["Pooling", "read_pooling"]

_SCORERS = ("BertForSequenceClassification",)
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_NAMES = {"lasttoken": "last", "last_token": "last"}


@dataclass(frozen=True)
class Pooling:
    """The way from the hidden states of a prompt to one vector, and the brain's work on that vector."""

    task: str
    """The task. `embed`: the vector is the answer. `score`: it is one logit, the score of a pair of texts."""
    kind: str
    """The kind: `mean` of all positions, `cls` (the first) or `last`. `causal_mean` is the mean of a causal model."""
    size: int
    """The number of elements of a vector."""
    normalize: bool
    """True if vectors are divided by their Euclidean length."""
    sigmoid: bool
    """True if a logit is squeezed into 0 .. 1."""
    max_length: int | None
    """The longest prompt, in tokens, that the model's authors use; None: the model's number of positions."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Pooling:
        """Reads the output of `to_dict`."""
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The pooling, in JSON's types."""
        return asdict(self)


def read_pooling(config: dict[str, Any], directory: Path | None, *, forced: bool) -> Pooling | None:
    """The pooling of the model of a `config.json` in `directory`; None: it generates.

    Encoders and repositories in the layout of sentence-transformers always pool. With `forced` any causal model pools:
    by the last token's state, normalised. Raises UnsupportedModelError for a model that would be pooled wrongly.
    """
    modules = _modules(directory)
    architectures = [str(name) for name in config.get("architectures") or []]
    encoder = is_encoder(config)
    headless = any(name.endswith("Model") for name in architectures)
    if not (forced or encoder or headless or modules):
        return None
    settings = read_json(directory / "sentence_bert_config.json", optional=True) if directory else {}
    max_length = settings.get("max_seq_length")
    if any(name in _SCORERS for name in architectures):
        return Pooling("score", "cls", _labels(config), False, _sigmoid(config), _length(max_length))
    # Without a word from the repository or the GGUF file: what other engines do.
    usual = str(config.get("pooling_type") or ("cls" if encoder else "last"))
    kind, normalize = _of_modules(modules, directory) if modules else (usual, True)
    if not encoder and _sees_all(config):
        raise UnsupportedModelError("a decoder whose positions see what is behind them is not supported")
    if kind not in (("cls", "mean") if encoder else ("last", "mean")):
        what = "an encoder" if encoder else "a causal model"
        raise UnsupportedModelError(f"pooling {kind!r} of {what} is not supported")
    if not encoder and kind == "mean":
        kind = "causal_mean"
    return Pooling("embed", kind, int(config.get("hidden_size") or 0), normalize, False, _length(max_length))


def _sees_all(config: Mapping[str, Any]) -> bool:
    """True if a decoder was trained on to be an encoder, as configurations say it."""
    return config.get("is_causal") is False or bool(config.get("use_bidirectional_attention"))


def _modules(directory: Path | None) -> list[Mapping[str, Any]]:
    found = read_json_list(directory / "modules.json") if directory else []
    return [module for module in found if isinstance(module, Mapping)]


def _of_modules(modules: list[Mapping[str, Any]], directory: Path | None) -> tuple[str, bool]:
    kind, normalize = None, False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling" and directory is not None:
            kind = _kind(read_json(directory / str(module.get("path", "")) / "config.json"))
        elif name == "Normalize":
            normalize = True
        elif name != "Transformer":
            raise UnsupportedModelError(f"the sentence-transformers module {name} is not supported")
    if kind is None:
        raise UnsupportedModelError("modules.json names no Pooling module")
    return kind, normalize


def _kind(config: Mapping[str, Any]) -> str:
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        return _NAMES.get(mode, mode)
    chosen = [kind for key, kind in _MODES.items() if config.get(key)]
    if len(chosen) != 1:
        raise UnsupportedModelError(f"pooling by {' and '.join(chosen) or 'nothing'} is not supported")
    return chosen[0]


def _labels(config: Mapping[str, Any]) -> int:
    labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))
    if labels != 1:
        raise UnsupportedModelError(f"a classifier of {labels} labels is not supported: only cross-encoders of one are")
    return 1


def _sigmoid(config: Mapping[str, Any]) -> bool:
    own = config.get("sentence_transformers") or {}
    function = str(own.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "Sigmoid")
    name = function.rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise UnsupportedModelError(f"the activation {function} of scores is not supported")
    return name == "Sigmoid"


def _length(value: Any) -> int | None:
    return None if value is None else int(value)
