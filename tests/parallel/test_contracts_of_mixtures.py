"""A user's own mixture of experts runs under a plan as on one device."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import ROUNDING, ZERO
from jaxtyping import Array, Float
from plan_models import batch_of, filled, of_blocks, plan_over
from plan_parity import alone, differences, total_under, under
from plan_parts import attention, EMBED, norm

from eqformer import nn, planning
from eqformer.parallel import _expert_parallel


class GatedMixture(nn.ExpertMixture):
    """Experts that read fewer channels of a scaled stream, and whose sum is gated feature by feature."""

    router: nn.Router
    experts: nn.Experts
    down: nn.LinearMap
    up: nn.LinearMap
    gate: Float[Array, "embed"]
    scale: Float[Array, "embed"]
    dispatch: nn.Dispatch = nn.Dropless()
    shared: nn.FeedForward | None = None
    losses: tuple[nn.BalanceLoss, ...] = ()
    weighs_inputs: bool = eqx.field(static=True, default=False)

    def normalize_inputs(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Scale each feature."""
        return nn.multiply_float32(x, self.scale)

    def project_inputs(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq _"]:
        """Map to fewer channels."""
        return self.down(x)

    def project_outputs(self, y: Float[Array, "*batch seq _"]) -> Float[Array, "*batch seq embed"]:
        """Map back."""
        return self.up(y)

    def combine(
        self, x: Float[Array, "*batch seq embed"], y: Float[Array, "*batch seq embed"]
    ) -> Float[Array, "*batch seq embed"]:
        """Gate what the experts add."""
        y = nn.multiply_float32(y, jnp.tanh(self.gate))
        return y if self.shared is None else y + self.shared(x)

    def expert_width(self, embed: int) -> int:
        """Half of the stream's channels."""
        return self.down.sizes["latent"]


def block(key: Any) -> nn.Block:
    """An attention and such a mixture, with a shared expert and a balance loss."""
    keys = jax.random.split(key, 6)
    latent = EMBED // 2
    mixture = GatedMixture(
        router=nn.TopKRouter(embed=EMBED, experts=4, top_k=2, key=keys[0]),
        experts=nn.Experts(lambda key: nn.GatedMLP(embed=latent, mlp=8, key=key), 4, key=keys[1]),
        down=nn.Linear("embed -> latent", embed=EMBED, latent=latent, key=keys[2]),
        up=nn.Linear("latent -> embed", embed=EMBED, latent=latent, key=keys[3]),
        gate=jnp.ones(EMBED),
        scale=jnp.ones(EMBED),
        shared=nn.MLP(embed=EMBED, mlp=16, key=keys[4]),
        losses=(nn.LoadBalance(0.1),),
    )
    return nn.Block(nn.Residual(attention(keys[5]), norm()), nn.Residual(mixture, norm()))


@functools.cache
def model() -> nn.Transformer:
    """Two such layers."""
    return filled(lambda: of_blocks(block, depths=(2,)))


@functools.cache
def expected() -> Any:
    """The loss and the gradients of one device."""
    return alone(model(), batch_of(model()))


CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"expert": 2, "tensor": 2}, {"residual": "sequence"}),
    ({"fsdp": 2, "expert": 2, "tensor": 2}, ZERO | {"residual": "feature"}),
    ({"fsdp": 2, "expert": 2}, {"zero": 2, "expert_method": "exchange", "expert_factor": 0.5}),
    ({"pipe": 2, "expert": 2, "tensor": 2}, {"microbatches": 2}),
    ({"fsdp": 2, "tensor": 2}, ZERO),
]


@pytest.mark.grid
@pytest.mark.parametrize("mesh,choices", CASES, ids=str)
def test_a_mixture_of_ones_own_is_split_like_any(mesh, choices):
    """Leaf by leaf; every array of the user's own has a gradient. Its router and its experts have losses and counts."""
    want = expected()
    layer = want.gradients.stacks[0].blocks.feed_forward.layer
    assert all(np.any(x) for x in (layer.gate, layer.scale, layer.down.weight, layer.up.weight))
    if "pipe" in mesh:  # a balance loss is of each microbatch there
        unbalanced = eqx.tree_at(lambda m: m.stacks[0].blocks.feed_forward.layer.losses, model(), ())
        outcome = under(plan_over(mesh, **choices), unbalanced, batch_of(model()))
        assert differences(outcome, alone(unbalanced, batch_of(model())), ROUNDING) == {}
        return
    assert differences(under(plan_over(mesh, **choices), model(), batch_of(model())), want, ROUNDING) == {}


@pytest.mark.grid
def test_a_mixture_that_is_combined_otherwise_has_another_loss(monkeypatch):
    """The control: devices add the experts' sum as the library's mixture does."""
    plan, want = plan_over({"expert": 2, "tensor": 2}), float(expected().total)
    assert total_under(plan, model(), batch_of(model())) == pytest.approx(want, rel=1e-5)
    call = _expert_parallel.SplitMixture.__call__

    def plain(self: Any, *args: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(GatedMixture, "combine", nn.ExpertMixture.combine)
            return call(self, *args)

    monkeypatch.setattr(_expert_parallel.SplitMixture, "__call__", plain)
    assert total_under(plan, model(), batch_of(model())) != pytest.approx(want, rel=1e-4)


def test_a_mixture_of_ones_own_is_counted():
    """Half of the experts are idle, and a plan accepts the model over every axis."""
    shapes = eqx.filter_eval_shape(lambda: of_blocks(block, depths=(2,)))
    idle = planning.parameter_count(shapes) - planning.parameter_count(shapes, active=True)
    assert idle == 2 * 2 * 3 * (EMBED // 2) * 8
    for mesh, choices in CASES:
        plan_over(mesh, **choices).check(shapes, rows=8, seq=16)
