"""What devices scatter among each other's tokens is kept where else all is computed again, and not sent again."""

import equinox as eqx
import jax
import pytest

from eqformer import models, nn, planning, training
from eqformer.parallel import make_mesh, Plan


def scatters(remat: str) -> int:
    """Reduce-scatters in the program of a loss and its gradients."""
    shapes = eqx.filter_eval_shape(lambda: models.build("llama-byte-1m", key=jax.random.key(0)))
    shapes = nn.run_with(shapes, remat=remat)
    plan = Plan(make_mesh(tensor=2, devices=jax.devices()[:2]), residual="sequence")
    trained = training.optimizer("adamw", shapes, rate=3e-4).trained
    gradients = training.planned_gradients(plan)(training.next_token_loss, trained)
    arrays, rest = eqx.partition(plan.shapes(shapes), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    run = lambda arrays, batch: eqx.filter(gradients(eqx.combine(arrays, rest), batch, None), eqx.is_array)
    return str(jax.make_jaxpr(run)(arrays, planning.batch_shapes(2, 16))).count("reduce_scatter[")


@pytest.mark.grid
def test_what_a_layer_scatters_is_not_scattered_again():
    """But by policies that keep products alone, as a control."""
    assert scatters("full") == scatters("products") == scatters("none")
    assert scatters("dots") == scatters("full") + 1  # the attention's
