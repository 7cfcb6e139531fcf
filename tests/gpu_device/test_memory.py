"""Memory of the GPU and of the host: it is measured correctly, and whole pages are copied in both directions."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks.gpu.shapes import SHAPES
from forebay.device import Device, open_device
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.support import wire_config

GIB = 1 << 30


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("cuda", None)


def test_weights_of_every_size_arrive(device: Device) -> None:
    for count in (1, 1000, (16 << 20) // 2, (40 << 20) + 7):
        source = torch.arange(count, dtype=torch.int32).bfloat16()
        target = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
        device.fill(target, source)
        assert torch.equal(target.cpu(), source)
        wide = torch.zeros(count, dtype=torch.float32, device="cuda")
        device.fill(wide, source)
        assert torch.equal(wide.cpu(), source.float())


def test_pages_of_both_tiers_are_copied_beside_a_busy_stream(device: Device) -> None:
    file = os.memfd_create("pages")
    os.ftruncate(file, 8 << 20)
    memory = np.frombuffer(mmap.mmap(file, 8 << 20), np.uint8).reshape(8, 1 << 20)
    device.share(memory)
    assert torch.from_numpy(memory).is_pinned()
    pieces = [torch.randint(0, 255, (8, 1 << 17), dtype=torch.uint8, device="cuda") for _ in range(8)]
    wanted = [torch.cat([piece[page] for piece in pieces]).cpu() for page in range(8)]
    torch.cuda.synchronize()
    # About a second of work, for which no copy may wait.
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    for page in range(8):
        device.move(list(zip([p[page] for p in pieces], np.split(memory[page], 8), strict=True)), save=True)
    assert not busy.query()
    assert all(torch.equal(torch.from_numpy(memory[page]), wanted[page]) for page in range(8))
    # Another replica maps the same pages read-only.
    lent = np.frombuffer(mmap.mmap(file, 8 << 20, prot=mmap.PROT_READ), np.uint8).reshape(8, 1 << 20)
    for pages in (memory, lent):
        for piece in pieces:
            piece.zero_()
        torch.cuda.synchronize()
        for page in range(8):
            device.move(list(zip([p[page] for p in pieces], np.split(pages[page], 8), strict=True)), save=False)
        assert all(torch.equal(torch.cat([p[page] for p in pieces]).cpu(), wanted[page]) for page in range(8))


def test_the_pool_takes_what_steps_leave_and_no_more() -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    config = wire_config(
        SHAPES["Qwen3-0.6B"],
        device="cuda",
        dtype="bfloat16",
        page_size=16,
        slots=384,
        max_running_requests=256,
        context_length=16384,
        chunked_prefill_size=2048,
        max_total_tokens=None,
        mem_fraction_static=0.9,
    )
    runner = ModelRunner(RunnerConfig.from_dict(config))
    runner.load(lambda done, total: None)
    runner.warm_up()
    limit = runner.config.slots * runner.config.pages_per_slot
    if runner.kv.page_count < limit:
        used = free - torch.cuda.mem_get_info()[0]
        measured = int(0.9 * free) - runner.weight_bytes - runner.kv.nbytes
        assert 0 < measured < 12 * GIB
        assert used <= 0.9 * free + GIB
    assert runner.kv.page_count * 16 > 100_000


BAD = """
import numpy as np
from tests.hand.support import PlanBuilder, reference_model, runner_of
runner = runner_of(reference_model("llama"), device="cuda")
builder = PlanBuilder(1)
builder.slot(2, [1, 2, 3])
builder.row(2, 0, 3)
runner.launch(builder.build()).collect()
"""


def test_a_page_that_nobody_wrote_ends_the_hand_in_one_line() -> None:
    """Runs in a separate process, which cannot use CUDA afterwards."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", BAD], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert found.returncode
    last = found.stderr.strip().splitlines()[-1]
    # The step's error word reports the missing page, so the hand ends without an assertion on the device.
    assert "PlanError: the plan contradicts the tables" in last
