"""A user's own outer model, stack, embedding, positions and dropout run under a plan as on one device."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import ROUNDING, ZERO
from jaxtyping import Array, Float, Int, Key, PyTree
from plan_models import batch_of, filled, plan_over
from plan_parity import alone, differences, place, total_under, under
from plan_parts import attention, EMBED, MLP, norm

from eqformer import generation, nn, parallel, planning, training
from eqformer.parallel.tensor import _residual_stream


VOCAB = 50


class SquashedEmbedding(nn.TokenEmbedding):
    """An embedding with bounded vectors and a gain for each feature."""

    weight: Float[Array, "vocab embed"]
    gain: Float[Array, "embed"]

    def transform(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Bound the vectors, and multiply their features."""
        return nn.multiply_float32(jnp.tanh(x), self.gain)


class TwoScalePositions(nn.PositionEmbedding):
    """The sum of a vector of the position's block of eight and one of the place within the block."""

    blocks: Float[Array, "max_seq embed"]
    places: Float[Array, "max_seq embed"]

    @property
    def max_seq(self) -> int:
        """Eight positions for each block."""
        return 8 * len(self.blocks)

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Look up two vectors a position."""
        block, offset = jnp.divmod(jnp.maximum(positions, 0), 8)
        return nn.lookup_rows(self.blocks, block) + nn.lookup_rows(self.places, offset)


class GaussianDropout(nn.RandomMask):
    """Multiplies each channel by a normal number of mean 1 (Srivastava et al. 2014, section 10)."""

    deviation: float = eqx.field(static=True, default=0.3)

    @property
    def is_active(self) -> bool:
        """Whether the numbers differ from 1."""
        return self.deviation > 0

    def draw_mask(self, keys: Key[Array, "*batch seq"], channels: int) -> Float[Array, "*batch seq embed"]:
        """Draw the numbers of each token."""
        draw = jax.vmap(lambda key: 1 + self.deviation * jax.random.normal(key, (channels,)))
        return draw(keys.reshape(-1)).reshape(*keys.shape, channels)

    def apply_mask(
        self, x: Float[Array, "*batch seq embed"], mask: Float[Array, "*batch seq embed"]
    ) -> Float[Array, "*batch seq embed"]:
        """Multiply."""
        return x * mask.astype(x.dtype)


class DampedStack(nn.LayerStack):
    """A stack that goes half of the way of each layer, and less far in later layers."""

    numbers: Int[Array, "layers"]
    blocks: nn.Layer = nn.ensemble("layers")
    depth: int = eqx.field(static=True)
    remat: str = eqx.field(static=True, default="none")
    unroll: int = eqx.field(static=True, default=1)

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run the layers that are here in order."""
        tokens = nn.tokens_or_default(tokens, x.shape[:-1], cache)
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def run(x: Array, scanned: tuple) -> tuple[Array, tuple]:
            weights, number, cache = scanned
            y, cache, aux = eqx.combine(weights, static)(x, tokens.fold_in(number), cache)
            return x + (y - x) / (2 + number.astype(x.dtype)), (cache, aux)

        x, (cache, aux) = jax.lax.scan(run, x, (arrays, self.numbers, cache))
        return x, cache, aux

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """The caches of all layers."""
        return eqx.filter_vmap(lambda block: block.init_cache(batch, capacity, dtype))(self.blocks)


class OwnModel(nn.LanguageModel):
    """A model with gains of the first stack's input, cooled logits and, if it skips, a path round each stack."""

    embedding: nn.TokenEmbedding
    stacks: tuple[nn.LayerStack, ...]
    norm: nn.Norm
    head: nn.LinearMap | None
    gain: Float[Array, "embed"]
    order: nn.PositionEmbedding | None = None
    dropout: nn.RandomMask | None = None
    skips: bool = eqx.field(static=True, default=False)
    compute_dtype: str = eqx.field(static=True, default="float32")

    @property
    def runs_in_sequence(self) -> bool:
        """Whether nothing goes round the stacks."""
        return not self.skips

    def embed(self, ids: Int[Array, "*batch seq"], tokens: nn.Tokens) -> Float[Array, "*batch _ embed"]:
        """Look up, add positions, and multiply by the gains."""
        x = self.embedding(ids).astype(self.compute_dtype)
        x = x if self.order is None else nn.add_float32(x, self.order(tokens.positions))
        x = nn.multiply_float32(x, self.gain)
        return x if self.dropout is None else self.dropout(x, tokens.fold_in(12345).keys)

    def encode(
        self, ids: Int[Array, "*batch seq"], tokens: nn.Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run all stacks."""
        tokens = nn.tokens_or_default(tokens, ids.shape, cache)
        first = self.embed(ids, tokens)
        if not self.skips:
            x, cache, aux = nn.run_layers(self.stacks, first, tokens, cache)
            return self.norm(x), cache, aux
        x, auxes = first, []
        for number, stack in enumerate(self.stacks):
            y, _, aux = stack(x, tokens.fold_in(number))
            x, auxes = y + first, [*auxes, aux]
        return self.norm(x), None, tuple(auxes)

    def unembed(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Logits at a temperature of 2."""
        logits = self.embedding.unembed(hidden) if self.head is None else self.head.product(hidden, jnp.float32)
        return logits / 2

    def init_cache(
        self, batch: int | Sequence[int], capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> PyTree:
        """A cache for each stack."""
        shape = (batch,) if isinstance(batch, int) else tuple(batch)
        return tuple(stack.init_cache(shape, capacity, dtype or self.compute_dtype) for stack in self.stacks)


def block(key: Key[Array, ""]) -> nn.Block:
    """An attention and a feed-forward layer."""
    attention_key, mlp_key = jax.random.split(key)
    gated = nn.GatedMLP(embed=EMBED, mlp=MLP, key=mlp_key)
    return nn.Block(nn.Residual(attention(attention_key), norm()), nn.Residual(gated, norm()))


def stack(layers: int) -> nn.LayerStack:
    """The library's stack."""
    return nn.Stack(block, layers, key=jax.random.key(1))


def damped(layers: int) -> nn.LayerStack:
    """A user's own stack of the same layers."""
    blocks = eqx.filter_vmap(block)(jax.random.split(jax.random.key(1), layers))
    return DampedStack(numbers=jnp.arange(layers, dtype=jnp.int32), blocks=cast(nn.Layer, blocks), depth=layers)


def library_model(stack: nn.LayerStack | None = None, **parts: Any) -> nn.Transformer:
    """The library's model with some parts of a user's own."""
    keys = jax.random.split(jax.random.key(0), 3)
    embedding = parts.pop("embedding", None) or nn.Embedding(vocab=VOCAB, embed=EMBED, key=keys[0])
    head = nn.Linear("embed -> vocab", embed=EMBED, vocab=VOCAB, key=keys[2])
    return nn.Transformer(embedding, (stack or nn.Stack(block, 2, key=keys[1]),), norm(), head, **parts)


def own_model(skips: bool = False, **parts: Any) -> OwnModel:
    """A user's own model of two stacks, whose table gives the logits."""
    embedding = nn.Embedding(vocab=VOCAB, embed=EMBED, key=jax.random.key(0))
    return OwnModel(embedding, (stack(2), stack(1)), norm(), None, gain=jnp.ones(EMBED), skips=skips, **parts)


def squashed() -> SquashedEmbedding:
    """A user's own embedding."""
    return SquashedEmbedding(jnp.ones((VOCAB, EMBED)), jnp.ones(EMBED))


def two_scales() -> TwoScalePositions:
    """Positions up to 32."""
    return TwoScalePositions(jnp.ones((4, EMBED)), jnp.ones((8, EMBED)))


MAKE: dict[str, Callable[[], Any]] = {
    "model": own_model,
    "skipping model": functools.partial(own_model, skips=True),
    "stack": lambda: library_model(damped(5)),
    "embedding": lambda: library_model(embedding=squashed()),
    "positions": lambda: library_model(positions=two_scales()),
    "dropout": lambda: library_model(dropout=GaussianDropout()),
    "all": lambda: OwnModel(
        squashed(),
        (damped(3), damped(1)),
        norm(),
        None,
        gain=jnp.ones(EMBED),
        order=two_scales(),
        dropout=GaussianDropout(),
    ),
}
SEQUENCE: dict[str, Any] = {"residual": "sequence"}
STAGES: dict[str, Any] = {"microbatches": 2}
UNEQUAL: dict[str, Any] = {
    "microbatches": 2,
    "schedule": "interleaved",
    "chunks": 2,
}  # four parts of three or four layers
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("all", {"fsdp": 2, "tensor": 2}, ZERO | SEQUENCE),
    ("all", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"zero": 2} | STAGES),
    ("all", {"fsdp": 4, "context": 2}, ZERO),
    ("model", {"fsdp": 2, "tensor": 2}, ZERO),
    ("model", {"pipe": 2, "tensor": 2}, STAGES | SEQUENCE),
    ("skipping model", {"fsdp": 2, "tensor": 2}, ZERO | SEQUENCE),
    ("stack", {"fsdp": 2, "tensor": 2}, ZERO),
    ("stack", {"pipe": 2, "fsdp": 2}, {"zero": 1} | UNEQUAL),
    ("stack", {"tensor": 4}, {"residual": "feature"}),
    ("embedding", {"tensor": 4}, {"residual": "feature"}),
    ("embedding", {"fsdp": 2, "tensor": 2}, ZERO),
    ("embedding", {"pipe": 2, "tensor": 2}, STAGES),
    ("positions", {"tensor": 4}, {"residual": "feature"}),
    ("positions", {"fsdp": 2, "tensor": 2}, ZERO | SEQUENCE),
    ("positions", {"pipe": 2, "context": 2}, STAGES),
    ("dropout", {"tensor": 4}, {"residual": "feature"}),
    ("dropout", {"fsdp": 2, "tensor": 2}, ZERO | SEQUENCE),
    ("dropout", {"pipe": 2, "fsdp": 2}, STAGES),
]


@functools.cache
def model_of(name: str) -> Any:
    """A model with numbers of its own."""
    return filled(MAKE[name])


@functools.cache
def expected(name: str) -> Any:
    """The loss and the gradients of one device."""
    return alone(model_of(name), batch_of(model_of(name)))


def title(value: Any) -> str:
    """A part of a case's name."""
    return ".".join(f"{key}{entry}" for key, entry in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.grid
@pytest.mark.parametrize("name,mesh,choices", CASES, ids=title)
def test_a_plan_gives_the_loss_and_gradients_of_one_device(name, mesh, choices):
    """Leaf by leaf; every array of the user's own has a gradient."""
    want = expected(name)
    assert all(np.any(x) for x in jax.tree.leaves(want.gradients))
    model = model_of(name)
    assert differences(under(plan_over(mesh, **choices), model, batch_of(model)), want, ROUNDING) == {}


def without_transform(monkeypatch: Any) -> None:
    """Devices look vectors up, and leave them as they are."""
    monkeypatch.setattr(
        parallel.SplitEmbedding,
        "__call__",
        lambda self, ids: self.stream.reduce("token embeddings", jnp.take(self.inner.weight, ids, axis=0)),
    )


def first_positions(monkeypatch: Any) -> None:
    """Every device takes its tokens for the first ones of a row."""
    first = lambda x, axis, dim: jax.lax.slice_in_dim(x, 0, x.shape[dim] // jax.lax.axis_size(axis), axis=dim % x.ndim)
    monkeypatch.setattr(_residual_stream, "take_local_slice", first)


def local_mask(monkeypatch: Any) -> None:
    """Every device draws a mask of its own features alone."""
    monkeypatch.setattr(_residual_stream, "FeatureDropout", lambda inner: inner)
    monkeypatch.setattr(parallel.FeatureStream, "split_dropout", lambda self, dropout: dropout)


def numbers_of_stage(monkeypatch: Any) -> None:
    """A stage takes its layers for the first ones."""
    call = DampedStack.__call__
    renumber = lambda stack: eqx.tree_at(lambda s: s.numbers, stack, stack.numbers * 0)
    monkeypatch.setattr(DampedStack, "__call__", lambda stack, *args: call(renumber(stack), *args))


def lies_about_sequence(monkeypatch: Any) -> None:
    """The model says that nothing goes round its stacks."""
    monkeypatch.setattr(OwnModel, "runs_in_sequence", True)


CONTROLS: list[tuple[str, dict[str, int], dict[str, Any], Callable[[Any], None]]] = [
    ("embedding", {"tensor": 2}, {}, without_transform),
    ("positions", {"tensor": 2}, SEQUENCE, first_positions),
    ("dropout", {"tensor": 2}, {"residual": "feature"}, local_mask),
    ("stack", {"pipe": 2}, STAGES, numbers_of_stage),
    ("skipping model", {"pipe": 2}, STAGES, lies_about_sequence),
]


@pytest.mark.grid
@pytest.mark.parametrize("name,mesh,choices,change", CONTROLS, ids=[control[-1].__name__ for control in CONTROLS])
def test_a_plan_that_breaks_a_contract_has_another_loss(name, mesh, choices, change, monkeypatch):
    model, want = model_of(name), float(expected(name).total)
    if change is not lies_about_sequence:
        assert total_under(plan_over(mesh, **choices), model, batch_of(model)) == pytest.approx(want, rel=1e-5)
    change(monkeypatch)
    assert total_under(plan_over(mesh, **choices), model, batch_of(model)) != pytest.approx(want, rel=1e-4)


@pytest.mark.grid
def test_a_model_of_ones_own_writes_text_and_trains():
    """Text over slices of heads, rows and stages; steps from a state that a plan makes."""
    model, plan = model_of("all"), plan_over({"fsdp": 2, "pipe": 2, "tensor": 2}, microbatches=2)
    options = {"max_new_tokens": 6, "log_probabilities": True, "key": jax.random.key(0)}
    write = lambda model: generation.generate(model, [[3, 5, 7, 9], [4], [1, 2]], **options)
    of_plan, of_one_device = write(parallel.ShardedModel(place(model, plan), plan)), write(model)
    assert np.array_equal(of_plan.ids, of_one_device.ids)
    np.testing.assert_allclose(of_plan.log_probabilities, of_one_device.log_probabilities, atol=2e-5)  # type: ignore[arg-type]
    losses: list[list[float]] = []
    for plan in (plan_over({}), plan_over({"fsdp": 2, "pipe": 2, "tensor": 2}, microbatches=2)):
        optimizer = training.optimizer("adamw", eqx.filter_eval_shape(MAKE["all"]), rate=1e-2)
        state = training.PlannedState(MAKE["all"], optimizer, plan).init()
        step, losses = training.make_step(training.next_token_loss, optimizer, plan), [*losses, []]
        for _ in range(2):
            state, metrics = step(state, batch_of(model), jax.random.key(0))
            losses[-1].append(float(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][1] < losses[0][0]


def test_what_a_contract_says_is_checked_and_counted():
    """A model that skips is refused over stages; tables are matrices; positions bound rows; operations are counted."""
    model, skipping = eqx.filter_eval_shape(MAKE["all"]), eqx.filter_eval_shape(MAKE["skipping model"])
    with pytest.raises(ValueError, match=r"pipe=2: .* one after another.* OwnModel does not declare .*leave out pipe"):
        plan_over({"pipe": 2}, microbatches=2).check(skipping, rows=8, seq=16)
    plan_over({"pipe": 2}, microbatches=2).check(model, rows=8, seq=16)
    assert nn.matrices(model).embedding.weight.table
    with pytest.raises(ValueError, match="33"):
        training.check_next_token(eqx.filter_eval_shape(lambda: library_model(positions=two_scales())), seq=33)

    def count(stack: Callable[[int], nn.LayerStack], layers: int) -> float:
        shapes = eqx.filter_eval_shape(lambda: library_model(stack(layers)))
        return planning.flops_per_token(shapes, seq=16, backward=False)

    assert count(damped, 4) == count(stack, 4) > count(damped, 3)
