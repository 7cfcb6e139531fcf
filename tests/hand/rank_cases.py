"""The test cases that ranks run. All ranks of a group call each function with the same arguments."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gguf.quants import dequantize

from forebay.compute.sampler import SampledColumns, Sampler
from forebay.device import cpu, open_device
from forebay.distributed.exchange import Exchange
from forebay.distributed.group import Group, open_group
from forebay.distributed.store import BrainStore
from forebay.layers.ops import TorchOps
from forebay.layers.shard_ops import ShardOps
from forebay.protocol.connection import Connection
from forebay.protocol.constants import COPY_OK, COPY_RESTORE, COPY_SAVE
from forebay.protocol.plan import Plan
from forebay.runner.host_tier import HostMemory
from forebay.runner.runner import ModelRunner
from forebay.state.config import RunnerConfig
from forebay.state.slots import SlotTables
from forebay.state.staging import StepInputs
from forebay.weights import manifest
from forebay.weights.manifest import Manifest, Place
from forebay.weights.shards import Cut, Part, Shard
from tests.hand.support import MiniBrain, PlanBuilder, Request, Sampling
from tests.hand.test_adapters import bring


def meet(connection: Connection, rank: int, world: int, on_gpu: bool) -> Group:
    """Opens the group of this process."""
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    return open_group(BrainStore(connection), rank, world, device)


class Mutant:
    """A group with one defect."""

    def __init__(self, group: Group, **changes: Callable[..., Any]) -> None:
        self._group = group
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def collectives(group: Group) -> dict[str, Any]:
    """Calls each collective once."""
    rank, world = group.rank, group.world
    x = torch.arange(2.0 * world).view(world * 2, 1) + 100 * rank
    return {
        "all_reduce": group.all_reduce(x.clone()).flatten().tolist(),
        "all_gather": group.all_gather(x[:2]).tolist(),
        "reduce_scatter": group.reduce_scatter(x).flatten().tolist(),
        "all_to_all": group.all_to_all(x).flatten().tolist(),
        "bfloat16": group.all_reduce(torch.full((3,), rank + 1, dtype=torch.bfloat16)).tolist(),
        "least": group.least(10 - rank),
    }


def serve(
    group: Group,
    config: dict[str, Any],
    requests: list[dict[str, Any]],
    chunk: int = 1000,
    mutant: str = "",
    adapters: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Serves requests with a model whose weights are read from files, or are random.

    `adapters`: the manifests of the adapters in places 0, 1, ...
    """
    config = {**config, "rank": group.rank, "world_size": group.world}
    undo = _mutate(mutant)
    if mutant == "no all-reduce":
        group = Mutant(group, all_reduce=lambda x: x)
    try:
        runner = ModelRunner(RunnerConfig.from_dict(config), meet=lambda device: group)
        runner.load(lambda done, total: None)
    finally:
        undo()
    if mutant == "another token":
        _sample_another(runner, group.rank)
    if adapters:
        assert not any(bring(runner, adapters))
    served = read_requests(requests)
    MiniBrain(runner, chunk).serve(served, chunk)
    return {"facts": runner.facts(), "requests": [found(request) for request in served]}


def restore(
    group: Group, config: dict[str, Any], prompt: list[int], count: int, damaged: int = -1, memory: str = ""
) -> dict[str, Any]:
    """Computes a prompt and saves its pages. A second runner restores them to other pages and generates from there.

    The host memory of the rank `damaged` is overwritten in between. `memory` is the path of a file that all ranks
    share. Without one, each rank has its own memory.
    """
    config = {**config, "rank": group.rank, "world_size": group.world}
    host_memory = os.open(memory, os.O_RDWR | os.O_CREAT) if memory else os.memfd_create("host")
    near, far = socket.socketpair()

    def life(**changes: Any) -> ModelRunner:
        host = HostMemory(host_memory, far.fileno())
        runner = ModelRunner(RunnerConfig.from_dict({**config, **changes}), None, host, lambda device: group)
        runner.load(lambda done, total: None)
        return runner

    def copy(runner: ModelRunner, direction: int, hot: list[int]) -> list[int]:
        """Copies between `hot` pages of the device and host pages 5, 6, .... Returns the status of each copy."""
        copies = [(ticket, direction, page, 5 + ticket) for ticket, page in enumerate(hot)]
        ended = dict(runner.step(PlanBuilder(2, copies=copies).build()).copied.tolist())
        while len(ended) < len(hot):
            ended |= dict(runner.step(PlanBuilder(2, wait_us=[1000]).build()).copied.tolist())
        return [ended[ticket] for ticket in range(len(hot))]

    first = life()
    size = first.config.page_size
    whole = len(prompt) // size
    builder = PlanBuilder()
    builder.slot(0, prompt)
    builder.page_writes += [(0, index, 1 + index) for index in range(whole + 1)]
    builder.row(0, 0, len(prompt))
    tokens = first.step(builder.build()).tokens.tolist()
    errors = copy(first, COPY_SAVE, list(range(1, 1 + whole)))
    assert errors == [COPY_OK] * whole
    # As in the brain, no copy names a host page before all ranks have reported the save.
    group.least(0)
    if damaged == group.rank:
        os.pwrite(host_memory, b"\x5c" * os.fstat(host_memory).st_size, 0)
    second = life(host_pages=first.host_pages, host_ratio=None)
    pages = list(range(30, 30 + whole))
    errors = copy(second, COPY_RESTORE, pages)
    if damaged < 0:
        builder = PlanBuilder(3)
        builder.slot(1, [*prompt, *tokens], prompt_len=len(prompt))
        builder.page_writes += [(1, index, page) for index, page in enumerate([*pages, 50, 51, 52])]
        builder.row(1, size * whole, len(prompt) + 1 - size * whole)
        tokens += second.step(builder.build()).tokens.tolist()
        while len(tokens) < count:
            builder = PlanBuilder(2 + len(tokens))
            builder.row(1, len(prompt) + len(tokens) - 1, 1)
            tokens += second.step(builder.build()).tokens.tolist()
    near.close()
    far.close()
    os.close(host_memory)
    return {"tokens": tokens, "errors": errors, "facts": second.facts()}


class GroupBrain(MiniBrain):
    """The brain of one rank of a step group. Before each step the ranks exchange their numbers of tokens."""

    def __init__(self, runner: ModelRunner, group: Group, seed: int) -> None:
        super().__init__(runner, seed)
        self._group = group
        self.idle = 0
        """Steps in which this rank had no tokens and others had some."""

    def _goes_on(self, busy: bool) -> bool:
        return any(self._of_all(busy))

    def _plan(self, builder: PlanBuilder) -> Plan:
        plan = builder.build()
        tokens = self._of_all(plan.token_count)
        self.idle += not plan.token_count and any(tokens)
        return replace(plan, group=np.array(tokens, np.int32)).staged()

    def _of_all(self, number: int) -> list[int]:
        numbers: list[int] = self._group.all_gather(torch.tensor([int(number)])).flatten().tolist()
        return numbers


def serve_group(
    group: Group, config: dict[str, Any], requests: list[list[dict[str, Any]]], chunk: int = 1000, mutant: str = ""
) -> dict[str, Any]:
    """Serves this rank's own requests."""
    config = {**config, "rank": group.rank, "world_size": group.world, "expert_parallel": True, "step_group": True}
    used: Any = group
    if mutant == "no sum":
        used = Mutant(group, reduce_scatter=lambda x: x.tensor_split(group.world)[group.rank])
    runner = ModelRunner(RunnerConfig.from_dict(config), meet=lambda device: used)
    runner.load(lambda done, total: None)
    runner.warm_up()
    served = read_requests(requests[group.rank])
    brain = GroupBrain(runner, group, chunk)
    brain.serve(served, chunk)
    return {"facts": runner.facts(), "idle": brain.idle, "requests": [found(request) for request in served]}


def exchange(group: Group, rounds: int) -> int:
    """Gathers and scatters a varying number of rows of each rank, in many steps. Returns the total number of rows."""
    random, exchanged, count = np.random.default_rng(4), Exchange(group), 0
    for number in range(rounds):
        tokens = (random.integers(0, 6, group.world) * (random.random(group.world) < 0.7)).tolist()
        if not any(tokens):
            continue
        dtype = torch.bfloat16 if number % 3 == 0 else torch.float32
        of_all = [torch.from_numpy(random.integers(-8, 9, (rows, 3)).astype(np.float32)).to(dtype) for rows in tokens]
        exchanged.begin(tokens)
        gathered = exchanged.gather(of_all[group.rank])
        assert torch.equal(gathered, torch.cat(of_all)), tokens
        scattered = exchanged.scatter(gathered * (group.rank + 1))
        expected = of_all[group.rank] * (group.world * (group.world + 1) // 2)
        assert torch.equal(scattered, expected), tokens
        count += sum(tokens)
    return count


def _mutate(mutant: str) -> Callable[[], None]:
    original = Shard.of

    def wrong(self: Shard, size: int) -> Part:
        # All ranks read the first rank's slice of the intermediate rows.
        return original(Shard(0, self.world) if size == 96 else self, size)

    patched = patch.object(Shard, "of", wrong if mutant == "wrong slice" else original)
    patched.start()
    return patched.stop


def _sample_another(runner: ModelRunner, rank: int) -> None:
    """Makes rank 1 keep another token than the group has sampled, once."""
    ops: Any = runner.decoder.ops
    greedy = ops.greedy
    left = [3]

    def another(logits: torch.Tensor) -> Any:
        tokens, finite = greedy(logits)
        left[0] -= 1
        return (tokens + 1 if rank == 1 and left[0] == 0 else tokens), finite

    ops.greedy = another


def read_requests(requests: list[dict[str, Any]]) -> list[Request]:
    """Requests from JSON."""
    return [Request(**{**request, "sampling": _sampling(request.get("sampling", {}))}) for request in requests]


def _sampling(values: dict[str, Any]) -> Sampling:
    lists = {name: tuple(values.get(name, ())) for name in ("stop_ids", "allowed")}
    bias = tuple((token, value) for token, value in values.get("bias", ()))
    return Sampling(**{**values, **lists, "bias": bias})


def found(request: Request) -> dict[str, Any]:
    """The results of a request, in values that JSON can hold."""
    return {
        "tokens": request.tokens,
        "logprobs": [[ids.tolist(), values.tolist()] for ids, values in request.logprobs],
        "of_prompt": [[rank, ids.tolist(), values.tolist()] for rank, ids, values in request.of_prompt],
    }


class _Counted:
    """Counts the bytes of a weight that are read."""

    def __init__(self, name: str, place: Place, read: dict[str, int]) -> None:
        self._name, self._place, self._read = name, place, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    def read(self, cut: Cut | None = None) -> torch.Tensor:
        tensor = self._place.read(cut)
        if not self._place.is_blocks:
            self._read[self._name] = self._read.get(self._name, 0) + tensor.nbytes
        return tensor


def bytes_read(group: Group, config: dict[str, Any]) -> dict[str, int]:
    """The bytes that a rank reads of each weight of its files, and of each block type of GGUF files."""
    config = {**config, "rank": group.rank, "world_size": group.world}
    read: dict[str, int] = {}
    weights = Manifest.weights

    def wrapped(self: Manifest) -> Iterator[tuple[str, Any]]:
        for name, place in weights(self):
            assert isinstance(place, Place)
            yield name, _Counted(name, place, read)

    def counted(data: Any, kind: Any) -> Any:
        read[kind.name] = read.get(kind.name, 0) + data.nbytes
        return dequantize(data, kind)

    with patch.object(Manifest, "weights", wrapped), patch.object(manifest, "dequantize", counted):
        runner = ModelRunner(RunnerConfig.from_dict(config), meet=lambda device: group)
        runner.load(lambda done, total: None)
    return read


def facts(group: Group, config: dict[str, Any], available: list[int]) -> dict[str, Any]:
    """A rank's report to the brain about a model that is not loaded, with this much memory free."""
    config = {**config, "rank": group.rank, "world_size": group.world}
    near, far = socket.socketpair()
    with near, far, patch.object(cpu, "host_available", lambda: available[group.rank]):
        host = HostMemory(os.memfd_create("host"), far.fileno())
        return ModelRunner(RunnerConfig.from_dict(config), None, host, lambda device: group).facts()


def refusal(group: Group, config: dict[str, Any]) -> str:
    """Why this group cannot load a model."""
    config = {**config, "rank": group.rank, "world_size": group.world}
    try:
        runner = ModelRunner(RunnerConfig.from_dict(config), meet=lambda device: group)
        runner.load(lambda done, total: None)
    except ValueError as error:
        return str(error)
    return ""


VOCABULARIES = (7, 23, 131, 1000)


class _Rig:
    """Tables and a sampler: over the whole vocabulary, or over one rank's shard of it."""

    def __init__(self, config: RunnerConfig, vocabulary: int, group: Group | None) -> None:
        self.device = open_device("cpu", 1)
        self.tables = SlotTables(config, vocabulary, self.device)
        self.own = None if group is None else Shard(group.rank, group.world).of(vocabulary)
        self.ops: Any = TorchOps() if group is None else ShardOps(TorchOps(), group, vocabulary)
        self.sampler = Sampler(self.tables, vocabulary, self.ops, self.device, self.own)

    def sample(self, builder: PlanBuilder, logits: torch.Tensor, lengths: list[int], masks: dict[int, Any]) -> Any:
        plan = builder.build()
        writes = self.tables.read(plan, np.zeros(0, np.uint8))
        assert writes is not None
        self.tables.write(writes, StepInputs(plan, self.device))
        ask = self.sampler.ask(np.arange(len(lengths)), np.asarray(lengths, np.int64), masks)
        columns = SampledColumns(ask, self.device)
        if self.own is not None:
            logits = logits[:, self.own.place].contiguous()
        if ask.plain:
            best, finite = self.ops.greedy(logits)
            columns.fill(self.sampler.greedy(best, finite, ask))
        else:
            columns.fill(self.sampler.sample(logits, ask))
        logprobs = columns.logprobs()
        kept = self.tables.token_pool[np.arange(len(lengths)), lengths].tolist()
        return {
            "tokens": columns.tokens.tolist(),
            "kept": kept,
            "finite": columns.finite.tolist(),
            "logprobs": None if logprobs is None else [part.tolist() for part in logprobs],
        }


def sample(group: Group, config: dict[str, Any], rounds: int, ties: bool) -> list[Any]:
    """Samples rows with random parameters, with the sampler over shards and with the sampler over all logits."""
    shape, random = RunnerConfig.from_dict(config), np.random.default_rng(3)
    pairs = []
    for number in range(rounds):
        vocabulary = VOCABULARIES[number % len(VOCABULARIES)]
        rows = int(random.integers(1, 7))
        logits = torch.from_numpy(random.normal(size=(rows, vocabulary)).astype(np.float32) * 3)
        if ties:
            logits = (logits * 2).round() / 2
        if number % 9 == 8:
            logits[0, int(random.integers(vocabulary))] = torch.nan
        builder, lengths, masks = PlanBuilder(), [], {}
        for slot in range(rows):
            tokens = random.integers(0, vocabulary, int(random.integers(1, 30))).tolist()
            lengths.append(len(tokens))
            plain = number % 7 == 6
            wish = Sampling() if plain else _wish(random, vocabulary)
            builder.slot(slot, tokens, wish, len(tokens) // 2)
            if not plain and not wish.allowed and random.random() < 0.2:
                bits = random.random(-(-vocabulary // 32) * 32) < 0.4
                bits[int(random.integers(vocabulary))] = True
                masks[slot] = np.packbits(bits, bitorder="little").view(np.uint32)
        pairs.append(
            [_Rig(shape, vocabulary, who).sample(builder, logits.clone(), lengths, masks) for who in (None, group)]
        )
    return pairs


def _wish(random: np.random.Generator, vocabulary: int) -> Sampling:
    def some(chance: float, value: Any, other: Any) -> Any:
        return value if random.random() < chance else other

    def ids(most: int) -> tuple[int, ...]:
        return tuple(sorted(set(random.integers(0, vocabulary, int(random.integers(1, most))).tolist())))

    return Sampling(
        temperature=some(0.75, float(random.choice([0.3, 1.0, 2.0])), 0.0),
        top_k=some(0.4, int(random.integers(1, vocabulary + 3)), 0),
        top_p=some(0.5, float(random.choice([0.05, 0.5, 0.9, 0.999])), 1.0),
        min_p=some(0.2, float(random.choice([0.01, 0.3])), 0.0),
        repetition_penalty=some(0.3, 1.3, 1.0),
        presence_penalty=some(0.2, 0.5, 0.0),
        frequency_penalty=some(0.2, -0.4, 0.0),
        seed=int(random.integers(1 << 30)),
        logprobs=some(0.4, int(random.integers(0, 8)), -1),
        min_total=some(0.3, 40, 0),
        stop_ids=some(0.3, ids(4), ()),
        bias=some(0.3, tuple((token, float(random.normal() * 4)) for token in ids(5)), ()),
        allowed=some(0.15, ids(6), ()),
    )


def likelihoods(group: Group) -> list[Any]:
    """Log-probabilities and ranks of given tokens, over shards and from all logits."""
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for vocabulary in VOCABULARIES:
        logits = torch.randn(5, vocabulary, generator=generator) * 4
        tokens = torch.randint(vocabulary, (5, 1), generator=generator)
        own = Shard(group.rank, group.world).of(vocabulary)
        for most in (0, 1, 5, vocabulary):
            both = (TorchOps(), logits), (ShardOps(TorchOps(), group, vocabulary), logits[:, own.place])
            pairs.append(
                [
                    [*(part.tolist() for part in ops.likely(of, tokens, most)), ops.places(of, tokens).tolist()]
                    for ops, of in both
                ]
            )
    return pairs
