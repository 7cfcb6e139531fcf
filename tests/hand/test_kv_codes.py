"""Keys and values as 8-bit codes: logits beside PyTorch that rounds, any company, memory, copies, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.compute.native import NativeCompute
from forebay.layers.ops import TorchOps
from forebay.protocol.constants import COPY_OK, COPY_RESTORE, COPY_SAVE
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from tests.hand.support import hf_config, reference_model, runner_of, wire_config
from tests.hand.test_copier import Hand, page
from tests.hand.test_quantised import STEPS, fill, native, reference, rows

FAMILY = "qwen3"
"""The small models' heads of 32."""


def runner(codes: bool = True, **changes: Any) -> ModelRunner:
    changes = {"page_size": 16, "kv_cache_dtype": "int8" if codes else None, **changes}
    return fill(runner_of(reference_model(FAMILY), **changes))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What 8 bits leave, with a bfloat16 scale that is no less than the largest of 32 numbers wants."""
    parts = x.float().unflatten(-1, (-1, 32))
    exact = parts.abs().amax(-1, keepdim=True) / 127
    # Rounded up: a bfloat16 is the upper half of a float.
    scale = (exact.view(torch.int32) + 0xFFFF >> 16 << 16).view(torch.float32)
    return (scale * (parts / scale.clamp_min(1e-30)).round()).flatten(-2).to(x.dtype)


def rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has PyTorch's operators keep and see keys and values as codes give them back."""
    exact = TorchOps.rotate_and_keep

    def keep(self: TorchOps, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = exact(self, *arguments)
        kv, writes = arguments[-2:]
        k, v = rounded(k), rounded(v)
        kv.keys.index_copy_(0, writes, k)
        kv.values.index_copy_(0, writes, v)
        return q, k, v

    monkeypatch.setattr(TorchOps, "rotate_and_keep", keep)


def logits(compute: Any) -> list[torch.Tensor]:
    return [compute.logits(rows(step)) for step in STEPS]


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The typical difference over the logits' own spread."""
    pairs = zip(found, wanted, strict=True)
    return max(float((one - other).square().mean().sqrt() / other.std()) for one, other in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_torch_that_rounds(dtype: str, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = logits(native(runner(dtype=dtype)))
    exact = logits(reference(runner(codes=False, dtype=dtype)))
    rounds(monkeypatch)
    wanted = logits(reference(runner(codes=False, dtype=dtype)))
    assert distance(found, exact) < 0.05
    if dtype == "float32":
        # A code may differ by one where a number is halfway.
        assert distance(found, wanted) < 0.005 < distance(wanted, exact)


def test_tokens_do_not_depend_on_chunks_or_company(instructions: str) -> None:
    together = native(runner(), threads=2)
    whole = [together.logits(rows(step)) for step in STEPS]
    for chunk in (1, 7, 16):
        alone = native(runner(), threads=1)
        for slot, length in ((0, 37), (1, 1), (2, 50)):
            for start in range(0, length, chunk):
                found = alone.logits(rows([(slot, start, min(chunk, length - start))]))
            assert torch.equal(found[0], whole[0][slot])
    assert torch.equal(alone.logits(rows([(2, 50, 1)]))[0], whole[1][2])


def test_what_is_no_number_is_told(instructions: str) -> None:
    one = runner()
    with torch.no_grad():
        one.decoder.embedding[int(one.tables.token_pool[0, 3])] = torch.nan
    _, finite = native(one).greedy(rows([(0, 0, 9), (1, 0, 9)]))
    assert finite.tolist() == [False, True]


def test_pages_of_an_earlier_owner_do_no_harm() -> None:
    one = runner()
    for layer in one.kv.layers:
        for pages in layer:
            pages.fill_(0xFF)
    assert isinstance(compute := native(one), NativeCompute)
    clean = logits(native(runner()))
    assert all(torch.equal(found, wanted) for found, wanted in zip(logits(compute), clean, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_page_takes_17_bytes_for_16_numbers(dtype: str) -> None:
    plain, coded = (runner(codes=codes, dtype=dtype).kv for codes in (False, True))
    assert coded.page_bytes * 16 * plain.dtype.itemsize == plain.page_bytes * 17
    assert coded.nbytes == coded.page_count * coded.page_bytes


def test_a_restored_page_is_the_one_that_was_saved() -> None:
    hand = Hand(FAMILY, page_size=16, kv_cache_dtype="int8", kv_checksum=True)
    hand.step((7, COPY_SAVE, 1, 5), rows=True)
    assert hand.until_ended(1) == [[7, COPY_OK]]
    saved = page(hand.runner, 1)
    assert any(any(piece) for piece in saved)
    hand.step((9, COPY_RESTORE, 11, 5))
    assert hand.until_ended(1) == [[9, COPY_OK]]
    assert page(hand.runner, 11) == saved


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (FAMILY, {"kv_cache_dtype": "fp8"}, "kv cache dtype 'fp8' is not supported: use null or int8 or fp8_e4m3"),
        (FAMILY, {"kv_cache_dtype": "fp8_e4m3"}, "is for a GPU's kernels, and the device is cpu: use int8"),
        (
            FAMILY,
            {"page_size": 8},
            "multiple of 16 tokens and heads of a multiple of 32: there are 8 and 32",
        ),
        ("llama-head-dim", {}, "there are 16 and 24"),
        ("deepseek-v3", {}, "has latent rows"),
        (FAMILY, {"world_size": 2}, "needs the compiled kernels of one rank"),
        (FAMILY, {"device": "deferred"}, "the device is deferred: use fp8_e4m3, or leave it off"),
    ],
)
def test_what_can_not_have_codes_says_so(family: str, changes: dict[str, Any], message: str) -> None:
    model = reference_model(family)
    changes = {"page_size": 16, "kv_cache_dtype": "int8", **changes}
    with pytest.raises(ValueError, match=message):
        ModelRunner(RunnerConfig.from_dict(wire_config(hf_config(model.config, type(model).__name__), **changes)))


def test_torchs_operators_can_not_read_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_KERNELS", "torch")
    with pytest.raises(ValueError, match="needs the compiled kernels, and Qwen3ForCausalLM is computed by PyTorch"):
        runner()
