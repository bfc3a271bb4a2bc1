"""Draws the picture of training on rewards: `python docs/pictures/draw_rewards.py FILE`.

A small byte model learns two-digit sums from text, until four in ten of its answers are right. Then GRPO rewards right
answers, from three seeds. FILE receives the picture, and the table is written to the screen. Takes some minutes on two
CPU cores. Needs matplotlib.
"""

import argparse
import dataclasses
import sys

import jax
import matplotlib
import numpy as np
from jaxtyping import PyTree

from eqformer import data, models, nn, text, training


matplotlib.use("Agg")
from matplotlib import pyplot as plt


CONFIG = dataclasses.replace(models.preset("llama-byte-1m"), embed=64, layers=2, heads=4, kv_heads=2, mlp=192)
TOKENIZER, END = data.ByteTokenizer(), ord("\n")
SEEDS = 0, 1, 2
PRETRAIN_ROWS, KNOWN, RL_STEPS = 64, 0.4, 150


def make_rows(seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the sums to train on and those held out."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 100) for b in range(10, 100)]
    order = np.random.default_rng(seed).permutation(len(rows))
    return [rows[i] for i in order[500:]], [rows[i] for i in order[:500]]


def is_right(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """Reward an answer that is right to the last digit, and nothing else."""
    return [float(text == right) for text, right in zip(completions, answer)]


def pretrain(rows: list[dict[str, str]], held_out: list[dict[str, str]], seed: int) -> nn.Transformer:
    """Train a model on random sums as text, until a share `KNOWN` of the answers to other sums is right."""
    rng = np.random.default_rng(seed)
    model = models.build(CONFIG, key=jax.random.key(seed))
    optimizer = training.optimizer("adamw", model, rate=training.constant(3e-3))
    step, state = training.make_step(training.next_token_loss, optimizer), training.init_state(model, optimizer)

    def make_batch(run: training.Progress) -> PyTree:
        chosen = [rows[i] for i in rng.integers(len(rows), size=PRETRAIN_ROWS)]
        prompts = [list(row["prompt"].encode()) for row in chosen]
        return data.batch_completions(prompts, [[*row["answer"].encode(), END] for row in chosen], seq=16)

    def stop_early(run: training.Progress) -> None:
        run.is_stopping = accuracy(run.state.model, held_out) > KNOWN

    return training.train(step, state, make_batch, steps=2000, callbacks=[training.Every(50, stop_early)]).state.model


def accuracy(model: nn.Transformer, rows: list[dict[str, str]]) -> float:
    """Return the share of sums whose likeliest answer is right."""
    llm = text.LLM(model, TOKENIZER, end_ids=(END,))
    answers = llm.generate([row["prompt"] for row in rows], max_new_tokens=4)
    return float(np.mean(is_right([], answers, [row["answer"] for row in rows])))


def reinforce(model: nn.Transformer, rows: list[dict[str, str]], seed: int) -> tuple[nn.Transformer, list[dict]]:
    """Raise the reward of a model's own answers by GRPO; return the model and each step's metrics."""
    llm = text.LLM(model, TOKENIZER, end_ids=(END,))
    rollouts = text.Rollouts(
        llm, rows, is_right, prompts=32, group=8, max_new_tokens=4, mask_equal_groups=True, key=jax.random.key(seed)
    )
    optimizer = training.optimizer("adamw", model, rate=training.constant(1e-3))
    step = training.make_step(training.policy_loss("dapo"), optimizer)
    logged: list[dict] = []
    state = training.init_state(model, optimizer)
    run = training.train(step, state, rollouts, steps=RL_STEPS, callbacks=[training.Log(1, logged.append)])
    return run.state.model, logged


def main() -> None:
    """Draw the picture, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    file = parser.parse_args().file
    rows, held_out = make_rows()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    columns = "seed | right before | right after | reward, first 10 steps | last 10 steps | entropy | largest gap"
    sys.stdout.write(f"| {columns} |\n|---|---|---|---|---|---|---|\n")
    for seed in SEEDS:
        model = pretrain(rows, held_out, seed)
        before = accuracy(model, held_out)
        model, logged = reinforce(model, rows, seed)
        after = accuracy(model, held_out)
        rewards, entropies = (np.array([row[name] for row in logged]) for name in ("reward", "entropy"))
        gap = max(row["sampler_difference"] for row in logged)
        first, last = (part.mean() for part in (rewards[:10], rewards[-10:]))
        sys.stdout.write(
            f"| {seed} | {before:.1%} | {after:.1%} | {first:.2f} | {last:.2f} | {entropies[0]:.2f} to "
            f"{entropies[-1]:.2f} | {gap:.1e} |\n"
        )
        sys.stdout.flush()
        smooth = np.convolve(rewards, np.ones(5) / 5, "valid")
        left.plot(np.arange(len(smooth)) + 5, smooth, label=f"seed {seed}")
        right.plot(np.arange(len(entropies)) + 1, entropies)
    left.set(xlabel="step", ylabel="reward (mean of 5 steps)", ylim=(0, 1))
    right.set(xlabel="step", ylabel="entropy (nats a token)")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
