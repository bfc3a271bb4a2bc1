"""Gradients of 16,384 tokens in bfloat16 beside float32's, leaf by leaf, on one device and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_models import batch_of, model_of
from plan_parity import Case, compiled, differences, leaf_differences, of_one_device, of_plan, Outcome

from eqformer import nn, training
from eqformer.nn import _contracts
from eqformer.training import make_gradient_function, next_token_loss


PLAIN = Case("long table", {}, shape=(256, 64))
REPLICAS = PLAIN._replace(mesh={"replica": 8})
SPLIT = PLAIN._replace(mesh={"fsdp": 2, "tensor": 4}, choices={"zero": 3, "residual": "sequence"})
WIDER = [
    PLAIN._replace(mesh={"fsdp": 2, "tensor": 4}, choices={"zero": 1, "residual": "replicated"}),
    PLAIN._replace(mesh={"fsdp": 2, "tensor": 4}, choices={"zero": 2, "residual": "feature"}),
    PLAIN._replace(
        mesh={"fsdp": 2, "pipe": 2, "tensor": 2}, choices={"zero": 1, "microbatches": 2, "residual": "feature"}
    ),
    Case("llama", {"fsdp": 2, "tensor": 4}, {"zero": 3, "residual": "sequence"}),
    Case("windows", {"context": 2, "tensor": 4}, {"residual": "sequence", "overlap": "ring"}, "products"),
    Case("jaxformer", {"fsdp": 2, "context": 4}, {"zero": 2, "microbatches": 2}),
]


def tolerance(case: Case, *, narrow: bool = False) -> float:
    """What the rounding of products comes to, and nothing else; `narrow`: that of parameters too.

    On its way from the table to the loss and back, a number passes, in each layer and each direction, some 16 products
    and sums that are rounded to bfloat16 (norms, maps, scores, probabilities, the activation, the stream), each by at
    most 2^-9 of its size, and each on its own. They come to the square root of their number. Sums over tokens add none:
    the errors of tokens are as unlike as their gradients, and grow as these do. Parameters that are rounded
    themselves are, in each layer, nine factors more: seven maps and two norms.
    """
    layers = {PLAIN.model: 2, "llama": 4, "jaxformer": 8, "windows": 8}[case.model]
    return float(np.sqrt(2 * (16 + 9 * narrow) * layers)) * 2**-9


def in_dtypes(case: Case, parameters: str, compute: str) -> Case:
    """The case at as many tokens as training has in a step: 16,384."""
    return case._replace(dtypes=(parameters, compute), shape=PLAIN.shape if case.model == PLAIN.model else (1024, 16))


def exact(case: Case) -> Outcome:
    """One device's, in float32."""
    return of_one_device(in_dtypes(case, "float32", "float32"))


def wrong(got: Outcome, case: Case, *, narrow: bool = False) -> dict[str, float]:
    """Leaves, and sums, that differ from float32's by more than the rounding of products.

    Of a key's bias that no position turns, the gradient is zero, and may be what rounding makes of its addends.
    """
    return differences(got, exact(case), tolerance(case, narrow=narrow))


def with_grid(cases: list[Case], wider: list[Case]) -> list:
    """Cases for every run, and others for the grid."""
    named = [pytest.param(case, id=case.name) for case in cases]
    return named + [pytest.param(case, id=case.name, marks=pytest.mark.grid) for case in wider]


@pytest.mark.grid
def test_one_devices_gradients_are_float32s_up_to_the_rounding_of_products():
    case = PLAIN
    got = of_one_device(in_dtypes(case, "float32", "bfloat16"))
    assert {str(x.dtype) for x in jax.tree.leaves(got.gradients)} == {"float32"}
    assert wrong(got, case) == {}
    assert leaf_differences(got.gradients, exact(case).gradients, 1e-3)  # the comparison can tell
    leaves = jax.tree_util.tree_leaves_with_path(exact(case).gradients)
    norms = {nn.path_name(path): float(np.linalg.norm(np.asarray(x))) for path, x in leaves}
    whole = float(np.linalg.norm(np.asarray(list(norms.values()))))
    small = {path for path, norm in norms.items() if norm < tolerance(case) / 10 * whole}
    assert small == {"stacks[0].blocks.sublayers[0].layer.key.bias"}  # all else is compared with its own size


@pytest.mark.grid
@pytest.mark.parametrize("case", with_grid([SPLIT], [REPLICAS, *WIDER]))
def test_a_meshs_gradients_are_float32s_up_to_the_rounding_of_products(case):
    assert wrong(of_plan(in_dtypes(case, "float32", "bfloat16")), case) == {}


@pytest.mark.grid
@pytest.mark.parametrize("case", with_grid([PLAIN], [Case("llama", {}), Case("jaxformer", {})]))
def test_narrow_parameters_gradients_are_rounded_sums(case):
    """Vectors of a table that come a thousand times, biases, and all else: summed in float32 and then rounded."""
    assert wrong(of_one_device(in_dtypes(case, "bfloat16", "bfloat16")), case, narrow=True) == {}


@pytest.mark.grid
@pytest.mark.parametrize("case", with_grid([REPLICAS], [SPLIT, *WIDER]))
def test_a_meshs_gradients_of_narrow_parameters_are_wide_sums(case):
    """As large, too, as float32's: the norm that clipping and the log are given."""
    got = of_plan(in_dtypes(case, "bfloat16", "bfloat16"))
    assert {str(x.dtype) for x in jax.tree.leaves(got.gradients)} == {"float32"}
    assert wrong(got, case, narrow=True) == {}
    one = of_one_device(in_dtypes(case, "bfloat16", "bfloat16"))
    norm, of_one, of_exact = (float(training.global_norm(each.gradients)) for each in (got, one, exact(case)))
    # Parameters that are rounded have other gradients, on one device too.
    assert (norm, norm) == (
        pytest.approx(of_one, rel=tolerance(case) / 25),
        pytest.approx(of_exact, rel=tolerance(case)),
    )


@pytest.mark.grid
def test_biases_that_are_added_in_bfloat16_are_seen(monkeypatch):
    monkeypatch.setattr(_contracts, "add_float32", lambda y, bias: y if bias is None else y + bias.astype(y.dtype))
    model = model_of(PLAIN.model, dtypes=("float32", "bfloat16"))
    got = compiled(make_gradient_function(next_token_loss), model, batch_of(model, *PLAIN.shape))
    found = wrong(got, PLAIN)
    assert {
        "stacks[0].blocks.sublayers[0].layer.value.bias",
        "stacks[0].blocks.sublayers[1].layer.up.bias",
    } <= found.keys()
    assert max(found.values()) > 5 * tolerance(PLAIN)


@pytest.mark.grid
@pytest.mark.parametrize("pipe", [1, 2])
def test_sums_over_microbatches_of_narrow_parameters_are_wide(pipe):
    case = in_dtypes(Case("llama", {"pipe": pipe}, {"microbatches": 4}), "bfloat16", "bfloat16")
    got = of_plan(case)
    assert wrong(got, case, narrow=True) == {}
    for found in jax.tree.leaves(got.gradients.stacks):
        assert found.dtype == jnp.float32
        assert np.any(np.asarray(found.astype(jnp.bfloat16), np.float32) != found)  # not narrow themselves
