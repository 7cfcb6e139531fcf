"""Draft heads change no token, agree with modules of transformers, and give the same drafts after a prefix hit."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forebay.device import cpu
from forebay.gpu.choose import VARIABLE
from forebay.layers.draft_heads import DraftHead
from forebay.layers.params import WeightError
from forebay.protocol.constants import COPY_OK, COPY_RESTORE, COPY_SAVE
from forebay.runner.footprint import Footprint, footprints
from forebay.runner.head_drafts import HeadDrafts
from forebay.runner.host_tier import HostMemory
from forebay.runner.runner import ModelRunner
from forebay.state.config import ConfigError, RunnerConfig
from tests.hand.draft_heads import Head, Reference, eagle, headed, mtp
from tests.hand.drafted import COUNT, TOKENS, WAYS, Drafted, alone, same
from tests.hand.greedy import model_of
from tests.hand.support import PlanBuilder, Sampling, hf_config, random_model, runner_of, wire_config

PAGED: dict[str, Any] = {"attention_backend": "triton"}
"""Settings for steps as on a GPU, with the PyTorch reference operators."""
HEADS: dict[str, tuple[str, Any]] = {
    "eagle3": ("llama", eagle),
    "eagle3-qwen3": ("qwen3", lambda model: eagle(model, norm_before_residual=True, mapped=False, vocab_size=131)),
    "eagle3-own": ("qwen3", lambda model: eagle(model, taps=(1, 2), own_embedding=True, bias=True)),
    "eagle3-shared": (
        "llama-untied-biases",
        lambda model: eagle(model, mapped=False, vocab_size=131, own_output=False),
    ),
    "mtp-glm4-moe": ("glm4-moe", mtp),
    "mtp-glm4-moe-shared": ("glm4-moe-bias", lambda model: mtp(model, own_output=False)),
    "mtp-deepseek-v3": ("deepseek-v3", mtp),
}


class Watched:
    """Records the states and drafts of each pass of a head."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []
        self._draft = DraftHead.draft

    def __enter__(self) -> Watched:
        watched = self

        def draft(head: DraftHead, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            states, tokens = watched._draft(head, *args)
            watched.states.append(states.clone())
            watched._tokens.append(tokens.clone())
            return states, tokens

        self._patch = patch.object(DraftHead, "draft", draft)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    @property
    def tokens(self) -> list[list[int]]:
        return [tokens.tolist() for tokens in self._tokens]


@pytest.fixture(params=["eager", "paged", "graphs"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings for each kind of step: eager, paged, and with graphs."""
    monkeypatch.setenv(VARIABLE, "reference")
    ways: dict[str, dict[str, Any]] = {"eager": {}, "paged": PAGED, "graphs": {**PAGED, "graph_rows": 40}}
    return ways[request.param]


def entries(runner: ModelRunner, slot: int, count: int) -> torch.Tensor:
    """The keys [count, heads, dim] of a slot's first entries, or the latent parts of its rows."""
    size, layer = runner.config.page_size, runner.kv.layers[-1]
    pages = runner.tables.page_table[slot, : -(-count // size)].long()
    at = (pages[:, None] * runner.kv.main.page_stride + torch.arange(size)).flatten()[:count]
    kept = layer.values if layer.keys.data_ptr() == layer.values.data_ptr() else layer.keys
    return kept[at]


@pytest.mark.parametrize("name", HEADS)
def test_entries_and_drafts_are_those_of_the_head_in_transformers_parts(name: str, steps: dict[str, Any]) -> None:
    family, make = HEADS[name]
    model = model_of(family)
    head = make(model)
    reference = Reference(model, head)
    runner = headed(model, head, **steps)
    runner.warm_up()
    streams = Drafted(runner, Sampling(), Sampling())
    streams.prompts()
    for _ in range(4):
        known = [list(tokens) for tokens in streams.tokens]
        with Watched() as watched:
            streams.proposed()
        for slot, tokens in enumerate(known):
            drafts, states, keys = reference.drafts(tokens, TOKENS)
            assert [tokens[slot] for tokens in watched.tokens] == drafts
            given = torch.stack([states[slot] for states in watched.states])
            torch.testing.assert_close(given, states, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(entries(runner, slot, len(tokens)), keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_tokens_are_those_without_a_head(name: str, steps: dict[str, Any]) -> None:
    family, make = HEADS[name]
    model = model_of(family)
    expected = alone(runner_of(model, device="deferred", max_running_requests=40), *WAYS.values())
    runner = headed(model, make(model), **steps)
    runner.warm_up()
    streams = Drafted(runner, *WAYS.values())
    streams.prompts()
    while not streams.over():
        assert not streams.proposed().row_errors.any()
    same(streams, expected)


def oracle() -> tuple[Any, Head]:
    """A model whose next token is a function of the last one, and a head with the same function.

    Embeddings are unit vectors. The head's feed-forward part maps the feature of a token to that of the next token.
    """
    hidden, vocabulary = 144, 131
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = random_model(LlamaForCausalLM, config)
    behind = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, hidden))
        model.model.norm.weight.fill_(1)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[behind, torch.arange(vocabulary)] = 1
    head = eagle(model, taps=(1,), mapped=False, vocab_size=vocabulary)
    weights = head.weights
    weights["fc.weight"] = torch.eye(hidden)
    weights["midlayer.self_attn.o_proj.weight"].zero_()
    for name in ("midlayer.post_attention_layernorm", "norm"):
        weights[f"{name}.weight"] = torch.ones(hidden)
    # RMS normalisation scales a unit vector by 12, and silu(12) * 12 is 144.
    moved = torch.zeros(hidden, hidden)
    moved[behind, torch.arange(vocabulary)] += 1
    moved[torch.arange(vocabulary), torch.arange(vocabulary)] -= 1
    shape = head.told["shape"]["decoder"]
    shape["feeds"][0]["intermediate_size"] = hidden
    weights["midlayer.mlp.gate_proj.weight"] = weights["midlayer.mlp.up_proj.weight"] = torch.eye(hidden)
    weights["midlayer.mlp.down_proj.weight"] = moved / 144
    weights["lm_head.weight"] = model.lm_head.weight.detach().clone()
    return model, head


def test_a_head_that_equals_its_model_is_always_right(steps: dict[str, Any]) -> None:
    model, head = oracle()
    expected = alone(runner_of(model, device="deferred", max_running_requests=40), Sampling(), Sampling())
    runner = headed(model, head, **steps)
    assert (runner.facts()["tokens_a_row"], runner.facts()["verifies_drafts"]) == (1 + TOKENS, False)
    streams = Drafted(runner, Sampling(), Sampling())
    streams.prompts()
    taken = 0
    while not streams.over():
        assert streams.proposed().token_counts.tolist() == [1 + TOKENS] * 2
        taken += 1
    assert taken == -(-COUNT // (1 + TOKENS))
    same(streams, expected)


def test_a_liar_is_never_right() -> None:
    model, head = oracle()
    expected = alone(runner_of(model, device="deferred", max_running_requests=40), *WAYS.values())
    head.weights["lm_head.weight"] = -head.weights["lm_head.weight"]
    streams = Drafted(headed(model, head), *WAYS.values())
    streams.prompts()
    first = streams.proposed()
    assert first.token_counts[0] == 1
    while not streams.over():
        assert streams.proposed().token_counts[0] == 1
    same(streams, expected)


def of_prefix(runner: ModelRunner, tokens: list[int], cached: int, first: int = 0) -> Drafted:
    """A stream in slot 1 whose first `cached` tokens are already on the pages from `first` on."""
    size = runner.config.page_size
    streams = Drafted(runner, Sampling())
    builder = PlanBuilder(90)
    builder.slot(1, tokens, Sampling())
    shared = cached // size
    own = range(40, 40 + 80 // size - shared)
    builder.page_writes += [(1, index, page) for index, page in enumerate([*range(first, first + shared), *own])]
    builder.row(1, cached, len(tokens) - cached)
    result = runner.step(builder.build())
    streams.tokens = [[], [*tokens, int(result.tokens[0])]]
    return streams


@pytest.mark.parametrize("chunk", [1024, 5], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", ["eagle3", "mtp-glm4-moe", "mtp-deepseek-v3"])
def test_a_prefix_hit_has_the_same_drafts(name: str, chunk: int, steps: dict[str, Any]) -> None:
    family, make = HEADS[name]
    model = model_of(family)
    head = make(model)
    prompt = [1 + (at * 7) % 90 for at in range(22)]
    runner = headed(model, head, chunked_prefill_size=chunk, **steps)
    streams = Drafted(runner, Sampling())
    streams.tokens = [list(prompt)]
    builder = PlanBuilder(1)
    builder.slot(0, prompt, Sampling())
    builder.page_writes += [(0, index, index) for index in range(80 // runner.config.page_size)]
    for start in range(0, len(prompt), chunk):
        length = min(chunk, len(prompt) - start)
        builder.row(0, start, length, sample=start + length == len(prompt))
        result = runner.step(builder.build())
        builder = PlanBuilder(2 + start)
    streams.tokens[0].append(int(result.tokens[0]))
    # Rejected drafts leave KV entries after the prompt.
    with Watched() as without:
        streams.proposed()
    for cached in (4, 12, 20):
        hit = of_prefix(runner, prompt, cached)
        with Watched() as watched:
            hit.proposed_for(1)
        assert [tokens[0] for tokens in watched.tokens] == [tokens[0] for tokens in without.tokens]
        for states, others in zip(watched.states, without.states, strict=True):
            torch.testing.assert_close(states[0], others[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["eagle3", "mtp-deepseek-v3"])
def test_blocks_from_the_host_have_the_same_drafts(name: str) -> None:
    """The prompt's pages are saved whole and in halves, and restored to other pages."""
    family, make = HEADS[name]
    model = model_of(family)
    near, far = socket.socketpair()
    host = HostMemory(os.memfd_create("host"), far.fileno())
    runner = headed(model, make(model), host=host, host_bytes=1 << 22)
    prompt = [1 + (at * 7) % 90 for at in range(22)]
    streams = Drafted(runner, Sampling())
    streams.tokens = [list(prompt)]
    streams.prompts()
    spans = [(0, 2), (2, 2)]
    saves = [(2 * page + half, COPY_SAVE, page, page) for page in range(4) for half in range(2)]
    copied(runner, [*saves, (9, COPY_SAVE, 4, 4)], [*spans * 4, (0, 4)])
    copied(runner, [(20 + page, COPY_RESTORE, 100 + page, page) for page in range(5)])
    with Watched() as without:
        streams.proposed()
    hit = of_prefix(runner, prompt, 20, first=100)
    with Watched() as watched:
        hit.proposed_for(1)
    assert [tokens[0] for tokens in watched.tokens] == [tokens[0] for tokens in without.tokens]
    for states, others in zip(watched.states, without.states, strict=True):
        torch.testing.assert_close(states[0], others[0], atol=1e-4, rtol=1e-4)
    near.close()
    far.close()


def copied(runner: ModelRunner, copies: list[tuple[int, int, int, int]], spans: Sequence[tuple[int, int]] = ()) -> None:
    """Runs copies, and waits until they have ended."""
    builder = PlanBuilder(50, copies=copies, copy_spans=list(spans), wait_us=[1000])
    left = {ticket for ticket, *_ in copies}
    while left:
        result = runner.step(builder.build())
        assert all(end[1] == COPY_OK for end in result.copied.tolist())
        left -= {end[0] for end in result.copied.tolist()}
        builder = PlanBuilder(51, wait_us=[1000])


def test_pages_of_the_plan_itself_have_room_for_drafts() -> None:
    """A row's drafts extend to a page that the same plan gives to its slot."""
    model, head = oracle()
    runner = headed(model, head)
    streams = Drafted(runner, Sampling())
    streams.tokens = [[3, 14, 15, 92, 65, 3, 5]]
    builder = PlanBuilder(1)
    builder.slot(0, streams.tokens[0], Sampling())
    builder.page_writes += [(0, 0, 7), (0, 1, 3)]
    builder.row(0, 0, 7)
    streams.tokens[0] += runner.step(builder.build()).tokens.tolist()
    builder = PlanBuilder(2)
    builder.page_writes.append((0, 2, 5))
    builder.row(0, 7, 1)
    builder.row_tokens = [1 + TOKENS]
    assert runner.step(builder.build()).token_counts.tolist() == [1 + TOKENS]


def test_rows_without_room_give_one_token() -> None:
    model, head = oracle()
    streams = Drafted(headed(model, head, max_running_requests=3 + TOKENS), *[Sampling()] * 3)
    streams.prompts()
    assert streams.proposed().token_counts.tolist() == [1 + TOKENS, 1, 1], "a step has six rows"
    near = Drafted(headed(model, head), Sampling())
    near.tokens = [[1 + at % 90 for at in range(93)]]
    near._pages = 96 // near.runner.config.page_size
    near.prompts()
    builder = PlanBuilder(9)
    builder.row(0, 93, 1)
    builder.row_tokens = [1 + TOKENS]
    assert near.runner.step(builder.build()).token_counts.tolist() == [3], "position 95 is the last"


def test_rows_are_computed_in_an_order_of_their_own() -> None:
    """PyTorch's attention operators compute the shorter row first."""
    model, head = oracle()
    streams = Drafted(headed(model, head), Sampling(), Sampling())
    streams.tokens = [[1 + at % 90 for at in range(70)], [3, 14, 15]]
    streams.prompts()
    assert streams.proposed().token_counts.tolist() == [1 + TOKENS] * 2


def test_rows_that_want_fewer_drafts_get_fewer() -> None:
    model, head = oracle()
    runner = headed(model, head)
    streams = Drafted(runner, *[Sampling()] * 3)
    streams.prompts()
    builder = PlanBuilder(9)
    for slot, tokens in enumerate(streams.tokens):
        builder.row(slot, len(tokens) - 1, 1)
    builder.row_tokens = [2, 4, 1]
    assert runner.step(builder.build()).token_counts.tolist() == [2, 4, 1]


def test_drafts_outside_of_the_vocabulary_are_refused() -> None:
    model = model_of("llama")
    head = eagle(model)
    head.weights["d2t"] = head.weights["d2t"] + 131
    with pytest.raises(WeightError, match="d2t names tokens outside of the model's vocabulary of 131"):
        headed(model, head)


@pytest.mark.parametrize("name", ["eagle3", "eagle3-own", "mtp-glm4-moe", "mtp-deepseek-v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_what_was_planned(name: str, dtype: str) -> None:
    family, make = HEADS[name]
    model = model_of(family)
    config = hf_config(model.config, type(model).__name__)
    changes: dict[str, Any] = {"dtype": dtype, "max_total_tokens": None, "slots": 2000}
    free = 8_000_000

    def planned(draft: Any) -> tuple[Footprint, Footprint]:
        wired = wire_config(config, draft=draft, **changes)
        with patch.object(cpu, "host_available", lambda: free), patch.dict("os.environ", FOREBAY_KERNELS="torch"):
            facts = ModelRunner(RunnerConfig.from_dict(wired)).facts()
            (found,) = footprints([RunnerConfig.from_dict(wired)], free)
        told = Footprint(*(facts[part] for part in ("weight_bytes", "page_bytes", "page_count", "kv_bytes")))
        return told, found

    head = make(model)
    (told, found), (plain, _) = planned({"model": head.told, "tokens": 3}), planned(None)
    assert told == found
    assert told.page_bytes > plain.page_bytes
    if name.startswith("eagle3"):
        size = torch.float32.itemsize if dtype == "float32" else torch.bfloat16.itemsize
        numbers = sum(weight.numel() for end, weight in head.weights.items() if end not in ("d2t", "t2d"))
        ids = head.weights["d2t"].numel()
        assert told.weight_bytes - plain.weight_bytes == numbers * size + ids * torch.float32.itemsize


def test_it_is_refused_where_nothing_verifies() -> None:
    model = model_of("llama")
    with pytest.raises(ConfigError, match="draft heads are not served here"):
        headed(model, eagle(model), lora={"places": 2, "rank": 4, "kept": 0})


def test_a_cpu_computes_it_with_operators() -> None:
    model, head = oracle()
    runner = headed(model, head, device="cpu")
    assert isinstance(runner.draft_model, HeadDrafts)
    streams = Drafted(runner, Sampling())
    streams.prompts()
    assert streams.proposed().token_counts.tolist() == [1 + TOKENS]


def test_random_weights_are_finite_and_draft() -> None:
    model = model_of("llama")
    config = wire_config(
        hf_config(model.config, "LlamaForCausalLM"), draft={"model": eagle(model).told, "tokens": 3}, device="deferred"
    )
    runner = ModelRunner(RunnerConfig.from_dict(config))
    runner.load(lambda done, total: None)
    runner.warm_up()
    streams = Drafted(runner, Sampling())
    streams.prompts()
    assert np.isfinite(streams.proposed().tokens).all()
