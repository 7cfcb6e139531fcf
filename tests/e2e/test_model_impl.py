"""Models that no file of ours names, through the whole server: transformers' own code computes them."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.client import native_together, openai_client
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.reference import Case, clear_cases
from tests.e2e.server import Server

FLAGS = ("--max-total-tokens", "8192", "--context-length", "1024", "--chunked-prefill-size", "32")
COUNT = 6


@pytest.fixture(scope="module", params=["gpt-oss", "qwen3.5"])
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    return models(request.param)


@pytest.fixture(scope="module")
def cases(model: Model) -> list[Case]:
    return clear_cases(model, COUNT, 80, range(8, 20), seed=4)


@pytest.fixture(scope="module")
def server(model: Model, serve_for_module: Serve) -> Server:
    return serve_for_module(model, *FLAGS)


def bodies(cases: list[Case]) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": case.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": len(case.tokens), "ignore_eos": True},
        }
        for case in cases
    ]


def test_together_they_get_the_tokens_of_transformers(server: Server, cases: list[Case]) -> None:
    answers = native_together(server, bodies(cases))
    assert [answer["output_ids"] for answer in answers] == [case.tokens for case in cases]


def test_a_prefix_is_found_again_where_there_are_no_states(server: Server, model: Model) -> None:
    prompt = model.encode((Path(__file__).parents[2] / "LICENSE").read_text())[:100]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    first, second = (server.ask("/v1/completions", body) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (96 if model.path.name == "tiny-gpt-oss" else 0)  # type: ignore[union-attr]


def test_a_death_of_the_hand_changes_no_token(server: Server, cases: list[Case]) -> None:
    hand = server.hand()
    assert hand is not None
    with ThreadPoolExecutor(1) as threads:
        with server.held(len(cases)):
            asked = threads.submit(native_together, server, bodies(cases))
        os.kill(hand, signal.SIGKILL)
        answers = asked.result()
    assert [answer["output_ids"] for answer in answers] == [case.tokens for case in cases]


def test_a_chat_through_openais_client(server: Server) -> None:
    client: OpenAI = openai_client(server)
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens in range(1, 6)


def test_whose_code_computes_is_said(server: Server) -> None:
    info = server.http.get("/server_info").json()["config"]
    assert info["hand"] == "torch"
    assert info["hand_reason"].startswith("transformers' own code has this model, and native code would be faster")
    assert info["hand_reason"] in server.log()


def test_embeddings_in_place_of_tokens_are_refused(server: Server) -> None:
    import base64

    import torch
    from safetensors.torch import save

    rows = base64.b64encode(save({"rows": torch.zeros(3, 64)})).decode()
    response = server.post("/v1/completions", {"prompt_embeds": rows, "max_tokens": 2})
    assert response.status_code == 400
    assert "takes tokens only" in response.json()["error"]["message"]
    assert server.hand() is not None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model-impl", "native"), "no hand serves the architecture GptOssForCausalLM"),
        (("--model-impl", "transformers", "--hand", "rust"), "the Rust hand has native code only"),
        (("--quantization", "w8a8_int8"), "for which there is not --quantization"),
        (("--tp-size", "2"), "for which there is not several ranks"),
    ],
)
def test_what_there_is_not_is_refused_in_a_line(
    flags: tuple[str, ...], reason: str, models: Models, serve: Serve
) -> None:
    server = serve(models("gpt-oss"), *FLAGS, *flags, healthy=False)
    assert server.process.wait(120) != 0
    assert reason in server.log()
    assert "Traceback" not in server.log()


def test_a_native_family_on_request(models: Models, serve: Serve) -> None:
    tiny = models("llama")
    found = clear_cases(tiny, 3, 40, range(6, 10), seed=2)
    server = serve(tiny, *FLAGS, "--model-impl", "transformers")
    assert [answer["output_ids"] for answer in native_together(server, bodies(found))] == [
        case.tokens for case in found
    ]


def test_code_of_a_repository_is_named_and_never_run(models: Models, serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "own-code"
    shutil.copytree(models("gpt-oss").path, folder)
    config = folder / "config.json"
    text = config.read_text().replace('"gpt_oss"', '"homemade"').replace("GptOssForCausalLM", "HomemadeForCausalLM")
    config.write_text(text.replace("{", '{"auto_map": {"AutoModelForCausalLM": "code.HomemadeForCausalLM"}, ', 1))
    (folder / "code.py").write_text("raise SystemExit('ran')")
    other = Model("own-code", folder, folder / "tokenizer.json")
    server = serve(other, *FLAGS, healthy=False)
    assert server.process.wait(120) != 0
    assert "auto_map: AutoModelForCausalLM" in server.log()
    assert "ran" not in server.log().split()
