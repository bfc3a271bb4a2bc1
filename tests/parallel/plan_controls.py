"""Changes that break a plan by leaving out one collective, so that tests can check that results are then wrong."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from eqformer.parallel import _collectives, _placement, BATCH_AXES, COLLECTIVES, CONTEXT, OnDevice, Plan, vary
from eqformer.parallel.tensor import _residual_stream as _stream_parts, _tensor as _maps


def without(name: str, replacement: Callable[..., Any]) -> Callable[[Any], None]:
    """Return a change that calls `replacement` in the place of the collectives of one name."""
    assert name in COLLECTIVES, name

    def change(monkeypatch: Any) -> None:
        sent = _collectives._call

        def replaced(kind: str, which: str, *args: Any, **options: Any) -> Any:
            return replacement(*args, **options) if which == name else sent(kind, which, *args, **options)

        monkeypatch.setattr(_collectives, "_call", replaced)

    change.collective = name
    return change


def first_device_in(module: str) -> Callable[[Any], None]:
    """Return a change by which one module of `eqformer.parallel` takes every device for the first along each axis."""
    where = importlib.import_module(f"eqformer.parallel.{module}")

    class Lax:
        def __getattr__(self, name: str) -> Any:
            return same_place if name == "axis_index" else getattr(jax.lax, name)

    class Jax:
        lax = Lax()

        def __getattr__(self, name: str) -> Any:
            return getattr(jax, name)

    return lambda monkeypatch: monkeypatch.setattr(where, "jax", Jax())


# Types would refuse most results without their collective. So these replacements return a wrong result of the right
# type: for example a sum in which all devices but the first count as 0.


def nothing(x: Any, *_: Any, **__: Any) -> Any:
    """Leave out a collective whose result has the shape of its argument."""
    return x


def of_first(x: Any, axes: Any, **_: Any) -> Any:
    """Return the first device's part in place of the sum, maximum or mean of all parts."""
    names = (axes,) if isinstance(axes, str) else axes
    is_first = functools.reduce(jnp.logical_and, (jax.lax.axis_index(name) == 0 for name in names))
    part = lambda x: jax.lax.psum(jnp.where(is_first, x, jnp.zeros_like(x)), names)
    return jax.tree.map(lambda x: part(vary(x, names)), x)


def own_part(x: Any, axis: str, *, scatter_dimension: int = 0, **_: Any) -> Any:
    """Return this device's slice of its own part, as if a scatter did not sum."""
    size = x.shape[scatter_dimension] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, scatter_dimension)


def own_piece(x: Any, axis_name: str, *, axis: int = 0, tiled: bool = False) -> Any:
    """Return this device's piece in the place of every device's piece, as if nothing were gathered."""
    whole = [vary(x, [axis_name])] * jax.lax.axis_size(axis_name)
    return jnp.concatenate(whole, axis) if tiled else jnp.stack(whole, axis)


def own_exchange(x: Any, axis_name: str, *, split_axis: int, concat_axis: int, **_: Any) -> Any:
    """Return, in place of what each device sends, the piece that this device would send to itself."""
    count = jax.lax.axis_size(axis_name)
    mine = own_part(x, axis_name, scatter_dimension=split_axis)
    return jnp.concatenate([vary(mine, [axis_name])] * count, concat_axis)


def own_alone(x: Any, over: str, **options: Any) -> Any:
    """Replace a gather by `own_piece`, and the scatter of its gradients by `own_part`."""
    return (own_piece if "axis" in options else own_part)(x, over, **options)


def kept_all(x: Any, *_: Any, **__: Any) -> Any:
    """Return what this device would send, as if nothing were exchanged."""
    return x


# Changes of other functions than those of jax.lax.


def of_first_over(*axes: str) -> Callable[[Any], None]:
    """Return a change that takes the first device's gradients along some axes in place of the sum over these axes."""

    def total(self: OnDevice, x: Any, over: tuple[str, ...] = (), name: str = "") -> Any:
        rest = tuple(axis for axis in over if axis not in axes)
        left = tuple(axis for axis in over if axis in axes)
        x = jax.lax.psum(vary(x, rest), rest) if rest else x
        return of_first(x, left) if left else x

    return _total(lambda number: total if number > 1 else None)


def total_of(wanted: int, replacement: Callable[..., Any]) -> Callable[[Any], None]:
    """Return a change that replaces the sum over devices of the loss (`wanted` 0) or of its count (1)."""
    return _total(lambda number: (lambda self, x: replacement(x, _AXES)) if number == wanted else None)


def gradients_unsummed(monkeypatch: Any) -> None:
    """Leave out the sums of gradients over devices."""
    _total(lambda number: (lambda self, x, *_: x) if number > 1 else None)(monkeypatch)


_AXES = (*BATCH_AXES, CONTEXT)


def _total(choose: Callable[[int], Callable[..., Any] | None]) -> Callable[[Any], None]:
    def change(monkeypatch: Any) -> None:
        whole, calls = OnDevice.total, iter(range(10**6))

        def total(self: OnDevice, *args: Any) -> Any:
            return (choose(next(calls)) or whole)(self, *args)

        monkeypatch.setattr(OnDevice, "total", total)

    return change


def unsummed_entry(monkeypatch: Any) -> None:
    """Leave out the sum of the gradient of a layer's input over the devices that read this input."""

    @jax.custom_vjp
    def enter(x: Any) -> Any:
        return vary(x, ["tensor"])

    enter.defvjp(lambda x: (vary(x, ["tensor"]), None), lambda _, gradient: (of_first(gradient, "tensor"),))
    _entry(monkeypatch, enter)


def untyped_entry(monkeypatch: Any) -> None:
    """Leave out the mark that all devices along `tensor` read a layer's input."""
    _entry(monkeypatch, lambda x: x)


def _entry(monkeypatch: Any, enter: Callable[[Any], Any]) -> None:
    name, entered = "column-parallel input", _collectives.sum_gradients
    replaced = lambda which, *args: enter(args[0]) if which == name else entered(which, *args)
    monkeypatch.setattr(_collectives, "sum_gradients", replaced)


def bias_before(monkeypatch: Any) -> None:
    """Add the bias of a layer's output map on every device before the sum, so that it counts several times."""
    row = lambda self, x: jax.lax.psum(self.inner(x), "tensor")
    monkeypatch.setattr(_maps.RowParallelMap, "__call__", row)


def first_tokens(kind: type) -> Callable[[Any], None]:
    """Return a change by which modules of a kind take the first device's slice of the tokens in place of their own."""

    def take(x: Any, axis: str, dim: int) -> Any:
        size = x.shape[dim] // jax.lax.axis_size(axis)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * 0, size, dim % x.ndim)

    def change(monkeypatch: Any) -> None:
        own, call = _stream_parts.take_local_slice, kind.__call__

        def swapped(self: Any, *args: Any) -> Any:
            _stream_parts.take_local_slice = take
            try:
                return call(self, *args)
            finally:
                _stream_parts.take_local_slice = own

        monkeypatch.setattr(kind, "__call__", swapped)

    return change


def in_reading_order(*names: str) -> Callable[[Any], None]:
    """Return a change that leaves the named fields of the tokens in reading order, while rows take the ring's order."""

    def change(monkeypatch: Any) -> None:
        arrange = Plan.arrange

        def partly(self: Plan, batch: Any, tokens: Any) -> Any:
            pieces, moved = arrange(self, batch, tokens)
            where = lambda tokens: [getattr(tokens, name) for name in names]
            return pieces, eqx.tree_at(where, moved, where(tokens), is_leaf=lambda node: node is None)

        monkeypatch.setattr(Plan, "arrange", partly)

    return change


def marks(value: bool) -> Callable[[Any], None]:
    """Return a change that marks every array (or none) as one whose gradient is partial on each device."""
    everywhere = lambda model, stream: jax.tree.map(lambda _: value, model)
    return lambda monkeypatch: monkeypatch.setattr(_placement, "_has_partial_gradient", everywhere)


def in_order_read(monkeypatch: Any) -> None:
    """Leave the layers in the model's order, also where each device holds several chunks of layers."""
    for move in ("shard", "unshard"):
        monkeypatch.setattr(Plan, move, lambda self, tree, *_: tree)


def permuted_nowhere(x: Any, axis: str, **_: Any) -> Any:
    """Return the message itself, as if it were not sent on."""
    return vary(x, [axis])


def same_place(axis: str) -> Any:
    """Return index 0, as if every device were the first of its axis."""
    return jax.lax.axis_index(axis) * 0
