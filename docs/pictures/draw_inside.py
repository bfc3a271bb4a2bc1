"""Draws the pictures of the page on looking inside a model: `python docs/pictures/draw_inside.py MODEL FOLDER`.

MODEL is a file of GGUF or a folder as published, such as SmolLM2-135M-Instruct; or the folder of a run, such as one of
`scripts/pretrain.py --run-dir runs/default`. FOLDER receives `logit_lens.png`, `patching.png` and `induction.png`.
Needs matplotlib, and tokenizers for models with a tokenizer of their own.
"""

import argparse
import dataclasses
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jaxtyping import Array, Float, Int

import eqformer
from eqformer import data, models, nn, text


matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator


STREAM, WEIGHTS = "stacks[0].blocks", "stacks[0].blocks.sublayers[0].layer.core.weights"
REPEATED = 20
Tokenizer = data.ByteTokenizer | data.FileTokenizer


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Two prompts of equally many tokens, and the answer to each, which differ in their first tokens."""

    clean: str
    corrupted: str
    answers: tuple[str, str]


ENGLISH = Prompts("The capital of France is", "The capital of Poland is", (" Paris", " Warsaw"))
# The default recipe's model knows Python's sources, and its tokens are bytes.
PYTHON = Prompts("return [value", "return (value", ("]", ")"))


def load_model(path: pathlib.Path) -> tuple[nn.Transformer, Tokenizer]:
    """Load the model and the tokenizer of a run, of a published folder or of a GGUF file."""
    if text.is_run(path):
        tokenizer = eqformer.load(path).tokenizer
        assert isinstance(tokenizer, Tokenizer)
        return text.load_run_model(path), tokenizer
    return models.load(path), text.load_tokenizer(path)


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


def draw_lens(folder: pathlib.Path, model: nn.Transformer, tokenizer: Tokenizer, prompt: str) -> None:
    """Draw the likeliest next token after each layer, coloured by its probability."""
    ids = tokenizer.encode(prompt)
    probabilities = np.asarray(logit_lens(model, jnp.asarray([ids], jnp.int32)))[:, 0]
    best, rows = np.argmax(probabilities, -1), range(len(probabilities))
    figure, axes = plt.subplots(figsize=(7.5, max(2.6, 0.24 * len(rows) + 0.8)), dpi=130, layout="constrained")
    image = axes.imshow(np.max(probabilities, -1), aspect="auto", cmap="Blues", origin="lower", vmin=0, vmax=1)
    for layer, token in np.ndindex(best.shape):
        shade = "white" if probabilities[layer, token, best[layer, token]] > 0.6 else "#1d2733"
        label = repr(tokenizer.decode([int(best[layer, token])]))[1:-1]
        axes.text(token, layer, label, ha="center", va="center", fontsize=6, color=shade)
    axes.set(ylabel="layers read", xticks=range(len(ids)), xticklabels=[repr(tokenizer.decode([id])) for id in ids])
    figure.colorbar(image, label="probability of the likeliest token")
    figure.savefig(folder / "logit_lens.png")


def draw_patching(folder: pathlib.Path, model: nn.Transformer, tokenizer: Tokenizer, prompts: Prompts) -> None:
    """Draw how much of the clean answer each layer's stream restores at each token."""
    clean, corrupted = (tokenizer.encode(prompt) for prompt in (prompts.clean, prompts.corrupted))
    first, second = (int(tokenizer.encode(answer)[0]) for answer in prompts.answers)
    if len(clean) != len(corrupted) or first == second:
        raise ValueError(
            f"draw_patching({prompts}): the prompts have {len(clean)} and {len(corrupted)} tokens, and the answers "
            f"begin with the ids {first} and {second}; give prompts of equal length, and answers that begin otherwise."
        )
    as_batch = lambda ids: jnp.asarray([ids], jnp.int32)
    effects = np.asarray(patch_effects(model, as_batch(clean), as_batch(corrupted), (first, second)))
    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=130, layout="constrained")
    image = axes.imshow(effects, aspect="auto", cmap="RdBu_r", origin="lower", vmin=-1, vmax=1)
    labels = [
        repr(tokenizer.decode([a])) if a == b else f"{tokenizer.decode([b])!r}\nto {tokenizer.decode([a])!r}"
        for a, b in zip(clean, corrupted, strict=True)
    ]
    axes.set(ylabel="layer whose output is replaced", xticks=range(len(clean)), xticklabels=labels)
    axes.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    figure.colorbar(image, label="share of the difference restored")
    figure.savefig(folder / "patching.png")


def draw_induction(folder: pathlib.Path, model: nn.Transformer) -> None:
    """Draw the induction scores of all heads, and the attention of the best one."""
    known = jnp.arange(model.vocab // 8, model.vocab // 2, dtype=jnp.int32)
    half = jax.random.choice(jax.random.key(0), known, (REPEATED,), replace=False)
    scores, weights = map(np.asarray, induction_scores(model, jnp.tile(half, 2)[None]))
    layer, head = np.unravel_index(np.argmax(scores), scores.shape)
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), dpi=130, layout="constrained")
    image = panels[0].imshow(scores, aspect="auto", cmap="Blues", origin="lower", vmin=0, vmax=1)
    panels[0].set(xlabel="head", ylabel="layer", title="induction score")
    panels[0].yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    figure.colorbar(image, ax=panels[0])
    panels[1].imshow(weights[layer, 0, head], cmap="Blues", vmin=0, vmax=1)
    panels[1].set(xlabel="key", ylabel="query", title=f"layer {layer}, head {head}: {scores[layer, head]:.2f}")
    figure.savefig(folder / "induction.png")


def main() -> None:
    """Draw the three pictures of a model into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=pathlib.Path)
    parser.add_argument("folder", metavar="FOLDER", type=pathlib.Path)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model)
    prompts = PYTHON if isinstance(tokenizer, data.ByteTokenizer) else ENGLISH
    arguments.folder.mkdir(parents=True, exist_ok=True)
    draw_lens(arguments.folder, model, tokenizer, prompts.clean)
    draw_patching(arguments.folder, model, tokenizer, prompts)
    draw_induction(arguments.folder, model)


if __name__ == "__main__":
    main()
