"""Decoders with bidirectional attention over the whole prompt: vectors and scores equal those of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.described import described, refused
from forebay.attention import whole
from forebay.runner.runner import ModelRunner
from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.slots import PlanError
from forebay.weights.errors import ModelError
from tests.hand.support import PlanBuilder
from tests.hand.test_pooling import LENGTHS, pool, prompts
from tests.hand.test_rust_hand import rust, settings, torch_runner
from tests.hand.whole_models import WHOLE, model_of, save, write_gguf

EMBEDDERS = [name for name in WHOLE if not name.endswith(("score", "labels"))]
MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def runner_of(model: dict[str, Any], **changes: Any) -> ModelRunner:
    return torch_runner(settings(model, page_size=16, **changes))


@contextmanager
def hand_of(hand: str, folder: Path, model: dict[str, Any], **changes: Any) -> Iterator[Any]:
    """PyTorch's hand or the one in Rust."""
    if hand == "torch":
        yield runner_of(model, **changes)
        return
    with rust(folder, settings(model, **changes)) as runner:
        yield runner


def states_of(name: str, tokens: list[int]) -> torch.Tensor:
    """The final states [tokens, hidden] of a prompt alone."""
    model = model_of(name)
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return states


def pooled(states: torch.Tensor, kind: str) -> torch.Tensor:
    return states.mean(0) if kind == "mean" else states[0]


def described_as(folder: Path, name: str, kind: str) -> dict[str, Any]:
    save(folder / "model", name, Pooling1={MODES[kind]: True})
    return described(folder / "model", folder / "cache")


@pytest.mark.parametrize("block", [whole.QUERY_BLOCK, 8])
@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors_are_those_of_transformers(
    tmp_path: Path, name: str, kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "QUERY_BLOCK", block)
    runner = runner_of(described_as(tmp_path, name, kind))
    assert runner.kv.page_count == 0
    texts = prompts(LENGTHS)
    together = pool(runner, texts)
    for vector, tokens in zip(together, texts, strict=True):
        np.testing.assert_allclose(vector, pooled(states_of(name, tokens), kind), atol=1e-4)
    # Products of other shapes add in another order, which is the only difference.
    np.testing.assert_allclose(pool(runner, texts[::-1])[::-1], together, atol=2e-5)
    np.testing.assert_allclose(np.concatenate([pool(runner, [tokens]) for tokens in texts]), together, atol=2e-5)


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("name", EMBEDDERS)
def test_the_rust_hand_gives_the_vectors_of_transformers(tmp_path: Path, name: str, kind: str) -> None:
    model, texts = described_as(tmp_path, name, kind), prompts(LENGTHS)
    with rust(tmp_path, settings(model, threads=2)) as runner:
        assert runner.kv.page_count == 0
        together = pool(runner, texts)
        # The bits are equal in any batch.
        np.testing.assert_array_equal(pool(runner, texts[::-1])[::-1], together)
        np.testing.assert_array_equal(np.concatenate([pool(runner, [tokens]) for tokens in texts]), together)
    for vector, tokens in zip(together, texts, strict=True):
        np.testing.assert_allclose(vector, pooled(states_of(name, tokens), kind), atol=1e-4)


@pytest.mark.parametrize("name", ["gemma", "modernbert"])
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"quantization": "w8a8_int8"}], ids=str)
def test_every_level_of_the_rust_hand_is_close(
    tmp_path: Path, name: str, changes: dict[str, Any], instructions: str
) -> None:
    if changes.get("quantization") and name == "modernbert":
        pytest.skip("codes need a multiple of 32 elements")
    model, texts = described_as(tmp_path, name, "mean"), prompts(LENGTHS)
    with rust(tmp_path, settings(model, **changes)) as runner:
        found = pool(runner, texts)
    wanted = np.stack([states_of(name, tokens).mean(0).numpy() for tokens in texts])
    if not changes:
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert F.cosine_similarity(torch.from_numpy(found), torch.from_numpy(wanted)).min() > 0.99


@pytest.mark.parametrize("hand", ["torch", "rust"])
@pytest.mark.parametrize("name", ["modernbert-score", "modernbert-labels"])
def test_scores_and_logits_are_those_of_transformers(tmp_path: Path, name: str, hand: str) -> None:
    save(tmp_path / "model", name, ())
    model = described(tmp_path / "model", tmp_path / "cache")
    labels = WHOLE[name][1].num_labels
    assert model["pooling"]["task"] == ("score" if labels == 1 else "classify")
    texts = prompts(LENGTHS)
    # The model ignores `segments`, the positions where second texts begin.
    with hand_of(hand, tmp_path, model) as runner:
        found = pool(runner, texts, segments=[3, 0, 40, 6, 1, 1, 30, 3])
    assert found.shape == (len(texts), labels)
    for scores, tokens in zip(found, texts, strict=True):
        with torch.inference_mode():
            expected = model_of(name)(input_ids=torch.tensor([tokens])).logits[0]
        np.testing.assert_allclose(scores, expected, atol=1e-4)


@pytest.mark.parametrize("hand", ["torch", "rust"])
def test_dense_modules_follow_the_mean(tmp_path: Path, hand: str) -> None:
    """As in EmbeddingGemma: two modules, whose files have tensors of the same names."""
    random = torch.Generator().manual_seed(1)
    first = {"weight": torch.randn(96, 64, generator=random) * 0.2}
    second = {"weight": torch.randn(32, 96, generator=random) * 0.2, "bias": torch.randn(32, generator=random)}
    identity = {"in_features": 64, "out_features": 96, "activation_function": "torch.nn.modules.linear.Identity"}
    folder = save(
        tmp_path / "model",
        "gemma",
        ("Pooling", "Dense", "Dense", "Normalize"),
        Pooling1={"pooling_mode": "mean"},
        Dense2={**identity, **first},
        Dense3={"in_features": 96, "out_features": 32, **second},
    )
    model = described(folder, tmp_path / "cache")
    assert (model["pooling"]["size"], model["pooling"]["normalize"]) == (32, True)
    texts = prompts(LENGTHS)
    with hand_of(hand, tmp_path, model) as runner:
        found = pool(runner, texts)
    for vector, tokens in zip(found, texts, strict=True):
        wide = states_of("gemma", tokens).mean(0) @ first["weight"].T
        expected = torch.tanh(F.linear(wide, second["weight"], second["bias"]))
        np.testing.assert_allclose(vector, expected, atol=1e-4)
    with hand_of(hand, tmp_path, model, load_format="dummy") as runner:
        dummy = pool(runner, texts)
    assert dummy.shape == found.shape
    shutil.move(folder / "3_Dense/model.safetensors", folder / "3_Dense/pytorch_model.bin")
    assert "3_Dense/model.safetensors is not there" in refused(folder, tmp_path / "cache")


@pytest.mark.parametrize("hand", ["torch", "rust"])
@pytest.mark.parametrize("dense", [0, 2])
def test_gguf_files_have_the_vectors_of_transformers(tmp_path: Path, dense: int, hand: str) -> None:
    random = torch.Generator().manual_seed(2)
    matrices = [torch.randn(shape, generator=random) * 0.2 for shape in [(96, 64), (32, 96)][:dense]]
    model = described(write_gguf(tmp_path / "m.gguf", "gemma-file", matrices), tmp_path / "cache")
    assert (model["pooling"]["kind"], model["pooling"]["size"]) == ("mean", 32 if dense else 64)
    texts = prompts(LENGTHS)
    with hand_of(hand, tmp_path, model) as runner:
        found = pool(runner, texts)
    for vector, tokens in zip(found, texts, strict=True):
        expected = states_of("gemma-file", tokens).mean(0)
        for matrix in matrices:
            expected = matrix @ expected
        np.testing.assert_allclose(vector, expected, atol=1e-4)


def test_bfloat16_is_close(tmp_path: Path) -> None:
    model = described_as(tmp_path, "modernbert", "mean")
    texts = prompts(LENGTHS)
    exact, rough = (torch.from_numpy(pool(runner_of(model, dtype=name), texts)) for name in ("float32", "bfloat16"))
    assert F.cosine_similarity(exact, rough).min() > 0.99


def test_a_part_of_a_prompt_and_what_it_lacks_are_refused(tmp_path: Path) -> None:
    model = described_as(tmp_path, "modernbert", "mean")
    runner = runner_of(model)
    builder = PlanBuilder()
    builder.slot(0, prompts([9])[0])
    builder.row(0, 0, 4, sample=False)
    with pytest.raises(PlanError, match="a part of a prompt"):
        runner.step(builder.build())
    with pytest.raises(ConfigError, match="is for the Rust hand on a CPU"):
        runner_of(model, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="is computed by the Rust hand on a CPU"):
        runner_of(model, quantization="w8a8_int8")
    generating = {**settings(model), "model": {**model, "pooling": None}}
    with pytest.raises(ModelError, match="can't generate"):
        ModelRunner(RunnerConfig.from_dict(generating))


@pytest.mark.parametrize("window", [None, 5])
def test_the_other_backends_do_not_attend_both_ways(window: int | None) -> None:
    from forebay.attention.backend import How, LayerKV
    from forebay.attention.cpu import CpuAttention, CpuStep

    empty = torch.empty(0, 1, 4)
    with pytest.raises(NotImplementedError, match="causal order"):
        CpuAttention().attend(
            empty,
            empty,
            empty,
            LayerKV(empty, empty),
            CpuStep([], [], None),  # type: ignore[arg-type]
            How(window=window, both_ways=True),
        )
