"""A parameter that is tried: it arrives in both hands, from every API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.e2e.models import Model

ASKED: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
MESSAGES = [{"role": "user", "content": "a"}]
BODIES: dict[str, Any] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/completion": {"prompt": "a", "n_predict": 1},
}


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_what_is_tried_arrives(serve: Serve, tiny: Model, hand: str) -> None:
    server = serve(tiny, "--hand", hand, "--strict-params")

    def ids(**more: Any) -> list[int]:
        return server.http.post("/v1/completions", json=ASKED | more).json()["choices"][0]["token_ids"]

    assert ids(logit_percent=0) == [0] * 4
    assert ids(logit_percent=50) == ids() != [0] * 4
    sampled = {"temperature": 0.5, "seed": 3}
    assert ids(**sampled, logit_percent=50) == ids(**sampled | {"temperature": 1.0})
    for path, body in BODIES.items():
        assert "logit_percent" not in server.http.post(path, json={**body, "logit_percent": 50}).text
        assert "logit_percent" in server.http.post(path, json={**body, "logit_percent": 101}).text
    native = {"text": "a", "sampling_params": {"max_new_tokens": 1, "logit_percent": 101}}
    assert "sampling_params.logit_percent" in server.http.post("/generate", json=native).text
    ollama = {"prompt": "a", "model": "x", "stream": False, "options": {"logit_percent": 101}}
    assert "logit_percent" in server.http.post("/api/generate", json=ollama).text
