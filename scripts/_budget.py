"""What a plan will cost each device, worked out from shapes: bytes held, and bytes sent."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from _mesh import State
from jaxtyping import PyTree
from recipes import Recipe

from eqformer import Batch, nn, parallel, planning, training


def state_bytes(recipe: Recipe, plan: parallel.Plan, states: State) -> dict[str, tuple[int, int]]:
    """Bytes on a device and of the whole: parameters, gradients and what the optimizer remembers."""
    shapes = states.shapes()
    trained = training.trainable(shapes.model)
    # Gradients are whole, or a stage's, until they are reduced; from zero=2 on each is scattered as it comes.
    of_gradients = plan.state_specs(trained) if plan.zero >= 2 else plan.parameter_specs(trained)
    return {
        "parameters": _bytes(shapes.model, plan.parameter_specs(shapes.model), plan),
        "gradients": _bytes(trained, of_gradients, plan),
        "optimizer state": _held(shapes.optimizer_state),
    }


def activation_bytes(recipe: Recipe, plan: parallel.Plan, model: PyTree) -> dict[str, int]:
    """What a device keeps for the backward pass, by tracing its own program: nothing is compiled or run.

    In a pipeline, the inputs of stages that wait by the schedule, and what one microbatch keeps inside a stage.
    """
    arrays, rest = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    leaves, vocabulary = plan.leaves(model), plan.vocabulary(model)
    found: dict[str, int] = {}

    def per_device(model: PyTree, pieces: tuple) -> jax.Array:
        wrapped = plan.wrap(plan.parameters(model, leaves), model, leaves, shapes)
        known = {id(leaf) for tree in (model, wrapped, pieces) for leaf in jax.tree.leaves(tree)}
        batch, tokens = jax.tree.map(lambda x: x[: x.shape[0] // plan.microbatches], pieces)
        known |= {id(leaf) for leaf in jax.tree.leaves((batch, tokens))}

        def loss(model: PyTree) -> jax.Array:
            return training.next_token_loss(model, batch, None, tokens=tokens, vocabulary=vocabulary)[0]

        if plan.is_pipelined:
            stack = wrapped.stacks[0][: len(wrapped.stacks[0]) // plan.chunks]
            x = parallel.vary(wrapped.embed(batch.ids, tokens), ["pipe"])
            known |= {id(leaf) for leaf in jax.tree.leaves(stack)}
            _, pull = eqx.filter_vjp(lambda stack, x: stack(x, tokens.fold_in(0))[0], stack, x)
            found.update(input=x.size * x.dtype.itemsize, live=_kept(pull, known))
        else:
            _, pull = eqx.filter_vjp(loss, wrapped)
            found.update(live=_kept(pull, known))
        return jnp.zeros(())

    def program(arrays: PyTree, batch: Batch) -> jax.Array:
        pieces = plan.arrange(batch, training.batch_tokens(batch, jax.random.key(0)))
        specs = plan.parameter_specs(model), plan.batch_specs(pieces)
        mapped = parallel.filter_shard_map(per_device, plan.mesh, specs, jax.sharding.PartitionSpec())
        return mapped(eqx.combine(arrays, rest), pieces)

    shapes = model
    jax.eval_shape(program, arrays, batch_shapes(recipe))
    if not plan.is_pipelined:
        return {"kept for the backward pass": found["live"]}
    simulation = parallel.simulate(plan.timetable())
    held = int(simulation.peak(1.0, 0.0).max())
    parts = {
        f"inputs of stages, {held} at once": held * found["input"],
        "kept in one stage": found["live"],
    }
    if plan.timetable().is_split:
        waiting = int(simulation.peak(0.0, 1.0).max())
        parts[f"waiting for weights' gradients, at most {waiting}"] = waiting * found["live"]
    return parts


def batch_shapes(recipe: Recipe) -> Batch:
    """The shapes of a batch."""
    row = (recipe.batch, recipe.seq)

    def make() -> Batch:
        ids, weights, examples = jnp.zeros(row, jnp.int32), jnp.zeros(row), jnp.zeros(row[:1], jnp.int32)
        return Batch(ids=ids, targets=ids, weights=weights, positions=ids, segments=ids, examples=examples)

    return eqx.filter_eval_shape(make)


def sent_bytes(recipe: Recipe, plan: parallel.Plan, model: nn.Transformer) -> list[tuple[str, str, float]]:
    """The axes, what is sent over them, and the least bytes a step that a device sends, by planning's formulas."""
    size = parallel.axis_sizes(plan.mesh)
    trained = training.trainable(model)
    own = parallel.partition_specs(trained, plan.layout(spread=False), plan.mesh)
    weight = jnp.dtype(recipe.precision.parameters).itemsize
    compute = jnp.dtype(recipe.precision.compute).itemsize
    number = _bytes(trained, own, plan)[0] / weight
    replicas = size["replica"] * size["expert"] * size["context"]
    pieces = size["replica"] * size["fsdp"] * size["expert"] * plan.microbatches
    row_tokens = recipe.batch // pieces * recipe.seq
    tokens = row_tokens / size["context"]
    embed, layers = model.embedding.weight.shape[-1], sum(count for count, _, _ in _attentions(model)) / size["pipe"]
    evaluations = layers * plan.microbatches
    rows: list[tuple[str, str, float]] = []
    if size["fsdp"] * replicas > 1:
        split = size["fsdp"] if plan.zero else size["fsdp"] * replicas
        sent = planning.sharded_state_bytes(
            number,
            split,
            zero=plan.zero,
            microbatches=1 if plan.is_pipelined and plan.zero == 2 else plan.microbatches,
            replicas=replicas if plan.zero else 1,
            weight_bytes=compute if plan.zero == 3 else weight,
            gradient_bytes=weight,
        )
        axes = [axis for axis in ("replica", "fsdp", "expert", "context") if size[axis] > 1]
        rows.append((" x ".join(axes), f"gradients and parameters, zero {plan.zero}", sent))
    if size["tensor"] > 1:
        rings = plan.overlap != "none"
        each = planning.tensor_bytes(tokens, embed, size["tensor"], regathered=rings, activation_bytes=compute)
        rows.append(("tensor", f"the {plan.residual} stream of {layers:g} layers", evaluations * each))
    if size["context"] > 1:
        sent = 0.0
        for count, channels, keys in _attentions(model):
            each = planning.context_bytes(
                row_tokens,
                keys / size["tensor"],
                size["context"],
                method=plan.context_method,
                embed=channels // size["tensor"],
                activation_bytes=compute,
            )
            sent += count / size["pipe"] * plan.microbatches * each
        rows.append(("context", f"attention by {plan.context_method}", sent))
    if plan.is_pipelined:
        slices = 1 if plan.residual == "replicated" else size["tensor"]
        sent = planning.pipeline_bytes(
            tokens, embed, plan.microbatches, chunks=plan.chunks, tensor=slices, activation_bytes=compute
        )
        rows.append(("pipe", "activations and their gradients, an inner stage", sent))
    return rows


def _bytes(tree: PyTree, specs: PyTree, plan: parallel.Plan) -> tuple[int, int]:
    placed = jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(plan.mesh, spec)),
        specs,
        tree,
        is_leaf=lambda node: isinstance(node, jax.sharding.PartitionSpec),
    )
    return _held(placed)


def _held(tree: PyTree) -> tuple[int, int]:
    shapes = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.ShapeDtypeStruct)]
    own = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in shapes if x.sharding is not None)
    return own, sum(x.size * x.dtype.itemsize for x in shapes)


def _kept(pull: PyTree, known: set[int]) -> int:
    """Bytes that a backward pass keeps, apart from what is there anyway."""
    kept = {id(leaf): leaf for leaf in jax.tree.leaves(pull) if id(leaf) not in known and hasattr(leaf, "dtype")}
    sizes = (
        leaf.size * leaf.dtype.itemsize for leaf in kept.values() if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )
    return sum(sizes)


def _attentions(model: nn.Transformer) -> list[tuple[int, int, float]]:
    """Of each attention: in how many layers it stands, channels of its queries, and of its keys (values are alike)."""
    kinds = (nn.Attention, nn.LatentAttention)
    found = []
    for module in jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, kinds)):
        if isinstance(module, kinds):
            layers = math.prod(module.query.weight.shape[: -len(module.query.weight_dims)])
            channels = math.prod(module.query.weight.shape[:-1]) // layers
            if isinstance(module, nn.Attention):
                keys = math.prod(module.key.weight.shape[:-1]) / layers
            else:
                rotated = 0 if module.query_rope is None else math.prod(module.query_rope.weight.shape[:-1])
                keys = (channels + rotated / layers + math.prod(module.value_up.weight.shape[:-1]) / layers) / 2
            found.append((layers, channels, keys))
    return found
