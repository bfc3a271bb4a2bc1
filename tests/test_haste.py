"""The quick checks of shapes and types find what jaxtyping and beartype find, and bind arguments as `inspect` does."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
import numpy as np
import pytest
from haste import checked, may_have_shapes, QuickSignature
from jaxtyping import Array, Float, PyTree, TypeCheckError

from eqformer import models


Rows = Float[np.ndarray, "rows"]


def first_rows(x: Rows, y: Rows, count: int = 2) -> Rows:
    return x[:count]


def repeat_word(word: str, times: int) -> str:
    return typing.cast(str, word * times if times else None)


def test_shapes_and_types_are_checked_before_a_call_and_after_it():
    check: Any = jaxtyping.jaxtyped(typechecker=checked)
    first, repeat = check(first_rows), check(repeat_word)
    two, three = np.zeros(2, np.float32), np.zeros(3, np.float32)
    assert len(first(two, two)) == 2 and repeat("a", 2) == "aa"  # the controls
    wrong: list[Callable[[], Any]] = [
        lambda: first(two, three),
        lambda: first(three, three),  # returns two rows of three
        lambda: first(two, two, "2"),
        lambda: first(two, two.astype(np.float64) > 0),
        lambda: repeat("a", "b"),
        lambda: repeat("a", 0),  # returns None
        lambda: models.preset(typing.cast(Any, 3)),  # of the package
    ]
    for call in wrong:
        with pytest.raises(TypeCheckError):
            call()


def test_only_types_without_dims_are_left_to_beartype():
    plain = (int, str | None, Callable[[int], str], dict[str, Any], None, typing.Literal["a b"], tuple[int, ...])
    array: Any = Float[Array, "a"]
    shaped = (array, array | None, list[Float[Array, ""]], PyTree, PyTree[int], "Float")
    assert not any(map(may_have_shapes, plain))
    assert all(map(may_have_shapes, (*shaped, Callable[[array], int], dict[str, array])))


def test_arguments_are_bound_as_inspect_binds_them():
    def function(a, /, b, c=3, *args, d, e=5, **rest): ...

    quick, slow = QuickSignature.from_callable(function), inspect.signature(function)
    calls: list[tuple[tuple, dict[str, Any]]] = [
        ((1, 2), {"d": 4}),
        ((1, 2, 3, 4, 5), {"d": 1, "e": 2, "z": 9}),
        ((1,), {"b": 2, "d": 0}),
    ]
    for given, named in calls:
        found, wanted = (signature.bind(*given, **named) for signature in (quick, slow))
        for bound in (found, wanted):
            bound.apply_defaults()
        assert list(found.arguments.items()) == list(wanted.arguments.items())
    with pytest.raises(TypeError, match="missing a required argument: 'b'"):
        quick.bind(1, d=2)
