"""What the operators of `forebay.gpu` take and give, whoever computes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class PagedRows:
    """The rows of one step as attention sees them; `r` rows, which may be padding, of `n` tokens.

    Tensors are on the device, so that a graph may run again with others in their place. What is no tensor decides about
    launches, and is the same for all steps of a graph.
    """

    slots: torch.Tensor  # int32 [r]
    ends: torch.Tensor  # int32 [r]: positions that are in the row's pages once its tokens are
    first: torch.Tensor  # int32 [r + 1]: where the row's tokens begin; behind the last row are tokens of nobody
    page_table: torch.Tensor  # int32 [slots, pages a slot]
    page_size: int
    page_stride: int
    """Entries of a layer from a page's first to that of the next."""
    null_page: int
    """What is read in place of page -1, which is reported elsewhere."""
    decodes: bool = True
    """Whether any row may have one token."""
    chunks: bool = True
    """Whether any row may have more than one, and whether there may be tokens of nobody."""


class Attention(Protocol):
    """Attention over pages of keys and values."""

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PagedRows, scale: float
    ) -> torch.Tensor:
        """Attention [n, heads, value_dim] of q [n, heads, head_dim], the last dimensions dense.

        `keys` [entries, kv_heads, head_dim] and `values` [entries, kv_heads, value_dim] hold the rows' own tokens too.
        Values that begin where keys do are the first elements of them, as latent rows have it. Tokens of nobody get 0.
        """


class Kernels(Attention, Protocol):
    """All operators: a module of functions has them."""
