"""The header reader against the gguf package's, and against damage."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
