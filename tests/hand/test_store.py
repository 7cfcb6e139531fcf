"""The store through which ranks find each other, against a stand-in for the brain."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from forebay.distributed.store import BrainStore
from forebay.protocol.connection import Connection, Dismissed
from forebay.protocol.frames import Kind, WireError, encode, encode_json
from tests.hand.meeting import Meeting


@pytest.fixture
def stores() -> Iterator[list[BrainStore]]:
    """The stores of two ranks of one group."""
    meeting, made, ends = Meeting(), [], []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        ends += [ours, theirs]
        made.append(BrainStore(Connection(ours)))
        threading.Thread(target=meeting.serve, args=(Connection(theirs),), daemon=True).start()
    yield made
    for end in ends[::2]:
        end.shutdown(socket.SHUT_RDWR)
        end.close()


def test_values_are_bytes_of_any_kind(stores: list[BrainStore]) -> None:
    first, second = stores
    for value in (b"", bytes(range(256)), b"x" * 100_000):
        first.set("key", value)
        assert second.get("key") == value
    first.set("text", "Wehr")
    assert second.get("text") == b"Wehr"


def test_numbers_are_added_up(stores: list[BrainStore]) -> None:
    first, second = stores
    assert first.add("count", 2) == 2
    assert second.add("count", -5) == -3
    assert first.get("count") == b"-3"


def test_keys_come_and_go(stores: list[BrainStore]) -> None:
    first, second = stores
    assert not first.check(["a"])
    first.set("a", b"1")
    assert second.check(["a"])
    assert not second.check(["a", "b"])
    assert second.num_keys() == 1
    assert first.delete_key("a")
    assert not second.delete_key("a")
    assert second.num_keys() == 0


def test_a_value_is_set_if_it_is_what_was_expected(stores: list[BrainStore]) -> None:
    first, second = stores
    assert first.compare_set("a", b"", b"1") == b"1"
    assert second.compare_set("a", b"2", b"3") == b"1"
    assert second.compare_set("a", b"1", b"3") == b"3"


@pytest.mark.parametrize("how", ["get", "wait"])
def test_who_asks_too_early_waits(stores: list[BrainStore], how: str) -> None:
    first, second = stores
    found: list[Any] = []

    def ask() -> None:
        if how == "wait":
            second.wait(["early", "late"])
        found.append(second.get("late"))

    thread = threading.Thread(target=ask)
    thread.start()
    first.set("early", b"0")
    assert not found
    first.set("late", b"1")
    thread.join(60)
    assert found == [b"1"]


def test_nobody_asks_when_plans_may_come(stores: list[BrainStore]) -> None:
    stores[0].close()
    with pytest.raises(WireError, match="asked to get after ranks had found each other"):
        stores[0].get("a")


REPLIES: list[tuple[bytes, type[Exception], str]] = [
    (encode(Kind.SHUTDOWN, 0, []), Dismissed, "^$"),
    (encode(Kind.PLAN, 0, []), WireError, "expected store_reply, got plan"),
    (encode_json(Kind.STORE_REPLY, {"id": 2, "value": "", "number": None}), WireError, "an answer to question 2"),
    (encode_json(Kind.STORE_REPLY, {"id": 1, "value": None, "number": 0}), WireError, "without a value"),
    (encode_json(Kind.STORE_REPLY, {"id": 1, "value": "?", "number": 0}), WireError, "not base64"),
]


@pytest.mark.parametrize(("reply", "error", "message"), REPLIES)
def test_what_is_no_answer(reply: bytes, error: type[Exception], message: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(reply)
        store = BrainStore(Connection(ours))
        with pytest.raises(error, match=message):
            store.get("a")
        assert isinstance(store.failure, error)


def test_a_number_is_missing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode_json(Kind.STORE_REPLY, {"id": 1, "value": "", "number": None}))
        with pytest.raises(WireError, match="without a number"):
            BrainStore(Connection(ours)).add("a", 1)


def test_the_end_of_the_stream() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Dismissed):
            BrainStore(Connection(ours)).get("a")
        theirs.close()
