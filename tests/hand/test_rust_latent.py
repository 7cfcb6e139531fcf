"""Latent attention in the hand in Rust: equal bits, rows in pages, codes, GGUF files, and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from benchmarks.described import described, handshake_model
from forebay.layers.step import Step
from tests.hand.gguf_models import Form, Q, write
from tests.hand.support import (
    FAMILIES,
    LATENT,
    PlanBuilder,
    Request,
    Sampling,
    hf_config,
    hub_weights,
    random_model,
    reference_model,
)
from tests.hand.test_gguf_experts import MODELS
from tests.hand.test_kv_codes import rounded
from tests.hand.test_quantised import checkpoint, distance, of_torch, told
from tests.hand.test_rust_hand import (
    VOCABULARY,
    brain_of,
    check,
    check_near,
    in_safetensors,
    requests,
    rust,
    served,
    settings,
    torch_runner,
)

TOKENS = 512
WIDE = "deepseek-v3-wide"
"""A row has 64 elements, of which 32 are latent."""
ABSORBED = ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-halves"]


@pytest.mark.parametrize("family", [*ABSORBED, WIDE])
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = random_model(*MODELS[family]) if family in MODELS else reference_model(family)
    prompt = np.random.default_rng(3).integers(0, VOCABULARY, 90).tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    asked = Request(prompt, 1, Sampling(logprobs=5), prompt_logprobs=0)
    with rust(tmp_path, settings(in_safetensors(tmp_path, family))) as runner:
        brain_of(runner).serve([asked], 17)
    found = [float(values[0]) for _, _, values in asked.of_prompt]
    wanted = [float(expected[at, token]) for at, token in enumerate(prompt[1:])]
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert asked.tokens == [int(expected[-1].argmax())]


def bytes_of_data(pid: int) -> int:
    """The bytes of anonymous memory of a process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("low_rank", [None, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_step_takes_is_left_beside_pages(tmp_path: Path, dtype: str, low_rank: int | None) -> None:
    """The buffers of the heads dominate: all others are small."""
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 1, "first_k_dense_replace": 1}
    sizes |= {"kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    config = DeepseekV3Config(**{**LATENT, **sizes, "q_lora_rank": low_rank, "max_position_embeddings": TOKENS})
    model = random_model(DeepseekV3ForCausalLM, config)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous().clone() for name, tensor in hub_weights(model).items()}, path)
    described_ = handshake_model(hf_config(config, "DeepseekV3ForCausalLM"), [path])
    values = settings(described_, dtype=dtype, context_length=TOKENS, chunked_prefill_size=TOKENS)
    # A hand without memory for a page reports how much memory it would leave beside pages.
    without = {**values, "max_total_tokens": None, "mem_fraction_static": 1e-9}
    with pytest.raises(AssertionError, match="no memory for a single page") as refused, rust(tmp_path, without):
        pass
    said = re.search(r"(\d+) MiB of weights and of what a step takes", str(refused.value))
    assert said is not None
    with rust(tmp_path, values) as runner:
        left = (int(said[1]) << 20) - runner.facts["weight_bytes"]
        before = bytes_of_data(runner.pid)
        plan = PlanBuilder(1)
        plan.slot(0, np.random.default_rng(1).integers(0, VOCABULARY, TOKENS).tolist())
        plan.page_writes += [(0, index, index) for index in range(TOKENS // 16)]
        plan.row(0, 0, TOKENS)
        assert not runner.step(plan.build()).row_errors.any()
        grown = bytes_of_data(runner.pid) - before
    assert 0.9 * left < grown < 1.2 * left


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("family", ["deepseek-v2-lite", WIDE])
def test_both_hands_give_the_same_tokens_at_every_level(
    tmp_path: Path, family: str, page_size: int, instructions: str
) -> None:
    """Rows are in the kernels' order if the page size allows it, and otherwise by position."""
    for dtype in ("float32", "bfloat16"):
        values = settings(in_safetensors(tmp_path, family), dtype=dtype, page_size=page_size)
        with rust(tmp_path, values) as runner:
            found = served(runner, 17)
        expected = served(torch_runner(values), 17)
        if dtype == "float32":
            check(found, expected)
        else:
            check_near(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "int8", "Q4_0", "codes"])
def test_a_request_gets_the_same_bits_in_any_company(tmp_path: Path, kind: str, dtype: str) -> None:
    changes: dict[str, Any] = {
        "int8": {"quantization": "w8a8_int8"},
        "Q4_0": {"quantization": "gguf"},
        "codes": {"kv_cache_dtype": "int8"},
    }.get(kind, {})
    if kind == "Q4_0":
        path = write(tmp_path / "model.gguf", random_model(*FAMILIES[WIDE]), Form(kind=Q.Q4_0))
        model = described(path, tmp_path / "cache")
    else:
        model = in_safetensors(tmp_path, WIDE)
    found = []
    for threads, chunk, together in ((1, 1 << 10, 1), (2, 17, 20), (3, 5, 7)):
        with rust(tmp_path, settings(model, dtype=dtype, threads=threads, **changes)) as runner:
            asked, brain = requests(), brain_of(runner)
            for first in range(0, len(asked), together):
                brain.serve(asked[first : first + together], chunk)
        found.append(asked)
    for other in found[1:]:
        check(found[0], other, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_row_that_threads_share_gets_the_bits_of_its_prompt(tmp_path: Path, dtype: str) -> None:
    model = in_safetensors(tmp_path, WIDE)
    # The prompt has two whole spans of attention and a part of a third.
    prompt = np.random.default_rng(6).integers(0, VOCABULARY, 1300).tolist()
    found = []
    for threads, chunk in ((1, 1300), (2, 433), (3, 1299)):
        sizes = {"context_length": 1408, "chunked_prefill_size": 1408, "threads": threads}
        with rust(tmp_path, settings(model, dtype=dtype, **sizes)) as runner:
            request = Request(prompt, 3, Sampling(logprobs=5))
            brain_of(runner).serve([request], chunk)
        found.append([request])
    for other in found[1:]:
        check(found[0], other, atol=0)


def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes PyTorch's operators store and read rows as their codes represent them."""
    exact = Step.attend_latent

    def attend(self: Step, layer: int, q: torch.Tensor, rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        return exact(self, layer, q, rounded(rows), *rest)

    monkeypatch.setattr(Step, "attend_latent", attend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_of_rows_are_those_of_torch_that_rounds(
    tmp_path: Path, dtype: str, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = checkpoint(tmp_path, WIDE, dtype=dtype, kv_cache_dtype="int8")
    with rust(tmp_path, values) as runner:
        found = told(runner)
    exact = told(of_torch(values))
    rounds(monkeypatch)
    wanted = told(of_torch(values))
    assert distance(found, exact) < 0.05
    if dtype == "float32":
        # A code may differ by one if a number is halfway between two.
        assert distance(found, wanted) < 0.005 < distance(wanted, exact)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_page_has_one_row_a_position_for_all_heads(tmp_path: Path, dtype: str, size: int) -> None:
    layers, row = FAMILIES[WIDE][1].num_hidden_layers, 64
    with rust(tmp_path, checkpoint(tmp_path, WIDE, dtype=dtype)) as runner:
        plain = runner.facts["page_bytes"]
    assert plain == layers * 16 * row * size
    # 17 bytes hold 16 numbers.
    with rust(tmp_path, checkpoint(tmp_path, WIDE, dtype=dtype, kv_cache_dtype="int8")) as runner:
        assert runner.facts["page_bytes"] * 16 * size == plain * 17
    assert plain == torch_runner(checkpoint(tmp_path, WIDE, dtype=dtype)).kv.page_bytes


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (WIDE, {"page_size": 8}, "multiple of 16 tokens and latent rows of a multiple of 32: there are 8 and 64"),
        ("deepseek-v3-halves", {}, "there are 16 and 40"),
    ],
)
def test_rows_without_codes_say_so(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    values = checkpoint(tmp_path, family, **{"kv_cache_dtype": "int8", **changes})
    with pytest.raises(AssertionError, match=message), rust(tmp_path, values):
        pass


@pytest.mark.parametrize("family", ["deepseek-v32", "glm-dsa"])
def test_an_indexer_is_refused_by_its_part(tmp_path: Path, family: str) -> None:
    with (
        pytest.raises(AssertionError, match="does not have attention to positions that an indexer chooses"),
        rust(tmp_path, checkpoint(tmp_path, family)),
    ):
        pass


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "F16") for family in MODELS if family.startswith("deepseek")), ("deepseek-v3-dense", "Q8_0")],
)
def test_files_of_gguf_are_the_same_to_both(tmp_path: Path, family: str, kind: str, split: bool) -> None:
    """The file has keys and values of latent rows in two tensors or in one. Experts in blocks would be rounded."""
    form = Form(kind=getattr(Q, kind), split=split)
    path = write(tmp_path / "model.gguf", random_model(*MODELS[family]), form)
    asked = settings(described(path, tmp_path / "cache"))
    with rust(tmp_path, asked) as runner:
        given = served(runner, 23)
    # The order of tokens is not compared, because rounding may change it for nearly equal log-probabilities.
    for ours, theirs in zip(given, served(torch_runner(asked), 23), strict=True):
        assert ours.tokens == theirs.tokens
        found, wanted = ([float(values[0]) for _, _, values in one.of_prompt] for one in (ours, theirs))
        np.testing.assert_allclose(found, wanted, atol=2e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_matrices_of_a_file_stay_in_its_blocks(tmp_path: Path, kind: str) -> None:
    """Matrices of the heads' products have the model's type. All others keep their blocks."""
    form = Form(kind=getattr(Q, kind))
    path = write(tmp_path / "model.gguf", random_model(*FAMILIES[WIDE]), form)
    model = described(path, tmp_path / "cache")
    with rust(tmp_path, settings(model, quantization="gguf")) as runner:
        kept, found = runner.facts, told(runner)
    with rust(tmp_path, settings(model)) as runner:
        plain = runner.facts
    assert kept["weight_bytes"] < plain["weight_bytes"]
    layers = FAMILIES[WIDE][1].num_hidden_layers
    # Seven matrices in a layer: two parts of the first product, queries, outputs, gates, ups and downs.
    assert f"{7 * layers + 1} {kind}" in kept["blocks"]
    assert distance(found, told(torch_runner(settings(model)))) < 0.1
