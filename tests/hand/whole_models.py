"""Tiny decoders with bidirectional attention over the whole prompt, and their repositories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import (
    Gemma3TextConfig,
    Gemma3TextModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    PreTrainedConfig,
)

from tests.hand.gguf_models import _add, _common, _tokenizer
from tests.hand.support import GEMMA, KINDS, ROPE_GEMMA3

BOTH_WAYS: dict[str, Any] = {**GEMMA, "use_bidirectional_attention": True}
MODERNBERT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 44,
    "num_hidden_layers": 5,
    "num_attention_heads": 5,
    "max_position_embeddings": 128,
    "local_attention": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "classifier_bias": True}
OTHER_ROPES: Any = {
    "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
    "sliding_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
}

WHOLE: dict[str, tuple[type[Any], PreTrainedConfig]] = {
    "gemma": (
        Gemma3TextModel,
        Gemma3TextConfig(**{**BOTH_WAYS, "sliding_window": 9}, layer_types=KINDS, rope_parameters=ROPE_GEMMA3),
    ),
    "gemma-one": (Gemma3TextModel, Gemma3TextConfig(**{**BOTH_WAYS, "sliding_window": 1, "num_key_value_heads": 1})),
    "gemma-long": (Gemma3TextModel, Gemma3TextConfig(**{**BOTH_WAYS, "sliding_window": 126})),
    "gemma-file": (
        Gemma3TextModel,
        Gemma3TextConfig(**{**BOTH_WAYS, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    ),
    "modernbert": (ModernBertModel, ModernBertConfig(**MODERNBERT)),
    "modernbert-biases": (
        ModernBertModel,
        ModernBertConfig(
            **{**MODERNBERT, **BIASES, "local_attention": 17, "global_attn_every_n_layers": 2},
            rope_parameters=OTHER_ROPES,
        ),
    ),
    "modernbert-long": (ModernBertModel, ModernBertConfig(**{**MODERNBERT, "local_attention": 200})),
    "modernbert-score": (ModernBertForSequenceClassification, ModernBertConfig(**{**MODERNBERT, "num_labels": 1})),
    "modernbert-labels": (
        ModernBertForSequenceClassification,
        ModernBertConfig(**{**MODERNBERT, **BIASES, "num_labels": 3, "classifier_pooling": "mean"}),
    ),
}
"""Each name has its class of transformers and a config."""


@cache
def model_of(name: str) -> Any:
    """A random model. Its weights and norms vary so much that a wrong position changes the output."""
    kind, config = WHOLE[name]
    torch.manual_seed(7)
    model = kind(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Gemma's norms store their distance from 1.
            norm = "norm" in key and not name.startswith("gemma")
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in key else 0.2) + norm)
    return model


def write_gguf(path: Path, name: str, dense: Sequence[torch.Tensor] = ()) -> Path:
    """Writes the GGUF file of an EmbeddingGemma as llama.cpp's `convert_hf_to_gguf.py` does."""
    config, arch = WHOLE[name][1], gguf.MODEL_ARCH.GEMMA_EMBEDDING
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _common(writer, config, config.num_hidden_layers)
    # The window spans both sides, as in the hub's config.
    writer.add_sliding_window(config.to_dict()["sliding_window"])
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    _tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for key, tensor in model_of(name).state_dict().items():
        found = names.get_name(f"model.{key}", try_suffixes=(".weight",))
        assert found is not None, key
        _add(writer, found, tensor + 1 if "norm" in key else tensor, gguf.GGMLQuantizationType.F32)
    for number, matrix in enumerate(dense, start=2):
        writer.add_dense_features_dims(f"dense_{number}", matrix.shape[1], matrix.shape[0])
        _add(writer, f"dense_{number}.weight", matrix, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save(folder: Path, name: str, modules: tuple[str, ...] = ("Pooling",), **files: Any) -> Path:
    """Writes a repository of the model. With `modules` after the model it has the layout of sentence-transformers.

    `files`: the config of each module, such as `Dense2`, with the tensors `weight` and `bias` of a `Dense` module.
    """
    model_of(name).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(131)}, unk_token="w3"))
    words.save(str(folder / "tokenizer.json"))
    if not modules:
        return folder
    names = ["Transformer", *modules]
    listed = [{"path": f"{at}_{kind}", "type": f"sentence_transformers.models.{kind}"} for at, kind in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(listed))
    for at, kind in enumerate(names):
        path, config = folder / f"{at}_{kind}", dict(files.get(f"{kind}{at}", {}))
        if not config:
            continue
        path.mkdir()
        weights = {f"linear.{end}": config.pop(end) for end in ("weight", "bias") if torch.is_tensor(config.get(end))}
        if weights:
            save_file(weights, path / "model.safetensors")
        (path / "config.json").write_text(
            json.dumps({**config, "bias": "linear.bias" in weights} if weights else config)
        )
    return folder
