"""Selects the implementation that computes a model on a device. Only this module imports all implementations."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import torch
import torch.nn.functional as F

from forebay.attention.backend import AttentionBackend
from forebay.attention.cpu import CpuAttention
from forebay.attention.flash import FlashAttention, why_not_fa3
from forebay.attention.triton import TritonAttention
from forebay.compute.causal import KINDS
from forebay.compute.eager import TorchCompute
from forebay.compute.encoder import EncoderCompute
from forebay.compute.low_rank import AdapterStacks
from forebay.compute.paged import Limits, PagedSteps
from forebay.compute.rows import Compute, Pooler
from forebay.compute.sampler import Sampler
from forebay.compute.steps import OperatorSteps, Steps
from forebay.device import Device, DeviceError
from forebay.distributed.group import Group
from forebay.gpu.choose import kernels, maps
from forebay.gpu.interface import Kernels
from forebay.gpu.ops import GpuOps
from forebay.gpu.products import GpuProducts, fuses, multiplies_floats
from forebay.layers.adapted import AdaptedModules
from forebay.layers.decoder import Decoder
from forebay.layers.ops import PLAIN, HostOps, Ops, TorchOps
from forebay.layers.quantised import Products
from forebay.layers.shard_ops import ShardOps
from forebay.models.bert import Bert
from forebay.models.called import CalledModel
from forebay.models.whole import WholeDecoder
from forebay.state.config import RunnerConfig
from forebay.state.images import ImagePool
from forebay.state.inputs import PromptRows
from forebay.state.kv_format import KvFormat
from forebay.state.pages import KvPool
from forebay.state.recurrent import StateStore, StateTables
from forebay.state.slots import SlotTables
from forebay.weights.cache import cache_directory
from forebay.weights.called import CalledConfig
from forebay.weights.config import ModelConfig
from forebay.weights.encoder_config import EncoderConfig
from forebay.weights.errors import ModelError
from forebay.weights.parts import Experts, Latent
from forebay.weights.quantization import why_not_stored


class Choice:
    """The implementation that a device uses to compute a model. It is chosen once, before a model is built."""

    def __init__(self, device: Device, config: RunnerConfig, group: Group | None = None) -> None:
        """Raises `DeviceError` for a backend that the device, or this installation, does not have.

        `group`: the ranks that compute the model together, or share its experts; None: this is the only rank.
        """
        self._device = device
        self._config = config
        self._group = group
        self._kernels: Kernels | None = None
        self._backend = self._without_chunks(self._settle(config))
        if self._backend != "torch":
            self._kernels = _kernels(device)
        if config.hot_rows and device.torch_device.type != "cpu":
            self._check_sparse()

    def _settle(self, config: RunnerConfig) -> str:
        """The implementation of attention: the requested one, or the device's best."""
        wanted, device = config.attention_backend, self._device
        if isinstance(config.model_config, CalledConfig):
            # This model's attention uses options that no other implementation supports.
            return "torch"
        on_gpu = device.torch_device.type != "cpu"
        if wanted is None:
            # On a GPU, models that pool are computed operator by operator.
            return "triton" if on_gpu and config.pooling is None else "torch"
        if wanted == "torch":
            return wanted
        if config.pooling is not None:
            raise DeviceError(f"attention backend {wanted} is for models that generate: leave it off")
        if not device.beside_host:
            raise DeviceError(f"attention backend {wanted} is for GPUs, and the device is {device.name}: leave it off")
        if wanted == "fa3":
            self._check_fa3()
        return wanted

    def _without_chunks(self, backend: str) -> str:
        """The backend, or PyTorch's operators if a layer has chunked attention."""
        config = self._config
        model = config.model_config
        kinds = model.kinds if isinstance(model, ModelConfig) else ()
        if backend == "torch" or all(kind.chunk is None or kind.chunk >= config.context_length for kind in kinds):
            return backend
        if config.attention_backend not in (None, "torch"):
            raise DeviceError(
                f"attention backend {config.attention_backend} has no chunks of attention, and {model.architecture} "
                "has some: leave it off"
            )
        return "torch"

    def _check_fa3(self) -> None:
        model = self._config.model_config
        assert isinstance(model, ModelConfig)
        if isinstance(model.attention, Latent):
            raise DeviceError(
                f"attention backend fa3 is for keys and values, and {model.architecture} has latent rows: use triton"
            )
        if model.whole_images:
            raise DeviceError(
                f"attention backend fa3 has causal order only, and images of {model.architecture} have none: use triton"
            )
        windows = [kind.window for kind in model.kinds if kind.window is not None]
        has_windows = any(window < self._config.context_length for window in windows)
        if model.attention.cap is not None or model.attention.sinks or has_windows:
            raise DeviceError(
                f"attention backend fa3 attends without windows, caps and sinks, and {model.architecture} has some: "
                "use triton"
            )
        missing = why_not_fa3(self._device.torch_device, self._config.dtype)
        if missing is not None:
            raise DeviceError(f"attention backend fa3 can't be used: {missing}; use triton")

    def _check_sparse(self) -> None:
        name = self._device.name
        if self._kernels is None or not self._kernels.READS_HOST:
            raise DeviceError(
                f"sparse decoding from host memory on {name} needs Triton's kernels, which read that memory in place: "
                "leave --attention-backend and FOREBAY_GPU_KERNELS off"
            )
        if self._config.kv_save_order == "fence":
            raise DeviceError(
                f"--kv-save-order fence is for rows that wait on the device, and on {name} the host would wait: "
                "use inline, which means that, or behind"
            )

    def check_operators(self, model: ModelConfig | EncoderConfig) -> None:
        """Raises `ModelError` if PyTorch lacks an operator of this model on this device."""
        experts = isinstance(model, ModelConfig) and any(isinstance(feed, Experts) for feed in model.feeds)
        # Without grouped_mm each expert needs a separate product, and the router's output decides which products run.
        # Only a device that works synchronously with the host can do that.
        if experts and self._device.beside_host and not hasattr(F, "grouped_mm"):
            raise ModelError(
                f"a mixture of experts on {self._device.name} needs PyTorch 2.10 or newer, which has "
                f"torch.nn.functional.grouped_mm: this is {torch.__version__}"
            )

    def check_quantization(self, quantization: str, model: ModelConfig | EncoderConfig) -> None:
        """Raises `ModelError` if the model cannot be computed with this quantisation."""
        stored = None if isinstance(model, EncoderConfig) else model.stored
        missing = why_not_stored(quantization, stored)
        if missing is not None:
            raise ModelError(f"quantization {quantization} is not what the model has: {missing}; leave it off")
        if stored is None and self._kernels is None:
            raise ModelError(
                f"quantization {quantization} makes 8-bit floats for a GPU's kernels, and the model is computed by "
                f"others on {self._device.name}: leave it off, or use w8a8_int8 on a CPU"
            )

    def check_kv_format(self) -> None:
        """Raises `DeviceError` if no kernel here reads pages in the requested format."""
        form, model = self._config.kv_cache_dtype, self._config.model_config
        if form is not KvFormat.PLAIN and isinstance(model, ModelConfig) and model.whole_images:
            raise DeviceError(
                f"kv cache dtype {form.value} is for a GPU's kernels, and PyTorch's operators attend to images of a "
                f"{model.architecture}: leave it off"
            )
        if form is not KvFormat.PLAIN and self._backend != "triton":
            raise DeviceError(
                f"kv cache dtype {form.value} needs the attention backend triton, and {self._backend} is in use: "
                "leave --attention-backend off"
            )

    def attention(self) -> AttentionBackend:
        """The attention that models are built with."""
        if self._kernels is None:
            return CpuAttention()
        if self._backend == "fa3":
            return FlashAttention()
        # Any page may replace -1 here: in eager steps, the check of written pages already rejects -1 among a row's
        # positions.
        return TritonAttention(self._kernels, null_page=0)

    @property
    def device_name(self) -> str:
        """The device's name; with several ranks also their number, and the implementation in use."""
        if self._group is None:
            return self._device.name
        how = "with PyTorch's operators" if self._kernels is None else "without graphs"
        return f"{self._device.name}, {self._group.world} ranks, {how}"

    def ops(self) -> Ops:
        """Returns the operators of the model and of the sampler."""
        if self._group is None or self._config.step_group:
            return self._own_ops()
        return ShardOps(self._own_ops(), self._group, self._config.model_config.vocab_size)

    def _own_ops(self) -> Ops:
        if self._kernels is not None and self._config.model_config.hidden_act not in PLAIN:
            return GpuOps(self._kernels)
        return TorchOps() if self._device.beside_host else HostOps()

    def products(self) -> Products | None:
        """Returns the products for weights in the checkpoint's quantised format; None: weights are dequantised."""
        if self._kernels is None:
            return None
        return GpuProducts(self._kernels, multiplies_floats(self._device.torch_device), fuses())

    def stacks(self, modules: AdaptedModules) -> AdapterStacks | None:
        """Returns the memory of all adapter places of a built model; None: each adapter has separate memory."""
        config = self._config
        if self._kernels is None or config.lora is None:
            return None
        places, rank = config.lora.places, config.lora.rank
        return AdapterStacks(modules, places, rank, config.dtype, self._device, self._kernels)

    def steps(
        self,
        model: Callable[[], Decoder],
        compute: Callable[[], Compute],
        tables: SlotTables,
        kv: KvPool,
        prompts: PromptRows,
        sampler: Sampler,
        states: StateStore | None = None,
        stacks: AdapterStacks | None = None,
    ) -> Steps:
        """Returns the steps of a model that generates; `model` and `compute` run as queued work.

        `states`: the memory of recurrent states; `stacks`: the memory of adapters; None: the model has none.
        """
        config = self._config
        shape = config.model_config
        # Steps of several ranks are not captured: collectives in a graph are untested.
        alone = self._group is None
        if self._kernels is None or not alone or isinstance(shape, EncoderConfig) or self._needs_host(shape):
            return OperatorSteps(compute, tables, sampler, self._device)
        # FlashAttention chooses its split of rows on the host: replays with another split are untested.
        graph_rows = config.graph_rows if self._backend == "triton" else 0
        # The scheduler limits a step's prompt tokens to the chunk size, and each running request adds one token.
        tokens = max(config.chunked_prefill_size, config.max_running_requests)
        limits = Limits(config.max_running_requests, tokens, graph_rows)
        assert states is None or isinstance(states, StateTables)
        memory = tables, kv, prompts, sampler, shape.vocab_size, limits
        top_k = None if shape.indexer is None else shape.indexer.top_k
        return PagedSteps(model, *memory, self._kernels, self._device, states, stacks, top_k, mapped=maps())

    def _needs_host(self, model: ModelConfig) -> bool:
        """True if the host decides in each step about sparse slots or positions of images, which a graph can't do."""
        return self._config.hot_rows > 0 or model.vision is not None or model.sections is not None

    def compute(
        self,
        model: Decoder | CalledModel,
        tables: SlotTables,
        kv: KvPool,
        prompts: PromptRows,
        images: ImagePool | None = None,
        states: StateStore | None = None,
    ) -> TorchCompute:
        """Returns the forward pass of a loaded model. `images` and `states`: None if the model has none."""
        return TorchCompute(model, tables, kv, prompts, self._device, images, self._kernels, states)

    def pooler(
        self,
        model: Decoder | CalledModel | Bert | WholeDecoder,
        tables: SlotTables,
        kv: KvPool,
        prompts: PromptRows,
        states: StateStore | None = None,
    ) -> Pooler:
        """Returns the pooler of a loaded model."""
        model.params.pack()
        if isinstance(model, Bert | WholeDecoder):
            return EncoderCompute(model, tables, self._device)
        pooling = self._config.pooling
        assert pooling is not None
        compute = self.compute(model, tables, kv, prompts, states=states)
        return KINDS[pooling.kind](compute, self._config.slots, model.config.hidden_size, self._device)


def _kernels(device: Device) -> Kernels:
    """Returns the kernels. Raises `DeviceError` if Triton or the C compiler that it needs is missing."""
    # Compiled kernels are stored in Forebay's cache directory. Triton's default folder is in the home directory, which
    # may be read-only.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory() / "triton"))
    try:
        found = kernels()
    except ImportError as error:
        raise DeviceError(
            f"Triton can't be imported ({error}): install it, or use --attention-backend torch"
        ) from error
    if device.torch_device.type == "cuda" and found.COMPILES and not _c_compiler():
        raise DeviceError(
            "Triton builds the launches of its kernels with a C compiler, and there is none: install gcc or clang, set "
            "CC, or use --attention-backend torch"
        )
    return found


def _c_compiler() -> str | None:
    """The compiler that Triton would call (`triton.runtime.build`); None: there is none."""
    return os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")
