"""A second start reads what the first has made of the weights, and computes the same bits."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.described import described, handshake_model
from forebay.kernels import library as binding
from forebay.kernels.packing import plain_parts
from forebay.protocol import frames
from forebay.protocol.constants import ROW_NOT_FINITE
from forebay.protocol.plan import Plan
from forebay.protocol.result import StepResult
from forebay.runner import loader
from forebay.runner.runner import ModelRunner, NotFiniteError
from forebay.state.config import RunnerConfig
from forebay.weights import packed
from forebay.weights.errors import ModelError
from forebay.weights.manifest import Place
from forebay.weights.packed import PackedFile
from forebay.weights.pooling import Pooling
from forebay.worker import loop
from tests.hand.support import hf_config, reference_model, wire_config
from tests.hand.test_quantised import MIXED, WITHOUT_KERNELS, fill, rows, tiny

Q = gguf.GGMLQuantizationType
STEPS = [[(0, 0, 37), (1, 0, 1), (2, 0, 50)], [(1, 1, 1), (0, 37, 1), (2, 50, 1)]]
LIMIT = 1 << 30


def safetensors(folder: Path, family: str = "llama") -> dict[str, Any]:
    """The description of a model in safetensors, with a cache folder beside them."""
    model = reference_model(family)
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}, path)
    config = hf_config(model.config, type(model).__name__)
    return handshake_model(config, [path], cache=str(folder / "cache"))


def in_gguf(folder: Path, types: Mapping[str, Any], architecture: str, tied: bool) -> dict[str, Any]:
    path = tiny(folder / "model.gguf", dict(types), architecture, tied=tied)
    return described(path, folder / "cache")


class Start:
    """A hand's start: its runner, and what it told of its progress."""

    def __init__(self, model: dict[str, Any], **changes: Any) -> None:
        settings = {"load_format": "auto", "page_size": 16, "weight_cache_bytes": LIMIT, **changes}
        self.runner = ModelRunner(RunnerConfig.from_dict({**wire_config({}, **settings), "model": model}))
        self.progress: list[tuple[int, int]] = []
        self.runner.load(lambda done, total: self.progress.append((done, total)))
        self.runner.warm_up()
        self.thread = self.runner.keep_weights()
        if self.thread is not None:
            self.thread.join(60)
            assert not self.thread.is_alive()

    def logits(self) -> list[torch.Tensor]:
        fill(self.runner)
        return [self.runner._compute.logits(rows(step)) for step in STEPS]


def folder_of(model: dict[str, Any]) -> Path:
    return Path(model["cache"], "packed")


def kept(model: dict[str, Any]) -> list[Path]:
    """The files in the cache."""
    folder = folder_of(model)
    return sorted(path for path in folder.iterdir() if path.name != ".lock") if folder.exists() else []


@pytest.fixture
def no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it has every look at a checkpoint raise."""

    def fail(*_: object) -> None:
        raise AssertionError("the checkpoint was looked at")

    def forbid() -> None:
        monkeypatch.setattr(loader, "iter_weights", fail)
        monkeypatch.setattr(Place, "read", fail)
        monkeypatch.setattr(Place, "blocks", fail)

    return forbid


def check(model: dict[str, Any], forbid: Callable[[], None], **changes: Any) -> None:
    """A second start is as a start without a cache, but for the time that it takes."""
    plain = Start(model, weight_cache_bytes=0, **changes)
    first = Start(model, **changes)
    assert first.thread is not None
    (written,) = kept(model)
    os.utime(written, ns=(1000, 1000))
    forbid()
    second = Start(model, **changes)
    assert second.thread is None
    assert kept(model) == [written]
    assert written.stat().st_mtime_ns > 1000
    assert plain.runner.facts() == first.runner.facts() == second.runner.facts()
    assert plain.progress[-1] == second.progress[-1]
    assert [total for _, total in second.progress] == [plain.progress[-1][1]] * len(second.progress)
    for wanted, *found in zip(plain.logits(), first.logits(), second.logits(), strict=True):
        assert wanted.isfinite().all()
        assert all(torch.equal(wanted, each) for each in found)


@pytest.mark.parametrize("family", ["llama", "llama-untied-biases", "qwen2-tied", "qwen3"])
@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_start_computes_the_same(
    family: str, quantization: str | None, dtype: str, tmp_path: Path, no_checkpoint: Callable[[], None]
) -> None:
    check(safetensors(tmp_path, family), no_checkpoint, dtype=dtype, quantization=quantization)


@pytest.mark.parametrize(
    ("types", "architecture", "tied"),
    [
        ({"": Q.Q4_1, "token_embd": Q.Q8_0}, "llama", True),
        ({"": Q.Q8_0}, "qwen3", False),
        ({"": Q.Q4_1, **MIXED}, "qwen2", False),
        ({"": Q.Q4_0, **WITHOUT_KERNELS}, "llama", True),
    ],
)
@pytest.mark.parametrize("quantization", [None, "auto", "gguf"])
def test_a_second_start_from_gguf_computes_the_same(
    types: dict[str, Any],
    architecture: str,
    tied: bool,
    quantization: str | None,
    tmp_path: Path,
    no_checkpoint: Callable[[], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    check(in_gguf(tmp_path, types, architecture, tied), no_checkpoint, dtype="bfloat16", quantization=quantization)
    told = capfd.readouterr().err.splitlines()
    assert told == ([told[0]] * 3 if quantization else [])


@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_level_reads_the_same_order(
    dtype: str, quantization: str | None, instructions: str, tmp_path: Path
) -> None:
    model = safetensors(tmp_path)
    changes = {"dtype": dtype, "quantization": quantization}
    wanted = Start(model, weight_cache_bytes=0, **changes)
    at_this_level = wanted.logits()
    binding.library().fb_limit(None)
    assert Start(model, **changes).thread is not None
    binding.library().fb_limit(instructions.encode())
    second = Start(model, **changes)
    assert second.thread is None
    assert all(torch.equal(*pair) for pair in zip(second.logits(), at_this_level, strict=True))


def test_other_weights_of_the_same_size_are_loaded(tmp_path: Path) -> None:
    model = safetensors(tmp_path)
    old = Start(model).logits()
    path = Path(model["files"][0])
    tensors = load_file(path)
    tensors["model.norm.weight"] *= 2
    save_file(tensors, path)
    start = Start(model)
    assert start.thread is not None
    new = start.logits()
    assert not torch.equal(new[0], old[0])
    assert torch.equal(new[0], Start(model, weight_cache_bytes=0).logits()[0])
    assert len(kept(model)) == 2


def test_each_way_of_computing_has_a_file_of_its_own(tmp_path: Path) -> None:
    model = safetensors(tmp_path)
    ways = [(dtype, way) for dtype in ("float32", "bfloat16") for way in (None, "w8a8_int8")]
    for count, (dtype, quantization) in enumerate(ways, start=1):
        assert Start(model, dtype=dtype, quantization=quantization).thread is not None
        assert len(kept(model)) == count
    other = {**model, "config": {**model["config"], "rms_norm_eps": 0.5}}
    assert Start(other).thread is not None


def test_other_kernels_pack_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = safetensors(tmp_path)
    Start(model)
    monkeypatch.setattr("forebay.compute.choose.build", lambda: "of tomorrow")
    assert Start(model).thread is not None


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_damaged_file_is_replaced(length: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = safetensors(tmp_path)
    wanted = Start(model).logits()
    (path,) = kept(model)
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    again = Start(model)
    assert "is not used" in capfd.readouterr().err
    assert torch.equal(again.logits()[0], wanted[0])
    assert again.thread is not None
    assert path.read_bytes() == whole
    assert Start(model).thread is None


def test_a_file_that_fails_while_it_is_read_is_loaded_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    model = in_gguf(tmp_path, MIXED | {"": Q.Q4_0}, "llama", tied=True)
    wanted = Start(model, quantization="gguf")
    monkeypatch.setattr(packed, "_read_all", fail)
    found = Start(model, quantization="gguf")
    assert "Input/output error" in capfd.readouterr().err
    assert found.runner.facts() == wanted.runner.facts()
    assert all(torch.equal(*pair) for pair in zip(found.logits(), wanted.logits(), strict=True))


def test_what_is_read_has_no_memory_beside_it(tmp_path: Path) -> None:
    model = safetensors(tmp_path)
    Start(model)
    config = wire_config({}, load_format="auto", weight_cache_bytes=LIMIT)
    runner = ModelRunner(RunnerConfig.from_dict({**config, "model": model}))
    assert all(plain_parts(block)[1].down.weight.is_meta for block in runner.decoder.blocks)
    assert not runner.decoder.embedding.is_meta


def test_the_folder_keeps_to_its_limit(tmp_path: Path) -> None:
    model = safetensors(tmp_path)
    Start(model, dtype="float32")
    limit = sum(path.stat().st_size for path in kept(model))
    Start(model, dtype="bfloat16", weight_cache_bytes=limit)
    (path,) = kept(model)
    assert path.stat().st_size < limit
    assert Start(model, dtype="bfloat16", weight_cache_bytes=limit).thread is None


def test_a_folder_that_can_not_be_written_to_is_no_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = safetensors(tmp_path)
    Path(model["cache"]).touch()
    assert Start(model).logits()[0].isfinite().all()
    told = capfd.readouterr().err.splitlines()
    assert told
    assert all("packed weights" in line for line in told)


def nothing(model: dict[str, Any], **changes: Any) -> None:
    assert Start(model, **changes).thread is None
    assert not Path(model["cache"]).exists()


def test_with_a_limit_of_0_nothing_is_written(tmp_path: Path) -> None:
    nothing(safetensors(tmp_path), weight_cache_bytes=0)


def test_dummy_weights_are_not_written(tmp_path: Path) -> None:
    nothing(safetensors(tmp_path), load_format="dummy")


def test_what_torch_computes_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KERNELS", "torch")
    nothing(safetensors(tmp_path))


def test_a_model_that_pools_is_neither_written_nor_read(tmp_path: Path) -> None:
    model = safetensors(tmp_path)
    pooling = Pooling("embed", "last", 64, normalize=True, function="identity", max_length=None)
    nothing({**model, "pooling": pooling.to_dict()})
    Start(model)
    (written,) = kept(model)
    os.utime(written, ns=(1000, 1000))
    assert Start({**model, "pooling": pooling.to_dict()}).thread is None
    assert written.stat().st_mtime_ns == 1000


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    model = safetensors(tmp_path)
    start = Start({name: value for name, value in model.items() if name != "cache"})
    assert start.thread is None


def test_files_that_are_not_there_are_an_error_as_ever(tmp_path: Path) -> None:
    model = safetensors(tmp_path)
    with pytest.raises(ModelError, match="nothing can't be read: No such file"):
        Start({**model, "files": [str(tmp_path / "nothing")]})


def test_only_the_thread_that_writes_has_a_low_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found: list[int] = []
    monkeypatch.setattr(PackedFile, "write", lambda *_: found.append(priority()))
    before = priority()
    Start(safetensors(tmp_path))
    assert found == [19]
    assert priority() == before


def test_a_hand_is_ready_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    class Connection:
        def send(self, data: bytes) -> None:
            events.append(frames.Header.decode(data[: frames.HEADER_BYTES]).kind)

    monkeypatch.setattr(ModelRunner, "keep_weights", lambda _: events.append("keeps"))
    config = wire_config({}, load_format="auto", weight_cache_bytes=LIMIT)
    try:
        loop._load(Connection(), {**config, "model": safetensors(tmp_path)})  # type: ignore[arg-type]
    finally:
        gc.unfreeze()
    assert events[-2:] == [frames.Kind.READY, "keeps"]


def test_kept_weights_that_give_no_numbers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = safetensors(tmp_path)
    Start(model)
    assert len(kept(model)) == 1
    step = ModelRunner.step

    def not_finite(runner: ModelRunner, plan: Plan) -> StepResult:
        result = step(runner, plan)
        result.row_errors[:] = ROW_NOT_FINITE
        return result

    monkeypatch.setattr(ModelRunner, "step", not_finite)
    with pytest.raises(NotFiniteError, match="kept by an earlier start and are removed"):
        Start(model)
    assert not kept(model)
    with pytest.raises(NotFiniteError, match=r"not finite$"):
        Start(model)
    assert not kept(model)


def test_a_matrix_that_is_nowhere_is_an_error(tmp_path: Path) -> None:
    """And no address for the kernels to read from."""
    model = safetensors(tmp_path)
    Start(model)
    config = wire_config({}, load_format="auto", weight_cache_bytes=LIMIT)
    runner = ModelRunner(RunnerConfig.from_dict({**config, "model": model}))
    runner.load(lambda done, total: None)
    del runner.model.params.packed["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight is neither loaded nor packed"):
        runner.warm_up()
