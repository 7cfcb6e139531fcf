"""Steps with the operators of `forebay.gpu`. The device reads the plan, and one graph serves all steps of a size.

The host only checks the rows and chooses a size. Queued work does everything else. It copies the plan's body to a
fixed address, writes the tables, prepares the rows, and runs the model. A sampler reads the rows' parameters by their
slots. One block with tokens and an error word is copied to the host, and another one with log-probabilities if a row
requests them. All of this memory is permanent, so that a graph may read it: only the values change with a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from forebay.attention.states import PlannedStates
from forebay.compute.finding import OnPages
from forebay.compute.graphs import Graphs, SamplerKind, Size
from forebay.compute.low_rank import AdapterStacks
from forebay.compute.rows import Launch, Rows
from forebay.compute.sampler import Ask, SampledColumns, Sampler
from forebay.compute.steps import Answers
from forebay.device import Device, host_array
from forebay.gpu.interface import Kernels, PagedRows
from forebay.gpu.recurrent import NO_STATE, StateRows
from forebay.gpu.sampling import MOST_LIKELY
from forebay.gpu.tables import Received, StepBuffers, Tables, describe, no_records, places
from forebay.layers.adapted import StepAdapters
from forebay.layers.decoder import Decoder, FeatureRows, Forward
from forebay.layers.step import Index
from forebay.protocol.constants import NO_PAGE, SLOT_FLOATS_WORDS, SLOT_WORDS
from forebay.protocol.frames import Float32s, Int32s
from forebay.protocol.plan import LAST_ID
from forebay.state.inputs import PromptRows
from forebay.state.pages import KvPool
from forebay.state.recurrent import StateTables
from forebay.state.slots import Int64s, PlanError, SlotTables, Writes
from forebay.state.staging import StepInputs

_PLACES = 2 * LAST_ID
_ROW_WORDS = 4
"""Words per row that the host writes besides the plan: the columns of `StateRows.places`, and the adapter's place."""
_STAGED = 64
"""The number of host buffers that kernels may still read: at most three for each step in flight."""
MOST_WORDS = 1 << 16
"""The largest body of a plan, in words, that a graph can read: 256 KiB."""


@dataclass(frozen=True)
class Limits:
    """The limits of the size of a hand's steps."""

    rows: int
    tokens: int
    graph_rows: int
    """The largest number of rows of a graph; 0: no graphs."""


@dataclass(frozen=True)
class Memory:
    """The memory on the device for steps of at most `rows` and `tokens`."""

    buffers: StepBuffers
    logits: torch.Tensor  # float32 [rows, vocabulary]
    block: torch.Tensor  # int32 [1 + 2 * rows]: the error word, the tokens, and whether each row is finite
    words: torch.Tensor  # int32 [rows, _ROW_WORDS]: for states and adapters
    lines: torch.Tensor  # int32 [rows]: the lines of rows with penalties in the table of counts; -1: none
    told: torch.Tensor  # int32 [rows, 2, 1 + MOST_LIKELY]: ids and bits of log-probabilities (`Sampling.tell_likely`)

    @classmethod
    def make(cls, rows: int, tokens: int, vocabulary: int, place: torch.device) -> Memory:
        """Allocates the memory on a device."""
        logits = torch.empty(rows, vocabulary, dtype=torch.float32, device=place)
        block = torch.zeros(1 + 2 * rows, dtype=torch.int32, device=place)
        words = torch.zeros(rows, _ROW_WORDS, dtype=torch.int32, device=place)
        lines = torch.full((rows,), -1, dtype=torch.int32, device=place)
        told = torch.zeros(rows, 2, 1 + MOST_LIKELY, dtype=torch.int32, device=place)
        return cls(StepBuffers.make(rows, tokens, place), logits, block, words, lines, told)

    def holds(self, rows: int, tokens: int) -> bool:
        """True if a step of this size fits."""
        return rows <= len(self.logits) and tokens <= len(self.buffers.tokens)

    def part(self, rows: int, tokens: int) -> Memory:
        """The memory for a step of this size. All sizes share the memory: each uses the first part of every tensor."""
        whole = self.buffers
        buffers = StepBuffers(
            tokens=whole.tokens[:tokens],
            positions=whole.positions[:tokens],
            writes=whole.writes[:tokens],
            slots=whole.slots[:rows],
            ends=whole.ends[:rows],
            first=whole.first[: rows + 1],
            last=whole.last[:rows],
            sampling=whole.sampling[:rows],
        )
        block, told = self.block[: 1 + 2 * rows], self.told[:rows]
        return Memory(buffers, self.logits[:rows], block, self.words[:rows], self.lines[:rows], told)


def kind_of(ask: Ask) -> SamplerKind:
    """The kind of sampler for rows whose parameters the device reads by slot."""
    if ask.by_slot and not ask.simple:
        return SamplerKind.WHOLE
    return SamplerKind.GREEDY if ask.plain else SamplerKind.DRAWN


class BlockAnswers:
    """`Answers` in one block of host memory. If the sampler runs outside of the graphs, its samples are in `beside`."""

    def __init__(self, size: Size, captured: bool, sampling: Int64s, ask: Ask, device: Device) -> None:
        self.size = size
        self.captured = captured
        """True if graphs compute the step."""
        self._sampling = sampling
        self.beside = None if ask.simple or ask.by_slot else SampledColumns(ask, device)
        rows = size.rows if self.beside is None else 0
        self.block: Int32s = host_array(device, (1 + 2 * rows,), np.int32)
        self._asked = None if self.beside is not None else ask.logprobs
        self._telling = sampling[ask.columns["logprob_rows"]] if self._asked is not None else sampling[:0]
        rows = int(self._telling.max()) + 1 if len(self._telling) else 0
        self.told: Int32s = host_array(device, (rows, 2, 1 + MOST_LIKELY), np.int32)
        """The parts of `Memory.told` up to the last row that requests log-probabilities."""

    @property
    def tokens(self) -> Int32s:
        if self.beside is not None:
            return self.beside.tokens
        return self.block[1 : 1 + self.size.rows][self._sampling]

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        if self.beside is not None:
            return self.beside.finite
        return self.block[1 + self.size.rows :][self._sampling] > 0

    def logprobs(self) -> tuple[Int32s, Int32s, Float32s] | None:
        if self.beside is not None:
            return self.beside.logprobs()
        asked = self._asked
        if asked is None:
            return None
        told, wanted = self.told[self._telling], asked.wanted
        ids, values = (np.ascontiguousarray(told[:, half, : wanted.shape[1]])[wanted] for half in range(2))
        return asked.counts, ids, values.view(np.float32)

    def check(self) -> None:
        if self.block[0]:
            raise PlanError(f"the plan contradicts the tables: {describe(int(self.block[0]))}")


class PagedSteps:
    """Implements `Steps`."""

    by_slot = True

    def __init__(
        self,
        model: Callable[[], Decoder],
        tables: SlotTables,
        kv: KvPool,
        prompts: PromptRows,
        sampler: Sampler,
        vocabulary: int,
        limits: Limits,
        kernels: Kernels,
        device: Device,
        states: StateTables | None = None,
        stacks: AdapterStacks | None = None,
        top_k: int | None = None,
        *,
        mapped: bool = False,
    ) -> None:
        """`model` runs as queued work. `states`: the memory of recurrent states; `stacks`: the memory of adapters.

        `top_k`: the number of positions that a query of an indexed layer keeps; None: there is no index. `mapped`: True
        if kernels read plans and write results directly in host memory, without copies.
        """
        self._model, self._kv, self._prompts, self._sampler = model, kv, prompts, sampler
        self._states, self._stacks, self._top_k = states, stacks, top_k
        self._kernels, self._device, self._counts = kernels, device, tables.counts
        self._counts.keep()
        self._staged: deque[Int32s] | None = deque(maxlen=_STAGED) if mapped else None
        place = device.torch_device
        lines = tables.slots + 1
        self._tables = Tables(
            token_pool=tables.all_tokens,
            page_table=tables.all_pages,
            words=no_records(lines, place),
            floats=torch.zeros(lines, SLOT_FLOATS_WORDS, dtype=torch.float32, device=place),
            vocabulary=vocabulary,
            page_size=kv.page_size,
            page_count=kv.page_count,
            page_stride=kv.main.page_stride,
        )
        tables.all_pages[-1] = kv.page_count
        self._errors = torch.zeros(1, dtype=torch.int32, device=place)
        self._memory = Memory.make(limits.rows, limits.tokens, vocabulary, place)
        self._computed = self._memory
        """The memory of the step that was computed last."""
        # Room for a plan with every slot and a whole context, within the limit.
        words = tables.slots * (SLOT_WORDS + SLOT_FLOATS_WORDS + tables.stride + 4 * (1 + tables.pages_per_slot))
        self._input = torch.zeros(_PLACES + min(words, MOST_WORDS), dtype=torch.int32, device=place)
        self._no_tokens = torch.zeros(1, dtype=torch.int32, device=place)
        self._at_its_place = Received(self._input[_PLACES:], self._input[:_PLACES].view(-1, 2), self._no_tokens)
        """A plan at the address where graphs read it."""
        self._room = len(self._input) - _PLACES
        rows = min(limits.graph_rows, limits.rows)
        chooses = top_k is not None and top_k < tables.context_length
        self.graphs = Graphs(device, rows, limits.tokens, adapted=stacks is not None, chooses=chooses)

    def answers(self, launch: Launch, ask: Ask) -> Answers:
        size, captured = self._size(launch)
        return BlockAnswers(size, captured, launch.rows.sampling, ask, self._device)

    def write(self, writes: Writes | None, inputs: StepInputs) -> None:
        received = self._receive(inputs)
        if writes is None:
            return
        if writes.slots:
            tokens = self._no_tokens
            if writes.from_arena is not None:
                (tokens,) = self._device.copy_in(writes.from_arena[1])
            self._kernels.apply_slots(Received(received.body, received.places, tokens), self._tables, self._errors)
        if not len(inputs.plan.rows):
            self._write_pages(received)
        if writes.recount is not None:
            self._counts.write(writes.recount, self._tables.token_pool)

    def sample(self, launch: Launch, ask: Ask, answers: Answers) -> None:
        assert isinstance(answers, BlockAnswers)
        self._compute_step(launch, answers.size, answers.captured)
        self.choose(launch, ask, answers)

    def compute(self, launch: Launch) -> None:
        self._compute_step(launch, *self._size(launch))

    def _compute_step(self, launch: Launch, size: Size, captured: bool) -> None:
        received, states = self._receive(launch.inputs), launch.rows.states
        self._computed = self._memory
        if not self._memory.holds(size.rows, size.tokens):
            self._computed = Memory.make(size.rows, size.tokens, self._tables.vocabulary, self._device.torch_device)
        self._write_words(launch.rows, size.rows)
        if states is not None:
            assert self._states is not None
            self._states.copy(states.loads)
        if captured:
            self.graphs.model(size)
        else:
            self._compute(self._computed, received, size, launch)
        if states is not None:
            assert self._states is not None
            self._states.copy(states.saves)

    def _write_words(self, rows: Rows | None, count: int) -> None:
        """Writes `Memory.words` of the rows, and of the padding after them. Runs as queued work.

        `rows` None: there is only padding.
        """
        if self._states is None and self._stacks is None:
            return
        words = np.zeros((count, _ROW_WORDS), np.int32)
        if self._states is not None:
            words[:, :-1] = NO_STATE, self._states.rows - 1, self._states.rows - 1
            if rows is not None:
                assert rows.states is not None
                words[: len(rows.slot), :-1] = rows.states.places
        if self._stacks is not None:
            words[:, -1] = self._stacks.places
            if rows is not None and rows.adapters is not None:
                place = rows.adapters.place
                words[: len(place), -1] = np.where(place < 0, self._stacks.places, place)
        self._bring(self._computed.words.view(-1), words)

    def choose(self, launch: Launch, ask: Ask, answers: Answers) -> None:
        assert isinstance(answers, BlockAnswers)
        size, memory, kind = answers.size, self._computed, kind_of(ask)
        if answers.beside is None and kind is SamplerKind.WHOLE:
            self._write_lines(launch, ask, size.rows)
        if answers.beside is not None:
            sampling = launch.rows.sampling
            (rows,) = self._device.copy_in(sampling if ask.rows is None else sampling[ask.rows])
            answers.beside.fill(self._sampler.sample(memory.logits.index_select(0, rows), ask))
            memory.block[:1].copy_(self._errors)
            self._errors.zero_()
        elif answers.captured:
            self.graphs.sample(size.rows, kind)
        else:
            self._choose(memory.part(size.rows, size.tokens), kind)
        self._take(memory.block[: len(answers.block)], answers.block)
        if len(answers.told):
            self._take(memory.told[: len(answers.told)], answers.told)

    def _write_lines(self, launch: Launch, ask: Ask, count: int) -> None:
        """Writes each row's line in the table of counts, and -1 for the padding after the rows. Runs as queued work."""
        lines = np.full(count, -1, np.int32)
        if "penalised" in ask.columns:
            lines[launch.rows.sampling[ask.columns["penalised"]]] = ask.columns["lines"]
        self._bring(self._computed.lines, lines)

    def _bring(self, target: torch.Tensor, *arrays: Int32s) -> None:
        """Copies host arrays, one after the other, to the beginning of `target` int32 [words]. Runs as queued work."""
        if self._staged is None:
            self._device.copy_into(target, *arrays)
            return
        staged: Int32s = host_array(self._device, (sum(array.size for array in arrays),), np.int32)
        np.concatenate([array.reshape(-1) for array in arrays], out=staged)
        # Keeps the array alive until the device has read it.
        self._staged.append(staged)
        self._kernels.move_words(torch.from_numpy(staged), target[: len(staged)])

    def _take(self, source: torch.Tensor, to: Int32s) -> None:
        """Copies words to host memory. Runs as queued work."""
        if self._staged is None:
            self._device.copy_out(source, to)
        else:
            self._kernels.move_words(source, torch.from_numpy(to))

    def capture(self) -> None:
        for rotary in self._model().rotaries:
            rotary.keep(self._tables.token_pool.shape[1])
        # A plan without rows: every computed row is padding.
        self._input.zero_()
        self._computed = self._memory
        self._write_words(None, len(self._memory.words))
        received = self._at_its_place
        self.graphs.capture(
            lambda size: self._compute(self._memory, received, size),
            lambda rows, kind: self._choose(self._memory.part(rows, 0), kind),
        )

    def _size(self, launch: Launch) -> tuple[Size, bool]:
        """Returns the size of a step, and whether a graph computes it."""
        rows = launch.rows
        count, tokens = len(rows.slot), launch.inputs.tokens
        adapted = rows.adapters is not None
        chooses = self._top_k is not None and int((rows.start + rows.length).max()) > self._top_k
        if rows.given is None and rows.prompts is None and self._fits(launch.inputs):
            size = self.graphs.fit(count, tokens, adapted=adapted, chooses=chooses)
            if size is not None:
                return size, True
        return Size(tokens, count, tokens > count, adapted, chooses), False

    def _fits(self, inputs: StepInputs) -> bool:
        return len(inputs.plan.body) <= self._room

    def _receive(self, inputs: StepInputs) -> Received:
        """Copies the plan to the device: into the input buffer of the graphs if it fits there. Runs as queued work."""
        if inputs.received is not None:
            return inputs.received
        body, table = inputs.plan.body, places(inputs.plan)
        if self._fits(inputs):
            self._bring(self._input, table, body)
            inputs.received = self._at_its_place
        else:
            words, columns = self._device.copy_in(body, table)
            inputs.received = Received(words, columns, self._no_tokens)
        return inputs.received

    def _write_pages(self, received: Received) -> None:
        table, count = self._tables.page_table, self._tables.page_count
        self._kernels.write_table(received, "page_writes", table, NO_PAGE, count, self._errors)

    def _compute(self, whole: Memory, received: Received, size: Size, launch: Launch | None = None) -> None:
        """Computes the step up to the logits. `launch` may have inputs from the arena; None: no such inputs."""
        memory = whole.part(size.rows, size.tokens)
        buffers, kv = memory.buffers, self._kv
        self._write_pages(received)
        self._kernels.prepare(received, self._tables, buffers, self._errors, None)
        model = self._model()
        rows = PagedRows(
            slots=buffers.slots,
            ends=buffers.ends,
            first=buffers.first,
            page_table=self._tables.page_table,
            page_size=kv.page_size,
            page_stride=kv.main.page_stride,
            null_page=kv.page_count,
            decodes=True,
            chunks=size.mixed,
        )
        forward = Forward(
            tokens=buffers.tokens,
            given=[] if launch is None else self._given(launch),
            positions=buffers.positions,
            sampled=buffers.last,
            writes=buffers.writes,
            prepared=rows,
            kv=kv.layers,
            logits=memory.logits,
            index=self._index(buffers, rows, size),
            states=self._planned_states(memory, size),
            adapted=self._adapters(memory, size),
            features=self._features(buffers),
        )
        if launch is None or launch.prompts is None:
            model(forward)
            return
        (before,) = self._device.copy_in(launch.rows.before_prompts)
        count = len(memory.logits)
        states = model.states(replace(forward, sampled=torch.cat((buffers.last, before))))
        memory.logits.copy_(model.logits(states[:count]))
        launch.prompts.fill(states[count:], model.logits)

    @staticmethod
    def _rows_of_tokens(buffers: StepBuffers, *, mixed: bool = True) -> torch.Tensor:
        """The row of each token, int32 [n]; for padding tokens, the number of rows. `mixed`: see `Size`."""
        token = torch.arange(len(buffers.tokens), dtype=torch.int32, device=buffers.first.device)
        if not mixed:
            return token
        return torch.searchsorted(buffers.first, token, right=True, out_int32=True) - 1

    def _index(self, buffers: StepBuffers, rows: PagedRows, size: Size) -> Index | None:
        """Returns where index keys are written, and the lookup of chosen positions; None: the model has no index.

        If one query of a step sees more positions than the index keeps, all queries choose. A query that sees fewer
        keeps all of its positions.
        """
        kv, tables, top_k = self._kv, self._tables, self._top_k
        if top_k is None:
            return None
        assert kv.index is not None
        main, stride = tables.page_stride, kv.index.page_stride
        writes = buffers.writes // main * stride + buffers.writes % main
        # Padding tokens belong to the null slot.
        slots = torch.cat((buffers.slots, buffers.slots.new_full((1,), tables.null_slot)))
        slots = slots.index_select(0, self._rows_of_tokens(buffers, mixed=size.mixed))
        find = OnPages(tables.page_table, kv, slots.long())
        prepared = replace(rows, page_stride=stride), top_k
        return Index(kv.index_keys, writes, 0 if size.chooses else None, prepared, find)

    def _planned_states(self, memory: Memory, size: Size) -> PlannedStates | None:
        """Returns the recurrent states that the rows advance; None: the model has none."""
        if self._states is None:
            return None
        of_token = self._rows_of_tokens(memory.buffers, mixed=size.mixed)
        rows = StateRows(memory.buffers.first, of_token, memory.words, chunks=size.mixed)
        return PlannedStates(self._states.layers, rows, self._kernels)

    def _adapters(self, memory: Memory, size: Size) -> StepAdapters | None:
        """Returns the adapters of tokens; None: all tokens use the base model."""
        if self._stacks is None or not size.adapted:
            return None
        places = memory.words[:, -1].contiguous()
        if size.mixed:
            nobody = torch.full_like(places[:1], self._stacks.places)
            places = torch.cat((places, nobody)).index_select(0, self._rows_of_tokens(memory.buffers))
        return self._stacks.of_tokens(places)

    def _features(self, buffers: StepBuffers) -> FeatureRows | None:
        """Returns where features are read and written; None: no draft head uses them."""
        kv, tables = self._kv, self._tables
        if kv.features is None:
            return None
        row = self._rows_of_tokens(buffers)
        # Tokens after the last row belong to no row: their entries go to the null page.
        slot = buffers.slots.index_select(0, row.clamp(max=len(buffers.slots) - 1)).long()
        before = (buffers.positions - 1).clamp(min=0)
        page = tables.page_table[slot, before // kv.page_size].long()
        page = page.masked_fill(page < 0, kv.page_count)
        return FeatureRows(kv.features, kv.feature_entries(buffers.writes), page * kv.page_size + before % kv.page_size)

    def _given(self, launch: Launch) -> list[tuple[int, torch.Tensor]]:
        rows = launch.rows
        if rows.given is None:
            return []
        spans = rows.given.spans(np.arange(len(rows.slot)), rows.start, rows.length)
        parts = self._device.copy_in(*map(self._prompts.rows, spans)) if spans else ()
        return [(span.at, self._prompts.tensor(part)) for span, part in zip(spans, parts, strict=True)]

    def _choose(self, memory: Memory, kind: SamplerKind) -> None:
        """Samples all rows with the parameters of their slots. Parameters beyond `kind` are ignored."""
        kernels, buffers = self._kernels, memory.buffers
        logits, lines, counts = memory.logits, memory.lines, self._counts.table
        tokens, finite = kernels.greedy(logits)
        if kind is SamplerKind.WHOLE:
            logits = kernels.adjust(logits, lines, counts, self._tables, buffers)
            tokens, _ = kernels.greedy(logits)
        if kind is not SamplerKind.GREEDY:
            kernels.draw(logits, kernels.ask(self._tables, buffers), tokens)
        kept = kernels.keep(tokens, finite, self._tables, buffers, self._errors, memory.block)
        if kind is SamplerKind.WHOLE:
            kernels.count_tokens(kept, lines, counts)
            kernels.tell_likely(memory.logits, kept, self._tables, buffers, memory.told)
