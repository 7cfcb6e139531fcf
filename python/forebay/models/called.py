"""A model in the Transformers library's own code, with Forebay's pages, packed rows and slots.

The code calls attention by name, and Transformers lets libraries register implementations. Each call passes its options
(a window, a cap, sinks, a scale), so none are derived from a configuration. Recurrent layers run once per row, with the
cache object of the row's slot. vLLM (`--model-impl transformers`) and SGLang have the same feature, but create
attention layers from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forebay.attention.backend import How
from forebay.attention.cpu import CpuAttention
from forebay.layers.decoder import Forward
from forebay.layers.ops import Ops
from forebay.layers.params import Parameters, Report, ignore
from forebay.models.recurrent import CacheStates, RecurrentLayers, StateRow
from forebay.models.rotary import settle_rotary
from forebay.weights.called import CalledConfig
from forebay.weights.errors import ModelError, UnsupportedModelError

_BESIDE_ATTENTION = frozenset(
    {"dropout", "position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"}
)
"""Arguments of a call that do not change attention."""
_OLDEST, _TOO_NEW = (5, 20), (6, 0)
"""The oldest supported version of Transformers, and the first version that is not supported any more."""
_NAMED = ("scaling", "sliding_window", "softcap", "s_aux")


class CalledAttention:
    """The attention that a Transformers model calls, registered under a name of Forebay."""

    def __init__(self) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.name = f"forebay_{id(self)}"
        self.uses: set[str] = set()
        """The options that calls have used so far, apart from causal order."""
        self._answer: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, How], torch.Tensor] | None = None
        ALL_ATTENTION_FUNCTIONS.register(self.name, self._attend)

    @contextmanager
    def answered_by(
        self, answer: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, How], torch.Tensor]
    ) -> Iterator[None]:
        """Within this context, `answer` computes all calls.

        `answer` maps q [n, heads, key size], k [n, kv heads, key size] and v [n, kv heads, value size] to [n, heads *
        value size].
        """
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **given: Any,
    ) -> tuple[torch.Tensor, None]:
        """Computes one call: query [1, heads, n, key size] to [1, n, heads, value size]."""
        if self._answer is None:
            raise RuntimeError("a model was called outside of a step")
        how = self._read(module, attention_mask, given)
        q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
        if len(k) != len(q):
            raise UnsupportedModelError(
                f"{type(module).__name__} attends to keys that are not the step's: it keeps some itself"
            )
        out = self._answer(q, k, v, how)
        return out.view(1, len(q), q.shape[1], v.shape[2]), None

    def _read(self, module: torch.nn.Module, mask: torch.Tensor | None, given: Mapping[str, Any]) -> How:
        """Reads the options of an attention call. Raises `UnsupportedModelError` for one that no kernel supports."""
        name = type(module).__name__
        if mask is not None:
            raise UnsupportedModelError(f"{name} makes an attention mask of its own")
        for key, value in given.items():
            if key in _NAMED or key in _BESIDE_ATTENTION or key == "is_causal" or value is None:
                continue
            raise UnsupportedModelError(f"{name} passes the argument {key} to attention, which is not known here")
        causal = given.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise UnsupportedModelError(f"{name} attends to positions behind its own")
        kind, chunk = _kind(module), None
        window = given.get("sliding_window")
        config = getattr(module, "config", None)
        if kind == "full_attention":
            # A configuration may state a window that no layer uses (VaultGemma), although layers pass it to attention.
            window = None
        elif kind == "sliding_attention" and window is None:
            window = config.sliding_window if config is not None else None
        elif kind == "chunked_attention":
            chunk = config.attention_chunk_size if config is not None else None
        for key in ("scaling", "softcap"):
            if isinstance(given.get(key), torch.Tensor):
                raise UnsupportedModelError(f"{name} passes a tensor as {key} to attention, where a number is expected")
        how = How(given.get("scaling"), window, chunk, given.get("softcap"), given.get("s_aux"))
        wanted = {"window": window, "chunk": chunk, "cap": how.cap, "sinks": how.sinks}
        self.uses.update(name for name, value in wanted.items() if value is not None)
        return how


def _kind(module: torch.nn.Module) -> str | None:
    """Returns the layer type of a module by the configuration's list; None: the list has no entry for it."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    layer = getattr(module, "layer_idx", None)
    return str(kinds[layer]) if isinstance(layer, int) and 0 <= layer < len(kinds) else None


class CalledModel:
    """The model, as `TorchCompute` uses it. Its weights are on the meta device until they are loaded."""

    def __init__(
        self,
        config: CalledConfig,
        directory: str,
        params: Parameters,
        backend: CpuAttention,
        ops: Ops,
        context_length: int,
    ) -> None:
        """`params` defines the type and the device of the weights, but does not allocate them."""
        self.config = config
        self.context_length = context_length
        """The largest number of positions of a request."""
        self.params = params
        self.backend = backend
        self.ops = ops
        self._directory = directory
        self._attention = CalledAttention()
        self._take(made_of(config_of(Path(directory)), self._attention.name, params.dtype, torch.device("meta")))
        self.nbytes: int = sum(one.nbytes for one in (*self._model.parameters(), *self._model.buffers()))
        """The bytes of all weights. A tensor with several names counts once."""

    def _take(self, model: Any) -> None:
        settle_rotary(model, self.context_length)
        self._model = model
        self._recurrent = RecurrentLayers(model)
        self._body = body_of(model)
        self._kept_forward = self._body.forward
        self._given: torch.Tensor | None = None
        self._output: type[Any] | None = None
        """The output class of the body (the layers below the head), which the head reads."""
        self._body.forward = self._run_body

    def load(self, report: Report = ignore) -> None:
        """Reads the weights from safetensors. Raises `ModelError`."""
        report(0, 1)
        self._load(self._directory)
        report(1, 1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads weights from tensors, by Hugging Face name. Raises `ModelError`."""
        self._load(None, config=config_of(Path(self._directory)), state_dict=dict(weights))

    def _load(self, directory: str | None, **given: Any) -> None:
        how = {"dtype": self.params.dtype, "attn_implementation": self._attention.name, "trust_remote_code": False}
        try:
            # With `output_loading_info` the result is a pair; the type annotations omit that.
            read: Callable[..., Any] = type(self._model).from_pretrained
            model, found = read(
                directory, use_safetensors=True, local_files_only=True, output_loading_info=True, **how, **given
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"transformers can't load the model: {' '.join(str(error).split())}") from error
        if found["missing_keys"]:
            missing = sorted(found["missing_keys"])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ModelError(f"the checkpoint lacks {', '.join(missing[:3])}{more}")
        self._take(model.requires_grad_(False).to(self.params.device))
        self._check_rows()

    @torch.no_grad()
    def _check_rows(self) -> None:
        """Computes a few test tokens. Raises `UnsupportedModelError` if rows can't be split or packed.

        The check runs rows of one token, one of which has the embedding NaN. No arithmetic removes NaN, so it marks
        every state that the token influences. The check also runs a row in chunks, each of which continues from the
        recurrent layers' states.
        """
        name, recurrent = self.config.architecture, self._recurrent
        if recurrent.modules:
            whole, cut = cache_of(self._model), cache_of(self._model)
            recurrent.rows = [StateRow(0, 6, whole)]
            recurrent.pieces = [StateRow(0, 3, cut), StateRow(3, 2, cut), StateRow(5, 1, cut)]
            self._states_of(6)
            recurrent.pieces = []
        recurrent.rows = [StateRow(at, 1, cache_of(self._model)) for at in range(3)]

        def spoil(_: Any, __: Any, embeddings: torch.Tensor) -> torch.Tensor:
            return embeddings.index_fill(1, torch.ones(1, dtype=torch.long, device=embeddings.device), torch.nan)

        hook = self._model.get_input_embeddings().register_forward_hook(spoil)
        try:
            states = self._states_of(3)
        finally:
            hook.remove()
        if states[::2].isnan().any():
            raise UnsupportedModelError(f"the code of {name} mixes tokens other than by attention or states")

    def _states_of(self, tokens: int) -> torch.Tensor:
        """Returns the final states [tokens, hidden] of tokens, each of which attends only to itself."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
            return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).flatten(1)

        ids = torch.arange(tokens, device=self.params.device)[None]
        with self._attention.answered_by(attend):
            states: torch.Tensor = self._body(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state[0]
        return states

    def randomise(self, seed: int, report: Report = ignore) -> None:
        """Initialises the weights from a seed, by the model's own code."""
        torch.manual_seed(seed)
        model = made_of(config_of(Path(self._directory)), self._attention.name, self.params.dtype, self.params.device)
        self._take(model)
        self._check_rows()
        report(1, 1)

    def __call__(self, forward: Forward) -> torch.Tensor:
        """Computes the step's positions. Returns float32 logits [s, vocabulary] of the sampled positions."""
        return self.logits(self.states(forward))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns float32 [m, vocabulary] of final states [m, hidden], by the model's own head, caps and factors."""
        ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        self._given = states[None]
        try:
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._given = None
        return logits.float()

    def states(self, forward: Forward) -> torch.Tensor:
        """Computes the step's positions. Returns the final states [s, hidden] of the sampled positions."""
        if forward.given:
            raise UnsupportedModelError("inputs in place of tokens, for a model that transformers computes")
        if self._recurrent.modules:
            self._recurrent.rows = forward.states
        calls = iter(forward.kv)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How) -> torch.Tensor:
            kv = next(calls, None)
            if kv is None:
                raise UnsupportedModelError("the model called attention more often than when it was probed")
            kv.keys.index_copy_(0, forward.writes, k)
            kv.values.index_copy_(0, forward.writes, v)
            return self.backend.attend(q, k, v, kv, forward.prepared, how)

        with self._attention.answered_by(attend):
            found = self._body(
                input_ids=forward.tokens[None].long(), position_ids=forward.positions[None], use_cache=False
            )
        if next(calls, None) is not None:
            raise UnsupportedModelError("the model called attention less often than when it was probed")
        self._output = type(found)
        last: torch.Tensor = found.last_hidden_state
        return last[0].index_select(0, forward.sampled)

    def state_store(self) -> CacheStates:
        """Allocates memory for the recurrent states of slots and state pages."""
        return CacheStates(lambda: cache_of(self._model))

    def _run_body(self, *args: Any, **named: Any) -> Any:
        if self._given is None:
            return self._kept_forward(*args, **named)
        assert self._output is not None
        return self._output(last_hidden_state=self._given)


def check_version() -> None:
    """Raises `UnsupportedModelError` unless a supported version of Transformers is installed."""
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedModelError(
            f"--model-impl transformers needs transformers ({error}): pip install 'forebay[torch]'"
        ) from error
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    if not _OLDEST <= (major, minor) < _TOO_NEW:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} is not supported: use 5.20 or newer, and older than 6"
        )


def config_of(directory: Path) -> Any:
    """Reads the configuration in a model's folder, with Transformers. Raises `UnsupportedModelError`."""
    check_version()
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"transformers does not know the model: {' '.join(str(error).split())}") from error


def made_of(config: Any, attention: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Builds the causal model of a configuration, with its own initialisation. Raises `UnsupportedModelError`."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device(device), torch.no_grad():
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=attention, dtype=dtype
            )
    except KeyError as error:
        # Code that is older than the registration of attention looks up its own implementations by name (Falcon).
        raise UnsupportedModelError(f"the code of {config.model_type} has an attention of its own ({error})") from error
    except ValueError as error:
        raise UnsupportedModelError(" ".join(str(error).split())) from error
    model.eval()
    return model.requires_grad_(False)


def body_of(model: Any) -> Any:
    """Returns the part of a causal model below its head. Raises `UnsupportedModelError` if there is none."""
    body = model.base_model
    if body is model:
        # Some code names a base model that does not exist (Llama 4's text model).
        body = getattr(model, "model", model)
    if body is model:
        raise UnsupportedModelError(f"{type(model).__name__} has no part below its head")
    return body


def cache_of(model: Any) -> Any:
    """Creates a cache object for the recurrent states of one request."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


__all__ = [
    "CalledAttention",
    "CalledModel",
    "body_of",
    "cache_of",
    "config_of",
    "made_of",
]
