"""The codec: golden frames that both languages check, random frames encoded and decoded, and every kind of damage."""

import json
import socket
import struct
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forebay.protocol import frames
from forebay.protocol.columns import PLAN
from forebay.protocol.connection import RING, Connection, Ring
from forebay.protocol.constants import FLAG_SAMPLE
from forebay.protocol.frames import Frame, Header, Kind, WireError
from forebay.protocol.masks import EVERYTHING, INLINE, Masks
from forebay.protocol.place import PlanAt
from forebay.protocol.plan import LAST_ID, Plan
from forebay.protocol.result import StepResult
from tests.hand.support import PlanBuilder, Sampling
from tests.wire.write_fixtures import FLOAT_COLUMNS, FOLDER, NAMES, columns, descriptions, encode

RECORDS: dict[Kind, Any] = {Kind.PLAN: Plan, Kind.RESULT: StepResult, Kind.MASKS: Masks}
FIXTURES = {fixture["name"]: fixture for fixture in descriptions()}


def frame_of(data: bytes) -> Frame:
    return Frame.decode(Header.decode(data[: frames.HEADER_BYTES]), bytearray(data[frames.HEADER_BYTES :]))


@pytest.mark.parametrize("fixture", FIXTURES.values(), ids=FIXTURES)
def test_description_gives_the_golden_bytes(fixture: dict[str, Any]) -> None:
    assert encode(fixture) == (FOLDER / fixture["file"]).read_bytes()


@pytest.mark.parametrize("fixture", FIXTURES.values(), ids=FIXTURES)
def test_golden_bytes_are_read_as_described(fixture: dict[str, Any]) -> None:
    data = (FOLDER / fixture["file"]).read_bytes()
    frame = frame_of(data)
    assert frame.kind.name.lower() == fixture["kind"]
    assert frame.step == fixture["step"]
    if frame.kind == Kind.PLAN_AT:
        place = PlanAt.decode(frame)
        assert [place.offset, place.words] == fixture["columns"]["place"]
        assert place.encode() == data
    elif "columns" in fixture:
        record: Plan | StepResult | Masks = RECORDS[frame.kind].decode(frame)
        assert record.step == fixture["step"]
        there = columns(fixture)
        for name in NAMES[frame.kind].values():
            values = getattr(record, name)
            assert values.ravel().tolist() == (there[name].tolist() if name in there else [])
            assert values.dtype == (np.float32 if name in FLOAT_COLUMNS else np.int32)
        assert record.encode() == data
    elif fixture["json"]:
        assert frame.json() == json.loads(fixture["json"])
        assert frames.encode_json(frame.kind, frame.json()) == data
    else:
        assert frame.places == {}


def test_every_file_is_described() -> None:
    assert {path.name for path in FOLDER.glob("*.bin")} == {fixture["file"] for fixture in FIXTURES.values()}


INT32 = st.integers(-(2**31), 2**31 - 1)
COUNT = st.integers(0, 2**31 - 1)
SAMPLING = st.builds(
    Sampling,
    temperature=st.floats(0, 2, width=32),
    top_p=st.floats(0, 1, width=32),
    top_k=INT32,
    seed=st.integers(0, 2**64 - 1),
    min_total=INT32,
    logprobs=st.integers(-1, 20),
    stop_ids=st.lists(INT32, max_size=3).map(tuple),
    allowed=st.lists(INT32, max_size=3).map(tuple),
    bias=st.lists(st.tuples(INT32, st.floats(-100, 100, width=32)), max_size=3).map(tuple),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    builder = PlanBuilder(draw(st.integers(0, 2**64 - 1)))
    for _ in range(draw(st.integers(0, 4))):
        slot, tokens = draw(INT32), draw(st.lists(INT32, max_size=5))
        arena, embeds = draw(st.sampled_from([-1, 0, 4096])), draw(st.sampled_from([-1, 0, 64]))
        builder.slot(slot, tokens, draw(SAMPLING), draw(INT32), arena, embeds)
        if draw(st.booleans()):
            builder.segments.append((slot, draw(st.integers(1, 2**31 - 1))))
    builder.page_writes += draw(st.lists(st.tuples(INT32, INT32, INT32), max_size=4))
    builder.rows += draw(st.lists(st.tuples(INT32, INT32, INT32, st.sampled_from([0, 1, 2, 5])), max_size=4))
    if draw(st.booleans()):
        sampling = sum(flags & FLAG_SAMPLE for *_, flags in builder.rows)
        builder.row_tokens = draw(st.lists(st.integers(1, 2**31 - 1), min_size=sampling, max_size=sampling))
    for _ in range(draw(st.integers(0, 2))):
        grid, pages = (draw(COUNT), draw(COUNT)), draw(st.lists(COUNT, max_size=3))
        if draw(st.booleans()):
            builder.image(draw(COUNT), (draw(COUNT), draw(COUNT)), grid, draw(st.sampled_from([-1, 0, 4096])), pages)
        else:
            builder.image_span(draw(COUNT), draw(COUNT), grid, draw(COUNT), pages)
    for slot, start, length, _ in builder.rows:
        if 0 <= start < 2**30 and 1 <= length < 2**30 and draw(st.booleans()):
            count = draw(st.integers(1, length))
            first = draw(st.integers(start + 1, start + length + 1 - count))
            builder.prompt_logprobs.append((slot, first, count, draw(st.integers(0, 20))))
    return builder.build()


@given(plans())
def test_any_plan_there_and_back(plan: Plan) -> None:
    decoded = Plan.decode(frame_of(plan.encode()))
    assert decoded.step == plan.step
    for name in (column.name for column in PLAN):
        np.testing.assert_array_equal(getattr(decoded, name), getattr(plan, name))
        assert getattr(decoded, name).shape == getattr(plan, name).shape
    assert decoded.encode() == plan.encode()


@given(plans(), st.data())
def test_a_plan_whose_columns_disagree_is_refused(plan: Plan, data: st.DataObject) -> None:
    name = data.draw(
        st.sampled_from(
            ["slot_floats", "tokens", "stop_ids", "bias_ids", "bias_values", "rows", "row_tokens", "segments", "embeds"]
        )
    )
    column = getattr(plan, name).ravel()
    wrong = 0 if name == "row_tokens" else 1
    setattr(plan, name, np.append(column, column.dtype.type(wrong)))
    with pytest.raises(WireError, match="plan"):
        Plan.decode(frame_of(plan.encode()))


@pytest.mark.parametrize("flags", [-1, 3, 4, 6, 7, 8, 2**30])
def test_flags_that_are_not_known_are_refused(flags: int) -> None:
    builder = PlanBuilder()
    builder.rows.append((0, 0, 1, flags))
    with pytest.raises(WireError, match="flags"):
        builder.build()


VOCABULARY = 70
WIDTH = 3
MASK = hnp.arrays(np.uint32, WIDTH)


@given(st.lists(st.one_of(st.none(), st.tuples(st.booleans(), MASK)), max_size=6))
def test_masks_are_read_from_the_frame_and_from_the_arena(rows: list[tuple[bool, Any] | None]) -> None:
    arena = np.zeros(256, np.uint8)
    offsets, words = [], []
    for at, row in enumerate(rows):
        if row is None:
            offsets.append(EVERYTHING)
        elif row[0]:
            offsets.append(INLINE)
            words.append(row[1])
        else:
            offsets.append(40 * at)
            arena[40 * at : 40 * at + 4 * WIDTH] = row[1].view(np.uint8)
    inline = np.concatenate(words).view(np.int32) if words else np.zeros(0, np.int32)
    masks = Masks.decode(frame_of(Masks(9, np.array(offsets, np.int32), inline).encode()))
    assert masks.step == 9
    for read, row in zip(masks.read(arena, VOCABULARY), rows, strict=True):
        if row is None:
            assert read is None
        else:
            np.testing.assert_array_equal(read, row[1])


@pytest.mark.parametrize(
    ("offsets", "words"),
    [([-3], 0), ([-2], 2), ([-2, -2], WIDTH), ([0], 1), ([248], 0), ([2], 0), ([2**31 - 4], 0)],
)
def test_masks_that_are_not_there_are_refused(offsets: list[int], words: int) -> None:
    masks = Masks(1, np.array(offsets, np.int32), np.zeros(words, np.int32))
    with pytest.raises(WireError, match="mask"):
        Masks.decode(frame_of(masks.encode())).read(np.zeros(256, np.uint8), VOCABULARY)


@given(hnp.arrays(np.int32, st.integers(0, 5)), st.data())
def test_any_frame_there_and_back(first: frames.Int32s, data: st.DataObject) -> None:
    parts = [first, *data.draw(st.lists(hnp.arrays(np.int32, st.integers(0, 5)), max_size=9))]
    frame = frame_of(frames.encode(Kind.PLAN, 3, parts))
    assert set(frame.places) == {id_ for id_, part in enumerate(parts, 1) if part.size}, "empty columns are left out"
    assert [column.tolist() for column in frame.known(len(parts))] == [part.tolist() for part in parts]
    if frame.places:
        with pytest.raises(WireError, match=f"unknown column {max(frame.places)}"):
            frame.known(max(frame.places) - 1)


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.none(), st.lists(st.booleans()))))
def test_any_object_there_and_back(value: dict[str, Any]) -> None:
    data = frames.encode_json(Kind.HELLO, value)
    assert len(data) % 4 == 0
    assert frame_of(data).json() == value


def patched(data: bytes, at: int, form: str, value: int | bytes) -> bytes:
    damaged = bytearray(data)
    struct.pack_into(form, damaged, at, value)
    return bytes(damaged)


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "4s", b"FBAX", "magic"),
        (4, "<H", 1, "protocol version 1, but this hand speaks 5"),
        (6, "<H", 99, "kind 99"),
        (20, "<I", frames.MAX_WORDS + 1, "over the limit"),
        (16, "<I", 1000, "more columns than words"),
        (28, "<I", 5, "column lengths"),
        (28, "<I", 2**32 - 1, "column lengths"),
        (24, "<I", 0, "order of columns"),
        (32, "<I", 1, "order of columns"),
        (20, "<I", 11, "word count"),
    ],
)
def test_damage_is_named(at: int, form: str, value: int | bytes, message: str) -> None:
    data = (FOLDER / "result_tokens.bin").read_bytes()
    with pytest.raises(WireError, match=message):
        frame_of(patched(data, at, form, value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 2, 3]}, "disagree"),
        ({"logprob_counts": [1]}, "disagree"),
        ({"logprob_ids": [1]}, "disagree"),
        ({"logprob_counts": [-1, 1]}, "negative"),
        ({"timing": [1]}, "disagree"),
        ({"token_counts": [1]}, "disagree"),
        ({"token_counts": [2, 0]}, "disagree"),
        ({"token_counts": [1, 1, 1]}, "disagree"),
        ({"prompt_ranks": [0], "prompt_ids": [3], "prompt_values": [0]}, "disagree"),
        ({"prompt_ranks": [1], "prompt_ids": [3, 4], "prompt_values": [0]}, "disagree"),
        ({"prompt_ranks": [1, 1], "prompt_ids": [3], "prompt_values": [0]}, "disagree"),
        ({"prompt_ids": [3], "prompt_values": [0]}, "disagree"),
    ],
)
def test_a_result_whose_columns_disagree_is_refused(change: dict[str, list[int]], message: str) -> None:
    result = StepResult(tokens=np.zeros(2, np.int32), row_errors=np.zeros(2, np.int32))
    for name, values in change.items():
        setattr(result, name, np.array(values, np.int32))
    with pytest.raises(WireError, match=message):
        StepResult.decode(frame_of(result.encode()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [[0, 0, 1, 4]]}, "unknown row flags"),
        ({"rows": [[0, 0, 1, 3]]}, "unknown row flags"),
        ({"rows": [[0, 0, 1, -1]]}, "unknown row flags"),
        ({"rows": [[0, 0, 1, 1]], "row_tokens": [0]}, "disagree"),
        ({"rows": [[0, 0, 1, 1]], "row_tokens": [1, 1]}, "disagree"),
        ({"embeds": [[0, -64]]}, "disagree"),
        ({"embeds": [[1, 64]]}, "disagree"),
        ({"segments": [[0, 4], [0, 4]]}, "disagree"),
        ({"allowed_counts": [[0, 0]]}, "disagree"),
        ({"allowed_counts": [[0, 2]], "allowed_ids": [7]}, "disagree"),
        ({"allowed_ids": [7]}, "disagree"),
        ({"images": [[0, 0, 1, 2, 2, 0]]}, "record length"),
        ({"images": [[0, 0, 1, 2, 2, 0, 1]]}, "disagree"),
        ({"images": [[0, 0, 1, 2, 2, -2, 0]]}, "disagree"),
        ({"images": [[-1, 0, 1, 2, 2, 0, 0]]}, "disagree"),
        ({"image_pages": [3]}, "disagree"),
        ({"images": [[0, 0, 1, 2, 2, 0, 1]], "image_pages": [-1]}, "disagree"),
        ({"image_spans": [[0, 3, 2, 2, 3, 1]]}, "disagree"),
        ({"image_spans": [[0, 3, 2, 2, -1, 0]]}, "disagree"),
        ({"image_spans": [[0, 3, 2, 2, 3, 2], [1, 3, 2, 2, 3, -1]], "span_pages": [4]}, "disagree"),
        ({"span_pages": [3]}, "disagree"),
        ({"prompt_logprobs": [[0, 1, 1]]}, "record length"),
        ({"rows": [[0, 0, 2, 1]], "prompt_logprobs": [[0, 0, 1, 0]]}, "disagree"),
        ({"rows": [[0, 0, 2, 1]], "prompt_logprobs": [[0, 1, 3, 0]]}, "disagree"),
        ({"rows": [[0, 0, 2, 1]], "prompt_logprobs": [[0, 1, 0, 0]]}, "disagree"),
        ({"rows": [[0, 0, 2, 1]], "prompt_logprobs": [[0, 1, 1, -1]]}, "disagree"),
        ({"rows": [[0, 0, 2, 1]], "prompt_logprobs": [[1, 1, 1, 0]]}, "disagree"),
        ({"rows": [[0, 0, 2, 1]], "prompt_logprobs": [[0, 1, 1, 0], [0, 2, 1, 0]]}, "disagree"),
        ({"state_loads": [[0, 4], [0, 5]]}, "disagree"),
        ({"state_loads": [[-1, 4]]}, "disagree"),
        ({"state_saves": [[0, 4], [1, 4]]}, "disagree"),
        ({"state_saves": [[0, -1]]}, "disagree"),
    ],
)
def test_a_plan_that_says_what_is_not_known_is_refused(change: dict[str, Any], message: str) -> None:
    builder = PlanBuilder()
    builder.slot(0, [1, 2])
    plan = builder.build()
    for name, values in change.items():
        setattr(plan, name, np.array(values, np.int32))
    with pytest.raises(WireError, match=message):
        Plan.decode(frame_of(plan.encode()))


def test_the_wrong_frame_is_refused() -> None:
    with pytest.raises(WireError, match="not a result"):
        StepResult.decode(frame_of(Plan().encode()))
    with pytest.raises(WireError, match="not a plan"):
        Plan.decode(frame_of(StepResult().encode()))
    for unknown in {LAST_ID + 1, *range(1, LAST_ID)} - {column.id for column in PLAN}:
        with pytest.raises(WireError, match=f"unknown column {unknown}"):
            Plan.decode(frame_of(frames.encode_columns(Kind.PLAN, 0, [(unknown, np.zeros(1, np.int32))])))
    with pytest.raises(WireError, match="JSON"):
        frame_of(frames.encode_text(Kind.CONFIG, "{")).json()
    with pytest.raises(WireError, match="not an object"):
        frame_of(frames.encode_text(Kind.CONFIG, "[]")).json()


def test_a_connection_reads_frames_of_all_sizes_whatever_the_pieces() -> None:
    ours, theirs = socket.socketpair()
    sizes = [0, 3, 100_000, 5, 300_000, 0]
    data = b"".join(frames.encode(Kind.PLAN, size, [np.arange(size, dtype=np.int32)]) for size in sizes)

    def write() -> None:
        with theirs:
            for at in range(0, len(data), 9973):
                theirs.sendall(data[at : at + 9973])

    writer = threading.Thread(target=write)
    writer.start()
    with ours:
        connection = Connection(ours)
        for size in sizes:
            frame = connection.recv()
            assert frame is not None
            assert frame.step == size
            np.testing.assert_array_equal(frame.known(1)[0], np.arange(size))
        assert connection.recv() is None
    writer.join()


def test_a_ring_has_each_buffer_once_and_again_when_it_was_released() -> None:
    made: list[int] = []

    def allocate(size: int) -> Any:
        made.append(size)
        return np.zeros(size, np.uint8)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours)
        connection.receive_into(Ring(allocate))
        frames_: list[Frame] = []
        for number in range(RING):
            theirs.sendall(frames.encode(Kind.PLAN, number, [np.full(3 + 9000 * number, number, np.int32)]))
            frame = connection.recv()
            assert frame is not None
            frames_.append(frame)
        for number, frame in enumerate(frames_):
            assert (frame.known(1)[0] == number).all()
        for number in range(100, 100 + 3 * RING):
            frames_[0].release()
            theirs.sendall(frames.encode(Kind.PLAN, number, [np.full(2, number, np.int32)]))
            frame = connection.recv()
            assert frame is not None
            frames_ = [*frames_[1:], frame]
        assert [frame.known(1)[0].tolist() for frame in frames_] == [
            [n, n] for n in range(100 + 2 * RING, 100 + 3 * RING)
        ]
        assert len(made) <= 2 * RING
        theirs.sendall(frames.encode(Kind.PLAN, 0, []))
        with pytest.raises(WireError, match=f"more than {RING} frames in flight"):
            connection.recv()


@pytest.mark.parametrize("kept", [10, 30])
def test_a_stream_that_ends_in_a_frame_is_an_error(kept: int) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall((FOLDER / "plan_decode.bin").read_bytes()[:kept])
        with pytest.raises(WireError, match="middle of a frame"):
            Connection(ours).recv()
