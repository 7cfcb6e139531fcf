"""A host tier below the device's pages: the same tokens, whatever is copied, dropped, killed or refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import async_client, native_stream, native_together
from tests.e2e.conftest import FLAGS, Serve
from tests.e2e.models import Model
from tests.e2e.server import BINARY, Server
from tests.e2e.test_breakage import Expected, Load, kill_under_load, requests, undisturbed
from tests.e2e.waiting import eventually

KILLS = 4
TIER = ("--enable-hierarchical-cache", "--debug-kv-checksum", "--hicache-ratio", "8")
SMALL = ("--max-total-tokens", "400")
RESTORED = "forebay:restores_total"


@pytest.fixture(scope="module")
def expected(serve_for_module: Serve, tiny: Model) -> Expected:
    """Requests with the tokens that a server without a host tier gives them."""
    server = serve_for_module(tiny)
    found = undisturbed(server, requests(tiny, 24))
    server.kill()
    return found


def balanced(server: Server) -> None:
    """Checks that the idle server has lost no page and has no copy in progress."""
    server.wait_until_idle()
    server.wait_for_metric("forebay:copies_outstanding", lambda value: value == 0)
    state = server.replicas()[0]
    assert state["pages_held"] == 0
    assert server.metric("forebay:copies_failed_total") == 0


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--lookahead", "0", "--page-size", "4"),
        pytest.param(("--hicache-write-policy", "write_through_selective"), marks=pytest.mark.slow),
        ("--hicache-write-policy", "write_back", "--page-size", "4"),
        pytest.param(("--device", "deferred"), marks=pytest.mark.slow),
        ("--device", "deferred", "--lookahead", "0", "--hicache-write-policy", "write_back"),
        pytest.param(
            ("--hicache-ratio", "0.5", "--hicache-prefetch-requests", "0", "--kv-copy-pages-per-step", "1"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("--preemption", "recompute"), marks=pytest.mark.slow),
        ("--hand", "torch", "--page-size", "4"),
    ],
    ids=" ".join,
)
def test_tokens_do_not_depend_on_the_tier(
    serve: Serve, tiny: Model, expected: Expected, flags: tuple[str, ...]
) -> None:
    # A repeated flag is an error.
    tier = TIER[:2] if "--hicache-ratio" in flags else TIER
    server = serve(tiny, *SMALL, *tier, *flags)
    for _ in range(2):
        answers = native_together(server, [request for request, _ in expected], held=True)
        assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected]
    for request, tokens in expected[:12]:
        assert native_together(server, [request])[0]["output_ids"] == tokens
    assert server.metric("vllm:num_preemptions_total") > 0
    metrics = server.metrics()
    saved = metrics.value("vllm:kv_offload_total_bytes_total", transfer_type="GPU_to_CPU")
    back = metrics.value("vllm:kv_offload_total_bytes_total", transfer_type="CPU_to_GPU")
    assert saved > 0
    assert back > 0
    assert metrics.value(RESTORED) > 0
    if tier == TIER:
        # A host tier half as large as the device's memory drops every prompt before it comes again.
        assert metrics.value("vllm:external_prefix_cache_hits_total") > 0
    balanced(server)


def test_a_second_turn_is_restored_and_told(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, *SMALL, *TIER)
    prompt = tiny.encode(Path("LICENSE").read_text())[:200]
    body = {
        "model": server.http.get("/v1/models").json()["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
    }
    first = server.ask("/v1/completions", body)
    others = [[(7 * at + salt) % 100 + 3 for at in range(190)] for salt in range(4)]
    for other in others:
        server.ask("/v1/completions", {**body, "prompt": other})
    assert server.metric(RESTORED) == 0
    second = server.ask("/v1/completions", body)
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    # 200 tokens fill 12 pages of 16 tokens, and half a page.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert server.metric(RESTORED) == 1
    assert server.http.post("/flush_cache").status_code == 200
    assert server.metric("sglang:hicache_host_used_tokens") == 0
    assert server.ask("/v1/completions", body)["choices"][0]["text"] == first["choices"][0]["text"]
    assert server.metric(RESTORED) == 1, "a flush reaches every tier"
    balanced(server)


@pytest.mark.parametrize(
    "flags",
    [
        ("--hand", "rust"),
        pytest.param(("--hand", "torch"), marks=pytest.mark.slow),
        pytest.param(("--device", "deferred"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_deaths_of_the_hand_under_load(serve: Serve, tiny: Model, expected: Expected, flags: tuple[str, ...]) -> None:
    # Slow copies: at each death of the hand some copies are in progress.
    slow = ("--debug-kv-copy-gbps", "0.05")
    server = serve(tiny, "--max-total-tokens", "3000", *TIER, *slow, *flags)
    load = Load(server, tiny, expected)
    killed = asyncio.run(kill_under_load(server, load, KILLS))
    assert len(killed) == KILLS
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0
    assert server.metric(RESTORED) > 0
    server.wait_for_health()
    again = native_together(server, [request for request, _ in expected])
    assert [answer["output_ids"] for answer in again] == [tokens for _, tokens in expected]
    balanced(server)


async def killed_at(server: Server, request: dict[str, Any], count: int) -> list[int]:
    """The tokens of a stream whose hand is killed after `count` tokens."""
    killed: list[int] = []

    def progress(got: int) -> None:
        if got >= count and not killed:
            hand = server.hand()
            assert hand
            killed.append(hand)
            os.kill(hand, signal.SIGKILL)

    async with async_client(server) as client:
        answer = await native_stream(client, request, progress)
    assert killed
    tokens: list[int] = answer["output_ids"]
    return tokens


def test_a_death_with_a_warm_tier_costs_hardly_any_prefill(serve: Serve, tiny: Model) -> None:
    prompt = tiny.encode(Path("LICENSE").read_text())[:1500]
    params = {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}
    told, lost = [], []
    for tier in ((), TIER):
        server = serve(tiny, "--max-total-tokens", "4000", *tier)
        told.append(asyncio.run(killed_at(server, {"input_ids": prompt, "sampling_params": params}, 100)))
        server.wait_until_idle()
        lost.append(server.metric("forebay:recomputed_tokens_total"))
        server.kill()
    assert told[0] == told[1]
    assert lost[0] > len(prompt)
    # The last blocks before the death may not be saved yet.
    assert lost[1] < lost[0] / 10


@pytest.mark.parametrize("hand", ["rust", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_copy_that_fails_costs_time_only(serve: Serve, tiny: Model, hand: str) -> None:
    server = serve(tiny, *SMALL, *TIER, "--hand", hand)
    prompt = tiny.encode(Path("LICENSE").read_text())[:200]
    body = {"model": tiny.name, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    first = server.ask("/v1/completions", body)
    for salt in range(4):
        server.ask("/v1/completions", {**body, "prompt": [(7 * at + salt) % 100 + 3 for at in range(190)]})
    server.wait_for_metric("forebay:copies_outstanding", lambda value: value == 0)
    # Overwrite all of the host tier's memory.
    memory = os.open(f"/proc/{server.hand()}/fd/5", os.O_RDWR)
    os.pwrite(memory, b"\x5c" * os.fstat(memory).st_size, 0)
    os.close(memory)
    second = server.ask("/v1/completions", body)
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert server.metric("forebay:copies_failed_total") > 0
    assert server.metric("forebay:hand_deaths_total") == 0
    server.wait_until_idle()
    assert server.replicas()[0]["pages_held"] == 0


def test_the_rust_hand_has_the_tier_without_python(serve: Serve, tiny: Model, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho started >> {tmp_path}/starts\nexit 1\n")
    python.chmod(0o755)
    server = serve(tiny, *TIER, "--python", str(python))
    info = server.http.get("/server_info").json()
    assert (info["config"]["hand"], info["config"]["hand_reason"]) == ("rust", None)
    assert info["facts"]["host_page_count"] == 8 * info["facts"]["page_count"]
    assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 3})["usage"]["completion_tokens"] == 3
    assert not (tmp_path / "starts").exists()


def test_overload_computes_less_than_a_page_again_a_preemption(serve: Serve, tiny: Model, expected: Expected) -> None:
    server = serve(tiny, *SMALL, *TIER)
    native_together(server, [request for request, _ in expected], held=True)
    preemptions = server.metric("vllm:num_preemptions_total")
    assert preemptions > 0
    assert server.metric("forebay:recomputed_tokens_total") < 16 * preemptions


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--hicache-size", "1"), "--hicache-size is for a host tier: add --enable-hierarchical-cache"),
        ((*TIER, "--hicache-size", "1"), "cannot be used with"),
        ((*TIER, "--hicache-io-backend", "kernel"), "--hicache-io-backend"),
        (("--enable-hicache", "--hicache-size", "100000"), "a host tier of 100000.0 GB does not fit"),
        (("--enable-hicache", "--hicache-size", "0"), "expected a number above 0"),
        (("--enable-hicache", "--hicache-write-policy", "sometimes"), "write_through_selective"),
        (("--kv-offloading-size", "1", "--hicache-ratio", "2"), "cannot be used with"),
        (("--kv-offloading-size", "1", "--disable-radix-cache"), "--disable-radix-cache"),
        (("--enable-hicache", "--kv-offloading-backend", "lmcache", "--kv-offloading-size", "1"), "native"),
        (("--enable-hicache", "--debug-kv-checksum", "--device", "sim"), "profiles say"),
        (("--enable-hicache", "--hicache-size", "1", "--device", "sim"), "--hicache-ratio"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_one_clear_line(tiny: Model, flags: tuple[str, ...], words: str) -> None:
    ended = subprocess.run(
        [BINARY, "serve", tiny.path, *FLAGS, "--port", "0", *flags], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode != 0
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_simulated_device_has_a_tier_too(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim", "--sim-profile", "cpu1-smollm2-135m", *SMALL, *TIER[:1], *TIER[2:])
    for _ in range(2):
        for salt in range(4):
            prompt = [(7 * at + salt) % 100 + 3 for at in range(190)]
            server.ask("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}})
    assert server.metric("vllm:external_prefix_cache_hits_total") > 0
    eventually(lambda: server.metric("forebay:copies_outstanding") == 0, "all copies are done")
