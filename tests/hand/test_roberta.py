"""RoBERTa and XLM-RoBERTa as embedders and as cross-encoders: BERT with other names and other first positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from benchmarks.described import handshake_model
from forebay.protocol.constants import FLAG_POOL
from tests.hand.support import PlanBuilder
from tests.hand.test_pooling import BERT, LENGTHS, pool, pooling, prompts, random_model, reference_states
from tests.hand.test_rust_hand import rust, settings, torch_runner

# The first two of the 98 positions are for padding, and 96 are for tokens.
SIZES: dict[str, Any] = {**BERT, "max_position_embeddings": 98, "type_vocab_size": 1, "pad_token_id": 1}
LABEL: dict[str, Any] = {"num_labels": 1}
MODELS = {
    "roberta": (RobertaModel, RobertaConfig(**SIZES), 0),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig(**SIZES), 0),
    "roberta scores": (RobertaForSequenceClassification, RobertaConfig(**SIZES, **LABEL), 1),
    "xlm-roberta scores": (
        XLMRobertaForSequenceClassification,
        XLMRobertaConfig(**SIZES, **LABEL),
        1,
    ),
}


@pytest.mark.parametrize("hand", ["rust", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_vectors_and_scores_are_those_of_transformers(tmp_path: Path, name: str, hand: str) -> None:
    kind, config, scores = MODELS[name]
    model = random_model(kind, config)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    pooled = pooling("cls", scores or SIZES["hidden_size"], "score" if scores else "embed")
    files = [str(tmp_path / "model.safetensors")]
    values = settings(handshake_model(stored, files, pooling=pooled), page_size=16)
    texts = prompts(LENGTHS)
    if hand == "rust":
        builder = PlanBuilder()
        for slot, tokens in enumerate(texts):
            builder.slot(slot, tokens)
            builder.rows.append((slot, 0, len(tokens), FLAG_POOL))
        with rust(tmp_path, values) as runner:
            found = runner.launch(builder.build()).collect().pooled.reshape(len(texts), -1)
    else:
        found = pool(torch_runner(values), texts)
    for vector, tokens in zip(found, texts, strict=True):
        if scores:
            with torch.inference_mode():
                expected = model(input_ids=torch.tensor([tokens])).logits[0]
        else:
            expected = reference_states(model, tokens)[0]
        np.testing.assert_allclose(vector, expected, atol=3e-5)
