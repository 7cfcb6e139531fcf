"""The shape of a model in the handshake. The PyTorch hand names each part that it does not support in its error."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from benchmarks.described import shape_of
from forebay.weights.config import ModelConfig, config_of
from forebay.weights.errors import ModelError, UnsupportedModelError
from forebay.weights.parts import LayerKind
from tests.weights.support import tiny_config


def changed(way: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """The shape of a tiny Llama with one change."""
    shape = deepcopy(shape_of(tiny_config()))
    at: Any = shape["decoder"]
    for key in way[:-1]:
        at = at[key]
    at[way[-1]] = value
    return shape


def test_a_llama_is_read() -> None:
    found = config_of(changed(("tied",), True))
    assert isinstance(found, ModelConfig)
    assert found.tie_word_embeddings
    assert found.kinds == (LayerKind(),) * found.num_hidden_layers


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (("norm",), "median", "norms of the kind 'median'"),
        (("layers", 1, "norms"), "between", "norms of layers of the kind 'between'"),
        (("mixers", 0, "value_dim"), 8, "lengths of values of the kind 8"),
        (("mixers", 0, "kind"), "recurrence", "of recurrence is not supported"),
        (("ropes", 0, "interleaved"), True, "rotated neighbours"),
        (("feeds", 0, "activation"), "squared_relu", "activations of the kind 'squared_relu'"),
        (("feeds", 0, "gated"), False, "activations of the kind 'silu'"),
        (("newer_part",), {"size": 3}, "newer_part"),
    ],
)
def test_parts_that_are_not_computed_are_named(way: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(changed(way, value))


def test_layers_may_have_no_rotation() -> None:
    found = config_of(changed(("layers", 1, "rope"), None))
    assert isinstance(found, ModelConfig)
    assert [kind.rope for kind in found.kinds] == [0, None, *[0] * (found.num_hidden_layers - 2)]


def test_layers_differ_in_what_they_see_and_in_heads() -> None:
    first = shape_of(tiny_config())["decoder"]["mixers"][0]
    for part, value in (("window", 8), ("chunk", 16), ("heads", 8)):
        shape = changed(("mixers",), [first, {**first, part: value}])
        shape["decoder"]["layers"][1]["mixer"] = 1
        found = config_of(shape)
        assert isinstance(found, ModelConfig)
        kinds = found.kinds[:2]
        assert [kind.window for kind in kinds] == [None, 8 if part == "window" else None]
        assert [kind.chunk for kind in kinds] == [None, 16 if part == "chunk" else None]
        heads = 8 if part == "heads" else first["heads"]
        assert [found.heads(layer).heads for layer in (0, 1)] == [first["heads"], heads]


def test_a_shape_that_lacks_a_field_is_one_line() -> None:
    shape = deepcopy(shape_of(tiny_config()))
    del shape["decoder"]["hidden_size"]
    with pytest.raises(ModelError, match="makes no sense: KeyError: 'hidden_size'"):
        config_of(shape)
