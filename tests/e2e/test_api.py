"""The answers of all routes, read with OpenAI's client where the route is OpenAI's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, OpenAI

from tests.e2e.client import events, native_together, openai_client
from tests.e2e.conftest import Serve
from tests.e2e.models import TINY_CONTEXT, VOCABULARY, Model
from tests.e2e.server import Server

ROUTES = {
    "/replicas/{replica}/drain": {"post"},
    "/replicas/{replica}/resume": {"post"},
    "/replicas/{replica}/role": {"post"},
    "/pd/prefill": {"post"},
    "/v1/chat/completions": {"post"},
    "/v1/completions": {"post"},
    "/v1/messages": {"post"},
    "/v1/messages/count_tokens": {"post"},
    "/v1/responses": {"post"},
    "/v1/responses/input_tokens": {"post"},
    "/v1/responses/{id}": {"get", "delete"},
    "/v1/responses/{id}/cancel": {"post"},
    "/v1/responses/{id}/input_items": {"get"},
    "/v1/files": {"get", "post"},
    "/v1/files/{id}": {"get", "delete"},
    "/v1/files/{id}/content": {"get"},
    "/v1/batches": {"get", "post"},
    "/v1/batches/{id}": {"get"},
    "/v1/batches/{id}/cancel": {"post"},
    "/api/chat": {"post"},
    "/api/generate": {"post"},
    "/api/embed": {"post"},
    "/api/embeddings": {"post"},
    "/api/show": {"post"},
    "/api/tags": {"get"},
    "/api/ps": {"get"},
    "/api/version": {"get"},
    "/v1/embeddings": {"post"},
    "/rerank": {"post"},
    "/v1/rerank": {"post"},
    "/v2/rerank": {"post"},
    "/score": {"post"},
    "/v1/score": {"post"},
    "/v1/models": {"get"},
    "/v1/models/{id}": {"get"},
    "/generate": {"post"},
    "/v1/load_lora_adapter": {"post"},
    "/v1/unload_lora_adapter": {"post"},
    "/load_lora_adapter": {"post"},
    "/unload_lora_adapter": {"post"},
    "/lora-adapters": {"get"},
    "/pause": {"post"},
    "/resume": {"post"},
    "/is_paused": {"get"},
    "/pause_generation": {"post"},
    "/continue_generation": {"post"},
    "/update_weights_from_disk": {"post"},
    "/update_weights_from_tensor": {"post"},
    "/get_weights_by_name": {"get", "post"},
    "/update_weights_from_distributed": {"post"},
    "/update_weights_from_ipc": {"post"},
    "/init_weights_update_group": {"post"},
    "/destroy_weights_update_group": {"post"},
    "/init_weight_transfer_engine": {"post"},
    "/update_weights": {"post"},
    "/update_weight_version": {"post"},
    "/get_weight_version": {"get"},
    "/completion": {"post"},
    "/apply-template": {"post"},
    "/slots": {"get"},
    "/pooling": {"post"},
    "/classify": {"post"},
    "/v1/classify": {"post"},
    "/tokenizer_info": {"get"},
    "/tokenize": {"post"},
    "/detokenize": {"post"},
    "/health": {"get"},
    "/health_generate": {"get"},
    "/server_info": {"get"},
    "/v1/live": {"get"},
    "/v1/live/requests/{id}": {"get"},
    "/v1/live/trace": {"get"},
    "/flush_cache": {"post"},
    "/livez": {"get"},
    "/metrics": {"get"},
    "/openapi.json": {"get"},
    "/v1/blocks": {"get"},
    "/v1/loads": {"get"},
    "/version": {"get"},
    "/ping": {"get", "post"},
}
COUNTERS = ["prompt_tokens", "generation_tokens", "request_success", "prefix_cache_queries", "prefix_cache_hits"]
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
]
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
PROMPT = "The licence of this work"


@pytest.fixture(scope="module")
def server(serve_for_module: Serve, tiny: Model) -> Server:
    return serve_for_module(tiny, "--served-model-name", "tiny", "also-tiny", "--schedule-policy", "priority")


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return openai_client(server)


def native(server: Server, prompt: list[int], **params: Any) -> Any:
    """A greedy answer of `/generate` that ignores end-of-sequence."""
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, **params}
    return server.ask("/generate", {"input_ids": prompt, "sampling_params": sampling})


def test_chat_whole_and_as_a_stream(client: OpenAI, server: Server) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    whole = client.chat.completions.create(**options, extra_body={"ignore_eos": True})
    assert (whole.object, whole.model) == ("chat.completion", "tiny")
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].message.role == "assistant"
    prompt = server.ask("/tokenize", {"messages": MESSAGES})["tokens"]
    usage = whole.usage
    assert usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(prompt), 20, len(prompt) + 20)

    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    last = chunks[-1].usage
    assert last
    assert (last.prompt_tokens, last.completion_tokens) == (len(prompt), 20)
    # The prompt came before, so all its full pages are cached, except one that holds its last token.
    assert last.prompt_tokens_details
    assert last.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 16 * 16 > 0
    assert len({chunk.id for chunk in chunks}) == 1


def test_content_parts_and_open_ends(client: OpenAI, server: Server) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "this"}]
    tokens = [
        server.ask("/tokenize", {"messages": [{"role": "user", "content": content}]})["tokens"]
        for content in (parts, "Say\nthis")
    ]
    assert tokens[0] == tokens[1]
    opened = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]
    body = {"messages": opened, "continue_final_message": True, "add_generation_prompt": False}
    text = server.ask("/detokenize", {"tokens": server.ask("/tokenize", body)["tokens"]})["prompt"]
    assert text.endswith("<|im_start|>assistant\nIt is")


def test_completions_of_every_kind_of_prompt(client: OpenAI, tiny: Model) -> None:
    ids = tiny.encode(PROMPT)
    other = tiny.encode("Something else")

    def texts(prompt: Any, **options: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=8, **options)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    (one,) = texts(PROMPT)
    assert texts(ids) == [one]
    assert texts([PROMPT, "Something else"]) == texts([ids, other]) == [one, *texts(other)]
    assert texts(PROMPT, echo=True) == [PROMPT + one]
    assert texts([PROMPT, "Something else"], n=1, echo=True)[1].startswith("Something else")


def test_choices_and_seeds(client: OpenAI, server: Server) -> None:
    def texts(n: int, seed: int | None = 7) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=12, n=n, seed=seed, temperature=1, extra_body={"ignore_eos": True}
        )
        assert answer.usage
        assert answer.usage.completion_tokens == 12 * n
        assert answer.usage.prompt_tokens < 12
        return [choice.text for choice in answer.choices]

    three = texts(3)
    assert len(set(three)) == 3
    assert texts(3) == three
    assert texts(1) == three[:1]
    assert texts(1, seed=8) != three[:1]
    assert len({texts(1, seed=None)[0] for _ in range(4)}) > 1


def boundaries(pieces: list[str]) -> list[str]:
    """Strings that begin inside one token and end inside another."""
    found = []
    for first, second, third in zip(pieces, pieces[1:], pieces[2:], strict=False):
        if all(piece.isascii() and len(piece) > 1 for piece in (first, second, third)):
            found += [first[-1] + second[0], first[-1] + second + third[0]]
    return found


@pytest.mark.parametrize("start", [0, 40, 80])
def test_nothing_of_a_stop_string_is_leaked(server: Server, tiny: Model, start: int) -> None:
    prompt = tiny.encode(PROMPT * 20)[start : start + 20]
    free = native(server, prompt)
    pieces = [tiny.decode([token]) for token in free["output_ids"]]
    stops = boundaries(pieces)
    assert stops, "no stop string crosses tokens: choose another prompt"
    for stop in stops:
        wanted = free["text"][: free["text"].index(stop)]
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 24, "stop": ["\0never", stop]}
        whole = server.ask("/v1/completions", {**body, "ignore_eos": True})["choices"][0]
        assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (wanted, "stop", stop)
        streamed = events(server.post("/v1/completions", {**body, "ignore_eos": True, "stream": True}).text)
        assert "".join(choice["text"] for chunk in streamed for choice in chunk["choices"]) == wanted
        included = server.ask("/v1/completions", {**body, "ignore_eos": True, "include_stop_str_in_output": True})
        assert included["choices"][0]["text"] == wanted + stop
        native_answer = native(server, prompt, stop=stop)
        assert native_answer["text"] == wanted
        assert native_answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_stop_tokens_and_the_least_number_of_tokens(server: Server, tiny: Model) -> None:
    prompt = tiny.encode(PROMPT)
    free = native(server, prompt)["output_ids"]
    stop = free[4]
    at = free.index(stop)
    stopped = native(server, prompt, stop_token_ids=[stop])
    assert stopped["output_ids"] == free[: at + 1]
    assert stopped["text"] == tiny.decode(free[:at])
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    late = native(server, prompt, stop_token_ids=[stop], min_new_tokens=12)["output_ids"]
    assert len(late) >= 12
    assert stop not in late[:12]
    # End-of-sequence stops the answer, unless it is ignored.
    for ignore, count in ((False, 1), (True, 24)):
        bias = {"2": 100}
        assert len(native(server, prompt, ignore_eos=ignore, logit_bias=bias)["output_ids"]) == count


def test_bias_forces_and_forbids(server: Server, tiny: Model) -> None:
    prompt = tiny.encode(PROMPT)
    first = native(server, prompt)["output_ids"][0]
    assert native(server, prompt, logit_bias={"77": 100})["output_ids"] == [77] * 24
    assert first not in native(server, prompt, logit_bias={str(first): -100})["output_ids"]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_only_allowed_ids_come(server: Server, tiny: Model, temperature: float) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": temperature, "seed": 3, "ignore_eos": True}
    one = server.ask("/v1/completions", {**body, "allowed_token_ids": [77]})["choices"][0]["text"]
    assert one == server.ask("/detokenize", {"tokens": [77] * 24})["prompt"]
    asked = {**body, "allowed_token_ids": [90, 77], "logprobs": 0}
    words = {server.ask("/detokenize", {"tokens": [token]})["prompt"] for token in (77, 90)}
    assert set(server.ask("/v1/completions", asked)["choices"][0]["logprobs"]["tokens"]) <= words
    # Only the stop token is allowed, so it is sampled although `min_tokens` is not reached.
    early = {**body, "allowed_token_ids": [77], "stop_token_ids": [77], "min_tokens": 5}
    assert server.ask("/v1/completions", early)["usage"]["completion_tokens"] == 1
    refused = server.post("/v1/completions", {**body, "allowed_token_ids": [10**8, 77]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "allowed_token_ids[0]")


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 5}],
    ids=lambda p: next(iter(p)),
)
def test_penalties_push_repeated_tokens_back(server: Server, tiny: Model, penalty: dict[str, float]) -> None:
    prompt = tiny.encode(PROMPT)
    # The smallest bias that makes the model repeat one token.
    bias = next(b for b in range(1, 100) if native(server, prompt, logit_bias={"77": b})["output_ids"].count(77) == 24)
    assert native(server, prompt, logit_bias={"77": bias}, **penalty)["output_ids"].count(77) < 24


def test_sampling_filters(server: Server, tiny: Model) -> None:
    prompt = tiny.encode(PROMPT)
    greedy = native(server, prompt)["output_ids"]
    for only_the_first in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        params = {"temperature": 1.5, "sampling_seed": 3, **only_the_first}
        assert native(server, prompt, **params)["output_ids"] == greedy
    assert native(server, prompt, temperature=1.5, sampling_seed=3)["output_ids"] != greedy


def test_completion_logprobs_fit_the_text(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=12, logprobs=3, extra_body={"ignore_eos": True}
    )
    choice = answer.choices[0]
    lists = choice.logprobs
    assert lists
    assert lists.tokens
    assert lists.text_offset
    assert lists.token_logprobs
    assert lists.top_logprobs
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == 12
    offset = 0
    for index, token in enumerate(lists.tokens):
        assert lists.text_offset[index] == offset
        offset += len(token)
        top = lists.top_logprobs[index]
        assert top[token] == max(top.values()) <= 0
        assert top[token] == pytest.approx(lists.token_logprobs[index], abs=1e-6)
        assert list(top.values()) == sorted(top.values(), reverse=True)
    if "\ufffd" not in "".join(lists.tokens):
        assert "".join(lists.tokens) == choice.text


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_fit_the_text(client: OpenAI, stream: bool) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    options |= {"logprobs": True, "top_logprobs": 4, "extra_body": {"ignore_eos": True}}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
        text = "".join(choice.delta.content or "" for choice in chunks)
        entries = [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content or []]
    else:
        choice = client.chat.completions.create(**options).choices[0]
        assert choice.logprobs
        text, entries = choice.message.content or "", choice.logprobs.content or []
    assert len(entries) == 12
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode(errors="replace") == text
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 4


def test_native_dialect(server: Server, tiny: Model) -> None:
    ids = tiny.encode(PROMPT)
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    one = server.ask("/generate", {"text": PROMPT, "sampling_params": params, "rid": "mine"})
    assert one["meta_info"]["id"] == "mine"
    assert one["meta_info"]["prompt_tokens"] == len(ids)
    assert one["meta_info"]["completion_tokens"] == len(one["output_ids"]) == 6
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert one["text"] == tiny.decode(one["output_ids"], skip_special_tokens=True)
    assert server.ask("/generate", {"input_ids": ids, "sampling_params": params})["output_ids"] == one["output_ids"]

    longer = {**params, "max_new_tokens": 9}
    batch = server.ask("/generate", {"input_ids": [ids, ids[:3]], "sampling_params": [params, longer]})
    assert [answer["meta_info"]["completion_tokens"] for answer in batch] == [6, 9]
    assert batch[0]["output_ids"] == one["output_ids"]

    with_logprobs = {"text": PROMPT, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    meta = server.ask("/generate", {**with_logprobs, "return_text_in_logprobs": True})["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == one["output_ids"]
    assert [text for _, _, text in meta["output_token_logprobs"]] == [tiny.decode([t]) for t in one["output_ids"]]
    assert [tops[0][:2] for tops in meta["output_top_logprobs"]] == [t[:2] for t in meta["output_token_logprobs"]]

    (last,) = native_together(server, [{"text": PROMPT, "sampling_params": params}])
    assert last["output_ids"] == one["output_ids"]

    response = server.post("/generate", {"text": [PROMPT, "Else"], "sampling_params": params, "stream": True})
    chunks = events(response.text)
    assert {chunk["index"] for chunk in chunks} == {0, 1}
    assert next(c for c in reversed(chunks) if c["index"] == 0)["output_ids"] == one["output_ids"]


def test_tokenize_and_back(server: Server, tiny: Model) -> None:
    for text in ("The licence", " spaces  and\ttabs\n", "héllo wörld ✓ 日本語 🦀", "<|im_start|>user"):
        answer = server.ask("/tokenize", {"prompt": text, "return_token_strs": True})
        assert answer["tokens"] == tiny.encode(text)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == TINY_CONTEXT
        assert server.ask("/detokenize", {"tokens": answer["tokens"]})["prompt"] == text


def test_models(client: OpenAI, server: Server, tiny: Model) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("also-tiny").id == "also-tiny"
    card = server.http.get("/v1/models").json()["data"][0]
    assert (card["root"], card["max_model_len"], card["object"]) == (str(tiny.path), TINY_CONTEXT, "model")
    answer = client.completions.create(model="also-tiny", prompt="a", max_tokens=1)
    assert answer.model == "also-tiny"


def test_server_info(server: Server) -> None:
    info = server.http.get("/server_info").json()
    assert info["served_model_names"] == ["tiny", "also-tiny"]
    assert info["status"] == "ready"
    config = info["config"]
    assert (config["dtype"], config["page_size"], config["schedule_policy"]) == ("float32", 16, "priority")
    facts = info["facts"]
    assert (facts["vocab_size"], facts["context_length"], facts["page_size"]) == (VOCABULARY, TINY_CONTEXT, 16)
    state = info["internal_states"][0]
    # All pages are accounted for.
    assert state["pages_held"] + state["pages_cached"] + state["pages_free"] == facts["page_count"]
    assert server.http.get("/version").json() == {"version": info["version"]}
    assert server.http.get("/ping").json() == server.post("/ping", {}).json() == {}
    assert server.http.get("/health_generate").status_code == 200


def test_flush_cache_forgets(server: Server, tiny: Model) -> None:
    prompt = tiny.encode(PROMPT * 10)[:50]

    def cached() -> int:
        count: int = native(server, prompt, max_new_tokens=1)["meta_info"]["cached_tokens"]
        return count

    cached()
    assert cached() == 48
    for _ in range(2):
        server.wait_until_idle()
        response = server.http.post("/flush_cache")
        assert (response.status_code, response.json()) == (200, {"flushed": True})
        assert cached() == 0


def test_metrics_have_the_names_of_dashboards_and_move(server: Server, tiny: Model) -> None:
    server.wait_until_idle()
    prompt = tiny.encode(PROMPT * 10)[:40]
    native(server, prompt, max_new_tokens=2)
    before = server.metrics()
    native(server, prompt, max_new_tokens=5)
    after = server.metrics()

    def moved(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    for name in COUNTERS:
        assert before.types[f"vllm:{name}_total"] == "counter"
        assert moved(f"vllm:{name}_total") > 0
    for name in HISTOGRAMS:
        assert before.types[f"vllm:{name}"] == "histogram"
        assert moved(f"vllm:{name}_count") > 0
        assert after.value(f"vllm:{name}_bucket", le="+Inf") == after.value(f"vllm:{name}_count")
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert before.types[f"vllm:{name}"] == "gauge"
    assert moved("vllm:generation_tokens_total") == 5
    assert moved("vllm:prefix_cache_hits_total") == 32
    assert moved("vllm:prompt_tokens_total") == 8
    assert moved("vllm:request_success_total", finished_reason="length") == 1
    assert moved("vllm:inter_token_latency_seconds_count") == 4
    assert moved("forebay:steps_total") >= 5
    assert moved("forebay:device_busy_seconds_total") > 0
    assert after.value("forebay:device_gap_seconds_total") >= 0
    assert after.value("vllm:num_preemptions_total") == 0
    # Metrics of the process and of HTTP have no model label.
    of_models = [sample for sample in after.samples if not sample.name.startswith(("http_", "process_"))]
    assert {sample.labels["model_name"] for sample in of_models} == {"tiny"}


def references(node: Any) -> list[str]:
    """All `$ref` values below a node."""
    if isinstance(node, list):
        return [found for item in node for found in references(item)]
    if not isinstance(node, dict):
        return []
    here = [node["$ref"]] if "$ref" in node else []
    return here + [found for item in node.values() for found in references(item)]


def test_openapi_lists_every_route(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.")
    assert {"title", "version"} <= document["info"].keys()
    verbs = {"get", "post", "put", "delete", "patch", "head", "options"}
    assert {path: set(item) & verbs for path, item in document["paths"].items()} == ROUTES
    operations = [operation for item in document["paths"].values() for verb, operation in item.items() if verb in verbs]
    assert all(operation["responses"] for operation in operations)
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    found = references(document)
    assert found
    for reference in found:
        node = document
        for key in reference.removeprefix("#/").split("/"):
            node = node[key]
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "stream", "logprobs"} <= chat.keys()


def test_priorities_are_taken(client: OpenAI) -> None:
    for priority in (-5, 0, 2**31 - 1):
        answer = client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body={"priority": priority})
        assert answer.choices


def test_requests_have_names(server: Server) -> None:
    given = server.http.get("/health", headers={"x-request-id": "mine"})
    assert given.headers["x-request-id"] == "mine"
    made = {server.http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3


def test_an_api_key_is_asked_for(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--api-key", "secret", "--lookahead", "0")
    with pytest.raises(AuthenticationError) as caught:
        openai_client(server, "wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    assert server.post("/generate", {"text": "a"}).status_code == 401
    assert server.http.get("/server_info").status_code == 401
    for path in ("/health", "/metrics", "/ping", "/version"):
        assert server.http.get(path).status_code == 200
    answer = openai_client(server, "secret").chat.completions.create(
        model=str(server.http.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()["data"][0]["id"]),
        messages=MESSAGES,
        max_tokens=3,
    )
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert "secret" not in server.http.get("/server_info", headers={"Authorization": "Bearer secret"}).text
    assert "secret" not in server.log()


def test_dummy_weights(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    """A config and a tokenizer are enough, and the seed decides the random weights."""
    bare = tmp_path / "bare"
    shutil.copytree(tiny.path, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    said = []
    for seed in ("1", "1", "2"):
        server = serve(Model("dummy", bare, bare / "tokenizer.json"), "--load-format", "dummy", "--seed", seed)
        body = {"text": "Rivers", "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
        said.append(server.ask("/generate", body)["output_ids"])
        server.kill()
    assert said[0] == said[1] != said[2]
