"""Draws the pictures of the page on looking inside a model: `python docs/pictures/draw_inside.py MODEL`.

MODEL is a file of GGUF or a folder as published, such as SmolLM2-135M-Instruct; or a folder that `scripts/convert.py`
wrote of a run with the default recipe. Needs matplotlib, and tokenizers for models with a tokenizer of their own.
"""

import pathlib
import sys
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jaxtyping import Array, Float, Int

import eqformer
from eqformer import data, models, nn


matplotlib.use("Agg")
from matplotlib import pyplot as plt


FOLDER = pathlib.Path(__file__).parent
STREAM, WEIGHTS = "stacks[0].blocks", "stacks[0].blocks.sublayers[0].layer.core.weights"
CLEAN, CORRUPTED, ANSWERS = "The capital of France is", "The capital of Poland is", (" Paris", " Warsaw")
REPEATED = 20
Tokenizer = data.ByteTokenizer | data.FileTokenizer


def load_tokenizer(model: pathlib.Path) -> Tokenizer:
    """Return the tokenizer of a published model; bytes for a model without one."""
    if not model.is_file():
        file = model / "tokenizer.json"
        return data.FileTokenizer(file) if file.exists() else data.ByteTokenizer()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "tokenizer.json"
        file.write_text(models.gguf_companion_files(model)["tokenizer.json"], encoding="utf-8")
        return data.FileTokenizer(file)


def logit_lens(model: nn.Transformer, ids: Int[Array, "batch seq"]) -> Float[Array, "layers batch seq vocab"]:
    """Return the probabilities of the next token by the residual stream before and after each layer."""
    captured = eqx.filter_jit(eqformer.capture(model, ["stacks[0][0].input", STREAM]))(ids)
    stream = jnp.concatenate([captured["stacks[0][0].input"][None], captured[STREAM]])
    return jax.nn.softmax(model.unembed(model.norm(stream)))


def patch_effects(
    model: nn.Transformer,
    clean: Int[Array, "batch seq"],
    corrupted: Int[Array, "batch seq"],
    answers: tuple[int, int],
) -> Float[Array, "layers seq"]:
    """Return the share of the clean prompt's logit difference that its stream restores at each layer and token."""
    captured = eqx.filter_jit(eqformer.capture(model, [STREAM]))(clean)
    stream, tokens = captured[STREAM], jnp.arange(clean.shape[1])
    difference = lambda logits: logits[0, -1, answers[0]] - logits[0, -1, answers[1]]

    @eqx.filter_jit
    def patched_differences(model: nn.Transformer, layer: Int[Array, ""]) -> Float[Array, "seq"]:
        def patched_difference(token: Int[Array, ""]) -> Float[Array, ""]:
            is_replaced = lambda number: (number == layer) & (tokens == token)[:, None]
            replace = lambda x, number: jnp.where(is_replaced(number), stream[number], x)
            return difference(eqformer.patch(model, {STREAM: replace})(corrupted)[0])

        return jax.vmap(patched_difference)(tokens)

    high, low = difference(captured.output[0]), difference(eqx.filter_jit(model)(corrupted)[0])
    effects = [patched_differences(model, jnp.asarray(layer)) for layer in range(len(stream))]
    return (jnp.stack(effects) - low) / (high - low)


def induction_scores(
    model: nn.Transformer, ids: Int[Array, "batch seq"]
) -> tuple[Float[Array, "layers heads"], Float[Array, "layers batch heads seq kv_seq"]]:
    """Return each head's weight on the token after the earlier copy of its own token, and all weights.

    The second half of each row repeats the first half.
    """
    weights = eqx.filter_jit(eqformer.capture(model, [WEIGHTS]))(ids)[WEIGHTS]
    half = ids.shape[1] // 2
    queries = np.arange(half, 2 * half)
    return jnp.mean(weights[..., queries, queries - half + 1], axis=(1, 3)), weights


def draw_lens(model: nn.Transformer, tokenizer: Tokenizer) -> None:
    """Draw the likeliest next token after each layer, coloured by its probability."""
    ids = tokenizer.encode(CLEAN)
    probabilities = np.asarray(logit_lens(model, jnp.asarray([ids], jnp.int32)))[:, 0]
    best, rows = np.argmax(probabilities, -1), range(len(probabilities))
    figure, axes = plt.subplots(figsize=(7.5, 0.24 * len(rows) + 0.8), dpi=130, layout="constrained")
    image = axes.imshow(np.max(probabilities, -1), aspect="auto", cmap="Blues", origin="lower", vmin=0, vmax=1)
    for layer, token in np.ndindex(best.shape):
        shade = "white" if probabilities[layer, token, best[layer, token]] > 0.6 else "#1d2733"
        text = tokenizer.decode([int(best[layer, token])])
        axes.text(token, layer, repr(text)[1:-1], ha="center", va="center", fontsize=6, color=shade)
    axes.set(ylabel="layers read", xticks=range(len(ids)), xticklabels=[repr(tokenizer.decode([id])) for id in ids])
    figure.colorbar(image, label="probability of the likeliest token")
    figure.savefig(FOLDER / "logit_lens.png")


def draw_patching(model: nn.Transformer, tokenizer: Tokenizer) -> None:
    """Draw how much of the clean answer each layer's stream restores at each token."""
    clean, corrupted = (tokenizer.encode(text) for text in (CLEAN, CORRUPTED))
    first, second = (tokenizer.encode(text)[0] for text in ANSWERS)
    as_batch = lambda ids: jnp.asarray([ids], jnp.int32)
    effects = np.asarray(patch_effects(model, as_batch(clean), as_batch(corrupted), (first, second)))
    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=130, layout="constrained")
    image = axes.imshow(effects, aspect="auto", cmap="RdBu_r", origin="lower", vmin=-1, vmax=1)
    labels = [
        repr(tokenizer.decode([a])) if a == b else f"{tokenizer.decode([b])!r}\nto {tokenizer.decode([a])!r}"
        for a, b in zip(clean, corrupted, strict=True)
    ]
    axes.set(ylabel="layer whose output is replaced", xticks=range(len(clean)), xticklabels=labels)
    figure.colorbar(image, label="share of the difference restored")
    figure.savefig(FOLDER / "patching.png")


def draw_induction(model: nn.Transformer) -> None:
    """Draw the induction scores of all heads, and the attention of the best one."""
    known = jnp.arange(model.vocab // 8, model.vocab // 2, dtype=jnp.int32)
    half = jax.random.choice(jax.random.key(0), known, (REPEATED,), replace=False)
    scores, weights = map(np.asarray, induction_scores(model, jnp.tile(half, 2)[None]))
    layer, head = np.unravel_index(np.argmax(scores), scores.shape)
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), dpi=130, layout="constrained")
    image = panels[0].imshow(scores, aspect="auto", cmap="Blues", origin="lower", vmin=0, vmax=1)
    panels[0].set(xlabel="head", ylabel="layer", title="induction score")
    figure.colorbar(image, ax=panels[0])
    panels[1].imshow(weights[layer, 0, head], cmap="Blues", vmin=0, vmax=1)
    panels[1].set(xlabel="key", ylabel="query", title=f"layer {layer}, head {head}: {scores[layer, head]:.2f}")
    figure.savefig(FOLDER / "induction.png")


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1])
    loaded, loaded_tokenizer = models.load(path), load_tokenizer(path)
    draw_lens(loaded, loaded_tokenizer)
    draw_patching(loaded, loaded_tokenizer)
    draw_induction(loaded)
