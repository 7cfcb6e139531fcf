"""Damaged or hostile GGUF files: each gives a description or one line of error, and memory stays bounded."""

import hashlib
import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.described import refused
from tests.weights.support import tiny_gguf

MUTATIONS = int(os.environ.get("FOREBAY_MUTATIONS", "20"))
MEMORY = 128 << 20
"""The largest memory of a description, including the program itself."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf").read_bytes()


def test_versions_and_cut_files(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(whole[:4] + (4).to_bytes(4, "little") + whole[8:])
    assert "version 4" in refused(path, tmp_path)
    # The writer pads the end of the file, so the last bytes belong to no tensor.
    for length in (0, 3, 23, 24, 1000, len(whole) // 2, len(whole) - 33):
        path.write_bytes(whole[:length])
        assert refused(path, tmp_path)
    path.write_bytes(whole)
    assert not refused(path, tmp_path)


def header(*fields: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    """A file that has only a header with these encoded fields."""
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
    assert refused(path, tmp_path, MEMORY)


def test_a_header_is_not_as_large_as_a_file_of_weights(tmp_path: Path) -> None:
    """The array spans the whole file, and as a list it would have a billion elements."""
    path = tmp_path / "large.gguf"
    path.write_bytes(header(field(b"a", 9, array(0, 1 << 30))))
    # The file is sparse, and takes no space on the disk.
    os.truncate(path, 2 << 30)
    assert "more than" in refused(path, tmp_path, MEMORY)


@settings(deadline=None, max_examples=MUTATIONS, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_header_is_described_or_refused(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """For any bytes there is a description or one line of error, and memory stays bounded."""
    mutated = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        # A random offset may hit any field of the header, such as a size, a kind or a count.
        place = data.draw(st.integers(0, 3000))
        value = data.draw(st.sampled_from([0, 1, 7, 8, 9, 255, 1 << 31, HUGE, (1 << 64) - 1]))
        width = data.draw(st.sampled_from([1, 4, 8]))
        mutated[place : place + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    folder = tmp_path / hashlib.blake2b(mutated, digest_size=8).hexdigest()
    folder.mkdir(exist_ok=True)
    path = folder / "mutated.gguf"
    path.write_bytes(mutated)
    refused(path, folder / "cache", MEMORY)
