"""The graphs of steps. Steps are padded to captured sizes.

The largest size is captured first, and all graphs share one memory pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from forebay.device import Device, DeviceError, Work

_MIXED_ROWS = 64
"""The smallest number of rows of a mixed graph. Fewer rows save nothing: a matrix product's tiles have as many."""
_LEAST_MIXED = 64
_MOST_MIXED = 2048
"""The largest number of tokens of a mixed graph. Larger steps compute longer than their kernel launches take."""


@dataclass(frozen=True, order=True)
class Size:
    """The size of a step, padding included."""

    tokens: int
    rows: int
    mixed: bool
    """True if rows may have more than one token."""
    adapted: bool = False
    """True if rows may use adapters."""
    chooses: bool = False
    """True if all queries attend to positions that an index has chosen."""

    def __str__(self) -> str:
        rows = f"{self.tokens} tokens in up to {self.rows} rows" if self.mixed else f"{self.rows} decode rows"
        rows = f"{rows} with adapters" if self.adapted else rows
        return f"{rows} by an index" if self.chooses else rows


class SamplerKind(Enum):
    """The kinds of samplers of a graph. Each kind includes the previous one."""

    GREEDY = "greedy"
    """The largest logit."""
    DRAWN = "drawn"
    """A draw after the filters, for rows with a temperature."""
    WHOLE = "whole"
    """A draw with penalties before it and log-probabilities after it."""


def decode_rows(most: int) -> list[int]:
    """Returns the number of rows of each decode graph, ascending.

    Up to 64 rows fill one tile of a Hopper's matrix product, so few sizes are needed.
    """
    ladder = [1, 2, 4, 8, 16, 24, 32, 48, 64, *range(80, 129, 16), *range(160, 257, 32), *range(320, most, 64)]
    return [*(rows for rows in ladder if rows < most), most] if most else []


def mixed_sizes(most_rows: int, step_tokens: int) -> list[Size]:
    """Returns the sizes of mixed graphs for steps of up to `step_tokens` tokens, ascending."""
    if not most_rows:
        return []
    most = min(step_tokens, _MOST_MIXED)
    tokens = [least for least in (_LEAST_MIXED << power for power in range(6)) if least < most]
    rows = sorted({min(_MIXED_ROWS, most_rows), most_rows})
    return [Size(count, number, mixed=True) for count in [*tokens, most] for number in rows]


class Graphs:
    """The captured parts of a hand's steps: the model by size, and the sampler by rows and kind."""

    def __init__(
        self, device: Device, most_rows: int, step_tokens: int, *, adapted: bool = False, chooses: bool = False
    ) -> None:
        """`most_rows`: the largest number of rows of a graph; 0: no graphs. `step_tokens`: the most tokens of a step.

        `adapted`: True if each size has a second graph for steps with adapters, so that other steps do no such work.
        `chooses`: likewise for steps in which some queries see more positions than an index keeps.
        """
        self._device = device
        self._adapted, self._chooses = adapted, chooses
        self._decode_rows = decode_rows(most_rows)
        self._decodes = [Size(rows, rows, mixed=False) for rows in self._decode_rows]
        self._mixed = mixed_sizes(most_rows, step_tokens)
        self._models: dict[Size, Work] = {}
        self._samplers: dict[tuple[int, SamplerKind], Work] = {}

    @property
    def sizes(self) -> list[Size]:
        """The sizes, largest first, so that smaller graphs reuse the memory of larger ones."""
        sizes = [*self._decodes, *self._mixed]
        if self._adapted:
            sizes += [replace(size, adapted=True) for size in sizes]
        if self._chooses:
            sizes += [replace(size, chooses=True) for size in sizes]
        return sorted(sizes, reverse=True)

    @property
    def count(self) -> int:
        """The number of captured graphs."""
        return len(self._models) + len(self._samplers)

    def __str__(self) -> str:
        """The sizes that were captured, for a log."""
        models = sorted(self._models)
        twice = ", each with adapters and without" if self._adapted else ""
        twice += ", each by an index and without" if self._chooses else ""
        decodes = ", ".join(str(count) for count in sorted({size.rows for size in models if not size.mixed}))
        mixed = ", ".join(str(count) for count in sorted({size.tokens for size in models if size.mixed}))
        rows = ", ".join(str(count) for count in sorted({size.rows for size in models if size.mixed}))
        return (
            f"{self.count} graphs: steps of {decodes} decode rows, steps of up to {mixed} tokens in up to {rows} rows"
            f"{twice}, and {len(self._samplers)} for samplers"
        )

    def fit(self, rows: int, tokens: int, *, adapted: bool = False, chooses: bool = False) -> Size | None:
        """The smallest captured size for a step; None: there is none."""
        if not self._models:
            return None
        if tokens == rows:
            at = bisect_left(self._decode_rows, rows)
            found = self._decodes[at] if at < len(self._decodes) else None
        else:
            found = next((size for size in self._mixed if size.tokens >= tokens and size.rows >= rows), None)
        return None if found is None else replace(found, adapted=adapted, chooses=chooses)

    def capture(self, model: Callable[[Size], None], sample: Callable[[int, SamplerKind], None]) -> None:
        """Captures all graphs. `model` computes a step of a size. `sample` samples rows with a kind of sampler.

        Runs as queued work.

        Raises `DeviceError` with the size of a graph that cannot be captured; there is no silent fallback to slow
        steps.
        """
        for size in self.sizes:
            self._models[size] = self._captured(str(size), partial(model, size))
        for rows in sorted({size.rows for size in self.sizes}, reverse=True):
            for kind in reversed(SamplerKind):
                self._samplers[rows, kind] = self._captured(f"sampling {rows} rows", partial(sample, rows, kind))

    def model(self, size: Size) -> None:
        """Computes a step of a captured size. Runs as queued work."""
        self._models[size]()

    def sample(self, rows: int, kind: SamplerKind) -> None:
        """Samples the rows of a captured size. Runs as queued work."""
        self._samplers[rows, kind]()

    def _captured(self, what: str, work: Work) -> Work:
        try:
            return self._device.capture(work)
        except Exception as error:
            raise DeviceError(
                f"the graph of {what} could not be captured: {error}; choose a smaller --cuda-graph-max-bs, or "
                "--disable-cuda-graph"
            ) from error
