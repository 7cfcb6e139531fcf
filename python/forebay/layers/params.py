"""The memory of a model's weights, keyed by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch

from forebay.distributed.exchange import Exchange
from forebay.layers.adapted import AdaptedModules
from forebay.layers.quantised import KeptMatrix, KeptPart, Products
from forebay.layers.ranks import Ranks
from forebay.weights.codes import Layout, Raw
from forebay.weights.errors import ModelError
from forebay.weights.quantization import Kept
from forebay.weights.shards import ALONE, Cut, Cuts, Part

Fill = Callable[[torch.Tensor, torch.Tensor], object]
"""Copies a host tensor into a device tensor."""
Report = Callable[[int, int], None]
"""A callback for the progress of loading: the number of loaded weights, and the total."""


def ignore(done: int, total: int) -> None:
    """A `Report` callback that does nothing."""


class WeightError(ModelError):
    """The checkpoint does not fit the model."""


class Parameters:
    """Allocates weights, and maps each checkpoint name to its part of a tensor."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        formats: Kept | None = None,
        *,
        fill: Fill = torch.Tensor.copy_,
        ranks: Ranks | None = None,
        exchange: Exchange | None = None,
        products: Products | None = None,
        adapted: AdaptedModules | None = None,
    ) -> None:
        """`formats`: the matrices that are kept in the checkpoint's quantised format; None: all are dequantised.

        `ranks`: the ranks that divide all weights; None: this rank has all weights. `exchange`: the ranks of a step
        group, which divide only the experts. `products` None: the device keeps no matrix in a quantised format; several
        ranks never do. `adapted` None: adapters modify no product.
        """
        self.dtype = dtype
        self.ranks = ranks
        self.exchange = exchange
        self.shard = ALONE if ranks is None else ranks.shard
        self.cuts = Cuts()
        """The parts of a checkpoint that this rank needs. `load` receives only these parts."""
        self.device = device
        self._formats = formats
        self._fill = fill
        self.products = products
        self.adapted = adapted
        self.kept: dict[str, KeptPart] = {}
        """The parts of matrices that are kept in a quantised format, by weight name."""
        self._targets: dict[str, torch.Tensor] = {}
        self._whole: dict[str, tuple[int, ...]] = {}
        self._skipped: set[str] = set()
        self._packing: list[Callable[[], None]] = []
        self._bytes = 0

    def tensor(
        self, shape: tuple[int, ...], parts: Mapping[str, int | Part], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Allocates a tensor of `shape`. Its first dimension is split among `parts`: checkpoint name to number of rows.

        A `Part` specifies the rows of a weight that this rank has; it is empty if the weight belongs to other ranks.
        `dtype` None: the model's.
        """
        return self._allocate(shape, parts, dtype or self.dtype)

    def matrix(self, inputs: int | Part, parts: Mapping[str, int | Part]) -> torch.Tensor:
        """Allocates a matrix [rows, inputs] in the model's dtype; `parts` as in `tensor`.

        `inputs` may be a part of the weights' columns.
        """
        rows = sum(map(size_of, parts.values()))
        columns = None if isinstance(inputs, int) else inputs
        return self._allocate((rows, size_of(inputs)), parts, self.dtype, columns)

    def keeps_experts(self, inputs: int | Part, parts: Mapping[str, int | Part]) -> bool:
        """True if `kept_matrix` would return one matrix for all experts.

        False if each expert may order its inputs differently. The arguments are those of `matrix`.
        """
        layout = self._layout(inputs, parts)
        return layout is not None and not layout.ordered

    def _layout(self, inputs: int | Part, parts: Mapping[str, int | Part]) -> Layout | None:
        if self._formats is None or self.products is None or self.ranks is not None or self.exchange is not None:
            return None
        return self._formats.layout({name: size_of(rows) for name, rows in parts.items()}, size_of(inputs))

    def kept_matrix(self, inputs: int | Part, parts: Mapping[str, int | Part]) -> KeptMatrix | None:
        """Allocates a matrix in the checkpoint's quantised format; None: call `matrix`. Arguments as for `matrix`."""
        layout = self._layout(inputs, parts)
        if layout is None:
            return None
        sizes = {name: size_of(rows) for name, rows in parts.items()}
        kept, first = KeptMatrix.make(layout, sum(sizes.values()), self.device), 0
        for name, rows in sizes.items():
            self.kept[name] = KeptPart(name, kept, first, rows)
            first += rows
        self._bytes += kept.nbytes
        return kept

    def _allocate(
        self,
        shape: tuple[int, ...],
        parts: Mapping[str, int | Part],
        dtype: torch.dtype,
        columns: Part | None = None,
    ) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        sizes = [size_of(rows) for rows in parts.values()]
        for (name, rows), part in zip(parts.items(), tensor.split(sizes), strict=True):
            cut = _cut(rows, columns, part)
            self._whole[name] = tuple(part.shape) if cut is None else cut.whole
            if cut is not None and cut.rows.size == 0:
                self.cuts.others.add(name)
                continue
            self._targets[name] = part
            if cut is not None:
                self.cuts.parts[name] = cut
        self._bytes += tensor.nbytes
        return tensor

    def when_packed(self, pack: Callable[[], None]) -> None:
        """Registers `pack`, which changes the layout of weights for the processor after they are loaded."""
        self._packing.append(pack)

    def pack(self) -> None:
        """Calls all registered `pack` functions. Nothing can be loaded afterwards."""
        self.forget()
        for pack in self._packing:
            pack()

    def skip(self, name: str) -> None:
        """Registers a weight that some checkpoints contain although the model does not need it."""
        if name not in self._targets:
            self._skipped.add(name)

    @property
    def count(self) -> int:
        """The number of a checkpoint's weights that this rank has, in part or as a whole."""
        return len(self._targets) + len(self.kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated weights."""
        return self._bytes

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises `WeightError` if a checkpoint's weights, by name, do not fit. Reads no weight."""
        found = {name: shape for name, shape in shapes.items() if not self._is_left_out(name)}
        lacking, total = (self._targets.keys() | self.kept.keys()) - found.keys(), self.count
        if lacking:
            raise _lacks(lacking, total)
        for name, shape in found.items():
            target = self._targets.get(name, self.kept.get(name))
            if target is None:
                raise WeightError(f"the checkpoint has {name}, which the model does not have")
            _check_shape(name, shape, self._whole.get(name, tuple(target.shape)))

    def load(self, weights: Iterable[tuple[str, torch.Tensor | Raw]], report: Report) -> None:
        """Copies checkpoint tensors. Raises `WeightError` unless each weight occurs once, with the expected shape.

        If this rank has a part of a weight, `weights` contains only this part.
        """
        missing: dict[str, torch.Tensor | KeptPart] = {**self._targets, **self.kept}
        total = len(missing)
        for name, tensor in weights:
            if self._is_left_out(name):
                continue
            target = missing.pop(name, None)
            if target is None:
                raise WeightError(f"the checkpoint has {name}, which the model does not have or already got")
            if isinstance(target, KeptPart):
                target.store(tensor, self._upload)
            else:
                assert not isinstance(tensor, Raw)
                _check_shape(name, tuple(tensor.shape), tuple(target.shape))
                self._fill(target, tensor)
            report(total - len(missing), total)
        if missing:
            raise _lacks(missing.keys(), total)

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        self._fill(there, tensor)
        return there

    def _is_left_out(self, name: str) -> bool:
        return name in self._skipped or name in self.cuts.others or name.endswith(".rotary_emb.inv_freq")

    def forget(self) -> None:
        """Drops this object's references to the tensors, so that only other references keep them alive.

        Nothing can be loaded afterwards.
        """
        self._targets.clear()
        self.kept.clear()

    def randomise(self, seed: int, report: Report) -> None:
        """Fills all weights with random values from `seed`, on the device: norms around 1, others small and around 0.

        The values depend on the kind of device. On a CPU, several ranks have parts of the weights that a single rank
        would have. On other devices, only weights that all ranks share are the same.
        """
        total = self.count
        generator = torch.Generator(self.device).manual_seed(seed)
        for kept in self.kept.values():
            kept.randomise(generator)
        weights = (
            self._random_on_host(generator) if self.device.type == "cpu" else self._random_on_device(generator, seed)
        )
        for done, _ in enumerate(weights, start=1 + len(self.kept)):
            report(done, total)

    def _random_on_host(self, generator: torch.Generator) -> Iterator[None]:
        for name, shape in self._whole.items():
            whole = torch.randn(shape, generator=generator) * 0.02 + _mean(name)
            target = self._targets.get(name)
            if target is not None:
                cut = self.cuts.parts.get(name)
                target.copy_(whole if cut is None else whole[cut.places])
                yield

    def _random_on_device(self, same: torch.Generator, seed: int) -> Iterator[None]:
        # A CPU generator takes a minute for eight billion values, which would then have to be copied.
        rank = self.shard.rank if self.exchange is None else self.exchange.rank
        own = torch.Generator(self.device).manual_seed(seed + 1 + rank)
        for name, target in self._targets.items():
            target.normal_(_mean(name), 0.02, generator=own if name in self.cuts.parts else same)
            yield

    def clear(self) -> None:
        """Sets all weights to 0."""
        for kept in self.kept.values():
            kept.clear()
        for target in self._targets.values():
            target.zero_()


def _lacks(names: Collection[str], total: int) -> WeightError:
    return WeightError(f"the checkpoint lacks {len(names)} of {total} weights, the first is {min(names)}")


def size_of(rows: int | Part) -> int:
    """Returns the number of rows, or columns, on this rank."""
    return rows if isinstance(rows, int) else rows.size


def part_of(rows: int | Part) -> Part:
    """Returns the part of rows, or columns, that this rank has. A number means all of them."""
    return ALONE.of(rows) if isinstance(rows, int) else rows


def _cut(rows: int | Part, columns: Part | None, here: torch.Tensor) -> Cut | None:
    """Returns the part of a weight that this rank keeps in the tensor `here`; None: the whole weight."""
    if isinstance(rows, int) and columns is None:
        return None
    of_rows = part_of(rows)
    if columns is None and here.dim() > 1:
        columns = ALONE.of(here.shape[1])
    cut = Cut(of_rows, columns)
    return None if cut.is_whole else cut


def _mean(name: str) -> float:
    return 1.0 if name.lower().endswith(("norm.weight", "scalar", "scale")) else 0.0


def _check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if wanted != shape:
        raise WeightError(f"{name} is {list(shape)} in the checkpoint, the model wants {list(wanted)}")
