"""Checks of every operator at the shapes of published models.

On a GPU all of them run with Triton's kernels. The `small` ones also run on a CPU with the PyTorch reference operators.
So no check needs a GPU to show its own mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.gpu.interface import Kernels
from forebay.layers.ops import Heads
from forebay.protocol.constants import FLAG_SAMPLE
from tests.gpu.checks import codes, eight_bits, experts, layers, low_rank, recurrent, sampling, sparse, tables
from tests.gpu.checks.attention import check_attend, check_attend_chosen, check_missing_page
from tests.gpu.checks.memory import Numbers, Paged
from tests.hand.support import Sampling

Check = Callable[[Kernels, torch.device, int], None]
"""The arguments are the operators, their device, and a seed."""
TYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class Case:
    """A check at the sizes of a model."""

    name: str
    check: Check
    small: bool
    """True if the reference operators take less than a second on a CPU."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Model:
    """A published model's sizes."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    norms: bool = False


LLAMA_8B = Model(4096, 14336, 32, 8, 128, 128256)
QWEN_0_6B = Model(1024, 3072, 16, 8, 128, 151936, norms=True)
QWEN_8B = Model(4096, 12288, 32, 8, 128, 151936, norms=True)
SMOLLM2 = Model(576, 1536, 9, 3, 64, 49152)
MODELS = {"Llama-3.1-8B": LLAMA_8B, "Qwen3-0.6B": QWEN_0_6B, "Qwen3-8B": QWEN_8B, "SmolLM2-135M": SMOLLM2}
PAGE = 16
RANK, ROTARY, LATENT_HEADS, INDEX_HEADS, INDEX_DIM, TOP_K = 512, 64, 128, 64, 128, 2048
"""Sizes of DeepSeek V3.2. Scores are computed with heads of 192 elements."""
EXPERTS, EACH, EXPERT_HIDDEN, EXPERT_INNER = 128, 8, 2048, 768
"""Sizes of Qwen3-30B-A3B."""

Rows = list[tuple[int, int]]
STEPS: dict[str, tuple[Rows, tuple[int, int], bool]] = {
    # Rows by start and length, padding in rows and tokens, and `Case.small`.
    "one decode row": ([(777, 1)], (0, 0), True),
    "few rows of both kinds": ([(70, 1), (0, 37), (15, 1), (100, 24), (0, 1)], (3, 5), True),
    "64 decode rows": ([(position * 97 % 3000, 1) for position in range(64)], (0, 0), False),
    "one long decode row": ([(30000, 1)], (0, 0), False),
    "a long decode row among short ones": ([*[(300, 1)] * 20, (12000, 1), *[(299, 1)] * 20], (3, 0), False),
    "a prompt of 2048": ([(0, 2048)], (0, 0), False),
    "a chunk beside decode rows": ([(3000, 1), (1500, 500), (0, 1), (0, 300), (31, 1)], (59, 222), False),
}
LATENT_STEPS: dict[str, tuple[Rows, tuple[int, int], bool]] = {
    "one decode row": ([(300, 1)], (0, 0), True),
    "few rows of both kinds": ([(40, 1), (0, 9)], (1, 3), True),
    "32 decode rows": ([(position * 61 % 2500, 1) for position in range(32)], (0, 0), False),
    "a chunk beside decode rows": ([(2000, 1), (500, 130), (3, 1)], (5, 60), False),
}


def check_same_bits(operators: Kernels, device: torch.device, seed: int) -> None:
    """A hundred runs in flight give the same bits, whichever program of a long row ends last."""
    numbers, rows = Numbers(device, seed), 24
    ends = [12000 if row % 8 == 3 else 200 + row for row in range(rows)]
    paged = Paged.make(ends, 8, 128, PAGE, seed, torch.bfloat16, device)
    q = numbers.normal(rows, 16, 128, dtype=torch.bfloat16)
    step = paged.rows([1] * rows)
    found = [operators.attend(q, paged.pool, paged.pool, step, 128**-0.5) for _ in range(100)]
    assert all(torch.equal(one, found[0]) for one in found)


def case(name: str, check: Callable[..., None], *args: Any, small: bool = False, **named: Any) -> Case:
    """A case of a check that takes `device` and `seed` by name."""

    def run(operators: Kernels, device: torch.device, seed: int) -> None:
        check(operators, *args, device=device, seed=seed, **named)

    return Case(name, run, small)


def attention() -> Iterator[Case]:
    """Qwen3-8B is left out: its heads are those of Llama-3.1-8B.

    Compilation takes long, so float32 has only two models.
    """
    for dtype, type_ in TYPES.items():
        for name in ("Llama-3.1-8B", "Qwen3-0.6B", "SmolLM2-135M"):
            if name == "Llama-3.1-8B" and dtype == torch.float32:
                continue
            model = MODELS[name]
            shape: dict[str, Any] = {"heads": (model.heads, model.kv_heads), "widths": (model.dim, 0)}
            shape |= {"page_size": PAGE, "scale": model.dim**-0.5, "dtype": dtype}
            for step, (rows, padding, small) in STEPS.items():
                small = small and name != "Llama-3.1-8B"
                yield case(f"attend {name} {type_}: {step}", check_attend, rows, padding=padding, small=small, **shape)
                if name == "Qwen3-0.6B" and step != "one long decode row":
                    end = f"{type_} on 8 bits: {step}"
                    named: dict[str, Any] = {"padding": padding, "eight_bits": True, **shape}
                    yield case(f"attend {name} {end}", check_attend, rows, small=small, **named)
        for step in ("few rows of both kinds", "64 decode rows", "a chunk beside decode rows"):
            rows, padding, small = STEPS[step]
            shape = {"heads": (8, 4), "widths": (256, 0), "page_size": PAGE, "scale": 256**-0.5, "dtype": dtype}
            shape |= {"window": 1024, "cap": 50.0, "padding": padding}
            yield case(f"attend Gemma-2-2B {type_}: {step}", check_attend, rows, small=small, **shape)
        # In gpt-oss every other layer has a window.
        for step in ("few rows of both kinds", "64 decode rows", "a chunk beside decode rows"):
            rows, padding, small = STEPS[step]
            shape = {"heads": (64, 8), "widths": (64, 0), "page_size": PAGE, "scale": 64**-0.5, "dtype": dtype}
            for window in (0, 128):
                end = f"{type_} with a window: {step}" if window else f"{type_}: {step}"
                more = {"window": window, "sinks": 3.0, "padding": padding, **shape}
                yield case(f"attend gpt-oss {end}", check_attend, rows, small=small, **more)
        shape = {"heads": (LATENT_HEADS, 1), "widths": (RANK, ROTARY), "page_size": 64, "scale": 192**-0.5}
        for step, (rows, padding, small) in LATENT_STEPS.items():
            name = f"attend DeepSeek-V3.2 {type_}: {step}"
            yield case(name, check_attend, rows, padding=padding, dtype=dtype, small=small, **shape)
        if dtype == torch.bfloat16:
            yield Case("attend Qwen3-0.6B: the same bits", check_same_bits, False)
        for queries, top_k in ((4, 256), (4, TOP_K), (64, TOP_K)):
            yield case(
                f"attend_chosen {type_}: {queries} queries of {top_k}",
                check_attend_chosen,
                queries=queries,
                top_k=top_k,
                heads=LATENT_HEADS,
                widths=(RANK, ROTARY),
                scale=192**-0.5,
                dtype=dtype,
                small=top_k < TOP_K,
            )
    yield Case(
        "attend: a page that is missing", lambda operators, device, _: check_missing_page(operators, device), True
    )


def of_layers() -> Iterator[Case]:
    for dtype, type_ in TYPES.items():
        for name, model in MODELS.items():
            heads = Heads(model.heads, model.kv_heads, model.dim)
            for rows, inputs in ((4096, model.hidden), (model.hidden, model.inner)):
                what = f"one_row {name} {type_}: {rows} x {inputs}"
                yield case(what, layers.check_one_row, rows, inputs, rows < inputs, dtype, small=model is SMOLLM2)
            what, sizes = f"one_row_gated {name} {type_}", (model.inner, model.hidden)
            yield case(what, layers.check_one_row_gated, *sizes, False, dtype, small=model is SMOLLM2)
            for tokens in (1, 3, 500):
                small, end = tokens < 500, f"{name} {type_}: {tokens} tokens"
                for added in (False, True):
                    what = "add_norm with a residual" if added else "add_norm"
                    yield case(f"{what} {end}", layers.check_norm, tokens, model.hidden, added, dtype, small=small)
                yield case(f"gate {end}", layers.check_gate, tokens, model.inner, dtype, small=small)
                args = tokens, heads, model.dim, model.norms, dtype
                yield case(f"rotate_and_keep {end}", layers.check_rotate, *args, small=small)
        for pairs in (True, False):
            end = f"{'pairs' if pairs else 'halves'} {type_}"
            yield case(f"keep_latent {end}", layers.check_latent, 64, RANK, ROTARY, pairs, dtype, small=True)
            keys = 64, INDEX_DIM, ROTARY, pairs, dtype
            yield case(f"keep_index_keys {end}", layers.check_index_keys, *keys, small=True)
        for tokens in (3, 300):
            args = tokens, Heads(16, 8, 128), 128, True, dtype
            what = f"rotate_and_keep Qwen3-0.6B {type_} in 8 bits: {tokens} tokens"
            yield case(what, eight_bits.check_8_bits, *args, small=tokens == 3)
        # In GLM-4.5-Air half of each head is rotated. There are more heads than one program takes.
        args = 33, Heads(96, 8, 128), 64, True, dtype
        yield case(f"rotate_and_keep half a head {type_}", layers.check_rotate, *args, small=True)

    yield Case("ties in 8 bits", lambda operators, device, _: eight_bits.check_kept(operators, device), True)


def of_states() -> Iterator[Case]:
    """Recurrent layers, with decode rows alone and with chunks beside them."""
    steps: dict[str, tuple[list[int], tuple[int, int], bool]] = {
        "32 decode rows": ([1] * 32, (0, 0), False),
        "few rows of both kinds": ([1, 9, 1], (2, 4), True),
        "a chunk beside decode rows": ([1, 300, 1, 65, 64, 2], (58, 79), False),
    }
    for dtype, type_ in TYPES.items():
        for name, values in recurrent.published().items():
            shape, (norm, size) = values["shape"], values["norm"]
            channels = 2 * shape.keys + shape.heads * shape.value_dim
            for step, (lengths, padding, small) in steps.items():
                end = f"{name} {type_}: {step}"
                taken = lengths, channels, values["taps"], dtype
                yield case(f"convolve {end}", recurrent.check_convolve, *taken, padding=padding, small=small)
                # On a CPU the reference operators take long for the other models, whose sizes add little.
                small = small and name in ("Qwen3-Next-80B-A3B", "Granite-4.0-H-Tiny")
                more = {"skip": not shape.delta, "padding": padding}
                yield case(f"recur {end}", recurrent.check_recur, lengths, shape, dtype, small=small, **more)
            sizes = 33, shape.heads * shape.value_dim, size, norm, shape.channel_decay, dtype
            shared, what = norm == "before_gate", f"gated_norm {name} {type_}"
            yield case(what, recurrent.check_gated_norm, *sizes, shared=shared, nobody=3, small=True)
        for step, (lengths, padding, small) in steps.items():
            what, args = f"convolve LFM2-1.2B {type_}: {step}", (lengths, 2048, 3, dtype)
            yield case(what, recurrent.check_convolve, *args, gated=True, padding=padding, small=small)


def of_adapters() -> Iterator[Case]:
    """Adapters of several ranks beside the fused products of two models. Some tokens have no adapter."""
    ranks = [16, 64, 8, 64, 1, 32, 64, 16]
    for dtype, type_ in TYPES.items():
        for name, model in MODELS.items():
            queries, keys = model.heads * model.dim, model.kv_heads * model.dim
            products = {"qkv": ([queries, keys, keys], model.hidden), "down": ([model.hidden], model.inner)}
            if name not in ("Llama-3.1-8B", "SmolLM2-135M"):
                continue
            for product, (outputs, inputs) in products.items():
                for tokens in (1, 33, 500):
                    places = [(7 * token) % 9 if tokens < 500 else token // 100 for token in range(tokens)]
                    args = places, outputs, inputs, ranks, dtype
                    small = model is SMOLLM2 and tokens < 500
                    what = f"add_low_rank {name} {type_}: {product} of {tokens} tokens"
                    yield case(what, low_rank.check_add_low_rank, *args, small=small)


def of_experts() -> Iterator[Case]:
    """Few and many copies of an expert, a rank with some of the experts, and quantised weights."""
    sizes = EXPERT_HIDDEN, EXPERT_INNER
    kinds: dict[str, tuple[codes.Shape, codes.Shape]] = {
        "rows": ((sizes[0], sizes[0], 1, 0), (sizes[1], sizes[1], 1, 0)),
        "blocks": ((sizes[0], 128, 128, 0), (sizes[1], 128, 128, 0)),
        "4 bits": ((sizes[0], 128, 1, 128), (sizes[1], 128, 1, 128)),
    }
    for dtype, type_ in TYPES.items():
        yield case(f"experts {type_}: a rank's 4", experts.check_experts, 5, 2, 6, sizes, dtype, first=2, small=True)
        for tokens in (1, 30, 700):
            args = tokens, EACH, EXPERTS, sizes, dtype
            yield case(f"experts {type_}: {tokens} tokens", experts.check_experts, *args)
        # gpt-oss-20b has biases and clamped gates. On a CPU only two experts are computed.
        clamped, sizes_of = experts.check_experts, (2880, 2880)
        yield case(f"experts gpt-oss {type_}: two", clamped, 3, 1, 2, sizes_of, dtype, clamped=True, small=True)
        for tokens in (1, 300):
            args = tokens, 4, 32, sizes_of, dtype
            yield case(f"experts gpt-oss {type_}: {tokens} tokens", clamped, *args, clamped=True)
        for kind, shapes in kinds.items():
            check = codes.check_experts_of_codes
            if dtype == torch.float32:
                yield case(f"experts_of_codes {kind} {type_}: few", check, 3, 2, 3, shapes, dtype, small=True)
            if dtype == torch.bfloat16 or kind == "blocks":
                yield case(f"experts_of_codes {kind} {type_}", check, 600, EACH, EXPERTS, shapes, dtype)


def products() -> Iterator[Case]:
    """Matrices of Llama-3.1-8B and of Qwen3-0.6B. Those with fewer rows than inputs have a bias."""
    matrices = {"Llama-3.1-8B": [(6144, 4096), (4096, 14336)], "Qwen3-0.6B": [(4096, 1024), (1024, 3072)]}
    kinds = {"rows": (None, 1, 0), "blocks": (128, 128, 0), "4 bits": (128, 1, 128), "4 bits of 32": (32, 1, 32)}
    for dtype, type_ in TYPES.items():
        for name, shapes in matrices.items():
            for kind, (group, block_rows, fold) in kinds.items():
                if name == "Llama-3.1-8B" and dtype == torch.float32 and kind != "blocks":
                    continue
                for rows, inputs in shapes:
                    for tokens in (1, 100) if name == "Llama-3.1-8B" else (100,):
                        yield case(
                            f"product {name} {kind} {type_}: {tokens} tokens, {rows} x {inputs}",
                            codes.check_product,
                            tokens,
                            rows,
                            (inputs, group or inputs, block_rows, fold),
                            biased=rows < inputs,
                            dtype=dtype,
                            small=name != "Llama-3.1-8B",
                        )
        for kind, (group, block_rows, fold) in kinds.items():
            shape = 1024, group or 1024, block_rows, fold
            yield case(f"expand {kind} {type_}", codes.check_expand, 3072, shape, dtype, small=True)
        for inputs in (1024, 14336):
            yield case(f"quantise {type_}: {inputs} inputs", codes.check_quantise, 64, inputs, dtype, small=True)


def of_sampling() -> Iterator[Case]:
    for name, model in MODELS.items():
        small = model is SMOLLM2
        for dtype, type_ in TYPES.items():
            args = 16, model.vocabulary, dtype
            yield case(f"greedy {name} {type_}", sampling.check_greedy, *args, small=small)
        for spread in (0.01, 3.0):
            # Flat distributions have more candidates than fit.
            rows = 8 if small else 64
            check = sampling.check_random_draws
            yield case(f"draw {name}: spread {spread}", check, rows, model.vocabulary, spread, small=small)
        for most in (0, 20):
            yield case(f"likely {name}: {most}", sampling.check_likely, 16, model.vocabulary, most, small=True)
        yield case(f"penalise {name}", sampling.check_penalise, 16, 9, model.vocabulary, small=True)
        yield case(f"adjust {name}", sampling.check_adjust, 15, model.vocabulary, small=True)
        yield case(f"tell_likely {name}", sampling.check_tell_likely, 15, model.vocabulary, small=True)
    yield case("count_tokens", sampling.check_count_tokens, 256, 4096, small=True)
    yield case("ask", sampling.check_ask, 256, small=True)
    yield case("keep", sampling.check_keep, 256, small=True)


SIZES = tables.Sizes(256, 32768, 16, 9999, 28 * 32, 151936)


def check_plans(operators: Kernels, device: torch.device, seed: int) -> None:
    """Three plans with new slots of short and maximum lengths, and with pages for them."""
    random = np.random.default_rng(seed)
    plans = []
    for lengths in ([17, 4000, 32768], [1, 2048], [9] * 40):
        slots = {}
        for slot, length in zip(random.permutation(SIZES.slots).tolist(), lengths, strict=False):
            tokens = random.integers(0, SIZES.vocabulary, length).tolist()
            sampled = Sampling(temperature=0.7, top_p=0.9, top_k=slot, seed=int(random.integers(1 << 62)))
            slots[slot] = (tokens, length == 4000, sampled)
        pages = {(slot, index): int(random.integers(SIZES.pages)) for slot in slots for index in range(30)}
        plans.append({"slots": slots, "pages": pages})
    tables.check_applied(operators, plans, SIZES, device)


def check_rows(
    operators: Kernels, rows: int, chunk: int, more: tuple[int, int], device: torch.device, seed: int
) -> None:
    """Rows of one token, and one row with a chunk, at random positions. `more`: padded rows, and tokens of no row."""
    random = np.random.default_rng(seed)
    slots, lengths = random.permutation(SIZES.slots)[:rows].tolist(), [chunk] + [1] * (rows - 1)
    planned = [
        (slot, int(random.integers(SIZES.context - length)), length, FLAG_SAMPLE * int(random.integers(2)))
        for slot, length in zip(slots, lengths, strict=True)
    ]
    tables.check_prepared(operators, planned, more, seed, SIZES, device)


def of_tables() -> Iterator[Case]:
    yield Case("apply_slots and write_table", check_plans, True)
    for words in (1, 700, 40_000):
        yield case(f"move_words: {words}", tables.check_move_words, words, small=True)
    for rows, chunk, more in ((1, 1, (0, 0)), (200, 1, (24, 24)), (40, 1900, (24, 109)), (3, 8000, (0, 0))):
        yield case(f"prepare: {rows} rows and {chunk} tokens", check_rows, rows, chunk, more, small=True)


def check_hot(
    operators: Kernels, hot: int, top_k: int, context: int, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Steps of sparse slots with `hot` rows each."""
    width, page = RANK + ROTARY, 64
    sizes = sparse.RigSizes(page, 24, 2 * page, page * width + 128, width, 4, context)
    rig = sparse.Rig(hot, seed, sizes, dtype, device, operators.READS_HOST)
    sparse.check_found(operators, rig, 10, top_k, top_k + top_k // 4)


def of_sparse() -> Iterator[Case]:
    index: dict[str, Any] = {"heads": INDEX_HEADS, "dim": INDEX_DIM, "page_size": 64}
    steps: dict[str, tuple[Rows, int, int, bool]] = {
        "decode rows": ([(300, 1), (90, 1), (127, 1)], 128, 0, True),
        "few queries": ([(200, 9), (0, 5)], 128, 3, True),
        "long decode rows": ([(9000, 1), (2047, 1), (2048, 1), (30000, 1), (40, 1)], TOP_K, 0, False),
        "a long chunk": ([(3900, 200), (5000, 1), (1900, 300)], TOP_K, 30, False),
    }
    for dtype, type_ in TYPES.items():
        for step, (rows, top_k, padding, small) in steps.items():
            for distinct in (0, 50):
                alike = " of few keys" if distinct else ""
                yield case(
                    f"choose {type_}: {step}{alike}",
                    sparse.check_choose,
                    rows,
                    top_k,
                    padding=padding,
                    distinct=distinct,
                    dtype=dtype,
                    small=small,
                    **index,
                )
        for hot, top_k, context in ((256, 128, 1024), (TOP_K, TOP_K, 8192), (2 * TOP_K, TOP_K, 8192)):
            args = hot, top_k, context, dtype
            yield case(f"resolve and gather {type_}: {hot} hot rows", check_hot, *args, small=top_k < TOP_K)
    yield Case("clear_slots and open_hot_rows", _opened, True)


def _opened(operators: Kernels, device: torch.device, seed: int) -> None:
    sparse.check_opened(operators, device)


def cases() -> list[Case]:
    """All cases. Those that most often show a mistake come first."""
    parts = (
        *(attention(), of_layers(), of_tables(), of_sampling(), of_experts(), products(), of_sparse()),
        *(of_states(), of_adapters()),
    )
    return [found for part in parts for found in part]
