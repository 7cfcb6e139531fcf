"""config.json of every age into ModelConfig."""

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from forebay.weights.config import ModelConfig, UnsupportedModelError, token_ids
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
        config(architectures=names)


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
