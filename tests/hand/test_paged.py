"""Steps whose plans the device reads give the CPU's tokens: with and without padding and graphs, and two in flight."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from forebay.compute.graphs import Graphs, Size, decode_rows, mixed_sizes
from forebay.compute.paged import PagedSteps
from forebay.compute.sampler import Ask, Sampled, Sampler
from forebay.device import DeviceError, Work
from forebay.device.deferred import DeferredDevice
from forebay.device.recorded import LostMemoryError, Recording
from forebay.device.watch import HiddenWaitError
from forebay.gpu import reference
from forebay.gpu.choose import MAPPED, VARIABLE
from forebay.gpu.products import FUSED
from forebay.protocol.masks import INLINE, Masks
from forebay.runner.launched import Launched
from forebay.runner.runner import ModelRunner
from forebay.state.slots import PlanError
from tests.hand.greedy import model_of
from tests.hand.late_masks import PATTERN, Late, Step, check_late
from tests.hand.support import MiniBrain, PlanBuilder, Request, Sampling, random_model, runner_of
from tests.hand.torch_models import TORCH_NAMED

FAMILIES_OF_GRAPHS = ["llama", "qwen3", "qwen3-moe", "glm4-moe", "deepseek-v3", "deepseek-v32", "glm-dsa-shared"]
GRAPHS = pytest.mark.parametrize("graph_rows", [0, 6], ids=["eager", "graphs"])
SAMPLING = [
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=3),
    Sampling(temperature=1.1, min_p=0.05, seed=1 << 60),
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, seed=9),
    Sampling(logprobs=3),
    Sampling(temperature=0.9, top_p=0.8, seed=4, bias=((7, 2.0),), stop_ids=(5,), min_total=40),
]
COUNT = 8


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")


def requests(kept: int = 0, tokens: list[list[int]] | None = None) -> list[Request]:
    random = np.random.default_rng(3)
    prompts = [random.integers(0, 131, random.integers(1, 50)).tolist() for _ in range(9)]
    return [
        Request(prompt, COUNT, SAMPLING[number % len(SAMPLING)], 2 * number, tokens[number][:kept] if tokens else [])
        for number, prompt in enumerate(prompts)
    ]


@cache
def expected(family: str) -> list[list[int]]:
    found = requests()
    MiniBrain(runner_of(model_of(family))).serve(found, chunk=9)
    return [request.tokens for request in found]


def paged(family: str = "llama", graph_rows: int = 6, **changes: Any) -> ModelRunner:
    changes = {"max_running_requests": 6, "chunked_prefill_size": 64, **changes}
    runner = runner_of(
        model_of(family), device="deferred", attention_backend="triton", graph_rows=graph_rows, **changes
    )
    assert isinstance(runner._steps, PagedSteps)
    runner.warm_up()
    assert (runner._steps.graphs.count > 0) == (graph_rows > 0)
    return runner


@GRAPHS
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("family", FAMILIES_OF_GRAPHS)
def test_tokens_are_those_of_the_cpu(family: str, lookahead: int, graph_rows: int) -> None:
    found = requests()
    MiniBrain(paged(family, graph_rows), 1, lookahead).serve(found, chunk=9)
    assert [request.tokens for request in found] == expected(family)


@GRAPHS
@pytest.mark.parametrize(("chunk", "page_size"), [(1, 4), (16, 7), (1000, 16)])
def test_chunks_and_pages_do_not_change_tokens(chunk: int, page_size: int, graph_rows: int) -> None:
    # Whole prompts make steps that are larger than any graph, and larger than the memory that graphs share.
    found = requests()
    MiniBrain(paged("qwen3", graph_rows, page_size=page_size), chunk, 1).serve(found, chunk)
    assert [request.tokens for request in found] == expected("qwen3")


@GRAPHS
def test_a_step_may_have_more_decode_rows_than_tokens_of_prompts(graph_rows: int) -> None:
    """The chunk size bounds the tokens of prompts. Each running request adds one more token to a step."""
    prompts = [[3 * number + 1, 7] for number in range(8)]

    def served(runner: ModelRunner) -> list[list[int]]:
        found = [Request(prompt, COUNT, SAMPLING[number % 3]) for number, prompt in enumerate(prompts)]
        MiniBrain(runner, 1, 1).serve(found, chunk=1)
        return [request.tokens for request in found]

    runner = paged("llama", graph_rows and 8, max_running_requests=8, chunked_prefill_size=4)
    assert served(runner) == served(runner_of(model_of("llama"), max_running_requests=8))


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("works", [True, False])
def test_kernels_may_read_plans_in_the_hosts_memory(
    lookahead: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAPPED, "1")
    runner = paged()
    if not works:
        monkeypatch.setattr(reference, "move_words", lambda source, target: None)

    def found() -> list[list[int]]:
        requested = requests()
        MiniBrain(runner, 1, lookahead).serve(requested, chunk=9)
        return [request.tokens for request in requested]

    assert wrong(found) != works


def test_a_gate_that_is_part_of_a_product_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, called = reference.one_row_gated, list[int]()

    def noted(x: torch.Tensor, *more: Any) -> torch.Tensor:
        called.append(len(x))
        return twin(x, *more)

    def tokens(fused: str) -> list[int]:
        monkeypatch.setenv(FUSED, fused)
        request = Request([3, 1, 4], 6)
        MiniBrain(paged("llama", dtype="bfloat16")).serve([request])
        return request.tokens

    monkeypatch.setattr(reference, "one_row_gated", noted)
    expected_ones = tokens("0")
    assert called == []
    assert tokens("1") == expected_ones
    # Only graphs of one row use the operator.
    assert set(called) == {1}


class Noted(Sampler):
    """A sampler that computes by operators, outside of graphs, and counts its calls."""

    used = 0

    def sample(self, logits: torch.Tensor, ask: Ask) -> Sampled:
        self.used += 1
        return super().sample(logits, ask)


OF_SLOTS = [
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, seed=9),
    Sampling(presence_penalty=0.8, logprobs=0),
    Sampling(),
    Sampling(temperature=1.2, top_k=9, top_p=0.8, min_p=0.02, logprobs=20, seed=5),
    Sampling(repetition_penalty=0.6, logprobs=5),
]


@GRAPHS
@pytest.mark.parametrize("lookahead", [0, 1])
def test_penalties_and_log_probabilities_take_no_operator(lookahead: int, graph_rows: int) -> None:
    """The device keeps both by slot. After a preemption tokens are counted again, and other requests reuse slots."""

    def asked(runner: ModelRunner, tokens: list[list[int]]) -> list[Request]:
        random = np.random.default_rng(11)
        prompts = [random.integers(0, 131, random.integers(1, 40)).tolist() for _ in range(11)]
        found = [
            Request(prompt, 9, OF_SLOTS[at % len(OF_SLOTS)], 2 * at, tokens[at][: at % 4] if tokens else [])
            for at, prompt in enumerate(prompts)
        ]
        MiniBrain(runner, 3, lookahead if runner.device.beside_host else 0).serve(found, chunk=9)
        return found

    right = asked(runner_of(model_of("llama")), [])
    runner = paged("llama", graph_rows)
    runner._sampler.__class__ = Noted
    found = asked(runner, [request.tokens for request in right])
    assert runner._sampler.used == 0  # type: ignore[attr-defined]
    for request, other in zip(found, right, strict=True):
        assert request.tokens == other.tokens
        kept = len(request.tokens) - len(request.logprobs)
        for (ids, values), (known, exact) in zip(request.logprobs, other.logprobs[kept:], strict=True):
            assert ids.tolist() == known.tolist()
            np.testing.assert_allclose(values, exact, atol=1e-4)
    assert sum(len(values) for request in found for _, values in request.logprobs) > 100


def test_a_row_that_asks_for_more_is_sampled_by_operators() -> None:
    """Shows that the test above would notice the use of operators."""
    runner = paged("llama")
    runner._sampler.__class__ = Noted
    MiniBrain(runner).serve([Request([1, 2, 3], 4, Sampling(logprobs=1, bias=((7, 2.0),)))])
    assert runner._sampler.used == 4  # type: ignore[attr-defined]


TELL_LIKELY = reference.tell_likely
COUNTED_WRONGLY = {
    "a line of nobody": (PagedSteps, "_write_lines", lambda *_: None),
    "tokens that are not counted": (reference, "count_tokens", lambda *_: None),
    "log-probabilities of penalised logits": (
        reference,
        "tell_likely",
        lambda logits, *more: TELL_LIKELY(logits * 1.01, *more),
    ),
}


@pytest.mark.parametrize("mistake", COUNTED_WRONGLY)
def test_counts_and_log_probabilities_that_are_wrong_show(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*COUNTED_WRONGLY[mistake])
    with pytest.raises(AssertionError):
        test_penalties_and_log_probabilities_take_no_operator(0, 6)


def test_a_query_chooses_where_one_of_its_step_sees_more_than_is_kept() -> None:
    """A step runs one graph. So if one query needs the index, all queries of its step choose positions."""
    runner = paged("deepseek-v32")
    graphs, used = runner._steps.graphs, list[Size]()
    assert graphs is not None

    def noted(size: Size, model: Work) -> None:
        used.append(size)
        model()

    for size, model in list(graphs._models.items()):
        graphs._models[size] = partial(noted, size, model)
    plan = PlanBuilder(1)
    for slot, length in ((1, 8), (2, 9)):
        plan.slot(slot, list(range(length)))
        plan.page_writes += [(slot, index, 10 * slot + index) for index in range(4)]
    plan.row(1, 0, 7, sample=False)
    plan.row(2, 0, 7, sample=False)
    runner.step(plan.build())
    for rows in ([(1, 7)], [(1, 7), (2, 7)], [(1, 7), (2, 8)], [(2, 8)]):
        plan = PlanBuilder(1)
        for slot, start in rows:
            plan.row(slot, start, 1)
        runner.step(plan.build())
    assert [size.chooses for size in used] == [False, False, False, True, True]


def test_a_start_is_finished_behind_the_last_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    capture = DeferredDevice.capture

    def noted(device: DeferredDevice, work: Work) -> Work:
        calls.append("capture")
        return capture(device, work)

    monkeypatch.setattr(DeferredDevice, "capture", noted)
    monkeypatch.setattr(DeferredDevice, "finish_start", lambda device: calls.append("finish"))
    paged("llama")
    assert calls.count("capture") > 5
    assert calls.index("finish") == len(calls) - 1


@GRAPHS
@pytest.mark.parametrize("kept", [1, COUNT - 1])
def test_replay_and_preemption_go_on_where_they_stopped(kept: int, graph_rows: int) -> None:
    found = requests(kept, expected("llama"))
    MiniBrain(paged("llama", graph_rows), kept, 1).serve(found, chunk=9)
    assert [request.tokens for request in found] == expected("llama")


@GRAPHS
def test_a_prefix_in_shared_pages_is_not_computed_again(graph_rows: int) -> None:
    def tokens(runner: ModelRunner) -> list[int]:
        first = PlanBuilder(1)
        first.slot(0, list(range(8)))
        first.page_writes += [(0, 0, 40), (0, 1, 17)]
        first.row(0, 0, 8, sample=False)
        runner.step(first.build())
        second = PlanBuilder(2)
        for slot, tail in enumerate([[9, 100, 3], [77]], start=1):
            second.slot(slot, [*range(8), *tail])
            second.page_writes += [(slot, 0, 40), (slot, 1, 17), (slot, 2, 50 + slot)]
            second.row(slot, 8, len(tail))
        found: list[int] = runner.step(second.build()).tokens.tolist()
        return found

    assert tokens(paged("qwen3", graph_rows)) == tokens(runner_of(model_of("qwen3")))


@GRAPHS
def test_masks_come_between_the_model_and_the_sampler(graph_rows: int) -> None:
    allowed = [[3, 9, 70], [130], [1, 2]]

    def masks(step: int, rows: list[int]) -> Masks:
        words = np.zeros((len(rows), -(-131 // 32)), np.uint32)
        for line, row in zip(words, rows, strict=True):
            for token in allowed[row]:
                line[token // 32] |= np.uint32(1 << token % 32)
        return Masks(step, np.full(len(rows), INLINE, np.int32), words.view(np.int32).ravel())

    def tokens(runner: ModelRunner) -> list[list[int]]:
        found = []
        for step, masked in enumerate([[0, 1, 2], [0, 2], [], [1]]):
            plan = PlanBuilder(step)
            for slot in range(3) if step == 0 else ():
                plan.slot(slot, [5, 6 + slot, 7], SAMPLING[slot])
                plan.page_writes.append((slot, 0, 3 + slot))
                plan.page_writes.append((slot, 1, 13 + slot))
            for slot in range(3):
                start, length = (0, 3) if step == 0 else (2 + step, 1)
                plan.row(slot, start, length, masked=slot in masked)
            found.append(runner.step(plan.build(), partial(masks, step, masked)).tokens.tolist())
            assert all(found[-1][slot] in allowed[slot] for slot in masked)
        return found

    assert tokens(paged(graph_rows=graph_rows)) == tokens(runner_of(model_of("llama")))


@GRAPHS
@PATTERN
def test_a_row_whose_mask_is_not_ready_says_the_same_later(graph_rows: int, late: Late) -> None:
    def step_of() -> Step:
        runner = paged(graph_rows=graph_rows)
        return lambda plan, masks: runner.step(plan, lambda: masks)

    check_late(step_of, late)


# Wrong plans.


def served(runner: ModelRunner) -> PlanBuilder:
    """Gives a slot pages 3 and 4, and begins the next plan."""
    first = PlanBuilder(1)
    first.slot(1, [5, 6, 7, 8, 9])
    first.page_writes += [(1, 0, 3), (1, 1, 4)]
    first.row(1, 0, 5)
    runner.step(first.build())
    return PlanBuilder(2)


def state(runner: ModelRunner) -> list[torch.Tensor]:
    """The state that belongs to slots: all pages and tokens."""
    pages = runner.kv.page_count * runner.kv.page_size
    pools = [pool[:pages] for layer in runner.kv.layers for pool in layer]
    return [tensor.clone() for tensor in (*pools, runner.tables.token_pool)]


WRONG = {
    "a page that is none": ([(2, 0, 9999)], (2, 0, 3), "outside of the tables, a row that writes"),
    "a page that nobody wrote": ([], (2, 0, 3), "writes to a page that it does not have"),
    "a page that is missing below": ([(2, 1, 9)], (2, 4, 1), "reads a page that it does not have"),
}


@GRAPHS
@pytest.mark.parametrize(("writes", "row", "reason"), WRONG.values(), ids=WRONG)
def test_a_wrong_plan_is_refused_and_touches_nobody(
    writes: list[tuple[int, int, int]], row: tuple[int, int, int], reason: str, graph_rows: int
) -> None:
    runner = paged("llama", graph_rows)
    builder = served(runner)
    plan = PlanBuilder(2)
    plan.slot(2, [1, 2, 3, 4, 5])
    plan.page_writes += writes
    before = state(runner)
    plan.row(*row, sample=False)
    with pytest.raises(PlanError, match=reason):
        runner.step(plan.build())
    after = state(runner)
    for old, new in zip(before[:-1], after[:-1], strict=True):
        written = {9} if (2, 1, 9) in writes else set()
        size = runner.kv.page_size
        others = [page for page in range(runner.kv.page_count) if page not in written]
        assert old.unflatten(0, (-1, size))[others].equal(new.unflatten(0, (-1, size))[others])
    assert before[-1][1].equal(after[-1][1])
    # The error is reported only once.
    builder.row(1, 5, 1)
    runner.step(builder.build())


# Deliberate mistakes, which must change tokens or fail.


def serve_it(runner: ModelRunner) -> list[list[int]]:
    found = requests()
    MiniBrain(runner, 1, 1).serve(found, chunk=9)
    return [request.tokens for request in found]


def wrong(tokens: Any) -> bool:
    """True if steps fail, or give other tokens."""
    try:
        return bool(tokens() != expected("llama"))
    except (PlanError, AssertionError, RuntimeError, IndexError, ValueError):
        return True


def test_a_result_that_is_read_before_its_event_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = Launched.collect

    def early(launched: Launched) -> Any:
        class Reached:
            def wait(self) -> None: ...
            def since(self, earlier: object) -> int:
                return 0

        object.__setattr__(launched, "ended", Reached())
        object.__setattr__(launched, "begun", Reached())
        return collect(launched)

    runner = paged()
    monkeypatch.setattr(Launched, "collect", early)
    assert wrong(lambda: serve_it(runner))


def test_a_plan_whose_buffer_is_used_again_too_early_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = paged()
    launch = runner.launch

    def eager(plan: Any) -> Launched:
        launched = launch(plan)
        runner.device.reuse(plan.body)
        return launched

    monkeypatch.setattr(runner, "launch", eager)
    assert wrong(lambda: serve_it(runner))


@pytest.mark.parametrize("mistake", [False, True])
def test_padding_in_a_real_page_shows(mistake: bool) -> None:
    runner = paged()
    if mistake:
        runner.tables.all_pages[-1] = 3
    found, right = ([Request(list(range(10, 26)), 12, arrival=2 * n) for n in range(3)] for _ in range(2))
    MiniBrain(runner_of(model_of("llama"))).serve(right)
    brain = MiniBrain(runner, 1, 1)
    # Page 3 is the first one to be allocated. In the faulty case padding writes to it.
    brain.pages = [*range(4, 60), 3]
    brain.serve(found)
    same = [request.tokens for request in found] == [request.tokens for request in right]
    assert same != mistake


# Graphs.


def test_sizes() -> None:
    assert decode_rows(0) == []
    assert decode_rows(1) == [1]
    assert decode_rows(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert decode_rows(400)[-4:] == [256, 320, 384, 400]
    assert mixed_sizes(0, 64) == []
    assert mixed_sizes(8, 100) == [Size(64, 8, mixed=True), Size(100, 8, mixed=True)]
    assert [(size.tokens, size.rows) for size in mixed_sizes(256, 9000)][-2:] == [(2048, 64), (2048, 256)]


def test_a_step_gets_the_smallest_graph_that_holds_it() -> None:
    device = DeferredDevice(1)
    graphs = Graphs(device, 100, 256)
    assert graphs.fit(1, 1) is None
    graphs.capture(lambda size: None, lambda rows, kind: None)
    assert graphs.count == len(graphs.sizes) + 3 * len({size.rows for size in graphs.sizes})
    assert graphs.fit(3, 3) == Size(4, 4, mixed=False)
    assert graphs.fit(97, 97) == Size(100, 100, mixed=False)
    assert graphs.fit(101, 101) is None
    assert graphs.fit(3, 65) == Size(128, 64, mixed=True)
    assert graphs.fit(65, 66) == Size(128, 100, mixed=True)
    assert graphs.fit(2, 257) is None


def test_graphs_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    runner = paged()
    assert runner.facts()["graphs"] == runner._steps.graphs.count == 4 + 1 + 3 * 4  # type: ignore[union-attr]
    told = capsys.readouterr().err
    assert "captured 17 graphs: steps of 1, 2, 4, 6 decode rows, steps of up to 64 tokens in up to 6 rows, " in told
    runner = paged(graph_rows=0)
    assert runner.facts()["graphs"] == 0
    assert "captured" not in capsys.readouterr().err
    assert runner_of(model_of("llama")).facts()["graphs"] == 0


def test_a_graph_that_cannot_be_captured_is_named() -> None:
    graphs = Graphs(DeferredDevice(1), 4, 64)

    def fail(size: Size) -> None:
        if size.rows == 2:
            raise RuntimeError("no memory")

    with pytest.raises(DeviceError, match=r"graph of 2 decode rows could not be captured: no memory; .*--disable-cuda"):
        graphs.capture(fail, lambda rows, kind: None)


def test_a_capture_that_waits_is_refused() -> None:
    device = DeferredDevice(1)
    x, captured = torch.arange(3), list[Work]()
    device.queue(lambda: captured.append(device.capture(lambda: print(x.sum().item()))))
    with pytest.raises(HiddenWaitError):
        device.event().wait()


@torch.inference_mode()
def test_a_replay_repeats_operators_and_decides_nothing() -> None:
    x, out, times = torch.ones(3), torch.zeros(3), [2]

    def work() -> None:
        fresh = torch.empty(3)
        fresh[:2] = x[:2] * times[0]
        fresh[2:].fill_(7)
        out.copy_(fresh)

    recording = Recording(work)
    x.fill_(5)
    times[0] = 100
    recording.replay()
    assert out.tolist() == [10, 10, 7]


@torch.inference_mode()
def test_a_replay_of_what_is_gone_shows() -> None:
    out, step = torch.zeros(3), torch.ones(3)
    recording = Recording(partial(out.copy_, step))
    recording.replay()
    del step
    with pytest.raises(LostMemoryError, match="uses memory that is gone"):
        recording.replay()


@torch.inference_mode()
def test_memory_of_no_bytes_is_never_gone() -> None:
    x, out = torch.ones(3), torch.zeros(3)
    recording = Recording(lambda: out.copy_(torch.cat((x[3:].double(), x.double()))))
    x.fill_(5)
    recording.replay()
    assert out.tolist() == [5, 5, 5]


@torch.inference_mode()
def test_what_a_graph_made_for_itself_has_no_content_behind_it() -> None:
    x, kept = torch.ones(3), []
    recording = Recording(lambda: kept.append(x + 1))
    assert kept[0].tolist() != [2, 2, 2]
    recording.replay()
    assert kept[0].tolist() != [2, 2, 2]


# The choice of backends.


def test_backends_that_can_not_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="triton is for GPUs, and the device is cpu"):
        runner_of(model_of("llama"), attention_backend="triton")
    with pytest.raises(DeviceError, match="fa3 can't be used: it needs --dtype bfloat16; use triton"):
        runner_of(model_of("llama"), device="deferred", attention_backend="fa3")
    with pytest.raises(DeviceError, match="flash_attn_interface can't be imported"):
        runner_of(model_of("llama"), device="deferred", attention_backend="fa3", dtype="bfloat16")
    with pytest.raises(DeviceError, match="has latent rows: use triton"):
        runner_of(model_of("deepseek-v3"), device="deferred", attention_backend="fa3", dtype="bfloat16")
    with pytest.raises(DeviceError, match=r"triton has no chunks of attention, and .* has some"):
        runner_of(random_model(*TORCH_NAMED["llama4"]), device="deferred", attention_backend="triton")
    for family in ("gemma3", "mistral-window"):
        with pytest.raises(DeviceError, match=r"attends without windows, caps and sinks, and .* has some: use triton"):
            runner_of(model_of(family), device="deferred", attention_backend="fa3", dtype="bfloat16")
