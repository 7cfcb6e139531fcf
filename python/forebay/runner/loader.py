"""Builds a rank's model and loads its weights."""

from __future__ import annotations

from forebay.compute.choose import Choice
from forebay.device import Device
from forebay.distributed.exchange import Exchange
from forebay.layers.adapted import AdaptedModules
from forebay.layers.decoder import Decoder
from forebay.layers.params import Parameters, Report
from forebay.layers.ranks import Ranks
from forebay.models import registry
from forebay.models.called import CalledModel
from forebay.models.registry import Model
from forebay.runner.formats import matrices_kept
from forebay.state.config import RunnerConfig
from forebay.weights.called import CalledConfig
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.load import iter_kept, iter_weights, spare_biases, weight_shapes


class ModelLoader:
    """Builds a rank's model, and loads its weights."""

    def __init__(
        self,
        config: RunnerConfig,
        device: Device,
        choice: Choice,
        roles: tuple[Ranks | None, Exchange | None],
        adapted: AdaptedModules | None,
    ) -> None:
        """`roles` is the result of `runner.group.roles`. `adapted` None: rows never use adapters."""
        self._config, self._device, self._choice, self._adapted = config, device, choice, adapted
        self._ranks, self._exchange = roles

    def build(self) -> Model:
        """Builds the model with allocated weights."""
        config, model, choice = self._config, self._config.model_config, self._choice
        alone = self._ranks is None and self._exchange is None
        params = Parameters(
            *(config.dtype, self._device.torch_device, matrices_kept(config, model, choice)),
            fill=self._device.fill,
            ranks=self._ranks,
            exchange=self._exchange,
            products=choice.products() if alone else None,
            adapted=self._adapted,
        )
        if isinstance(model, EncoderConfig):
            return registry.build_encoder(model, config.pooling, params)
        if isinstance(model, CalledConfig):
            directory: str = config.model["directory"]
            return registry.build_called(model, directory, params, choice.ops(), config.context_length)
        if model.both_ways:
            return registry.build_whole(model, config.pooling, params, choice.ops(), config.context_length)
        made = registry.build(model, params, choice.attention(), choice.ops(), config.context_length)
        if config.head is not None:
            own = Parameters(config.dtype, self._device.torch_device, fill=self._device.fill)
            registry.attach_head(made, config.head, own, config.context_length)
        return made

    @staticmethod
    def weight_bytes(model: Model) -> int:
        """Returns the bytes of the weights of a built model."""
        if isinstance(model, CalledModel):
            return model.nbytes
        head = model.draft_head if isinstance(model, Decoder) else None
        return model.params.nbytes + (0 if head is None else head.params.nbytes)

    def load(self, model: Model, report: Report) -> None:
        """Loads weights from the checkpoint, or generates them from the seed. `report` gets (loaded, total) tensors."""
        config = self._config
        if isinstance(model, CalledModel):
            if config.load_format == "dummy":
                model.randomise(config.seed, report)
            else:
                model.load(report)
            return
        if config.load_format == "dummy":
            model.params.randomise(config.seed, report)
            return
        checkpoint, cuts = dict(config.model), model.params.cuts
        if isinstance(model, Decoder):
            assert isinstance(config.model_config, ModelConfig)
            for name in spare_biases(checkpoint):
                model.params.skip(name)
            model.check_weights(weight_shapes(checkpoint))
            model.load_weights(iter_kept(checkpoint, config.model_config, model.keeps, cuts), report)
        else:
            model.load_weights(iter_weights(checkpoint, config.model_config), report)
