"""Draws the pictures of the page on mixtures: `python docs/pictures/draw_mixtures.py [runs]`; needs matplotlib.

With a folder of runs it draws their curves too: those named `default-SEED` and `moe-SEED`.
"""

import json
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jaxtyping import Array, Float

from eqformer import nn


matplotlib.use("Agg")
from matplotlib import pyplot as plt


FOLDER = pathlib.Path(__file__).parent
EMBED, EXPERTS, ROWS, SEQ, STEPS = 16, 8, 8, 64, 300
WAYS: dict[str, tuple[tuple[nn.BalanceLoss, ...], float]] = {
    "nothing": ((), 0.0),
    "LoadBalance": ((nn.LoadBalance(1.0),), 0.0),
    "selection bias": ((), 0.02),
}


def shares(losses: tuple[nn.BalanceLoss, ...], rate: float) -> Float[Array, "steps experts"]:
    """Each expert's share of the tokens over the steps, from a router that sends nearly all to the first."""
    score = "sigmoid" if rate else "softmax"
    draw, tokens = jax.random.split(jax.random.key(0))
    router = nn.TopKRouter(embed=EMBED, experts=EXPERTS, top_k=1, score=score, balanced=rate > 0, key=draw)
    x = jax.random.normal(tokens, (ROWS, SEQ, EMBED)).at[..., 0].add(3.0)  # all tokens lean one way
    router = eqx.tree_at(lambda r: r.linear.weight, router, 0.3 * router.linear.weight)
    router = eqx.tree_at(lambda r: r.linear.weight, router, router.linear.weight.at[0, 0].set(1.0))
    places = nn.positions_like((ROWS, SEQ))

    def step(router: nn.TopKRouter, number: Array) -> tuple[nn.TopKRouter, Array]:
        def cost(router: nn.TopKRouter) -> tuple[Array, Array]:
            routing = router(x, places)
            total = sum((loss(routing, places) for loss in losses), jnp.zeros(()))
            return total / (ROWS * SEQ), jnp.sum(routing.counts(), axis=0)

        slope, counts = eqx.filter_grad(cost, has_aux=True)(router)
        pace = 1 - number.astype(jnp.float32) / STEPS
        router = jax.tree.map(lambda leaf, slope: leaf - 0.1 * pace * slope, router, slope)
        if rate:
            bias = nn.update_selection_bias(router.selection_bias, counts, rate * pace)
            router = eqx.tree_at(lambda r: r.selection_bias, router, bias)
        return router, counts / jnp.sum(counts)

    return jax.jit(lambda router: jax.lax.scan(step, router, jnp.arange(STEPS))[1])(router)


def recovery() -> None:
    """A collapsed router left alone, with a loss, and with a bias."""
    figure, panels = plt.subplots(1, len(WAYS), figsize=(9, 2.6), dpi=130, sharey=True, layout="constrained")
    for axes, (name, (losses, rate)) in zip(panels, WAYS.items()):
        found = np.asarray(shares(losses, rate))
        axes.stackplot(np.arange(STEPS), found.T, colors=plt.cm.tab20c(np.linspace(0, 1, EXPERTS)))
        axes.set(title=name, xlabel="step", xlim=(0, STEPS - 1), ylim=(0, 1))
    panels[0].set_ylabel("share of the tokens")
    figure.savefig(FOLDER / "recovery.png")


def curves(runs: pathlib.Path) -> None:
    """Validation loss of each recipe, a thin line a seed and a thick one for their mean."""
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=130, layout="constrained")
    for name, colour in (("default", "#6b7785"), ("moe", "#c2690c")):
        found = []
        for path in sorted(runs.glob(f"{name}-*/metrics.jsonl")):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            validated = [(row["step"], row["validation_bits_per_byte"]) for row in rows if "validation_loss" in row]
            steps, bits = zip(*validated)
            axes.plot(steps, bits, color=colour, linewidth=0.7, alpha=0.6)
            found.append(bits)
        axes.plot(steps, np.mean(found, axis=0), color=colour, linewidth=2, label=f"{name}, {len(found)} seeds")
    axes.set(xlabel="step", ylabel="validation, bits a byte", ylim=(None, 3.2))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(FOLDER / "mixture.png")


if __name__ == "__main__":
    recovery()
    for folder in sys.argv[1:]:
        curves(pathlib.Path(folder))
