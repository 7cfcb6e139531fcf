"""Files of packed weights: what is written is read, what is damaged is not, and a folder keeps to its limit."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from forebay.weights import packed
from forebay.weights.packed import PackedFile, content_key

LIMIT = 1 << 30
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)
Tensors = dict[str, torch.Tensor]


def ignore(done: int, total: int) -> None:
    pass


def some(count: int = 3, size: int = 100) -> Tensors:
    generator = torch.Generator().manual_seed(count)
    return {f"weight {number}": torch.randn(size, generator=generator) for number in range(count)}


def write(folder: Path, key: str, tensors: Tensors, limit: int = LIMIT) -> Path:
    file = PackedFile(folder, key, limit)
    file.write(tensors, {"note": "of " + key})
    return file.path


def read(folder: Path, key: str, into: Tensors | None = None) -> Tensors | None:
    return PackedFile(folder, key, LIMIT).read(into or {}, ignore)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same bits, whatever they mean."""
    return left.dtype == right.dtype and torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


@st.composite
def tensors(draw: st.DrawFn) -> Tensors:
    names = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=6))
    made: Tensors = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        made[name] = torch.randint(0, 200, shape).to(draw(st.sampled_from(DTYPES)))
    return made


@settings(deadline=None, max_examples=40)
@given(everything=tensors(), chunk=st.integers(1, 300), data=st.data())
def test_what_is_written_is_read(everything: Tensors, chunk: int, data: st.DataObject) -> None:
    given_names = data.draw(st.sets(st.sampled_from(sorted(everything)))) if everything else set()
    into = {name: torch.zeros_like(everything[name]) for name in given_names}
    reports: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_CHUNK", chunk)
        path = write(Path(name), "key", everything)
        file = PackedFile(Path(name), "key", LIMIT)
        found = file.read(into, lambda *report: reports.append(report))
        assert found is not None
        assert file.notes == {"note": "of key"}
        assert found.keys() == everything.keys() - given_names
        assert all(same(tensor, everything[name]) for name, tensor in (found | into).items())
        foreign = load_file(path)
        assert foreign.keys() == everything.keys()
        assert all(same(tensor, everything[name]) for name, tensor in foreign.items())
    size = sum(tensor.nbytes for tensor in everything.values())
    assert [total for _, total in reports] == [size] * len(reports)
    assert [done for done, _ in reports][-1:] == ([size] if size else [])


def test_a_file_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = PackedFile(tmp_path / "packed", "key", LIMIT)
    assert file.notes is None
    assert file.read({}, ignore) is None
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "packed").exists()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"?")


def flip(part: float) -> Callable[[Path], None]:
    """Changes one bit of a byte in this part of the header."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(part * (8 + int.from_bytes(data[:8], "little")))] ^= 4
        path.write_bytes(data)

    return damage


def of_another_key(path: Path) -> None:
    shutil.copy(write(path.parent, "another", some()), path)


DAMAGES = [cut, cut_to_nothing, lengthen, *(flip(place / 40) for place in range(40)), of_another_key]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_used_and_gets_replaced(
    damage: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "key", some())
    damage(path)
    assert capfd.readouterr().err == ""
    assert read(tmp_path, "key") is None
    (line,) = capfd.readouterr().err.splitlines()
    assert str(path) in line
    assert "is not used: " in line
    write(tmp_path, "key", some())
    capfd.readouterr()
    assert read(tmp_path, "key") is not None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("place", [0, 137, 399, 400, 801, 1199])
@pytest.mark.parametrize("bits", [1, 255])
def test_wrong_data_is_not_used_and_removed(
    place: int, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packed, "_CHUNK", 128)
    path = write(tmp_path, "key", some())
    data = bytearray(path.read_bytes())
    data[-1200 + place] ^= bits
    path.write_bytes(data)
    file = PackedFile(tmp_path, "key", LIMIT)
    assert file.notes, "its header is whole"
    assert file.read({}, ignore) is None
    (line,) = capfd.readouterr().err.splitlines()
    assert f"weight {place // 400} is not what was written" in line
    assert not path.exists()
    assert not PackedFile(tmp_path, "key", LIMIT).notes
    write(tmp_path, "key", some())
    assert read(tmp_path, "key") is not None


def test_a_file_that_is_distrusted_goes(tmp_path: Path) -> None:
    path = write(tmp_path, "key", some())
    file = PackedFile(tmp_path, "key", LIMIT)
    file.remove()
    assert file.notes is None
    assert file.read({}, ignore) is None
    assert not path.exists()
    file.remove()


def test_the_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "packed"
    write(folder, "key", some())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o077


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_file_that_goes_away_while_it_is_read(
    damage: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "key", some())
    file = PackedFile(tmp_path, "key", LIMIT)
    damage(path)
    assert file.read({}, ignore) is None
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "wanted", [torch.zeros(99), torch.zeros(100, dtype=torch.bfloat16), torch.zeros(100, 1), torch.zeros(0)]
)
def test_a_tensor_of_another_form_is_not_filled(
    wanted: torch.Tensor, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "key", some())
    assert read(tmp_path, "key", {"weight 1": wanted}) is None
    assert read(tmp_path, "key", {"weight 7": torch.zeros(100)}) is None
    assert "it lacks weight 1" in capfd.readouterr().err
    assert not wanted.any()


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    size = write(tmp_path, "a", some()).stat().st_size
    for number, key in enumerate("abcd"):
        os.utime(write(tmp_path, key, some(), limit=4 * size), ns=(number, number))
    assert read(tmp_path, "a") is not None
    write(tmp_path, "e", some(), limit=4 * size)
    assert names(tmp_path) == set("acde")
    # Larger than one of them: two go.
    write(tmp_path, "f", some(4), limit=4 * size)
    assert names(tmp_path) == set("aef")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * size


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_a_file_larger_than_the_limit_is_not_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    size = write(tmp_path, "a", some()).stat().st_size
    write(tmp_path, "b", some(), limit=size - 1)
    assert names(tmp_path) == {"a"}
    assert "is not written" in capfd.readouterr().err
    write(tmp_path, "b", some(), limit=size)
    assert names(tmp_path) == {"b"}


def test_a_disk_that_is_nearly_full_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    size = write(tmp_path, "a", some()).stat().st_size
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2 * size - 1))
    write(tmp_path, "b", some())
    assert names(tmp_path) == {"a"}
    assert "and the disk has" in capfd.readouterr().err
    # With what makes room for it there is enough.
    write(tmp_path, "b", some(), limit=size)
    assert names(tmp_path) == {"b"}


def test_a_folder_that_can_not_be_written_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    write(tmp_path / "file", "key", some())
    (line,) = capfd.readouterr().err.splitlines()
    assert "can't be written" in line


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    write(tmp_path, "key", some())
    assert names(tmp_path) == set()
    assert "No space left" in capfd.readouterr().err


def test_what_a_dead_writer_left_goes(tmp_path: Path) -> None:
    (tmp_path / ".key.half").write_bytes(b"12345")
    write(tmp_path, "key", some())
    assert names(tmp_path) == {"key"}


def test_of_two_writers_the_second_finds_the_work_done(tmp_path: Path) -> None:
    made = write(tmp_path / "elsewhere", "key", some())
    folder = tmp_path / "packed"
    folder.mkdir()
    file = PackedFile(folder, "key", LIMIT)
    with (folder / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=file.write, args=(some(), {}))
        waiting.start()
        shutil.copy(made, file.path)
        os.utime(file.path, ns=(1000, 1000))
    waiting.join(60)
    assert not waiting.is_alive()
    assert file.path.stat().st_mtime_ns == 1000


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of 3 MiB and 5 KiB, from long ago."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for path, size in zip(paths, (3 << 20, 5 << 10), strict=True):
        path.write_bytes(os.urandom(size))
        os.utime(path, ns=(1000, 1000))
    return paths


def key(files: list[Path], **facts: object) -> str:
    return content_key([str(path) for path in files], facts)


def test_a_key_is_of_content_and_not_of_names(files: list[Path]) -> None:
    old = key(files, dtype="a", config={"x": 1, "y": 2})
    files[0] = files[0].rename(files[0].with_name("other"))
    assert key(files, config={"y": 2, "x": 1}, dtype="a") == old
    assert key(files, dtype="b", config={"x": 1, "y": 2}) != old
    assert key(files, dtype="a", config={"x": 1, "y": 3}) != old
    assert key(files[::-1], dtype="a", config={"x": 1, "y": 2}) != old


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("place", [0.0, 0.25, 0.5, 1.0])
def test_a_key_changes_with_the_files(files: list[Path], which: int, place: float) -> None:
    old = key(files)
    path = files[which]
    data = bytearray(path.read_bytes())
    data[min(int(place * len(data)), len(data) - 1)] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1000, 1000))
    assert key(files) != old


def test_a_key_changes_with_size_and_time(files: list[Path]) -> None:
    found = {key(files)}
    os.utime(files[1], ns=(1000, 1001))
    found.add(key(files))
    files[1].write_bytes(files[1].read_bytes() + b"\0")
    os.utime(files[1], ns=(1000, 1000))
    found.add(key(files))
    assert len(found) == 3


def test_files_that_can_not_be_read_have_no_key(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        key([tmp_path / "nothing"])
