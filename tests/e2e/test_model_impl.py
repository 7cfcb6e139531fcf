"""transformers' own code computes models in the whole server (`--model-impl transformers`)."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from safetensors.torch import save

from tests.e2e.client import async_client, native_stream, native_together, openai_client
from tests.e2e.conftest import Models, Serve
from tests.e2e.embedders import as_sentence_transformers
from tests.e2e.models import Model, TinyModel
from tests.e2e.reference import Case, clear_cases
from tests.e2e.server import Server

PLAIN = ("--max-total-tokens", "8192", "--context-length", "1024", "--chunked-prefill-size", "32")
CALLED = ("--model-impl", "transformers")
FLAGS = (*PLAIN, *CALLED)
COUNT = 4


@pytest.fixture(scope="module", params=["starcoder2", "qwen3.5"])
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    return models(request.param)


@pytest.fixture(scope="module")
def cases(model: Model) -> list[Case]:
    return clear_cases(model, COUNT, 48, range(8, 20), seed=4)


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


def test_a_prefix_is_found_again(server: Server, model: Model) -> None:
    prompt = model.encode((Path(__file__).parents[2] / "LICENSE").read_text())[:100]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    first = server.ask("/v1/completions", body)
    before = server.metric("forebay:state_cache_hits_total")
    second = server.ask("/v1/completions", body)
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 96
    states = server.metric("forebay:state_cache_hits_total") - before
    assert states == (0 if model.path.name == "tiny-starcoder2" else 96)  # type: ignore[union-attr]


def test_a_death_of_the_hand_changes_no_token(server: Server, cases: list[Case]) -> None:
    hand = server.hand()
    assert hand is not None
    with ThreadPoolExecutor(1) as threads:
        with server.held(len(cases)):
            asked = threads.submit(native_together, server, bodies(cases))
        os.kill(hand, signal.SIGKILL)
        answers = asked.result()
    assert [answer["output_ids"] for answer in answers] == [case.tokens for case in cases]


def test_a_death_amid_a_stream_changes_no_text(server: Server, model: Model, cases: list[Case]) -> None:
    """Kills the hand once every stream has a token, so that states or pages are lost."""
    long = [{**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 60}} for body in bodies(cases)]
    undisturbed = native_together(server, long)
    before, started = server.hand(), set[int]()
    assert before is not None

    async def load() -> list[dict[str, Any]]:
        def progress(number: int, tokens: int) -> None:
            if tokens and number not in started:
                started.add(number)
                if len(started) == len(long):
                    os.kill(before, signal.SIGKILL)

        async with async_client(server) as client:
            streams = (native_stream(client, body, partial(progress, at)) for at, body in enumerate(long))
            return list(await asyncio.gather(*streams))

    answers = asyncio.run(load())
    assert len(started) == len(long)
    assert server.hand() != before
    assert [(answer["output_ids"], answer["text"]) for answer in answers] == [
        (answer["output_ids"], answer["text"]) for answer in undisturbed
    ]


def test_tokens_follow_the_form_of_answers(server: Server) -> None:
    """Some masks are late: such a row computes its last position again, from the states before it."""
    client = openai_client(server)
    name = client.models.list().data[0].id

    def ask(number: int) -> str:
        answer = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": f"Number {number}"}],
            max_tokens=40,
            temperature=0,
            extra_body={"structured_outputs": {"regex": f"{number}-(red|green)-[0-9]{{3}}"}},
        )
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, range(12)))
    for number, answer in enumerate(answers):
        assert re.fullmatch(f"{number}-(red|green)-[0-9]{{3}}", answer), answer
    assert server.hand() is not None


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
    rows = base64.b64encode(save({"rows": torch.zeros(3, 64)})).decode()
    response = server.post("/v1/completions", {"prompt_embeds": rows, "max_tokens": 2})
    assert response.status_code == 400
    assert "takes tokens only" in response.json()["error"]["message"]
    assert server.hand() is not None


def test_images_are_refused(server: Server) -> None:
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
    ]
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400
    assert "image" in response.json()["error"]["message"]


def test_preemption_changes_no_token(model: Model, serve: Serve) -> None:
    cases = clear_cases(model, 8, 16, range(40, 60), seed=9)
    flags = ("--max-total-tokens", "160", "--context-length", "128", "--page-size", "4", "--chunked-prefill-size", "32")
    server = serve(model, *flags, *CALLED)
    answers = native_together(server, bodies(cases), held=True)
    assert [answer["output_ids"] for answer in answers] == [case.tokens for case in cases]
    assert server.metric("vllm:num_preemptions_total") > 0


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("starcoder2", "lasttoken"),
        ("qwen3.5", "mean_tokens"),
        pytest.param("starcoder2", "mean_tokens", marks=pytest.mark.slow),
        pytest.param("qwen3.5", "lasttoken", marks=pytest.mark.slow),
    ],
)
def test_vectors_are_those_of_the_base_model(
    family: str, mode: str, models: Models, serve: Serve, tmp_path: Path
) -> None:
    tiny = models(family)
    folder = tmp_path / f"{family}-{mode}"
    shutil.copytree(tiny.path, folder)
    as_sentence_transformers(folder, mode)
    server = serve(Model(folder.name, folder, folder / "tokenizer.json"), *FLAGS, "--is-embedding")
    text = tiny.encode((Path(__file__).parents[2] / "LICENSE").read_text())
    prompts = [text[at * 50 : at * 50 + length] for at, length in enumerate((1, 7, 90, 31, 64))]
    found = server.ask("/v1/embeddings", {"input": prompts})["data"]
    assert isinstance(tiny, TinyModel)
    for prompt, one in zip(prompts, found, strict=True):
        with torch.inference_mode():
            states = tiny.reference.model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        wanted = states.mean(0) if mode == "mean_tokens" else states[-1]
        np.testing.assert_allclose(one["embedding"], torch.nn.functional.normalize(wanted, dim=0), atol=1e-4)
    assert server.http.get("/server_info").json()["config"]["hand_reason"].startswith("transformers' own code")


def test_a_host_tier_gives_blocks_back(models: Models, serve: Serve) -> None:
    """Keys and values go to the host and back, because all requests together need more pages than the device has."""
    tiny = models("starcoder2")
    found = clear_cases(tiny, 12, 120, range(20, 40), seed=6)
    tier = ("--enable-hierarchical-cache", "--debug-kv-checksum", "--hicache-ratio", "8", "--max-total-tokens", "400")
    server = serve(tiny, *tier, "--context-length", "300")
    for _ in range(2):
        answers = native_together(server, bodies(found), held=True)
        assert [answer["output_ids"] for answer in answers] == [case.tokens for case in found]
    assert server.metric("forebay:restores_total") > 0
    assert server.metric("forebay:copies_failed_total") == 0


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("starcoder2", ("--dp-size", "2")),
        ("qwen3.5", ("--dp-size", "2")),
        ("starcoder2", ("--pd", "1:1", "--pd-local-tokens", "0", "--debug-kv-checksum")),
    ],
)
def test_replicas_alike_or_with_roles_change_no_token(
    family: str, flags: tuple[str, ...], models: Models, serve: Serve
) -> None:
    tiny = models(family)
    found = clear_cases(tiny, 8, 40, range(20, 40), seed=6)
    server = serve(tiny, *FLAGS, *flags)
    answers = native_together(server, bodies(found))
    assert [answer["output_ids"] for answer in answers] == [case.tokens for case in found]
    assert all(one["generated_tokens"] for one in server.replicas())
    if "--pd" in flags:
        assert server.metric("forebay:pd_handed_total") == len(found)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model-impl", "native"), "no hand serves the architecture Starcoder2ForCausalLM"),
        (("--model-impl", "transformers", "--hand", "rust"), "the Rust hand has native code only"),
        (("--quantization", "w8a8_int8"), "for which there is not --quantization"),
        (("--tp-size", "2"), "for which there is not several ranks"),
        (("--kv-cache-dtype", "int8"), "for which there is not --kv-cache-dtype"),
        (("--attention-backend", "triton"), "--attention-backend and --cuda-graph-max-bs are for --device cuda"),
        (("--enable-hisparse", "--enable-hierarchical-cache"), "hisparse"),
    ],
)
def test_what_there_is_not_is_refused_in_a_line(
    flags: tuple[str, ...], reason: str, models: Models, serve: Serve
) -> None:
    _is_refused(serve(models("starcoder2"), *FLAGS, *flags, healthy=False), reason)


@pytest.mark.parametrize("flags", [("--enable-hierarchical-cache",), ("--pd", "1:1")])
def test_a_host_tier_of_states_is_refused_in_a_line(flags: tuple[str, ...], models: Models, serve: Serve) -> None:
    server = serve(models("qwen3.5"), *FLAGS, *flags, healthy=False)
    _is_refused(server, "keeps its recurrent states in a form that no host tier has")


def test_a_gguf_file_is_refused_in_a_line(models: Models, serve: Serve) -> None:
    server = serve(models("smollm2"), "--model-impl", "transformers", healthy=False)
    _is_refused(server, "is no folder with a config.json, which transformers' code needs")


def test_a_pickle_is_refused_in_a_line(models: Models, serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(models("starcoder2").path, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    _is_refused(serve(Model("pickled", folder, folder / "tokenizer.json"), *FLAGS, healthy=False), "safetensors")


def _is_refused(server: Server, reason: str) -> None:
    assert server.process.wait(120) != 0
    assert reason in server.log()
    assert "Traceback" not in server.log()


def test_a_native_family_on_request(models: Models, serve: Serve) -> None:
    tiny = models("llama")
    found = clear_cases(tiny, 3, 40, range(6, 10), seed=2)
    server = serve(tiny, *FLAGS)
    assert [answer["output_ids"] for answer in native_together(server, bodies(found))] == [
        case.tokens for case in found
    ]


def test_code_of_a_repository_is_named_and_never_run(models: Models, serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "own-code"
    shutil.copytree(models("starcoder2").path, folder)
    config = folder / "config.json"
    text = (
        config.read_text().replace('"starcoder2"', '"homemade"').replace("Starcoder2ForCausalLM", "HomemadeForCausalLM")
    )
    config.write_text(text.replace("{", '{"auto_map": {"AutoModelForCausalLM": "code.HomemadeForCausalLM"}, ', 1))
    (folder / "code.py").write_text("raise SystemExit('ran')")
    other = Model("own-code", folder, folder / "tokenizer.json")
    server = serve(other, *PLAIN, healthy=False)
    assert server.process.wait(120) != 0
    assert "auto_map: AutoModelForCausalLM" in server.log()
    assert "ran" not in server.log().split()
