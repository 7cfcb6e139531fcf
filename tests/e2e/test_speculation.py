"""Speculation changes no token: through the whole server, answers with drafts equal those without."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import native_together
from tests.e2e.conftest import Models, Serve
from tests.e2e.heads import eagle3, with_mtp
from tests.e2e.models import Model
from tests.e2e.reference import prompts
from tests.e2e.server import Server
from tests.e2e.waiting import eventually

NGRAM = ("--speculative-algorithm", "ngram")
ALWAYS = (*NGRAM, "--speculative-unpriced")
NONE = ("--speculative-algorithm", "none")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["anna", "bert"]}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0, "repetition_penalty": 1.05, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    {"temperature": 0.2, "frequency_penalty": 0.2},
    {"temperature": 0, "logit_bias": {"7": 3.0, "9": 2.0}, "min_new_tokens": 20},
    {"temperature": 0.1, "min_p": 0.2},
    {"temperature": 0, "ignore_eos": False, "stop_token_ids": [5, 6, 7]},
    {"temperature": 1.3, "regex": "(ab|cd|[0-9]){20,90}"},
    {"temperature": 0.7, "ignore_eos": False, "json_schema": json.dumps(SCHEMA)},
    {"temperature": 0, "regex": "(ab){30}", "frequency_penalty": 0.3, "repetition_penalty": 1.2},
]
REQUESTS = 24
TOKENS = 48


def asked(model: Model) -> list[dict[str, Any]]:
    """Requests with repetitive prompts, in which many drafts are found."""
    return [
        {
            "input_ids": (prompt * 4)[: 30 + number],
            "sampling_params": {
                "max_new_tokens": TOKENS,
                "ignore_eos": True,
                "seed": number,
                **WAYS[number % len(WAYS)],
            },
            "return_logprob": number % 3 == 0,
            "top_logprobs_num": 3 * (number % 2),
        }
        for number, prompt in enumerate(prompts(model, REQUESTS, 14, seed=51))
    ]


def told(answers: list[dict[str, Any]]) -> list[Any]:
    """The fields of answers that must not differ: no times and ids."""
    facts = ("finish_reason", "completion_tokens", "prompt_tokens")
    return [(answer["output_ids"], answer["text"], [answer["meta_info"][fact] for fact in facts]) for answer in answers]


def logprobs(answers: list[dict[str, Any]]) -> list[float]:
    return [entry[0] for answer in answers for entry in answer["meta_info"].get("output_token_logprobs") or []]


@pytest.fixture(scope="module")
def expected(serve_for_module: Serve, tiny: Model) -> list[dict[str, Any]]:
    """The answers of a server without speculation."""
    server = serve_for_module(tiny, "--dtype", "float32", *NONE)
    answers = native_together(server, asked(tiny))
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") == 0
    server.kill()
    return answers


@pytest.mark.parametrize(
    ("flags", "drafts"),
    [
        ((), 8),
        (("--draft-max", "3"), 3),
        (NONE, None),
        (("--hand", "torch"), None),
        (("--device", "sim"), None),
    ],
    ids=["rust", "bounded", "none", "torch", "sim"],
)
def test_the_rust_hand_has_drafts_by_default(
    serve: Serve, tiny: Model, flags: tuple[str, ...], drafts: int | None
) -> None:
    server = serve(tiny, *flags)
    assert server.http.get("/server_info").json()["config"].get("speculative_num_draft_tokens") == drafts
    eventually(lambda: "Stop: Ctrl-C" in server.log(), "the banner is written")
    assert ("Speculates with n-grams" in server.log()) == (drafts is not None)


def accepted(server: Server) -> float:
    metrics = server.metrics()
    drafted = metrics.value("vllm:spec_decode_num_draft_tokens_total")
    accepted = metrics.value("vllm:spec_decode_num_accepted_tokens_total")
    places = [
        metrics.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(place)) for place in range(16)
    ]
    assert drafted >= accepted >= sum(places)
    assert metrics.value("vllm:spec_decode_num_drafts_total") >= places[0]
    assert places == sorted(places, reverse=True)
    return accepted


@pytest.mark.parametrize(
    "flags",
    [
        ALWAYS,
        (*ALWAYS, "--speculative-num-draft-tokens", "1"),
        (*ALWAYS, "--draft-max", "3", "--lookahead", "0", "--chunked-prefill-size", "16"),
        (*ALWAYS, "--max-total-tokens", "400", "--page-size", "4"),
        (*ALWAYS, "--pd", "1:1", "--pd-local-tokens", "0", "--threads", "1", "--debug-kv-checksum"),
        ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}'),
        (*ALWAYS, "--device", "deferred"),
    ],
    ids=" ".join,
)
def test_drafts_change_no_token(
    serve: Serve, tiny: Model, expected: list[dict[str, Any]], flags: tuple[str, ...]
) -> None:
    server = serve(tiny, "--dtype", "float32", *flags)
    for size in (REQUESTS, 3):
        requests = asked(tiny)[:size]
        answers = native_together(server, requests, held=size == REQUESTS)
        assert told(answers) == told(expected[:size])
        assert logprobs(answers) == pytest.approx(logprobs(expected[:size]), abs=1e-5)
    given = accepted(server)
    assert given > 0 or "--speculative-config" in flags
    if "--max-total-tokens" in flags:
        assert server.metric("vllm:num_preemptions_total") > 0


def test_a_killed_hand_changes_no_token(serve: Serve, tiny: Model, expected: list[dict[str, Any]]) -> None:
    server = serve(tiny, "--dtype", "float32", *ALWAYS)
    with ThreadPoolExecutor(1) as client:
        answers = client.submit(native_together, server, asked(tiny))
        server.wait_for_metric("vllm:spec_decode_num_accepted_tokens_total", lambda value: value > 0)
        hand = server.hand()
        assert hand is not None
        os.kill(hand, signal.SIGKILL)
    assert told(answers.result()) == told(expected)
    assert server.metric("forebay:hand_deaths_total") == 1


def test_a_predicted_answer_is_counted_and_changes_nothing(serve: Serve, tiny: Model) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Say it again"}],
        "temperature": 0,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    server = serve(tiny, "--dtype", "float32", *ALWAYS)
    plain = server.ask("/v1/chat/completions", body)
    text = plain["choices"][0]["message"]["content"]
    assert "accepted_prediction_tokens" not in str(plain["usage"])
    for prediction in (text, [{"type": "text", "text": text}]):
        predicted = body | {"prediction": {"type": "content", "content": prediction}}
        answer = server.ask("/v1/chat/completions", predicted)
        assert answer["choices"][0]["message"]["content"] == text
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
        assert details["accepted_prediction_tokens"] < answer["usage"]["completion_tokens"] == 40
    choices = server.ask("/v1/chat/completions", body | {"n": 3, "stop": [text[9:12]], "prediction": None})
    assert len({choice["message"]["content"] for choice in choices["choices"]}) == 1
    refused = server.post("/v1/chat/completions", body | {"prediction": {"type": "content", "content": 3}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prediction"
    server.kill()
    without = serve(tiny, "--dtype", "float32", *NONE)
    response = without.post("/v1/chat/completions", body | {"prediction": {"type": "content", "content": text}})
    assert response.json()["choices"][0]["message"]["content"] == text
    assert "prediction" in response.headers["x-forebay-ignored"]


@pytest.mark.parametrize("hand", [(), ("--device", "deferred")], ids=["rust", "torch"])
def test_what_a_form_forces_is_drafted(serve: Serve, tiny: Model, hand: tuple[str, ...]) -> None:
    server = serve(tiny, "--dtype", "float32", *ALWAYS, *hand)
    form = {"max_new_tokens": 60, "temperature": 1.0, "seed": 4, "regex": "[0-9]{3}, and not only that but more"}
    answer = server.ask("/generate", {"input_ids": [5, 6], "sampling_params": form})
    assert answer["text"][3:] == ", and not only that but more"
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    assert drafted >= server.metric("vllm:spec_decode_num_accepted_tokens_total") >= 4


def test_pytorchs_hand_verifies_them_on_a_cpu(serve: Serve, tiny: Model, expected: list[dict[str, Any]]) -> None:
    # `ALWAYS` makes drafts at any cost: whether a draft is worth its time depends on the machine.
    torch = serve(tiny, "--dtype", "float32", "--hand", "torch", *ALWAYS)
    answers = native_together(torch, asked(tiny)[:6])
    assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in expected[:6]]
    assert torch.metric("vllm:spec_decode_num_draft_tokens_total") > 0


@pytest.mark.parametrize("draft", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_a_draft_model_changes_no_token(
    serve: Serve, models: Models, tiny: Model, expected: list[dict[str, Any]], draft: str
) -> None:
    drafts = ("-md", str(models(draft).path), "--draft-max", "3")
    server = serve(tiny, "--dtype", "float32", "--device", "deferred", *drafts)
    answers = native_together(server, asked(tiny), held=True)
    assert told(answers) == told(expected)
    assert logprobs(answers) == pytest.approx(logprobs(expected), abs=1e-5)
    again = native_together(server, asked(tiny)[:4])
    assert told(again) == told(expected[:4]), "answers with cached prompts are the same"
    assert (accepted(server) > 0) == (draft == "llama")


@pytest.mark.parametrize("device", [(), ("--device", "deferred")], ids=["cpu", "deferred"])
def test_a_head_changes_no_token(
    serve: Serve, tiny: Model, expected: list[dict[str, Any]], tmp_path: Path, device: tuple[str, ...]
) -> None:
    head = str(eagle3(tiny, tmp_path / "head"))
    drafts = (
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        head,
        "--speculative-num-steps",
        "3",
    )
    pages = ("--max-total-tokens", "400", "--page-size", "4", "--chunked-prefill-size", "16")
    server = serve(tiny, "--dtype", "float32", *drafts, *device, *pages)
    if not device:
        eventually(
            lambda: "does not have draft models, or draft heads" in server.log(),
            "the banner gives the reason for PyTorch's hand",
        )
    answers = native_together(server, asked(tiny), held=True)
    assert told(answers) == told(expected)
    assert logprobs(answers) == pytest.approx(logprobs(expected), abs=1e-5)
    assert server.metric("vllm:num_preemptions_total") > 0
    again = native_together(server, asked(tiny)[:4])
    assert told(again) == told(expected[:4]), "answers with cached prompts are the same"
    accepted(server)
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0


def test_a_killed_hand_with_a_head_changes_no_token(
    serve: Serve, tiny: Model, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    config = {"method": "eagle3", "model": str(eagle3(tiny, tmp_path / "head")), "num_speculative_tokens": 2}
    server = serve(tiny, "--dtype", "float32", "--speculative-config", json.dumps(config))
    with ThreadPoolExecutor(1) as client:
        answers = client.submit(native_together, server, asked(tiny))
        server.wait_for_metric("vllm:spec_decode_num_draft_tokens_total", lambda value: value > 0)
        hand = server.hand()
        assert hand is not None
        os.kill(hand, signal.SIGKILL)
    assert told(answers.result()) == told(expected)
    assert server.metric("forebay:hand_deaths_total") == 1


def test_an_mtp_layer_changes_no_token(serve: Serve, models: Models, tmp_path: Path) -> None:
    model = models("glm4-moe")
    plain = serve(model, "--dtype", "float32", "--hand", "torch")
    expected = native_together(plain, asked(model)[:12])
    plain.kill()
    folder = with_mtp(model, tmp_path / "longer")
    longer = Model("glm4-moe-mtp", folder, folder / "tokenizer.json")
    server = serve(longer, "--dtype", "float32", "--speculative-algorithm", "NEXTN", "--device", "deferred")
    assert told(native_together(server, asked(model)[:12])) == told(expected)
    assert accepted(server) > 0, "some drafts are right, since the layer reads the right state"


def test_where_no_draft_model_is_served_is_said(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny.path, other)
    described = json.loads((other / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    one, two = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(described))
    for flags, why in (
        (("-md", str(other)), "needs the tokenizer of"),
        (("-md", str(tiny.path), "--hand", "rust"), "the Rust hand does not have draft models"),
        (("-md", str(tiny.path), "--device", "sim"), "a draft model is not served with a simulated device"),
    ):
        refused = serve(tiny, *flags, healthy=False)
        assert refused.process.wait(60) != 0
        assert why in refused.log()


def test_where_no_head_is_served_is_said(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    head = eagle3(tiny, tmp_path / "head")
    other = eagle3(tiny, tmp_path / "other", vocab_size=2000)
    algorithm = ("--speculative-algorithm", "eagle3", "--speculative-draft-model-path")
    for flags, why in (
        ((*algorithm, str(head), "--hand", "rust"), "does not have draft models, or draft heads"),
        ((*algorithm, str(head), "--device", "sim"), "draft heads are not served with a simulated device"),
        ((*algorithm, str(head), "--enable-lora"), "draft heads are not served with adapters"),
        ((*algorithm, str(head), "--tp-size", "2"), "draft heads are not served with several ranks"),
        ((*algorithm, str(other)), "is of another model: it has a vocabulary of 2000, not 2048"),
        ((*algorithm, str(tiny.path)), "LlamaForCausalLM of"),
    ):
        refused = serve(tiny, *flags, healthy=False)
        assert refused.process.wait(60) != 0
        assert why in refused.log()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((*NONE, "--draft-max", "4"), "--speculative-algorithm ngram turns them on"),
        (("--hand", "torch", "--draft-max", "4"), "--speculative-algorithm ngram turns them on"),
        ((*NGRAM, "--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"), "speculation has to be off"),
        (("--speculative-algorithm", "medusa"), "is not supported; use"),
        (("--speculative-algorithm", "EAGLE3"), "an EAGLE-3 head has to be named"),
        (("--speculative-algorithm", "EAGLE", "-md", "x"), "an MTP layer is in the model's own files"),
        (("--speculative-algorithm", "NEXTN"), "no hand serves an MTP layer of LlamaForCausalLM"),
        (
            ("--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "4"),
            "drafts are chains here, and no trees",
        ),
        (("--speculative-algorithm", "STANDALONE"), "a draft model has to be named"),
        (("-md", "/no/such/model"), "the model /no/such/model is not available"),
        ((*NGRAM, "-md", "/no/such/model"), "a draft model is for --speculative-algorithm draft_model or eagle3"),
    ],
)
def test_what_does_not_go_together_is_said(serve: Serve, tiny: Model, flags: tuple[str, ...], why: str) -> None:
    refused = serve(tiny, *flags, healthy=False)
    assert refused.process.wait(60) != 0
    assert why in refused.log()
