"""config.json of every age into ModelConfig."""

import math
from typing import Any

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from forebay.weights.config import ModelConfig, UnsupportedModelError, token_ids
from forebay.weights.parts import Experts, Latent
from tests.weights.support import biases, grouped, tiny_config


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config() | changes)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0}},
            {"rope_type": "yarn", "factor": 4.0},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
        ),
    ],
)
def test_rope_scaling_has_one_form(scaling: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = config(rope_theta=5e5, **scaling)
    assert found.rope_scaling == expected
    assert found.rope_theta == 5e5


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"hidden_act": "gelu"},
        {"vocab_size": None},
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        config(**changes)


@pytest.mark.parametrize("names", [["GemmaForCausalLM"], [], None])
def test_an_unknown_architecture_is_told_what_is_known(names: list[str] | None) -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3"):
        config(architectures=names, model_type="gemma")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("DeepseekV4ForCausalLM", "it has compressed attention"), ("GptOssForCausalLM", "it has attention sinks")],
)
def test_a_known_architecture_is_told_what_is_missing(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} is not supported: {reason}"):
        config(architectures=[name])


def test_qwen2_has_biases_on_three_projections() -> None:
    found = config(architectures=["Qwen2ForCausalLM"])
    assert biases(found) == (True, False)
    found = config(attention_bias=True)
    assert biases(found) == (True, True)
    found = config()
    assert biases(found) == (False, False)


QWEN = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16}
MISTRAL = {"architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (QWEN, None),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 0}, 16),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 2}, None),
        (QWEN | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 16),
        (QWEN | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
        (MISTRAL | {"sliding_window": 16}, 16),
        (MISTRAL | {"sliding_window": 128}, None),
        (MISTRAL | {"sliding_window": None}, None),
        ({"sliding_window": 16}, None),
    ],
)
def test_sliding_window(changes: dict[str, Any], expected: int | None) -> None:
    assert config(**changes).sliding_window == expected


def test_a_window_in_some_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="1 of 2 layers"):
        config(**QWEN, use_sliding_window=True, max_window_layers=1)


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DEEPSEEK_V2 = DEEPSEEK_V3 | {"architectures": ["DeepseekV2ForCausalLM"]}
DEEPSEEK_V32 = DEEPSEEK_V3 | {"architectures": ["DeepseekV32ForCausalLM"]}
GLM_DSA = DEEPSEEK_V3 | {"architectures": ["GlmMoeDsaForCausalLM"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (QWEN3_MOE | {"num_experts_per_tok": 9}, "9 experts .num_experts_per_tok., and there are 8"),
        (QWEN3_MOE | {"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        (QWEN3_MOE | {"num_experts": None}, "no 'num_experts'"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, "no 'moe_intermediate_size'"),
        (QWEN3_MOE | {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported; supported here: softmax"),
        (QWEN3_MOE | {"mlp_bias": True}, "mlp_bias"),
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported here: noaux_tc"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "supported here: sigmoid"),
        (DEEPSEEK_V3 | {"n_group": 3}, "8 experts can't be split into 3 groups"),
        (DEEPSEEK_V3 | {"topk_group": 5}, "5 groups .topk_group. can't be kept"),
        (DEEPSEEK_V3 | {"n_group": 8}, "can't be kept of 8 with 1 experts each"),
        (DEEPSEEK_V3 | {"num_experts_per_tok": 5}, "its groups have 4"),
        (DEEPSEEK_V3 | {"kv_lora_rank": None}, "no 'kv_lora_rank'"),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "supported here: greedy, group_limited_greedy"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised by 'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size"),
    ],
)
def test_experts_that_make_no_sense_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        config(**changes)
    assert "\n" not in str(caught.value)


def test_which_layers_have_experts() -> None:
    def experts(**changes: Any) -> list[int]:
        found = config(num_hidden_layers=6, **changes)
        return [layer for layer in range(6) if isinstance(found.feed(layer), Experts)]

    assert experts(**QWEN3_MOE) == [0, 1, 2, 3, 4, 5]
    assert experts(**QWEN3_MOE, decoder_sparse_step=2, mlp_only_layers=[3]) == [1, 5]
    assert experts(**QWEN3_MOE | {"num_experts": 0}) == []
    assert experts(**DEEPSEEK_V3) == [1, 2, 3, 4, 5]
    assert experts(**DEEPSEEK_V3 | {"first_k_dense_replace": 6}) == []
    kinds = ["dense", "sparse", "dense", "dense", "sparse", "sparse"]
    assert experts(**GLM_DSA, mlp_layer_types=kinds) == [1, 4, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (DEEPSEEK_V32 | {"index_topk": 0}, "index_topk 0"),
        (GLM_DSA | {"index_topk": -1}, "index_topk -1"),
        (GLM_DSA | {"index_n_heads": 0}, "index_n_heads 0"),
        (GLM_DSA | {"index_head_dim": 4}, r"index keys of 4 elements \(index_head_dim\) have no 8 to rotate"),
        (DEEPSEEK_V32 | {"index_init_tokens": 4}, r"always kept \(index_init_tokens 4\) are not supported"),
        (DEEPSEEK_V32 | {"index_local_tokens": 64}, r"always kept \(index_local_tokens 64\) are not supported"),
        (DEEPSEEK_V32 | {"q_lora_rank": None}, "without a low-rank query"),
        (GLM_DSA | {"indexer_types": ["full"]}, "wants `full` or `shared` for each of 2 layers: it has ..full"),
        (GLM_DSA | {"indexer_types": ["full", "half"]}, "it has ..full., .half"),
        (GLM_DSA | {"index_topk_pattern": "FX"}, "it has ..full., .X"),
        (GLM_DSA | {"index_topk_pattern": "SF"}, "the first layer shares its indexer"),
        (GLM_DSA | {"mlp_layer_types": ["dense"]}, "mlp_layer_types wants `dense` or `sparse` for each layer"),
    ],
)
def test_indexers_that_make_no_sense_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        config(**changes)
    assert "\n" not in str(caught.value)


def test_which_layers_have_an_indexer_of_their_own() -> None:
    def indexed(**changes: Any) -> tuple[int, ...]:
        found = config(**GLM_DSA | {"num_hidden_layers": 8} | changes).indexer
        assert found is not None
        assert found.position_elements == len(found.layers) * 128
        return found.layers

    everywhere = tuple(range(8))
    assert indexed() == everywhere
    assert indexed(indexer_types=["full", "shared"] * 4) == (0, 2, 4, 6)
    assert indexed(indexer_types=["full", "shared"] * 5, index_topk_pattern="F" * 8) == (0, 2, 4, 6)
    assert indexed(index_topk_pattern="FSSFSSSF", index_topk_freq=2) == (0, 3, 7)
    assert indexed(index_topk_freq=1, index_skip_topk_offset=0) == everywhere
    for every, offset in [(2, None), (3, 2), (4, 3), (4, 1), (0, 2)]:
        keys: dict[str, Any] = {"index_topk_freq": every} | (
            {} if offset is None else {"index_skip_topk_offset": offset}
        )
        kinds = GlmMoeDsaConfig(num_hidden_layers=8, **keys).indexer_types
        assert kinds is not None
        assert indexed(**keys) == tuple(layer for layer, kind in enumerate(kinds) if kind == "full")


def test_index_keys_are_rotated_as_the_family_does_it() -> None:
    def interleaved(**changes: Any) -> bool:
        found = config(**changes).indexer
        assert found is not None
        return found.interleaved

    assert not interleaved(**DEEPSEEK_V32)
    assert interleaved(**GLM_DSA)
    assert interleaved(**DEEPSEEK_V32, indexer_rope_interleave=True)
    assert not interleaved(**GLM_DSA, indexer_rope_interleave=False)
    assert config(**DEEPSEEK_V3).indexer is None


def test_yarn_sharpens_the_softmax_of_latent_attention() -> None:
    def scale(scaling: dict[str, Any] | None) -> float:
        attention = config(**DEEPSEEK_V3, rope_scaling=scaling).attention
        assert isinstance(attention, Latent)
        return attention.scale

    plain = scale(None)
    assert plain == 24**-0.5
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64}
    assert scale(yarn) == plain
    assert scale(yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}) == pytest.approx(plain * (0.1 * math.log(40) + 1) ** 2)


def test_layers_behind_the_last_are_left_out() -> None:
    found = config(**DEEPSEEK_V3)
    names = ["model.layers.1.mlp.gate.weight", "model.layers.2.enorm.weight", "layers.3.x.weight", "model.norm.weight"]
    assert [found.has_place_for(name) for name in names] == [True, False, False, True]
    assert all(config().has_place_for(name) for name in names), "of a Llama they would be missed"


@pytest.mark.parametrize(
    "kind",
    [Qwen3MoeConfig, Glm4MoeConfig, DeepseekV2Config, DeepseekV3Config, DeepseekV32Config, GlmMoeDsaConfig],
)
def test_what_transformers_leaves_out_of_experts_has_its_default(kind: type) -> None:
    reference = kind(num_hidden_layers=2, num_experts_per_tok=3)
    keys: tuple[str, ...] = (
        "first_k_dense_replace",
        "n_shared_experts",
        "norm_topk_prob",
        "n_group",
        "topk_group",
        "q_lora_rank",
    )
    keys += ("routed_scaling_factor", "topk_method", "attention_bias", "use_qk_norm", "decoder_sparse_step")
    keys += ("index_topk", "index_head_dim", "index_n_heads", "indexer_types", "mlp_layer_types")
    whole = reference.to_dict() | {"architectures": [kind.__name__.replace("Config", "ForCausalLM")]}
    assert ModelConfig.from_dict(whole) == ModelConfig.from_dict({k: v for k, v in whole.items() if k not in keys})


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_what_transformers_leaves_out_has_its_default(kind: type) -> None:
    reference = kind(num_hidden_layers=2)
    name = kind.__name__.replace("Config", "ForCausalLM")
    found = ModelConfig.from_dict(reference.to_dict() | {"architectures": [name]})
    assert grouped(found).kv_heads == reference.num_key_value_heads
    head_dim = getattr(reference, "head_dim", None) or reference.hidden_size // reference.num_attention_heads
    assert grouped(found).head_dim == head_dim
    assert found.rms_norm_eps == reference.rms_norm_eps
    assert found.rope_theta == reference.rope_parameters["rope_theta"]
    assert found.tie_word_embeddings == reference.tie_word_embeddings
    assert found.hidden_act == reference.hidden_act
    assert found.max_position_embeddings == reference.max_position_embeddings


def test_token_ids() -> None:
    assert token_ids(None) == ()
    assert token_ids(7) == (7,)
    assert token_ids([7, 8]) == (7, 8)


def test_yarn_lengthens_the_context() -> None:
    """The published Qwen configs keep the trained length in `max_position_embeddings`."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config(max_position_embeddings=64).longest_context == 64
    for trained in (64, 256):
        assert config(max_position_embeddings=trained, rope_scaling=scaling).longest_context == 256
