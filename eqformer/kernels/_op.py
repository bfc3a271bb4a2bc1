"""Operations that have several implementations, and the choice of one for each platform.

A call is a record of arrays and static settings, such as `AttentionCall`. An `Implementation` computes such a call. An
`Op` holds implementations by platform and takes, for each platform, the first implementation that supports the call.
"""

import abc
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
from jaxtyping import PyTree

from ._platform import compilers, traced_for


PLATFORMS = ("cpu", "cuda", "tpu", "any")
"""Compilers as `jax.lax.platform_dependent` names them; `any` stands for all of them."""


class Call(eqx.Module):
    """The arguments of an operation: arrays and static settings."""

    operation: ClassVar[str]
    """The name of the operation."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Return shapes and dtypes for an error message."""


CallT = TypeVar("CallT", bound=Call)
ResultT = TypeVar("ResultT")


class Operation(eqx.Module, Generic[CallT, ResultT]):
    """A function of one `Call`, such as attention; modules have operations as fields."""

    @abc.abstractmethod
    def supports(self, call: CallT) -> str | None:
        """Return the reason why the call cannot be computed, or None if it can.

        Only shapes, dtypes and static settings are known: the program is being traced.
        """

    @abc.abstractmethod
    def __call__(self, call: CallT) -> ResultT:
        """Compute the call, or raise a `ValueError` with the reason why not."""

    def decode_op(self, *, has_codes: bool) -> "Operation | None":
        """Return the attention to a cache that replaces this operation in a decode step; None if nothing replaces it.

        Args:
            has_codes: Whether the replacement must read keys and values as 8-bit codes and their scales.
        """
        return None


class Implementation(Operation[CallT, ResultT]):
    """One way to compute a call: plain JAX, or a kernel for one platform.

    A subclass defines `supports` and `run`. `run` needs no derivative, because an `Op` differentiates its fallback
    instead, which is the first implementation for the platform `any` that supports the call. A kernel of attention with
    a backward pass of its own is a `FlashAttention`.
    """

    @abc.abstractmethod
    def run(self, call: CallT) -> ResultT:
        """Compute a call that is supported."""

    def __call__(self, call: CallT) -> ResultT:
        """Compute the call by this implementation alone; raise a `ValueError` with the reason if it cannot."""
        record_choice(Choice(call.operation, (), self, ()))
        if (reason := self.supports(call)) is not None:
            raise ValueError(
                f"{self} cannot compute {call.describe()}: {reason}; pass an op such as kernels.ATTENTION, which takes "
                "another implementation for such calls."
            )
        with jax.named_scope(scope_name(call)):
            return self.run(call)


class Choice(NamedTuple):
    """The implementations that an op takes for a call.

    `fallback` runs on all platforms that `by_platform` does not name. `refusals` are the implementations that do not
    support the call, each with its platform and its reason.
    """

    operation: str
    by_platform: tuple[tuple[str, Implementation], ...]
    fallback: Implementation
    refusals: tuple[tuple[str, Implementation, str], ...]

    def implementation_for(self, platform: str) -> Implementation:
        """Return the implementation that runs on a platform."""
        return dict(self.by_platform).get(platform, self.fallback)


RunChoice = Callable[[Choice, CallT], ResultT]


class Op(Operation[CallT, ResultT]):
    """An operation with a reference, which supports every call, and implementations in the order of preference.

    An `Op` is an immutable value, and each module holds the op that it uses. To use an implementation from outside of
    the package, make an op by `op.with_implementation("cuda", MyKernel())`, and pass it to modules as their `core`, or
    set it on a built model by `nn.with_execution`. There is no global registry, because JAX would not see it: a program
    that was traced before a registration would be reused after it, and a model would mean different programs in two
    processes. An op is part of the model's tree structure, so `jax.jit` traces a model with another op anew.

    The platform is the one that a program is compiled for, also on a machine without that platform:
    `jax.lax.platform_dependent` chooses while JAX lowers the program.
    """

    reference: Implementation[CallT, ResultT]
    implementations: tuple[Implementation[CallT, ResultT], ...]
    platforms: tuple[str, ...] = eqx.field(static=True)
    run_choice: RunChoice[CallT, ResultT] = eqx.field(static=True)

    def __init__(
        self,
        reference: Implementation[CallT, ResultT],
        implementations: Sequence[tuple[str, Implementation[CallT, ResultT]]] = (),
        run_choice: RunChoice[CallT, ResultT] | None = None,
    ):
        """Set up the op.

        Args:
            reference: The definition in plain JAX, which supports every call.
            implementations: Pairs of a platform and an implementation, the preferred pairs first.
            run_choice: A function that runs a `Choice` and defines the derivative; None: the derivative of the
                fallback, whichever implementation runs.
        """
        for platform, _ in implementations:
            if platform not in PLATFORMS:
                names = ", ".join(PLATFORMS)
                raise ValueError(f"Op(implementations=...): {platform!r} is no platform; name one of {names}.")
        self.reference = reference
        self.platforms = tuple(platform for platform, _ in implementations)
        self.implementations = tuple(implementation for _, implementation in implementations)
        self.run_choice = run_with_fallback_derivative if run_choice is None else run_choice

    def with_implementation(
        self, platform: str, implementation: Implementation[CallT, ResultT]
    ) -> "Op[CallT, ResultT]":
        """Return the op with one more implementation, which is preferred to all others.

        The new implementation replaces an implementation of the same class for the same platform.
        """
        pairs = zip(self.platforms, self.implementations)
        remaining = [pair for pair in pairs if (pair[0], type(pair[1])) != (platform, type(implementation))]
        return Op(self.reference, ((platform, implementation), *remaining), self.run_choice)

    def implementation_for(self, call: CallT, platform: str) -> Implementation[CallT, ResultT]:
        """Return the first implementation that supports the call on a platform; the reference if there is none."""
        pairs = zip(self.platforms, self.implementations)
        candidates = [implementation for name, implementation in pairs if name in (platform, "any")]
        supported = (implementation for implementation in candidates if implementation.supports(call) is None)
        return next(supported, self.reference)

    def choose(self, call: CallT) -> Choice:
        """Return, for each platform that this installation can compile for, the first implementation that supports the
        call."""
        supported: list[tuple[str, Implementation]] = []
        refusals: list[tuple[str, Implementation, str]] = []
        for platform, implementation in zip(self.platforms, self.implementations):
            if (reason := implementation.supports(call)) is None:
                supported.append((platform, implementation))
            else:
                refusals.append((platform, implementation, reason))
        supported.append(("any", self.reference))
        first = {name: next(pair for pair in supported if pair[0] in (name, "any")) for name in (*compilers(), "cpu")}
        by_platform = tuple(pair for name, pair in first.items() if pair[0] == name)
        fallback = next(implementation for platform, implementation in supported if platform == "any")
        return Choice(call.operation, by_platform, fallback, tuple(refusals))

    def supports(self, call: CallT) -> str | None:
        """Return None: the reference computes every call."""
        return None

    def decode_op(self, *, has_codes: bool) -> Operation | None:
        """Return the `decode_op` of the first implementation that has one for caches without codes.

        The returned op also reads caches with codes.
        """
        replacements = (implementation.decode_op(has_codes=False) for implementation in self.implementations)
        return next((op for op in replacements if op is not None), None)

    def __call__(self, call: CallT) -> ResultT:
        """Compute the call by the implementation of the platform that the program is compiled for."""
        choice = self.choose(call)
        record_choice(choice)
        with jax.named_scope(scope_name(call)):
            return self.run_choice(choice, call)


def scope_name(call: Call) -> str:
    """Return the name that a call has in programs and profiles: its operation's name, with underscores."""
    return call.operation.replace(" ", "_")


def run_with_fallback_derivative(choice: Choice, call: Call) -> PyTree:
    """Run the chosen implementation, with the derivative of the fallback."""
    branches = {platform: implementation.run for platform, implementation in choice.by_platform}
    return dispatch_with_derivative(branches, choice.fallback.run, call)


def dispatch_with_derivative(
    branches: Mapping[str, Callable[[CallT], ResultT]], default: Callable[[CallT], ResultT], call: CallT
) -> ResultT:
    """Run the branch of the platform that the program is compiled for, and `default` on all other platforms.

    The derivative of `default` is used, whichever function runs.
    """
    return _dispatch((tuple(branches.items()), default), call) if branches else default(call)


Run = Callable[[PyTree], PyTree]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _dispatch(branches_and_default: tuple[tuple[tuple[str, Run], ...], Run], call: PyTree) -> PyTree:
    branches, default = branches_and_default
    return jax.lax.platform_dependent(call, **dict(branches), default=default)


# The branches are kernels, which have no derivative of their own.
@_dispatch.defjvp
def _dispatch_jvp(
    branches_and_default: tuple[tuple[tuple[str, Run], ...], Run], primals: tuple, tangents: tuple
) -> tuple[PyTree, PyTree]:
    _, default = branches_and_default
    return jax.jvp(default, primals, tangents)


# The list to which ops append their choices while `explain` traces a program; None at all other times.
_RECORDED: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("recorded", default=None)


@contextlib.contextmanager
def collect_choices() -> Iterator[list[Choice]]:
    """Yield a list to which every op that is called in the context appends its choice."""
    choices: list[Choice] = []
    token = _RECORDED.set(choices)
    try:
        yield choices
    finally:
        _RECORDED.reset(token)


def record_choice(choice: Choice) -> None:
    """Append a choice to the list of `collect_choices`, if the program is traced in such a context."""
    if (choices := _RECORDED.get()) is not None:
        choices.append(choice)


class Explanation(NamedTuple):
    """An operation's implementation on a platform, and why preferred implementations do not support the call."""

    operation: str
    implementation: str
    refusals: tuple[tuple[str, str], ...]
    """Names of the platform's implementations that do not support the call, each with its reason."""
    calls: int
    """Calls in the traced program; a scan over layers traces one layer."""

    def __str__(self) -> str:
        reasons = "".join(f"; not {name}: {reason}" for name, reason in self.refusals)
        return f"{self.operation}: {self.implementation}{reasons}"


def explain(function: Callable[..., object], *arguments: PyTree, platform: str) -> tuple[Explanation, ...]:
    """Return the implementation of each operation of `function(*arguments)` on a platform, and why others are not used.

    An `Explanation` prints as one line. The program is traced as for one device of the platform, `"cuda"`, `"tpu"` or
    `"cpu"`, and nothing is computed: arguments may be shapes instead of arrays, and the platform's compiler need not be
    installed. Equal explanations are counted, not repeated.

        for line in kernels.explain(model.encode, ids, tokens, platform="cuda"):
            print(line)
    """
    with traced_for(platform), collect_choices() as choices:
        eqx.filter_eval_shape(function, *arguments)
    counts: dict[Explanation, int] = {}
    for choice in choices:
        explanation = _explanation_of(choice, platform)
        counts[explanation] = counts.get(explanation, 0) + 1
    return tuple(explanation._replace(calls=calls) for explanation, calls in counts.items())


def _explanation_of(choice: Choice, platform: str) -> Explanation:
    refusals = tuple(
        (type(implementation).__name__, reason)
        for name, implementation, reason in choice.refusals
        if name in (platform, "any")
    )
    return Explanation(choice.operation, type(choice.implementation_for(platform)).__name__, refusals, calls=1)
