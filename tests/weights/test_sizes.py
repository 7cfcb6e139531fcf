"""Every number of a config.json: an invalid value gives one line of error that names it, and no traceback."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    BertConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from benchmarks.described import resolved, shape_of
from forebay.weights.config import ModelConfig, config_of
from forebay.weights.errors import ModelError
from forebay.weights.parts import Experts, GroupedQuery
from tests.weights.support import tiny_config
from tests.weights.test_vision import QWEN3, QWEN25

WRONG: tuple[Any, ...] = (0, -1, 1 << 31, 1 << 64, 10**300, 1e300, 0.5, True, "64", "", [], [1], {}, {"a": 1})
"""Values that are no valid sizes. Some keys may be 0 or empty."""
SENSELESS: tuple[Any, ...] = (-1, 1 << 64, 10**300, 0.5, "64", [1], {"a": 1})
"""Values that are invalid for every key."""


def decoder(kind: type[PretrainedConfig], name: str, **more: Any) -> dict[str, Any]:
    return {**kind(**tiny_config(), **more).to_dict(), "architectures": [name]}


def configs() -> dict[str, dict[str, Any]]:
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    groups = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    index = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
    window = {"sliding_window": 16, "head_dim": 16}
    bert = BertConfig(
        vocab_size=131, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    ).to_dict()
    return {
        "llama": decoder(LlamaConfig, "LlamaForCausalLM"),
        "mistral": decoder(MistralConfig, "MistralForCausalLM", **window),
        "qwen3_moe": decoder(Qwen3MoeConfig, "Qwen3MoeForCausalLM", num_experts=8, **experts),
        "glm4_moe": decoder(Glm4MoeConfig, "Glm4MoeForCausalLM", **experts, **groups),
        "deepseek_v3": decoder(DeepseekV3Config, "DeepseekV3ForCausalLM", **experts, **groups, **latent),
        "deepseek_v32": decoder(DeepseekV32Config, "DeepseekV32ForCausalLM", **experts, **groups, **latent, **index),
        "bert": {**bert, "architectures": ["BertModel"]},
        "qwen3_vl": QWEN3,
        "qwen2_5_vl": QWEN25,
    }


CONFIGS = configs()


def numbers(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """The paths to all whole numbers of a config."""
    found: list[tuple[str, ...]] = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += [(key, *rest) for rest in numbers(value)]
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((key,))
    return found


def changed(config: dict[str, Any], way: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = way
    return {**config, first: changed(config[first], tuple(rest), value) if rest else value}


def check(shape: Any) -> None:
    """Checks that the sizes allow divisions and allocations."""
    assert 1 <= shape.hidden_size < 1 << 31
    assert 1 <= shape.vocab_size < 1 << 31
    if not isinstance(shape, ModelConfig):
        return
    assert shape.longest_context >= 1
    if isinstance(shape.attention, GroupedQuery):
        assert min(shape.attention.kv_heads, shape.attention.head_dim, shape.attention.rotary_dim) >= 1
        assert shape.attention.heads % shape.attention.kv_heads == 0
    for feed in shape.feeds:
        if isinstance(feed, Experts):
            assert 1 <= feed.per_token <= feed.count
            assert feed.count % feed.routing.groups == 0


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_no_number_makes_a_traceback(family: str) -> None:
    config = CONFIGS[family]
    check(config_of(shape_of(config)))
    changes = [changed(config, way, value) for way in numbers(config) for value in WRONG]
    for answer in resolved([{"config": each} for each in changes]):
        error = answer.get("error", "")
        assert "\n" not in error
        assert len(error) < 500
        if not error:
            check(config_of(answer["shape"]))


SIZES = (
    ("llama", "num_attention_heads num_key_value_heads hidden_size intermediate_size num_hidden_layers vocab_size"),
    ("llama", "max_position_embeddings"),
    ("mistral", "head_dim sliding_window"),
    ("qwen3_moe", "num_experts num_experts_per_tok moe_intermediate_size decoder_sparse_step head_dim"),
    ("glm4_moe", "n_routed_experts n_group topk_group n_shared_experts first_k_dense_replace num_experts_per_tok"),
    ("deepseek_v3", "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim num_attention_heads"),
    ("deepseek_v32", "index_n_heads index_head_dim index_topk"),
    ("bert", "num_attention_heads hidden_size intermediate_size num_hidden_layers vocab_size type_vocab_size"),
    ("bert", "max_position_embeddings"),
)


@pytest.mark.parametrize(("family", "key"), [(family, key) for family, keys in SIZES for key in keys.split()])
def test_a_size_that_is_none_is_named(family: str, key: str) -> None:
    for value in SENSELESS:
        with pytest.raises(ModelError, match=key):
            shape_of({**CONFIGS[family], key: value})


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("key", ["depth", "num_heads", "hidden_size", "patch_size", "spatial_merge_size"])
def test_a_size_of_a_tower_that_is_none_is_named(family: str, key: str) -> None:
    for value in (0, *SENSELESS):
        with pytest.raises(ModelError, match=key):
            shape_of(changed(CONFIGS[family], ("vision_config", key), value))


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
@pytest.mark.parametrize("value", [0, -1.0, "8", [8]])
def test_a_divisor_of_a_rope_scaling_is_above_0(key: str, value: Any) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    shape_of({**CONFIGS["llama"], "rope_parameters": None, "rope_scaling": scaling})
    with pytest.raises(ModelError, match=key):
        shape_of({**CONFIGS["llama"], "rope_parameters": None, "rope_scaling": {**scaling, key: value}})
