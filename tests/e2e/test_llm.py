"""The Python library with a real server: batches, chats, embeddings, and errors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from forebay import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    PoolingParams,
    RequestError,
    SamplingParams,
    StartError,
    StructuredOutputsParams,
)
from tests.e2e.conftest import Models
from tests.e2e.embedders import CrossEncoder, MiniLM
from tests.e2e.models import Model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def start(model: Model, **flags: Any) -> LLM:
    """Starts the library with a model of the tests."""
    return LLM(str(model.path), dtype="float32", threads=model.threads, **flags)


@pytest.fixture(scope="module")
def llm(tiny: Model) -> Iterator[LLM]:
    with start(tiny) as found:
        yield found


def texts(count: int) -> list[str]:
    return [f"prompt number {number} of many" for number in range(count)]


def test_results_have_the_order_of_prompts(llm: LLM, tiny: Model) -> None:
    prompts = texts(60)
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == prompts
    assert [output.prompt_token_ids for output in together] == [tiny.encode(text) for text in prompts]
    for number in (0, 31, 59):
        (alone,) = llm.generate(prompts[number], GREEDY, use_tqdm=False)
        found = together[number].outputs[0]
        assert (found.token_ids, found.text) == (alone.outputs[0].token_ids, alone.outputs[0].text)
        assert found.text == tiny.decode(found.token_ids, skip_special_tokens=True)
        assert (found.finish_reason, together[number].finished, len(found.token_ids)) == ("length", True, 8)


def test_forms_of_prompts(llm: LLM, tiny: Model) -> None:
    ids = tiny.encode("the same prompt")
    forms: list[Any] = [
        "the same prompt",
        ids,
        {"prompt": "the same prompt"},
        {"prompt_token_ids": ids, "cache_salt": "x"},
    ]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert [output.prompt for output in outputs] == ["the same prompt", None, "the same prompt", None]
    (alone,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert alone.prompt_token_ids == ids
    assert llm.generate([], GREEDY) == []


def test_log_probabilities(llm: LLM, tiny: Model) -> None:
    params = SamplingParams(n=2, seed=5, max_tokens=6, logprobs=3, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate(["some words"], params, use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1]
    for choice in output.outputs:
        assert choice.logprobs is not None
        for token, alternatives in zip(choice.token_ids, choice.logprobs, strict=True):
            # The requested alternatives, and the sampled token.
            assert token in alternatives
            assert len(alternatives) in (3, 4)
            ranks = [one.rank for one in alternatives.values()]
            assert ranks == [1, 2, 3, None][: len(ranks)]
            for other, one in alternatives.items():
                assert tiny.decode([other]) == one.decoded_token
        total = sum(each[token].logprob for token, each in zip(choice.token_ids, choice.logprobs, strict=True))
        assert choice.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_token_ids is not None
    assert output.prompt_logprobs[0] is None
    for token, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert found is not None
        assert found[token].rank is not None


def test_a_chat_and_a_prompt_have_equal_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True)
    (chat,) = llm.chat([{"role": "user", "content": "hello " * 20}], params, use_tqdm=False)
    assert chat.prompt_token_ids is not None
    (prompt,) = llm.generate(chat.prompt_token_ids, params, use_tqdm=False)
    assert chat.outputs[0].token_ids == prompt.outputs[0].token_ids
    assert chat.outputs[0].logprobs == prompt.outputs[0].logprobs
    assert prompt.num_cached_tokens


def test_answers_of_a_form(llm: LLM) -> None:
    forms = [
        StructuredOutputsParams(choice=["red", "green"]),
        StructuredOutputsParams(regex="[0-9]{3}"),
        StructuredOutputsParams(json={"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}),
    ]
    params = [SamplingParams(max_tokens=40, seed=1, structured_outputs=form) for form in forms]
    colour, digits, obj = (one.outputs[0].text for one in llm.generate(["x"] * 3, params, use_tqdm=False))
    assert colour in ("red", "green")
    assert len(digits) == 3
    assert digits.isdigit()
    assert json.loads(obj)["a"] in (1, 2)


def test_calls_of_tools(llm: LLM) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    params = SamplingParams(max_tokens=80, seed=2, extra_args={"tool_choice": "required", "parallel_tool_calls": False})
    (output,) = llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False, tools=[tool])
    (call, *_) = output.outputs[0].tool_calls
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert output.outputs[0].finish_reason == "tool_calls"


def test_conversations(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in texts(3)]
    together = llm.chat(conversations, GREEDY, use_tqdm=False)
    for conversation, output in zip(conversations, together, strict=True):
        (alone,) = llm.chat(conversation, GREEDY, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    gone_on = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (output,) = llm.chat(gone_on, GREEDY, False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt_token_ids is not None
    assert llm.detokenize(output.prompt_token_ids).endswith("b")


def test_an_error_loses_no_other_result(llm: LLM) -> None:
    good, bad = GREEDY, SamplingParams(temperature=-1)
    with pytest.raises(RequestError, match=r"^2 of 4 requests failed, the first is number 1: `temperature`") as caught:
        llm.generate(texts(4), [good, bad, good, bad], use_tqdm=False)
    assert (caught.value.param, caught.value.status) == ("temperature", 400)
    outputs = caught.value.outputs
    assert outputs is not None
    assert [output.error is None for output in outputs] == [True, False, True, False]
    assert [len(output.outputs) for output in outputs] == [1, 0, 1, 0]
    assert all(output.finished for output in outputs)
    with pytest.raises(RequestError, match=r"^`top_p`"):
        llm.generate("one", SamplingParams(top_p=7), use_tqdm=False)
    mixed: list[str | list[int]] = ["short", [5] * 5000]
    with pytest.raises(RequestError, match=r"1 of 2 .* context"):
        llm.generate(mixed, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="makes no vectors"):
        llm.embed("x", use_tqdm=False)
    with pytest.raises(ValueError, match="`sampling_params`: 1 entries for 2 prompts"):
        llm.generate(texts(2), [good])


def test_a_parameter_without_effect_is_warned_of(llm: LLM) -> None:
    with pytest.warns(UserWarning, match="`bogus` has no effect"):
        llm.generate("x", SamplingParams(extra_args={"bogus": 1}), use_tqdm=False)


def test_a_length_beyond_the_context_is_cut(llm: LLM, recwarn: pytest.WarningsRecorder) -> None:
    prompt = [5] * 4090
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=999, ignore_eos=True), use_tqdm=False)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")
    everything = SamplingParams(max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([5] * 4000, everything, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 96
    (output,) = llm.chat([{"role": "user", "content": "x " * 1900}], everything, use_tqdm=False)
    assert output.prompt_token_ids is not None
    assert len(output.outputs[0].token_ids) == 4096 - len(output.prompt_token_ids) > 16
    assert not recwarn.list


class Recorder:
    """A stand-in for tqdm."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, total: int, **options: Any) -> None:
        self.total, self.ended = total, 0
        self.made.append(self)

    def update(self, n: float | None = 1) -> None:
        self.ended += int(n or 0)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def test_progress(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.generate(texts(7), GREEDY, Recorder)
    assert [(bar.total, bar.ended) for bar in Recorder.made] == [(7, 7)]
    # As if tqdm were not installed.
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert len(llm.generate(texts(2), GREEDY)) == 2


def test_more_choices_than_run_at_a_time(tiny: Model) -> None:
    """No batch overflows the server's queue, even if each request has many choices."""
    with start(tiny, max_num_seqs=4, max_queued_requests=4) as small:
        params = SamplingParams(n=3, max_tokens=2, ignore_eos=True)
        outputs = small.generate(texts(20), params, use_tqdm=False)
        assert [len(output.outputs) for output in outputs] == [3] * 20


def test_within_a_running_event_loop(llm: LLM) -> None:
    async def cell() -> str:
        return llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].text

    assert asyncio.run(cell()) == llm.generate("x", GREEDY, use_tqdm=False)[0].outputs[0].text


def test_texts_and_tokens(llm: LLM, tiny: Model) -> None:
    assert llm.tokenize("some words", add_special_tokens=False) == tiny.encode("some words")
    assert llm.detokenize(tiny.encode("some words")) == "some words"
    llm.reset_prefix_cache()
    (output,) = llm.generate([5] * 64, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0


def test_defaults_are_the_models(models: Models) -> None:
    with start(models("smollm2"), max_model_len=256) as found:
        defaults = found.get_default_sampling_params()
        assert (defaults.top_k, defaults.max_tokens) == (40, 16)
        assert defaults.temperature == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("model", "flags", "reason"),
    [
        ("./nowhere", {}, r"the model \./nowhere is not available: .*"),
        (None, {"bogus": 1}, "unexpected argument '--bogus' found"),
        (None, {"max_model_len": 10**9}, ".*is more than the model was made for.*"),
        (None, {"max_model_len": "x"}, "invalid value 'x' for '--context-length <TOKENS>': .*"),
        (None, {"kv_transfer_config": "x"}, ".*memory of one server, with --pd P:D,.*"),
    ],
)
def test_the_reason_of_a_refusal_is_the_text(
    tiny: Model, model: str | None, flags: dict[str, Any], reason: str
) -> None:
    with pytest.raises(StartError) as caught:
        LLM(model or str(tiny.path), **flags)
    text = str(caught.value)
    assert "\n" not in text
    assert re.fullmatch(reason, text), text


def test_keys_of_other_servers_are_not_needed(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_API_KEY", "secret")
    with start(tiny) as found:
        assert found.generate("x", GREEDY, use_tqdm=False)
        folder = os.path.dirname(found._server.socket)
        assert os.stat(folder).st_mode & 0o777 == 0o700
    assert not os.path.exists(folder)
    with pytest.raises(EngineDeadError, match="the server was closed"):
        found.generate("x", GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> MiniLM:
    return MiniLM(tmp_path_factory.mktemp("models") / "minilm")


def test_vectors(minilm: MiniLM) -> None:
    inputs = ["A forebay is a pool.", "Water.", *texts(30)]
    with start(minilm) as embedder:
        outputs = embedder.embed(inputs, use_tqdm=False)
        found = np.array([output.outputs.embedding for output in outputs])
        expected = minilm.vectors([minilm.ids(text) for text in inputs]).numpy()
        assert np.abs(found - expected).max() < 1e-4
        assert [output.num_prompt_tokens for output in outputs] == [len(minilm.ids(text)) for text in inputs]
        (short,) = embedder.embed("Water.", False, pooling_params=PoolingParams(dimensions=16))
        assert short.outputs.hidden_size == 16
        (ids,) = embedder.embed(minilm.ids("Water."), use_tqdm=False)
        assert ids.outputs == outputs[1].outputs
        (pooled,) = embedder.encode("Water.", use_tqdm=False, pooling_task="embed")
        assert pooled.outputs.data == outputs[1].outputs.embedding
        with pytest.raises(RequestError, match=r"^1 of 2 .*`input`") as caught:
            embedder.embed(["Water.", "long " * 600], use_tqdm=False)
        assert caught.value.outputs is not None
        assert caught.value.outputs[0].outputs == outputs[1].outputs
        assert caught.value.outputs[1].outputs.embedding == []


def test_scores_and_classes(tmp_path_factory: pytest.TempPathFactory, minilm: MiniLM) -> None:
    cross = CrossEncoder(tmp_path_factory.mktemp("models") / "cross", minilm)
    queries, documents = ["rain", "snow"], ["It rains.", "It is cold."]
    with start(cross) as scorer:
        logits = cross.logits([("rain", document) for document in documents])
        raw = PoolingParams(use_activation=False)
        scores = scorer.score("rain", documents, False, pooling_params=raw)
        assert [output.outputs.score for output in scores] == pytest.approx(logits, abs=1e-4)
        pairs = scorer.score(queries, documents, use_tqdm=False)
        assert pairs[0].outputs.score == pytest.approx(1 / (1 + np.exp(-logits[0])), abs=1e-4)
        with pytest.raises(ValueError, match="`data_1`: 2 entries for 1"):
            scorer.score(queries, "one")
        (classes,) = scorer.classify("It rains.", use_tqdm=False)
        assert classes.outputs.num_classes == 1
        assert 0 < classes.outputs.probs[0] < 1


def test_weights_change_while_the_library_runs(tiny: Model, tmp_path: Path) -> None:
    def answer(llm: LLM) -> list[int]:
        return llm.generate("a prompt", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    state = {name: tensor.clone() for name, tensor in tiny.reference.state_dict().items()}
    norm = "model.norm.weight"
    with start(tiny) as llm:
        first = answer(llm)
        assert llm.get_weight_version() == "default"
        assert llm.update_weights({norm: -state[norm]}, version="1") == 0
        assert llm.get_weight_version() == "1"
        assert llm.get_parameter(norm, 2) == pytest.approx((-state[norm])[:2].tolist())
        second = answer(llm)
        assert second != first
        with pytest.raises(RequestError, match="no tensor other"):
            llm.update_weights({"other": state[norm]})
        with pytest.raises(RequestError, match="can't be read"):
            llm.update_weights(tmp_path / "none")
        assert answer(llm) == second
        assert llm.update_weights(state, version="2") == 0
        assert answer(llm) == first
        assert llm.update_weights(tiny.path, version="3") == 0
        assert (answer(llm), llm.get_weight_version()) == (first, "3")
        assert llm.pause() == 0
        with pytest.raises(RequestError, match="mode"):
            llm.pause("never")
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(answer, llm)
            assert not asked.done()
            llm.resume()
            assert asked.result() == first


def test_weights_change_under_an_event_loop(tiny: Model) -> None:
    norm = {"model.norm.weight": -tiny.reference.state_dict()["model.norm.weight"]}

    async def story() -> None:
        async with AsyncLLM(str(tiny.path), dtype="float32", threads=1) as llm:
            first = [output async for output in llm.generate("a prompt", GREEDY)][-1].outputs[0].token_ids
            assert await llm.pause() == 0
            assert await llm.update_weights(norm, version="1") == 0
            await llm.resume()
            second = [output async for output in llm.generate("a prompt", GREEDY)][-1].outputs[0].token_ids
            assert second != first

    asyncio.run(story())
