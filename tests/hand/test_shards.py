"""Which parts of weights a rank reads: the parts that its layers need, from any kind of file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.described import described as describe
from forebay.distributed.group import Group
from forebay.layers.params import WeightError
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.weights.load import iter_weights
from forebay.weights.shards import Shard
from tests.hand.gguf_models import Form, write
from tests.hand.support import reference_model, wire_config
from tests.hand.test_checkpoints import FP8, eight_bits, saved
from tests.hand.test_gguf_experts import model_of
from tests.weights.support import tiny_gguf

Q8_0 = gguf.GGMLQuantizationType.Q8_0


class Numbered:
    """A group that has only its rank and its world size."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def least(self, number: int) -> int:
        return number


def runner_of(model: dict[str, Any], rank: int, world: int, expert_parallel: bool) -> ModelRunner:
    config = wire_config({}, load_format="auto", rank=rank, world_size=world, expert_parallel=expert_parallel)
    resolved = RunnerConfig.from_dict({**config, "model": model, "context_length": 64})
    group: Group = Numbered(rank, world)  # type: ignore[assignment]
    return ModelRunner(resolved, meet=lambda device: group)


def check(model: dict[str, Any], world: int, expert_parallel: bool = False) -> None:
    """Checks that each rank gets its parts of all weights, and that together they cover each weight."""
    whole = dict(iter_weights(model, RunnerConfig.from_dict({**wire_config({}), "model": model}).model_config))
    covered = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
    for rank in range(world):
        runner = runner_of(model, rank, world, expert_parallel)
        cuts, names = runner.model.params.cuts, set()
        for name, tensor in iter_weights(model, runner.model_config, cuts):
            names.add(name)
            cut = cuts.parts.get(name)
            places = () if cut is None else cut.places
            assert torch.equal(tensor, whole[name][places]), name
            covered[name][places] += 1
        assert names == whole.keys() - cuts.others
        runner.load(lambda done, total: None)
    for name, times in covered.items():
        assert times.min() >= 1, name
        if "norm" not in name and ".gate." not in name and ".k_proj." not in name and ".v_proj." not in name:
            assert times.max() in (1, world), name


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_eight_bit_floats_whose_blocks_are_cut(tmp_path: Path, world: int, expert_parallel: bool) -> None:
    model = saved(tmp_path, reference_model("deepseek-v3"), lambda weights: eight_bits(weights, (16, 16)), **FP8)
    check(model, world, expert_parallel)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_tensors_of_gguf_files(tmp_path: Path, architecture: str, tied: bool) -> None:
    check(described(tiny_gguf(tmp_path / "m.gguf", architecture, tied=tied), tmp_path), 2)


FORMS = {"split": Form(), "in one tensor": Form(split=False, fused=True)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe", "deepseek-v3"])
def test_experts_and_latent_rows_of_gguf_files(tmp_path: Path, family: str, form: str) -> None:
    model = described(write(tmp_path / "m.gguf", model_of(family), FORMS[form]), tmp_path)
    check(model, 2)
    check(model, 4, expert_parallel=True)


@pytest.mark.parametrize("world", [2, 4])
def test_columns_are_cut_inside_of_blocks(tmp_path: Path, world: int) -> None:
    """A row of an expert's down matrix is one block. Each rank reads all of it and keeps a part."""
    check(described(write(tmp_path / "m.gguf", model_of("qwen3-moe"), Form(kind=Q8_0)), tmp_path), world)


def test_a_part_must_have_the_shape_of_the_part(tmp_path: Path) -> None:
    runner = runner_of(saved(tmp_path, reference_model("qwen3")), 0, 2, False)
    whole = dict(reference_model("qwen3").state_dict())
    with pytest.raises(WeightError, match="the model wants"):
        runner.model.load_weights(whole.items())
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    runner.decoder.check_weights(shapes)
    with pytest.raises(WeightError, match=r"is \[130, 64\] in the checkpoint, the model wants \[131, 64\]"):
        runner.decoder.check_weights({**shapes, "lm_head.weight": (130, 64)})


@given(size=st.integers(0, 300), world=st.integers(1, 9))
def test_shards_cover_a_dimension_once(size: int, world: int) -> None:
    parts = [Shard(rank, world).of(size) for rank in range(world)]
    assert parts[0].first == 0
    assert parts[-1].end == size
    assert all(one.end == other.first for one, other in pairwise(parts))
    assert max(part.size for part in parts) - min(part.size for part in parts) <= 1


@given(heads=st.integers(1, 4), times=st.integers(1, 4), each=st.integers(1, 3))
def test_ranks_have_the_keys_of_their_queries(heads: int, times: int, each: int) -> None:
    """There are at most as many key-value heads as ranks."""
    world, queries = heads * times, heads * times * each
    for rank in range(world):
        own = Shard(rank, world).of(queries)
        keys = Shard(rank, world).of_heads(heads).of(heads)
        assert {query // (queries // heads) for query in range(own.first, own.end)} == set(range(keys.first, keys.end))


def described(path: Path, cache: Path) -> dict[str, Any]:
    return describe(path, cache)
