"""Names of modules in programs equal the modules' paths in the model, in the forward and in the backward pass."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from nn_reference import random_module

from eqformer import nn


class Plain(eqx.Module):
    """Somebody's own layer, which is no `nn.Module`."""

    weight: jax.Array

    def __call__(self, x):
        return jnp.tanh(x * self.weight)


class Own(nn.Module):
    """The same, with a name, and a wrapper of a layer that was made anew for its call."""

    inner: nn.Module

    def __call__(self, x):
        return jax.tree.map(lambda leaf: leaf, self.inner)(x)


@pytest.fixture(scope="module")
def model():
    def make():
        key = jax.random.key(0)
        one = nn.Block(
            nn.Residual(nn.Attention(embed=8, heads=2, head_dim=4, key=key), nn.RMSNorm("embed", embed=8)),
            nn.Residual(Own(nn.MLP(embed=8, mlp=8, key=key))),
        )
        period = nn.SuperBlock((one, nn.Residual(Plain(jnp.ones(8)))))
        stacks = nn.Stack(lambda _: period, 2, key=key), nn.Stack(lambda _: one, 1, key=key)
        return nn.Transformer(nn.Embedding(vocab=16, embed=8, key=key), stacks, nn.RMSNorm("embed", embed=8))

    return random_module(make)


# What versions of JAX put between: loops, calls of programs, and what `einsum` is given.
OF_JAX = re.compile(r"loss|while|body|cond|closed_call|eval_jaxpr|checkpoint|rematted_computation|.*->.*")


def scopes(text: str) -> set[str]:
    """The names in which a program's operations stand, without those of JAX and of the operation."""
    found = set()
    for name in re.findall(r'op_name="([^"]*)"', text):
        names = (re.sub(r"^(?:\w+\()*|\)*$", "", part) for part in name.split("/")[:-1])
        found.add(".".join(part for part in names if not OF_JAX.fullmatch(part)))
    return found


def test_what_a_module_computes_stands_under_its_path(model):
    def loss(model, ids):
        return jnp.sum(model(ids)[0] ** 2)

    run = eqx.filter_jit(eqx.filter_grad(loss))
    found = scopes(run.lower(model, jnp.ones((1, 4), jnp.int32)).compile().compiled.as_text())
    maps = [path for path, _ in nn.named_modules(model, nn.LinearMap)]
    assert len(maps) == 12
    # A wrapper's `inner` has the wrapper's name, also where it was put together anew.
    written = {path.replace(".inner", "") for path in maps}
    cores = {f"stacks[{n}].blocks{block}.sublayers[0].layer.attention" for n, block in enumerate([".blocks[0]", ""])}
    assert written | cores | {"embedding", "norm", "stacks[0].blocks.blocks[1]"} <= {
        path for scope in found for path in (scope, *(scope.rsplit(".", n)[0] for n in range(1, 4)))
    }
    # The controls: what is no `nn.Module` has no name of its own, and names of modules that are not there are not.
    assert not any("layer" in scope for scope in found if "blocks[1]" in scope)
    assert not any("gate" in scope for scope in found)


class Parts(nn.Module):
    """A wrapper that runs the parts of what it holds by itself, one of them made anew."""

    inner: nn.MLP

    def __call__(self, x):
        return jax.tree.map(lambda leaf: leaf, self.inner.down)(self.inner.up(x))


def test_parts_that_a_wrapper_runs_have_their_names_in_what_it_holds():
    parts = Parts(random_module(nn.MLP, embed=8, mlp=4, key=jax.random.key(0)))
    lines = jax.make_jaxpr(parts)(jnp.ones(8)).eqns
    found = {str(line.source_info.name_stack).split("/")[0] for line in lines}
    assert found == {"up", "linear"}  # of two maps made anew, none could be told by its class


def test_names_end_with_the_call_of_the_module_that_gives_them(model):
    def names(function, *args):
        return {str(line.source_info.name_stack) for line in jax.make_jaxpr(function)(*args).eqns}

    def both(x):
        with pytest.raises(ValueError):
            model.norm(jnp.ones(7))
        return model.norm(x)  # called by no module

    assert names(both, jnp.ones(8)) == {""}
    assert names(lambda ids: model(ids)[0], jnp.ones((1, 2), jnp.int32)) > {"stacks[0]", "norm"}
