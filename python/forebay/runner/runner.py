"""One rank's compute: a step plan in, a step result out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from forebay.compute.causal import Summed
from forebay.compute.choose import Choice
from forebay.compute.encoder import check_whole
from forebay.compute.low_rank import AdapterStacks
from forebay.compute.prompts import PromptColumns, PromptTokens, slice_bytes
from forebay.compute.rows import Compute, FoundColumns, Launch, Pooler, Rows
from forebay.compute.sampler import Sampler
from forebay.compute.steps import NoAnswers
from forebay.device import open_device
from forebay.distributed.group import Group
from forebay.layers.adapted import AdaptedModules
from forebay.layers.decoder import Decoder
from forebay.layers.params import Report
from forebay.models.bert import Bert
from forebay.models.called import CalledModel
from forebay.models.whole import WholeDecoder
from forebay.protocol.constants import FLAG_POOL, FLAG_SAMPLE, ROW_OK
from forebay.protocol.frames import Int32s
from forebay.protocol.plan import Plan
from forebay.protocol.result import StepResult
from forebay.runner.adapters import AdapterPlaces
from forebay.runner.draft_model import DraftModel
from forebay.runner.drafts import Drafts, verified
from forebay.runner.group import roles
from forebay.runner.head_drafts import HeadDrafts
from forebay.runner.host_tier import HostMemory, HostTier
from forebay.runner.images import Images
from forebay.runner.launched import (
    Columns,
    Launched,
    NoColumns,
    TokenColumns,
    VectorColumns,
    no_copies,
    no_places,
)
from forebay.runner.loader import ModelLoader
from forebay.runner.masks import MaskSource, StepMasks
from forebay.runner.measured import largest_plans, telling_of_memory
from forebay.runner.planned import PlannedRows
from forebay.runner.warm import sparse_plan, warm_plans
from forebay.state.config import DTYPES, ConfigError, RunnerConfig
from forebay.state.host import HostPool, PageSizes, host_counts
from forebay.state.hot_rows import HotRows
from forebay.state.inputs import PromptRows
from forebay.state.pages import KvPool
from forebay.state.recurrent import (
    RowStates,
    SlotStates,
    StatePages,
    StateStore,
    StateTables,
    slot_bytes,
    state_page_count,
)
from forebay.state.sizes import Sizes
from forebay.state.slots import PlanError, SlotTables
from forebay.state.staging import StepInputs
from forebay.state.windows import WindowLayers
from forebay.weights.config import ModelConfig, has_mxfp4
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError
from forebay.weights.quantization import AUTO


class NotFiniteError(ModelError):
    """The weights give values that are not finite, even in the warm-up."""


Meet: TypeAlias = Callable[[torch.device], Group]
"""Connects this device to the other ranks, and waits for them."""


class ModelRunner:
    """Owns a rank's memory (weights, pages, slot tables) and executes plans on it.

    It uses slots, and has no notion of requests.
    """

    def __init__(
        self,
        config: RunnerConfig,
        arena: npt.NDArray[np.uint8] | None = None,
        host: HostMemory | None = None,
        meet: Meet | None = None,
    ) -> None:
        """Allocates all memory; `load` fills the weights. `arena` is the shared memory, uint8 [bytes].

        `meet` is called if there are other ranks.
        """
        self.config = config
        self.device = open_device(config.device, config.threads)
        self.device.check_dtype(config.dtype)
        self.model_config = config.model_config
        group = self._meet(meet)
        self._ranks, self._exchange = of_ranks = roles(config, group)
        self._arena = np.zeros(0, np.uint8) if arena is None else arena
        self.draft_model = self._open_draft_model()
        """None: the hand itself drafts no tokens."""
        available = self.device.available_bytes()
        self._group = group
        self._choice = Choice(self.device, config, group)
        self._choice.check_operators(self.model_config)
        if config.quantization not in (None, AUTO):
            self._choice.check_quantization(config.quantization, self.model_config)
        self._choice.check_kv_format()
        self._adapted = None if config.lora is None else AdaptedModules()
        self._stacks: AdapterStacks | None = None
        self._loader = ModelLoader(config, self.device, self._choice, of_ranks, self._adapted)
        # The flags that a row may have: a pooling model samples nothing.
        self._flag = FLAG_SAMPLE if config.pooling is None else FLAG_POOL
        self._ops = self._choice.ops()
        self._tier: HostTier | None = None
        self._summed: Summed | None = None
        self._state_pages = 0
        with telling_of_memory(self.device):
            self.model = self._loader.build()
            self.weight_bytes = self._loader.weight_bytes(self.model)
            """Bytes of the weights in the form used for computing, known before they are loaded."""
            self.adapters = self._open_places()
            """None: rows never use adapters."""
            self.images = Images.of(config, self.model, self._arena, self.device)
            """None: the model takes no images."""
            self._make_pages(self._sizes(available))
            self._make_states(self._state_pages)
            pool = self._open_host(host)
            self._make_tables(self._hot_rows(pool))
        if config.pooling is not None and config.pooling.kind == "causal_mean":
            self._summed = Summed(config.slots)
        if self.draft_model is not None and not self._verifies_drafts:
            what = "a draft model is" if self.config.head is None else "draft heads are"
            raise ConfigError(
                f"{what} not served here: drafts of the hand's own are verified for models of text without recurrent "
                "layers and adapters"
            )
        if pool is not None and host is not None:
            sparse, states = self.tables.hot is not None, self._pages_of_states()
            self._tier = HostTier(config, self.device, self.kv, pool, host.socket, sparse=sparse, states=states)

    def _meet(self, meet: Meet | None) -> Group | None:
        """Connects to the other ranks. Called before memory is measured, because communicators take some."""
        if self.config.world_size == 1:
            return None
        if meet is None:
            raise ConfigError(f"{self.config.world_size} ranks, and no place where they could meet")
        return meet(self.device.torch_device)

    def _open_draft_model(self) -> DraftModel | HeadDrafts | None:
        draft = self.config.draft
        if draft is None:
            return None
        if self.config.head is not None:
            return HeadDrafts(self.config, self.device, lambda: self.decoder, lambda: self._compute)
        runner = ModelRunner(DraftModel.config_of(self.config))
        return DraftModel(runner, draft.tokens, self.model_config.vocab_size)

    def _make_pages(self, sizes: Sizes) -> None:
        config, kept = self.config, self.config.kept_model
        shape = (sizes.pages, config.page_size, config.dtype)
        windows = WindowLayers.of(config, kept)
        self.kv = KvPool(kept, *shape, self.device, sizes.index_pages, config.kv_cache_dtype, windows)

    def _make_states(self, pages: int, checked: bool = True) -> None:
        """Allocates the memory of recurrent states, with `pages` state pages. `checked`: see `SlotStates`."""
        self.states: SlotStates | None = None
        self._store: StateStore | None = None
        kept = self.config.kept_model
        if kept is None or self._state_bytes == 0:
            return
        self.states = SlotStates(self.config.slots, pages, checked)
        if isinstance(self.model, CalledModel):
            self._store = self.model.state_store()
        else:
            self._store = StateTables(kept, self.states.rows, self.config.dtype, self.device)

    def _make_tables(self, hot: HotRows | None) -> None:
        """Creates the slot tables, and the objects that compute with the tables and the pages."""
        config, vocabulary, device = self.config, self.model_config.vocab_size, self.device
        window_pages = 0 if self.kv.window is None else self.kv.window.page_count
        self.tables = SlotTables(config, vocabulary, device, hot, window_pages)
        self.prompts = PromptRows(self._arena, self.tables, self.model_config.hidden_size, config.dtype)
        own = None if self._ranks is None else self._ranks.shard.of(vocabulary)
        self._sampler = Sampler(self.tables, vocabulary, self._ops, device, own)
        self._steps = self._choice.steps(
            *(lambda: self.decoder, lambda: self._compute, self.tables, self.kv, self.prompts, self._sampler),
            *(self._store, self._stacks),
        )
        self._ended = device.event()

    def _sizes(self, available: int) -> Sizes:
        """Sizes the KV cache (`--gpu-memory-utilization`). `available` was free before the model was built."""
        kept = self.config.kept_model
        if kept is None:
            return Sizes(0, None)
        if has_mxfp4(self.model_config) and self.config.load_format != "dummy":
            print(f"MXFP4 is multiplied out at the load: experts are {self._dtype_name()}", file=sys.stderr)
        taken = self.weight_bytes + self._image_bytes + slot_bytes(self.config)
        taken += 0 if self.adapters is None else self.adapters.nbytes
        if self.config.max_total_tokens is None:
            # Weights of a model in Transformers are only allocated by the load, and nothing can be computed before.
            measured = 0 if isinstance(self.model, CalledModel) else self.device.measure(self._do_largest_steps)
            taken += measured or self._slice_bytes
        taken += self._choose_state_pages(available, taken)
        sizes = Sizes.of(self.config, kept, available, taken)
        # Ranks may have different free memory, and the brain uses the same pages on all: take the smallest.
        return sizes if self._group is None else replace(sizes, pages=self._group.least(sizes.pages))

    def _choose_state_pages(self, available: int, taken: int) -> int:
        """Chooses the number of state pages, given `taken` bytes in use. Returns the bytes of all state pages."""
        free = int(self.config.mem_fraction_static * available) - taken
        self._state_pages = state_page_count(self.config, free)
        return self._state_pages * self._state_bytes

    @property
    def _slice_bytes(self) -> int:
        """Bytes of a slice of logits: without a measurement, the largest memory that a step takes."""
        config = self.config
        return slice_bytes(self.model_config.vocab_size, config.chunked_prefill_size) if config.pooling is None else 0

    def _do_largest_steps(self) -> None:
        """Runs the steps that take most memory, with weights of 0, and drops their data."""
        self.model.params.clear()
        self._make_pages(Sizes(1, None))
        self._make_states(0, checked=False)
        self._make_tables(None)
        if self.images is not None:
            self.images.warm_up(self.images.most_positions)
        for plan in largest_plans(self.config, self._flag):
            self.step(self._of_all_ranks(plan))
        # Graphs take additional memory.
        self._capture()
        for made in ("kv", "states", "_store", "tables", "prompts", "_sampler", "_steps", "_compute", "_pooler"):
            self.__dict__.pop(made, None)

    @property
    def _state_bytes(self) -> int:
        """Bytes of the recurrent states of one slot over all layers; 0: there are none."""
        kept = self.config.kept_model
        return 0 if kept is None else kept.state_bytes(self.config.dtype)

    @property
    def _image_bytes(self) -> int:
        """Bytes of image pages."""
        return 0 if self.images is None else self.images.nbytes

    def _open_host(self, host: HostMemory | None) -> HostPool | None:
        """Opens the host tier; None: the configuration has none."""
        config = self.config
        # Bytes that are already in use, if the device shares the host's memory.
        state_bytes = slot_bytes(config) + self._state_pages * self._state_bytes
        left = self.device.host_bytes(self.weight_bytes + self._image_bytes + self.kv.nbytes + state_bytes)
        counts = host_counts(config, self.kv, (self._state_pages, self._state_bytes), left)
        self.host_counts = counts = counts if self._group is None else counts.agreed(self._group.least)
        """Page counts of the host tier; 0 without a host tier."""
        if counts.pages == 0:
            return None
        if host is None:
            raise ConfigError("a host tier without memory for it")
        states = self._pages_of_states()
        sizes = PageSizes(self.kv.page_bytes, 0 if states is None else states.nbytes)
        pool = HostPool(host.descriptor, counts, sizes, config.page_size)
        self.device.share(pool.mapped)
        return pool

    @property
    def host_pages(self) -> int:
        """The number of KV cache pages of the host tier; 0 without a host tier."""
        return self.host_counts.pages

    def _pages_of_states(self) -> StatePages | None:
        """The state pages that copies read and write; None: the model has none, or Transformers keeps the states."""
        if self.states is None or not isinstance(self._store, StateTables):
            return None
        return StatePages(self.states, self._store)

    def _hot_rows(self, pool: HostPool | None) -> HotRows | None:
        """Returns the tables of sparse slots; None: no slot may be sparse."""
        if not self.config.hot_rows:
            return None
        assert pool is not None
        assert not isinstance(self.model_config, EncoderConfig)
        return HotRows(self.config, self.model_config, self.kv.page_count, pool.rows(self.kv), self.device)

    @property
    def decoder(self) -> Decoder:
        """The model; raises `PlanError` unless Forebay's own layers compute it."""
        if not isinstance(self.model, Decoder):
            raise PlanError(f"{self.model_config.architecture} is not computed by native code")
        return self.model

    def load(self, report: Report) -> None:
        """Loads weights from the checkpoint, or generates them from the seed. `report` gets (loaded, total) tensors."""
        if self.draft_model is not None:
            self.draft_model.load(report)
        self._loader.load(self.model, report)

    def warm_up(self) -> None:
        """Runs a tiny prompt and, if the model generates, a decode row, and a sparse row if slots may be sparse.

        So no request waits for the initialisation of libraries.

        The tables are unchanged afterwards. The content of the first pages is undefined. Raises `NotFiniteError`.
        """
        if self.draft_model is not None:
            self.draft_model.warm_up()
        hot = self.tables.hot
        in_order = self._state_bytes > 0
        drafts = self.draft_model.most if isinstance(self.draft_model, HeadDrafts) else 0
        for plan in warm_plans(self.config, self._flag, backed=hot is not None, in_order=in_order, drafts=drafts):
            if self.kv.window is not None:
                plan = replace(plan, window_writes=plan.page_writes)
            self._warm(plan)
        if self.images is not None:
            self.images.warm_up()
        if hot is not None:
            sparse = sparse_plan(self.config, self.host_pages)
            if sparse is not None:
                # Does not use `_warm`: the pages that this step reads may contain NaN.
                self.step(self._of_all_ranks(sparse))
            hot.sparse.fill(False)
        began = time.monotonic()
        self._capture()
        graphs = self._steps.graphs
        if graphs is not None and graphs.count:
            print(f"captured {graphs} in {time.monotonic() - began:.1f} s", file=sys.stderr)
        self.device.finish_start()
        self.device.queue(self.tables.forget_pages)
        self._ended = self.device.event()

    @torch.inference_mode()
    def _capture(self) -> None:
        self.device.queue(self._steps.capture)
        self.device.event().wait()

    def _of_all_ranks(self, plan: Plan) -> Plan:
        """Returns the plan of a step in which all ranks do the same, in received form."""
        if self._exchange is not None:
            plan = replace(plan, group=np.full(self._exchange.world, plan.token_count, np.int32))
        return plan.staged()

    def _warm(self, plan: Plan) -> None:
        result = self.step(self._of_all_ranks(plan))
        if (result.row_errors == ROW_OK).all():
            return
        raise NotFiniteError("the weights give results that are not finite")

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `ready`, except the loading time."""
        return {
            "page_count": self.kv.page_count,
            "vocab_size": self.model_config.vocab_size,
            "hidden_size": self.model_config.hidden_size,
            "dtype": self._dtype_name(),
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv.nbytes,
            "device": self._choice.device_name,
            "host_page_count": self.host_pages,
            "host_state_page_count": self.host_counts.state_pages,
            "page_bytes": self.kv.page_bytes,
            "hot_row_tokens": self.config.row_pages * self.config.page_size,
            "graphs": 0 if self._steps.graphs is None else self._steps.graphs.count,
            "blocks": "",
            "tokens_only": isinstance(self.model, CalledModel),
            # With a draft model, the hand verifies only the drafts that it makes itself.
            "verifies_drafts": self._verifies_drafts and self.draft_model is None,
            "tokens_a_row": 1 if self.draft_model is None else 1 + self.draft_model.most,
            "state_page_count": self._state_pages,
            "state_bytes": self._state_bytes,
            "kv_layout": f"torch {self._choice.device_name}" if self.kv.page_count > 0 else "",
            **self._window_facts(),
            **({} if self.images is None else self.images.facts()),
            **({} if self.adapters is None else self.adapters.facts()),
        }

    def _window_facts(self) -> dict[str, Any]:
        windows, part = WindowLayers.of(self.config, self.config.kept_model), self.kv.window
        return {
            "window": windows.window,
            "window_page_count": 0 if part is None else part.page_count,
            "window_page_bytes": 0 if part is None else part.page_bytes,
            "one_pool": windows.one_pool,
        }

    def _dtype_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.config.dtype)

    def step(self, plan: Plan, masks: MaskSource | None = None) -> StepResult:
        """Executes a plan and waits for its result."""
        return self.launch(plan, masks).collect()

    @torch.inference_mode()
    def launch(self, plan: Plan, masks: MaskSource | None = None) -> Launched:
        """Checks a plan, writes the host's tables, and queues all other work. Raises `PlanError`.

        The plan is in received form: its columns are views of its body, which the launched step owns from now on. If it
        has masked rows, `masks` returns their masks; it is called after the model's work is queued.
        """
        device = self.device
        drafted = plan
        if self.draft_model is not None and plan.row_tokens.size and not plan.draft_tokens.size:
            drafted = self.draft_model.propose(plan, self.tables, self.config.max_running_requests)
        with device.launching():
            if len(plan.rows) and self._tier is not None:
                self._tier.wait_for_saves()
            begun = device.event()
            self._read_images(plan)
            writes = self.tables.read(plan, self._arena)
            self._read_adapters(plan)
            drafts = self._drafts(drafted)
            computed = plan if drafts is None else drafts.plan
            inputs = StepInputs(computed, device)
            if writes is not None:
                device.queue(partial(self._steps.write, writes, inputs))
            if drafts is not None:
                device.queue(partial(self.tables.write_tokens, drafts.entries, drafts.tokens))
            self._begin_exchange(plan)
            of_step = StepMasks(plan.step, masks, self._arena, self.model_config.vocab_size, device)
            states = self._read_states(plan)
            columns = self._queue_rows(computed, inputs, of_step, states, drafts) if len(plan.rows) else NoColumns()
            columns = verified(columns, drafts)
            before, self._ended = self._ended, device.event()
        copied = no_copies if self._tier is None else self._tier.start(plan, self._ended)
        release = partial(self._reuse, plan)
        placed = self._placed(plan)
        before_end = (before, begun, self._ended)
        return Launched(plan.step, len(plan.rows), columns, *before_end, release, copied, placed, of_step.wait)

    def _drafts(self, plan: Plan) -> Drafts | None:
        """Returns the drafts that the plan's rows verify; None: there are none. Raises `PlanError`."""
        if not plan.draft_tokens.size:
            return None
        if not self._verifies_drafts:
            raise PlanError("drafts in a plan for a hand that verifies none")
        return Drafts.of(plan, self.tables, self.config.max_running_requests)

    @property
    def _verifies_drafts(self) -> bool:
        """True for text-only models of Forebay's own layers that keep all positions of a slot on pages."""
        config = self.model_config
        if not isinstance(self.model, Decoder) or not isinstance(config, ModelConfig):
            return False
        plain = self.config.pooling is None and self.images is None and self._exchange is None
        # A recurrent state would include rejected tokens, a sparse slot has one query, and adapters are untested.
        one_by_one = bool(config.recurrent) or self.config.hot_rows > 0 or self.config.lora is not None
        return plain and not one_by_one

    def _begin_exchange(self, plan: Plan) -> None:
        """Queues the first part of a step of a step group, or the whole step if this rank has no rows."""
        exchange, tokens = self._exchange, plan.group.tolist()
        if exchange is None:
            if tokens:
                raise PlanError(f"the tokens of {len(tokens)} ranks, in a plan for one that has no step group")
            return
        if len(tokens) != exchange.world or tokens[exchange.rank] != plan.token_count:
            raise PlanError(
                f"rank {exchange.rank} of {exchange.world} has {plan.token_count} tokens, and the group's are {tokens}"
            )
        self.device.queue(partial(exchange.begin, tokens))
        if not len(plan.rows) and any(tokens):
            self.device.queue(self._take_part)

    def _take_part(self) -> None:
        """Takes part in a step in which only other ranks have rows. Runs as queued work."""
        # `_compute` first puts the weights into the layout that steps use.
        _ = self._compute
        self.decoder.take_part()

    def _read_images(self, plan: Plan) -> None:
        """Queues the plan's layers of the vision tower. The plan's rows follow."""
        if self.images is not None:
            self.images.read(plan)
        elif len(plan.images) or len(plan.image_spans):
            raise PlanError("images in a plan for a model of text")

    def _read_states(self, plan: Plan) -> RowStates | None:
        """Returns the recurrent states that the plan's rows continue; None: the model has none."""
        if self.states is None or self._store is None:
            if len(plan.state_loads) or len(plan.state_saves):
                raise PlanError("copies of states in a plan for a model that has none")
            return None
        states = self.states.read(plan)
        if not len(plan.rows):
            self.device.queue(partial(self._store.copy, states.loads))
            self.device.queue(partial(self._store.copy, states.saves))
        return states

    def know(self, order: Mapping[str, Any]) -> None:
        """Executes an `adapter` frame. Raises `PlanError` if the hand has no places."""
        if self.adapters is None:
            raise PlanError("an adapter for a hand without places")
        self.adapters.order(order)

    def _open_places(self) -> AdapterPlaces | None:
        config = self.config
        if config.lora is None:
            return None
        assert self._adapted is not None
        self._stacks = self._choice.stacks(self._adapted)
        where = config.slots, config.dtype, self.device.torch_device, self._stacks
        return AdapterPlaces(config.lora, self._adapted, *where)

    def _read_adapters(self, plan: Plan) -> None:
        if self.adapters is not None:
            self.adapters.read(plan, self._ended)
        elif len(plan.place_writes) or len(plan.slot_places):
            raise PlanError("adapters in a plan for a hand without places")

    def _placed(self, plan: Plan) -> Callable[[], Int32s]:
        if self.adapters is None:
            return no_places
        # If there is a host tier, its copies have already been waited for.
        wait_us = int(plan.wait_us[0]) if plan.wait_us.size and self._tier is None else 0
        return partial(self.adapters.report, wait_us)

    def _reuse(self, plan: Plan) -> None:
        self.device.reuse(plan.body)
        plan.release()

    def _queue_rows(
        self, plan: Plan, inputs: StepInputs, masks: StepMasks, states: RowStates | None, drafts: Drafts | None
    ) -> Columns:
        planned = PlannedRows.read(plan, self.config.slots, self.config.context_length, self._flag)
        slot, start, length, sampling = planned.slot, planned.start, planned.length, planned.sampling
        given = self.prompts.given(slot, start)
        wanted = PromptTokens.read(plan.prompt_logprobs, slot)
        if self._flag == FLAG_POOL:
            if wanted is not None:
                raise PlanError("log-probabilities of a prompt that is pooled")
            return self._queue_pooled(Rows(slot, start, length, sampling, given, states=states), inputs)
        hot = self.tables.hot
        sparse = None if hot is None else hot.check_rows(slot, length)
        found = None if sparse is None else FoundColumns(self.device)
        images = None if self.images is None else self.images.slots.of_rows(slot, start, length)
        adapters = None if self.adapters is None else self.adapters.of_rows(slot)
        rows = Rows(slot, start, length, sampling, given, sparse, None, images, wanted, states, adapters)
        prompts = None if wanted is None else PromptColumns(wanted, slot, self.tables, self._ops, self.device)
        launch, steps = Launch(rows, inputs, found, prompts), self._steps
        slots, positions = slot[sampling], planned.ends[sampling]
        if not len(planned.masked):
            chains = None if drafts is None else drafts.chains
            ask, work = self._sampler.ask(slots, positions, by_slot=steps.by_slot, chains=chains), steps.sample
        else:
            self.device.queue(partial(steps.compute, launch))
            ask = masks.ask(self._sampler, planned, slots, positions, drafts, steps.by_slot)
            work = steps.choose
            if ask.rows is not None:
                sampling = sampling[ask.rows]
                if not len(sampling):
                    return TokenColumns(NoAnswers(), launch, sampling)
        answers = steps.answers(launch, ask)
        self.device.queue(partial(work, launch, ask, answers))
        return TokenColumns(answers, launch, sampling)

    def _queue_pooled(self, rows: Rows, inputs: StepInputs) -> Columns:
        if isinstance(self.model, Bert | WholeDecoder):
            check_whole(rows)
            rows = replace(rows, segment=self.tables.segment[rows.slot])
        if self._summed is not None:
            self._summed.check(rows)
        columns = VectorColumns(rows.sampling, self._vector_size, self.device)
        self.device.queue(partial(self._pool, Launch(rows, inputs), columns))
        return columns

    def _pool(self, launch: Launch, columns: VectorColumns) -> None:
        """Computes rows, and the vectors of prompts that they complete. Runs as queued work."""
        vectors = self._pooler.pool(launch)
        columns.fill(vectors, self._ops.finite(vectors))

    @property
    def _vector_size(self) -> int:
        if isinstance(self.model, Bert | WholeDecoder):
            return self.model.size
        return self.model_config.hidden_size

    @cached_property
    def _compute(self) -> Compute:
        """Created by the first step's work, after the weights are loaded: the creation may change their layout."""
        images = None if self.images is None else self.images.pool
        model = self.model if isinstance(self.model, CalledModel) else self.decoder
        return self._choice.compute(model, self.tables, self.kv, self.prompts, images, self._store)

    @cached_property
    def _pooler(self) -> Pooler:
        return self._choice.pooler(self.model, self.tables, self.kv, self.prompts, self._store)
