"""Packed weights, kept from one start to the next: the conditions, and the names."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from forebay.compute.choose import Choice
from forebay.layers.params import Parameters, Report
from forebay.runner.formats import quantization
from forebay.state.config import RunnerConfig
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.packed import PackedFile, content_key

FOLDER = "packed"
"""The folder below the model's cache folder."""
_LOWEST_PRIORITY = 19


class KeptWeights:
    """A decoder's weights on disk: matrices in the kernels' order, and all others in their loaded form."""

    def __init__(self, file: PackedFile) -> None:
        self._file = file
        self._was_read = False

    @classmethod
    def open(cls, config: RunnerConfig, model: ModelConfig | EncoderConfig, choice: Choice) -> KeptWeights | None:
        """The kept weights of such a configuration; None: none are ever kept for it."""
        folder = config.model.get("cache")
        if folder is None or config.weight_cache_bytes == 0 or config.load_format != "auto":
            return None
        if config.pooling is not None or isinstance(model, EncoderConfig):
            return None
        order = choice.weight_order(model)
        if order is None:
            return None
        facts = {
            "order": order,
            "dtype": str(config.dtype),
            "quantization": quantization(config, choice),
            "format": config.model["format"],
            "config": config.model["config"],
        }
        try:
            key = content_key(config.model["files"], facts)
        except OSError:
            # Loading says what is wrong with the files.
            return None
        return cls(PackedFile(Path(folder) / FOLDER, key, config.weight_cache_bytes))

    @property
    def stored(self) -> Mapping[str, str] | None:
        """`Formats.stored` of the checkpoint; None: the checkpoint has to be read for it."""
        notes = self._file.notes
        return None if notes is None else json.loads(notes["stored"])

    def load(self, params: Parameters, report: Report) -> bool:
        """Fills the weights, matrices into `params.packed`. False: the checkpoint has to be loaded."""
        total = params.count
        found = self._file.read(params.others, lambda done, all_: report(total * done // all_, total))
        if found is None:
            return False
        params.packed.update(found)
        self._was_read = True
        return True

    def discard(self) -> bool:
        """Removes the files that were read, because their content is wrong. False: none were read."""
        if self._was_read:
            self._file.path.unlink(missing_ok=True)
        return self._was_read

    def save(self, params: Parameters) -> threading.Thread | None:
        """Has a thread write the weights, which are final; None: they exist already, or are not packed."""
        if self._was_read or not params.packed:
            return None
        tensors = {**params.others, **params.packed}
        notes = {"stored": json.dumps(dict(params.formats.stored))}
        # A daemon: who tells the hand to go does not wait for it, and what it leaves is cleared by the next writer.
        thread = threading.Thread(target=self._write, args=(tensors, notes), name="keep-weights", daemon=True)
        thread.start()
        return thread

    def _write(self, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
        # Of this thread only, as Linux has it: steps come first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        self._file.write(tensors, notes)
