"""The runner's refusals, and how much memory it takes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from forebay.device import open_device
from forebay.layers.params import ignore
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.state.pages import page_bytes, page_count
from forebay.state.slots import PlanError
from forebay.weights.config import ModelConfig
from tests.hand.support import FAMILIES, PlanBuilder, hf_config, wire_config

QWEN3 = hf_config(FAMILIES["qwen3"][1], "Qwen3ForCausalLM")


def runner(**changes: Any) -> ModelRunner:
    return ModelRunner(RunnerConfig.from_dict(wire_config(QWEN3, **changes)), arena=np.zeros(64, np.uint8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "dtype 'float16'"),
        ({"device": "abacus"}, "device 'abacus'"),
        ({"load_format": "pickle"}, "load format 'pickle'"),
        ({"max_total_tokens": 3}, "no memory for a single page"),
        ({"mem_fraction_static": 0.0, "max_total_tokens": None}, "no memory for a single page"),
        ({"max_total_tokens": 1 << 50}, r"keys and values .* take .* GB are free .*: at most \d+ tokens"),
        ({"world_size": 2}, "2 ranks"),
        ({"page_size": 0}, "at least 1"),
        ({"model": {"config": {}}}, "neither a shape of the model nor the findings of a probe"),
    ],
)
def test_a_config_that_can_not_be_followed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner(**changes)


def test_a_config_with_gaps_names_them() -> None:
    config = wire_config(QWEN3)
    del config["slots"], config["seed"]
    with pytest.raises(ValueError, match="lacks slots, seed"):
        RunnerConfig.from_dict(config)


def row(slot: int, start: int, length: int) -> Callable[[PlanBuilder], None]:
    return lambda builder: builder.row(slot, start, length)


def page(slot: int, index: int) -> Callable[[PlanBuilder], None]:
    return lambda builder: builder.page_writes.append((slot, index, 0))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (row(8, 0, 1), "outside of 8 slots"),
        (row(-1, 0, 1), "outside of 8 slots"),
        (row(0, 90, 7), "of 96 positions"),
        (row(0, 0, 0), "outside"),
        (page(8, 0), "page write: slot"),
        (page(0, 24), "page write: index"),
        (lambda builder: builder.slot(8, [1]), "new slot: slot"),
        (lambda builder: builder.slot(0, [1] * 98), "new slot: token count"),
        (lambda builder: builder.slot(0, [1] * 9, arena_offset=32), "bytes 32..68 of an arena of 64"),
    ],
)
def test_a_plan_outside_the_tables(write: Callable[[PlanBuilder], None], message: str) -> None:
    builder = PlanBuilder()
    write(builder)
    with pytest.raises(PlanError, match=message):
        runner().step(builder.build())


def test_a_page_nobody_wrote_is_an_error() -> None:
    tested = runner()
    tested.load(ignore)
    tested.warm_up()
    builder = PlanBuilder()
    builder.row(0, 0, 1)
    with pytest.raises((IndexError, PlanError)):
        tested.step(builder.build())


def test_the_pool_takes_the_share_of_memory_that_weights_leave() -> None:
    config = RunnerConfig.from_dict(wire_config(QWEN3, max_total_tokens=None))
    model = config.model_config
    assert isinstance(model, ModelConfig)
    size = page_bytes(model, 4, torch.float32)
    assert size == 4 * 2 * 3 * 2 * 32 * 4
    assert page_count(config, model, 2 * (10 * size + 5000), 5000) == 10
    assert page_count(config, model, 1 << 40, 5000) == 8 * 24


def test_a_fixed_pool_may_be_larger_than_the_slots_can_fill() -> None:
    tested = runner(max_total_tokens=10_000)
    assert tested.kv.page_count == 2500
    pages = sum(layer.keys.nbytes + layer.values.nbytes for layer in tested.kv.layers) * 2500 // 2501
    assert tested.facts()["kv_bytes"] == pages


def test_the_cpu_device_answers() -> None:
    device = open_device("cpu", None)
    assert torch.get_num_threads() >= 1
    assert device.available_bytes() > 1 << 20
    with pytest.raises(ValueError, match="float16"):
        device.check_dtype(torch.float16)
    torch.set_num_threads(1)
