"""The settings of a run's optimizer, as plain data: `Optimization`, and `Lora` for low-rank training."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxtyping import Array, Float, Key, PyTree

from .. import nn
from ..parallel import Plan
from ._logit_clip import check_clipping
from ._step import make_step, Step
from .losses._loss_aux import LossFn
from .losses._token_losses import next_token_loss
from .optimizer._learning_rates import DECAY_SHARE, default_warmup, phase_rates, Rates, SchedulePhase
from .optimizer._named_optimizers import optimizer, OPTIMIZERS, option_names
from .optimizer._optimizer import GroupRates, Optimizer, trainable, Trained


# Settings of an `Optimization` that only some optimizers have.
_SPECIAL = ("update_size", "momentum", "b1")


@dataclasses.dataclass(frozen=True)
class Optimization:
    """The settings of an optimizer, its learning rates and the loss, as plain data; the methods check the values."""

    name: Literal["adamw", "schedule-free-adamw", "muon", "normuon", "soap", "sgd"] = "adamw"
    """The optimizer; muon, normuon and soap train hidden matrices, and AdamW trains the other parameters."""
    learning_rate: float = 3e-3
    """The peak learning rate."""
    rates: Literal["warmup-cosine", "warmup-stable-decay", "constant"] = "warmup-cosine"
    """The learning rate after the warmup: half a cosine, a plateau and a linear decay, or the peak."""
    decay_share: float = DECAY_SHARE
    """The share of the run's steps, at its end, over which the rate of warmup-stable-decay falls."""
    warmup: int | None = None
    """Steps of linear warmup; by default a tenth of the run's steps, at least 1 and at most 50."""
    moments: Literal["float32", "bfloat16", "8bit"] = "float32"
    """The dtype of the optimizer's moments between steps: bfloat16 takes half the memory, 8bit a quarter."""
    momentum: float | None = None
    """The decay of the mean of gradients, for muon, normuon and sgd; None: the optimizer's default."""
    b1: float | None = None
    """The decay of the mean of gradients in soap and in AdamW; None: the optimizer's default."""
    weight_decay: float = 0.1
    """Each step, matrices shrink by this number times the learning rate; biases and norms never decay."""
    cautious: bool = False
    """Whether a weight decays only if the update moves it towards 0 (arXiv 2510.12402)."""
    decay_tables: bool = True
    """Whether embeddings and heads decay too."""
    update_size: Literal["rms", "spectral"] = "rms"
    """Muon's updates have a root mean square of 0.2, or the spectral norm sqrt(outputs / inputs) (arXiv 2310.17813)."""
    embedding_rate: float = 1.0
    """The learning rate of embeddings and other tables, as a multiple of learning_rate."""
    head_rate: float = 1.0
    """The learning rate of a head that is not tied to the embedding, as a multiple of learning_rate."""
    vector_rate: float = 1.0
    """The learning rate of norms, biases and other vectors and scalars, as a multiple of learning_rate."""
    clip: float | None = 1.0
    """The largest global gradient norm; larger gradients are scaled down to this norm. None switches clipping off."""
    clip_logits: float | None = None
    """The limit of attention logits; heads above it get smaller queries and keys (MuonClip, 2507.20534: 100)."""
    z_loss: float = 0.0
    """Weight of the squared log-normalizer in the loss."""
    balance_rate: float = 0.001
    """The step size of the routers' selection biases, which balance the load of experts."""
    paths: tuple[str, ...] = ()
    """Other optimizers for parameters whose paths contain a name, such as embedding=sgd; the last match counts."""

    def phases(self, steps: int) -> list[SchedulePhase]:
        """Return the single phase of a run that has this number of steps from its beginning."""
        return [SchedulePhase(0, steps, default_warmup(steps) if self.warmup is None else self.warmup)]

    def make_rates(self, phases: Sequence[SchedulePhase]) -> Rates:
        """Return the learning rate of each step of a run in phases; raises a `ValueError` as `training.rates` does."""
        return phase_rates(self.rates, phases, peak=self.learning_rate, decay_share=self.decay_share)

    def optimizer(self, model: PyTree, phases: Sequence[SchedulePhase], *, trained: Trained = trainable) -> Optimizer:
        """Return the optimizer for a model's structure and a run in phases; `trained` picks the trained parameters.

        Raises a `ValueError` for a setting that neither the optimizer nor an optimizer in `paths` has, for a decay or a
        multiple below zero, for impossible learning rates, and for a model whose logits cannot be clipped.
        """
        self._check_positive("weight_decay", "embedding_rate", "head_rate", "vector_rate")
        self._refuse_unused()
        if self.clip_logits is not None:
            check_clipping(model, trained)
        options: dict[str, object] = {
            "moments": self.moments,
            "weight_decay": self.weight_decay,
            "cautious": self.cautious,
            "decay_tables": self.decay_tables,
            "group_rates": GroupRates(self.embedding_rate, self.head_rate, self.vector_rate),
            "trained": trained,
        }
        options |= self._special_options()
        return optimizer(self.name, model, rate=self.make_rates(phases), paths=self.paths, **options)

    def loss(
        self, model: PyTree, batch: PyTree, key: PyTree = None, **views: PyTree
    ) -> tuple[Float[Array, ""], PyTree]:
        """Return the loss that a step minimizes: `next_token_loss` with the `z_loss`."""
        return next_token_loss(model, batch, key, z_loss=self.z_loss, **views)

    def step(
        self,
        optimizer: Optimizer,
        plan: Plan | None = None,
        *,
        loss: LossFn | None = None,
        gradient_norms: bool = False,
    ) -> Step:
        """Return the training step of an optimizer, under a plan or on one device.

        `loss`, such as a `preference_loss`, replaces the next-token loss. `gradient_norms` adds the norm of each
        module's gradient to the metrics. Raises a `ValueError` for a `clip` that is not positive, and for a `z_loss` or
        `balance_rate` below zero.
        """
        self._check_positive("z_loss", "balance_rate")
        return make_step(
            self.loss if loss is None else loss,
            optimizer,
            plan,
            clip=self.clip,
            balance_rate=self.balance_rate,
            gradient_norms=gradient_norms,
            clip_logits=self.clip_logits,
        )

    def without_unused(self) -> "Optimization":
        """Return these settings, with each setting that no optimizer in use has set back to its default.

        `dataclasses.replace(optimization, name="adamw").without_unused()` changes the optimizer of a recipe.
        """
        defaults = {setting: getattr(Optimization, setting) for setting in _SPECIAL if not self._is_used(setting)}
        return dataclasses.replace(self, **defaults)

    def _special_options(self) -> dict[str, object]:
        """Return the options that only some optimizers have, if an optimizer in use has them.

        Raises a `ValueError` for a `momentum` or `b1` outside of 0 to 1.
        """
        for option in ("momentum", "b1"):
            value = getattr(self, option)
            if value is not None and not 0 <= value < 1:
                raise ValueError(
                    f"Optimization({option}={value}): a decay is at least 0 and less than 1; 0.9 is usual."
                )
        options = {setting: getattr(self, setting) for setting in _SPECIAL if self._is_used(setting)}
        return {option: value for option, value in options.items() if value is not None}

    def _is_used(self, setting: str) -> bool:
        """Return whether the optimizer, or an optimizer in `paths`, has a setting."""
        names = {self.name, *(choice.rpartition("=")[2] for choice in self.paths)} & OPTIMIZERS.keys()
        return any(setting in option_names(name) for name in names)

    def _refuse_unused(self) -> None:
        """Raise a `ValueError` for a setting, other than its default, that no optimizer in use has."""
        for setting in _SPECIAL:
            value = getattr(self, setting)
            if value != getattr(Optimization, setting) and not self._is_used(setting):
                names = ", ".join(name for name in OPTIMIZERS if setting in option_names(name))
                raise ValueError(
                    f"Optimization(name={self.name!r}, {setting}={value!r}): {self.name} has no setting {setting}, and "
                    f"neither has an optimizer in paths; leave {setting} out, or take one of {names}."
                )

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) >= 0:
                raise ValueError(f"Optimization({name}={getattr(self, name)}): {name} must be at least 0.")


@dataclasses.dataclass(frozen=True)
class Lora:
    """The settings of LoRA, which trains low-rank changes instead of the weights; `nn.with_lora` checks the values."""

    rank: int = 0
    """The rank of the trained low-rank changes; 0 trains all weights."""
    alpha: float = 16.0
    """The changes are multiplied by alpha / rank."""
    maps: tuple[str, ...] = ("query", "key", "value", "output")
    """The ends of the names of the linear maps that get a low-rank change, as in eqformer.nn.with_lora."""

    def apply(self, model: PyTree, *, key: Key[Array, ""]) -> PyTree:
        """Replace each of the maps by an `nn.LoRA`, which changes nothing before the first step."""
        return nn.with_lora(model, self.maps, rank=self.rank, alpha=self.alpha, key=key) if self.rank else model

    @property
    def trained(self) -> Trained:
        """The optimizer's `trained`: only the low-rank changes and a classifier or, with rank 0, all weights."""
        return nn.lora_factors if self.rank else trainable
