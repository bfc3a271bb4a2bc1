"""The report of which implementation runs each operation of a program, and why not another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx

from ._op import Choice, recorded_choices
from ._platform import traced_for


class Explanation(NamedTuple):
    """An operation's chosen implementation, and the reasons why the platform's other implementations were refused."""

    operation: str
    implementation: str
    refusals: tuple[tuple[str, str], ...]
    """Names of implementations and their reasons, the preferred ones first."""
    calls: int
    """Calls in the traced program; a scan over layers traces one layer."""

    def __str__(self) -> str:
        reasons = "".join(f"; not {name}: {reason}" for name, reason in self.refusals)
        return f"{self.operation}: {self.implementation}{reasons}"


def explain(function: Callable[..., Any], *arguments: Any, platform: str) -> tuple[Explanation, ...]:
    """Return what runs each operation of `function(*arguments)` on a platform, and why not another implementation.

    Print an `Explanation` for one line. The program is traced as for one device of the platform, `"cuda"`, `"tpu"` or
    `"cpu"`, and nothing is computed: arguments may be shapes instead of arrays, and the platform's compiler need not be
    installed. Equal explanations are counted, not repeated.

        for line in kernels.explain(model.encode, ids, tokens, platform="cuda"):
            print(line)
    """
    with traced_for(platform), recorded_choices() as choices:
        eqx.filter_eval_shape(lambda function, arguments: function(*arguments), function, arguments)
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
