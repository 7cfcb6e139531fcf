"""The forward pass of a decoder, operator by operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from forebay.attention.backend import Batch, IndexBatch
from forebay.compute.finding import InRows, OnPages, sharing
from forebay.compute.low_rank import AdapterStacks
from forebay.compute.pieces import Pieces, pieces
from forebay.compute.rows import Launch, RowAdapters
from forebay.device import Device
from forebay.gpu.interface import Kernels
from forebay.layers.adapted import AdaptedTokens, GatheredTokens, StepAdapters
from forebay.layers.decoder import Decoder, FeatureRows, Forward, ImageRows
from forebay.layers.step import Index, WindowRows
from forebay.models.called import CalledModel
from forebay.protocol.constants import ROW_WORDS
from forebay.state.images import ImagePool, RowImages
from forebay.state.inputs import PromptRows
from forebay.state.pages import KvPool
from forebay.state.recurrent import StateStore
from forebay.state.slots import Int64s, SlotTables


class TorchCompute:
    """A model's forward pass in PyTorch's operators, on any device. The reference for all other implementations."""

    def __init__(
        self,
        model: Decoder | CalledModel,
        tables: SlotTables,
        kv: KvPool,
        prompts: PromptRows,
        device: Device,
        images: ImagePool | None = None,
        kernels: Kernels | None = None,
        states: StateStore | None = None,
    ) -> None:
        """Creates the forward pass. `images`: the pool of vision tower outputs; None: the model takes no images.

        `states`: the recurrent states; None: the model has none.

        `kernels` look up the positions of sparse slots; None: PyTorch's operators do, if they can access the host's
        memory.
        """
        self._model = model
        self._kernels = kernels
        self._images = images
        self._states = states
        self._tables = tables
        self._kv = kv
        self._prompts = prompts
        self._device = device
        indexer = model.config.indexer
        self.choose_from = None if indexer is None else indexer.top_k
        """The first position whose query attends to only a part of its context; None: the model has no index."""

        self._sharing = [] if indexer is None else sharing(indexer, model.config.num_hidden_layers)

    def logits(self, launch: Launch) -> torch.Tensor:
        forward = self.forward(launch)
        logits = self._model(forward)
        self._tell_found(launch, forward)
        self._save_states(launch)
        return logits

    def states(self, launch: Launch) -> torch.Tensor:
        forward = self.forward(launch)
        states = self._model.states(forward)
        self._tell_found(launch, forward)
        self._save_states(launch)
        return states

    def head(self, states: torch.Tensor) -> torch.Tensor:
        return self._model.logits(states)

    def _load_states(self, launch: Launch, cut: Pieces) -> Any:
        """Loads the states that the rows continue, in the form that the model reads; None: the model has none."""
        rows = launch.rows.states
        if rows is None:
            return None
        assert self._states is not None
        self._states.copy(rows.loads)
        self._states.clear(rows.fresh)
        return self._states.step(rows.pieces(cut.row, cut.length))

    def _save_states(self, launch: Launch) -> None:
        rows = launch.rows.states
        if rows is not None:
            assert self._states is not None
            self._states.copy(rows.saves)

    def _tell_found(self, launch: Launch, forward: Forward) -> None:
        if launch.found is not None:
            assert forward.index is not None
            assert isinstance(forward.index.find, InRows)
            launch.found.fill(forward.index.find.told)

    def vectors(self, launch: Launch, tokens: Int64s) -> torch.Tensor:
        states = self._model.states(self.forward(launch, tokens)).float()
        self._save_states(launch)
        return states

    def greedy(self, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.ops.greedy(self.logits(launch))

    def forward(self, launch: Launch, tokens: Int64s | None = None) -> Forward:
        """Returns the model's input for a step. Runs as queued work.

        Tokens and positions are computed on the device from the plan's rows; all decisions are made on the host.

        `tokens`: the tokens whose final states are needed, numbered over all rows. None: the tokens that sample, and
        the tokens before those of `rows.prompts`.
        """
        rows, tables, kv, backend = launch.rows, self._tables, self._kv, self._model.backend
        cut = pieces(rows, backend, self.choose_from)
        total = int(cut.length.sum())
        spans = [] if rows.given is None else rows.given.spans(cut.row, cut.start, cut.length)
        wanted = cut.last[rows.sampling]
        if tokens is not None:
            wanted = cut.places(rows)[tokens]
        elif rows.prompts is not None:
            wanted = np.concatenate((wanted, cut.places(rows)[rows.before_prompts]))
        row, starts, lengths, sampled, sparse, *given = self._device.copy_in(
            cut.row, cut.start, cut.length, wanted, cut.sparse(rows), *map(self._prompts.rows, spans)
        )

        slots = launch.inputs.records("rows", ROW_WORDS)[:, 0].index_select(0, row)
        piece = torch.arange(len(row), device=slots.device).repeat_interleave(lengths, output_size=total)
        first = starts - (lengths.cumsum(0) - lengths)
        positions = torch.arange(total, device=slots.device) + first.index_select(0, piece)
        token_slots = slots.index_select(0, piece)
        pages = _pages(tables.page_table, token_slots, positions, kv.page_size)
        stride = kv.main.page_stride
        numbers, images = (positions, None) if rows.images is None else self._seen(rows.images, cut, positions)
        writes = pages * stride + positions % kv.page_size
        batch = Batch(
            start=cut.start[: cut.whole],
            length=cut.length[: cut.whole],
            offset=cut.offset[: cut.whole],
            host_slots=rows.slot[cut.row[: cut.whole]],
            slots=slots[: cut.whole],
            lengths=lengths[: cut.whole],
            ends=(starts + lengths)[: cut.whole],
            page_table=tables.page_table,
            page_size=kv.page_size,
            page_stride=stride,
            spans=self._spans(rows.images, cut),
        )
        return Forward(
            tokens=tables.token_pool.view(-1).index_select(0, token_slots * tables.stride + positions),
            given=[(span.at, self._prompts.tensor(part)) for span, part in zip(spans, given, strict=True)],
            positions=numbers,
            sampled=sampled,
            writes=writes,
            prepared=backend.prepare(batch, kv.dtype),
            kv=kv.layers,
            index=self._index(cut, slots, starts, lengths, token_slots, positions, sparse),
            images=images,
            states=self._load_states(launch, cut),
            adapted=None if rows.adapters is None else self._adapted(rows.adapters, cut),
            features=self._features(token_slots, positions, writes),
            window=self._window(batch, token_slots, positions),
        )

    def _window(self, batch: Batch, slots: torch.Tensor, positions: torch.Tensor) -> WindowRows | None:
        """Returns where window layers write keys and values, and their attention input; None: no window pool."""
        kv, table, backend = self._kv, self._tables.window_table, self._model.backend
        if kv.window is None:
            return None
        assert table is not None
        pages, stride = _pages(table, slots, positions, kv.page_size), kv.window.page_stride
        of_window = replace(batch, page_table=table, page_stride=stride, window=kv.longest_window)
        writes = pages * stride + positions % kv.page_size
        return WindowRows(kv.window_layers, writes, backend.prepare(of_window, kv.dtype))

    def _features(self, slots: torch.Tensor, positions: torch.Tensor, writes: torch.Tensor) -> FeatureRows | None:
        """Returns where features are read and written; None: no draft head uses them."""
        pool, size = self._kv.features, self._kv.page_size
        if pool is None:
            return None
        before = (positions - 1).clamp(min=0)
        pages = _pages(self._tables.page_table, slots, before, size)
        return FeatureRows(pool, self._kv.feature_entries(writes), pages * size + before % size)

    def _adapted(self, adapters: RowAdapters, cut: Pieces) -> StepAdapters:
        """Returns the adapter of each token, in the order of pieces."""
        held, place = adapters.held, np.repeat(adapters.place[cut.row], cut.length)
        if isinstance(held, AdapterStacks):
            (places,) = self._device.copy_in(np.where(place < 0, held.places, place).astype(np.int32))
            return held.of_tokens(places)
        present = [at for at in held if (place == at).any()]
        tokens = self._device.copy_in(*(np.flatnonzero(place == at) for at in present))
        return GatheredTokens([AdaptedTokens(own, held[at]) for own, at in zip(tokens, present, strict=True)])

    def _spans(self, images: RowImages | None, cut: Pieces) -> list[list[tuple[int, int]]]:
        """Returns, for each piece, the spans of images whose positions attend to each other; []: no piece has any."""
        if images is None or not self._model.config.whole_images:
            return []
        found = images.within(cut.row, cut.start, cut.length)
        return found if any(found) else []

    def _seen(self, images: RowImages, cut: Pieces, positions: torch.Tensor) -> tuple[torch.Tensor, ImageRows | None]:
        """Returns the positions for RoPE, [n] or [3, n], and the tower outputs for tokens of images; None: no images.

        If the model's RoPE uses one coordinate per position, returns `positions` unchanged.
        """
        tokens = images.tokens(cut.row, cut.start, cut.length)
        numbers, at, entries = self._device.copy_in(tokens.positions, tokens.at, tokens.entries)
        if self._model.config.sections is None:
            numbers = positions
        if not len(tokens.at):
            return numbers, None
        assert self._images is not None
        return numbers, ImageRows(at, self._images.read(entries))

    def _index(
        self,
        cut: Pieces,
        slots: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        token_slots: torch.Tensor,
        positions: torch.Tensor,
        sparse: torch.Tensor,
    ) -> Index | None:
        """Returns where index keys are written, and the input of pieces whose queries choose; None: no index."""
        tables, kv, indexer = self._tables, self._kv, self._model.config.indexer
        if indexer is None:
            return None
        assert kv.index is not None
        table, size, stride = tables.index_page_table, kv.page_size, kv.index.page_stride
        writes = _pages(table, token_slots, positions, size) * stride + positions % size
        first, prepared = None, None
        if cut.whole < len(cut.row):
            first = int(cut.offset[cut.whole])
            choose = slice(cut.whole, None)
            batch = IndexBatch(
                start=cut.start[choose],
                length=cut.length[choose],
                slots=slots[choose],
                lengths=lengths[choose],
                ends=(starts + lengths)[choose],
                page_table=table,
                page_size=size,
                page_stride=stride,
                top_k=indexer.top_k,
            )
            prepared = self._model.backend.prepare_index(batch)
        choosing = token_slots[first:]
        find: OnPages | InRows = OnPages(tables.page_table, kv, choosing)
        if len(sparse):
            assert tables.hot is not None
            find = InRows(tables, tables.hot, kv, choosing, sparse, self._sharing, self._kernels)
        return Index(kv.index_keys, writes, first, prepared, find)


def _pages(table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Returns the pages int64 [n] that contain `positions` [n] of `slots` [n]."""
    return table.view(-1).index_select(0, slots * table.shape[1] + positions // page_size).long()
