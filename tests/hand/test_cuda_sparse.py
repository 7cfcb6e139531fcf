"""Sparse decoding on the CUDA device without a GPU: memory that it reads, mixed devices, and refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from forebay.device import DeviceError
from forebay.device.watch import NoStrayCopies, NoWaits
from forebay.gpu import reference
from forebay.gpu.choose import VARIABLE
from forebay.runner.host_tier import HostMemory
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.fake_cuda import FakeCuda, fake_tensors, install
from tests.hand.sparse_slot import PROMPT, Slot, says_what_transformers_says
from tests.hand.sparse_stories import HOST, SPARSE, twins
from tests.hand.support import FAMILIES, hf_config, wire_config
from tests.hand.test_cuda import CPU, GPU

__all__ = ["twins"]

GATHER = reference.gather


@SPARSE
def test_its_copies_give_the_tokens_of_the_reference(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's memory is the host's here. Its streams save pages, and missed positions are read from the host."""
    fake = install(monkeypatch, CPU)
    gathered = []

    def gather(found: Any, host: torch.Tensor, stride: int, size: int, pool: torch.Tensor) -> None:
        assert fake.is_pinned(host), "a GPU reads pinned memory only"
        assert host.data_ptr() % 16 == 0
        gathered.append(host.data_ptr())
        GATHER(found, host, stride, size, pool)

    monkeypatch.setattr(reference, "gather", gather)
    hand = {"device": "cuda", "attention_backend": "triton"}
    says_what_transformers_says(family, hand)
    assert len(set(gathered)) == 4, "each layer has its own rows"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A fake GPU whose tensors have no content, and reference operators that claim to read the host's memory."""
    monkeypatch.setattr(reference, "READS_HOST", True)
    fake = install(monkeypatch, GPU)
    with fake_tensors(monkeypatch):
        yield fake


def runner_on_it(family: str = "glm-dsa-shared", **changes: Any) -> ModelRunner:
    kind, config = FAMILIES[family]
    wired = wire_config(hf_config(config, kind.__name__), **{**HOST, "device": "cuda", "dtype": "bfloat16", **changes})
    return ModelRunner(RunnerConfig.from_dict(wired), None, HostMemory(os.memfd_create("host"), 0))


@SPARSE
def test_a_launch_mixes_no_devices_and_waits_for_nothing(
    family: str, on_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = []

    def gather(found: Any, host: torch.Tensor, stride: int, size: int, pool: torch.Tensor) -> None:
        assert {tensor.device for tensor in vars(found).values()} | {pool.device} == {GPU}
        assert host.device == CPU
        assert host.dtype == pool.dtype == torch.bfloat16
        gathered.append(len(found.rows))

    monkeypatch.setattr(reference, "gather", gather)
    runner = runner_on_it(family)
    runner.load(lambda done, total: None)
    slot = Slot(runner=runner)
    first, second, third = slot.plan(), slot.plan(), slot.plan()
    slot.write(first, PROMPT)
    first.row(1, 0, len(PROMPT))
    # A sparse row, beside a chunk whose queries choose positions.
    slot.become_sparse(second)
    second.slot(2, PROMPT)
    second.page_writes += [(2, index, 30 + index) for index in range(7)]
    second.host_writes += [(2, index, 130 + index) for index in range(7)]
    second.row(2, 0, 20, False)
    second.row(1, len(PROMPT), 1)
    third.row(1, len(PROMPT) + 1, 1)
    third.row(2, 20, 6)
    for builder in (first, second, third):
        plan = builder.build()
        with NoWaits(), NoStrayCopies():
            launched = runner.launch(plan)
        launched.collect()
    assert gathered == [1] * 2 * 4, "each layer gathers for the sparse query alone"


REFUSED = {
    "PyTorch's operators": ({"attention_backend": "torch"}, True, r"on cuda \(Fake GPU\) needs Triton's kernels"),
    "twins": ({}, False, r"needs Triton's kernels, which read .*: leave --attention-backend and FOREBAY_GPU_KERNELS"),
    "a fence": ({"kv_save_order": "fence"}, True, "fence is for rows that wait on the device"),
}


@pytest.mark.parametrize(("changes", "reads", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_there_is_refused(
    changes: dict[str, Any], reads: bool, message: str, on_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner_on_it()
    monkeypatch.setattr(reference, "READS_HOST", reads)
    with pytest.raises(DeviceError, match=message):
        runner_on_it(**changes)


def test_kernels_read_the_hosts_memory_and_twins_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.gpu import kernels
    from forebay.gpu.choose import kernels as chosen

    assert (kernels.READS_HOST, reference.READS_HOST) == (True, False)
    monkeypatch.setenv(VARIABLE, "triton")
    assert chosen().READS_HOST
