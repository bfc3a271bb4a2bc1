"""The fast shape checks of the tests agree with jaxtyping and beartype, and `put` moves arrays as JAX does."""

import dataclasses
import functools
import gc
import inspect
import typing
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from haste import check_through_relay, checked, jax_moves, may_have_shapes, QuickSignature, traced_draws
from jaxtyping import Array, Float, Int, PyTree, TypeCheckError

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


def make_scale(factor: int, dtype: Any) -> Any:
    """Return a function made at each call, whose calls within it are checked too."""

    def scale(x: Any, times: int = 1) -> Any:
        if times > 1:
            return scale(scale(x), times - 1)
        return factor * x if factor else x[1:]

    scale.__annotations__ |= dict.fromkeys(("x", "return"), dtype[np.ndarray, "rows"])
    scale = check_through_relay(scale, jaxtyping.jaxtyped(typechecker=checked))
    return scale


def test_functions_made_again_share_a_check_and_keep_their_own_values():
    x = np.ones(3, np.float32)
    double, triple, cut, integers = (make_scale(*given) for given in ((2, Float), (3, Float), (0, Float), (2, Int)))
    assert double(x, 3).tolist() == [8, 8, 8] and triple(x, times=2).tolist() == [9, 9, 9]
    assert integers(np.array([1])).tolist() == [2]
    wrong = [lambda: double(x, "2"), lambda: double(x[None]), lambda: cut(x), lambda: integers(x), lambda: double(x, x)]
    for call in wrong:
        with pytest.raises(TypeCheckError, match="make_scale.<locals>.scale"):
            call()
        assert triple(x).tolist() == [3, 3, 3]
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        double(times=2)
    assert inspect.signature(double) == inspect.signature(inspect.unwrap(double))
    plain = lambda x: x
    alive = weakref.ref(plain)
    assert check_through_relay(plain, checked)(3) == 3
    del plain
    gc.collect()
    assert alive() is None


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


MOVED: dict[str, tuple[Callable[..., jax.Array], tuple[Any, ...]]] = {
    "broadcast": (lambda x: jax.lax.broadcast_in_dim(x, (3, 2, 5), (0, 2)), ((3, 5),)),
    "broadcast a single one": (lambda x: jax.lax.broadcast_in_dim(x, (3, 5), (0, 1)), ((3, 1),)),
    "concatenate": (lambda *x: jax.lax.concatenate(x, 1), ((3, 5), (3, 2))),
    "narrow": (lambda x: jax.lax.convert_element_type(x, jnp.bfloat16), ((3, 5),)),
    "to boolean": (lambda x: jax.lax.convert_element_type(x, bool), ((3, 5),)),
    "to integer": (lambda x: jax.lax.convert_element_type(100 * x, jnp.int32), ((3, 5),)),
    "slice within": (lambda x: jax.lax.dynamic_slice(x, (1, jnp.int32(1)), (2, 2)), ((3, 5),)),
    "slice beyond": (lambda x: jax.lax.dynamic_slice(x, (-9, 9), (2, 2)), ((3, 5),)),
    "iota": (lambda: jax.lax.broadcasted_iota(jnp.int32, (3, 5), 1), ()),
    "reshape": (lambda x: jax.lax.reshape(x, (5, 3)), ((3, 5),)),
    "reshape the turned": (lambda x: jax.lax.reshape(x, (5, 3), (1, 0)), ((3, 5),)),
    "strides": (lambda x: jax.lax.slice(x, (0, 1), (3, 5), (2, 2)), ((3, 5),)),
    "squeeze": (lambda x: jax.lax.squeeze(x, (1,)), ((3, 1, 5),)),
    "stage": (lambda: jax.lax.stage(np.arange(6, dtype=np.float32).reshape(2, 3)), ()),
    "transpose": (lambda x: jax.lax.transpose(x, (2, 0, 1)), ((3, 2, 5),)),
}


CAST = ("float32", "float64", "bfloat16", "bool", "int32", "uint32")


@pytest.mark.parametrize("name", MOVED)
def test_numpy_moves_arrays_as_programs_of_jax_do(name):
    move, shapes = MOVED[name]
    random = np.random.default_rng(0)
    arrays = [jax.device_put(random.normal(size=shape).astype(np.float32)) for shape in shapes]
    moved, expected = move(*arrays), jax.jit(move)(*arrays)
    assert (moved.aval, moved.committed) == (expected.aval, expected.committed)
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(expected))
    different = np.asarray(move(*(x + 1 for x in arrays)))
    assert not arrays or name == "to boolean" or (different != np.asarray(moved)).any()  # the control
    assert jax.eval_shape(move, *arrays) == jax.eval_shape(lambda: expected)  # a traced call stays JAX's


@pytest.mark.parametrize("new", CAST)
@pytest.mark.parametrize("old", CAST)
def test_numpy_casts_as_programs_of_jax_do(old, new):
    """Also numbers that overflow, subnormal numbers, infinities and NaN, without numpy's warnings."""
    numbers = [0, 1, -1, 2.5, -3.5, 1.00390625, 1e-40, 1e-310, 65505, 3.4e38, 1e300, np.inf, -np.inf, np.nan]
    with jax.enable_x64(True), np.errstate(all="ignore"):
        x = jax.device_put(np.array(numbers if old in CAST[:3] else [0, 1, 7, 2**24 + 1, 2**31 - 1]).astype(old))
        cast = functools.partial(jax.lax.convert_element_type, new_dtype=new)
        moved, expected = cast(x), jax.jit(cast)(x)
        assert moved.aval == expected.aval
        bits, expected_bits = (np.asarray(y).view(f"uint{8 * y.dtype.itemsize}") for y in (moved, expected))
        np.testing.assert_array_equal(bits, expected_bits)


def test_numpy_leaves_placed_and_weak_arrays_to_jax():
    last = jax.device_put(np.ones(2, np.float32), jax.devices()[-1])
    assert jax.lax.reshape(last, (2, 1)).devices() == {jax.devices()[-1]}
    weak = jnp.asarray(2.0)
    assert weak.weak_type and jax.lax.broadcast_in_dim(weak, (2,), ()).weak_type
    assert jax.random.split(jax.random.key(0), 2)[:1].shape == (1,)


@pytest.fixture
def programs():
    """A list that grows by each program that JAX compiles."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_numpy_moves_without_a_program(programs):
    x = jax.device_put(np.zeros((7, 11, 13), np.float32))
    jax.block_until_ready((jax.lax.transpose(x, (2, 0, 1)), jax.lax.squeeze(x[:1], (0,))))
    assert not programs
    jax.lax.rev(x, (0,))  # the control: an operation that JAX compiles
    assert len(programs) == 1
    with jax_moves():
        jax.block_until_ready(jax.lax.transpose(x, (2, 0, 1)))
    assert len(programs) == 2


def test_draws_of_several_shapes_share_a_program(programs):
    key = jax.random.key(0)
    jax.random.normal(key, (2, 31))
    compiled = len(programs)
    jax.random.normal(key, (61,))
    assert len(programs) == compiled
    with jax_moves():
        jax.random.normal(key, (61,))  # the control
    assert len(programs) == compiled + 1


@pytest.mark.parametrize("dtype", [None, "float64", "bfloat16"])
def test_numbers_of_a_longer_draw_are_those_of_the_draw(dtype):
    """Also of one number, of none, and of more than are drawn in a program of a rounded size."""
    key = jax.random.key(7)
    with jax.enable_x64(dtype == "float64"):
        for shape in ((), (1,), (0, 3), (3, 5, 7), (63,), (64,), (65,), (513, 512)):
            drawn = jax.random.normal(key, shape, dtype)
            expected = jax.jit(jax.random.normal, static_argnums=(1, 2))(key, shape, dtype)
            assert drawn.aval == expected.aval
            np.testing.assert_array_equal(np.asarray(drawn), np.asarray(expected))
        other = jax.random.normal(jax.random.key(8), (63,), dtype)  # the control
        assert not np.array_equal(other, jax.random.normal(key, (63,), dtype))


@pytest.mark.parametrize("preset", ["gpt2-byte-1m", "qwen3-next-byte-500k", "deepseek-v3-byte-500k"])
def test_shapes_without_draws_are_those_with_them(preset):
    with traced_draws():
        expected = models.shapes(preset)
    assert eqx.tree_equal(models.shapes(preset), expected)


def test_shapes_are_kept_for_an_equal_config_alone():
    config: Any = models.preset("llama-byte-1m")
    kept = models.shapes(config)
    assert models.shapes(dataclasses.replace(config)) is kept is models.shapes("llama-byte-1m")
    narrower = models.shapes(dataclasses.replace(config, vocab=config.vocab - 1))
    assert narrower.embedding.weight.shape[0] == kept.embedding.weight.shape[0] - 1
    with jax.enable_x64(True):
        assert models.shapes(config) is not kept
    assert models.shapes(config, classifier=models.Classifier(2)).classifier is not None and kept.classifier is None
    family = models.FAMILIES["llama"]
    config_type: Any = type("Mine", (type(config),), {})
    mine = config_type(**vars(config))
    registered = dataclasses.replace(
        family,
        name="mine",
        config=config_type,
        presets={},
        model_type=None,
        aliases=(),
        architecture="",
        multimodal=(),
        build=lambda config, *, key: models.build("gpt2-byte-1m", key=key),
    )
    models.register(registered)
    assert len(jax.tree.leaves(models.shapes(mine))) == len(jax.tree.leaves(models.shapes("gpt2-byte-1m")))


def test_draws_are_left_out_of_shapes_alone():
    def draw(key: jax.Array) -> jax.Array:
        return jax.vmap(lambda key: jax.random.normal(key, (3,)))(jax.random.split(key, 2))

    key, compiled = jax.random.key(0), jax.jit(draw)
    expected = np.stack([jax.random.normal(row_key, (3,)) for row_key in jax.random.split(key, 2)])
    shape = eqx.filter_eval_shape(draw, key)
    assert (shape.shape, shape.dtype) == ((2, 3), np.float32)
    assert eqx.filter_eval_shape(compiled, key) == shape  # JAX keeps this trace of `compiled`
    np.testing.assert_array_equal(compiled(key), expected)
    np.testing.assert_array_equal(draw(key), expected)
    no_key: Any = None  # is seen by a draw alone
    assert eqx.filter_eval_shape(lambda: jax.random.normal(no_key, (3,))).shape == (3,)
    with traced_draws(), pytest.raises(TypeError):
        eqx.filter_eval_shape(lambda: jax.random.normal(no_key, (3,)))
