"""Routing, compared with its formulas, and experts whose results do not depend on a token's neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.device.watch import NoWaits
from forebay.layers.moe import MixtureOfExperts
from forebay.layers.ops import HostOps, TorchOps
from forebay.layers.params import Parameters
from forebay.layers.routing import choose
from forebay.weights.errors import ModelError
from forebay.weights.parts import Experts, Routing
from tests.hand.support import MiniBrain, Request, reference_model, runner_of

COUNT, PER_TOKEN = 12, 3
SOFTMAX = Routing("softmax", False, False, 1, 1, 1, True, 1.0)
UNWEIGHED = replace(SOFTMAX, normalise=False)
GREEDY = Routing("softmax", True, False, 1, 1, 1, False, 2.0)
LIMITED = replace(GREEDY, groups=4, kept_groups=2)
SIGMOID = Routing("sigmoid", True, True, 4, 2, 2, True, 2.5)
ROUTINGS = {"softmax": SOFTMAX, "unweighed": UNWEIGHED, "greedy": GREEDY, "limited": LIMITED, "sigmoid": SIGMOID}

Weights = dict[int, float]


def softmax(logits: list[float], normalise: bool) -> Weights:
    """The rule of Qwen3-MoE."""
    scores = torch.tensor(logits).softmax(0).tolist()
    best = sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:PER_TOKEN]
    total = sum(scores[e] for e in best) if normalise else 1.0
    return {e: scores[e] / total for e in best}


def greedy(logits: list[float]) -> Weights:
    """The rule of DeepSeek-V2-Lite."""
    return {e: 2.0 * weight for e, weight in softmax(logits, False).items()}


def limited(logits: list[float]) -> Weights:
    """The rule of DeepSeek-V2: a group's score is that of its best expert."""
    scores = torch.tensor(logits).softmax(0).tolist()
    size = len(scores) // 4
    best = [max(scores[group * size : (group + 1) * size]) for group in range(4)]
    kept = sorted(range(4), key=lambda group: (-best[group], group))[:2]
    inside = [scores[e] if e // size in kept else 0.0 for e in range(len(scores))]
    chosen = sorted(range(len(scores)), key=lambda e: (-inside[e], e))[:PER_TOKEN]
    return {e: 2.0 * inside[e] for e in chosen}


def sigmoid(logits: list[float], bias: list[float]) -> Weights:
    """The rule of DeepSeek-V3: a group's score sums its two best experts. The bias affects only the choice."""
    scores = torch.tensor(logits).sigmoid().tolist()
    wanted = (torch.tensor(scores) + torch.tensor(bias)).tolist()
    size = len(scores) // 4
    # Sums are computed in float32, because sums in Python's float64 would have other ties.
    groups = torch.tensor(wanted).view(4, size)
    best = groups.sort(dim=1).values[:, -2:].sum(dim=1).tolist()
    kept = sorted(range(4), key=lambda group: (-best[group], group))[:2]
    chosen = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: (-wanted[e], e))[:PER_TOKEN]
    total = sum(scores[e] for e in chosen) + 1e-20
    return {e: 2.5 * scores[e] / total for e in chosen}


RULES: dict[str, Callable[[list[float], list[float]], Weights]] = {
    "softmax": lambda logits, bias: softmax(logits, True),
    "unweighed": lambda logits, bias: softmax(logits, False),
    "greedy": lambda logits, bias: greedy(logits),
    "limited": lambda logits, bias: limited(logits),
    "sigmoid": sigmoid,
}


def chosen(logits: torch.Tensor, bias: torch.Tensor, routing: Routing) -> list[Weights]:
    ids, weights = choose(logits, bias if routing.corrected else None, PER_TOKEN, routing)
    return [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), weights.tolist(), strict=True)]


def agrees(name: str, routing: Routing) -> bool:
    """True if a routing gives the results of a rule, for tokens without ties."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(200, COUNT, generator=generator)
    bias = torch.rand(COUNT, generator=generator) * 0.3
    for row, found in zip(logits.tolist(), chosen(logits, bias, routing), strict=True):
        expected = RULES[name](row, bias.tolist())
        if found.keys() != expected.keys() or any(abs(found[e] - expected[e]) > 1e-6 for e in expected):
            return False
    return True


@pytest.mark.parametrize("name", RULES)
def test_routings_are_their_formulas(name: str) -> None:
    assert agrees(name, ROUTINGS[name])


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("softmax", UNWEIGHED),
        ("unweighed", SOFTMAX),
        ("greedy", replace(GREEDY, scaling=1.0)),
        ("limited", GREEDY),
        ("limited", replace(LIMITED, best_of_group=2)),
        ("limited", replace(LIMITED, kept_groups=3)),
        ("sigmoid", replace(SIGMOID, corrected=False)),
        ("sigmoid", replace(SIGMOID, best_of_group=1)),
        ("sigmoid", replace(SIGMOID, scores="softmax")),
        ("sigmoid", replace(SIGMOID, normalise=False)),
        ("sigmoid", replace(SIGMOID, groups=1, kept_groups=1)),
    ],
)
def test_another_rule_is_noticed(name: str, other: Routing) -> None:
    assert not agrees(name, other)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=COUNT, max_size=COUNT))
def test_of_equal_scores_the_lower_id_wins(name: str, logits: list[float]) -> None:
    zeros = torch.zeros(COUNT)
    [found] = chosen(torch.tensor([logits]), zeros, ROUTINGS[name])
    assert list(found) == sorted(RULES[name](logits, zeros.tolist()))


def test_equal_scores_of_as_many_experts_as_models_have() -> None:
    """The test has many experts, because libraries happen to keep the order of equal scores if there are few."""
    logits = torch.randint(0, 3, (50, 384), generator=torch.Generator().manual_seed(1)).float()
    ids, _ = choose(logits, None, 8, GREEDY)
    for row, found in zip(logits.tolist(), ids.tolist(), strict=True):
        assert found == sorted(sorted(range(384), key=lambda expert: (-row[expert], expert))[:8])


def mixture(routing: Routing, dtype: torch.dtype = torch.float32) -> MixtureOfExperts:
    params = Parameters(dtype, torch.device("cpu"))
    made = MixtureOfExperts(params, "mlp", 64, Experts(COUNT, PER_TOKEN, 24, 48, routing))
    params.randomise(3, lambda done, total: None)
    made.router.weight.mul_(20)
    return made


OPS = pytest.mark.parametrize("ops", [HostOps(), TorchOps()], ids=["host", "beside"])


@OPS
@pytest.mark.parametrize("name", RULES)
def test_a_token_is_computed_as_if_it_were_alone(name: str, ops: TorchOps) -> None:
    made = mixture(ROUTINGS[name])
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(1))
    ids, weights = made.router(x)
    together = made(x, ops)
    for index in range(len(x)):
        alone = x[index : index + 1]
        own_ids, own_weights = made.router(alone)
        assert torch.equal(own_ids[0], ids[index])
        torch.testing.assert_close(own_weights[0], weights[index], atol=1e-6, rtol=0)
        torch.testing.assert_close(made(alone, ops)[0], together[index], atol=1e-6, rtol=0)
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(made(x[shuffled], ops), together[shuffled], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_to_compute_experts_are_one(dtype: torch.dtype) -> None:
    made = mixture(SIGMOID, dtype)
    for tokens in (1, 2, 33):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-3
        torch.testing.assert_close(made(x, HostOps()), made(x, TorchOps()), atol=tolerance, rtol=0)


def test_work_beside_the_host_never_asks_which_experts() -> None:
    made = mixture(LIMITED)
    with torch.inference_mode(), NoWaits():
        made(torch.randn(9, 64), TorchOps())


def test_a_pytorch_without_grouped_products_is_told_of_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference_model("qwen3-moe")
    expected = Request([1, 2, 3], 4)
    MiniBrain(runner_of(model)).serve([expected])
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    with pytest.raises(ModelError, match=r"experts on deferred needs PyTorch 2\.10 or newer, which has .*grouped_mm"):
        runner_of(model, device="deferred")
    assert runner_of(reference_model("qwen3"), device="deferred").kv.page_count
    # A CPU never calls grouped products.
    found = Request([1, 2, 3], 4)
    MiniBrain(runner_of(model)).serve([found])
    assert found.tokens == expected.tokens
