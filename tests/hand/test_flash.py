"""FlashAttention 3 is called as its interface documents. A stand-in with the library's signature computes attention."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from forebay.attention.flash import MODULE, FlashAttention
from forebay.compute.paged import PagedSteps
from forebay.gpu import reference
from forebay.gpu.choose import VARIABLE
from forebay.gpu.interface import PagedRows
from tests.hand.support import MiniBrain, Request, Sampling, reference_model, runner_of

PROMPTS = [list(range(3, 40)), [7], [90, 5, 61, 7, 7, 8, 20], list(range(100, 80, -1))]


class Library:
    """`flash_attn_with_kvcache` of Dao-AILab's `hopper/flash_attn_interface.py`, as far as it is documented there."""

    def __init__(self, gives_more: bool) -> None:
        self.gives_more = gives_more
        """True if the log-sum-exp is returned too, as by some releases."""
        self.longest: list[int] = []

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: int | torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Any:
        """Attends from q [tokens, heads, dim] to pages of keys and of values [pages, page_size, kv_heads, dim]."""
        assert k is None
        assert v is None
        assert q.dtype == k_cache.dtype == v_cache.dtype == torch.bfloat16
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert isinstance(cache_seqlens, torch.Tensor)
        assert page_table is not None
        assert cu_seqlens_q is not None
        rows = len(cache_seqlens)
        assert (page_table.shape[0], cu_seqlens_q.shape) == (rows, (rows + 1,))
        for tensor in (cache_seqlens, page_table, cu_seqlens_q):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
        # The library's kernels do not check page numbers.
        missing = page_table < 0
        torch._assert_async(~missing.any())
        assert max_seqlen_q is not None
        self.longest.append(max_seqlen_q)
        torch._assert_async((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max() <= max_seqlen_q)
        assert causal
        assert softmax_scale is not None
        size = k_cache.shape[1]
        of = PagedRows(torch.arange(rows).int(), cache_seqlens, cu_seqlens_q, page_table, size, size, 0)
        out = reference.attend(q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), of, softmax_scale)
        return (out, out[..., 0]) if self.gives_more else out


@pytest.mark.parametrize("gives_more", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama-mha"])
def test_rows_are_those_of_the_other_backend(family: str, gives_more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    library, module = Library(gives_more), ModuleType(MODULE)
    module.flash_attn_with_kvcache = library.flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    found = {}
    for backend in ("triton", "fa3"):
        sizes: dict[str, Any] = {"max_running_requests": 4, "chunked_prefill_size": 64, "graph_rows": 4}
        model = reference_model(family)
        runner = runner_of(model, device="deferred", dtype="bfloat16", attention_backend=backend, **sizes)
        assert isinstance(runner._steps, PagedSteps)
        runner.warm_up()
        # Graph replays of the library were never verified, so this backend has no graphs.
        assert (runner._steps.graphs.count > 0) == (backend == "triton")
        requests = [Request(prompt, 6, Sampling(logprobs=2), arrival=2 * n) for n, prompt in enumerate(PROMPTS)]
        MiniBrain(runner, 1, 1).serve(requests, chunk=9)
        found[backend] = [request.tokens for request in requests]
    assert isinstance(runner.decoder.backend, FlashAttention)
    assert found["fa3"] == found["triton"]
    # Some steps had decode rows only, and some had chunks too.
    assert min(library.longest) == 1
    assert max(library.longest) > 9
