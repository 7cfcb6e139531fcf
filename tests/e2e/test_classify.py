"""Classifiers with several labels, and decoders without causal masks, through the real server and hands."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, ModernBertConfig

from tests.e2e.conftest import Serve
from tests.e2e.embedders import CrossEncoder, Encoder, MiniLM
from tests.e2e.server import Server

TEXTS = ["What a fine day.", "Rain again, and the boat leaks.", "The train leaves at nine."]
LABELS = ("bad", "good", "so so")


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> MiniLM:
    return MiniLM(tmp_path_factory.mktemp("models") / "minilm")


def logits(model: Encoder, texts: list[str]) -> torch.Tensor:
    """The logits [texts, labels] of texts that are computed one by one."""
    with torch.inference_mode():
        found = [model.model(input_ids=torch.tensor([model.ids(text)])).logits[0] for text in texts]
    return torch.stack(found)


def check(server: Server, path: str, expected: torch.Tensor, **more: Any) -> None:
    answer = server.ask(path, {"input": TEXTS, **more})
    found = torch.tensor([one["probs"] for one in answer["data"]])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert [one["label"] for one in answer["data"]] == [LABELS[at] for at in expected.argmax(1).tolist()]
    assert {one["num_classes"] for one in answer["data"]} == {3}


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_a_classifier_gives_the_probabilities_of_transformers(
    tmp_path: Path, minilm: MiniLM, serve: Serve, hand: str
) -> None:
    model = CrossEncoder(tmp_path / "classifier", minilm, LABELS)
    server = serve(model, "--hand", hand)
    expected = logits(model, TEXTS)
    check(server, "/classify", expected.softmax(1))
    check(server, "/v1/classify", expected, use_activation=False)
    pooled = server.ask("/pooling", {"input": TEXTS, "task": "classify"})["data"]
    np.testing.assert_allclose([one["data"] for one in pooled], expected.softmax(1), atol=1e-4)
    for path, body in [
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"prompt": "a"}),
    ]:
        refused = server.post(path, body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert "/classify" in refused.json()["error"]["message"]


def test_labels_that_do_not_exclude_each_other_have_a_probability_each(
    tmp_path: Path, minilm: MiniLM, serve: Serve
) -> None:
    model = CrossEncoder(tmp_path / "several", minilm, LABELS, problem_type="multi_label_classification")
    check(serve(model), "/classify", logits(model, TEXTS).sigmoid())


class Classifier(Encoder):
    kind: Any = AutoModelForSequenceClassification


def modernbert(folder: Path, minilm: MiniLM, kind: type[Encoder], **more: Any) -> Encoder:
    """A random ModernBERT with the vocabulary of MiniLM."""
    config = ModernBertConfig(
        vocab_size=30522,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        local_attention=8,
        max_position_embeddings=256,
        pad_token_id=0,
        **more,
    )
    torch.manual_seed(3)
    model = kind.kind.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + name.endswith("norm.weight"))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(Path(minilm.path) / name, folder / name)
    return kind(folder)


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_a_modernbert_embeds_as_transformers_does(tmp_path: Path, minilm: MiniLM, serve: Serve, hand: str) -> None:
    model = modernbert(tmp_path / "modernbert", minilm, Encoder)
    # The Rust hand is the default on CPUs.
    server = serve(model, *(["--hand", hand] if hand == "torch" else []))
    assert server.http.get("/server_info").json()["config"]["hand"] == hand
    texts = [*TEXTS, "word " * 200]
    with torch.inference_mode():
        states = [model.model(input_ids=torch.tensor([model.ids(text)])).last_hidden_state[0, 0] for text in texts]
    expected = torch.nn.functional.normalize(torch.stack(states), dim=-1)
    found = [one["embedding"] for one in server.ask("/v1/embeddings", {"input": texts})["data"]]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_a_modernbert_classifies_as_transformers_does(tmp_path: Path, minilm: MiniLM, serve: Serve, hand: str) -> None:
    labels = {"id2label": dict(enumerate(LABELS)), "classifier_pooling": "mean"}
    model = modernbert(tmp_path / "classifier", minilm, Classifier, **labels)
    check(serve(model, "--hand", hand), "/classify", logits(model, TEXTS).softmax(1))
