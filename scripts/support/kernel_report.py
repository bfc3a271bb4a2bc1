"""One line per operation: which implementation training runs on a platform, and why not another."""

import equinox as eqx
import jax
import jax.numpy as jnp
from recipes import Recipe

from eqformer import kernels, nn, training
from support.setup import batch_shapes


# The flag that changes a reason, by words of the reason.
_FLAGS = {
    "computes in": "--precision.compute bfloat16",
    "tokens, not": "another --seq",
    "documents a row": "--text.packing windows",
}
DECODING = (
    "attention: in blocks, as wherever a cache is read (of one token a row in 16 bits, on GPUs and TPUs, by a kernel "
    "that reads the cache once); no flag changes that"
)


def platform_here() -> str:
    """Return the platform of JAX's devices by its compiler's name: `cpu`, `cuda` or `tpu`."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def has_kernels(platform: str) -> bool:
    """Return whether any operation has a kernel for the platform."""
    return platform in kernels.ATTENTION.platforms


def kernel_lines(recipe: Recipe, model: nn.Transformer, platform: str) -> list[str]:
    """Return a line per operation of training on `cuda` or `tpu`; none elsewhere, where nothing is chosen."""
    if not has_kernels(platform):
        return []
    batch = batch_shapes(recipe)
    tokens = eqx.filter_eval_shape(training.batch_tokens, batch)
    explanations = kernels.explain(model.encode, batch.ids, tokens, platform=platform)
    return [_line(explanation, recipe) for explanation in explanations] or ["attention: the model has none"]


def decode_lines(recipe: Recipe, model: nn.Transformer, platform: str, cache_dtype: str | None) -> list[str]:
    """Return a line per operation of decoding one token of each row on `cuda` or `tpu`, without writes into caches."""
    if not has_kernels(platform):
        return []
    compute, rows = recipe.precision.compute, recipe.batch
    narrow = eqx.filter_eval_shape(nn.Precision(compute, compute).apply, model)
    numbers = jax.ShapeDtypeStruct((rows, 1), jnp.int32)

    def decode(model: nn.Transformer, ids: jax.Array, positions: jax.Array) -> jax.Array:
        return model.encode(ids, nn.Tokens(positions), model.init_cache(rows, recipe.seq, cache_dtype))[0]

    explanations = kernels.explain(decode, narrow, numbers, numbers, platform=platform)
    return [str(explanation) for explanation in explanations if explanation.operation != "cache write"]


def _line(explanation: kernels.Explanation, recipe: Recipe) -> str:
    if explanation.operation == "attention" and recipe.mesh.context > 1 and recipe.plan.context_method == "gather":
        reason = "keys are gathered over --mesh.context (--context-method ring or heads changes that)"
        return f"attention: BlockwiseAttention; not a kernel: {reason}"
    if explanation.operation == "attention" and recipe.execution.core != "auto":
        return f"{explanation} (--execution.core {recipe.execution.core} asks for it)"
    refusals = tuple((name, _with_flag(reason)) for name, reason in explanation.refusals)
    return str(explanation._replace(refusals=refusals))


def _with_flag(reason: str) -> str:
    flag = next((flag for words, flag in _FLAGS.items() if words in reason), "")
    return f"{reason} ({flag} changes that)" if flag else reason
