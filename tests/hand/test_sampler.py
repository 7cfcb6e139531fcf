"""The sampler, compared with a slow one that follows the protocol's text, one row and one token at a time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.compute.sampler import NO_MASKS, SampledColumns, Sampler
from forebay.compute.uniform import splitmix64, uniform
from forebay.device import Device, open_device
from forebay.layers.ops import HostOps, TorchOps, most_likely, nucleus
from forebay.protocol.frames import Float32s, Int32s
from forebay.protocol.masks import UInt32s
from forebay.state.config import RunnerConfig
from forebay.state.slots import SlotTables
from forebay.state.staging import StepInputs
from tests.hand.support import FAMILIES, PlanBuilder, Sampling, hf_config, wire_config
from tests.uniform_values import VALUES

VOCABULARY = 23
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
DEVICE = open_device("cpu", 1)
DEFERRED = open_device("deferred", 1)
CONFIG = RunnerConfig.from_dict(wire_config(hf_config(FAMILIES["llama"][1], "LlamaForCausalLM"), slots=6))


def slow_uniform(seed: int, position: int) -> float:
    z = (seed + position * GOLDEN + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 11) / 2**53


def slow_sample(
    logits: list[float], tokens: list[int], prompt_len: int, s: Sampling, mask: set[int] | None = None
) -> int:
    """Samples the token after `tokens`."""
    values = list(logits)
    for token, bias in s.bias:
        values[token] += bias
    for token in set(tokens):
        values[token] = (
            values[token] / s.repetition_penalty if values[token] > 0 else values[token] * s.repetition_penalty
        )
    generated = tokens[prompt_len:]
    for token in set(generated):
        values[token] -= s.frequency_penalty * generated.count(token) + s.presence_penalty
    allowed = set(s.allowed) or set(range(len(values)))
    if mask is None and len(tokens) < s.min_total and not allowed <= set(s.stop_ids):
        for token in s.stop_ids:
            values[token] = -math.inf
    if mask is not None:
        allowed &= mask
    values = [value if token in allowed else -math.inf for token, value in enumerate(values)]
    if s.temperature == 0:
        return values.index(max(values))
    ranking = sorted(range(len(values)), key=lambda token: (-values[token], token))
    weights = {token: math.exp((values[token] - max(values)) / s.temperature) for token in ranking}
    kept = ranking[: s.top_k] if s.top_k else ranking
    total = sum(weights[token] for token in kept)
    nucleus: list[int] = []
    for token in kept:
        if s.top_p < 1 and sum(weights[t] for t in nucleus) >= np.float32(s.top_p) * total:
            break
        nucleus.append(token)
    final = sorted(token for token in nucleus if weights[token] >= s.min_p)
    goal = slow_uniform(s.seed, len(tokens)) * sum(weights[token] for token in final)
    cumulative = 0.0
    for token in final:
        cumulative += weights[token]
        if cumulative > goal:
            return token
    raise AssertionError("u is below 1")


@dataclass
class Given:
    """The results of a sampling, on the host."""

    tokens: Int32s
    finite: npt.NDArray[np.bool_]
    logprobs: tuple[Int32s, Int32s, Float32s] | None


class Rig:
    """Tables and a sampler on a device, as in the runner."""

    def __init__(self, vocabulary: int, device: Device = DEVICE) -> None:
        self.device = device
        self.tables = SlotTables(CONFIG, vocabulary, device)
        self.sampler = Sampler(self.tables, vocabulary, TorchOps(), device)

    def apply(self, builder: PlanBuilder) -> None:
        plan = builder.build()
        writes = self.tables.read(plan, np.zeros(0, np.uint8))
        assert writes is not None
        inputs = StepInputs(plan, self.device)
        self.device.queue(lambda: self.tables.write(writes, inputs))

    def sample(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Mapping[int, UInt32s] = NO_MASKS,
    ) -> Given:
        ask = self.sampler.ask(np.asarray(slots, np.int64), np.asarray(positions, np.int64), masks)
        columns = SampledColumns(ask, self.device)
        self.device.queue(lambda: columns.fill(self.sampler.sample(logits, ask)))
        self.device.event().wait()
        return Given(columns.tokens, columns.finite, columns.logprobs())


def packed(ids: set[int], vocabulary: int) -> UInt32s:
    """A mask that allows `ids`, in the arena's format."""
    bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def sample(
    rows: list[tuple[list[int], int, Sampling]],
    logits: torch.Tensor,
    device: Device = DEVICE,
    masks: Mapping[int, set[int]] = MappingProxyType({}),
) -> Given:
    """Samples rows of (tokens so far, prompt length, parameters), each in its own slot. `masks` are by row."""
    tested = Rig(logits.shape[1], device)
    builder = PlanBuilder()
    for slot, (tokens, prompt_len, sampling) in enumerate(rows):
        builder.slot(slot, tokens, sampling, prompt_len)
    tested.apply(builder)
    words = {row: packed(ids, logits.shape[1]) for row, ids in masks.items()}
    return tested.sample(logits, range(len(rows)), [len(tokens) for tokens, _, _ in rows], words)


TOKEN = st.integers(0, VOCABULARY - 1)
# Multiples of 0.25 often tie, and are exact, so both samplers see the same ties.
QUARTER = st.integers(-12, 12).map(lambda n: n / 4)
SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.25]),
    top_k=st.sampled_from([0, 0, 1, 3, 22, 23, 100]),
    seed=st.integers(0, MASK),
    min_total=st.integers(0, 12),
    stop_ids=st.lists(TOKEN, max_size=3).map(tuple),
    allowed=st.one_of(st.just(()), st.lists(TOKEN, min_size=1, max_size=9, unique=True).map(sorted).map(tuple)),
    bias=st.lists(st.tuples(TOKEN, QUARTER), max_size=3, unique_by=lambda b: b[0]).map(tuple),
)
ROW = st.tuples(
    st.lists(TOKEN, min_size=1, max_size=10), SAMPLING, st.lists(QUARTER, min_size=VOCABULARY, max_size=VOCABULARY)
)


@pytest.mark.parametrize("device", [DEVICE, DEFERRED], ids=["cpu", "deferred"])
@settings(max_examples=300, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=6), data=st.data())
def test_as_the_protocol_says(
    device: Device, rows: list[tuple[list[int], Sampling, list[float]]], data: st.DataObject
) -> None:
    prompt_lens = [data.draw(st.integers(1, len(tokens))) for tokens, _, _ in rows]
    logits = torch.tensor([values for _, _, values in rows])
    inputs = [(tokens, prompt, sampling) for (tokens, sampling, _), prompt in zip(rows, prompt_lens, strict=True)]
    masks = {}
    for row, (_, sampling, _) in enumerate(rows):
        if data.draw(st.booleans()):
            # The brain's masks always allow at least one of the slot's allowed ids.
            some = data.draw(st.sampled_from(sampling.allowed or range(VOCABULARY)))
            masks[row] = {some, *data.draw(st.sets(TOKEN))}
    sampled = sample(inputs, logits, device, masks)
    expected = [
        slow_sample(v, t, p, s, masks.get(row))
        for row, ((t, s, v), p) in enumerate(zip(rows, prompt_lens, strict=True))
    ]
    assert sampled.tokens.tolist() == expected
    assert sampled.finite.all()


@pytest.mark.parametrize("vocabulary", [23, 64, 1000])
def test_every_device_reads_masks_alike(vocabulary: int) -> None:
    random = np.random.default_rng(vocabulary)
    words = random.integers(0, 2**32, (5, -(-vocabulary // 32)), np.uint32)
    masks = torch.from_numpy(words.view(np.int32))
    forbidden = TorchOps().forbidden(masks, vocabulary)
    assert forbidden.shape == (5, vocabulary)
    assert torch.equal(forbidden, HostOps().forbidden(masks, vocabulary))
    token = vocabulary - 1
    assert forbidden[2, token] == (int(words[2, token // 32]) >> token % 32 & 1 == 0)


def test_splitmix64_is_the_published_generator() -> None:
    # The first outputs of the reference implementation with seed 1234567.
    seeds = (np.uint64(1234567) + np.arange(3, dtype=np.uint64) * np.uint64(GOLDEN)).astype(np.uint64)
    assert splitmix64(seeds).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_random_bits_are_those_of_every_hand() -> None:
    """tests/gpu checks the kernels against the same values."""
    seeds, positions, bits = zip(*VALUES, strict=True)
    given = uniform(np.array(seeds, np.uint64), np.array(positions, np.int64))
    assert given.tolist() == [value / 2**53 for value in bits]


@given(st.integers(0, MASK), st.integers(0, 1 << 31))
def test_uniform_wraps_around(seed: int, position: int) -> None:
    value = uniform(np.array([seed], np.uint64), np.array([position]))[0]
    assert value == slow_uniform(seed, position)
    assert 0 <= value < 1


def test_a_row_is_sampled_alike_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50_001, generator=generator) * 3
    base = Sampling(temperature=1.0)
    kinds = [
        base,
        replace(base, top_p=0.9, seed=1),
        replace(base, top_k=40, seed=2, temperature=0.7),
        replace(base, min_p=0.01, seed=3),
        replace(base, repetition_penalty=1.3, frequency_penalty=0.1, seed=4, top_p=0.999),
        Sampling(),
    ]
    rows = [([1, 2, 3], 2, kind) for kind in kinds]
    together = sample(rows, logits).tokens.tolist()
    alone = [int(sample([row], logits[i : i + 1]).tokens[0]) for i, row in enumerate(rows)]
    backwards = sample(rows[::-1], logits.flip(0)).tokens.tolist()[::-1]
    assert together == alone == backwards


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    # A real slot has as many positions as its context. This one has as many as the test draws.
    tested = Rig(5, device=DEVICE)
    builder = PlanBuilder()
    builder.slot(0, [0], Sampling(temperature=1.0, seed=99))
    tested.apply(builder)
    count = 20_000
    tested.tables.token_pool = torch.zeros(count, dtype=torch.int32)
    tokens = tested.sample(logits.expand(count, -1), [0] * count, range(count)).tokens
    shares = torch.bincount(torch.from_numpy(tokens), minlength=5) / count
    torch.testing.assert_close(shares, logits.softmax(0), atol=0.012, rtol=0)


@pytest.mark.parametrize("spread", [0.0, 0.001, 4.0])
def test_the_nucleus_is_exact_however_wide_it_is(spread: float) -> None:
    scaled = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2)) * spread
    scaled = scaled - scaled.amax(-1, keepdim=True)
    top_k, top_p = torch.tensor([3000, 700]), torch.tensor([0.95, 0.5, 1.0])
    keep = torch.cat((nucleus(scaled[:1], top_p[:1]), most_likely(scaled[1:], top_k, top_p[1:], 3000)))
    for row, (k, p) in enumerate(zip([5000, 3000, 700], [0.95, 0.5, 1.0], strict=True)):
        order = torch.argsort(scaled[row], descending=True, stable=True)[:k]
        weights = scaled[row][order].double().exp()
        goal = np.float32(p) * weights.sum()
        kept = k if p == 1 else int((weights.cumsum(0) - weights < goal).sum())
        # In a flat distribution rounding may move the boundary by one token.
        assert abs(int(keep[row].sum()) - kept) <= 1
        assert keep[row][order[: kept - 1]].all()
        assert not keep[row][order[kept + 1 :]].any()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.5), Sampling(logprobs=2)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_told_and_touch_no_other_row(sampling: Sampling, bad: float) -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(3))
    good = sample([([1], 1, sampling)] * 3, logits).tokens.tolist()
    logits[1, 5] = bad
    sampled = sample([([1], 1, sampling)] * 3, logits)
    assert sampled.finite.tolist() == [True, False, True]
    assert sampled.tokens.tolist() == [good[0], 0, good[2]]


def test_ties_are_won_by_the_first() -> None:
    logits = torch.zeros(2, 50_000)
    logits[0, [40_001, 17_003, 49_999]] = 2
    logits[1, [49_000, 48_999]] = 2
    assert sample([([1], 1, Sampling())] * 2, logits).tokens.tolist() == [17_003, 48_999]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(4)) * 100
    assert sample([([1], 1, Sampling(temperature=1e-38))], logits).tokens[0] == logits.argmax()


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(5))
    bias = ((4, 100.0),)
    rows = [
        ([1], 1, Sampling(bias=bias, logprobs=0)),
        ([1], 1, Sampling()),
        ([1], 1, Sampling(bias=bias, logprobs=3)),
        ([1], 1, Sampling(logprobs=255)),
    ]
    sampled = sample(rows, logits)
    assert sampled.logprobs is not None
    counts, ids, values = sampled.logprobs
    assert counts.tolist() == [1, 0, 4, 1 + VOCABULARY]
    expected = logits.log_softmax(-1)
    assert ids[:2].tolist() == [4, 4]
    assert ids[2:5].tolist() == logits[2].topk(3).indices.tolist()
    assert ids[6:].tolist() == logits[3].argsort(descending=True).tolist()
    picked = torch.cat((expected[0, ids[:1]], expected[2, ids[1:5]], expected[3, ids[5:]]))
    np.testing.assert_allclose(values, picked, atol=1e-6)


def test_a_slot_forgets_its_last_request() -> None:
    tested = Rig(VOCABULARY)
    busy = Sampling(
        stop_ids=(3,),
        min_total=50,
        bias=((7, 5.0),),
        allowed=(1, 7),
        repetition_penalty=9.0,
        logprobs=2,
        temperature=1.0,
    )
    for sampling in (busy, Sampling()):
        builder = PlanBuilder()
        builder.slot(0, [3, 7], sampling)
        tested.apply(builder)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 3] = 1
    sampled = tested.sample(logits, [0], [2])
    assert sampled.tokens.tolist() == [3]
    assert sampled.logprobs is None


def test_the_placeholders_of_an_embedded_prompt_were_not_seen() -> None:
    tested = Rig(VOCABULARY)
    builder = PlanBuilder()
    penalty = Sampling(repetition_penalty=4.0)
    for slot, embeds_offset in enumerate([-1, 0]):
        builder.slot(slot, [0, 0, 0, 5], penalty, prompt_len=3, embeds_offset=embeds_offset)
    tested.apply(builder)
    logits = torch.zeros(2, VOCABULARY)
    logits[:, :6] = torch.tensor([2.0, 1.0, 0.0, 0.0, 0.0, 3.0])
    tokens = tested.sample(logits, [0, 1], [4, 4]).tokens.tolist()
    assert tokens == [1, 0], "both penalise the generated 5, and only the first penalises the prompt's 0"
