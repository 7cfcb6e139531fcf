"""The hand on a GPU gives the tokens of the reference, and its host never waits during a launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from forebay.device.watch import NoStrayCopies
from forebay.gpu.choose import MAPPED
from forebay.runner.runner import ModelRunner
from tests.hand.drafted import check_drafts
from tests.hand.greedy import greedy_of_8_bits
from tests.hand.named_models import model_of as named_model
from tests.hand.support import (
    EVERYTHING,
    MiniBrain,
    PlanBuilder,
    Request,
    Sampling,
    greedy_reference,
    random_model,
    reference_model,
    runner_of,
)

DENSE = ("llama", "llama-yarn", "qwen2", "qwen3", "gemma2", "gemma3")
EXPERTS = ("glm4-moe", "qwen3-moe", "deepseek-v3", "glm-dsa")
"""PyTorch has a kernel for their grouped product only in bfloat16. In float32 it makes the host wait."""
FAMILIES = DENSE + EXPERTS
PROMPTS = [[3, 14, 15, 92, 65], list(range(1, 40)), [7, 8, 9]]
SAMPLINGS = {
    "greedy": Sampling(),
    "everything": EVERYTHING,
    "top_k": Sampling(temperature=0.7, top_k=4, top_p=0.5, seed=3, logprobs=1),
    "nucleus": Sampling(temperature=1.3, top_p=0.6, seed=4),
    "penalties": Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, seed=9, logprobs=3),
    "allowed": Sampling(temperature=1.0, allowed=(1, 2, 3), seed=5),
}


@contextmanager
def no_waits() -> Iterator[None]:
    """PyTorch's check for waits, and Forebay's check for the copies that PyTorch's does not notice."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        with NoStrayCopies():
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def served(runner: ModelRunner, lookahead: int, *samplings: Sampling) -> list[list[int]]:
    requests = [
        Request(prompt, 8, sampling, arrival=arrival)
        for arrival, (prompt, sampling) in enumerate((p, s) for p in PROMPTS for s in samplings)
    ]
    # The warm-up captures the graphs.
    runner.warm_up()
    MiniBrain(runner, lookahead=lookahead).serve(requests, chunk=7)
    return [request.tokens for request in requests]


GRAPHS = pytest.mark.parametrize("graph_rows", [0, 5], ids=["eager", "graphs"])


@GRAPHS
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_are_those_of_transformers(family: str, lookahead: int, graph_rows: int) -> None:
    model = reference_model(family)
    runner = runner_of(model, device="cuda", graph_rows=graph_rows, chunked_prefill_size=64)
    tokens = served(runner, lookahead, Sampling())
    assert tokens == [greedy_reference(model, prompt, 8)[0] for prompt in PROMPTS]


@GRAPHS
@pytest.mark.parametrize("family", ["gpt-oss", "olmo3", "cohere2"])
def test_named_families_give_the_tokens_of_transformers(family: str, graph_rows: int) -> None:
    """The families have sinks, experts with biases, norms over all heads, and parallel parts."""
    model = named_model(family)
    runner = runner_of(model, device="cuda", graph_rows=graph_rows, chunked_prefill_size=64)
    tokens = served(runner, 1, Sampling())
    assert tokens == [greedy_reference(model, prompt, 8)[0] for prompt in PROMPTS]


@GRAPHS
def test_keys_and_values_of_8_bits_are_those_of_a_model_that_rounds(graph_rows: int) -> None:
    model = reference_model("qwen3")
    changes: dict[str, Any] = {"graph_rows": graph_rows, "chunked_prefill_size": 64, "kv_cache_dtype": "fp8_e4m3"}
    tokens = served(runner_of(model, device="cuda", **changes), 1, Sampling())
    assert tokens == [greedy_of_8_bits(model, prompt, 8)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("graph_rows", [0, 40], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek-v3"])
def test_drafts_change_no_token(family: str, graph_rows: int) -> None:
    model = reference_model(family)

    def make() -> ModelRunner:
        runner = runner_of(model, device="cuda", max_running_requests=40, graph_rows=graph_rows)
        runner.warm_up()
        return runner

    check_drafts(make)


@GRAPHS
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampled_tokens_are_those_of_the_cpu(sampling: Sampling, graph_rows: int) -> None:
    model = reference_model("qwen3")
    on_gpu = served(runner_of(model, device="cuda", graph_rows=graph_rows, chunked_prefill_size=64), 1, sampling)
    assert on_gpu == served(runner_of(model), 1, sampling)


def test_plans_may_be_read_in_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAPPED, "1")
    model = reference_model("qwen3")
    runner = runner_of(model, device="cuda", graph_rows=5, chunked_prefill_size=64)
    tokens = served(runner, 1, *SAMPLINGS.values())
    assert tokens == served(runner_of(model), 1, *SAMPLINGS.values())


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_launch_waits_for_nothing(family: str, sampling: Sampling) -> None:
    """A prompt, its next chunk beside another prompt, decode rows of different lengths, and a single row."""
    dtype = "bfloat16" if family in EXPERTS else "float32"
    runner = runner_of(reference_model(family), device="cuda", dtype=dtype)
    runner.warm_up()
    first, second, third, fourth = made = [PlanBuilder(number) for number in (1, 2, 3, 4)]
    first.slot(2, list(range(1, 31)), sampling)
    first.page_writes += [(2, index, 7 + index) for index in range(12)]
    first.row(2, 0, 20, False)
    second.slot(5, PROMPTS[0], Sampling())
    second.page_writes += [(5, index, 40 + index) for index in range(4)]
    second.row(2, 20, 10)
    second.row(5, 0, len(PROMPTS[0]))
    third.row(2, 30, 1)
    third.row(5, len(PROMPTS[0]), 1)
    fourth.row(2, 31, 1)
    for builder in made:
        plan = builder.build()
        with no_waits():
            launched = runner.launch(plan)
        assert not launched.collect().row_errors.any()


def test_the_watch_sees_a_wait() -> None:
    x = torch.ones(3, device="cuda")
    with no_waits(), pytest.raises(RuntimeError):
        bool(x.any())
    with no_waits(), pytest.raises(RuntimeError, match="not pinned"):
        x.copy_(torch.ones(3), non_blocking=True)


def real_widths() -> Any:
    """A model of four layers with the widths of Qwen3-0.6B."""
    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = random_model(Qwen3ForCausalLM, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # The weights are small, so that sums have the range of a trained model.
                parameter.mul_(0.2)
    return model


def test_real_widths_agree_with_transformers() -> None:
    """In float32 tokens are equal. In bfloat16 errors are at most twice those of transformers."""
    model = real_widths()
    prompt = torch.randint(0, 32000, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens, exact = greedy_reference(model, prompt, 4)
    sizes: dict[str, Any] = {"context_length": 512, "max_total_tokens": 4096, "page_size": 16}
    asked = Sampling(logprobs=20)
    found = {}
    for dtype in ("float32", "bfloat16"):
        runner = runner_of(model, device="cuda", dtype=dtype, **sizes)
        # Both requests have the same tokens, so that their log-probabilities can be compared.
        request = Request(prompt, 4, Sampling() if dtype == "float32" else asked)
        MiniBrain(runner).serve([request], chunk=64)
        found[dtype] = request
    assert found["float32"].tokens == tokens
    with torch.inference_mode():
        own = model.bfloat16()(input_ids=torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    ids, values = found["bfloat16"].logprobs[0]
    ours = torch.from_numpy(values) - exact[0][torch.from_numpy(ids).long()]
    theirs = (own - exact[0]).abs().max()
    assert ours.abs().max() <= 2 * theirs
