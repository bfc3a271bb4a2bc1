"""Users' own layers that change the residual stream before their maps, or the output after their maps."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from jaxtyping import Array, Float, TypeCheckError
from plan_models import batch_of
from plan_parity import alone, differences, total_under, under
from plan_parts import attention, EMBED, HEADS, MLP, norm

from eqformer import nn
from eqformer.parallel import _placement, make_mesh, Plan
from eqformer.parallel.tensor import _tensor


ROUNDING = 50 * float(np.finfo(np.float32).eps)


def maps(key: Any, hidden: str = "mlp", size: int = MLP) -> tuple[nn.Linear, nn.Linear]:
    one, two = jax.random.split(key)
    sizes = {"embed": EMBED, hidden: size, "bias": True}
    return nn.Linear(f"embed -> {hidden}", **sizes, key=one), nn.Linear(f"{hidden} -> embed", **sizes, key=two)


class Scaled(nn.FeedForward):
    """The stream scaled and normed by a function of one's own before the map, and scaled and shifted after it."""

    up: nn.LinearMap
    down: nn.LinearMap
    before: Float[Array, "embed"]
    after: Array
    amount: Float[Array, ""]

    @staticmethod
    def of(key: Any) -> "Scaled":
        """A layer with drawn maps."""
        return Scaled(*maps(key), jnp.linspace(0.5, 1.5, EMBED), jnp.linspace(0.2, 1.2, EMBED), jnp.ones(()) * 0.7)

    def __call__(self, x):
        """Map each token by itself."""
        read = jnp.tanh(x * self.before) + self.amount
        return self.down(jax.nn.gelu(self.up(read)) * self.amount) * self.after + self.before * x


class Alone(nn.FeedForward):
    """Hidden features that the stream meets in an array of the layer's own, beside a map back."""

    up: Float[Array, "mlp embed"]
    down: nn.LinearMap

    @staticmethod
    def of(key: Any) -> "Alone":
        """A layer with drawn maps."""
        up, down = maps(key)
        return Alone(up.weight, down)

    def __call__(self, x):
        """Map each token by itself."""
        return self.down(jax.nn.gelu(x @ self.up.T))


class Shifted(nn.Mixer):
    """A map reads each token mixed with the one before, as in RWKV; beside it are random keys that never change."""

    value: nn.LinearMap
    gate: nn.LinearMap
    output: nn.LinearMap
    share: Float[Array, "embed"]
    seed: Array

    @staticmethod
    def of(key: Any) -> "Shifted":
        """A mixer with drawn maps."""
        one, two = jax.random.split(key)
        gate = nn.Linear("embed -> heads", embed=EMBED, heads=HEADS, key=two)
        return Shifted(maps(one, "heads", HEADS)[0], gate, maps(two, "heads", HEADS)[1], jnp.linspace(0, 1, EMBED), two)

    def __call__(self, x, tokens=None, cache=None):
        """Sums of all tokens so far."""
        before = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 0)])[..., :-1, :]
        value = self.value(x + self.share * (before - x)) * jax.nn.sigmoid(self.gate(x))
        noise = jax.random.normal(self.seed, (), x.dtype)
        return self.output(jnp.cumsum(value, -2) / (8 + noise)), cache

    def init_cache(self, batch, capacity, dtype="float32"):
        """None: it is trained alone."""
        return None

    def facts(self) -> nn.MixerFacts:
        """It runs on any slice of its heads."""
        return nn.MixerFacts(splits_heads=True)


def model(mixer: Any, *layers: Any, depth: int = 2) -> nn.Transformer:
    """Layers of a mixer and feed-forward layers, each a residual."""

    def period(key: Any) -> nn.SuperBlock:
        keys = jax.random.split(key, 1 + len(layers))
        return nn.SuperBlock(tuple(nn.Residual(make(key), norm()) for make, key in zip((mixer, *layers), keys)))

    @eqx.filter_jit
    def build() -> nn.Transformer:
        one, two, three = jax.random.split(jax.random.key(0), 3)
        head = nn.Linear("embed -> vocab", embed=EMBED, vocab=48, key=three)
        table = nn.Embedding(vocab=48, embed=EMBED, key=one)
        return nn.Transformer(table, (nn.Stack(period, depth, key=two),), norm(), head)

    return build()


@pytest.fixture(scope="module")
def shifted():
    return model(Shifted.of, Scaled.of)


@pytest.fixture(scope="module")
def by_token():
    return model(attention, Scaled.of, Alone.of)


PIPELINE = Plan(make_mesh(fsdp=2, pipe=2, tensor=2), zero=2, smallest=1, microbatches=2)
BY_TOKEN = Plan(make_mesh(fsdp=2, tensor=4), zero=3, smallest=1, residual="sequence")


def as_if_given(self, x, dtype=None):
    """Whatever a map is given, its product with the layer's input."""
    return self.value if dtype is None else self.value.astype(dtype)


@pytest.mark.grid
def test_maps_read_what_a_layer_makes_of_its_input(shifted, monkeypatch):
    batch = batch_of(shifted)
    want = alone(shifted, batch)
    assert differences(under(PIPELINE, shifted, batch), want, ROUNDING) == {}
    monkeypatch.setattr(_tensor.PrecomputedMap, "product", as_if_given)
    assert abs(total_under(PIPELINE, shifted, batch) - float(want.total)) > 1e-4 * float(want.total)


@pytest.mark.grid
def test_what_is_made_of_each_token_is_gathered(by_token, monkeypatch):
    batch = batch_of(by_token)
    want = alone(by_token, batch)
    assert differences(under(BY_TOKEN, by_token, batch), want, ROUNDING) == {}
    with monkeypatch.context() as patched:
        patched.setattr(_tensor.PrecomputedMap, "product", as_if_given)
        assert abs(total_under(BY_TOKEN, by_token, batch) - float(want.total)) > 1e-4 * float(want.total)
    monkeypatch.setattr(_tensor, "_has_unmapped_array", lambda layer: False)
    with pytest.raises(TypeCheckError, match=r"f32\[4,1,32\]"):  # the map scatters tokens of one device
        total_under(BY_TOKEN, by_token, batch)


def test_what_is_made_of_other_tokens_is_refused_where_a_device_has_some(shifted):
    with pytest.raises(ValueError, match="map 'embed -> heads' of Shifted reads .* use residual='replicated'"):
        total_under(dataclasses.replace(BY_TOKEN, zero=0), shifted, batch_of(shifted))


def test_arrays_that_act_on_the_stream_are_no_slices(by_token, monkeypatch):
    """Marked as slices' own, they would make the stream differ between devices, which its types refuse."""
    plan, batch = Plan(make_mesh(tensor=2, devices=jax.devices()[:2])), batch_of(by_token)
    monkeypatch.setattr(_placement, "_names_split_dims", lambda layer: jax.tree.map(lambda _: True, layer))
    with pytest.raises(TypeError, match="tensor"):
        total_under(plan, by_token, batch)


def test_a_weight_that_is_not_there_is_named():
    linear = maps(jax.random.key(0))[0]
    given = nn.PrecomputedLinear(linear, jnp.sin)
    with pytest.raises(AttributeError, match="takes the place of the map 'embed -> mlp' here.*call the map"):
        _ = given.weight
    assert linear.weight.shape == (MLP, EMBED)


class Fourth(nn.Norm):
    """A norm by the mean of fourth powers."""

    word: str = eqx.field(static=True)

    @property
    def reduced(self):
        """The stream's features."""
        return ("embed",)

    def normalize(self, x, mean):
        """Divide by the root's root."""
        return x * jax.lax.rsqrt(jnp.sqrt(mean(x**4, self.word)) + 1e-3)


def test_an_average_of_something_else_is_named():
    x = put(np.ones((2, EMBED), np.float32))
    with pytest.raises(ValueError, match="Fourth.normalize: mean.y, 'fourths'.*one of 'means' and 'squares'"):
        Fourth("fourths")(x)
    assert Fourth("squares")(x).shape == x.shape
