"""Optimizers in plain PyTorch for runs of a recipe, with the recipe's settings, nanoGPT's settings or nanochat's.

An optimizer is made for a model of transformers and a recipe. Its `update(step)` takes one step with the gradients in
the parameters. Sources: github.com/KellerJordan/Muon, github.com/karpathy/nanoGPT
(config/train_shakespeare_char.py) and github.com/karpathy/nanochat (scripts/base_train.py, nanochat/optim.py; 2026).
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np

from eqformer.recipes import Recipe


# The polynomials of Polar Express (arXiv 2505.16932, algorithm 1), with its safety factor of 1.01.
POLAR_EXPRESS = tuple(
    (a / 1.01, b / 1.01**3, c / 1.01**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115952949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)
KELLER_JORDAN = ((3.4445, -4.7750, 2.0315),) * 5


class PeerOptimizer(Protocol):
    """An optimizer with its own learning-rate schedule."""

    def update(self, step: int) -> None:
        """Take step number `step`, counted from 0, with the gradients in the model's parameters."""
        ...


class OfRecipe:
    """The recipe's settings: Muon or NorMuon for hidden matrices, and AdamW for all other parameters; heads are tied.

    Muon is Keller Jordan's version. It lacks optax's bias correction of the momentum, which matters only in about the
    first 60 steps.
    """

    def __init__(self, model: Any, recipe: Recipe):
        hidden, tables, vectors = split_parameters(model)
        self.model, self.options, self.steps, self.count = model, recipe.optimizer, recipe.steps, 0
        (phase,) = self.options.phases(recipe.steps)
        self.warmup = phase.warmup
        table_decay = self.options.weight_decay if self.options.decay_tables else 0.0
        groups = [{"params": tables, "weight_decay": table_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.momentum = 0.95 if self.options.momentum is None else self.options.momentum
        betas = 0.9 if self.options.b1 is None else self.options.b1, 0.95
        self.adam = import_module("torch").optim.AdamW(groups, lr=1.0, betas=betas, eps=1e-8)
        self.hidden = hidden
        zeros_like = import_module("torch").zeros_like
        self.momenta = [zeros_like(x) for _, x in hidden]
        self.squares = [zeros_like(x[..., :1]) for _, x in hidden]

    def update(self, step: int) -> None:
        """Take a step with the recipe's learning rate."""
        torch = import_module("torch")
        if self.options.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        rate = self.options.learning_rate * self._share(step)
        _set_rates(self.adam, [rate * self.options.embedding_rate, rate * self.options.vector_rate])
        self.adam.step()
        self.count += 1
        with torch.no_grad():
            for (name, x), momentum, squares in zip(self.hidden, self.momenta, self.squares, strict=True):
                momentum.lerp_(x.grad, 1 - self.momentum)
                for weight, gradient, mean, square in matrices_of(name, x, x.grad, momentum, squares):
                    update = self._direction(gradient, mean, square)
                    decay = self.options.weight_decay * weight
                    if self.options.cautious:
                        decay = decay * (update * weight > 0)
                    weight.sub_(rate * (update + decay))

    def _share(self, step: int) -> float:
        """Return the learning rate as a share of its peak."""
        if self.options.rates == "warmup-cosine":
            return cosine_share(step, self.steps, self.warmup)
        descent = int(self.options.decay_share * self.steps)
        return min((step + 1) / (self.warmup + 1), 1.0, (self.steps - step) / descent)

    def _direction(self, gradient: Any, mean: Any, square: Any) -> Any:
        torch, is_normuon = import_module("torch"), self.options.name == "normuon"
        update = gradient.lerp(mean, self.momentum)
        update = orthogonalize(update, POLAR_EXPRESS if is_normuon else KELLER_JORDAN, 1.0)
        outputs, inputs = update.shape[-2:]
        size = 0.2 if self.options.update_size == "rms" else (outputs / inputs / max(outputs, inputs)) ** 0.5
        if not is_normuon:
            return size * max(outputs, inputs) ** 0.5 * update
        square.mul_(0.95).add_((update**2).mean(-1, keepdim=True), alpha=0.05)
        update = update / (torch.sqrt(square / (1 - 0.95**self.count)) + 1e-8)
        return size * update / (update**2).mean((-2, -1), keepdim=True).sqrt()


class OfNanoGPT:
    """nanoGPT's settings for a small model of characters: AdamW at 0.001, beta2 0.99, 100 steps of warmup, a cosine.

    All arrays of two dims or more have a weight decay of 0.1; gradients are clipped to the norm 1.
    """

    def __init__(self, model: Any, recipe: Recipe):
        parameters = list(model.parameters())
        groups = [
            {"params": [x for x in parameters if x.ndim > 1], "weight_decay": 0.1},
            {"params": [x for x in parameters if x.ndim < 2], "weight_decay": 0.0},
        ]
        self.model, self.steps = model, recipe.steps
        self.adam = import_module("torch").optim.AdamW(groups, lr=1.0, betas=(0.9, 0.99), eps=1e-8)

    def update(self, step: int) -> None:
        """Take a step of AdamW."""
        import_module("torch").nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = 1e-3 * cosine_share(step, self.steps, 100)
        _set_rates(self.adam, [rate, rate])
        self.adam.step()


class OfNanochat:
    """nanochat's settings: NorMuon at 0.02 for hidden matrices, AdamW at 0.3 for embeddings and 0.008 for the head.

    The rates are multiplied by `share`, which is `sqrt(tokens a step / 2**19)` in nanochat. An embedding that is tied
    to the head has the head's rate. The weight decay of 0.28 falls by a cosine. nanochat also scales the decay by the
    horizon, which is left out here: for such short runs, the factor would be in the thousands.
    """

    def __init__(self, model: Any, recipe: Recipe, share: float = 1.0):
        torch = import_module("torch")
        hidden, tables, vectors = split_parameters(model)
        self.hidden, self.steps, self.share = hidden, recipe.steps, share
        width = (model.config.hidden_size / 768) ** -0.5
        head = model.get_output_embeddings().weight
        self.adam = torch.optim.AdamW(
            [
                {"params": [head], "betas": (0.8, 0.96), "weight_decay": 0.01},
                {"params": [x for x in tables if x is not head], "betas": (0.8, 0.995), "weight_decay": 0.001},
                {"params": vectors, "betas": (0.8, 0.95), "weight_decay": 0.0},
            ],
            lr=1.0,
            eps=1e-10,
        )
        self.peaks = [0.008 * width, 0.3 * width, 0.005]
        self.momenta = [torch.zeros_like(x) for _, x in hidden]
        self.squares = [
            torch.cat(
                [torch.zeros_like(matrix.mean(_variance_dim(matrix), True)) for (matrix,) in matrices_of(name, x)], -2
            )
            for name, x in hidden
        ]

    def update(self, step: int) -> None:
        """Take a step: 40 steps of warmup, a plateau, and a linear decay to a twentieth over the last 65 %."""
        cooldown = round(0.65 * self.steps)
        remaining = (self.steps - step) / cooldown
        size = min((step + 1) / 40, 1.0) if remaining >= 1 else 0.05 + 0.95 * remaining
        momentum = 0.85 + 0.12 * min(step / 400, 1) if remaining >= 1 else 0.90 + 0.07 * remaining
        decay = 0.14 * (1 + float(np.cos(np.pi * step / self.steps)))
        _set_rates(self.adam, [peak * size * self.share for peak in self.peaks])
        self.adam.step()
        with import_module("torch").no_grad():
            for (name, x), mean, squares in zip(self.hidden, self.momenta, self.squares, strict=True):
                mean.lerp_(x.grad, 1 - momentum)
                for weight, gradient, own_mean, square in matrices_of(name, x, x.grad, mean, squares):
                    update = self._direction(gradient.lerp(own_mean, momentum), square)
                    rate = 0.02 * self.share * size * max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
                    weight.sub_(rate * (update + decay * weight * (update * weight >= 0)))

    def _direction(self, update: Any, square: Any) -> Any:
        """Give the rows of an update equal norms, orthogonalize it, and divide it by the root of its mean squares."""
        rows = update.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        update = update * (update.norm(dim=(-2, -1), keepdim=True) / update.shape[-2] ** 0.5 / rows)
        update = orthogonalize(update, POLAR_EXPRESS, 1.01)
        update = update * min(update.shape[-2:]) ** 0.5 / update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-6)
        norm = update.norm(dim=(-2, -1), keepdim=True)
        square.lerp_((update**2).mean(_variance_dim(update), keepdim=True), 0.1)
        update = update * square.clamp_min(1e-10).rsqrt()
        return update * norm / update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10)


def nanochat_by_batch(model: Any, recipe: Recipe) -> OfNanochat:
    """Return nanochat's optimizer, with its learning rates scaled for the recipe's batch."""
    return OfNanochat(model, recipe, share=(recipe.batch * recipe.seq / 2**19) ** 0.5)


MakeOptimizer: TypeAlias = Callable[[Any, Recipe], PeerOptimizer]
"""A function that makes an optimizer for a model of transformers and a recipe."""
OPTIMIZERS: Mapping[str, MakeOptimizer] = MappingProxyType(
    {
        "the same settings": OfRecipe,
        "nanoGPT's settings": OfNanoGPT,
        "nanochat's rates": OfNanochat,
        "nanochat's rates by batch": nanochat_by_batch,
    }
)
"""The optimizer of each PyTorch run, by the run's name in the rows."""


def split_parameters(model: Any) -> tuple[list[tuple[str, Any]], list[Any], list[Any]]:
    """Split parameters into hidden matrices with their names, the embedding and the head, and all other parameters."""
    named = list(model.named_parameters())
    tables = [x for name, x in named if "embed" in name or "lm_head" in name]
    hidden = [(name, x) for name, x in named if x.ndim > 1 and _is_hidden(name)]
    names = {name for name, _ in hidden}
    vectors = [x for name, x in named if name not in names and not ("embed" in name or "lm_head" in name)]
    return hidden, tables, vectors


def matrices_of(name: str, *arrays: Any) -> Sequence[tuple[Any, ...]]:
    """Return views of the matrices in each array; a mixture's fused gate and up projections are two matrices."""
    pieces = 2 if "gate_up" in name else 1
    return list(zip(*(x.chunk(pieces, -2) for x in arrays), strict=True))


def orthogonalize(update: Any, polynomials: Sequence[tuple[float, float, float]], margin: float) -> Any:
    """Return the update with all singular values near 1, in float32; the update is first scaled to norm 1 / margin."""
    is_tall = _is_tall(update)
    x = update.mT if is_tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * margin + 1e-8)
    for a, b, c in polynomials:
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x.mT if is_tall else x


def cosine_share(step: int, steps: int, warmup: int) -> float:
    """Return the learning rate as a share of its peak: a linear warmup, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.1 + 0.45 * (1 + float(np.cos(np.pi * (step - warmup) / (steps - warmup))))


def _set_rates(optimizer: Any, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _is_hidden(name: str) -> bool:
    """Return whether a parameter of two dims or more is a hidden matrix, not a table or a convolution."""
    return not any(part in name for part in ("embed", "lm_head", "conv.conv"))


def _is_tall(x: Any) -> bool:
    return x.shape[-2] > x.shape[-1]


def _variance_dim(x: Any) -> int:
    """Return the dim over which nanochat takes mean squares: the inputs, or the outputs if there are more inputs."""
    return -1 if x.shape[-2] >= x.shape[-1] else -2
