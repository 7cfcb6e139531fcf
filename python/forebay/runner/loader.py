"""A rank's model: built, filled with weights, and kept for the next start."""

from __future__ import annotations

import threading

from forebay.compute.choose import Choice
from forebay.device import Device
from forebay.distributed.exchange import Exchange
from forebay.layers.adapted import AdaptedModules
from forebay.layers.decoder import Decoder
from forebay.layers.params import Parameters, Report
from forebay.layers.ranks import Ranks
from forebay.models import registry
from forebay.models.bert import Bert
from forebay.models.called import CalledModel
from forebay.models.registry import Model
from forebay.models.whole import WholeDecoder
from forebay.runner import formats
from forebay.runner.kept import KeptWeights
from forebay.state.config import RunnerConfig
from forebay.weights.called import CalledConfig
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.load import iter_kept, iter_weights, spare_biases, weight_shapes


class ModelLoader:
    """Builds a rank's model, and fills its weights."""

    def __init__(
        self,
        config: RunnerConfig,
        device: Device,
        choice: Choice,
        roles: tuple[Ranks | None, Exchange | None],
        adapted: AdaptedModules | None,
    ) -> None:
        """`roles` as `runner.group.roles` gives them. `adapted` None: no row has an adapter."""
        self._config, self._device, self._choice, self._adapted = config, device, choice, adapted
        self._ranks, self._exchange = roles
        self._kept = KeptWeights.open(config, config.model_config, choice)
        self.expects_kept = self._kept is not None and self._kept.stored is not None
        """True if there are weights of an earlier start."""

    def build(self) -> Model:
        """The model with allocated weights, but for matrices that are expected from an earlier start."""
        config, model, choice = self._config, self._config.model_config, self._choice
        kept = None if self._kept is None else self._kept.stored
        alone = self._ranks is None and self._exchange is None
        params = Parameters(
            *(config.dtype, self._device.torch_device, formats.formats(config, model, choice, kept)),
            matrices=not self.expects_kept,
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

    def weight_bytes(self, model: Model) -> int:
        """Bytes of the weights as they are computed with, also before they are loaded.

        Those of an encoder count as they are loaded.
        """
        if isinstance(model, CalledModel):
            return model.nbytes
        if isinstance(model, Bert | WholeDecoder):
            return model.params.nbytes
        head = model.draft_head
        return self._choice.weight_bytes(model) + (0 if head is None else head.params.nbytes)

    def load_kept(self, model: Model, report: Report) -> bool:
        """Fills a model with the weights of an earlier start. False: they can't be read, and are expected no more.

        `report` gets (loaded, total) tensors.
        """
        assert self._kept is not None
        self.expects_kept = self._kept.load(model.params, report)
        return self.expects_kept

    def load(self, model: Model, report: Report) -> None:
        """Fills a model with weights from the checkpoint, or from the seed. `report` as in `load_kept`."""
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
        checkpoint, in_blocks = dict(config.model), model.params.stored
        cuts = model.params.cuts
        if isinstance(model, Decoder):
            assert isinstance(config.model_config, ModelConfig)
            for name in spare_biases(checkpoint):
                model.params.skip(name)
            model.check_weights(weight_shapes(checkpoint, config.model_config, in_blocks))
            model.load_weights(iter_kept(checkpoint, config.model_config, in_blocks, model.keeps, cuts), report)
        else:
            model.load_weights(iter_weights(checkpoint, config.model_config), report)

    def keep(self, model: Model) -> threading.Thread | None:
        """Begins to keep the weights for the next start, once a step was computed; None: there is nothing to keep."""
        return None if self._kept is None else self._kept.save(model.params)

    def discard(self) -> bool:
        """Removes the files of an earlier start, because their content is wrong. False: none were read."""
        return self._kept is not None and self._kept.discard()
