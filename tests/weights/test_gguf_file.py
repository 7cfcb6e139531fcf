"""The header reader against the gguf package's, and against damage."""

import hashlib
import os
import stat
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.weights.describe import describe_path
from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.gguf_file import GgufFile, GgufFiles
from tests.weights.support import F32, tiny_gguf, write_gguf

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.floats(width=32, allow_nan=False),
    TEXT,
    st.lists(TEXT, min_size=1, max_size=5),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
)
KEYS = st.text("abcdefgh_.", min_size=1, max_size=10).map(lambda name: f"general.x{name}")
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
per_test = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@per_test
@given(metadata=st.dictionaries(KEYS, VALUES, max_size=6), shapes=st.lists(SHAPES, max_size=4))
def test_reads_what_the_gguf_package_writes_and_reads(
    tmp_path: Path, metadata: dict[str, object], shapes: list[tuple[int, ...]]
) -> None:
    random = np.random.default_rng(1)
    tensors = {f"t{number}": (random.random(shape, np.float32), F32) for number, shape in enumerate(shapes)}
    path = write_gguf(tmp_path / "x.gguf", "llama", metadata, tensors)
    found, reference = GgufFile(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata == {name: field.contents() for name, field in fields.items()}
    assert list(found.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        ours = found.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.type == tensor.tensor_type
        assert ours.data.tobytes() == tensor.data.tobytes() == tensors[tensor.name][0].tobytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf").read_bytes()


@per_test
@given(data=st.data())
def test_a_truncated_file_is_refused(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    # The writer pads the end, so that the last bytes are nothing's.
    length = data.draw(st.integers(0, len(whole) - 33))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:length])
    with pytest.raises(ModelError):
        GgufFile(path)


@per_test
@given(position=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_damaged_header_gives_an_error_or_a_file_in_bounds(
    whole: bytes, tmp_path: Path, position: int, value: int
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
    try:
        file = GgufFile(path)
    except ModelError:
        return
    assert all(len(tensor.data.tobytes()) <= len(whole) for tensor in file.tensors.values())


def test_versions_and_missing_files(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(whole[:4] + (4).to_bytes(4, "little") + whole[8:])
    with pytest.raises(UnsupportedModelError, match="version 4"):
        GgufFile(path)
    with pytest.raises(ModelError, match="can't be read"):
        GgufFile(tmp_path / "missing.gguf")


def test_parts_are_one_model(tmp_path: Path) -> None:
    tensors = {name: (np.full((2, 32), number, np.float32), F32) for number, name in enumerate("ab")}
    paths = [
        write_gguf(tmp_path / f"{name}.gguf", "llama", {"split.tensors.count": 2}, {name: tensors[name]})
        for name in "ab"
    ]
    files = GgufFiles.open(paths)
    assert list(files.tensors) == ["a", "b"]
    with pytest.raises(ModelError, match="1 of 2 tensors"):
        GgufFiles.open(paths[:1])


def header(*fields: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    """A file of nothing but a header with these fields, each a name and a value as they are stored."""
    number = len(fields) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, number) + b"".join(fields) + bytes(64)


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def nested(depth: int) -> bytes:
    return array(9, 1) * depth + array(4, 0)


HUGE = 1 << 60
BAD = {
    "alignment 0": header(field(b"general.alignment", 4, struct.pack("<I", 0))),
    "alignment of another kind": header(field(b"general.alignment", 8, struct.pack("<Q", 1) + b"x")),
    "alignment that is a list": header(field(b"general.alignment", 9, array(4, 1, struct.pack("<I", 32)))),
    "alignment that is no number": header(field(b"general.alignment", 6, struct.pack("<f", float("nan")))),
    "alignment that is huge": header(field(b"general.alignment", 10, struct.pack("<Q", HUGE))),
    "nested arrays": header(field(b"a", 9, nested(100_000))),
    "many scalars": header(field(b"a", 9, array(0, HUGE))),
    "many strings": header(field(b"a", 9, array(8, HUGE))),
    "many arrays": header(field(b"a", 9, array(9, HUGE))),
    "a long string": header(field(b"a", 8, struct.pack("<Q", HUGE))),
    "a long name": header(struct.pack("<Q", HUGE)),
    "many fields": header(count=HUGE),
    "many tensors": header(tensors=HUGE),
    "an unknown kind": header(field(b"a", 77, b"")),
    "an array of an unknown kind": header(field(b"a", 9, array(77, 5))),
    "a tensor that overflows": header(
        struct.pack("<Q", 1) + b"t" + struct.pack("<IQQQIQ", 3, 1 << 32, 1 << 32, 1 << 32, 0, 0), tensors=1, count=0
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_no_header_says_is_one_line_and_takes_no_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(BAD[name])
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            GgufFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert peak < 8 << 20


def test_a_header_is_not_as_large_as_a_file_of_weights(tmp_path: Path) -> None:
    """An array that reaches over all tensors would be a list of billions."""
    path = tmp_path / "large.gguf"
    path.write_bytes(header(field(b"a", 9, array(0, 1 << 30))))
    # Takes no room on the disk.
    os.truncate(path, 2 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="more than"):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_header_is_described_or_refused(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Whatever the bytes are, there is a description or one line, and memory in proportion."""
    mutated = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        # What a number is depends on where it is: sizes, kinds and counts are among these.
        place = data.draw(st.integers(0, 3000))
        value = data.draw(st.sampled_from([0, 1, 7, 8, 9, 255, 1 << 31, HUGE, (1 << 64) - 1]))
        width = data.draw(st.sampled_from([1, 4, 8]))
        mutated[place : place + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    folder = tmp_path / hashlib.blake2b(mutated, digest_size=8).hexdigest()
    folder.mkdir(exist_ok=True)
    path = folder / "mutated.gguf"
    path.write_bytes(mutated)
    refused = ""
    tracemalloc.start()
    try:
        describe_path(path, folder / "cache")
    except ModelError as error:
        refused = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in refused
    assert peak < 64 << 20


def test_a_rebuilt_tokenizer_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("folder" if is_folder else "data")
        sync(descriptor)

    def replaced(source: str, target: Path) -> None:
        events.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    describe_path(tiny_gguf(tmp_path / "x.gguf"), tmp_path / "cache")
    assert events == ["data", "tokenizer.json", "folder", "data", "facts.json", "folder"]
