"""The deferred device runs work late but in order. It detects callers that do not wait, or wait too often."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from forebay.device import open_device
from forebay.device.deferred import GARBAGE, DeferredDevice
from forebay.device.watch import HiddenWaitError, StrayOperatorError
from forebay.layers.ops import Draw, TorchOps
from forebay.runner.launched import Launched
from forebay.runner.runner import ModelRunner
from tests.hand.support import PlanBuilder, Sampling, greedy_reference, reference_model, runner_of

PROMPT = [3, 14, 15, 92, 65]


def first_plan(sampling: Sampling | None = None) -> PlanBuilder:
    builder = PlanBuilder(1)
    builder.slot(2, PROMPT, sampling or Sampling())
    builder.page_writes += [(2, index, 7 + index) for index in range(4)]
    builder.row(2, 0, len(PROMPT))
    return builder


def second_plan() -> PlanBuilder:
    builder = PlanBuilder(2)
    builder.row(2, len(PROMPT), 1)
    return builder


@pytest.fixture
def runner() -> ModelRunner:
    return runner_of(reference_model("llama"), device="deferred")


def expected(count: int) -> list[int]:
    return greedy_reference(reference_model("llama"), PROMPT, count)[0]


def test_work_runs_in_order_and_not_before_somebody_waits() -> None:
    device = DeferredDevice(1)
    ran: list[object] = []
    device.queue(lambda: ran.append((1, threading.current_thread() is threading.main_thread())))
    first = device.event()
    device.queue(lambda: ran.append(2))
    second = device.event()
    assert not ran
    first.wait()
    assert ran == [(1, False)]
    second.wait()
    first.wait()
    assert ran == [(1, False), 2]
    assert second.since(first) >= 0
    assert device.waits == 3


def test_a_copy_is_made_when_the_work_runs() -> None:
    device = DeferredDevice(1)
    source, to = np.arange(4), device.host_memory(32).view(np.int64)
    assert (to.view(np.uint8) == GARBAGE).all()
    device.queue(lambda: device.copy_out(device.copy_in(source)[0] * 2, to))
    source[0] = 50
    device.event().wait()
    assert to.tolist() == [100, 2, 4, 6]
    device.reuse(to)
    assert (to.view(np.uint8) == GARBAGE).all()


def test_what_work_raises_is_raised_by_whoever_waits_and_stays() -> None:
    device = DeferredDevice(1)
    before = device.event()
    ran: tuple[None, ...] = ()
    device.queue(lambda: ran[0])
    after = device.event()
    before.wait()
    for event in (after, device.event()):
        with pytest.raises(IndexError):
            event.wait()


X = torch.arange(6.0)
WAITS: dict[str, Callable[[], object]] = {
    "bool": lambda: bool((X > 2).any()),
    "int": lambda: int(X.max()),
    "item": lambda: X.sum().item(),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[X > 2],
    "write by mask": lambda: X.clone().__setitem__(X > 2, torch.zeros(3)),
    "masked_select": lambda: X.masked_select(X > 2),
    "unique": lambda: X.unique(),
    "repeat_interleave": lambda: X.repeat_interleave(X.long()),
    "slice": lambda: X[: X.max().long()],
    "where": lambda: torch.where(X > 2),
    "where with a number": lambda: torch.where(X > 2, X, 0.0),
    "where with numbers": lambda: torch.where(X > 2, 1.0, 0.0),
    "numbers of the host": lambda: torch.tensor([1, 2]),
    "bincount": lambda: X.long().bincount(),
    "argwhere": lambda: X.argwhere(),
    "bytes as a mask": lambda: X[(X > 2).to(torch.uint8)],
    "in": lambda: 3.0 in X,
    "float": lambda: float(X[0]),
    "range": lambda: torch.arange(X.max()),  # type: ignore[call-overload]
    "equal": lambda: torch.equal(X, X),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_work_that_waits_is_refused(wait: Callable[[], object]) -> None:
    device = DeferredDevice(1)

    def work() -> None:
        wait()

    device.queue(work)
    with pytest.raises(HiddenWaitError):
        device.event().wait()


def test_work_that_does_not_wait_is_not_refused() -> None:
    device = DeferredDevice(1)

    def work() -> None:
        index = torch.arange(1, 3)
        x = X.clone().index_put_((index,), X.new_zeros(()), accumulate=True)
        x[index] = x.index_select(0, index).masked_fill(x[index] > 1, 5)
        x.repeat_interleave(torch.ones(6, dtype=torch.int64), output_size=6).where(x > 3, x.cumsum(0)).topk(3)

    device.queue(work)
    device.event().wait()


def test_a_launch_calls_no_operator_itself() -> None:
    device = DeferredDevice(1)
    with device.launching(), pytest.raises(StrayOperatorError):
        X.add(1)


# Each of the next three tests makes a mistake on purpose. The device must detect it.


def test_a_body_that_is_reused_before_its_step_is_done_is_seen(runner: ModelRunner) -> None:
    plan = first_plan().build()
    launched = runner.launch(plan)
    runner.device.reuse(plan.body)
    with pytest.raises((IndexError, RuntimeError, AssertionError)):
        assert launched.collect().tokens.tolist() == expected(1)


def test_a_result_that_is_read_before_its_event_is_seen(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = runner.launch(first_plan().build())
    monkeypatch.setattr(type(launched.ended), "wait", lambda _: None)
    monkeypatch.setattr(type(launched.ended), "since", lambda *_: 0)
    assert launched.collect().tokens.tolist() != expected(1)


def test_a_sampler_that_waits_in_the_middle_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = TorchOps.sample

    def impatient(self: TorchOps, logits: torch.Tensor, draw: Draw) -> torch.Tensor:
        return sample(self, logits if bool(logits.isfinite().all()) else logits * 0, draw)

    monkeypatch.setattr(TorchOps, "sample", impatient)
    runner = runner_of(reference_model("llama"), device="deferred")
    launched = runner.launch(first_plan(Sampling(temperature=1.0)).build())
    with pytest.raises(HiddenWaitError, match="bool"):
        launched.collect()


def test_two_steps_are_in_flight_and_each_is_waited_for_once(runner: ModelRunner) -> None:
    device = runner.device
    assert isinstance(device, DeferredDevice)
    launched: list[Launched] = [runner.launch(builder.build()) for builder in (first_plan(), second_plan())]
    assert device.waits == 0
    results = [step.collect() for step in launched]
    assert [int(result.tokens[0]) for result in results] == expected(2)
    assert device.waits == 2
    assert all(result.timing[0] >= 0 for result in results)


def test_a_body_is_garbage_when_it_was_collected_and_nothing_of_it_is_needed(runner: ModelRunner) -> None:
    """A slot's stop ids and biases remain after the plan that brought them is released."""
    sampling = Sampling(stop_ids=(expected(2)[1],), min_total=100, bias=((expected(1)[0], 50.0),))
    plan = first_plan(sampling).build()
    released: list[bool] = []
    plan.release = lambda: released.append(bool((plan.body.view(np.uint8) == GARBAGE).all()))
    first = runner.launch(plan).collect()
    assert released == [True]
    assert first.tokens.tolist() == expected(1)
    again = runner_of(reference_model("llama"))
    wanted = [again.step(builder.build()).tokens.tolist() for builder in (first_plan(sampling), second_plan())]
    assert [first.tokens.tolist(), runner.step(second_plan().build()).tokens.tolist()] == wanted


def test_the_runner_gets_it_by_name() -> None:
    assert open_device("deferred", 1).beside_host
