"""The conversion of GGUF metadata to config.json."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from benchmarks.described import described, model_config
from forebay.weights.config import ModelConfig
from forebay.weights.errors import ModelError
from forebay.weights.parts import Dense, Experts, GroupedQuery, Latent, LayerKind, Rope
from tests.weights.support import (
    F32,
    HEAD_DIM,
    biases,
    grouped,
    smollm2,
    tiny_gguf,
    tiny_metadata,
    tiny_tensors,
    tiny_tokenizer,
    write_gguf,
)


def config_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = described(path, path.parent / "cache")["config"]
    return found


def test_the_default_model_has_the_config_of_its_original() -> None:
    found = model_config(config_of(smollm2()))
    assert found == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        attention=GroupedQuery(
            heads=9, kv_heads=3, head_dim=64, rotary_dim=64, qkv_bias=False, output_bias=False, qk_norm=False
        ),
        feeds=(Dense(1536, False),) * 30,
        rms_norm_eps=1e-5,
        kinds=(LayerKind(),) * 30,
        ropes=(Rope(64, 100000.0, None),),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        hidden_act="silu",
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("architecture", "name", "qkv_bias"),
    [
        ("llama", "LlamaForCausalLM", False),
        ("qwen2", "Qwen2ForCausalLM", True),
        ("qwen3", "Qwen3ForCausalLM", False),
    ],
)
def test_families(tmp_path: Path, architecture: str, name: str, qkv_bias: bool, tied: bool) -> None:
    found = model_config(config_of(tiny_gguf(tmp_path / "x.gguf", architecture, tied=tied)))
    assert found.architecture == name
    assert found.tie_word_embeddings is tied
    assert biases(found) == (qkv_bias, False)
    assert (grouped(found).head_dim, grouped(found).kv_heads) == (HEAD_DIM, 2)
    assert found.eos_token_ids == (257,)


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    found = model_config(config_of(tiny_gguf(tmp_path / "x.gguf", metadata={"attention.sliding_window": 32})))
    assert (found.architecture, {kind.window for kind in found.kinds}) == ("MistralForCausalLM", {32})


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert config_of(tiny_gguf(tmp_path / "l.gguf", metadata=linear))["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_beta_fast": 16.0,
        "rope.scaling.attn_factor": 0.5,
    }
    assert config_of(tiny_gguf(tmp_path / "y.gguf", "qwen2", yarn))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "attention_factor": pytest.approx(0.5 * (1 + 0.1 * math.log(4))),
    }


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "original", "high"),
    [
        (128, 500000.0, 8.0, 8192, 4.0),
        (64, 500000.0, 32.0, 8192, 4.0),
        (16, 500000.0, 8.0, 8192, 4.0),
        (128, 1000000.0, 16.0, 4096, 8.0),
        (64, 10000.0, 2.5, 32768, 2.0),
    ],
)
def test_llama3_scaling_comes_back_from_its_factors(
    tmp_path: Path, head_dim: int, theta: float, factor: float, original: int, high: float
) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }

    def frequencies(parameters: dict[str, Any] | None) -> np.ndarray:
        if parameters is None:
            return np.asarray(1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim))
        config = LlamaConfig(head_dim=head_dim, rope_parameters={"rope_theta": theta, **parameters})
        return np.asarray(ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].double().numpy())

    factors = (frequencies(None) / frequencies(scaling)).astype(np.float32)
    # The converter writes float32, and exactly 1 or `factor` outside the bounds.
    factors[np.abs(factors - 1) < 1e-6] = 1.0
    factors[np.abs(factors - factor) < 1e-6 * factor] = factor
    tensors = tiny_tensors("llama", tied=True) | {"rope_freqs.weight": (factors, F32)}
    sizes = {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim}
    metadata = tiny_metadata() | tiny_tokenizer() | sizes | {"rope.freq_base": theta}
    found = config_of(write_gguf(tmp_path / "x.gguf", "llama", metadata, tensors))["rope_scaling"]
    np.testing.assert_allclose(frequencies(found), frequencies(scaling), rtol=1e-5)
    if head_dim > 16:
        assert found == scaling


def test_other_frequency_factors_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 3.0, HEAD_DIM // 2, dtype=np.float32)[::-1].copy()
    tensors = tiny_tensors("llama", tied=True) | {"rope_freqs.weight": (factors, F32)}
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        config_of(write_gguf(tmp_path / "x.gguf", "llama", tiny_metadata(), tensors))


@pytest.mark.parametrize(
    "metadata",
    [
        {"expert_count": 8},
        {"rope.dimension_count": 8},
        {"attention.value_length": 8},
        {"rope.scaling.type": "longrope"},
        {"attention.head_count": [4, 2]},
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, metadata: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        config_of(tiny_gguf(tmp_path / "x.gguf", metadata=metadata))


EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
LATENT = {
    "attention.kv_lora_rank": 32,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "rope.dimension_count": 8,
    "expert_shared_count": 1,
}


def expert_config(path: Path, architecture: str, metadata: dict[str, Any]) -> ModelConfig:
    """The shape that follows from the metadata alone: the file's tensors do not affect it."""
    return model_config(config_of(tiny_gguf(path, architecture, {**EXPERTS, **metadata})))


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({"expert_gating_func": 2, "expert_count": 256}, ("sigmoid", 8, 4)),
        ({"expert_gating_func": 1, "expert_count": 160}, ("softmax", 8, 3)),
        ({"expert_gating_func": 1, "expert_count": 64}, ("softmax", 1, 1)),
        ({"expert_gating_func": 2, "expert_count": 384}, ("sigmoid", 1, 1)),
        ({"expert_count": 160}, ("softmax", 8, 3)),
        ({"expert_gating_func": 2, "expert_count": 256, "expert_group_count": 1}, ("sigmoid", 1, 1)),
        (
            {"expert_gating_func": 2, "expert_count": 256, "expert_group_count": 4, "expert_group_used_count": 2},
            ("sigmoid", 4, 2),
        ),
    ],
)
def test_groups_that_older_files_leave_out_are_those_of_the_models_of_these_sizes(
    tmp_path: Path, metadata: dict[str, Any], found: tuple[str, int, int]
) -> None:
    feed = expert_config(tmp_path / "x.gguf", "deepseek2", {**LATENT, **metadata}).feed(1)
    assert isinstance(feed, Experts)
    assert (feed.routing.scores, feed.routing.groups, feed.routing.kept_groups) == found
    assert feed.shared_size == 32


def test_yarn_of_latent_attention_has_one_weight(tmp_path: Path) -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.yarn_log_multiplier": 0.0707,
    }
    path = tmp_path / "x.gguf"
    found = expert_config(path, "deepseek2", {**LATENT, **yarn})
    assert found.ropes[0].scaling == {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    assert isinstance(found.attention, Latent)
    assert found.attention.scale == pytest.approx(24**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    with pytest.raises(ModelError, match="attn_factor"):
        expert_config(path, "deepseek2", {**LATENT, **yarn, "rope.scaling.attn_factor": 0.5})


@pytest.mark.parametrize(("rotated", "of"), [(8, 16), (14, 22), (48, 128), (64, 96)])
def test_a_part_of_a_head_is_rotated_to_the_element(tmp_path: Path, rotated: int, of: int) -> None:
    lengths = {"attention.key_length": of, "attention.value_length": of, "rope.dimension_count": rotated}
    found = grouped(expert_config(tmp_path / "x.gguf", "glm4moe", lengths))
    assert (found.rotary_dim, found.head_dim) == (rotated, of)


def test_qwen3_moe_weighs_its_experts_as_llama_cpp_does(tmp_path: Path) -> None:
    for norm, expected in [(None, True), (False, False)]:
        feed = expert_config(tmp_path / "x.gguf", "qwen3moe", {"expert_weights_norm": norm}).feed(0)
        assert isinstance(feed, Experts)
        assert feed.routing.normalise is expected


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("deepseek2", {"expert_gating_func": 3}, r"scores of the kind 3 \(expert_gating_func\)"),
        ("deepseek2", {"expert_weights_norm": True}, "norm_topk_prob"),
        ("deepseek2", {"attention.temperature_scale": 0.1}, "'deepseek2.attention.temperature_scale'"),
        ("deepseek2", {"expert_used_count": 9}, "a token has 9 experts"),
        ("deepseek2", {"expert_count": 1 << 31}, "metadata that makes no sense: expert_count"),
        ("deepseek2", {"block_count": 1 << 31}, "metadata that makes no sense: block_count"),
        ("deepseek2", {"rope.dimension_count": 24}, "heads of 24 with 24 to rotate"),
        ("glm4moe", {"rope.dimension_count": 32}, "heads of 16 with 32 to rotate"),
        ("glm4moe", {"expert_gating_func": 1}, 'scoring_func "softmax"'),
        ("glm4moe", {"swiglu_clamp_exp": [7.0, 7.0]}, "swiglu_clamp_exp"),
        ("qwen3moe", {"expert_gating_func": 2}, 'scoring_func "sigmoid"'),
        ("qwen3moe", {"expert_weights_scale": 2.5}, "scale"),
        ("qwen3moe", {"rope.dimension_count": 8}, "heads that are rotated in part"),
        ("llama", {"swiglu_clamp_exp": [7.0, 7.0]}, "swiglu_clamp_exp"),
        ("qwen2moe", {"residual_scale": 0.5}, "residual_scale"),
    ],
)
def test_experts_that_would_be_computed_wrongly_are_refused(
    tmp_path: Path, architecture: str, metadata: dict[str, Any], message: str
) -> None:
    latent = LATENT if architecture == "deepseek2" else {}
    with pytest.raises(ModelError, match=message):
        expert_config(tmp_path / "x.gguf", architecture, {**latent, **metadata})


def test_an_unknown_architecture_is_told_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the GGUF architecture 'gemma3n'.*Llama"):
        config_of(tiny_gguf(tmp_path / "x.gguf", "gemma3n"))


def test_a_file_that_is_no_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"llama\.attention\.head_count"):
        config_of(write_gguf(tmp_path / "x.gguf", "llama", {}, {}))


def test_every_end_of_a_turn_ends_a_generation(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 257}
    assert config_of(tiny_gguf(tmp_path / "keys.gguf", metadata=keys))["eos_token_id"] == [257, 5]
    tokens = [f"t{number}" for number in range(255)] + ["<|im_end|>", "<|eot_id|>", "</s>"]
    types = [1] * 255 + [3, 1, 3]
    named = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    assert config_of(tiny_gguf(tmp_path / "named.gguf", metadata=named))["eos_token_id"] == [257, 255]
    # In gpt-oss a turn has several messages, so the end of a message does not end the turn.
    tokens = [f"t{number}" for number in range(254)] + ["<|call|>", "<|end|>", "<|return|>", "</s>"]
    channels = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * 254 + [3, 3, 3, 3]}
    assert config_of(tiny_gguf(tmp_path / "channels.gguf", metadata=channels))["eos_token_id"] == [257, 254, 256]


LLAMA4 = {**EXPERTS, "interleave_moe_layer_step": 1}


@pytest.mark.parametrize(("changes", "normed"), [({}, True), ({"expert_count": 128}, False)])
def test_llama_4_is_as_llama_cpp_has_it(tmp_path: Path, changes: dict[str, Any], normed: bool) -> None:
    """GGUF files state neither the size of the chunks nor which heads are normalised."""
    metadata = {**LLAMA4, "block_count": 4, "context_length": 1 << 15, **changes}
    found = expert_config(tmp_path / "x.gguf", "llama4", metadata)
    assert [kind.chunk for kind in found.kinds] == [8192, 8192, 8192, None]
    assert [kind.rope for kind in found.kinds] == [0, 0, 0, None]
    assert [found.heads(layer).plain_norms for layer in range(4)] == [normed] * 3 + [False]
    scale = found.heads(3).query_scale
    assert scale is not None
    assert (scale.every, scale.first, scale.beta) == (8192, 1, 0.1)


def test_llama_4_without_chunks_is_rotated_everywhere(tmp_path: Path) -> None:
    metadata = {**LLAMA4, "block_count": 4, "context_length": 1 << 15, "attention.sliding_window": 0}
    found = expert_config(tmp_path / "x.gguf", "llama4", metadata)
    assert [(kind.chunk, kind.rope) for kind in found.kinds] == [(None, 0)] * 4
    assert found.query_scale is None


GEMMA4 = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False], "expert_count": None}


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("llama4", {**LLAMA4, "attention.sliding_window_pattern": 5}, "chunks in other layers"),
        ("llama4", {**LLAMA4, "rope.dimension_count": 8}, "rotated in part"),
        ("gemma4", {"attention.head_count_kv": [2, 1, 2]}, r"no sense: attention\.head_count_kv"),
        ("gemma4", {"attention.head_count_kv": [2, 1]}, r"head_count_kv of several kinds"),
        ("gemma4", {"feed_forward_length": [96, 64]}, "feed_forward_length of several kinds"),
        ("gemma4", {"attention.key_length_swa": 24}, "lengths"),
        ("gemma4", {"rope.dimension_count": 8}, "rotated in part"),
        ("gemma4", {"attention.shared_kv_layers": 2}, "num_kv_shared_layers"),
        ("gemma4", {"attention.sliding_window_pattern": None}, "sliding_window_pattern"),
    ],
)
def test_layers_that_would_be_computed_wrongly_are_refused(
    tmp_path: Path, architecture: str, metadata: dict[str, Any], message: str
) -> None:
    own = GEMMA4 if architecture == "gemma4" else {}
    changes = {"attention.value_length_swa": 16} if "attention.key_length_swa" in metadata else {}
    with pytest.raises(ModelError, match=message):
        expert_config(tmp_path / "x.gguf", architecture, {**own, **changes, **metadata})


def test_gemma_4_has_two_kinds_of_heads_and_feeds(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.0, 1.0, *[1e30] * 5], np.float32)
    metadata = {
        **GEMMA4,
        "attention.key_length_swa": 24,
        "attention.value_length_swa": 24,
        "attention.shared_kv_layers": 1,
        "block_count": 4,
        "attention.sliding_window_pattern": [True, False, True, False],
        "feed_forward_length": [96, 96, 96, 192],
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 300.0,
        "final_logit_softcapping": 30.0,
    }
    everything = tiny_metadata() | tiny_tokenizer() | metadata
    tensors = tiny_tensors("gemma4", tied=True) | {"rope_freqs.weight": (factors, F32)}
    found = model_config(config_of(write_gguf(tmp_path / "x.gguf", "gemma4", everything, tensors)))
    assert [found.heads(layer).head_dim for layer in range(4)] == [24, 16, 24, 16]
    assert [(kind.window, kind.keys_of) for kind in found.kinds] == [(8, None), (None, None), (8, None), (None, 1)]
    assert [feed.intermediate_size for feed in found.feeds if isinstance(feed, Dense)] == [96, 96, 96, 192]
    whole = {"rope_type": "proportional", "turned": 3, "factor": 1.0}
    assert found.ropes == (Rope(24, 300.0, None), Rope(16, 5e5, whole))
    assert found.scales.logit_cap == 30.0
    other = {"rope_freqs.weight": (np.linspace(1, 4, 8, dtype=np.float32), F32)}
    with pytest.raises(ModelError, match="not those of Gemma 4"):
        config_of(write_gguf(tmp_path / "y.gguf", "gemma4", everything, tensors | other))
