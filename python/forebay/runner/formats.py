"""The formats of a model's matrices, by its configuration and its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from forebay.compute.choose import Choice
from forebay.layers.params import Parameters
from forebay.state.config import RunnerConfig
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError
from forebay.weights.load import kept_matrices, stored_formats
from forebay.weights.quantization import AUTO, COMPUTED_AS, PLAIN, Formats, Kept, is_of_expert
from forebay.weights.stored import Fp8, Mxfp4
from forebay.weights.vision import TOWER

__all__ = ["blocks", "formats", "quantization"]


def quantization(config: RunnerConfig, choice: Choice) -> str | None:
    """The configured format of products. `auto` becomes `gguf` where blocks of a file are quicker, or None."""
    if config.quantization != AUTO:
        return config.quantization
    model = config.model_config
    return "gguf" if isinstance(model, ModelConfig) and choice.prefers_blocks(model) else None


def formats(
    config: RunnerConfig, model: ModelConfig | EncoderConfig, choice: Choice, kept: Mapping[str, str] | None
) -> Formats:
    """The formats of all matrices. `kept`: `Formats.stored` of an earlier start; None: the file has to be read."""
    wanted = quantization(config, choice)
    if isinstance(model, EncoderConfig):
        return Formats(int8=True) if wanted == "w8a8_int8" else PLAIN
    stored = _stored(config, wanted == "gguf", model, choice, kept)
    if wanted == "w8a8_int8":
        return Formats(int8=True, stored=stored)
    if wanted == "gguf" or stored:
        return Formats(stored=stored)
    return Formats(kept=_matrices_kept(config, model, choice))


def _stored(
    config: RunnerConfig, everything: bool, model: ModelConfig, choice: Choice, kept: Mapping[str, str] | None
) -> Mapping[str, str]:
    """The types in a GGUF file of those matrices that stay in its blocks, by name."""
    if not everything and not choice.keeps_experts(model):
        return {}
    if kept is not None:
        return kept
    stored = stored_formats(config.model, model)
    return stored if everything else {name: kind for name, kind in stored.items() if is_of_expert(name)}


def _matrices_kept(config: RunnerConfig, model: ModelConfig, choice: Choice) -> Kept | None:
    """The matrices that may be kept in their bits."""
    if choice.products() is None:
        return None
    stored = model.stored
    if stored is None:
        # All that layers multiply by; heads and towers stay as they are.
        made = config.quantization == "fp8"
        return Kept(Fp8(), lambda name: not name.startswith(TOWER)) if made else None
    if isinstance(stored.scheme, Mxfp4):
        return None
    if config.load_format == "dummy":
        return Kept(stored.scheme, lambda name: not stored.leaves_out(name.removesuffix(".weight")))
    return Kept(stored.scheme, kept_matrices(config.model).__contains__)


def blocks(params: Parameters, dtype: str, insists: bool) -> str:
    """The matrices that are computed in the blocks of a file, in words; empty: there are none.

    `dtype`: the name of the model's type. Raises `ModelError` if the user insists on blocks and there are none.
    """
    if not params.stored:
        if not insists:
            return ""
        raise ModelError(
            f"quantization gguf knows {', '.join(COMPUTED_AS)}, and no matrix of the file is of these types"
        )
    kinds = Counter((params.formats.stored[name], kind) for name, kind in params.stored.items())
    named = ", ".join(
        f"{count} {kind}" if kind == stored else f"{count} {stored} as {kind}"
        for (stored, kind), count in sorted(kinds.items())
    )
    others = params.matrices - kinds.total()
    rest = f"; {others} matrices in {dtype}" if others else ""
    return named + rest
