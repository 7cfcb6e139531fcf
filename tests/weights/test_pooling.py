"""What a repository says about its vectors."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.weights.config import UnsupportedModelError, shape_of
from forebay.weights.describe import describe_path
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.pooling import Pooling, read_pooling
from tests.weights.support import tiny_directory, tiny_gguf

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
CROSS = {**BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}


def repository(folder: Path, mode: dict[str, Any], *more: str, length: int | None = None) -> Path:
    """The files of sentence-transformers."""
    types = ["Transformer", "Pooling", *more]
    modules = [
        {"path": f"{at}_{name}", "type": f"sentence_transformers.models.{name}"} for at, name in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(mode))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    return folder


@pytest.mark.parametrize(
    ("config", "mode", "kind"),
    [
        (BERT, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        (BERT, {"pooling_mode_cls_token": True}, "cls"),
        (BERT, {"pooling_mode": "mean"}, "mean"),
        (QWEN, {"pooling_mode_lasttoken": True}, "last"),
        (QWEN, {"pooling_mode": "lasttoken"}, "last"),
        (QWEN, {"pooling_mode_mean_tokens": True}, "causal_mean"),
    ],
)
def test_a_repository_of_sentence_transformers(
    tmp_path: Path, config: dict[str, Any], mode: dict[str, Any], kind: str
) -> None:
    found = read_pooling(config, repository(tmp_path, mode, "Normalize", length=256), forced=False)
    assert found == Pooling("embed", kind, config["hidden_size"], normalize=True, sigmoid=False, max_length=256)
    assert Pooling.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_vectors_that_nobody_normalises(tmp_path: Path) -> None:
    found = read_pooling(BERT, repository(tmp_path, {"pooling_mode_cls_token": True}), forced=False)
    assert found is not None
    assert not found.normalize
    assert found.max_length is None


@pytest.mark.parametrize(
    ("config", "mode", "more", "message"),
    [
        (BERT, {"pooling_mode_max_tokens": True}, (), "pooling 'max' of an encoder"),
        (BERT, {"pooling_mode_lasttoken": True}, (), "pooling 'last' of an encoder"),
        (QWEN, {"pooling_mode_cls_token": True}, (), "pooling 'cls' of a causal model"),
        ({**QWEN, "is_causal": False}, {"pooling_mode_mean_tokens": True}, (), "see what is behind them"),
        ({**QWEN, "use_bidirectional_attention": True}, {"pooling_mode": "mean"}, (), "see what is behind them"),
        (BERT, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), "cls and mean"),
        (BERT, {}, (), "by nothing"),
        (BERT, {"pooling_mode_mean_tokens": True}, ("Dense",), "module Dense"),
    ],
)
def test_what_would_be_pooled_wrongly(
    tmp_path: Path, config: dict[str, Any], mode: dict[str, Any], more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_pooling(config, repository(tmp_path, mode, *more), forced=False)


def test_without_a_word_from_the_repository(tmp_path: Path) -> None:
    assert read_pooling(QWEN, tmp_path, forced=False) is None
    last = Pooling("embed", "last", 64, normalize=True, sigmoid=False, max_length=None)
    assert read_pooling(QWEN, tmp_path, forced=True) == last
    assert read_pooling({**QWEN, "architectures": ["Qwen3Model"]}, None, forced=False) == last
    bert = read_pooling(BERT, None, forced=False)
    assert bert == Pooling("embed", "cls", 48, normalize=True, sigmoid=False, max_length=None)


@pytest.mark.parametrize(
    ("more", "sigmoid"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
    ],
)
def test_a_cross_encoder(more: dict[str, Any], sigmoid: bool) -> None:
    found = read_pooling({**CROSS, **more}, None, forced=False)
    assert found == Pooling("score", "cls", 1, normalize=False, sigmoid=sigmoid, max_length=None)


def test_classifiers_and_other_activations() -> None:
    with pytest.raises(UnsupportedModelError, match="3 labels"):
        read_pooling({**CROSS, "id2label": {"0": "a", "1": "b", "2": "c"}}, None, forced=False)
    with pytest.raises(UnsupportedModelError, match="2 labels"):
        read_pooling({key: value for key, value in CROSS.items() if key != "id2label"}, None, forced=False)
    with pytest.raises(UnsupportedModelError, match="Softmax"):
        read_pooling({**CROSS, "sbert_ce_default_activation_function": "torch.nn.Softmax"}, None, forced=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "swish"}, "hidden_act 'swish'"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "decoder"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_berts_that_would_be_computed_wrongly(change: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in {**BERT, **change}.items() if value is not None}
    with pytest.raises(UnsupportedModelError, match=message):
        shape_of(config)
    assert isinstance(shape_of(BERT), EncoderConfig)


def test_the_description_carries_it(tmp_path: Path) -> None:
    generating = tiny_directory(tmp_path / "llama")
    assert describe_path(generating, tmp_path)["pooling"] is None
    assert describe_path(generating, tmp_path, embedding=True)["pooling"]["kind"] == "last"
    (tmp_path / "g").mkdir()
    path = tiny_gguf(tmp_path / "g" / "tiny.gguf")
    assert describe_path(path, tmp_path, embedding=True)["pooling"]["task"] == "embed"
