"""LoRA adapters end to end: loads at start and at run time, deaths of hands, and no cache that adapters share."""

from __future__ import annotations

import copy
import json
import os
import runpy
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import NotFoundError, OpenAI
from safetensors.torch import load_file

from tests.e2e.client import native_together
from tests.e2e.conftest import Serve
from tests.e2e.models import Model
from tests.e2e.server import Server
from tests.e2e.test_speculation import ALWAYS, accepted, asked, told
from tests.e2e.waiting import eventually

make: Any = runpy.run_path(str(Path(__file__).parents[2] / "scripts/make_adapter.py"))["make"]

PROMPT = [5, 9, 77, 31, 8, 120, 4, 66, 19, 40, 3, 90, 12, 51, 7, 33, 21, 60]
COUNT = 12
ADMIN = {"Authorization": "Bearer admin"}


def merged(model: Model, folder: Path) -> Any:
    """The model with the adapter in its weights: `W + B A * scale` in float32."""
    found = copy.deepcopy(model.reference)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in found.named_modules():
            prefix = f"base_model.model.{name}.lora_"
            if f"{prefix}A.weight" in tensors:
                change = tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"]
                module.weight += change * config["lora_alpha"] / config["r"]
    return found


def greedy(model: Any) -> list[int]:
    """The greedy tokens after the prompt."""
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(COUNT):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def ask(server: Server, model: str | None, **more: Any) -> Any:
    """A completion of the prompt."""
    body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return server.ask("/v1/completions", {**body, **({} if model is None else {"model": model}), **more})


def tokens(server: Server, model: str | None) -> list[int]:
    """The tokens of a completion."""
    found: list[int] = ask(server, model)["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def folder(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two adapters, `tone` and `other`."""
    root = tmp_path_factory.mktemp("adapters")
    config = json.loads(Path(tiny.path, "config.json").read_text())
    make(config, root / "tone", rank=8, seed=1, strength=0.1)
    make(config, root / "other", rank=4, seed=2, strength=0.1)
    return root


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_a_client_of_openai_chooses_an_adapter_by_its_model(serve: Serve, tiny: Model, folder: Path, hand: str) -> None:
    modules = (f"tone={folder / 'tone'}", json.dumps({"name": "org/other", "path": str(folder / "other")}))
    chosen = () if hand == "rust" else ("--hand", hand)
    server = serve(tiny, "--enable-lora", "--lora-modules", *modules, *chosen)
    assert server.http.get("/server_info").json()["config"]["hand"] == hand
    expected = {
        None: greedy(tiny.reference),
        "tone": greedy(merged(tiny, folder / "tone")),
        "org/other": greedy(merged(tiny, folder / "other")),
    }
    assert len({tuple(answer) for answer in expected.values()}) == 3
    for model, answer in expected.items():
        assert tokens(server, model) == answer, model
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    listed = {card.id: card.model_dump() for card in client.models.list().data}
    assert listed["tone"]["parent"] in listed
    assert client.models.retrieve("org/other").id == "org/other"
    text = client.completions.create(model="tone", prompt=PROMPT, max_tokens=COUNT, temperature=0).choices[0].text
    assert text == ask(server, "tone", ignore_eos=False)["choices"][0]["text"]
    chat = client.chat.completions.create(model="tone", messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    assert chat.model == "tone"
    with pytest.raises(NotFoundError) as unknown:
        client.completions.create(model="nobody", prompt="a")
    assert unknown.value.code == "model_not_found"
    body = {"input_ids": PROMPT, "lora_path": "tone", "sampling_params": {"temperature": 0}}
    generated = server.ask("/generate", body)
    assert generated["meta_info"]["prompt_tokens"] == len(PROMPT)


def test_no_adapter_finds_the_blocks_of_another(serve: Serve, tiny: Model, folder: Path) -> None:
    names = ("tone", "other")
    server = serve(tiny, "--lora-modules", *(f"{name}={folder / name}" for name in names), "--page-size", "4")

    def cached(model: str | None) -> int:
        details = ask(server, model)["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0)

    for model in (None, *names):
        assert cached(model) == 0
        assert cached(model) == 16


def test_blocks_of_adapters_come_back_from_the_host(serve: Serve, tiny: Model, folder: Path) -> None:
    names = ("tone", "other")
    modules = ("--lora-modules", *(f"{name}={folder / name}" for name in names))
    tier = ("--enable-hierarchical-cache", "--debug-kv-checksum", "--hicache-ratio", "8", "--max-total-tokens", "400")
    server = serve(tiny, *modules, *tier, "--page-size", "4")
    models = (None, *names)
    before = [tokens(server, model) for model in models]
    for salt in range(4):
        others = [(7 * at + salt) % 100 + 3 for at in range(190)]
        server.ask("/generate", {"input_ids": others, "sampling_params": {"max_new_tokens": 2}})
    server.wait_for_metric("forebay:copies_outstanding", lambda value: value == 0)
    assert [tokens(server, model) for model in models] == before
    assert server.metric("forebay:restores_total") == len(models)
    assert server.metric("forebay:copies_failed_total") == 0


def test_a_dead_hand_comes_back_with_its_adapters(serve: Serve, tiny: Model, folder: Path) -> None:
    server = serve(tiny, "--lora-modules", f"tone={folder / 'tone'}")
    before = tokens(server, "tone")
    server.kill_hands()
    assert tokens(server, "tone") == before


def test_ranks_divide_adapters(serve: Serve, tiny: Model, folder: Path) -> None:
    modules = (f"tone={folder / 'tone'}", f"other={folder / 'other'}")
    # There is room for one adapter, so all ranks load an adapter again at each change.
    server = serve(tiny, "--lora-modules", *modules, "--max-loras", "1", "--tp-size", "2", "--dtype", "float32")
    answers: dict[str | None, list[int]] = {None: greedy(tiny.reference)}
    answers |= {name: greedy(merged(tiny, folder / name)) for name in ("tone", "other")}
    for _ in range(2):
        for model, answer in answers.items():
            assert tokens(server, model) == answer, model
        ranks = server.hands()
        os.kill(ranks[1], signal.SIGKILL)
        eventually(lambda before=ranks: not set(before) & set(server.hands()), "all ranks are new processes")  # type: ignore[misc]
        server.wait_for_health()
    with ThreadPoolExecutor(6) as pool:
        wanted = [*answers, *answers]
        assert list(pool.map(lambda name: tokens(server, name), wanted)) == [answers[name] for name in wanted]


def test_adapters_come_and_go_at_run_time(serve: Serve, tiny: Model, folder: Path, tmp_path: Path) -> None:
    config = json.loads(Path(tiny.path, "config.json").read_text())
    make(config, tmp_path / "root/one", seed=3, strength=0.1)
    (tmp_path / "root/link").symlink_to(folder / "tone")
    places = ("--max-loras", "1", "--max-cpu-loras", "0")
    server = serve(tiny, "--enable-lora", "--lora-root", str(tmp_path / "root"), "--admin-api-key", "admin", *places)

    def load(name: str, path: str, **headers: str) -> tuple[int, str]:
        answer = server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, headers=headers)
        return answer.status_code, answer.text

    assert load("one", "one")[0] == 401
    assert load("one", "one", **ADMIN)[0] == 200
    assert tokens(server, "one") == greedy(merged(tiny, tmp_path / "root/one"))
    for path in ("../adapters", "link", str(folder / "tone"), "/etc", "nowhere"):
        status, text = load("two", path, **ADMIN)
        assert (status, json.loads(text)["error"]["param"]) == (400, "lora_path"), path
    make(config, tmp_path / "root/two", seed=4, strength=0.1)
    assert load("two", str(tmp_path / "root/two"), **ADMIN)[0] == 200
    assert tokens(server, "two") == greedy(merged(tiny, tmp_path / "root/two"))
    # The only place now has adapter `two`, and the files of `one` change.
    make(config, tmp_path / "root/one", seed=5, strength=0.1)
    body = {"model": "one", "prompt": PROMPT, "max_tokens": 2}
    changed = server.post("/v1/completions", body)
    assert (changed.status_code, changed.json()["error"]["code"]) == (503, "adapter_unavailable")
    again = {"lora_name": "one", "lora_path": "one", "load_inplace": True}
    assert server.post("/v1/load_lora_adapter", again, headers=ADMIN).status_code == 200
    assert tokens(server, "one") == greedy(merged(tiny, tmp_path / "root/one"))
    listed = server.post("/unload_lora_adapter", {"lora_name": "one"}, headers=ADMIN).json()
    assert listed["loaded_adapters"] == {"two": str(tmp_path / "root/two")}
    assert server.post("/v1/completions", body).status_code == 404
    assert tokens(server, None) == greedy(tiny.reference)
    assert server.metric("forebay:lora_places_used") + server.metric("forebay:lora_places_unused") <= 1


def test_more_adapters_than_places_take_turns(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    config = json.loads(Path(tiny.path, "config.json").read_text())
    names = [f"a{at}" for at in range(6)]
    for at, name in enumerate(names):
        make(config, tmp_path / "adapters" / name, rank=4, seed=10 + at, strength=0.1)
    modules = (f"{name}={tmp_path / 'adapters' / name}" for name in names)
    places = ("--max-loras", "2", "--max-cpu-loras", "1")
    server = serve(tiny, "--lora-modules", *modules, *places)
    expected = {name: greedy(merged(tiny, tmp_path / "adapters" / name)) for name in names}
    assert len({tuple(answer) for answer in expected.values()}) > 1
    wanted = [*names, *reversed(names), *names]
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = list(pool.map(lambda name: tokens(server, name), wanted))
    assert answers == [expected[name] for name in wanted]
    assert server.metric("forebay:lora_places_used") + server.metric("forebay:lora_places_unused") == 2
    info = next(line for line in server.http.get("/metrics").text.splitlines() if "lora_requests_info{" in line)
    assert 'max_lora="2",running_lora_adapters="",waiting_lora_adapters=""' in info


def test_drafts_change_no_answer_of_an_adapter(serve: Serve, tiny: Model, folder: Path) -> None:
    modules = ("--lora-modules", f"tone={folder / 'tone'}")
    bodies = [{**body, **({"lora_path": "tone"} if at % 4 else {})} for at, body in enumerate(asked(tiny))]
    plain, drafting = serve(tiny, *modules), serve(tiny, *modules, *ALWAYS)
    assert told(native_together(drafting, bodies)) == told(native_together(plain, bodies))
    assert accepted(drafting) > 0


def test_a_router_knows_who_has_an_adapter(serve: Serve, tiny: Model, folder: Path, tmp_path: Path) -> None:
    config = json.loads(Path(tiny.path, "config.json").read_text())
    make(config, tmp_path / "adapters/late", seed=7, strength=0.1)
    first = serve(tiny, "--lora-modules", f"tone={folder / 'tone'}", f"same={folder / 'tone'}")
    root = ("--lora-root", str(tmp_path / "adapters"))
    second = serve(tiny, "--lora-modules", f"same={folder / 'other'}", *root)
    backends = f"{first.url},{second.url}"
    router = Server("--backends", backends, "--policy", "round_robin", command="route", log=tmp_path / "route.log")
    try:
        router.wait_for_health()

        def found(path: str) -> Any:
            return router.http.get(path).json()

        eventually(lambda: found("/health")["backends"] == 2, "the router has recognized both backends")
        expected = greedy(merged(tiny, folder / "tone"))
        assert [tokens(router, "tone") for _ in range(4)] == [expected] * 4
        body = {"lora_name": "late", "lora_path": "late"}
        assert second.post("/v1/load_lora_adapter", body).status_code == 200
        late = greedy(merged(tiny, tmp_path / "adapters/late"))
        assert [tokens(router, "late") for _ in range(4)] == [late] * 4
        adapters = [card["id"] for card in found("/v1/models")["data"] if "parent" in card]
        assert adapters == ["same", "tone", "late"]
        assert found("/health")["warning"] == f"same is another adapter at {second.url} than at {first.url}"
        assert router.post("/v1/completions", {"model": "nobody", "prompt": PROMPT}).status_code == 404
    finally:
        router.kill()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--lora-modules", "x=/nowhere"), "can't be read"),
        (("--lora-modules", "x"), "expected NAME=PATH"),
        (("--enable-lora", "--tp-size", "2", "--ep-size", "2"), "adapters are not served with --ep-size"),
        (("--enable-lora", "--device", "sim"), "adapters are not served with a simulated device"),
    ],
)
def test_what_there_is_not_is_refused_at_the_start(
    serve: Serve, tiny: Model, flags: tuple[str, ...], reason: str
) -> None:
    server = serve(tiny, *flags, healthy=False)
    assert server.process.wait(60) == 1
    assert reason in server.log()


@pytest.mark.parametrize("hand", ["rust", pytest.param("torch", marks=pytest.mark.slow)])
def test_requests_with_adapters_are_handed_on(serve: Serve, tiny: Model, folder: Path, hand: str) -> None:
    modules = ("--lora-modules", f"tone={folder / 'tone'}", f"other={folder / 'other'}")
    flags = ("--enable-lora", "--max-loras", "1", *modules, "--hand", hand, "--page-size", "4")
    wanted = {
        None: greedy(tiny.reference),
        "tone": greedy(merged(tiny, folder / "tone")),
        "other": greedy(merged(tiny, folder / "other")),
    }
    apart = ("--pd", "1:1", "--pd-local-tokens", "0", "--max-total-tokens", "3000", "--threads", "1")
    server = serve(tiny, *flags, *apart, "--debug-kv-checksum")
    models = [None, "tone", "other"] * 8
    with ThreadPoolExecutor(len(models)) as pool:
        answers = list(pool.map(lambda model: tokens(server, model), models))
    assert answers == [wanted[model] for model in models]
    assert server.metric("forebay:pd_handed_total") == len(models)
    server.wait_until_idle()
    server.wait_for_metric("forebay:lent_pages", lambda value: value == 0)
