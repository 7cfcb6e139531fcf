"""Shared parts of the hand's tests: plans, tiny models, and a serial scheduler that uses only the protocol."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.described import handshake_model
from forebay.device import open_device
from forebay.device.deferred import DeferredDevice
from forebay.protocol.constants import FLAG_MASKED, FLAG_SAMPLE, SLOT_WORDS
from forebay.protocol.frames import Float32s, Int32s
from forebay.protocol.plan import Plan
from forebay.runner.host_tier import HostMemory
from forebay.runner.launched import Launched
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig

HOST = open_device("cpu", 1)
DEVICES = pytest.mark.parametrize(
    ("device", "lookahead"), [("cpu", 0), ("cpu", 1), ("deferred", 0), ("deferred", 1)], ids=lambda value: str(value)
)
TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPE_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
ROPE_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
ROPE_YARN_MSCALE = {
    **ROPE_YARN,
    "mscale": 0.8,
    "mscale_all_dim": 0.5,
    "beta_fast": 16,
    "beta_slow": 2,
    "truncate": False,
}

EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
QWEN3_MOE: dict[str, Any] = {**TINY, **EXPERTS, "num_experts": 8, "head_dim": 24}
GROUPED_EXPERTS: dict[str, Any] = {**EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
GLM4_MOE: dict[str, Any] = {**TINY, **GROUPED_EXPERTS, "routed_scaling_factor": 1.5, "head_dim": 24}
LATENT: dict[str, Any] = {
    **TINY,
    **GROUPED_EXPERTS,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
}
LATENT_WIDE: dict[str, Any] = {**LATENT, "first_k_dense_replace": 4, "qk_rope_head_dim": 32, "v_head_dim": 32}
INDEXED: dict[str, Any] = {**LATENT, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
ROPE_YARN_LATENT = {**ROPE_YARN, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}

GEMMA: dict[str, Any] = {**TINY, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 5}
ROPE_GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[type[Any], PreTrainedConfig]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**TINY, tie_word_embeddings=True)),
    "llama-untied-biases": (LlamaForCausalLM, LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
    "llama-mha": (LlamaForCausalLM, LlamaConfig(**{**TINY, "num_key_value_heads": 4})),
    "llama-head-dim": (LlamaForCausalLM, LlamaConfig(**TINY, head_dim=24)),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=ROPE_LLAMA3)),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=ROPE_LINEAR)),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=ROPE_YARN)),
    "llama-yarn-mscale": (LlamaForCausalLM, LlamaConfig(**TINY, rope_parameters=ROPE_YARN_MSCALE)),
    "mistral": (MistralForCausalLM, MistralConfig(**TINY, sliding_window=None)),
    "mistral-window": (MistralForCausalLM, MistralConfig(**TINY, sliding_window=17)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**GEMMA, attn_logit_softcapping=0.7, final_logit_softcapping=1.5)),
    "gemma2-one": (
        Gemma2ForCausalLM,
        Gemma2Config(**{**GEMMA, "sliding_window": 1, "head_dim": 40, "num_key_value_heads": 1}),
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**GEMMA, layer_types=KINDS, rope_parameters=ROPE_GEMMA3)),
    "gemma3-windows-only": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**{**GEMMA, "sliding_window": 16}, tie_word_embeddings=False),
    ),
    "gemma3-long-windows": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**{**GEMMA, "sliding_window": 127}, layer_types=KINDS[::-1], final_logit_softcapping=3.0),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**TINY)),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config(**TINY, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=32)),
    "qwen3-bias": (Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=16, attention_bias=True)),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=True)),
    "qwen3-moe-plain": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=False)),
    "qwen3-moe-some-dense": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**{**QWEN3_MOE, "num_hidden_layers": 4}, decoder_sparse_step=2, mlp_only_layers=[3]),
    ),
    "glm4-moe": (Glm4MoeForCausalLM, Glm4MoeConfig(**GLM4_MOE, use_qk_norm=True)),
    "glm4-moe-bias": (Glm4MoeForCausalLM, Glm4MoeConfig(**GLM4_MOE, attention_bias=True, n_shared_experts=2)),
    "deepseek-v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(**LATENT, topk_method="group_limited_greedy", rope_parameters=ROPE_YARN_LATENT),
    ),
    "deepseek-v2-lite": (DeepseekV2ForCausalLM, DeepseekV2Config(**{**LATENT, "q_lora_rank": None})),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config(**LATENT, rope_parameters=ROPE_YARN_LATENT)),
    "deepseek-v3-halves": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**LATENT, rope_interleave=False, norm_topk_prob=False, attention_bias=True),
    ),
    # Row and head sizes fill the CPU kernels' groups, and no choice of experts depends on rounding.
    "deepseek-v3-wide": (DeepseekV3ForCausalLM, DeepseekV3Config(**LATENT_WIDE, rope_parameters=ROPE_YARN_LATENT)),
    "deepseek-v32": (DeepseekV32ForCausalLM, DeepseekV32Config(**INDEXED, rope_parameters=ROPE_YARN_LATENT)),
    "glm-dsa": (GlmMoeDsaForCausalLM, GlmMoeDsaConfig(**INDEXED, attention_bias=True)),
    "glm-dsa-shared": (
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig(**INDEXED, indexer_types=["full", "shared", "shared", "full"]),
    ),
}


def reference_model(family: str) -> Any:
    """A tiny random transformers model of one of the families above."""
    return random_model(*FAMILIES[family])


def random_model(kind: type[Any], config: PreTrainedConfig) -> Any:
    """A transformers model. Its weights are so large that wrong positions change the output."""
    torch.manual_seed(7)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if name.endswith("norm.weight") else 0.12))
            if name.endswith("norm.weight"):
                parameter.add_(1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand_like(buffer) * 0.2)
    return model


def is_gemma(model: Any) -> bool:
    """True if norms store their distance from 1."""
    return model.config.model_type.startswith(("gemma2", "gemma3"))


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights with which a model computes. Norms that store their distance from 1 have the 1 added."""
    weights = hub_weights(model)
    if not is_gemma(model):
        return weights
    return {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in weights.items()}


def hub_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a transformers model under the names of checkpoints, with separate tensors for each expert."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, fused, kind = name.rpartition(".mlp.experts.")
        if not fused:
            found[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            at = f"{prefix}.mlp.experts.{expert}"
            if kind == "down_proj":
                found[f"{at}.down_proj.weight"] = matrix
            else:
                found[f"{at}.gate_proj.weight"], found[f"{at}.up_proj.weight"] = matrix.chunk(2)
    return found


def hf_config(config: PreTrainedConfig, architecture: str) -> dict[str, Any]:
    """The `config.json` of a checkpoint of the model."""
    return {**config.to_dict(), "architectures": [architecture]}


def wire_config(model_config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A handshake `config` object with dummy weights. If `model_config` is empty, the caller adds the model."""
    return {
        "model": handshake_model(model_config) if model_config else {},
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "quantization": None,
        "kv_cache_dtype": None,
        "page_size": 4,
        "slots": 8,
        "context_length": 96,
        "chunked_prefill_size": 1024,
        "max_running_requests": 5,
        "attention_backend": None,
        "graph_rows": 0,
        "mem_fraction_static": 0.5,
        "max_total_tokens": 8 * 96,
        "arena_bytes": 0,
        "rank": 0,
        "world_size": 1,
        "expert_parallel": False,
        "step_group": False,
        "threads": 1,
        "seed": 0,
        "weight_cache_bytes": 0,
        "host_bytes": None,
        "host_ratio": None,
        "host_fits": False,
        "host_pages": None,
        "host_share": 0.8,
        "copy_gbps": None,
        "kv_checksum": False,
        "hot_row_tokens": None,
        "sparse_top_k": None,
        "image_pool_tokens": None,
        "state_pages": None,
        "window_ratio": None,
        "kv_save_order": "behind",
        **changes,
    }


def runner_of(
    model: Any, arena: npt.NDArray[np.uint8] | None = None, host: HostMemory | None = None, **changes: Any
) -> ModelRunner:
    """A runner with the weights of a transformers model."""
    config = wire_config(hf_config(model.config, type(model).__name__), **changes)
    runner = ModelRunner(RunnerConfig.from_dict(config), arena, host)
    runner.model.load_weights(whole_weights(model).items())
    return runner


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a slot, as in the protocol."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: int = 0
    seed: int = 0
    min_total: int = 0
    logprobs: int = -1
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    """The only ids that may be sampled. Empty: all."""


EVERYTHING = Sampling(
    temperature=0.9,
    top_p=0.8,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    seed=1,
    min_total=50,
    logprobs=3,
    stop_ids=(5,),
    bias=((4, 2.0),),
)
"""Sampling parameters that use every feature."""


@dataclass
class PlanBuilder:
    """Collects the columns of a plan."""

    step: int = 1
    slots: list[list[int]] = field(default_factory=list)
    slot_floats: list[list[float]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    bias: list[tuple[int, float]] = field(default_factory=list)
    page_writes: list[tuple[int, int, int]] = field(default_factory=list)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    row_tokens: list[int] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    embeds: list[tuple[int, int]] = field(default_factory=list)
    allowed_counts: list[tuple[int, int]] = field(default_factory=list)
    allowed_ids: list[int] = field(default_factory=list)
    copies: list[tuple[int, int, int, int]] = field(default_factory=list)
    wait_us: list[int] = field(default_factory=list)
    host_writes: list[tuple[int, int, int]] = field(default_factory=list)
    hot_rows: list[tuple[int, int, int]] = field(default_factory=list)
    copy_spans: list[tuple[int, int]] = field(default_factory=list)
    images: list[tuple[int, ...]] = field(default_factory=list)
    image_pages: list[int] = field(default_factory=list)
    image_spans: list[tuple[int, ...]] = field(default_factory=list)
    span_pages: list[int] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, int, int, int]] = field(default_factory=list)
    draft_tokens: list[int] = field(default_factory=list)
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    place_writes: list[tuple[int, int, int]] = field(default_factory=list)
    slot_places: list[tuple[int, int]] = field(default_factory=list)
    copy_sources: list[int] = field(default_factory=list)
    window_writes: list[tuple[int, int, int]] = field(default_factory=list)

    def slot(
        self,
        slot: int,
        tokens: Sequence[int],
        sampling: Sampling = Sampling(),
        prompt_len: int | None = None,
        arena_offset: int = -1,
        embeds_offset: int = -1,
    ) -> None:
        s = sampling
        prompt_len = len(tokens) if prompt_len is None else prompt_len
        low, high = np.array([s.seed], np.uint64).view(np.int32).tolist()
        counts = [len(s.stop_ids), len(s.bias), arena_offset]
        self.slots.append([slot, len(tokens), prompt_len, s.top_k, low, high, s.min_total, s.logprobs, *counts])
        self.slot_floats.append(
            [s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty]
        )
        if arena_offset < 0:
            self.tokens += tokens
        self.stop_ids += s.stop_ids
        self.bias += s.bias
        if s.allowed:
            self.allowed_counts.append((slot, len(s.allowed)))
            self.allowed_ids += s.allowed
        if embeds_offset >= 0:
            self.embeds.append((slot, embeds_offset))

    def row(self, slot: int, start: int, length: int, sample: bool = True, masked: bool = False) -> None:
        flags = FLAG_SAMPLE | FLAG_MASKED if masked else FLAG_SAMPLE
        self.rows.append((slot, start, length, flags if sample else 0))

    def image(
        self,
        image: int,
        layers: tuple[int, int],
        grid: tuple[int, int],
        offset: int = -1,
        pages: Sequence[int] = (),
    ) -> None:
        self.images.append((image, *layers, *grid, offset, len(pages)))
        self.image_pages += pages

    def image_span(self, slot: int, position: int, grid: tuple[int, int], rope: int, pages: Sequence[int] = ()) -> None:
        self.image_spans.append((slot, position, *grid, rope, len(pages)))
        self.span_pages += pages

    def build(self) -> Plan:
        return Plan(
            self.step,
            _ints(self.slots, SLOT_WORDS),
            np.array(self.slot_floats, np.float32).reshape(-1, 6),
            _ints(self.tokens),
            _ints(self.stop_ids),
            _ints([token for token, _ in self.bias]),
            np.array([value for _, value in self.bias], np.float32),
            _ints(self.page_writes, 3),
            _ints(self.rows, 4),
            _ints(self.row_tokens),
            _ints(self.segments, 2),
            _ints(self.embeds, 2),
            _ints(self.allowed_counts, 2),
            _ints(self.allowed_ids),
            _ints(self.copies, 4),
            _ints(self.wait_us),
            _ints(self.host_writes, 3),
            _ints(self.hot_rows, 3),
            _ints(self.copy_spans, 2),
            _ints(self.images, 7),
            _ints(self.image_pages),
            _ints(self.image_spans, 6),
            _ints(self.span_pages),
            prompt_logprobs=_ints(self.prompt_logprobs, 4),
            draft_tokens=_ints(self.draft_tokens),
            state_loads=_ints(self.state_loads, 2),
            state_saves=_ints(self.state_saves, 2),
            place_writes=_ints(self.place_writes, 3),
            slot_places=_ints(self.slot_places, 2),
            copy_sources=_ints(self.copy_sources),
            window_writes=_ints(self.window_writes, 3),
        ).staged()


def _ints(values: Sequence[Any], width: int = 0) -> Int32s:
    array = np.array(values, np.int32)
    return array.reshape(-1, width) if width else array


@dataclass
class Request:
    """A request of the mini scheduler, and its results."""

    prompt: list[int]
    count: int
    sampling: Sampling = Sampling()
    arrival: int = 0
    """The first step in which the scheduler considers the request."""
    replayed: list[int] = field(default_factory=list)
    """Tokens that the request had generated before."""
    place: int = -1
    """The place of its adapter. -1: the base model."""
    embeds_offset: int = -1
    """The offset of the prompt's embeddings in the arena. If it is set, the hand gets no token ids of the prompt."""
    prompt_logprobs: int = -1
    """The number of likeliest tokens to report for each token of the prompt. -1: no log-probabilities of the prompt."""
    of_prompt: list[tuple[int, Int32s, Float32s]] = field(default_factory=list)
    """Rank, ids and values of the prompt's tokens, from the second on."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[Int32s, Float32s]] = field(default_factory=list)
    computed: int = 0
    sampled: int = 0
    """The number of generated tokens once the steps in flight are done."""
    slot: int = -1


class MiniBrain:
    """Serves requests on a runner. Every step computes a chunk or a token of each running request.

    With a lookahead of 1 it launches the next plan before it reads the result of the last one.
    """

    def __init__(self, runner: ModelRunner, seed: int = 0, lookahead: int = 0) -> None:
        self.runner = runner
        self._lookahead = lookahead
        self._random = np.random.default_rng(seed)
        self.pages = self._random.permutation(runner.kv.page_count).tolist()
        self._step = 0

    def serve(self, requests: Sequence[Request], chunk: int = 1000, slots: Iterable[int] | None = None) -> None:
        """Runs all requests to their end. `slots`: the usable slots, last one first. Default: all, in random order."""
        free = list(slots) if slots is not None else self._random.permutation(self.runner.config.slots).tolist()
        waiting = list(requests)
        running: list[Request] = []
        flying: deque[tuple[list[Request], list[tuple[Request, int]], Launched]] = deque()
        first, waits = self._step, self._waits()
        while self._goes_on(bool(waiting or running)):
            self._step += 1
            builder = PlanBuilder(self._step)
            for request in [r for r in waiting if r.arrival <= self._step and free]:
                if not free:
                    break
                waiting.remove(request)
                running.append(request)
                request.slot = free.pop()
                self._admit(request, builder)
            self._random.shuffle(running)
            sampling = [request for request in running if self._advance(request, builder, chunk)]
            by_slot = {request.slot: request for request in running}
            wanting = [(by_slot[slot], count) for slot, _, count, _ in builder.prompt_logprobs]
            flying.append((sampling, wanting, self.runner.launch(self._plan(builder))))
            while len(flying) > (self._lookahead if waiting or running else 0):
                self._collect(*flying.popleft())
                for request in [r for r in running if len(r.tokens) == r.count]:
                    running.remove(request)
                    free.append(request.slot)
        # The host waited for an asynchronous device exactly once for each step.
        assert self._waits() - waits in (0, self._step - first)

    def _goes_on(self, busy: bool) -> bool:
        """True if another step follows. `busy`: whether this brain has requests."""
        return busy

    def _plan(self, builder: PlanBuilder) -> Plan:
        return builder.build()

    def _waits(self) -> int:
        device = self.runner.device
        return device.waits if isinstance(device, DeferredDevice) else 0

    def _admit(self, request: Request, builder: PlanBuilder) -> None:
        known = [0] * len(request.prompt) if request.embeds_offset >= 0 else request.prompt
        request.tokens = list(request.replayed)
        request.sampled = len(request.tokens)
        builder.slot(
            request.slot,
            known + request.replayed,
            request.sampling,
            prompt_len=len(request.prompt),
            embeds_offset=request.embeds_offset,
        )
        if request.place >= 0:
            builder.slot_places.append((request.slot, request.place))
        total = len(request.prompt) + request.count
        for index in range(-(-total // self.runner.config.page_size)):
            builder.page_writes.append((request.slot, index, self.pages.pop()))

    def _advance(self, request: Request, builder: PlanBuilder, chunk: int) -> bool:
        if request.sampled == request.count:
            return False
        total = len(request.prompt) + request.sampled
        length = min(chunk, total - request.computed)
        sample = request.computed + length == total
        builder.row(request.slot, request.computed, length, sample)
        count = min(length, len(request.prompt) - 1 - request.computed)
        if request.prompt_logprobs >= 0 and count > 0:
            builder.prompt_logprobs.append((request.slot, request.computed + 1, count, request.prompt_logprobs))
        request.computed += length
        request.sampled += sample
        return sample

    @staticmethod
    def _collect(sampling: Sequence[Request], wanting: Sequence[tuple[Request, int]], launched: Launched) -> None:
        result = launched.collect()
        assert result.step == launched.step
        assert not result.row_errors.any()
        counts = result.logprob_counts if len(result.logprob_counts) else np.zeros(len(sampling), np.int32)
        at = 0
        for request, token, count in zip(sampling, result.tokens.tolist(), counts.tolist(), strict=True):
            request.tokens.append(token)
            request.logprobs.append((result.logprob_ids[at : at + count], result.logprob_values[at : at + count]))
            at += count
        at, ranks = 0, iter(result.prompt_ranks.tolist())
        for request, count in wanting:
            for rank in islice(ranks, count):
                entries = slice(at, at + 1 + request.prompt_logprobs)
                request.of_prompt.append((rank, result.prompt_ids[entries], result.prompt_values[entries]))
                at = entries.stop
        assert at == len(result.prompt_ids)


def greedy_reference(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and the log-probabilities [count, vocabulary] of each, computed without a cache."""
    tokens = list(prompt)
    distributions = []
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].float()
            distributions.append(logits.log_softmax(-1))
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], torch.stack(distributions)


def products_of_floats(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Collects the arguments of each product of 8-bit floats from here on."""
    called = []
    product = torch._scaled_mm

    def calling(*args: Any, **named: Any) -> torch.Tensor:
        called.append(args)
        return product(*args, **named)

    monkeypatch.setattr(torch, "_scaled_mm", calling)
    return called
