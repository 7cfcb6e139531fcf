"""Quantised checkpoints on a GPU keep their bits, and give the tokens of the weights that they represent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hand.stored_models import Format, awq, fp8_blocks, fp8_channels, gptq, pack_quantized, quantised
from tests.hand.support import greedy_reference, reference_model, runner_of
from tests.hand.test_checkpoints import COUNT, PROMPT, loaded, saved, tokens
from tests.hand.test_stored import experts, logits_of

FORMATS = {
    "blocks": fp8_blocks(16),
    "channels": fp8_channels(),
    "awq": awq(32),
    "gptq desc_act": gptq(32, desc_act=True),
    "packed": pack_quantized(32, symmetric=False),
}


@pytest.mark.parametrize("graph_rows", [0, 4], ids=["eager", "graphs"])
@pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
def test_float32_tokens_are_those_of_the_weights_that_are_meant(
    format_: Format, graph_rows: int, tmp_path: Path
) -> None:
    model = reference_model("qwen2")
    runner = loaded(quantised(tmp_path, model, format_), device="cuda", graph_rows=graph_rows, chunked_prefill_size=64)
    runner.warm_up()
    assert tokens(runner) == greedy_reference(model, PROMPT, COUNT)[0]


@pytest.mark.parametrize("format_", [fp8_blocks(16), awq(32)], ids=["blocks", "awq"])
def test_experts(format_: Format, tmp_path: Path) -> None:
    model = experts(32)
    runner = loaded(quantised(tmp_path, model, format_), device="cuda", chunked_prefill_size=64)
    runner.warm_up()
    assert tokens(runner) == greedy_reference(model, PROMPT, COUNT)[0]


@pytest.mark.parametrize("graph_rows", [0, 4], ids=["eager", "graphs"])
def test_8_bit_floats_are_multiplied_by_each_other(graph_rows: int, tmp_path: Path) -> None:
    model = reference_model("qwen2")
    runner = loaded(saved(tmp_path, model), device="cuda", dtype="bfloat16", quantization="fp8", graph_rows=graph_rows)
    runner.warm_up()
    found, expected = logits_of(runner), logits_of(runner_of(model))
    assert 0 < (found - expected).abs().mean() < 0.15 * expected.abs().mean()
