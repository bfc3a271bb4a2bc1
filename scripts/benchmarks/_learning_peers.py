"""Rows about the losses of eqformer's runs and of plain PyTorch, with the same initial weights, batches and steps.

One PyTorch run uses the recipe's settings, and the other runs use the settings of nanoGPT and nanochat.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import _peers
from benchmarks._measure import Row
from benchmarks._peer_optimizers import MakeOptimizer, OPTIMIZERS, PeerOptimizer
from eqformer import models
from eqformer.recipes import find_recipe, Recipe, RunDirectory, Screen, setup, texts, train


RECIPES = ("llama", "default", "moe")
STEPS = 300
SEEDS = (0, 1)


def learning_peers(rounds: int) -> Iterator[Row]:
    """Bits a byte after 300 steps of the recipes llama, default and moe, beside the same runs in plain PyTorch."""
    del rounds
    for name in RECIPES if _peers.are_installed() else ():
        recipe = dataclasses.replace(find_recipe(name), steps=STEPS, validate_every=STEPS, sample_every=0)
        outcomes = [train_all(dataclasses.replace(recipe, seed=seed)) for seed in SEEDS]
        for contender in outcomes[0]:
            losses = [outcome[contender] for outcome in outcomes]
            numbers = ", ".join(f"{loss:.4f}" for loss in losses)
            note = f"{STEPS} steps, seeds 0, 1: {numbers}"
            yield Row("learning-peers", f"{name}, {contender}", float(np.mean(losses)), "bits a byte", None, note)


def train_all(recipe: Recipe, peers: Mapping[str, MakeOptimizer] = OPTIMIZERS) -> dict[str, float]:
    """Return the final bits a byte on the validation text, by contender: eqformer's run, and each PyTorch run."""
    screen = Screen(silent=True)
    with tempfile.TemporaryDirectory() as parent:
        directory = RunDirectory(Path(parent, "run"))
        metrics = train(recipe, directory.path, devices=jax.devices()[:1], screen=screen).metrics
        complete = texts.complete_recipe(recipe)
        tokenizer = texts.recipe_tokenizer(complete)
        corpus = texts.open_texts(complete, texts.open_sources(complete), tokenizer, directory, screen)
        model = models.build(complete.model, key=setup.make_keys(complete).init)
        models.save(model, Path(parent, "model"), config=complete.model)
        outcomes = {"eqformer": metrics["validation_bits_per_byte"]}
        for name, make_optimizer in peers.items():
            peer = import_module("transformers").AutoModelForCausalLM.from_pretrained(
                Path(parent, "model"), dtype="float32", attn_implementation="sdpa"
            )
            train_peer(peer, make_optimizer(peer, complete), complete.steps, corpus.train.batch)
            means, _ = corpus.validate(partial(sum_losses, peer), complete.validation_batches)
            outcomes[f"PyTorch, {name}"] = means.loss / means.bytes_per_token / float(np.log(2))
    return outcomes


def train_peer(model: Any, optimizer: PeerOptimizer, steps: int, batch_of: Callable[[int], Any]) -> None:
    """Train a model of transformers for the steps of a run."""
    torch = import_module("torch")
    for step in range(steps):
        batch = batch_of(step)
        ids, targets = (torch.tensor(np.asarray(x)).long() for x in (batch.ids, batch.targets))
        weights = torch.tensor(np.asarray(batch.weights))
        model.zero_grad(set_to_none=True)
        logits, balance = _forward(model, ids)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        ((losses * weights.flatten()).sum() / weights.sum() + balance).backward()
        optimizer.update(step)


def _forward(model: Any, ids: Any) -> tuple[Any, Any]:
    """Return the logits, and the balance loss of a mixture's routers."""
    if not hasattr(model.config, "router_aux_loss_coef"):
        return model(ids, use_cache=False).logits, 0.0
    result = model(ids, use_cache=False, output_router_logits=True)
    return result.logits, model.config.router_aux_loss_coef * _mean_balance(model, result.router_logits)


def _mean_balance(model: Any, layers: Any) -> Any:
    """Return the sum over the layers of the balance loss `experts * sum(share of choices * mean probability)`."""
    torch, total = import_module("torch"), 0.0
    for logits in layers:
        scores = torch.softmax(logits.float(), -1)
        experts, top_k = scores.shape[-1], model.config.num_experts_per_tok
        chosen = torch.nn.functional.one_hot(scores.topk(top_k, -1).indices, experts).sum(-2).float()
        total = total + experts * (chosen.mean(0) / top_k * scores.mean(0)).sum()
    return total


def sum_losses(model: Any, batch: Any) -> dict[str, float]:
    """Return the sums of nats, correct tokens and weights of a validation batch."""
    torch = import_module("torch")
    with torch.no_grad():
        ids, targets = (torch.tensor(np.asarray(x)).long() for x in (batch.ids, batch.targets))
        weights = torch.tensor(np.asarray(batch.weights)).flatten()
        logits = model(ids, use_cache=False).logits.flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        correct = (logits.argmax(-1) == targets.flatten()) * weights
    return {"nats": float((losses * weights).sum()), "correct": float(correct.sum()), "count": float(weights.sum())}
