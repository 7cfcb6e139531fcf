"""Experts, latent rows and indexes: the same tokens with a host tier, after preemptions and after a death."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.client import native_together
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.server import START_SECONDS
from tests.e2e.test_breakage import Expected, Load, kill_under_load, requests, undisturbed
from tests.index_margins import margins_along

TIER = ("--enable-hierarchical-cache", "--debug-kv-checksum", "--hicache-ratio", "8")
CLEAR = 1e-5
"""If index scores are closer than this, the order of additions decides between them."""


def clear(model: Model, expected: Expected) -> Expected:
    """The requests in which no margin between index scores is below `CLEAR`."""
    kept = [
        (request, tokens)
        for request, tokens in expected
        if min(margins_along(model.reference, request["input_ids"] + tokens), default=1.0) > CLEAR
    ]
    assert len(kept) > len(expected) * 3 // 4
    return kept


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-moe",
        pytest.param("deepseek-v3", marks=pytest.mark.slow),
        "deepseek-v32",
        pytest.param("glm-dsa", marks=pytest.mark.slow),
    ],
)
def test_tokens_depend_on_neither_tiers_nor_deaths(serve: Serve, models: Models, family: str) -> None:
    model = models(family)
    server = serve(model)
    expected = clear(model, undisturbed(server, requests(model, 24)))
    server.kill()
    wanted = [request for request, _ in expected]
    for flags in (("--device", "cpu"), ("--device", "deferred", "--lookahead", "0")):
        server = serve(model, "--max-total-tokens", "400", *TIER, *flags)
        for _ in range(2):
            answers = native_together(server, wanted, held=True)
            assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected]
        assert server.metric("vllm:num_preemptions_total") > 0
        assert server.metric("forebay:restores_total") > 0
        assert server.metric("forebay:copies_failed_total") == 0
        server.kill()
    server = serve(model, "--max-total-tokens", "3000", *TIER)
    killed = asyncio.run(kill_under_load(server, Load(server, model, expected), 1))
    assert len(killed) == 1
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0


def test_quantisation_is_refused_in_one_line(serve: Serve, models: Models) -> None:
    server = serve(models("deepseek-v32"), "--quantization", "w8a8_int8", healthy=False)
    assert server.process.wait(START_SECONDS) != 0
    assert "quantization w8a8_int8 is computed by the Rust hand on a CPU, and this is PyTorch's hand" in server.log()
