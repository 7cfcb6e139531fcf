"""The client's queue, request bodies and answers, without a server."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from typing import Any

import pytest

from forebay import RequestError, SamplingParams, StructuredOutputsParams
from forebay.llm.calls import Calls
from forebay.llm.client import Gate
from forebay.llm.params import one_each, prompt_list, to_json


def test_a_gate_admits_in_order_and_within_its_limit() -> None:
    async def story() -> list[str]:
        gate, seen = Gate(3), list[str]()

        async def enter(name: str, weight: int) -> None:
            await gate.enter(weight)
            seen.append(name)

        names = [("a", 2), ("b", 2), ("c", 1), ("huge", 9), ("d", 1)]
        tasks = [asyncio.ensure_future(enter(*each)) for each in names]

        async def settle() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        await settle()
        # The light call `c` comes after `b` and must not overtake it.
        assert (seen, gate.held) == (["a"], 2)
        gate.leave(2)
        await settle()
        assert (seen, gate.held) == (["a", "b", "c"], 3)
        tasks[3].cancel()
        gate.leave(2)
        await settle()
        assert (seen, gate.held) == (["a", "b", "c", "d"], 2)
        await asyncio.gather(*tasks, return_exceptions=True)
        return seen

    assert asyncio.run(story()) == ["a", "b", "c", "d"]


def test_a_turn_that_is_cancelled_as_it_comes_is_given_back() -> None:
    async def story() -> int:
        gate = Gate(1)
        await gate.enter(1)
        waiting = asyncio.ensure_future(gate.enter(1))
        await asyncio.sleep(0)
        gate.leave(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return gate.held

    assert asyncio.run(story()) == 0


def test_one_prompt_needs_no_list() -> None:
    assert prompt_list("a") == ["a"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list([[1], [2]]) == [[1], [2]]
    assert prompt_list({"prompt": "a"}) == [{"prompt": "a"}]
    assert prompt_list([]) == []
    assert one_each("x", [3, 4], 2) == [3, 4]
    assert one_each("x", 3, 2) == [3, 3]
    with pytest.raises(ValueError, match="`x`: 1 entries for 2"):
        one_each("x", [3], 2)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"), ({}, "prompt"), ({"text": "a"}, "text")],
)
def test_what_is_no_prompt_is_named(prompt: Any, param: str) -> None:
    call = Calls().completion(prompt, SamplingParams())
    with pytest.raises(RequestError, match=f"`{param}`") as caught:
        call.fields()
    assert caught.value.param == param


def test_fields_are_those_of_the_api() -> None:
    form = StructuredOutputsParams(regex="a+")
    params = SamplingParams(logprobs=2, stop=("x",), structured_outputs=form, extra_args={"priority": 3})
    fields = Calls().completion("p", params).fields()
    assert fields["structured_outputs"] == {"regex": "a+"}
    assert (fields["logprobs"], fields["stop"], fields["priority"]) == (2, ["x"], 3)
    assert not {"extra_args", "output_kind", "top_logprobs"} & set(fields)
    chat = Calls().chat([], params, {"tools": []}).fields()
    assert (chat["logprobs"], chat["top_logprobs"], chat["tools"]) == (True, 2, [])


def test_a_value_that_json_cannot_hold_is_named() -> None:
    with pytest.raises(RequestError, match="`seed`") as caught:
        to_json({"temperature": 1.0, "seed": object()})
    assert caught.value.param == "seed"
    with pytest.raises(RequestError, match="`temperature`"):
        to_json({"temperature": float("nan")})


def test_an_error_survives_pickling() -> None:
    error = RequestError.of_batch({1: RequestError("`n`: no", param="n", status=400)}, 3, [1, 2, 3])
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert str(again) == "1 of 3 requests failed, the first is number 1: `n`: no"
    assert (again.message, again.param, again.status, again.outputs) == ("`n`: no", "n", 400, [1, 2, 3])


HEAVY = ("torch", "numpy", "httpx", "httpx2", "requests", "transformers", "tqdm", "multiprocessing")


@pytest.mark.parametrize(
    ("statement", "absent"),
    [("import forebay", (*HEAVY, "asyncio", "forebay.llm")), ("from forebay import LLM", HEAVY)],
)
def test_an_import_is_light(statement: str, absent: tuple[str, ...]) -> None:
    """Hands import the package too, so the import must not load these libraries."""
    code = f"{statement}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
