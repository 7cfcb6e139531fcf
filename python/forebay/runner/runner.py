"""One rank's compute: a step plan in, a step result out."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from forebay.device import open_device
from forebay.layers.decoder import Decoder
from forebay.layers.params import Parameters, Report
from forebay.models import registry
from forebay.models.bert import Bert
from forebay.runner.compute import Compute, Pooler, Rows, TorchCompute, finite_rows
from forebay.runner.config import DTYPES, RunnerConfig
from forebay.runner.encoder import EncoderCompute
from forebay.runner.inputs import PromptRows
from forebay.runner.kept import KeptWeights
from forebay.runner.kv_pool import KvPool, page_count
from forebay.runner.sampler import Sampled, Sampler, plain
from forebay.runner.slots import Int64s, PlanError, SlotTables
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError
from forebay.weights.gguf_file import GgufFiles
from forebay.weights.gguf_tensors import stored_formats
from forebay.weights.load import iter_weights
from forebay.weights.quantization import COMPUTED_AS, PLAIN, Formats
from forebay.worker.wire import (
    FLAG_POOL,
    FLAG_SAMPLE,
    ROW_NOT_FINITE,
    ROW_OK,
    SLOT_WORDS,
    Int32s,
    Plan,
    SlotWord,
    StepResult,
)


class ModelRunner:
    """Owns a rank's memory (weights, pages, slot tables) and executes plans on it. It knows no requests."""

    def __init__(self, config: RunnerConfig, arena: npt.NDArray[np.uint8] | None = None) -> None:
        """Allocates everything; `load` fills the weights. `arena` is the shared memory, uint8 [bytes]."""
        self.config = config
        self.device = open_device(config.device, config.threads)
        self.device.check_dtype(config.dtype)
        self.model_config = config.model_config
        self._arena = np.zeros(0, np.uint8) if arena is None else arena
        available = self.device.available_bytes()
        if config.quantization is not None:
            self.device.check_quantization(config.quantization)
        self._kept = KeptWeights.open(config, self.model_config, self.device)
        self.model = self._build(matrices=self._kept is None or self._kept.stored is None)
        self.weight_bytes = self._weight_bytes()
        """Bytes of the weights as they are computed with, also before they are loaded."""
        if isinstance(self.model_config, EncoderConfig):
            self.kv = KvPool(None, 0, config.page_size, config.dtype, self.device)
        else:
            self._tell_formats(self.model.params)
            pages = page_count(config, self.model_config, available, self.weight_bytes)
            self.kv = KvPool(self.model_config, pages, config.page_size, config.dtype, self.device)
        # What a row may ask for: a model that pools does nothing else.
        self._flag = FLAG_SAMPLE if config.pooling is None else FLAG_POOL
        self.tables = SlotTables(config, self.device)
        self.prompts = PromptRows(self._arena, self.tables, self.model_config.hidden_size, config.dtype)
        self._sampler = Sampler(self.tables, self.device)
        self._compute_ended_us = self.device.clock_us()

    def _build(self, *, matrices: bool) -> Decoder | Bert:
        """The model, its weights allocated; without `matrices` only what is no matrix."""
        config, model = self.config, self.model_config
        params = Parameters(config.dtype, self.device.torch_device, self._formats(), matrices=matrices)
        if isinstance(model, EncoderConfig):
            return registry.build_encoder(model, config.pooling, params)
        return registry.build(model, params, self.device.attention(), config.context_length)

    def _weight_bytes(self) -> int:
        """`weight_bytes` of the model that was built. One that pools is computed by PyTorch, with weights as loaded."""
        if isinstance(self.model, Bert) or self.config.pooling is not None:
            return self.model.params.nbytes
        return self.device.weight_bytes(self.model)

    def _formats(self) -> Formats:
        """What the configuration wants quantised."""
        config, model = self.config, self.model_config
        if config.quantization == "w8a8_int8":
            return Formats(int8=True)
        if config.quantization == "gguf" and not isinstance(model, EncoderConfig):
            stored = None if self._kept is None else self._kept.stored
            if stored is None:
                stored = stored_formats(GgufFiles.open(config.model["files"]), model)
            return Formats(stored=stored)
        return PLAIN

    def _tell_formats(self, params: Parameters) -> None:
        """Says what of a file is computed as it is stored; raises `ModelError` if that is nothing."""
        if self.config.quantization != "gguf":
            return
        if not params.stored:
            raise ModelError(
                f"quantization gguf knows {', '.join(COMPUTED_AS)}, and no matrix of the file is of these types"
            )
        kinds = Counter((params.formats.stored[name], kind) for name, kind in params.stored.items())
        named = ", ".join(
            f"{count} {kind}" if kind == stored else f"{count} {stored} as {kind}"
            for (stored, kind), count in sorted(kinds.items())
        )
        others = params.matrices - kinds.total()
        rest = f"; {others} matrices in {self._dtype_name()}" if others else ""
        print(f"computing with blocks of the file: {named}{rest}", file=sys.stderr)

    @property
    def decoder(self) -> Decoder:
        """The model; raises `PlanError` if it is an encoder."""
        if isinstance(self.model, Bert):
            raise PlanError("an encoder generates nothing")
        return self.model

    def load(self, report: Report) -> None:
        """Fills the weights from the checkpoint, or from the seed; `report` gets (loaded, total) tensors.

        Where an earlier start has kept what became of them, from there.
        """
        if self.config.load_format == "dummy":
            self.model.params.randomise(self.config.seed, report)
            return
        if self._kept is not None and self._kept.stored is not None:
            if self._kept.load(self.model.params, report):
                return
            self.model = self._build(matrices=True)
        in_blocks = self.model.params.stored
        self.model.load_weights(iter_weights(dict(self.config.model), self.model_config, in_blocks), report)

    def keep_weights(self) -> threading.Thread | None:
        """Begins to keep the weights for the next start, once a step was computed; None: there is nothing to do."""
        return None if self._kept is None else self._kept.save(self.model.params)

    def warm_up(self) -> None:
        """Runs a tiny prompt and, if the model generates, a decode row: no request pays for what libraries set up.

        Leaves the tables as they were; the first page's content is overwritten by whoever gets it.
        """
        length = min(2, self.config.context_length, self.config.page_size)
        slots = np.zeros((1, SLOT_WORDS), np.int32)
        slots[0, [SlotWord.TOKEN_COUNT, SlotWord.PROMPT_LEN]] = length
        slots[0, [SlotWord.LOGPROBS, SlotWord.ARENA_OFFSET, SlotWord.EMBEDS_OFFSET]] = -1
        plan = Plan(
            slots=slots,
            slot_floats=np.array([[0, 1, 0, 1, 0, 0]], np.float32),
            tokens=np.zeros(length, np.int32),
            page_writes=np.zeros((1, 3), np.int32),
            rows=np.array([[0, 0, length, self._flag]], np.int32),
        )
        self.step(plan)
        if self._flag == FLAG_SAMPLE:
            self.step(Plan(rows=np.array([[0, length - 1, 1, FLAG_SAMPLE]], np.int32)))
        self.tables.page_table.fill_(-1)
        self._compute_ended_us = self.device.clock_us()

    def facts(self) -> dict[str, int | str]:
        """What `ready` tells the brain, the loading time excepted."""
        return {
            "page_count": self.kv.page_count,
            "vocab_size": self.model_config.vocab_size,
            "hidden_size": self.model_config.hidden_size,
            "dtype": self._dtype_name(),
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv.nbytes,
            "device": self.device.name,
        }

    def _dtype_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.config.dtype)

    @torch.inference_mode()
    def step(self, plan: Plan) -> StepResult:
        """Applies the plan's writes, computes its rows, samples or pools. The plan may be overwritten then."""
        started = self.device.clock_us()
        self.tables.apply(plan, self._arena)
        result = StepResult(step=plan.step, row_errors=np.full(len(plan.rows), ROW_OK, np.int32))
        if len(plan.rows):
            self._compute_rows(plan.rows, result)
        ended = self.device.clock_us()
        result.timing = np.array([ended - started, started - self._compute_ended_us], np.int32)
        self._compute_ended_us = ended
        return result

    def _compute_rows(self, planned: Int32s, result: StepResult) -> None:
        slot, start, length, flags = planned.T.astype(np.int64)
        self._check_rows(slot, start, length)
        if (flags & ~self._flag).any():
            raise PlanError(f"rows with the flags {flags.tolist()}, of which the model knows {self._flag}")
        rows = Rows(slot, start, length, np.flatnonzero(flags))
        if self._flag == FLAG_POOL:
            self._pool(rows, result)
            return
        slots, positions = slot[rows.sampling], (start + length)[rows.sampling]
        if self.tables.plain[slots].all():
            sampled = plain(*self._compute.greedy(rows))
        else:
            sampled = self._sampler.sample(self._compute.logits(rows), slots, positions)
        if len(slots):
            entries = self.device.upload(slots * self.tables.stride + positions)
            self.tables.token_pool.view(-1).index_copy_(0, entries, sampled.tokens)
            self._report(sampled, rows.sampling, result)

    def _pool(self, rows: Rows, result: StepResult) -> None:
        vectors = self._pooler.pool(rows)
        finite = self.device.download(finite_rows(vectors))
        result.row_errors[rows.sampling[~finite]] = ROW_NOT_FINITE
        result.pooled = self.device.download(vectors).ravel()

    @cached_property
    def _compute(self) -> Compute:
        """Made at the first step, when the weights are there: it may put them into another order."""
        return self.device.compute(self.decoder, self.tables, self.kv, self.prompts)

    @cached_property
    def _pooler(self) -> Pooler:
        self.model.params.pack()
        if isinstance(self.model, Bert):
            return EncoderCompute(self.model, self.tables, self.device)
        return TorchCompute(self.decoder, self.tables, self.kv, self.prompts, self.device)

    def _report(self, sampled: Sampled, rows: Int64s, result: StepResult) -> None:
        result.tokens = self.device.download(sampled.tokens)
        result.row_errors[rows[~self.device.download(sampled.finite)]] = ROW_NOT_FINITE
        if sampled.logprobs is not None:
            columns = sampled.logprobs.columns(self.device)
            result.logprob_counts, result.logprob_ids, result.logprob_values = columns

    def _check_rows(self, slot: Int64s, start: Int64s, length: Int64s) -> None:
        """Raises `PlanError` for rows outside the tables, which would read or write another slot's memory."""
        within = (slot.min() >= 0) and (slot.max() < self.config.slots) and (start.min() >= 0) and (length.min() >= 1)
        if not within or (start + length).max() > self.config.context_length:
            raise PlanError(
                f"a row outside of {self.config.slots} slots of {self.config.context_length} positions: "
                f"slots {slot.tolist()}, starts {start.tolist()}, lengths {length.tolist()}"
            )
