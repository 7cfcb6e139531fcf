"""A prefill server and a decode server give the tokens of one server, also after kills, aborts and refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import async_client, native_stream, native_together
from tests.e2e.conftest import FLAGS, Models, Serve, server_factory
from tests.e2e.models import Model
from tests.e2e.server import BINARY, Server
from tests.e2e.test_breakage import Expected, requests, undisturbed
from tests.e2e.waiting import eventually

KEY = "a-key-of-routers"
PAGE = 4
SMALL = ("--page-size", str(PAGE), "--debug-kv-checksum", "--max-total-tokens", "8000", "--threads", "1")
FETCHES = "forebay:pd_fetches_total"
RECEIVED = "forebay:pd_received_blocks_total"
SENT = "forebay:pd_sent_blocks_total"
HEALTH = ("--health-check-interval-secs", "0.1", "--log-level", "warn")


def secret(folder: Path, letter: str = "a") -> tuple[str, str]:
    """Writes a secret to a file; returns the flag that names the file."""
    file = folder / f"secret-{letter}"
    file.write_text(letter * 64)
    file.chmod(0o600)
    return "--cache-secret-file", str(file)


@dataclass
class Pairing:
    """A prefill server and a decode server, and the router in front of them."""

    prefill: Server
    decode: Server
    router: Server

    def fetched(self, outcome: str) -> float:
        """The decode server's fetches with this outcome."""
        return self.decode.metric(FETCHES, outcome=outcome)

    def at_rest(self) -> None:
        """Checks that the idle servers lend, hold and copy no page."""
        for server in (self.prefill, self.decode):
            if server.process.poll() is None:
                at_rest(server)


def at_rest(server: Server) -> None:
    server.wait_until_idle()
    for name in ("forebay:lent_pages", "forebay:copies_outstanding"):
        server.wait_for_metric(name, lambda value: value == 0)
    eventually(lambda: all(one["pages_held"] == 0 for one in server.replicas()), "the pages are free")


class Start:
    """Starts servers and routers, which are killed when the test ends."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.serve = server_factory(folder / "logs", stack)
        (folder / "logs").mkdir()

    def server(self, mode: str, model: Model, *flags: str) -> Server:
        common = ("--disaggregation-mode", mode, "--router-key", KEY, *secret(self.folder))
        local = ("--pd-local-tokens", "0") if mode == "decode" else ()
        return self.serve(model, *common, *local, *flags)

    def route(self, prefill: str, decode: str, *flags: str) -> Server:
        arguments = ("--prefill", prefill, "--decode", decode, "--router-key", KEY, *HEALTH, *flags)
        router = Server(*arguments, log=self.folder / "router.log", command="route")
        self.stack.callback(router.kill)
        router.wait_for_health()
        return router

    def pairing(self, model: Model, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()) -> Pairing:
        first = self.server("prefill", model, *SMALL, *prefill)
        second = self.server("decode", model, *SMALL, *decode)
        return Pairing(first, second, self.route(first.url, second.url))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        yield Start(tmp_path, stack)


@pytest.fixture(scope="module")
def expected(serve_for_module: Serve, tiny: Model) -> Expected:
    """Requests with the tokens that one server gives them."""
    server = serve_for_module(tiny)
    found = undisturbed(server, requests(tiny, 32))
    server.kill()
    return found


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("hand", ["rust", "torch"])
def test_tokens_are_those_of_one_server(start: Start, tiny: Model, expected: Expected, hand: str) -> None:
    pairing = start.pairing(tiny, ("--hand", hand), ("--hand", hand))
    asked = [request for request, _ in expected]
    assert tokens(native_together(pairing.router, asked)) == [wanted for _, wanted in expected]
    # The shortest prompts fill no page, and some prompts begin with blocks of earlier ones.
    pages = [(len(request["input_ids"]) - 1) // PAGE for request in asked]
    full = [count for count in pages if count > 0]
    assert pairing.fetched("came") == len(full) > 25
    blocks = pairing.decode.metric(RECEIVED)
    assert pairing.prefill.metric("forebay:pd_prefills_total") == len(full)
    assert pairing.prefill.metric(SENT) == blocks
    assert len(full) < blocks <= sum(full)
    sent = pairing.prefill.metric("forebay:pd_sent_bytes_total")
    # Each block has a frame header of 24 bytes, and each answer an end frame.
    assert pairing.decode.metric("forebay:pd_received_bytes_total") >= sent + 24 * (blocks + len(full))
    # The prefill server generates one token a prompt, and the decode server computes positions that fill no page.
    (prefill,), (decode,) = pairing.prefill.replicas(), pairing.decode.replicas()
    assert prefill["generated_tokens"] <= len(expected)
    assert decode["prompt_tokens"] <= PAGE * len(expected)
    assert pairing.decode.metric("forebay:copies_failed_total") == 0
    pairing.at_rest()
    info = pairing.decode.http.get("/server_info").json()["config"]
    assert (info["disaggregation_mode"], info["pd_local_tokens"]) == ("decode", 0)


def test_what_is_cached_or_short_is_not_asked_for(start: Start, tiny: Model) -> None:
    pairing = start.pairing(tiny, decode=("--pd-local-tokens", "100"))
    body = {"model": tiny.name, "max_tokens": 5, "temperature": 0}

    def ask(prompt: list[int]) -> None:
        pairing.router.ask("/v1/completions", {**body, "prompt": prompt})

    ask(list(range(3, 93)))
    assert (pairing.fetched("short"), pairing.fetched("came")) == (1, 0)
    ask(list(range(3, 243)))
    assert (pairing.fetched("short"), pairing.fetched("came")) == (1, 1)
    # The decode server computed the first 90 tokens itself, so their full pages are not fetched.
    assert pairing.decode.metric(RECEIVED) == 239 // PAGE - 90 // PAGE
    ask(list(range(3, 250)))
    assert (pairing.fetched("short"), pairing.fetched("came")) == (2, 1)
    # A prompt with log-probabilities is computed by the decode server alone.
    pairing.router.ask("/v1/completions", {**body, "prompt": list(range(3, 200))[::-1], "prompt_logprobs": 1})
    assert pairing.fetched("kind") == 1
    pairing.at_rest()


def test_routes_of_every_dialect_are_served(start: Start, tiny: Model) -> None:
    pairing = start.pairing(tiny)
    said = [{"role": "user", "content": "The work and its licence " * 8}]
    alone = pairing.prefill.ask(
        "/v1/messages", {"model": tiny.name, "messages": said, "max_tokens": 8, "temperature": 0}
    )
    paired = pairing.router.ask(
        "/v1/messages", {"model": tiny.name, "messages": said, "max_tokens": 8, "temperature": 0}
    )
    assert paired["content"] == alone["content"]
    assert pairing.fetched("came") == 1
    counted = pairing.router.ask("/v1/messages/count_tokens", {"model": tiny.name, "messages": said})
    assert counted["input_tokens"] == alone["usage"]["input_tokens"]


def test_a_prefill_server_killed_in_the_middle_costs_time_alone(start: Start, tiny: Model, expected: Expected) -> None:
    # Saving a page takes so long that the prefill server dies after sending only some blocks.
    pairing = start.pairing(tiny, prefill=("--debug-kv-copy-gbps", "0.00004"))
    request, wanted = max(expected, key=lambda one: len(one[0]["input_ids"]))
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(pairing.router.ask, "/generate", request)
        pairing.prefill.wait_for_metric(SENT, lambda sent: sent >= 1)
        pairing.prefill.kill()
        assert answer.result()["output_ids"] == wanted
    assert pairing.fetched("broken") == 1
    assert pairing.decode.metric(RECEIVED) < (len(request["input_ids"]) - 1) // PAGE
    asked = [request for request, _ in expected[:8]]
    assert tokens(native_together(pairing.router, asked)) == [wanted for _, wanted in expected[:8]]
    pairing.at_rest()


def test_a_prefill_hand_that_dies_costs_time_alone(start: Start, tiny: Model, expected: Expected) -> None:
    pairing = start.pairing(tiny, prefill=("--debug-kv-copy-gbps", "0.0004"))
    asked = [request for request, _ in expected]
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(native_together, pairing.router, asked)
        pairing.prefill.wait_for_metric(SENT, lambda sent: sent >= 3)
        hand = pairing.prefill.hand()
        assert hand
        os.kill(hand, signal.SIGKILL)
        assert tokens(answers.result()) == [wanted for _, wanted in expected]
    pairing.prefill.wait_for_metric("forebay:hand_deaths_total", lambda deaths: deaths == 1)
    pairing.at_rest()


def test_a_decode_hand_that_dies_loses_nothing(start: Start, tiny: Model, expected: Expected) -> None:
    pairing = start.pairing(tiny, decode=("--debug-kv-copy-gbps", "0.002"))
    asked = [request for request, _ in expected]
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(native_together, pairing.router, asked)
        pairing.decode.wait_for_metric(RECEIVED, lambda received: received >= 20)
        hand = pairing.decode.hand()
        assert hand
        os.kill(hand, signal.SIGKILL)
        assert tokens(answers.result()) == [wanted for _, wanted in expected]
    assert pairing.decode.metric("forebay:hand_deaths_total") == 1
    pairing.at_rest()


def test_clients_that_leave_take_nothing_along(start: Start, tiny: Model, expected: Expected) -> None:
    pairing = start.pairing(tiny, prefill=("--debug-kv-copy-gbps", "0.0004"))

    async def leave(request: dict[str, Any]) -> None:
        async with async_client(pairing.router) as client:
            task = asyncio.create_task(native_stream(client, request))
            await asyncio.sleep(0)
            done, _ = await asyncio.wait([task], timeout=0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not done or task.exception() is None

    async def all_leave() -> None:
        await asyncio.gather(*(leave(request) for request, _ in expected))

    asyncio.run(all_leave())
    pairing.at_rest()
    asked = [request for request, _ in expected[:4]]
    assert tokens(native_together(pairing.router, asked)) == [wanted for _, wanted in expected[:4]]
    pairing.at_rest()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--page-size", "8"), "8 positions"),
        (("--dtype", "bfloat16"), "bfloat16"),
        (("--hand", "torch"), "torch"),
    ],
)
def test_other_pages_are_refused_in_a_sentence(
    start: Start, tiny: Model, expected: Expected, flags: tuple[str, ...], says: str
) -> None:
    pairing = start.pairing(tiny, prefill=flags)
    asked = [request for request, _ in expected[:4]]
    assert tokens(native_together(pairing.router, asked)) == [wanted for _, wanted in expected[:4]]
    assert pairing.fetched("refused") == 4
    told = [line for line in pairing.decode.log().splitlines() if "prefill server" in line]
    assert len(told) == 1, "the same sentence is logged only once"
    assert says in told[0]
    assert "layouts of pages differ" in told[0]
    pairing.at_rest()


def test_names_of_another_secret_are_refused(start: Start, tiny: Model, expected: Expected) -> None:
    prefill = start.serve(
        tiny, "--disaggregation-mode", "prefill", "--router-key", KEY, *secret(start.folder, "b"), *SMALL
    )
    decode = start.server("decode", tiny, *SMALL, "--pd-prefill-servers", prefill.url)
    request, wanted = expected[0]
    assert decode.ask("/generate", request)["output_ids"] == wanted
    assert decode.metric(FETCHES, outcome="refused") == 1
    assert "--cache-secret-file" in decode.log()


def test_a_decode_server_asks_its_own_prefill_servers_and_none_that_a_client_names(
    start: Start, tiny: Model, expected: Expected
) -> None:
    common = secret(start.folder)
    prefill = start.serve(tiny, "--disaggregation-mode", "prefill", *common, *SMALL)
    own = ("--pd-prefill-servers", prefill.url, "--pd-local-tokens", "0")
    decode = start.serve(tiny, "--disaggregation-mode", "decode", *common, *own, *SMALL)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        named = {"x-forebay-prefill": f"http://127.0.0.1:{listener.getsockname()[1]}"}
        router = {"x-forebay-router": "router=1;seq=1;floor=1;seed=1;blocks=0"}
        for headers in (named, {**named, **router}):
            request, wanted = expected[len(headers)]
            assert decode.ask("/generate", request, headers=headers)["output_ids"] == wanted
        with pytest.raises(TimeoutError):
            listener.accept()
    assert decode.metric(FETCHES, outcome="came") == 2
    assert prefill.metric("forebay:pd_prefills_total") == 2
    at_rest(prefill)


def test_blocks_are_for_servers_with_the_key(start: Start, tiny: Model) -> None:
    prefill = start.server("prefill", tiny, *SMALL)
    question = {"layout": "", "names": 0, "salt": 0, "prompt": [1, 2]}
    assert prefill.post("/pd/prefill", question).status_code == 403
    keyed = {"x-forebay-router-key": KEY}
    refused = prefill.post("/pd/prefill", question, headers=keyed)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "layout")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ((), "--cache-secret-file has to be the same for all of its servers"),
        (("secret",), "a decode server needs prefill servers that it may ask"),
        (("secret", "--router-key", KEY, "--tp-size", "2"), "--tp-size above 1 is not supported yet"),
        (("secret", "--router-key", KEY, "--pd", "1:1"), "cannot be used with"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_a_sentence(
    models: Models, tmp_path: Path, flags: tuple[str, ...], why: str
) -> None:
    given = [word for flag in flags for word in (secret(tmp_path) if flag == "secret" else (flag,))]
    mode = ("--disaggregation-mode", "decode")
    command = [BINARY, "serve", models("llama").path, *FLAGS, *mode, *given, "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert why in ended.stderr


def test_servers_with_another_mode_are_in_no_pair(serve: Serve, tiny: Model) -> None:
    server = serve(tiny)
    command = [str(BINARY), "route", "--pd-disaggregation", "--prefill", server.url, "--decode", "127.0.0.1:1"]
    ended = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"{server.url}, which is Forebay with --disaggregation-mode null: start it with" in ended.stderr


def test_states_come_with_the_blocks(start: Start, models: Models) -> None:
    model = models("qwen3.5")
    text = model.encode((Path(__file__).parents[2] / "LICENSE").read_text())
    flags = ("--page-size", "16", "--debug-kv-checksum", "--max-total-tokens", "4000", "--threads", "1")
    prefill, decode = start.server("prefill", model, *flags), start.server("decode", model, *flags)
    router = start.route(prefill.url, decode.url)
    pairing = Pairing(prefill, decode, router)
    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    for at, length in enumerate((200, 177, 17)):
        asked = {"input_ids": text[50 * at :][:length], "sampling_params": sampling}
        alone = prefill.ask("/generate", {**asked, "cache_salt": "alone"})
        answer = router.ask("/generate", asked)
        assert answer["output_ids"] == alone["output_ids"]
        assert answer["meta_info"]["cached_tokens"] == (length - 1) // 16 * 16
    assert pairing.fetched("came") == 3
    assert decode.metric("forebay:copies_failed_total") == 0
    pairing.at_rest()
