"""SmolLM2 with both hands: the same tokens for many prompts, greedy and seeded, with penalties and a schema."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from tests.e2e.client import native_together
from tests.e2e.conftest import Models, Serve
from tests.e2e.reference import prompts
from tests.e2e.waiting import eventually

PROMPTS = int(os.environ.get("FOREBAY_HANDS_PROMPTS", "60"))
"""The number of prompts; `make test-slow` uses 200."""
TOKENS = 8
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "min_p": 0.02},
    {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0, "min_new_tokens": 4, "ignore_eos": False},
    {"temperature": 0.9, "json_schema": SCHEMA},
]


def test_both_hands_answer_alike(models: Models, serve: Serve) -> None:
    """In float32: with other types the kernels and PyTorch's operators round at different places."""
    model = models("smollm2")
    asked = [
        {
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": TOKENS,
                "seed": number,
                "ignore_eos": True,
                **WAYS[number % len(WAYS)],
            },
            "return_logprob": number % 5 == 0,
        }
        for number, prompt in enumerate(prompts(model, PROMPTS, 24, seed=3))
    ]
    given = []
    for hand in ("rust", "torch"):
        server = serve(model, "--hand", hand, "--dtype", "float32", "--quantization", "none")
        assert server.http.get("/server_info").json()["config"]["hand"] == hand
        given.append([answer["output_ids"] for answer in native_together(server, asked)])
        server.kill()
    assert given[0] == given[1]


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_pages_beyond_the_memory_are_refused_with_their_number(models: Models, serve: Serve, hand: str) -> None:
    flags = ("--hand", hand, "--dtype", "bfloat16", "--max-total-tokens", str(10**12))
    refused = serve(models("llama"), *flags, healthy=False)
    assert refused.process.wait(120) == 1
    log = refused.log()
    assert re.search(r"keys and values of so many tokens take \d+\.\d GB.*: at most \d+ tokens", log), log
    assert "ConfigError" not in log


def test_what_the_rust_hand_lacks_is_said(models: Models, serve: Serve) -> None:
    model, reason = models("deepseek-v32"), "attention to positions that an indexer chooses"
    server = serve(model)
    info = server.http.get("/server_info").json()["config"]
    assert info["hand"] == "torch"
    assert info["hand_reason"] == f"the Rust hand does not have {reason}"
    banner = f"Computes with PyTorch: {info['hand_reason']}"
    eventually(lambda: banner in server.log(), "the banner is written")
    server.kill()
    refused = serve(model, "--hand", "rust", healthy=False)
    assert refused.process.wait(60) == 1
    assert f"--hand rust: the Rust hand does not have {reason}" in refused.log()


def test_nothing_of_python_is_started_where_the_rust_hand_serves(models: Models, serve: Serve, tmp_path: Any) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho started >> {tmp_path}/starts\nexit 1\n")
    python.chmod(0o755)
    server = serve(models("llama"), "--python", str(python))
    answer = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3
    assert not (tmp_path / "starts").exists()
