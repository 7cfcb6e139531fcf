"""Recurrent layers and adapters on a GPU give the tokens of transformers and of merged models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.protocol.constants import PLACE_OK
from tests.hand.greedy import COUNT, model_of, prompts
from tests.hand.recurrent_models import save
from tests.hand.support import MiniBrain, Request, greedy_reference, runner_of
from tests.hand.test_adapters import LORA, bring, write
from tests.hand.test_recurrent import COUNT as RECURRENT_COUNT
from tests.hand.test_recurrent import check_kept, expected
from tests.hand.test_recurrent import prompts as recurrent_prompts
from tests.hand.test_rust_hand import settings, torch_runner

GRAPHS = pytest.mark.parametrize("graph_rows", [0, 6], ids=["eager", "graphs"])


@GRAPHS
@pytest.mark.parametrize("name", ["qwen3.5-text", "lfm2", "granite4-h", "kimi-linear"])
def test_tokens_of_recurrent_models_are_those_of_transformers(tmp_path: Path, name: str, graph_rows: int) -> None:
    changes = {"max_running_requests": 6, "chunked_prefill_size": 80, "graph_rows": graph_rows}
    runner = torch_runner(settings(save(tmp_path / "model", name), device="cuda", **changes))
    for chunk in (7, 1000):
        requests = [Request(prompt, RECURRENT_COUNT) for prompt in recurrent_prompts()]
        MiniBrain(runner, chunk, lookahead=1).serve(requests, chunk)
        assert [request.tokens for request in requests] == [tokens for tokens, _ in expected(name)]
    check_kept(name, runner)


@GRAPHS
def test_adapters_are_those_of_merged_models(tmp_path: Path, graph_rows: int) -> None:
    base = model_of("llama")
    made = [write(tmp_path, base, number) for number in (1, 2, 3)]
    models = [base, *(merged for _, merged in made)]
    sizes = {"max_running_requests": 6, "chunked_prefill_size": 64}
    changes: dict[str, Any] = {"lora": LORA, "graph_rows": graph_rows, **sizes}
    runner = runner_of(base, device="cuda", **changes)
    runner.warm_up()
    assert bring(runner, [found for found, _ in made]) == [PLACE_OK] * 3
    requests = [Request(prompt, COUNT, place=at % 4 - 1) for at, prompt in enumerate(prompts(8))]
    MiniBrain(runner, lookahead=1).serve(requests, chunk=16)
    for request in requests:
        assert request.tokens == greedy_reference(models[request.place + 1], request.prompt, COUNT)[0]
