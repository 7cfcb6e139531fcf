"""Models whose code does not compute what its attention calls specify. Each is refused with a reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.masking_utils import create_causal_mask, sliding_window_overlay
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from forebay.models.called import CalledAttention, check_version
from forebay.models.probe import probe
from forebay.weights.errors import UnsupportedModelError
from tests.hand.called_models import called_runner, calls_of, model_of

Call = dict[str, Any]


class ChangedInterface:
    """Replaces the attention interface of transformers, and changes the arguments of each call."""

    def __init__(self, change: Callable[[Call], Any]) -> None:
        self._change = change

    def get_interface(self, name: str, own: Any) -> Any:
        plain = ALL_ATTENTION_FUNCTIONS.get_interface(name, own)

        def call(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **named: Any) -> Any:
            given = {"module": module, "key": key, "value": value, "attention_mask": mask, "args": args, **named}
            self._change(given)
            of_call = [given.pop(name) for name in ("module", "key", "value", "attention_mask", "args")]
            module, key, value, mask, args = of_call
            return plain(module, query, key, value, mask, *args, **given)

        return call


def changed(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Call], Any]) -> None:
    """Changes the arguments of all attention calls of a model's code."""
    file = f"transformers.models.{name}.modeling_{name}"
    __import__(file)
    monkeypatch.setattr(sys.modules[file], "ALL_ATTENTION_FUNCTIONS", ChangedInterface(change))


def not_causal(given: Call) -> None:
    given["module"].is_causal = False
    given["is_causal"] = None


def other_keys(given: Call) -> None:
    given["key"], given["value"] = given["key"][:, :, :3], given["value"][:, :, :3]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llama", lambda given: given.update(slope=0.5), "passes the argument slope to attention"),
        ("llama", lambda given: given.update(is_causal=False), "attends to positions behind its own"),
        ("llama", not_causal, "attends to positions behind its own"),
        ("llama", lambda given: given.update(attention_mask=torch.ones(1, 1, 7, 7)), "attention mask of its own"),
        ("llama", lambda given: given.update(args=(0.5,)), "needs more than attention and states provide: TypeError"),
        ("llama", lambda given: given.update(scaling=torch.ones(1)), "passes a tensor as scaling"),
        ("llama", other_keys, "attends to keys that are not the step's"),
        ("mistral", lambda given: given.pop("sliding_window"), "uses an attention mask that its call"),
        ("mistral", lambda given: given.update(sliding_window=9), "uses an attention mask that its call"),
        (
            "gpt_oss",
            lambda given: given.pop("s_aux"),
            "computes something that its call of attention does not describe",
        ),
        ("gpt_oss", lambda given: given.update(s_aux=given["s_aux"][:2]), "needs more"),
    ],
)
def test_what_a_call_does_not_say_is_refused(
    name: str, change: Callable[[Call], Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, name, change)
    with pytest.raises(UnsupportedModelError, match=reason):
        calls_of(name, tmp_path)


def test_scores_that_own_code_changes_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own attention caps its scores, and its calls do not mention the cap."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
    from transformers.models.llama import modeling_llama

    def capped(*args: Any, **named: Any) -> Any:
        return eager_attention_forward(*args, **{**named, "softcap": 2.0})

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", capped)
    with pytest.raises(UnsupportedModelError, match="the code of LlamaAttention computes something"):
        calls_of("llama", tmp_path)


def test_a_mask_of_two_functions_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def create(**named: Any) -> Any:
        return create_causal_mask(**named, and_mask_function=sliding_window_overlay(3))

    monkeypatch.setattr(modeling_llama, "create_causal_mask", create)
    with pytest.raises(UnsupportedModelError, match="LlamaAttention uses an attention mask that its call of attention"):
        calls_of("llama", tmp_path)


def test_code_that_numbers_its_tokens_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaModel.forward

    def forward(self: Any, *args: Any, position_ids: Any = None, **named: Any) -> Any:
        return plain(self, *args, **named)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="llama numbers its tokens itself"):
        calls_of("llama", tmp_path)


def test_a_token_that_reaches_another_row_is_found_at_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    plain: Any = modeling_llama.LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        return plain(self, x + 0.1 * x.roll(1, dims=1))

    model = model_of("llama")
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="mixes tokens"):
        called_runner(model, tmp_path)


def test_states_that_several_tokens_do_not_continue_are_found_at_the_load(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="FalconMambaMixer can't continue from its state"):
        called_runner(model_of("falcon_mamba"), tmp_path)


@pytest.mark.parametrize("version", ["4.57.6", "5.19.0", "6.0.0", "6.1.0.dev0"])
def test_another_version_of_transformers_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    check_version()
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(UnsupportedModelError, match=f"transformers {version} is not supported: use 5.20 or newer"):
        check_version()


def test_another_version_is_refused_before_the_model_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.19.0")
    with pytest.raises(UnsupportedModelError, match=r"transformers 5\.19\.0 is not supported"):
        probe(tmp_path / "nothing")


def test_attention_without_a_step_is_an_error() -> None:
    attention = CalledAttention()
    with pytest.raises(RuntimeError, match="outside of a step"):
        attention._attend(torch.nn.Identity(), *(torch.zeros(1, 1, 2, 4) for _ in range(3)))
