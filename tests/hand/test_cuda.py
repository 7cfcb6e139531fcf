"""The CUDA device without a GPU: what it copies, where tensors are, what it waits for, and its messages."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import BertConfig

from forebay.compute.choose import Choice
from forebay.device import DeviceError, open_device
from forebay.device.cuda import RESERVE, CudaDevice, CudaEvent
from forebay.device.cuda_open import compiled_for
from forebay.device.cuda_pages import joined
from forebay.device.deferred import DeferredDevice
from forebay.device.watch import HiddenWaitError, NoStrayCopies, NoWaits
from forebay.gpu import reference
from forebay.gpu.choose import VARIABLE
from forebay.protocol.constants import FLAG_POOL
from forebay.protocol.masks import EVERYTHING as NO_MASK
from forebay.protocol.masks import Masks
from forebay.runner.runner import ModelRunner
from forebay.state.config import ConfigError, RunnerConfig
from tests.hand.fake_cuda import FakeCuda, FakeEvent, fake_tensors, install
from tests.hand.support import (
    EVERYTHING,
    FAMILIES,
    MiniBrain,
    PlanBuilder,
    Request,
    Sampling,
    greedy_reference,
    hf_config,
    hub_weights,
    reference_model,
    runner_of,
    wire_config,
)
from tests.hand.test_pooling import pooling

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PROMPT = [3, 14, 15, 92, 65]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A GPU that uses the host's memory."""
    return install(monkeypatch, CPU)


def test_arrays_are_copied_in_as_they_are_in_one_piece(fake: FakeCuda) -> None:
    device = CudaDevice()
    arrays: tuple[npt.NDArray[Any], ...] = (
        np.arange(5, dtype=np.int64),
        np.array([True, False, True]),
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1],
        np.zeros(0, np.int32),
        np.linspace(0, 1, 6).reshape(2, 3),
    )
    pins = len(fake.pinned)
    tensors = device.copy_in(*arrays)
    assert len(fake.pinned) == pins + 1
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.shape == array.shape
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)
    arrays[0][:] = 9
    assert tensors[0].tolist() == [0, 1, 2, 3, 4], "the host may change the array after its copy"


def test_what_is_in_pinned_memory_is_copied_from_there(fake: FakeCuda) -> None:
    device = CudaDevice()
    body = device.host_memory(64).view(np.int32)
    body[:] = np.arange(16)
    pins = len(fake.pinned)
    (tensor,) = device.copy_in(body)
    assert len(fake.pinned) == pins
    assert tensor.tolist() == list(range(16))


def test_results_are_copied_to_pinned_memory(fake: FakeCuda) -> None:
    device = CudaDevice()
    to = device.host_memory(16).view(np.int32)
    with NoStrayCopies():
        device.copy_out(torch.arange(4, dtype=torch.int32), to)
    assert to.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("size", "waits"), [(0, False), (1, True)])
def test_nothing_waits_for_a_copy_of_nothing(size: int, waits: bool) -> None:
    """A step without tokens copies empty entries, and empty memory is never pinned."""
    there = torch.empty(size, device="meta")
    with NoStrayCopies(), pytest.raises(HiddenWaitError) if waits else nullcontext():
        there.copy_(torch.empty(size), non_blocking=True)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_weights_go_through_two_buffers_of_any_size(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype
) -> None:
    monkeypatch.setattr("forebay.device.cuda._UPLOAD_BYTES", 64)
    device = CudaDevice()
    for shape in [(), (1,), (7, 11), (31,), (33,), (4, 5, 6)]:
        source, target = torch.randn(shape).to(stored), torch.zeros(shape, dtype=torch.bfloat16)
        device.fill(target, source)
        assert torch.equal(target, source.bfloat16())
    source, target = torch.randn(9, 5).bfloat16(), torch.zeros(5, 9, dtype=torch.bfloat16)
    device.fill(target.T, source)
    device.fill(target, source.T)
    assert torch.equal(target.T, source)


def test_a_buffer_is_filled_again_when_its_copy_is_done(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.device.cuda._UPLOAD_BYTES", 64)
    order: list[tuple[str, FakeEvent]] = []
    for name in ("synchronize", "record"):
        monkeypatch.setattr(FakeEvent, name, lambda event, *_, name=name: order.append((name, event)))
    device = CudaDevice()
    device.fill(torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8))
    assert [name for name, _ in order] == ["synchronize", "record"] * 4
    events = [event for _, event in order[::2]]
    assert events[0] is events[2] is not events[1] is events[3]


def test_events_are_in_the_stream_of_the_work(fake: FakeCuda) -> None:
    device = CudaDevice()
    first, second = device.event(), device.event()
    assert isinstance(first, CudaEvent)
    assert isinstance(second, CudaEvent)
    assert [first._event.stream] == fake.streams  # type: ignore[attr-defined]
    second.wait()
    assert (first._event.waits, second._event.waits) == (0, 1)  # type: ignore[attr-defined]
    assert second.since(first) >= 0


def test_a_gpu_that_failed_is_told_in_one_line(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: FakeEvent) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later\n")

    event = CudaDevice().event()
    monkeypatch.setattr(FakeEvent, "synchronize", fail)
    with pytest.raises(DeviceError, match=r"^the GPU has failed: CUDA error: device-side assert triggered\. A plan"):
        event.wait()


@pytest.mark.parametrize("scattered", [False, True])
def test_pages_are_moved_to_shared_memory_and_back(fake: FakeCuda, scattered: bool) -> None:
    device = CudaDevice()
    memory = np.zeros(200, np.uint8)
    device.share(memory)
    assert fake.registered == [(memory.ctypes.data, 200)]
    pieces = [torch.arange(size, dtype=torch.uint8) + 7 for size in (10, 20, 6)]
    starts = (0, 50, 100) if scattered else (0, 10, 30)
    places = [memory[start : start + piece.numel()] for start, piece in zip(starts, pieces, strict=True)]
    device.move(list(zip(pieces, places, strict=True)), save=True)
    for piece, place in zip(pieces, places, strict=True):
        assert place.tolist() == piece.tolist()
    memory += 1
    device.move(list(zip(pieces, places, strict=True)), save=False)
    for piece, place in zip(pieces, places, strict=True):
        assert piece.tolist() == place.tolist()
        assert piece[0] == 8


def test_pages_of_other_replicas_go_through_pinned_memory(fake: FakeCuda) -> None:
    device, memory = CudaDevice(), np.arange(30, dtype=np.uint8)
    memory.flags.writeable = False
    pieces, places = [torch.zeros(size, dtype=torch.uint8) for size in (10, 20)], [memory[:10], memory[10:]]
    device.move(list(zip(pieces, places, strict=True)), save=False)
    assert [piece.tolist() for piece in pieces] == [list(range(10)), list(range(10, 30))]
    assert [end - first for first, end in fake.pinned] == [30]


def test_positions_of_a_page_are_moved_too(fake: FakeCuda) -> None:
    device = CudaDevice()
    page, there = np.zeros((2, 4, 3), np.uint8), torch.arange(24, dtype=torch.uint8).view(2, 4, 3)
    device.move([(there[:, 1:3], page[:, 1:3])], save=True)
    assert page[:, 1:3].tolist() == there[:, 1:3].tolist()
    assert not page[:, [0, 3]].any()


def test_only_what_follows_one_another_is_one_piece() -> None:
    memory = np.arange(12, dtype=np.uint8)
    whole = joined([memory[:4], memory[4:6].reshape(2, 1), memory[6:]])
    assert whole is not None
    assert whole.tolist() == list(range(12))
    assert joined([memory[:4], memory[5:]]) is None
    assert joined([memory[4:], memory[:4]]) is None
    assert joined([memory.reshape(3, 4)[:, :2]]) is None


def test_memory_that_cannot_be_pinned_is_told(fake: FakeCuda) -> None:
    fake.refuses_memory = True
    with pytest.raises(DeviceError, match=r"host tier of 0\.0 GB can't be pinned .*it was refused; .*ulimit -l"):
        CudaDevice().share(np.zeros(200, np.uint8))


def test_memory_is_measured_while_steps_run(fake: FakeCuda) -> None:
    device = CudaDevice()

    def run() -> None:
        fake.free -= 3 << 30

    assert device.measure(run) == (3 << 30) + RESERVE


def test_a_measurement_uses_a_pool_of_graphs_up(fake: FakeCuda) -> None:
    """PyTorch asserts that no later capture uses a pool whose memory was freed."""
    device = CudaDevice()
    device.measure(lambda: [device.capture(lambda: None) for _ in range(2)])
    for _ in range(2):
        device.capture(lambda: None)
    assert fake.captured == [1, 1, 2, 2]


def test_pinned_blocks_are_there_behind_the_last_capture(fake: FakeCuda) -> None:
    device = CudaDevice()
    device.capture(lambda: None)
    assert not fake.pinned
    device.finish_start()
    sizes = sorted(end - first for first, end in fake.pinned)
    assert sizes == sorted(8 * [1 << power for power in range(17)])


def test_a_graph_is_replayed_before_it_serves(fake: FakeCuda) -> None:
    """The first replay uploads the graph to the GPU."""
    replay = open_device("cuda", None).capture(lambda: None)
    assert fake.replays == 1
    replay()
    assert fake.replays == 2


def test_a_failed_capture_says_its_first_cause(fake: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    runs = itertools.count()

    def fails_while_captured() -> None:
        if next(runs):
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(DeviceError, match="the GPU can't capture this: operation not permitted when stream"):
        CudaDevice().capture(fails_while_captured)
    log = capsys.readouterr().err
    assert "fails_while_captured" in log
    assert "failed due to a previous error" in log


def test_a_missing_c_compiler_is_told_in_one_line(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, config = FAMILIES["llama"]
    monkeypatch.setattr(reference, "COMPILES", True)
    monkeypatch.setattr(CudaDevice, "torch_device", GPU)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(DeviceError, match="a C compiler, and there is none: install gcc or clang, set CC"):
        Choice(CudaDevice(), RunnerConfig.from_dict(wire_config(hf_config(config, kind.__name__), device="cuda")))


# Reasons why no GPU can be used.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda fake: setattr(fake, "error", "The NVIDIA driver on your system is too old (found version 12040)."),
            r"driver is too old \(for CUDA 12\.4\): PyTorch .* needs a driver for CUDA 13\.0; .*--device cpu$",
        ),
        (
            lambda fake: setattr(fake, "error", "Found no NVIDIA driver on your system. Please\ncheck"),
            r"^there is no NVIDIA driver: .*--device cpu$",
        ),
        (
            lambda fake: setattr(fake, "error", "Unexpected error from cudaGetDeviceCount()\nmore"),
            r"^CUDA does not start: Unexpected error from cudaGetDeviceCount\(\); .*--device cpu$",
        ),
        (lambda fake: setattr(fake, "count", 0), r"^no GPU is visible with CUDA_VISIBLE_DEVICES=7: .*--device cpu$"),
        (lambda fake: setattr(fake, "capability", (6, 1)), r"^Fake GPU \(sm_61\) is none .*sm_80 sm_90 compute_90"),
    ],
)
def test_one_line_says_why_there_is_no_gpu(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, change: Callable[[FakeCuda], None], message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    change(fake)
    with pytest.raises(DeviceError, match=message) as raised:
        open_device("cuda", None)
    assert "\n" not in str(raised.value)


def test_a_torch_without_cuda_is_told(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"^PyTorch \S+ was built without CUDA: .*--device cpu$"):
        open_device("cuda", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_this_machine_has_none() -> None:
    with pytest.raises(DeviceError, match=r"--device cpu$"):
        open_device("cuda", None)


def test_a_gpu_that_is_too_old_for_bfloat16_is_told(fake: FakeCuda) -> None:
    fake.capability, fake.archs = (7, 5), ["sm_75"]
    device = CudaDevice()
    device.check_dtype(torch.float32)
    with pytest.raises(DeviceError, match=r"cuda \(Fake GPU\) has no arithmetic for bfloat16: use --dtype float32"):
        device.check_dtype(torch.bfloat16)
    with pytest.raises(ValueError, match="float16 is not supported on CUDA"):
        device.check_dtype(torch.float16)


@pytest.mark.parametrize(
    ("capability", "built", "fits"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((7, 5), ["sm_80", "compute_80"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_90a", "compute_90a"], False),
        ((9, 0), ["gfx942"], False),
    ],
)
def test_which_gpus_a_build_is_for(capability: tuple[int, int], built: list[str], fits: bool) -> None:
    assert compiled_for(*capability, built) is fits


# The whole hand on the fake GPU.


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the PyTorch reference operators, because kernels need a GPU or Triton's interpreter."""
    monkeypatch.setenv(VARIABLE, "reference")


def runner_on_it(family: str, load: bool = True, **changes: object) -> ModelRunner:
    kind, config = FAMILIES[family]
    wired = wire_config(hf_config(config, kind.__name__), device="cuda", **changes)
    runner = ModelRunner(RunnerConfig.from_dict(wired))
    if load:
        runner.model.load_weights(hub_weights(reference_model(family)).items())
    return runner


@pytest.mark.parametrize("lookahead", [0, 1])
def test_its_copies_give_the_tokens_of_the_reference(fake: FakeCuda, lookahead: int) -> None:
    """Memory is measured, weights go through the buffers, and steps use the device's copies."""
    runner = runner_on_it("qwen3", max_total_tokens=None, mem_fraction_static=0.9)
    assert runner.kv.page_count == 8 * 24
    runner.warm_up()
    requests = [Request(PROMPT, 6), Request([7, 8, 9], 5, Sampling(temperature=0.8, seed=3, top_k=9), arrival=2)]
    MiniBrain(runner, lookahead=lookahead).serve(requests, chunk=3)
    assert requests[0].tokens == greedy_reference(reference_model("qwen3"), PROMPT, 6)[0]
    assert runner.facts()["device"] == "cuda (Fake GPU)"


def test_a_wait_for_masks_is_a_gap_and_no_compute(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time from the end of the model until the sampler starts is reported as a gap, because the GPU is idle."""
    clock = [0.0]
    monkeypatch.setattr(FakeEvent, "clock", staticmethod(lambda: clock[0]))
    runner = runner_on_it("qwen3")
    logits = runner._steps.compute

    def compute(launch: Any) -> None:
        logits(launch)
        clock[0] += 0.25

    def masks() -> Masks:
        clock[0] += 0.5
        return Masks(1, np.array([NO_MASK], np.int32))

    monkeypatch.setattr(runner._steps, "compute", compute)
    plan = PlanBuilder(1)
    plan.slot(2, PROMPT, Sampling())
    plan.page_writes += [(2, index, 7 + index) for index in range(4)]
    plan.row(2, 0, len(PROMPT), masked=True)
    result = runner.step(plan.build(), masks)
    assert result.tokens.tolist() == greedy_reference(reference_model("qwen3"), PROMPT, 1)[0]
    assert result.timing.tolist() == [250_000, 500_000]


ASKED = {
    "greedy": Sampling(),
    "everything": EVERYTHING,
    "top_k": Sampling(temperature=0.7, top_k=4, top_p=0.5, logprobs=1),
    "allowed": Sampling(temperature=1.0, allowed=(1, 2, 3)),
}


def plans(asked: Sampling) -> list[PlanBuilder]:
    """Plans of a prompt, of its next chunk beside a new one, of decode rows of several lengths, and of a single row."""
    made = [PlanBuilder(number) for number in (1, 2, 3, 4)]
    first, second, third, fourth = made
    first.slot(2, list(range(1, 31)), asked)
    first.page_writes += [(2, index, 7 + index) for index in range(12)]
    first.row(2, 0, 20, False)
    second.slot(5, PROMPT, Sampling())
    second.page_writes += [(5, index, 40 + index) for index in range(4)]
    second.row(2, 20, 10)
    second.row(5, 0, len(PROMPT))
    third.row(2, 30, 1)
    third.row(5, len(PROMPT), 1)
    fourth.row(2, 31, 1)
    return made


FAMILIES_ON_IT = ("llama-yarn", "qwen2", "qwen3-moe", "glm4-moe", "deepseek-v3", "glm-dsa")


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(
    ("family", "asked"), [*itertools.product(["qwen3"], ASKED), *itertools.product(FAMILIES_ON_IT, ["greedy"])]
)
def test_a_launch_mixes_no_devices_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, family: str, asked: str, backend: str
) -> None:
    """Runs each operator of each kind of step, with fake GPU tensors, which have no content."""
    install(monkeypatch, GPU)
    with fake_tensors(monkeypatch):
        runner = runner_on_it(family, load=False, dtype="bfloat16", attention_backend=backend)
        runner.load(lambda done, total: None)
        for builder in plans(ASKED[asked]):
            plan = builder.build()
            with NoWaits(), NoStrayCopies():
                launched = runner.launch(plan)
            launched.collect()


@pytest.mark.parametrize("kind", ["cls", "mean", "last"])
def test_pooling_mixes_no_devices_either(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = BertConfig(vocab_size=131, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config = hf_config(FAMILIES["qwen3"][1], "Qwen3ForCausalLM") if kind == "last" else hf_config(model, "BertModel")
    wired = wire_config(config, device="cuda", dtype="bfloat16")
    wired["model"]["pooling"] = pooling(kind, 64 if kind == "last" else 48)
    install(monkeypatch, GPU)
    with fake_tensors(monkeypatch):
        runner = ModelRunner(RunnerConfig.from_dict(wired))
        runner.load(lambda done, total: None)
        builder = PlanBuilder(1)
        for slot, length in enumerate((5, 9, 5)):
            builder.slot(slot, list(range(length)))
            builder.page_writes += [(slot, index, 4 * slot + index) for index in range(3 if kind == "last" else 0)]
            builder.rows.append((slot, 0, length, FLAG_POOL))
        plan = builder.build()
        with NoWaits(), NoStrayCopies():
            launched = runner.launch(plan)
        assert launched.collect().pooled.shape == (3 * (64 if kind == "last" else 48),)


def test_quantisation_of_the_cpus_kernels_is_refused(fake: FakeCuda) -> None:
    with pytest.raises(ConfigError, match=r"w8a8_int8 is computed by the Rust hand on a CPU, .*: leave it off"):
        runner_on_it("llama", load=False, quantization="w8a8_int8")


def test_largest_steps_are_done_on_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, GPU)
    with fake_tensors(monkeypatch):
        runner = runner_on_it("qwen3", load=False, max_total_tokens=None)
    pages = runner.kv.page_count
    assert pages == 8 * 24, "the memory holds more pages than the slots can fill"
    fake.free = RESERVE + (10 << 20)
    with fake_tensors(monkeypatch):
        runner = runner_on_it("qwen3", load=False, max_total_tokens=None, mem_fraction_static=1.0)
    left = (10 << 20) - runner.weight_bytes
    assert runner.kv.page_count == min(pages, left // runner.kv.page_bytes)


STRAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "to the device": lambda there: torch.ones(3).to(GPU),
    "to the device, said not to wait": lambda there: torch.ones(3).to(GPU, non_blocking=True),
    "into it": lambda there: there.copy_(torch.ones(3)),
    "into it, said not to wait": lambda there: there.copy_(torch.ones(3), non_blocking=True),
    "from it": lambda there: torch.ones(3).copy_(there),
    "from it, said not to wait": lambda there: torch.ones(3).copy_(there, non_blocking=True),
    "as it": lambda there: torch.ones(3).type_as(there),
}


@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
def test_copies_that_the_host_would_wait_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, stray: Callable[[torch.Tensor], object]
) -> None:
    fake = install(monkeypatch, GPU)
    with fake_tensors(monkeypatch):
        there = torch.zeros(3, device=GPU)
        with NoStrayCopies():
            there.add_(2.0).copy_(fake.pin(3), non_blocking=True)
            fake.pin(3).copy_(there, non_blocking=True)
            with pytest.raises(HiddenWaitError, match="not pinned"):
                stray(there)


class Measuring(DeferredDevice):
    """Runs the function to be measured, and reports fixed amounts of memory."""

    def measure(self, run: Callable[[], object]) -> int:
        run()
        return 1 << 20

    def available_bytes(self) -> int:
        return 2 << 20


def test_measured_steps_leave_less_for_pages_and_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.device.deferred.DeferredDevice", Measuring)
    model = reference_model("qwen3")
    config = wire_config(
        hf_config(model.config, type(model).__name__), device="deferred", max_total_tokens=None, mem_fraction_static=1.0
    )
    runner = ModelRunner(RunnerConfig.from_dict(config))
    assert runner.kv.page_count == ((1 << 20) - runner.weight_bytes) // runner.kv.page_bytes
    runner.model.load_weights(hub_weights(model).items())
    requests = [Request(PROMPT, 5)]
    MiniBrain(runner).serve(requests)
    assert requests[0].tokens == greedy_reference(model, PROMPT, 5)[0]


def test_no_memory_is_told_in_one_line(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.1 GiB of which 3.0 MiB "
            "is free. Process 7 has 79 GiB in use."
        )

    monkeypatch.setattr("forebay.runner.runner.KvPool", refuse)
    with pytest.raises(DeviceError, match=r"too little memory: Tried to allocate 20\.00 MiB\. GPU 0 .*; end what"):
        runner_on_it("llama", load=False)


@pytest.mark.parametrize("named", [None, "/elsewhere"])
def test_compiled_kernels_are_kept_in_the_cache(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", "/a/volume")
    monkeypatch.setenv(VARIABLE, "reference")
    # monkeypatch restores the variable that the next lines change.
    monkeypatch.setenv("TRITON_CACHE_DIR", named or "")
    if named is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    runner_of(reference_model("llama"), device="deferred", attention_backend="triton")
    assert os.environ["TRITON_CACHE_DIR"] == (named or "/a/volume/triton")
