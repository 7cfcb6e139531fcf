"""Replicas that share experts: the tokens of one rank, exact loads, and ranks that end together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e import lying_rank
from tests.e2e.client import Json, native_together
from tests.e2e.conftest import Models, Serve
from tests.e2e.models import Model
from tests.e2e.processes import alive
from tests.e2e.test_apart import interface
from tests.e2e.test_breakage import STREAMS, Load, requests, undisturbed
from tests.e2e.test_outpost_payloads import disturbed, streams
from tests.e2e.test_outposts import Gate
from tests.e2e.test_prompt_embeds import embeddings
from tests.e2e.test_ranks import START_SECONDS, deaths, end_ranks, same_tokens
from tests.e2e.test_tiers import RESTORED, SMALL, TIER
from tests.e2e.waiting import eventually

FLAGS = ("--dp-size", "2", "--enable-dp-attention", "--dtype", "float32")


@pytest.fixture
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with ExitStack() as stack:
        yield Gate(tmp_path_factory.mktemp("gate"), stack)


def test_ranks_that_share_experts_give_the_tokens_of_one(serve: Serve, models: Models) -> None:
    model = models("qwen3-moe")
    # Each step has a chunk of a prompt, and more requests arrive than run at a time.
    limits = ("--chunked-prefill-size", "64", "--max-running-requests", "6")
    server = same_tokens(serve, model, *FLAGS[:3], *limits)
    assert len(server.hands()) == 2
    info = server.http.get("/server_info").json()["config"]
    assert (info["dp_size"], info["tp_size"], info["ep_size"], info["enable_dp_attention"]) == (2, 1, 2, True)
    assert all(replica["dispatched"] > 0 for replica in server.replicas())
    server.wait_until_idle()
    # One replica has a request, and the rank of the other takes part in its steps.
    for replica in (0, 1):
        body = {"prompt": "one alone", "max_tokens": 5, "routed_dp_rank": replica}
        assert server.ask("/v1/completions", body)["usage"]["completion_tokens"] == 5


def test_vllm_s_spelling_means_the_same(serve: Serve, models: Models) -> None:
    model = models("qwen3-moe")
    server = serve(model, "--data-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32")
    assert server.http.get("/server_info").json()["config"]["enable_dp_attention"]
    assert "2 ranks" in server.log()
    expected = undisturbed(server, requests(model, 4))
    answers = native_together(server, [request for request, _ in expected])
    assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected]


@pytest.mark.parametrize(
    ("numbers", "watchdog"),
    [
        pytest.param([signal.SIGKILL], 300, id="killed", marks=pytest.mark.slow),
        pytest.param([signal.SIGSTOP], 2, id="stopped"),
        pytest.param(lying_rank.CONTRADICTING, 300, id="lying deaths", marks=pytest.mark.slow),
    ],
)
def test_a_rank_s_end_is_that_of_all_and_nobody_notices(
    serve: Serve, models: Models, numbers: Sequence[int], watchdog: int, tmp_path: Path
) -> None:
    model = models("qwen3-moe")
    flags = [*FLAGS, "--watchdog-timeout", str(watchdog)]
    if numbers is lying_rank.CONTRADICTING:
        flags += ["--python", str(lying_rank.program(tmp_path))]
    server = serve(model, *flags)
    expected = undisturbed(server, requests(model, 32))
    load = Load(server, model, expected)
    # A long limit for busy machines; ranks usually end within a second.
    asyncio.run(end_ranks(server, load, numbers, 20.0, replicas=2))
    assert load.finished >= STREAMS
    assert server.metric("vllm:request_success_total", finished_reason="error") == 0
    server.wait_until_idle()
    pids = server.hands()
    server.kill()
    eventually(lambda: not any(map(alive, pids)), "no rank outlives the brain")


def test_each_rank_has_a_host_tier_that_outlives_it(serve: Serve, models: Models) -> None:
    model = models("qwen3-moe")
    server = same_tokens(serve, model, *FLAGS[:3], *SMALL, *TIER)
    expected = undisturbed(server, requests(model, 24))
    restored = 0.0
    for _ in range(2):
        answers = native_together(server, [request for request, _ in expected], held=True)
        assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in expected]
        assert server.metric(RESTORED) > restored
        restored = server.metric(RESTORED)
        server.wait_until_idle()
        # Each replica counts the death.
        died = deaths(server) + 2
        os.kill(server.hands()[1], signal.SIGKILL)
        server.wait_for_metric("forebay:hand_deaths_total", died.__eq__)
        server.wait_for_health()
    assert server.metric("vllm:num_preemptions_total") > 0
    server.wait_for_metric("forebay:copies_outstanding", lambda value: value == 0)
    assert server.metric("forebay:copies_failed_total") == 0
    assert all(replica["pages_held"] == 0 for replica in server.replicas())


def test_a_group_on_two_machines_reads_embeddings_and_outlives_one(serve: Serve, models: Models, gate: Gate) -> None:
    model = models("qwen3-moe")
    more: Json = {"max_tokens": 150, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    prompts = [[5 + (at * 7 + length) % 200 for at in range(length)] for length in (3, 40, 300, 301)]
    asked = [{"prompt_embeds": embeddings(model, prompt), **more} for prompt in prompts]
    asked += [{"prompt": prompt, **more} for prompt in prompts]
    alone = serve(model, "--device", "deferred")
    wanted = asyncio.run(streams(alone, "/v1/completions", asked))
    alone.kill()
    name, _ = interface()
    flags = ("--collective-interface", name, "--hand-restarts", "50", "--load-balance-method", "round_robin")
    server = serve(model, *gate.flags(), *FLAGS, *flags, healthy=False)
    workers = [gate.worker("--name", at, "--collective-interface", name) for at in ("first", "second")]
    server.wait_for_health()
    assert all(len(worker.hands()) == 1 for worker in workers)
    assert asyncio.run(streams(server, "/v1/completions", asked)) == wanted
    assert server.metric("forebay:hand_deaths_total") == 0

    # When one machine ends, both ranks end, and all payloads are sent to the new ranks.
    gate.worker("--name", "third", "--collective-interface", name)
    assert asyncio.run(disturbed(server, "/v1/completions", asked, workers[0].process.pid)) == wanted
    assert server.metric("forebay:hand_deaths_total") == len(workers)
    eventually(lambda: server.metric("forebay:arena_used_bytes") == 0, "all room of the arena is free")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (FLAGS, "no experts that ranks could share"),
        ((*FLAGS, "--enable-lora"), "adapters are not served with --enable-dp-attention"),
        ((*FLAGS, "--tp-size", "4"), "--tp-size 4"),
        ((*FLAGS, "--ep-size", "4"), "--ep-size 4"),
        ((*FLAGS, "--quantization", "w8a8_int8"), "computed by the Rust hand"),
        ((*FLAGS, "--is-embedding"), "for models that generate"),
        (("--enable-dp-attention",), "--dp-size says how many"),
    ],
)
def test_what_can_t_be_shared_is_said_at_start(serve: Serve, tiny: Model, flags: tuple[str, ...], told: str) -> None:
    server = serve(tiny, *flags, healthy=False)
    assert server.process.wait(START_SECONDS) != 0
    assert told in server.log()


def test_a_simulated_group(serve: Serve, tiny: Model) -> None:
    server = serve(tiny, "--device", "sim", "--dp-size", "8", "--enable-dp-attention")
    assert server.hands() == []
    answers = native_together(server, requests(tiny, 24))
    assert len(answers) == 24
    assert all(replica["dispatched"] > 0 for replica in server.replicas())
