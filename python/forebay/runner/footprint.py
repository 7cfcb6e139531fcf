"""The memory of ranks, for a model whose weights need not be present: `forebay plan --model` uses it.

`python -m forebay.runner.footprint` reads the free bytes and then the handshake's config of each rank of a group, one
line of JSON each, and prints an object for each rank. It neither connects to a rank nor loads weights. If the memory
can't be computed, the exit status is 2, and the last line on stderr is "error: " with the reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch

from forebay.compute.choose import Choice
from forebay.compute.prompts import slice_bytes
from forebay.device import open_device
from forebay.distributed.group import Group
from forebay.layers.params import Parameters
from forebay.models import registry
from forebay.runner.group import roles
from forebay.state.config import ConfigError, RunnerConfig
from forebay.state.pages import part_bytes
from forebay.state.recurrent import slot_bytes, state_page_count
from forebay.state.sizes import Sizes
from forebay.state.windows import WindowLayers
from forebay.weights.config import ModelConfig
from forebay.weights.quantization import AUTO

__all__ = ["Footprint", "footprints", "main"]


@dataclass(frozen=True)
class Footprint:
    """The memory of one rank, as in its `ready` message. All fields are in bytes, except page counts."""

    weight_bytes: int
    """The weights, in the form used for computing."""
    page_bytes: int
    """One page over all layers; if there is a window part, one page of the main part."""
    page_count: int
    """Pages of each rank of the group: the number that fits on the rank with the least memory."""
    kv_bytes: int
    """All pages of both parts."""
    state_bytes: int = 0
    """The recurrent states of all slots, and of all state pages."""
    window_page_bytes: int = 0
    """One page of the window part."""
    window_page_count: int = 0
    """Pages of the window part; 0: all layers share one pool."""


class Unmet:
    """A group of ranks without connections: each member has its index, but computes nothing."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Raises `RuntimeError`."""
        self._refuse()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Raises `RuntimeError`."""
        self._refuse()

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Raises `RuntimeError`."""
        self._refuse()

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Raises `RuntimeError`."""
        self._refuse()

    def least(self, number: int) -> int:
        """Raises `RuntimeError`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError("these ranks have not met: their memory is counted, and nothing is computed")


def footprints(configs: Iterable[RunnerConfig], available_bytes: int) -> list[Footprint]:
    """Returns the memory of the ranks of a group, each of which has `available_bytes` free.

    Raises `ValueError` for a model or a configuration whose memory is not known before it is loaded.
    """
    found = [_footprint(config, available_bytes) for config in configs]
    pages = min(one.page_count for one in found)
    if len(found) == 1:
        return found
    # Models that are divided among ranks have no window part, so the main part has all pages.
    return [replace(one, page_count=pages, kv_bytes=pages * one.page_bytes) for one in found]


def _footprint(config: RunnerConfig, available_bytes: int) -> Footprint:
    model, kept = config.model_config, config.kept_model
    if not isinstance(model, ModelConfig) or kept is None:
        raise ConfigError(f"{model.architecture} is an encoder, which keeps no pages: there is nothing to divide")
    if config.pooling is not None or config.quantization not in (None, AUTO) or model.vision is not None:
        raise ConfigError("the memory of models that pool, see images or are quantised at the start is not planned")
    group = Unmet(config.rank, config.world_size) if config.world_size > 1 else None
    weight_bytes = _weight_bytes(config, model, group)
    # The memory of steps counts as that of a slice of logits. On a GPU, a hand measures it at its start instead.
    taken = weight_bytes
    if config.max_total_tokens is None:
        taken += slice_bytes(model.vocab_size, config.chunked_prefill_size)
    states = slot_bytes(config)
    free = int(config.mem_fraction_static * available_bytes) - taken - states
    states += state_page_count(config, free) * kept.state_bytes(config.dtype)
    pages = Sizes.of(config, kept, available_bytes, taken + states).pages
    windows = WindowLayers.of(config, kept)
    a_page = part_bytes(config, kept, windows)
    kv_bytes = windows.nbytes(pages, a_page)
    return Footprint(weight_bytes, a_page[0], pages, kv_bytes, states, a_page[1], windows.count(pages))


def _weight_bytes(config: RunnerConfig, model: ModelConfig, group: Group | None) -> int:
    """Returns the bytes of a rank's weights in the form used for computing, as a hand would allocate them."""
    ranks, exchange = roles(config, group)
    # Any device will do, because operators and attention have no weights.
    choice = Choice(open_device("cpu", config.threads), config, group)
    params = Parameters(config.dtype, torch.device("meta"), ranks=ranks, exchange=exchange)
    decoder = registry.build(model, params, choice.attention(), choice.ops(), config.context_length)
    own = Parameters(config.dtype, torch.device("meta"))
    if config.head is not None:
        registry.attach_head(decoder, config.head, own, config.context_length)
    if config.device != "cpu" and group is None and model.stored is not None:
        raise ConfigError("the memory of quantised matrices that a GPU keeps in their bits is not planned")
    return params.nbytes + own.nbytes


def main(lines: Iterable[str]) -> int:
    """Prints the footprints for the input: a line with the free bytes of each rank, then a config of each rank."""
    available, *configs = map(json.loads, lines)
    try:
        found = footprints([RunnerConfig.from_dict(_whole(config)) for config in configs], available)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for one in found:
        print(json.dumps(asdict(one)))
    return 0


def _whole(config: Any) -> Mapping[str, Any]:
    if not isinstance(config, dict):
        raise ConfigError("a config is an object")
    return config


if __name__ == "__main__":
    sys.exit(main(sys.stdin))
