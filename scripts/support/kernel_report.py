"""Lines on what runs on a platform: a kernel for each operation, why not another one, and products in 8 bits."""

import equinox as eqx
import jax
import jax.numpy as jnp
from recipes import Recipe

from eqformer import kernels, nn, training
from support.setup import batch_shapes


# Words in the reason why a kernel is refused -> the flag that removes this reason.
_FLAGS = {
    "computes in": "--precision.compute bfloat16",
    "tokens, not": "another --seq",
    "documents a row": "--text.packing windows",
}
DECODING = (
    "attention: in blocks, as wherever a cache is read (of one token a row in 16 bits, on GPUs and TPUs, by a kernel "
    "that reads the cache once); no flag changes that"
)


def local_platform() -> str:
    """Return the platform of JAX's devices by its compiler's name: `cpu`, `cuda` or `tpu`."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def has_kernels(platform: str) -> bool:
    """Return whether any operation has a kernel for the platform."""
    return platform in kernels.ATTENTION.platforms


def training_lines(recipe: Recipe, model: nn.LanguageModel, platform: str, chip: str) -> list[str]:
    """Return a line per operation of training on `cuda` or `tpu`, and one on products in 8 bits if there are any.

    `chip` is the accelerator's name, here or as JAX has it.
    """
    lines = _fp8_lines(recipe, model, chip)
    if not has_kernels(platform):
        return lines
    batch = batch_shapes(recipe)
    tokens = eqx.filter_eval_shape(training.batch_tokens, batch)
    explanations = kernels.explain(model.encode, batch.ids, tokens, platform=platform)
    kernel_lines = [_kernel_line(explanation, recipe) for explanation in explanations]
    return [*(kernel_lines or ["attention: the model has none"]), *lines]


def decode_lines(recipe: Recipe, model: nn.LanguageModel, platform: str, cache_dtype: str | None) -> list[str]:
    """Return a line per operation of decoding one token of each row on `cuda` or `tpu`, without writes into caches."""
    if not has_kernels(platform):
        return []
    compute, rows = recipe.precision.compute, recipe.batch
    computed = eqx.filter_eval_shape(nn.Precision(compute, compute).apply, model)
    integers = jax.ShapeDtypeStruct((rows, 1), jnp.int32)

    def decode(model: nn.LanguageModel, ids: jax.Array, positions: jax.Array) -> jax.Array:
        return model.encode(ids, nn.Tokens(positions), model.init_cache(rows, recipe.seq, cache_dtype))[0]

    explanations = kernels.explain(decode, computed, integers, integers, platform=platform)
    return [str(explanation) for explanation in explanations if explanation.operation != "cache write"]


def _kernel_line(explanation: kernels.Explanation, recipe: Recipe) -> str:
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


def _fp8_lines(recipe: Recipe, model: nn.LanguageModel, chip: str) -> list[str]:
    """Return a line that says which matrix products the chip computes in 8 bits, if the recipe asks for 8 bits."""
    compute = recipe.precision.compute
    if recipe.precision.products != "fp8":
        return []
    if chip == "cpu":
        return [f"products: of numbers of 8 bits, multiplied in a wider dtype here: slower than {compute}'s"]
    experts = nn.modules(model, nn.Experts)
    has_fp8_experts = any(isinstance(linear, nn.Fp8Linear) for linear in nn.linear_maps(experts))
    if not has_fp8_experts or kernels.has_fp8_grouped_matmul(chip):
        return [f"products: in 8 bits{', those of experts too' * has_fp8_experts}"]
    return [f"products: in 8 bits, but those of experts in {compute} where they have kernels on {chip}"]
