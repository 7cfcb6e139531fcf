"""Selects the matrices that a device keeps in the checkpoint's quantised format."""

from __future__ import annotations

from forebay.compute.choose import Choice
from forebay.state.config import RunnerConfig
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.load import kept_matrices
from forebay.weights.quantization import Kept
from forebay.weights.stored import Fp8, Mxfp4
from forebay.weights.vision import TOWER

__all__ = ["matrices_kept"]


def matrices_kept(config: RunnerConfig, model: ModelConfig | EncoderConfig, choice: Choice) -> Kept | None:
    """Returns the matrices that are kept in a quantised format; None: all are dequantised."""
    if isinstance(model, EncoderConfig) or choice.products() is None:
        return None
    stored = model.stored
    if stored is None:
        # With fp8, all matrices of the layers are quantised, but not those of output heads and vision towers.
        made = config.quantization == "fp8"
        return Kept(Fp8(), lambda name: not name.startswith(TOWER)) if made else None
    if isinstance(stored.scheme, Mxfp4):
        return None
    if config.load_format == "dummy":
        return Kept(stored.scheme, lambda name: not stored.leaves_out(name.removesuffix(".weight")))
    return Kept(stored.scheme, kept_matrices(config.model).__contains__)
