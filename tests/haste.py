"""Faster compilation and faster checks of shapes for the tests, whose programs run only a few times each."""

import contextlib
import functools
import importlib.util
import inspect
import math
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from beartype import beartype, BeartypeConf


# Load the file by its path, because the package eqformer is imported later, with its shapes checked.
_SPEC = importlib.util.spec_from_file_location("prepare", Path(__file__).parents[1] / "eqformer" / "_prepare.py")
assert _SPEC is not None and _SPEC.loader is not None
_PREPARE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_PREPARE)
keep_known = _PREPARE.keep_known

# Each program is compiled as one module of code: making and joining 32 modules would take a fifth of the time.
FAST: dict[str, Any] = keep_known({"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1})
HASTE: dict[str, Any] = FAST | keep_known({"xla_cpu_use_fusion_emitters": False})
FLAGS = _PREPARE.format_flags(HASTE)


def share_contexts(programs: int = 64) -> None:
    """Make JAX lower `programs` programs of a thread in one MLIR context, because making a context takes 5 ms.

    The function that makes a context is private to JAX; if it has another name, nothing is changed.
    """
    from jax._src.interpreters import mlir  # here, because flags must be set before JAX is first used

    make, own = getattr(mlir, "make_ir_context", None), threading.local()
    if make is None:
        return

    def context() -> Any:
        number = getattr(own, "number", 0)
        if number % programs == 0:
            own.context = make()
        own.number = number + 1
        return own.context

    mlir.make_ir_context = context


# Casts of integers to these dtypes, and of floats to floats, round alike in numpy and in XLA. XLA flushes subnormal
# numbers in casts from and to float64, and numpy does not.
_INTEGERS = ("bool", "int32", "uint32")
_FLOATS = ("bfloat16", "float32")


def _broadcast(x: np.ndarray, *, shape: tuple[int, ...], broadcast_dimensions: tuple[int, ...]) -> np.ndarray:
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([sizes.get(dim, 1) for dim in range(len(shape))]), shape)


def _cast(x: np.ndarray, *, new_dtype: Any, weak_type: bool) -> np.ndarray | None:
    old, new = x.dtype.name, np.dtype(new_dtype).name
    rounds_alike = (old in _INTEGERS and new in _INTEGERS + _FLOATS) or (old in _FLOATS and new in _FLOATS)
    return x.astype(new_dtype) if rounds_alike and not weak_type else None


def _reshape(x: np.ndarray, *, new_sizes: tuple[int, ...], dimensions: Any) -> np.ndarray | None:
    return x.reshape(new_sizes) if dimensions is None else None


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or (1,) * x.ndim))]


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: tuple[int, ...]) -> np.ndarray:
    bounds = zip(starts, x.shape, slice_sizes, strict=True)
    clamped = [(min(max(int(start), 0), size - width), width) for start, size, width in bounds]
    return x[tuple(slice(start, start + width) for start, width in clamped)]


def _iota(*, dtype: Any, shape: tuple[int, ...], dimension: int) -> np.ndarray | None:
    if np.dtype(dtype).name not in ("int32", "uint32", "float32"):
        return None
    return _broadcast(np.arange(shape[dimension]).astype(dtype), shape=shape, broadcast_dimensions=(dimension,))


MOVES: dict[str, Callable[..., np.ndarray | None]] = {
    "broadcast_in_dim_p": _broadcast,
    "concatenate_p": lambda *parts, dimension: np.concatenate(parts, dimension),
    "convert_element_type_p": _cast,
    "dynamic_slice_p": _dynamic_slice,
    "iota_p": _iota,
    "reshape_p": _reshape,
    "slice_p": _slice,
    "stage_p": lambda x: x,
    "squeeze_p": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "transpose_p": lambda x, *, permutation: x.transpose(permutation),
}
"""Operations without arithmetic, by the names of their JAX primitives. A function returns None if numpy's result could
differ from JAX's."""

_NUMPY_MOVES = [False]
_ROUNDED_SIZES = [4**power for power in range(3, 10)]


def move_by_numpy() -> None:
    """Run operations without arithmetic in numpy, outside of `jit`; JAX would compile a program for each shape.

    JAX runs an operation itself if an argument is on a device that a caller chose, is on several devices, has a weak
    type or is traced. A primitive that the installed JAX does not have is skipped.
    """
    import jax  # here, because flags must be set before JAX is first used
    import jax.numpy as jnp

    def is_plain(x: Any, may_be_weak: bool) -> bool:
        if isinstance(x, np.ndarray | np.generic):
            return may_be_weak or not getattr(x, "weak_type", False)  # JAX's subclasses can be weak
        if not isinstance(x, jax.Array) or getattr(x, "committed", True):
            return False
        return not jnp.issubdtype(x.dtype, jax.dtypes.extended) and (may_be_weak or not x.weak_type)

    def replace(primitive: Any, move: Callable[..., np.ndarray | None], may_be_weak: bool) -> None:
        compile_and_run = primitive.impl

        def run(*args: Any, **params: Any) -> Any:
            if _NUMPY_MOVES[0] and params.get("sharding") is None and all(is_plain(x, may_be_weak) for x in args):
                options = {name: value for name, value in params.items() if name != "sharding"}
                with np.errstate(all="ignore"):  # XLA does not warn of an overflow in a cast
                    moved = move(*map(np.asarray, args), **options)
                if moved is not None:
                    return jax.device_put(np.array(moved))  # a copy, since JAX may keep the memory
            return compile_and_run(*args, **params)

        primitive.impl = run

    for name, move in MOVES.items():
        if (primitive := getattr(jax.lax, name, None)) is not None:
            replace(primitive, move, may_be_weak=name == "convert_element_type_p")
    _NUMPY_MOVES[0] = True


@contextlib.contextmanager
def _switched_off(switch: list[bool]) -> Iterator[None]:
    switch[0] = False
    try:
        yield
    finally:
        switch[0] = True


@contextlib.contextmanager
def jax_moves() -> Iterator[None]:
    """Let JAX run all operations and draws of the block, for a test that counts compiled programs."""
    with _switched_off(_NUMPY_MOVES):
        yield


def draw_rounded_sizes() -> None:
    """Draw normal numbers outside of `jit` in programs that draw 4**n numbers, and return the first of them.

    JAX would compile a program for each shape. A number depends only on the key and on its place among the numbers, so
    it is the same in a longer draw. Keys of other generators, keys on a chosen device and large draws are left to JAX.
    """
    import jax  # here, because flags must be set before JAX is first used
    from jax._src import core

    if not hasattr(core, "trace_ctx"):
        return
    draw = jax.random.normal

    def is_plain(key: Any) -> bool:
        is_traced = type(core.trace_ctx.trace).__name__ != "EvalTrace" or isinstance(key, core.Tracer)
        if is_traced or not isinstance(key, jax.Array) or key.shape or str(key.dtype) != "key<fry>":
            return False
        partitionable = getattr(jax.config, "jax_threefry_partitionable", False)
        return partitionable and not getattr(key, "committed", True)

    @functools.wraps(draw)
    def normal(key: Any, shape: Any = (), dtype: Any = None, **options: Any) -> Any:
        if _NUMPY_MOVES[0] and isinstance(shape, tuple) and not options and is_plain(key):
            size = math.prod(shape)
            rounded = next((count for count in _ROUNDED_SIZES if size <= count), None)
            if rounded is not None:
                numbers = np.asarray(draw(key, (rounded,), dtype))
                return jax.device_put(np.array(numbers[:size].reshape(shape)))  # a copy, since JAX may keep the memory
        return draw(key, shape, dtype, **options)

    jax.random.normal = normal


_ABSTRACT_DRAWS = [False]
_SHAPES: dict[tuple, Any] = {}


def _identify_shapes(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Return everything that the shapes of a model depend on, or None for calls other than `models.shapes` makes.

    A test loads and saves a model of one config several times, and each time the shapes of the model are traced again.
    """
    name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if name != ("eqformer.models._registry", "build") or len(args) != 1:
        return None
    import jax  # here, because flags must be set before JAX is first used

    from eqformer.models import _registry

    presets = _registry.presets() if isinstance(args[0], str) else {}
    config = presets.get(args[0], args[0])
    family = next((family for family in _registry.FAMILIES.values() if type(config) is family.config), None)
    options = tuple((name, kwargs[name]) for name in sorted(kwargs) if name != "key")
    context = _ABSTRACT_DRAWS[0], jax.config.read("jax_enable_x64"), jax.sharding.get_abstract_mesh()
    # The representation tells numbers of different types apart, which Python takes for equal.
    identity = config, repr(config), family and family.build, options, context
    try:
        hash(identity)
    except TypeError:  # a config with a field that has no hash
        return None
    return identity


def skip_abstract_draws() -> None:
    """Trace normal draws as zeros in `equinox.filter_eval_shape`, which needs only the shapes.

    Tracing `jax.random.normal` takes half of the time of `models.shapes`, which each load of a model calls. Only draws
    directly in the evaluated function are replaced: JAX would reuse the trace of a `jit` in later calls. The shapes of
    a model are kept for the next call with an equal config.
    """
    import equinox as eqx  # here, because flags must be set before JAX is first used
    import jax
    from jax._src import core

    if not hasattr(core, "trace_ctx"):
        return
    draw, evaluate, evaluated = jax.random.normal, eqx.filter_eval_shape, threading.local()

    def is_evaluated() -> bool:
        trace: Any = core.trace_ctx.trace
        while type(trace).__name__ == "BatchTrace":  # a `vmap` in the evaluated function; a `jit` has another class
            trace = trace.parent_trace
        return trace is evaluated.trace

    @functools.wraps(draw)
    def normal(key: Any, shape: Any = (), dtype: Any = None, **options: Any) -> Any:
        if _ABSTRACT_DRAWS[0] and not options and getattr(evaluated, "trace", None) is not None and is_evaluated():
            return jax.numpy.zeros(shape, float if dtype is None else dtype)
        return draw(key, shape, dtype, **options)

    def run(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        before, evaluated.trace = getattr(evaluated, "trace", None), core.trace_ctx.trace
        try:
            return function(*args, **kwargs)
        finally:
            evaluated.trace = before

    @functools.wraps(evaluate)
    def filter_eval_shape(function: Any, *args: Any, **kwargs: Any) -> Any:
        identity = _identify_shapes(function, args, kwargs)
        if identity not in _SHAPES:
            result = evaluate(run, function, *args, **kwargs)
            if identity is None:
                return result
            if len(_SHAPES) >= 256:
                _SHAPES.clear()
            _SHAPES[identity] = result
        return _SHAPES[identity]

    jax.random.normal, eqx.filter_eval_shape = normal, filter_eval_shape
    _ABSTRACT_DRAWS[0] = True


@contextlib.contextmanager
def traced_draws() -> Iterator[None]:
    """Let JAX trace all random draws of the block."""
    with _switched_off(_ABSTRACT_DRAWS):
        yield


class QuickArguments(inspect.BoundArguments):
    """Arguments of a call that include the defaults of arguments that the call leaves out."""

    def apply_defaults(self) -> None:
        """Do nothing, because the defaults are included already."""


class QuickSignature(inspect.Signature):
    """A signature that binds arguments by a generated function, in a tenth of the time that `inspect` takes."""

    def bind(self, /, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        """Return the arguments of a call by name; `inspect` raises the error for arguments that do not fit."""
        if "binder" not in vars(self):
            self.binder = make_binder(self)
        try:
            return QuickArguments(self, self.binder(*args, **kwargs))
        except TypeError:
            return super().bind(*args, **kwargs)


def make_binder(signature: inspect.Signature) -> Callable[..., Any]:
    """Return a function of a signature's parameters that returns a dictionary of them."""
    parameters = list(signature.parameters.values())
    # In the source all defaults are None; the real defaults are set afterwards.
    bare = [p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None) for p in parameters]
    names = ", ".join(f"{p.name!r}: {p.name}" for p in parameters)
    binder = eval(f"lambda {str(inspect.Signature(bare))[1:-1]}: {{{names}}}")
    given = [p for p in parameters if p.default is not p.empty]
    binder.__defaults__ = tuple(p.default for p in given if p.kind is not p.KEYWORD_ONLY)
    binder.__kwdefaults__ = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    return binder


def may_have_shapes(annotation: Any) -> bool:
    """Return whether a part of an annotation may be jaxtyping's, with dims to check; any string may be such a type."""
    if isinstance(annotation, list | tuple):  # the arguments of a callable
        return any(map(may_have_shapes, annotation))
    module = getattr(type(annotation), "__module__", "")
    if isinstance(annotation, str | typing.ForwardRef) or module.startswith("jaxtyping"):
        return True
    return typing.get_origin(annotation) is not typing.Literal and any(
        map(may_have_shapes, typing.get_args(annotation))
    )


def check_quickly() -> None:
    """Make jaxtyping bind arguments by a `QuickSignature`, and leave functions without shapes to beartype alone.

    For a function without shapes, jaxtyping would check the same as beartype, in many times the time. For a function
    inside of another function, the check is generated only once, by `check_through_relay`. A function whose annotations
    are all `Any` needs no check.
    """
    import jaxtyping
    from jaxtyping import _array_types, _decorator

    # jaxtyping makes a class for each annotation of an array; for inner functions, it would do so at each call.
    if hasattr(_array_types, "_make_array"):
        _array_types.__dict__["_make_array"] = functools.cache(_array_types._make_array)
    quick, jaxtyped = types.ModuleType("inspect"), _decorator.jaxtyped
    check_types = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))
    vars(quick).update(vars(inspect), signature=QuickSignature.from_callable)
    _decorator.__dict__["inspect"] = quick

    def choose(*functions: Any, **options: Any) -> Any:
        if functions and inspect.isclass(functions[0]) and functions[0].__init__ in _CONSTRUCTORS:
            return functions[0]  # the constructor is checked already, and jaxtyping checks a constructor only once
        if functions and inspect.isfunction(functions[0]) and options.get("typechecker") is not None:
            (function,) = functions
            annotations = [*function.__annotations__.values()]
            if all(annotation is Any for annotation in annotations):
                return function
            if "<locals>" in function.__qualname__:
                return check_through_relay(function, lambda relay: jaxtyped(relay, **options))
            if not may_have_shapes(annotations):
                return check_at_first_call(function, check_types)
        return jaxtyped(*functions, **options)

    _decorator.jaxtyped = jaxtyping.jaxtyped = choose


def check_at_first_call(function: Callable, check: Callable[[Callable], Callable]) -> Callable:
    """Generate the check of a function when the function is first called.

    Each process imports the whole package, and the tests in the process call only part of the functions.
    """
    checked_function: Callable | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked_function
        if checked_function is None:
            checked_function = check(function)
        return checked_function(*args, **kwargs)

    return call


class _Waiting(threading.local):
    """Functions of a thread whose arguments are being checked, the innermost last."""

    def __init__(self) -> None:
        self.functions: list[Callable] = []


_WAITING = _Waiting()
_RELAYS: dict[tuple, Callable] = {}
_CONSTRUCTORS: weakref.WeakSet[Callable] = weakref.WeakSet()
"""Constructors that are checked through a relay."""


def check_through_relay(function: Callable, check: Callable[[Callable], Callable]) -> Callable:
    """Check the arguments of an inner function by a relay, a function with the same signature, which is made once.

    An inner function is made again at each call of the outer function, and jaxtyping would read its annotations and
    generate its check again each time. The checked relay instead serves all functions that are made from the same code:
    it calls the function whose arguments were checked last. A relay keeps only code, annotations and plain defaults; a
    function with other defaults gets a check of its own.
    """
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(isinstance(default, bool | int | float | str | None) for default in defaults):
        return check(function)
    try:
        annotations = tuple(function.__annotations__.items())
        key = function.__module__, function.__code__, annotations, tuple(map(repr, defaults))
        hash(key)
    except TypeError:  # an annotation has no hash
        return check(function)
    if key not in _RELAYS:
        _RELAYS[key] = check(_make_relay(function))
    checked_relay, waiting = _RELAYS[key], _WAITING

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        functions = waiting.functions
        depth = len(functions)
        functions.append(function)
        try:
            return checked_relay(*args, **kwargs)
        finally:
            del functions[depth:]  # if the arguments were refused, the relay has not taken the function

    if function.__name__ == "__init__":
        _CONSTRUCTORS.add(call)
    return call


def _make_relay(function: Callable) -> Callable:
    """Return a relay with the function's signature, name and globals, which calls the last waiting function."""
    waiting = _WAITING

    def relay(*args: Any, **kwargs: Any) -> Any:
        return waiting.functions.pop()(*args, **kwargs)

    # jaxtyping reads annotations that are strings with the globals of the function.
    made: Any = types.FunctionType(relay.__code__, function.__globals__, function.__name__, closure=relay.__closure__)
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    made.__annotations__, made.__signature__ = dict(function.__annotations__), QuickSignature.from_callable(function)
    return made


CHECKED: dict[tuple, Callable] = {}


def checked(function: Callable) -> Callable:
    """Return the function with beartype's check, which is generated only once for an inner function.

    jaxtyping passes its own functions, which have the signature of the checked function and only return an argument.
    Two of them from the same place, with the same annotations and without defaults, are therefore the same. jaxtyping
    passes one function that checks the arguments before a call, and another that would check the arguments again
    together with the returned value; here, the second function checks the returned value alone.
    """
    returned = function.__annotations__.get("return", Any)
    if returned is not Any:
        function.__annotations__ = {"return": returned}
    if "<locals>" not in function.__qualname__:
        return check_at_first_call(function, beartype)
    if function.__defaults__ or function.__kwdefaults__:
        return beartype(function)
    names = function.__code__.co_varnames
    key = function.__module__, function.__qualname__, names, tuple(function.__annotations__.items())
    try:
        if key not in CHECKED:
            CHECKED[key] = beartype(function)
    except TypeError:  # an annotation has no hash
        return beartype(function)
    return CHECKED[key]


def put(x: Any, dtype: Any = None) -> Any:
    """Return a JAX array that numpy has cast; `jnp.asarray` would compile a program for each shape."""
    import jax  # here, because flags must be set before JAX is first used

    return jax.device_put(np.asarray(x, dtype))


def same_trees(first: Any, second: Any) -> bool:
    """Return whether two models are equal; numpy compares them, since JAX would compile programs for each shape."""
    import equinox as eqx  # here, because flags must be set before JAX is first used
    import jax

    return bool(eqx.tree_equal(*jax.device_get((first, second))))
