"""The hand in Rust gives the results of PyTorch's hand. Both get the same plans, and all their numbers are compared."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification, BertModel

from benchmarks.described import described, handshake_model
from forebay.protocol.connection import Connection
from forebay.protocol.constants import FLAG_POOL, ROW_NOT_FINITE, ROW_OK
from forebay.protocol.frames import Kind, encode_json
from forebay.protocol.masks import INLINE, Masks
from forebay.protocol.plan import Plan
from forebay.protocol.result import StepResult
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.weights.pooling import Pooling
from tests.hand.gguf_models import MIXED, WITHOUT_KERNELS, Form, tiny, write
from tests.hand.late_masks import PATTERN, PATTERNS, Late, Step, check_drafted, check_late
from tests.hand.process import spawn
from tests.hand.support import (
    HOST,
    MiniBrain,
    PlanBuilder,
    Request,
    Sampling,
    hf_config,
    hub_weights,
    random_model,
    reference_model,
    wire_config,
)
from tests.hand.test_gguf_experts import MODELS
from tests.hand.test_pooling import BERT
from tests.hand.test_pooling import random_model as random_encoder

VOCABULARY = 131
Q = gguf.GGMLQuantizationType
TIMEOUT_S = 120.0
ARENA_BYTES = 1 << 20


@dataclass
class Answer:
    """A plan that was sent to the hand, and whose result can be received."""

    runner: RustRunner
    step: int

    def collect(self) -> StepResult:
        return self.runner.result()


class RustRunner:
    """A hand in Rust, with the part of `ModelRunner`'s interface that tests use."""

    device = HOST

    def __init__(
        self, connection: Connection, config: RunnerConfig, facts: dict[str, Any], arena: int, pid: int
    ) -> None:
        self._connection = connection
        self.pid = pid
        self.config = config
        self.facts = facts
        self.kv = SimpleNamespace(page_count=facts["page_count"])
        self.arena = arena

    def launch(self, plan: Plan, masks: bytes = b"") -> Answer:
        self._connection.send(plan.encode() + masks)
        return Answer(self, plan.step)

    def step(self, plan: Plan) -> StepResult:
        return self.launch(plan).collect()

    def know(self, order: dict[str, Any]) -> None:
        self._connection.send(encode_json(Kind.ADAPTER, order))

    def result(self) -> StepResult:
        frame = self._connection.recv()
        assert frame is not None
        assert frame.kind == Kind.RESULT, frame.json()
        return StepResult.decode(frame)


@contextmanager
def rust(
    folder: Path, values: dict[str, Any], memories: Mapping[int, int] = MappingProxyType({})
) -> Iterator[RustRunner]:
    """A hand that is ready. `memories`: host memory, as {descriptor in the hand: descriptor here}."""
    ours, theirs = socket.socketpair()
    ours.settimeout(TIMEOUT_S)
    arena = os.memfd_create("arena")
    os.truncate(arena, ARENA_BYTES)
    with (folder / "stderr").open("wb") as errors, theirs:
        pid = spawn({2: errors.fileno(), 3: theirs.fileno(), 4: arena, **memories}, rust=True)
    connection = Connection(ours)
    try:
        values = {**values, "arena_bytes": ARENA_BYTES}
        connection.send(encode_json(Kind.CONFIG, values))
        while (frame := connection.recv()) is not None and frame.kind != Kind.READY:
            assert frame.kind in (Kind.HELLO, Kind.PROGRESS), frame.json()
        assert frame is not None, (folder / "stderr").read_text()
        # PyTorch's hand has no quantised products and no KV cache of 8-bit codes.
        plain = RunnerConfig.from_dict({**values, "quantization": None, "kv_cache_dtype": None})
        yield RustRunner(connection, plain, frame.json(), arena, pid)
    finally:
        ours.close()
        os.close(arena)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def torch_runner(values: dict[str, Any], arena: npt.NDArray[np.uint8] | None = None) -> ModelRunner:
    runner = ModelRunner(RunnerConfig.from_dict(values), arena)
    runner.load(lambda done, total: None)
    runner.warm_up()
    return runner


def in_safetensors(folder: Path, family: str) -> dict[str, Any]:
    # Blocks of integers need longer rows than the experts of other tests have.
    model = random_model(*MODELS[family]) if family in MODELS else reference_model(family)
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous().clone() for name, tensor in hub_weights(model).items()}, path)
    return handshake_model(hf_config(model.config, type(model).__name__), [path])


def in_gguf(folder: Path, types: dict[str, Any], architecture: str, tied: bool) -> dict[str, Any]:
    path = tiny(folder / "model.gguf", types, architecture, tied=tied)
    return described(path, folder / "cache")


def settings(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    changes = {"load_format": "auto", "page_size": 16, "max_total_tokens": 1 << 12, **changes}
    return {**wire_config({}, **changes), "model": model}


SAMPLINGS = [
    Sampling(),
    Sampling(logprobs=5),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=20, seed=1 << 40, logprobs=0),
    Sampling(temperature=1.3, top_p=0.8, seed=5),
    Sampling(temperature=1.1, top_k=30, top_p=0.9, min_p=0.05, seed=6),
    Sampling(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=7),
    Sampling(repetition_penalty=1.2, frequency_penalty=-0.5, logprobs=3),
    Sampling(stop_ids=(3, 17, 88), min_total=30, bias=((5, 4.0), (9, -3.0), (17, 50.0))),
    Sampling(temperature=1.0, allowed=(2, 3, 5, 7, 11, 130), seed=8),
]


def requests(vocabulary: int = VOCABULARY, count: int = 20) -> list[Request]:
    random = np.random.default_rng(11)
    return [
        Request(
            random.integers(0, vocabulary, int(random.integers(1, 40))).tolist(),
            12,
            SAMPLINGS[number % len(SAMPLINGS)],
            arrival=number // 3,
            prompt_logprobs=number % 4 if number % 3 == 0 else -1,
        )
        for number in range(count)
    ]


def brain_of(runner: Any) -> MiniBrain:
    return MiniBrain(runner, seed=2)


def served(runner: Any, chunk: int, vocabulary: int = VOCABULARY) -> list[Request]:
    found = requests(vocabulary)
    brain_of(runner).serve(found, chunk)
    return found


def check(rust_: Sequence[Request], torch_: Sequence[Request], atol: float = 2e-4) -> None:
    for ours, theirs in zip(rust_, torch_, strict=True):
        assert ours.tokens == theirs.tokens, ours.sampling
        for (ids, values), (wanted_ids, wanted) in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert ids.tolist() == wanted_ids.tolist()
            np.testing.assert_allclose(values, wanted, atol=atol)
        assert len(ours.of_prompt) == len(theirs.of_prompt)
        for (rank, ids, values), (wanted_rank, wanted_ids, wanted) in zip(
            ours.of_prompt, theirs.of_prompt, strict=True
        ):
            assert rank == wanted_rank
            assert ids.tolist() == wanted_ids.tolist()
            np.testing.assert_allclose(values, wanted, atol=atol)


def check_near(rust_: Sequence[Request], torch_: Sequence[Request]) -> None:
    """In bfloat16 the hands round at different points, so the bound is on the typical difference."""
    pairs = [
        (float(ours[2][0]), float(theirs[2][0]))
        for one, other in zip(rust_, torch_, strict=True)
        for ours, theirs in zip(one.of_prompt, other.of_prompt, strict=True)
    ]
    found, wanted = np.array(pairs).T
    assert np.sqrt(np.square(found - wanted).mean()) < 0.1 * max(1.0, float(wanted.std()))


PARITY = [
    "llama",
    "llama-untied-biases",
    "llama-head-dim",
    "llama-llama3",
    "llama-linear",
    "llama-yarn-mscale",
    "mistral",
    "mistral-window",
    "gemma2",
    "gemma2-one",
    "gemma3",
    "gemma3-windows-only",
    "gemma3-long-windows",
    "qwen2-tied",
    "qwen3-bias",
    "qwen3-moe",
    "qwen3-moe-plain",
    "qwen3-moe-some-dense",
    "glm4-moe",
    "glm4-moe-air",
    "glm4-moe-bias",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "deepseek-v3-wide",
]
"""The families of the compiled kernels. tests/hand/test_families.py checks that none is missing."""


@pytest.mark.parametrize("family", PARITY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_hands_give_the_same_tokens(tmp_path: Path, family: str, dtype: str) -> None:
    values = settings(in_safetensors(tmp_path, family), dtype=dtype)
    with rust(tmp_path, values) as runner:
        found = served(runner, 17)
    expected = served(torch_runner(values), 17)
    if dtype == "float32":
        check(found, expected)
    else:
        check_near(found, expected)


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("family", ["llama", "glm4-moe"])
def test_both_hands_give_the_same_tokens_at_every_level(
    tmp_path: Path, family: str, page_size: int, instructions: str
) -> None:
    """Keys and values are in the kernels' order if the page size allows it, and otherwise by position."""
    for dtype in ("float32", "bfloat16"):
        values = settings(in_safetensors(tmp_path, family), dtype=dtype, page_size=page_size)
        with rust(tmp_path, values) as runner:
            found = served(runner, 17)
        expected = served(torch_runner(values), 17)
        if dtype == "float32":
            check(found, expected)
        else:
            check_near(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_row_that_threads_share_gets_the_bits_of_its_prompt(tmp_path: Path, dtype: str) -> None:
    model = in_safetensors(tmp_path, "llama")
    # The prompt has two whole spans of attention and a part of a third.
    prompt = np.random.default_rng(6).integers(0, VOCABULARY, 1300).tolist()
    found = []
    for threads, chunk in ((1, 1300), (2, 433), (3, 1299)):
        sizes = {"context_length": 1408, "chunked_prefill_size": 1408, "threads": threads}
        with rust(tmp_path, settings(model, dtype=dtype, **sizes)) as runner:
            request = Request(prompt, 3, Sampling(logprobs=5))
            brain_of(runner).serve([request], chunk)
        found.append([request])
    for other in found[1:]:
        check(found[0], other, atol=0)


def test_a_row_that_is_not_finite_is_told_and_keeps_to_itself(tmp_path: Path) -> None:
    model = in_safetensors(tmp_path, "llama-untied-biases")
    path = Path(model["files"][0])
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][7] = torch.nan
    # All logits are equal, so the first token wins.
    tensors["lm_head.weight"][:] = tensors["lm_head.weight"][3]
    save_file(tensors, path)
    builder = PlanBuilder(1)
    for slot, prompt in enumerate([[3, 7, 5], [3, 4, 5]]):
        builder.slot(slot, prompt)
        builder.page_writes.append((slot, 0, slot))
        builder.row(slot, 0, 3)
    with rust(tmp_path, settings(model)) as runner:
        result = runner.step(builder.build())
    assert result.row_errors.tolist() == [ROW_NOT_FINITE, ROW_OK]
    assert result.tokens.tolist()[1] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    [
        "qwen3-moe",
        "glm4-moe",
        "gemma3",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("glm4-moe-air", "gemma2")),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "int8", "Q4_0", "codes"])
def test_a_request_gets_the_same_bits_in_any_company(tmp_path: Path, kind: str, family: str, dtype: str) -> None:
    if kind == "Q4_0":
        path = write(tmp_path / "model.gguf", random_model(*MODELS[family]), Form(kind=Q.Q4_0))
        model = described(path, tmp_path / "cache")
    else:
        model = in_safetensors(tmp_path, family)
    changes: dict[str, Any] = {
        "int8": {"quantization": "w8a8_int8"},
        "codes": {"kv_cache_dtype": "int8"},
    }.get(kind, {})
    found = []
    for threads, chunk, together in ((1, 1 << 10, 1), (2, 17, 20), (3, 5, 7)):
        with rust(tmp_path, settings(model, dtype=dtype, threads=threads, **changes)) as runner:
            asked, brain = requests(), brain_of(runner)
            for first in range(0, len(asked), together):
                brain.serve(asked[first : first + together], chunk)
        found.append(asked)
    for other in found[1:]:
        check(found[0], other, atol=0)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3-moe", "glm4-moe", "glm4-moe-air", "glm4-moe-bias"),
        *("mistral-window", "gemma2", "gemma2-one", "gemma3", "gemma3-windows-only", "gemma3-long-windows"),
    ],
)
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = random_model(*MODELS[family]) if family in MODELS else reference_model(family)
    prompt = np.random.default_rng(3).integers(0, VOCABULARY, 90).tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    asked = Request(prompt, 1, Sampling(logprobs=5), prompt_logprobs=0)
    with rust(tmp_path, settings(in_safetensors(tmp_path, family))) as runner:
        brain_of(runner).serve([asked], 17)
    told = [float(values[0]) for _, _, values in asked.of_prompt]
    wanted = [float(expected[at, token]) for at, token in enumerate(prompt[1:])]
    np.testing.assert_allclose(told, wanted, atol=1e-4)
    assert asked.tokens == [int(expected[-1].argmax())]


@pytest.mark.parametrize(
    ("types", "architecture", "tied"),
    [
        ({"": Q.Q8_0}, "llama", True),
        ({"": Q.Q4_0}, "llama", False),
        (MIXED, "qwen2", True),
        (WITHOUT_KERNELS, "qwen3", False),
    ],
    ids=["q8_0", "q4_0", "mixed", "without-kernels"],
)
def test_files_of_gguf_are_the_same_to_both(
    tmp_path: Path, types: dict[str, Any], architecture: str, tied: bool
) -> None:
    """Weights are dequantised here. tests/hand/test_quantised.py has the tests with blocks."""
    model = in_gguf(tmp_path, {"": Q.Q4_1, **types}, architecture, tied)
    values = settings(model)
    vocabulary = model["config"]["vocab_size"]
    with rust(tmp_path, values) as runner:
        found = served(runner, 23, vocabulary)
    check(found, served(torch_runner(values), 23, vocabulary))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", pytest.param("Q5_0", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen3-moe", "gemma2", "gemma3"])
def test_files_of_gguf_of_more_families_are_the_same_to_both(tmp_path: Path, family: str, kind: str) -> None:
    if kind != "F16" and "moe" in family:
        pytest.skip("experts stay in their blocks")
    form = Form(kind=getattr(Q, kind), fused=kind == "F16")
    values = settings(
        described(write(tmp_path / "model.gguf", random_model(*MODELS[family]), form), tmp_path / "cache")
    )
    with rust(tmp_path, values) as runner:
        found = served(runner, 23)
    check(found, served(torch_runner(values), 23))


def vectors(runner: Any, lengths: Sequence[int]) -> npt.NDArray[np.float32]:
    """Computes the vectors of prompts in two chunks. The second chunk is beside the next prompt's first chunk."""
    random = np.random.default_rng(7)
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in lengths]
    found = []
    for number in range(len(prompts) + 1):
        builder = PlanBuilder(number + 1)
        if number:
            tokens = prompts[number - 1]
            half = len(tokens) // 2
            builder.rows.append(((number - 1) % 3, half, len(tokens) - half, FLAG_POOL))
        if number < len(prompts):
            slot = number % 3
            builder.slot(slot, prompts[number])
            builder.page_writes += [(slot, index, 6 * slot + index) for index in range(6)]
            builder.rows.append((slot, 0, len(prompts[number]) // 2, 0))
        result = runner.launch(builder.build()).collect()
        assert not result.row_errors.any()
        found.append(result.pooled)
    return np.concatenate(found).reshape(len(prompts), -1)


@pytest.mark.parametrize("how", ["last", "causal_mean"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "llama-untied-biases", "qwen3", "without-a-head"])
def test_both_hands_give_the_same_vectors(tmp_path: Path, family: str, dtype: str, how: str) -> None:
    headless = family == "without-a-head"
    model = in_safetensors(tmp_path, "qwen3" if headless else family)
    if headless:
        path = Path(model["files"][0])
        body = {
            name.removeprefix("model."): tensor for name, tensor in load_file(path).items() if "lm_head" not in name
        }
        save_file(body, path)
        model["config"]["architectures"] = ["Qwen3Model"]
    pooled = Pooling("embed", how, 64, normalize=True, function="identity", max_length=None).to_dict()
    model = handshake_model(model["config"], model["files"], pooling=pooled)
    values = settings(model, dtype=dtype)
    lengths = [2, 30, 7, 96, 63, 3]
    with rust(tmp_path, values) as runner:
        found = vectors(runner, lengths)
        assert runner.facts["page_count"] > 0
    wanted = vectors(torch_runner(values), lengths)
    if dtype == "float32":
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    # The hands round at different points.
    assert np.sqrt(np.square(found - wanted).mean()) < 0.03


@pytest.mark.parametrize("how", ["mean", "cls", "score"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_hands_give_the_same_vectors_of_encoders(tmp_path: Path, dtype: str, how: str) -> None:
    scores = how == "score"
    kind = BertForSequenceClassification if scores else BertModel
    model = random_encoder(kind, BertConfig(**BERT | {"hidden_size": 64, "num_labels": 1}))
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    if not scores:
        # In checkpoints of whole models names have this prefix.
        tensors = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    pooled = Pooling(
        "score" if scores else "embed", "cls" if scores else how, 1 if scores else 64, True, "identity", None
    )
    config = hf_config(model.config, kind.__name__)
    model_ = handshake_model(config, [path], pooling=pooled.to_dict())
    values = settings(model_, dtype=dtype, context_length=96)
    random = np.random.default_rng(6)
    lengths, segments = [7, 1, 96, 2, 31], [3, 0, 40, 0, 1]

    def plan(flag: int = FLAG_POOL, start: int = 0) -> Plan:
        builder = PlanBuilder(1)
        for slot, (length, segment) in enumerate(zip(lengths, segments, strict=True)):
            builder.slot(slot, random.integers(0, VOCABULARY, length).tolist())
            if scores and segment:
                builder.segments.append((slot, segment))
            builder.rows.append((slot, start, length - start, flag))
        return builder.build()

    torch_ = torch_runner(values)
    with rust(tmp_path, values) as runner:
        facts: dict[str, Any] = torch_.facts()
        # For encoders Python counts the matrices of the checkpoint, and Rust counts the packed ones.
        assert 0 < facts.pop("weight_bytes") <= 2 * runner.facts["weight_bytes"]
        assert {key: runner.facts[key] for key in facts} == facts
        random = np.random.default_rng(6)
        ours = runner.launch(plan()).collect()
        random = np.random.default_rng(6)
        theirs = torch_.step(plan())
        assert not ours.row_errors.any()
        np.testing.assert_allclose(ours.pooled, theirs.pooled, atol=2e-5 if dtype == "float32" else 0.03)
        runner.launch(plan(flag=0))
        frame = runner._connection.recv()
        assert frame is not None
        assert "part of a prompt" in frame.json()["error"]


def test_masks_and_embeddings_are_the_same_to_both(tmp_path: Path) -> None:
    values = settings(in_safetensors(tmp_path, "qwen3"))
    random = np.random.default_rng(4)
    rows = random.standard_normal((9, 64)).astype(np.float32)
    arena = np.zeros(ARENA_BYTES, np.uint8)
    arena[4096 : 4096 + rows.nbytes] = np.frombuffer(rows.tobytes(), np.uint8)
    words = random.integers(0, 1 << 32, (3, 5), np.uint64).astype(np.uint32)

    def masks(step: int) -> Masks:
        return Masks(step, np.array([INLINE, -1, 256], np.int32), words[:1].reshape(-1).view(np.int32))

    arena[256 : 256 + 20] = np.frombuffer(words[1].tobytes(), np.uint8)

    def plan(step: int, start: int) -> Plan:
        builder = PlanBuilder(step)
        if step == 1:
            for slot in range(3):
                builder.slot(slot, [slot + 5] * 9, Sampling(temperature=1.0, seed=slot, logprobs=2))
                builder.page_writes += [(slot, index, 2 * slot + index) for index in range(2)]
            builder.embeds.append((1, 4096))
        for slot in range(3):
            builder.row(slot, start, 9 if step == 1 else 1, masked=True)
        return builder.build()

    torch_ = torch_runner({**values, "arena_bytes": ARENA_BYTES}, arena)
    with rust(tmp_path, values) as runner:
        os.pwrite(runner.arena, arena.tobytes(), 0)
        for step in range(1, 8):
            start = 0 if step == 1 else step + 7
            ours = runner.launch(plan(step, start), masks(step).encode()).collect()
            theirs = torch_.step(plan(step, start), partial(masks, step))
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            np.testing.assert_allclose(ours.logprob_values, theirs.logprob_values, atol=2e-4)
            assert words[0][ours.tokens[0] // 32] >> (ours.tokens[0] % 32) & 1


@PATTERN
def test_a_row_whose_mask_is_not_ready_says_the_same_later(tmp_path: Path, late: Late) -> None:
    values = settings(in_safetensors(tmp_path, "llama"))
    with ExitStack() as hands:

        def step_of() -> Step:
            runner = hands.enter_context(rust(tmp_path, values))
            return lambda plan, masks: runner.launch(
                plan, masks.encode() if plan.rows[:, 3].max() > 1 else b""
            ).collect()

        check_late(step_of, late)


def never(step: int, slot: int) -> bool:
    """No mask is late."""
    return False


@pytest.mark.parametrize("late", [never, *PATTERNS.values()], ids=["never", *PATTERNS])
def test_masked_rows_give_the_tokens_without_drafts(tmp_path: Path, late: Late) -> None:
    values = settings(in_safetensors(tmp_path, "llama"))
    with ExitStack() as hands:

        def step_of() -> Step:
            runner = hands.enter_context(rust(tmp_path, values))
            return lambda plan, masks: runner.launch(
                plan, masks.encode() if plan.rows[:, 3].max() > 1 else b""
            ).collect()

        saved = check_drafted(step_of, late)
        assert saved > 0 or late is not never


def test_draws_are_the_same(tmp_path: Path) -> None:
    """Compares draws from one prompt's logits by the sampler of each hand. FOREBAY_DRAWS sets their number."""
    draws, rows = int(os.environ.get("FOREBAY_DRAWS", "12000")), 400
    values = settings(
        in_safetensors(tmp_path, "llama"), slots=rows, max_total_tokens=16 * rows, max_running_requests=rows
    )
    random = np.random.default_rng(9)
    torch_ = torch_runner(values)
    ways = [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.9, 0.0), (0, 1.0, 0.05), (60, 0.8, 0.02)]
    with rust(tmp_path, values) as runner:
        for batch in range(draws // rows):
            builder = PlanBuilder(batch + 1)
            prompt = random.integers(0, VOCABULARY, 2).tolist()
            for slot in range(rows):
                top_k, top_p, min_p = ways[slot % len(ways)]
                sampling = Sampling(
                    temperature=float(0.5 + (slot % 7) * 0.2),
                    top_k=top_k,
                    top_p=top_p,
                    min_p=min_p,
                    seed=int(random.integers(0, 1 << 62)),
                )
                builder.slot(slot, prompt, sampling)
                if batch == 0:
                    builder.page_writes.append((slot, 0, slot))
                builder.row(slot, 0, 2)
            ours = runner.launch(builder.build()).collect().tokens
            theirs = torch_.step(builder.build()).tokens
            assert ours.tolist() == theirs.tolist()
