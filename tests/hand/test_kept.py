"""A second start of the hand in Rust reads the packed weights that the first start kept, and gives the same bits."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.hand.gguf_models import MIXED, WITHOUT_KERNELS
from tests.hand.test_pooling import pooling
from tests.hand.test_quantised import Numbers, told
from tests.hand.test_rust_hand import in_gguf, in_safetensors, rust, settings

Q = gguf.GGMLQuantizationType
LIMIT = 1 << 30


def model_in(folder: Path, family: str = "llama") -> dict[str, Any]:
    """A model in safetensors, with a cache folder beside it."""
    return {**in_safetensors(folder, family), "cache": str(folder / "cache")}


def kept(model: dict[str, Any]) -> dict[str, int]:
    """The files in the cache, each with its inode. A new file has another inode."""
    folder = Path(model["cache"], "packed")
    names = [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.exists() else []
    return {path.name: path.stat().st_ino for path in names}


def start(folder: Path, model: dict[str, Any], **changes: Any) -> tuple[Numbers, dict[str, Any]]:
    """Starts a hand, and returns its log-probabilities and facts. Waits until the hand has written its cache."""
    before = kept(model)
    with rust(folder, settings(model, **{"weight_cache_bytes": LIMIT, **changes})) as runner:
        found = told(runner)
        # The hand writes the file after it is ready, and first removes the old one. If it keeps nothing, the wait ends
        # after a time.
        for turn in range(200):
            now = kept(model)
            if now not in ({}, before) or (now == before and turn > (20 if before else 100)):
                break
            signal.sigtimedwait([], 0.05)
        return found, runner.facts


def check(folder: Path, model: dict[str, Any], **changes: Any) -> None:
    """A second start gives the same results and facts as a start without a cache, except for the load time."""
    plain = start(folder, {**model, "cache": str(folder / "none")}, weight_cache_bytes=0, **changes)
    first = start(folder, model, **changes)
    files = kept(model)
    assert len(files) == 1
    second = start(folder, model, **changes)
    assert kept(model) == files, "the second start reads the same file, and does not write it"
    assert plain[1] == first[1] | {"load_seconds": plain[1]["load_seconds"]}
    assert second[1] == first[1] | {"load_seconds": second[1]["load_seconds"]}
    for found, _ in (first, second):
        np.testing.assert_array_equal(found, plain[0])


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("llama", "float32", None),
        pytest.param("qwen2-tied", "float32", None, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", "float32", None, marks=pytest.mark.slow),
        pytest.param("llama", "bfloat16", "w8a8_int8", marks=pytest.mark.slow),
        ("qwen2-tied", "bfloat16", "w8a8_int8"),
        ("qwen3-moe", "bfloat16", "w8a8_int8"),
    ],
)
def test_a_second_start_computes_the_same(tmp_path: Path, family: str, dtype: str, quantization: str | None) -> None:
    check(tmp_path, model_in(tmp_path, family), dtype=dtype, quantization=quantization)


@pytest.mark.parametrize(
    ("types", "architecture", "tied"),
    [
        ({"": Q.Q8_0}, "qwen3", False),
        ({"": Q.Q4_1, **MIXED}, "qwen2", False),
        ({"": Q.Q4_0, **WITHOUT_KERNELS}, "llama", True),
    ],
    ids=["q8_0", "mixed", "without-kernels"],
)
@pytest.mark.parametrize("quantization", [pytest.param(None, marks=pytest.mark.slow), "auto"])
def test_a_second_start_from_gguf_computes_the_same(
    tmp_path: Path, types: dict[str, Any], architecture: str, tied: bool, quantization: str | None
) -> None:
    model = {**in_gguf(tmp_path, types, architecture, tied), "cache": str(tmp_path / "cache")}
    check(tmp_path, model, dtype="bfloat16", quantization=quantization)


def test_every_level_reads_the_same_order(tmp_path: Path, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_in(tmp_path, "qwen3-moe")
    changes = {"dtype": "bfloat16", "quantization": "w8a8_int8"}
    wanted, _ = start(tmp_path, model, weight_cache_bytes=0, **changes)
    with monkeypatch.context() as patch:
        patch.delenv("FOREBAY_KERNELS")
        start(tmp_path, model, **changes)
    files = kept(model)
    found, _ = start(tmp_path, model, **changes)
    assert kept(model) == files
    np.testing.assert_array_equal(found, wanted)


def test_other_weights_of_the_same_size_are_loaded(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    old, _ = start(tmp_path, model)
    path = Path(model["files"][0])
    tensors = load_file(path)
    tensors["model.norm.weight"] *= 2
    save_file(tensors, path)
    new, _ = start(tmp_path, model)
    assert not np.array_equal(new, old)
    assert len(kept(model)) == 2


def test_each_way_of_computing_has_a_file_of_its_own(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    ways = [(dtype, way) for dtype in ("float32", "bfloat16") for way in (None, "w8a8_int8")]
    for count, (dtype, quantization) in enumerate(ways, start=1):
        start(tmp_path, model, dtype=dtype, quantization=quantization)
        assert len(kept(model)) == count


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_damaged_file_is_replaced(length: int, tmp_path: Path) -> None:
    model = model_in(tmp_path)
    wanted, _ = start(tmp_path, model)
    (name,) = kept(model)
    path = Path(model["cache"], "packed", name)
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    again, _ = start(tmp_path, model)
    assert "is not used" in (tmp_path / "stderr").read_text()
    np.testing.assert_array_equal(again, wanted)
    assert path.read_bytes() == whole


def test_the_folder_keeps_to_its_limit(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    start(tmp_path, model, dtype="float32")
    folder = Path(model["cache"], "packed")
    limit = sum((folder / name).stat().st_size for name in kept(model))
    start(tmp_path, model, dtype="bfloat16", weight_cache_bytes=limit)
    (name,) = kept(model)
    assert (folder / name).stat().st_size < limit


def test_a_folder_that_can_not_be_written_to_is_no_error(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    Path(model["cache"]).touch()
    with rust(tmp_path, settings(model, weight_cache_bytes=LIMIT)) as runner:
        assert np.isfinite(told(runner)).all()
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert lines
    assert all("packed weights" in line for line in lines)


def pools(model: dict[str, Any]) -> dict[str, Any]:
    return {**model, "pooling": pooling("last", 64)}


@pytest.mark.parametrize("why", ["a limit of 0", "dummy weights", "a model that pools"])
def test_nothing_is_written_of(tmp_path: Path, why: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "a limit of 0": {"weight_cache_bytes": 0},
        "dummy weights": {"load_format": "dummy"},
    }
    model = model_in(tmp_path)
    if why == "a model that pools":
        model = pools(model)
    with rust(tmp_path, settings(model, **{"weight_cache_bytes": LIMIT, **changes.get(why, {})})):
        signal.sigtimedwait([], 0.5)
    assert not Path(model["cache"]).exists()


def test_weights_that_give_no_numbers_are_not_kept(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    path = Path(model["files"][0])
    tensors = load_file(path)
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, path)
    with pytest.raises(AssertionError, match="not finite"), rust(tmp_path, settings(model, weight_cache_bytes=LIMIT)):
        pass
    assert not kept(model)
