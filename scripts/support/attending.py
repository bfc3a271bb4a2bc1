"""One line on which attention runs, and why it is not the platform's fused kernel where it is not."""

import equinox as eqx
import jax
from recipes import Recipe

from eqformer import nn, training
from support.setup import batch_shapes


KERNELS = {"cuda": "cuDNN's fused kernel", "tpu": "splash attention"}
# What changes it, by words of the reasons.
_FLAGS = {
    "computes in": "--precision.compute bfloat16",
    "is asked for": "--execution.core auto",
    "multiple of": "another --seq",
    "documents a row": "--text.packing windows",
}


CACHED = (
    "attention: in blocks, as wherever a cache is read (of one token a row in 16 bits, on GPUs and TPUs, by a kernel "
    "that reads the cache once); no flag changes that"
)


def platform_here() -> str:
    """That of JAX's devices, by its compiler's name."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def attention_line(recipe: Recipe, model: nn.Transformer, platform: str) -> str:
    """Which attention the model's training runs on a platform, `cuda` or `tpu`; "" for others, which have one way."""
    if platform not in KERNELS:
        return ""
    batch, name = batch_shapes(recipe), KERNELS[platform]
    tokens = eqx.filter_eval_shape(training.batch_tokens, batch)
    reasons = nn.attention_refusals(model, batch.ids, tokens, platform)
    if recipe.mesh.context > 1 and recipe.plan.context_method == "gather":
        reasons = ("keys are gathered over --mesh.context; --context-method ring or heads changes that",)
    if not reasons:
        return "attention: the model has none"
    if reasons == (None,):
        return f"attention: by {name}"
    whys = [_with_flag(reason) for reason in reasons if reason is not None]
    return f"attention: {f'in part by {name}, ' * (None in reasons)}in blocks, not by {name}: {'; '.join(whys)}"


def _with_flag(reason: str) -> str:
    flag = next((flag for words, flag in _FLAGS.items() if words in reason), "")
    return f"{reason} ({flag} changes that)" if flag else reason
