"""A decoder's step as one call into the compiled kernels."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import torch

from forebay.compute.rows import Launch, Rows
from forebay.device.memory import HugePages
from forebay.kernels.library import (
    ACTIVATIONS,
    PARTS,
    SCORES,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RoutingSpec,
    StepSpec,
    library,
    open_mp,
)
from forebay.kernels.packing import (
    DTYPES,
    Packing,
    compiled_parts,
    format_number,
    head_packing,
    linear_packing,
    pack,
    packings,
    stack_packing,
)
from forebay.layers.decoder import Decoder
from forebay.layers.linear import Linear
from forebay.layers.moe import MixtureOfExperts, Stack
from forebay.layers.norm import Norm
from forebay.state.inputs import PromptRows
from forebay.state.kv_format import KvFormat
from forebay.state.pages import KvPool
from forebay.state.slots import Int64s, PlanError, SlotTables
from forebay.weights.config import ModelConfig
from forebay.weights.parts import Dense, Experts, GroupedQuery, LayerKind

ERRORS = {1: "a row has a position without a page", 2: "a row has a token that is not of the vocabulary"}


def why_not_plain(config: ModelConfig) -> str | None:
    """A part of the model without a kernel, whatever its sizes; None: every part has one."""
    attention = config.attention
    if not isinstance(attention, GroupedQuery):
        return "latent attention"
    if config.recurrent:
        return "recurrent layers"
    if config.attends or None in config.feeds:
        return "layers of one part"
    if not all(feed is None or feed.gated for feed in config.feeds):
        return "feed-forward parts without gates"
    if attention.gate:
        return "a gate behind attention"
    if attention.both_ways:
        return "positions that see what is behind them"
    if config.sections is not None:
        return "positions of three numbers"
    return _why_not_layers(config)


def _why_not_layers(config: ModelConfig) -> str | None:
    """What differs between layers, or goes beyond their two parts, without a kernel; None: there is nothing."""
    attention, kinds = config.attention, config.kinds
    if isinstance(attention, GroupedQuery) and (attention.value_norm or attention.keys_are_values):
        return "norms of values, or values that are keys"
    if isinstance(attention, GroupedQuery) and attention.plain_norms:
        return "norms of heads without weights"
    if any(kind.chunk is not None for kind in kinds):
        return "chunks of attention"
    if any(kind.heads is not None for kind in kinds):
        return "attention that differs between layers in more than windows"
    if any(kind.keys_of is not None for kind in kinds):
        return "layers that share keys and values"
    if any(kind.scaled for kind in kinds):
        return "factors of layers"
    if config.layer_inputs is not None:
        return "inputs of each layer"
    if any((rope.scaling or {}).get("rope_type") == "proportional" for rope in config.ropes):
        return "heads of which some pairs are rotated in proportion"
    sizes = {feed for feed in config.feeds if isinstance(feed, Dense)}
    experts = {feed for feed in config.feeds if isinstance(feed, Experts)}
    if len(sizes) > 1 or len(experts) > 1:
        return "feed-forward parts whose sizes differ between layers"
    normed = any(
        isinstance(feed, Experts) and kind.norms in ("after", "around")
        for feed, kind in zip(config.feeds, kinds, strict=True)
    )
    if any(one.weighs_inputs for one in experts):
        return "experts whose inputs have their weights"
    if normed or any(one.beside for one in experts):
        return "norms behind experts"
    return None


def _heads(config: ModelConfig) -> GroupedQuery:
    """The attention of a model that there are kernels for."""
    assert isinstance(config.attention, GroupedQuery)
    return config.attention


def _intermediate(config: ModelConfig) -> int:
    """Elements between the products of the layers without experts; 0: there are none."""
    return next((feed.intermediate_size for feed in config.feeds if isinstance(feed, Dense)), 0)


def _experts(config: ModelConfig) -> Experts | None:
    """The experts of the layers that have some; None: there are none."""
    return next((feed for feed in config.feeds if isinstance(feed, Experts)), None)


def _routing(experts: Experts | None) -> RoutingSpec:
    """The routing in the library's form."""
    if experts is None:
        return RoutingSpec()
    routing = experts.routing
    return RoutingSpec(
        count=experts.count,
        per_token=experts.per_token,
        intermediate=experts.intermediate_size,
        shared=experts.shared_size,
        scores=SCORES.index(routing.scores),
        in_float32=routing.in_float32,
        groups=routing.groups,
        kept_groups=routing.kept_groups,
        best_of_group=routing.best_of_group,
        normalise=routing.normalise,
        scaling=routing.scaling,
    )


def _attention(heads: GroupedQuery, kind: LayerKind, angles: list[tuple[torch.Tensor, torch.Tensor]]) -> AttentionSpec:
    """A kind of attention in the library's form; `angles` are cosines and sines of each rotary embedding."""
    cos, sin = (None, None) if kind.rope is None else (table.data_ptr() for table in angles[kind.rope])
    return AttentionSpec(
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        rotary_dim=0 if kind.rope is None else heads.rotary_dim,
        window=kind.window or 0,
        norm_rows=heads.row_norms,
        scale=heads.head_dim**-0.5 if heads.scale is None else heads.scale,
        cap=heads.cap or 0.0,
        cos=cos,
        sin=sin,
    )


def _sampling(rows: Rows) -> Int64s:
    """The last tokens of rows that sample, numbered over all rows."""
    return rows.last[rows.sampling]


class NativeCompute:
    """Implements `Compute` and `States`.

    The matrices of the model are moved, so its own forward pass can't be used afterwards.
    """

    def __init__(self, model: Decoder, tables: SlotTables, kv: KvPool, prompts: PromptRows, threads: int) -> None:
        self._library = library()
        self._params = model.params
        self._tables = tables
        self._prompts = prompts
        self.times = np.zeros(0, np.uint64)
        """Nanoseconds of steps for each of `PARTS`, since the call of `watch`."""
        self._vocabulary, self._hidden = model.config.vocab_size, model.config.hidden_size
        self._room = HugePages(packing.nbytes for packing in packings(model) if packing.name not in model.params.packed)
        # It knows the matrices as well, and none of them would be freed as long as it does.
        self._params.forget()
        # Everything that the description points to.
        self._kept: list[object] = [model, tables, kv]
        layers = (LayerSpec * len(model.blocks))()
        kinds: list[LayerKind] = []
        for layer, block, pages in zip(layers, model.blocks, kv.layers, strict=True):
            attention, mlp, experts = compiled_parts(block)
            layer.input_norm = self._vector(block.input_norm)
            layer.qkv, layer.qkv_bias = self._matrix(attention.qkv)
            norms = attention.norms or attention.row_norms
            if norms is not None:
                layer.q_norm, layer.k_norm = (self._vector(norm) for norm in norms)
            layer.output, layer.output_bias = self._matrix(attention.output)
            if attention.sinks is not None:
                layer.sinks = self._pointer(attention.sinks)
            layer.post_norm = self._vector(block.post_norm)
            if block.behind is not None:
                layer.attended_norm, layer.fed_norm = (self._vector(norm) for norm in block.behind)
            if attention.kind not in kinds:
                kinds.append(attention.kind)
            layer.attention = kinds.index(attention.kind)
            layer.parallel = block.parallel
            layer.formats[:2] = [format_number(of.format) for of in (attention.qkv, attention.output)]
            if mlp is not None:
                layer.gate_up, layer.gate_up_bias = self._matrix(mlp.gate_up, interleaved=True)
                layer.down, layer.down_bias = self._matrix(mlp.down)
                layer.formats[2:] = [format_number(of.format) for of in (mlp.gate_up, mlp.down)]
            if experts is not None:
                layer.experts = self._mixture(experts)
            layer.keys, layer.values = pages.keys.data_ptr(), pages.values.data_ptr()
        config = model.config
        heads = _heads(config)
        angles = [rotary.table(tables.context_length) for rotary in model.rotaries]
        attentions = (AttentionSpec * len(kinds))(*(_attention(heads, kind, angles) for kind in kinds))
        self._kept += [layers, attentions, angles, model.embedding]
        factors = model.query_factors(torch.arange(tables.context_length))
        spec = ModelSpec(
            dtype=DTYPES[kv.dtype],
            layers=len(layers),
            hidden=config.hidden_size,
            attentions=len(kinds),
            attention=attentions,
            mean_norms=config.mean_norms,
            wide_norms=config.wide_norms,
            activation=ACTIVATIONS.index(config.hidden_act),
            embedding_scale=config.scales.embeddings,
            input_scale=config.scales.inputs,
            residual_scale=config.scales.residuals,
            logit_scale=config.scales.logits,
            logit_cap=config.scales.logit_cap or 0.0,
            intermediate=_intermediate(config),
            vocabulary=config.vocab_size,
            positions=tables.context_length,
            page_size=kv.page_size,
            page_count=kv.page_count,
            threads=threads,
            eps=config.rms_norm_eps,
            embedding=model.embedding.data_ptr(),
            final_norm=self._vector(model.norm),
            head=self._head(model),
            head_format=format_number(model.head_format),
            layer=layers,
            routing=_routing(_experts(config)),
            kv_codes=kv.form is KvFormat.INT8,
            query_scales=None if factors is None else self._pointer(factors.flatten().float().contiguous()),
        )
        self._model = self._library.fb_model_new(ctypes.byref(spec), ctypes.byref(open_mp()))
        weakref.finalize(self, self._library.fb_model_free, self._model)

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """True if the kernels can compute the model. Its inner dimensions have to be even."""
        if why_not_plain(config) is not None:
            return False
        heads, experts = _heads(config), _experts(config)
        of_experts = (experts.intermediate_size, experts.shared_size) if experts is not None else ()
        sizes = (config.hidden_size, _intermediate(config), heads.head_dim, heads.rotary_dim, *of_experts)
        return all(size % 2 == 0 for size in sizes)

    def watch(self) -> None:
        """Begins to add up `times`, from zero."""
        self.times = np.zeros(len(PARTS), np.uint64)

    def logits(self, launch: Launch) -> torch.Tensor:
        logits = torch.empty(len(launch.rows.sampling), self._vocabulary)
        self._step(launch.rows, _sampling(launch.rows), StepSpec(logits=logits.data_ptr()))
        return logits

    def states(self, launch: Launch) -> torch.Tensor:
        rows = launch.rows
        wanted = np.concatenate((_sampling(rows), rows.before_prompts))
        tokens, places = np.unique(wanted, return_inverse=True)
        states = torch.empty(len(tokens), self._hidden)
        self._step(rows, tokens, StepSpec(states=states.data_ptr()))
        return states.index_select(0, torch.from_numpy(places))

    def vectors(self, launch: Launch, tokens: Int64s) -> torch.Tensor:
        vectors = torch.empty(len(tokens), self._hidden)
        self._step(launch.rows, tokens, StepSpec(vectors=vectors.data_ptr()))
        return vectors

    def head(self, states: torch.Tensor) -> torch.Tensor:
        states = states.contiguous()
        logits = torch.empty(len(states), self._vocabulary)
        self._library.fb_head(self._model, states.data_ptr(), len(states), logits.data_ptr())
        return logits

    def greedy(self, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        sampled = len(launch.rows.sampling)
        tokens = torch.empty(sampled, dtype=torch.int32)
        finite = torch.empty(sampled, dtype=torch.bool)
        spec = StepSpec(best=tokens.data_ptr(), finite=finite.data_ptr())
        self._step(launch.rows, _sampling(launch.rows), spec)
        return tokens, finite

    def _step(self, rows: Rows, wanted: Int64s, step: StepSpec) -> None:
        """Computes rows; `wanted`, ascending, are the tokens that `step` has memory for."""
        tables = self._tables
        columns = [torch.from_numpy(column).contiguous() for column in (rows.slot, rows.start, rows.length)]
        sampling = torch.from_numpy(wanted)
        step.rows = len(rows.slot)
        step.slot, step.start, step.length = (column.data_ptr() for column in columns)
        step.tokens, step.token_stride = tables.token_pool.data_ptr(), tables.stride
        step.pages, step.page_stride = tables.page_table.data_ptr(), tables.pages_per_slot
        step.sample, step.sampled = sampling.data_ptr(), len(sampling)
        if len(self.times):
            step.times = self.times.ctypes.data
        if rows.given is not None:
            addresses = self._prompts.addresses(rows.given)
            step.given, step.given_until = addresses.ctypes.data, rows.given.until.ctypes.data
        error = self._library.fb_step(self._model, ctypes.byref(step))
        if error:
            raise PlanError(ERRORS[error])

    def _vector(self, norm: Norm | None) -> int | None:
        return None if norm is None else self._pointer(norm.weight)

    def _matrix(self, linear: Linear, *, interleaved: bool = False) -> tuple[int, int | None]:
        packing = linear_packing(linear, self._params.dtype, interleaved=interleaved)
        packed = self._packed(packing, linear.weight)
        # The packed copy is the one that is used: free this one before the next is packed.
        linear.weight = linear.weight.new_empty(0)
        return self._pointer(packed), None if linear.bias is None else self._pointer(linear.bias)

    def _mixture(self, experts: MixtureOfExperts) -> ExpertsSpec:
        assert experts.stacks is not None
        gate_up, down = experts.stacks
        router = experts.router
        of_gates, of_outputs = (None, None) if experts.biases is None else map(self._pointer, experts.biases)
        return ExpertsSpec(
            router=self._pointer(router.weight),
            correction=None if router.bias is None else self._pointer(router.bias),
            gate_up=self._stack(gate_up, interleaved=True),
            down=self._stack(down),
            formats=(format_number(gate_up.format), format_number(down.format)),
            shared_gate=None if experts.shared_gate is None else self._pointer(experts.shared_gate),
            router_bias=None if router.logit_bias is None else self._pointer(router.logit_bias),
            gate_up_bias=of_gates,
            down_bias=of_outputs,
        )

    def _stack(self, stack: Stack, *, interleaved: bool = False) -> int:
        packing = stack_packing(stack, self._params.dtype, interleaved=interleaved)
        packed = self._packed(packing, stack.weight)
        stack.weight = stack.weight.new_empty(0)
        return self._pointer(packed)

    def _head(self, model: Decoder) -> int | None:
        if model.config.headless:
            return None
        packed = self._packed(head_packing(model), model.head)
        # A tied embedding stays, for its rows are looked up.
        if model.head is not model.embedding:
            model.head = model.head.new_empty(0)
        return self._pointer(packed)

    def _packed(self, packing: Packing, weight: torch.Tensor) -> torch.Tensor:
        """The matrix as the kernels read it: of an earlier start, or packed from `weight`."""
        name, (room, dtype) = packing.name, packing.room
        packed = self._params.packed.get(name)
        if packed is None:
            if weight.is_meta:
                raise ValueError(f"{name} is neither loaded nor packed")
            packed = self._params.packed[name] = self._room.take((room,), dtype)
            pack(weight.contiguous(), packing, packed)
        if (packed.shape, packed.dtype) != ((room,), dtype):
            # The kernels would read beyond its end.
            raise ValueError(f"{name} is packed as {packed.dtype} {list(packed.shape)}, not {dtype} [{room}]")
        return packed

    def _pointer(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()
