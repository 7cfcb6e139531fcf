"""GGUF files of several kinds of layers, as llama.cpp's converter writes them, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks.described import described
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.weights.errors import ModelError
from tests.hand.gguf_models import Form, dequantised, write
from tests.hand.support import (
    LATENT,
    ROPE_YARN_LATENT,
    TINY,
    MiniBrain,
    Request,
    Sampling,
    greedy_reference,
    random_model,
    runner_of,
    wire_config,
)

Change = Callable[[dict[str, torch.Tensor]], Any]
COUNT = 10
PROMPTS = [np.random.default_rng(number).integers(0, 131, 5 + 14 * number).tolist() for number in range(4)]
Q8_0 = gguf.GGMLQuantizationType.Q8_0
# The rows of all matrices are whole blocks, also after a transposition.
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 3}
ROUTED: dict[str, Any] = {**EXPERTS, "n_routed_experts": 8, "routed_scaling_factor": 1.5}
QWEN3: dict[str, Any] = {**TINY, **EXPERTS, "num_experts": 8, "head_dim": 32, "norm_topk_prob": True}
GLM4: dict[str, Any] = {**TINY, **ROUTED, "head_dim": 32}
SIZES: dict[str, Any] = {
    **LATENT,
    **ROUTED,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "qk_rope_head_dim": 8,
}
V2: dict[str, Any] = {**SIZES, "norm_topk_prob": False}
ROPE_YARN_LITE: dict[str, Any] = {**ROPE_YARN_LATENT, "mscale": 0.707, "mscale_all_dim": 0.707}
# In Gemma 3 every sixth layer attends to all positions, here one of seven. GGUF files do not contain this pattern.
GEMMA: dict[str, Any] = {**TINY, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7}
ROPE_GEMMA3 = {
    "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS: dict[str, tuple[type[Any], Any]] = {
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**GEMMA)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 7}, rope_parameters=ROPE_GEMMA3),
    ),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**QWEN3),
    ),
    "glm4-moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(**GLM4, n_group=1, topk_group=1, use_qk_norm=True, attention_bias=True),
    ),
    "glm4-moe-air": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(**GLM4, n_group=2, topk_group=1, tie_word_embeddings=True),
    ),
    "deepseek-v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(**V2, topk_method="group_limited_greedy", rope_parameters=ROPE_YARN_LATENT),
    ),
    "deepseek-v2-lite": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **{**V2, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
            rope_parameters=ROPE_YARN_LITE,
        ),
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config(**SIZES, rope_parameters=ROPE_YARN_LATENT)),
    "deepseek-v3-biases": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**{**SIZES, "first_k_dense_replace": 0}, attention_bias=True, norm_topk_prob=False),
    ),
    "deepseek-v3-dense": (DeepseekV3ForCausalLM, DeepseekV3Config(**{**SIZES, "first_k_dense_replace": 4})),
    "glm4-moe-lite": (Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig(**{**SIZES, "n_group": 1, "topk_group": 1})),
}


@cache
def model_of(family: str) -> Any:
    return random_model(*MODELS[family])


def loaded(path: Path, tmp_path: Path, **changes: Any) -> ModelRunner:
    """A runner with the weights of a file, configured as the brain does it."""
    config = wire_config({}, load_format="auto", **changes) | {"model": described(path, tmp_path / "cache")}
    runner = ModelRunner(RunnerConfig.from_dict(config))
    counts: list[tuple[int, int]] = []
    runner.load(lambda done, total: counts.append((done, total)))
    assert counts[-1][0] == counts[-1][1] == len(counts)
    return runner


def served(runner: ModelRunner, logprobs: int = 5) -> list[Request]:
    requests = [Request(prompt, COUNT, Sampling(logprobs=logprobs)) for prompt in PROMPTS]
    MiniBrain(runner).serve(requests, chunk=16)
    return requests


def is_that_of_transformers(runner: ModelRunner, model: Any) -> None:
    for request in served(runner):
        tokens, expected = greedy_reference(model, request.prompt, COUNT)
        assert request.tokens == tokens
        for (ids, values), distribution in zip(request.logprobs, expected, strict=True):
            top = distribution.topk(5)
            assert ids[1:].tolist() == top.indices.tolist()
            np.testing.assert_allclose(values[1:], top.values, atol=1e-4)


@pytest.mark.parametrize("family", MODELS)
def test_what_the_converter_writes_is_computed_as_transformers_does(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    is_that_of_transformers(loaded(write(tmp_path / "m.gguf", model), tmp_path), model)


FORMS = {
    "keys and values in one tensor": Form(split=False),
    "gates and ups in one tensor": Form(fused=True),
    "half precision": Form(kind=gguf.GGMLQuantizationType.F16),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["glm4-moe", "deepseek-v2-lite", "deepseek-v3"])
def test_forms_that_other_converters_write(tmp_path: Path, family: str, form: str) -> None:
    model = model_of(family)
    if FORMS[form].kind == gguf.GGMLQuantizationType.F16:
        model = random_model(*MODELS[family])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half())
    is_that_of_transformers(loaded(write(tmp_path / "m.gguf", model, FORMS[form]), tmp_path), model)


def test_a_matrix_in_both_forms_is_read_once(tmp_path: Path) -> None:
    model = model_of("deepseek-v3")
    name = "blk.{}.attn_kv_b.weight"
    both = {name.format(layer): block.self_attn.kv_b_proj.weight for layer, block in enumerate(model.model.layers)}
    path = write(tmp_path / "m.gguf", model, Form(change=lambda tensors: tensors.update(both)))
    is_that_of_transformers(loaded(path, tmp_path), model)


@pytest.mark.parametrize("family", sorted(MODELS.keys() - {"glm4-moe-lite"}))
def test_quantised_files_have_the_logits_of_their_dequantised_weights(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    runner = loaded(write(tmp_path / "m.gguf", model, Form(kind=Q8_0)), tmp_path)
    reference = runner_of(model)
    weights = dequantised(model, Q8_0)
    reference.model.load_weights(weights.items())
    for found, expected in zip(served(runner, 20), served(reference, 20), strict=True):
        assert found.tokens == expected.tokens
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert np.array_equal(one[0], other[0])
            assert np.array_equal(one[1], other[1])
    moved = [name for name, tensor in weights.items() if not torch.equal(tensor, model.state_dict().get(name, tensor))]
    assert moved, "no weight was rounded"


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = model_of("glm4-moe")
    layers = model.config.num_hidden_layers
    extra = {
        f"blk.{layers}.nextn.eh_proj.weight": torch.zeros(64, 128),
        f"blk.{layers}.attn_norm.weight": torch.zeros(64),
        f"blk.{layers}.ffn_up_exps.weight": torch.zeros(8, 32, 64),
    }
    form = Form(change=lambda tensors: tensors.update(extra), further_layers=1)
    path = write(tmp_path / "m.gguf", model, form)
    is_that_of_transformers(loaded(path, tmp_path), model)


@pytest.mark.parametrize("family", ["deepseek-v2-lite", "glm4-moe-lite", "glm4-moe"])
def test_files_of_older_converters_have_no_groups_and_no_name_of_the_scores(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    is_that_of_transformers(loaded(write(tmp_path / "m.gguf", model, Form(groups=False)), tmp_path), model)


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


UP = "model.layers.2.mlp.experts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("blk.2.ffn_up_exps.weight"), rf"lacks 8 of .* weights, the first is {UP}\.0\.up_proj\.weight"),
        (put("blk.2.ffn_up_exps.weight", 7, 32, 64), r"ffn_up_exps\.weight of \[7, 32, 64\], .* has 8 experts"),
        (put("blk.0.ffn_up_exps.weight", 8, 32, 64), r"ffn_up_exps\.weight of \[8, 32, 64\], .* has 0 experts"),
        (put("blk.2.ffn_up_exps.weight", 8, 31, 64), rf"{UP}\.0\.up_proj\.weight is \[31, 64\] .* wants \[32, 64\]"),
        (put("blk.2.ffn_up_exps.weight", 32, 64), r"ffn_up_exps\.weight of \[32, 64\], .* has 8 experts"),
        (drop("blk.1.exp_probs_b.bias"), r"the first is model\.layers\.1\.mlp\.gate\.e_score_correction_bias"),
        (drop("blk.1.attn_v_b.weight"), r"has blk\.1\.attn_k_b\.weight only, of 2 tensors"),
        (drop("blk.1.attn_k_b.weight"), r"has blk\.1\.attn_v_b\.weight only, of 2 tensors"),
        (put("blk.1.attn_v_b.weight", 3, 32, 64), r"attn_v_b\.weight of .*\[3, 32, 64\]\] are not of the same heads"),
        (put("blk.1.attn_sinks.weight", 4), r"'blk\.1\.attn_sinks\.weight' that the model has no place for"),
        (put("blk.12345678901.attn_q.weight", 4), r"'blk\.12345678901\.attn_q\.weight' that the model has no place"),
        (put("mm.0.weight", 4), r"'mm\.0\.weight' that the model has no place for"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, message: str
) -> None:
    path = write(tmp_path / "m.gguf", model_of("deepseek-v3"), Form(change=change))
    monkeypatch.setattr("forebay.runner.loader.iter_weights", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ModelError, match=message):
        loaded(path, tmp_path)
