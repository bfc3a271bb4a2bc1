"""Rows about what the same models learn in plain PyTorch: initial weights, batches, settings and steps are the same."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import _peers
from benchmarks._measure import Row
from eqformer import models
from eqformer.recipes import find_recipe, Recipe, RunDirectory, Screen, setup, texts, train


RECIPES = ("llama", "default", "moe")
STEPS = 300
SEEDS = (0, 1)
# The polynomials of Polar Express (arXiv 2505.16932, algorithm 1), with its safety factor of 1.01.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115952949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)


def learning_peers(rounds: int) -> Iterator[Row]:
    """Bits a byte after 300 steps of the recipes llama, default and moe, beside the same runs in plain PyTorch."""
    del rounds
    for name in RECIPES if _peers.are_installed() else ():
        recipe = dataclasses.replace(find_recipe(name), steps=STEPS, validate_every=STEPS, sample_every=0)
        outcomes = [train_both(dataclasses.replace(recipe, seed=seed)) for seed in SEEDS]
        for contender, losses in zip(("eqformer", "PyTorch"), zip(*outcomes, strict=True), strict=True):
            numbers = ", ".join(f"{loss:.4f}" for loss in losses)
            note = f"{STEPS} steps, seeds 0, 1: {numbers}"
            yield Row("learning-peers", f"{name}, {contender}", float(np.mean(losses)), "bits a byte", None, note)


def train_both(recipe: Recipe) -> tuple[float, float]:
    """Return the bits a byte on the validation text that the recipe's run and PyTorch's end with."""
    screen = Screen(silent=True)
    with tempfile.TemporaryDirectory() as parent:
        directory = RunDirectory(Path(parent, "run"))
        ours = train(recipe, directory.path, devices=jax.devices()[:1], screen=screen).metrics[
            "validation_bits_per_byte"
        ]
        complete = texts.complete_recipe(recipe)
        tokenizer = texts.recipe_tokenizer(complete)
        corpus = texts.open_texts(complete, texts.open_sources(complete), tokenizer, directory, screen)
        model = models.build(complete.model, key=setup.make_keys(complete).init)
        models.save(model, Path(parent, "model"), config=complete.model)
        peer = import_module("transformers").AutoModelForCausalLM.from_pretrained(
            Path(parent, "model"), dtype="float32", attn_implementation="sdpa"
        )
        train_peer(peer, complete, corpus.train.batch)
        means, _ = corpus.validate(lambda batch: sum_losses(peer, batch), complete.validation_batches)
    return float(ours), means.loss / means.bytes_per_token / float(np.log(2))


def train_peer(model: Any, recipe: Recipe, batch_of: Callable[[int], Any]) -> None:
    """Take the recipe's steps with a model of transformers: Muon or NorMuon for hidden matrices, AdamW for the rest.

    Muon is Keller Jordan's, without optax's correction of the first momenta, which is gone after about 60 steps.
    """
    torch, options = import_module("torch"), recipe.optimizer
    hidden = [(name, x) for name, x in model.named_parameters() if x.ndim > 1 and _is_hidden(name)]
    hidden_names = {name for name, _ in hidden}
    adam_parameters = [(name, x) for name, x in model.named_parameters() if name not in hidden_names]
    tables = [x for name, x in adam_parameters if "embed" in name or "lm_head" in name]
    vectors = [x for name, x in adam_parameters if not ("embed" in name or "lm_head" in name)]
    groups = [{"params": tables, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    muon = Muon(hidden, rows=options.name == "normuon", decay=options.weight_decay)
    (phase,) = options.phases(recipe.steps)
    for step in range(recipe.steps):
        rate = options.learning_rate * _share(step, recipe.steps, phase.warmup)
        batch = batch_of(step)
        ids, targets = (torch.tensor(np.asarray(x)).long() for x in (batch.ids, batch.targets))
        weights = torch.tensor(np.asarray(batch.weights))
        model.zero_grad(set_to_none=True)
        logits, balance = _forward(model, ids)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        ((losses * weights.flatten()).sum() / weights.sum() + balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        muon.step(rate)


def _forward(model: Any, ids: Any) -> tuple[Any, Any]:
    """Return the logits, and the loss of a mixture's routers."""
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


def _is_hidden(name: str) -> bool:
    """Return whether a parameter of two dims or more is a hidden matrix, and no table and no convolution."""
    return not any(part in name for part in ("embed", "lm_head", "conv.conv"))


def _share(step: int, steps: int, warmup: int) -> float:
    """Return the learning rate as a share of its peak: a linear warmup, then a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.1 + 0.45 * (1 + float(np.cos(np.pi * (step - warmup) / (steps - warmup))))


def sum_losses(model: Any, batch: Any) -> dict[str, float]:
    """Return the sums of a validation batch."""
    torch = import_module("torch")
    with torch.no_grad():
        ids, targets = (torch.tensor(np.asarray(x)).long() for x in (batch.ids, batch.targets))
        weights = torch.tensor(np.asarray(batch.weights)).flatten()
        logits = model(ids, use_cache=False).logits.flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        correct = (logits.argmax(-1) == targets.flatten()) * weights
    return {"nats": float((losses * weights).sum()), "correct": float(correct.sum()), "count": float(weights.sum())}


class Muon:
    """Muon (Keller Jordan), or NorMuon (arXiv 2510.05491), with updates of a root mean square of about 0.2."""

    def __init__(self, parameters: list[tuple[str, Any]], *, rows: bool, decay: float):
        self.rows, self.decay, self.count = rows, decay, 0
        self.parameters = parameters
        zeros_like = import_module("torch").zeros_like
        self.momenta = [zeros_like(x) for _, x in parameters]
        self.squares = [zeros_like(x[..., :1]) for _, x in parameters]

    def step(self, rate: float) -> None:
        """Update all matrices."""
        torch = import_module("torch")
        self.count += 1
        with torch.no_grad():
            for (name, x), momentum, squares in zip(self.parameters, self.momenta, self.squares, strict=True):
                momentum.mul_(0.95).add_(x.grad, alpha=0.05)
                # A mixture's fused matrix of gates and inner maps is two matrices.
                pieces = 2 if "gate_up" in name else 1
                views = [[y.chunk(pieces, -2)[i] for i in range(pieces)] for y in (x, x.grad, momentum, squares)]
                for weight, gradient, mean, square in zip(*views, strict=True):
                    weight.mul_(1 - rate * self.decay).add_(self._direction(gradient, mean, square), alpha=-rate)

    def _direction(self, gradient: Any, mean: Any, square: Any) -> Any:
        torch = import_module("torch")
        update = self._orthogonalize(0.05 * gradient + 0.95 * mean)
        size = 0.2 * max(update.shape[-2:]) ** 0.5
        if not self.rows:
            return size * update
        square.mul_(0.95).add_((update**2).mean(-1, keepdim=True), alpha=0.05)
        update = update / (torch.sqrt(square / (1 - 0.95**self.count)) + 1e-8)
        return 0.2 * update / (update**2).mean((-2, -1), keepdim=True).sqrt()

    def _orthogonalize(self, update: Any) -> Any:
        """Return the update with all singular values near 1, in float32."""
        is_tall = update.shape[-2] > update.shape[-1]
        x = update.mT if is_tall else update
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-8)
        polynomials = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS]
        for a, b, c in polynomials if self.rows else [(3.4445, -4.7750, 2.0315)] * 5:
            product = x @ x.mT
            x = a * x + (b * product + c * product @ product) @ x
        return x.mT if is_tall else x
