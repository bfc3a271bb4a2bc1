"""The origin of non-finite numbers, found by running a traced program in parts."""

import jax
import jax.numpy as jnp
import pytest

from eqformer.program import find_non_finite


X = jnp.asarray([1.0, 100.0, -1.0])


def origins(fn, *inputs):
    return find_non_finite(jax.make_jaxpr(fn)(*inputs), inputs)


@pytest.mark.quick
def test_the_equation_the_loop_and_the_input_are_named():
    def run(x, scale):
        with jax.named_scope("loop"):
            last, rows = jax.lax.scan(lambda y, _: (jnp.exp(y) * scale, y), x, length=3)
        return last.sum(), rows, jnp.log(x)

    total, rows, log = origins(run, X, jnp.ones(()))
    assert total and log and total == rows and (total.kind, total.operation, total.input) == ("infinity", "exp", None)
    assert [scope for scope in total.scopes if isinstance(scope, int)] == [0]  # the iteration
    assert any("loop" in scope for scope in total.scopes if isinstance(scope, str))
    assert "test_first_non_finite.py" in total.source and not total.is_backward
    assert (log.kind, log.operation) == ("NaN", "log") and log.number > total.number
    first, *_ = origins(run, X * 0.01, jnp.asarray(jnp.nan))
    assert first and first.input == 1


@pytest.mark.quick
def test_infinities_that_results_do_not_keep_are_no_origin():
    masked = lambda x: jax.nn.softmax(jnp.where(jnp.arange(3) < 2, x, -jnp.inf))
    assert origins(masked, X) == [None]
    (origin,) = origins(lambda x: jnp.where(jnp.arange(3) < 2, x, -jnp.inf).sum(), X)
    assert origin and origin.kind == "infinity"  # the control
