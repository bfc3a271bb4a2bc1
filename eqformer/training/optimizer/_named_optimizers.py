"""Optimizers by name: AdamW, schedule-free AdamW, Muon, NorMuon, SOAP and SGD. Only matrices have weight decay."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from ... import nn
from ._learning_rates import constant, Rates
from ._matrix_updates import coefficients, equalize_rows, map_marked, scale_by_soap
from ._optimizer import assign, choose_optimizers, GroupRates, is_hidden, is_none, Optimizer, trainable, Trained


def adamw(
    model: PyTree,
    *,
    rate: Rates,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay_tables: bool = True,
    cautious: bool = False,
    matrices: PyTree = None,
    trained: Trained = trainable,
) -> Optimizer:
    """Return AdamW (arXiv 1711.05101): Adam with weight decay that bypasses the moments.

    The decay is multiplied by the learning rate. Biases, norms and other vectors never decay.

    Args:
        model: The model; only its structure is read.
        rate: The learning rate as a function of the step.
        b1: The decay of the mean of gradients.
        b2: The decay of the mean of squared gradients.
        eps: A constant that is added to the root of the mean square.
        weight_decay: A step subtracts `rate * weight_decay` times the weight.
        decay_tables: Whether embeddings and heads decay too.
        cautious: Whether a weight decays only in steps whose update moves it towards 0 (arXiv 2510.12402).
        matrices: A tree like the model that marks the weights that decay; None: `nn.matrices(model)`.
        trained: Picks the parameters that are trained, such as `nn.lora_factors`.
    """
    marks = _mark_matrices(model, matrices, trained)
    decay_weights = _decay_weights(weight_decay, marks, decay_tables, cautious)
    rule = optax.chain(optax.scale_by_adam(b1=b1, b2=b2, eps=eps), decay_weights, optax.scale(-1.0))
    return Optimizer(rule, rate, trained, assignment=assign("adamw", marks))


def schedule_free_adamw(
    model: PyTree,
    *,
    rate: Rates,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay_tables: bool = True,
    cautious: bool = False,
    matrices: PyTree = None,
    trained: Trained = trainable,
) -> Optimizer:
    """Return schedule-free AdamW (arXiv 2405.15682), for which the learning rate need not fall: take a constant rate.

    Updates move fast weights, which are in the optimizer state. The model's weights are the average of the fast weights
    over the steps. Gradients are computed at a point between the fast and the averaged weights. The fast weights
    replace AdamW's mean of gradients, so both optimizers take the same memory. Validation, samples and checkpoints use
    the averaged weights. Parameters should be float32: in 16 bits, most of the average's small changes would be lost.

    Args:
        model: The model; only its structure is read.
        rate: The learning rate as a function of the step; it should never fall. A step's weight in the average is the
            square of the largest rate so far.
        b1: The share of the averaged weights in the point at which gradients are computed.
        b2: The decay of the mean of squared gradients.
        eps: A constant that is added to the root of the mean square.
        weight_decay: A step subtracts `rate * weight_decay` times the weight.
        decay_tables: Whether embeddings and heads decay too.
        cautious: Whether a weight decays only in steps whose update moves it towards 0 (arXiv 2510.12402).
        matrices: A tree like the model that marks the weights that decay; None: `nn.matrices(model)`.
        trained: Picks the parameters that are trained, such as `nn.lora_factors`.
    """
    marks = _mark_matrices(model, matrices, trained)
    decay_weights = _decay_weights(weight_decay, marks, decay_tables, cautious)
    scale = optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True)
    rule, assignment = optax.chain(scale, decay_weights, optax.scale(-1.0)), assign("schedule-free-adamw", marks)
    return Optimizer(rule, rate, trained, average=b1, assignment=assignment)


def muon(
    model: PyTree,
    *,
    rate: Rates,
    momentum: float = 0.95,
    newton_schulz_steps: int = 5,
    iteration: str = "quintic",
    row_decay: float | None = None,
    rms: float = 0.2,
    update_size: str = "rms",
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay_tables: bool = True,
    cautious: bool = False,
    matrices: PyTree = None,
    trained: Trained = trainable,
) -> Optimizer:
    """Return Muon for hidden matrices, and AdamW for embeddings, heads and vectors.

    Muon's updates are the Nesterov momentum, orthogonalized by a Newton-Schulz iteration. In a stack, the matrix of
    each layer (and expert) is orthogonalized by itself; several output dims count as one dim, and so do several input
    dims. `update_size` chooses how updates are scaled. "rms": by `rms * sqrt(max(outputs, inputs))`, so that one
    learning rate suits Muon and AdamW (arXiv 2502.16982). "spectral": to a spectral norm of `sqrt(outputs / inputs)`,
    so that one learning rate suits all widths (arXiv 2310.17813).

    Args:
        model: The model; only its structure is read.
        rate: The learning rate as a function of the step.
        momentum: The decay of the mean of gradients that is orthogonalized.
        newton_schulz_steps: The steps of the Newton-Schulz iteration; Polar Express has at most 5.
        iteration: The polynomials of the iteration's steps: "quintic" (Keller Jordan's), or "polar-express", which ends
            nearer to an orthogonal matrix (arXiv 2505.16932).
        row_decay: For NorMuon, the decay of the mean squares by which each output's update is divided
            (arXiv 2510.05491); None: Muon, whose update is orthogonal.
        rms: The approximate root mean square of an update at a rate of 1; AdamW's updates have a similar size.
        update_size: "rms": updates have the root mean square `rms` at a rate of 1. "spectral": updates have the
            spectral norm `sqrt(outputs / inputs)`; for NorMuon, the root mean square of an orthogonal matrix with this
            norm.
        b1: AdamW's decay of the mean of gradients.
        b2: AdamW's decay of the mean of squared gradients.
        eps: The constant that AdamW adds to the root of the mean square.
        weight_decay: A step subtracts `rate * weight_decay` times the weight.
        decay_tables: Whether embeddings and heads decay too.
        cautious: Whether a weight decays only in steps whose update moves it towards 0 (arXiv 2510.12402).
        matrices: A tree like the model that marks its matrices, which decay; None: `nn.matrices(model)`.
        trained: Picks the parameters that are trained, such as `nn.lora_factors`.
    """
    if update_size not in ("rms", "spectral"):
        raise ValueError(f"muon(update_size={update_size!r}): the sizes are rms and spectral; pass one of these.")
    marks = _mark_matrices(model, matrices, trained)

    def matrix_axes(updates: PyTree) -> PyTree:
        return map_marked(lambda mark, _: _muon_axes(mark), marks, updates)

    def scale_updates(updates: PyTree, _: PyTree) -> PyTree:
        return map_marked(scale_update, marks, updates)

    def scale_update(mark: nn.Matrix, x: Array) -> Array:
        outputs, inputs = _matrix_sizes(x, mark)
        size = rms if update_size == "rms" else math.sqrt(outputs / inputs / max(outputs, inputs))
        # An orthogonal matrix has a root mean square of 1 / sqrt(max(outputs, inputs)); after `equalize_rows` it is 1.
        return x * (size * math.sqrt(max(outputs, inputs)) if row_decay is None else -size)

    orthogonalize = optax.contrib.scale_by_muon(
        coefficients(iteration, newton_schulz_steps),
        newton_schulz_steps,
        beta=momentum,
        weight_dimension_numbers=matrix_axes,
    )
    if row_decay is None:
        hidden = optax.chain(orthogonalize, optax.stateless(scale_updates), optax.scale(-1.0))
    else:
        hidden = optax.chain(orthogonalize, equalize_rows(row_decay, marks), optax.stateless(scale_updates))
    by_label = _partition_hidden("muon", hidden, optax.adam(1.0, b1=b1, b2=b2, eps=eps), marks)
    decay_weights = _decay_weights(-weight_decay, marks, decay_tables, cautious)
    assignment = assign("muon" if row_decay is None else "normuon", marks)
    return Optimizer(optax.chain(by_label, decay_weights), rate, trained, assignment=assignment)


def normuon(model: PyTree, *, rate: Rates, row_decay: float = 0.95, **options: PyTree) -> Optimizer:
    """Return NorMuon (arXiv 2510.05491): Muon with Polar Express, whose updates have rows of about the same size.

    Its state is Muon's momentum, and one number for each output. `row_decay` is the decay of the mean squares of rows;
    `options` are options of `muon`.
    """
    return muon(model, rate=rate, row_decay=row_decay, **{"iteration": "polar-express", **options})


def soap(
    model: PyTree,
    *,
    rate: Rates,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    frequency: int = 10,
    max_size: int = 10_000,
    weight_decay: float = 0.1,
    decay_tables: bool = True,
    cautious: bool = False,
    matrices: PyTree = None,
    trained: Trained = trainable,
) -> Optimizer:
    """Return SOAP (arXiv 2409.11321) for hidden matrices, and AdamW with the same options for all other parameters.

    SOAP is Adam in the eigenbasis of Shampoo's preconditioners, see `scale_by_soap`. In a stack, the matrix of each
    layer (and expert) has its own preconditioners; several output dims count as one dim, and so do several input dims.
    The state of a matrix of `m` outputs and `n` inputs is Adam's moments and `2 m^2 + 2 n^2` numbers. These numbers are
    float32, whatever the `moments` of `optimizer`.

    Args:
        model: The model; only its structure is read.
        rate: The learning rate as a function of the step.
        b1: The decay of the mean of gradients.
        b2: The decay of the mean of squared gradients, and of the preconditioners.
        eps: A constant that is added to the root of the mean square.
        frequency: The number of steps between two refreshments of the eigenbases.
        max_size: The longest side of a matrix (rows or columns) that gets an eigenbasis; longer sides get none.
        weight_decay: A step subtracts `rate * weight_decay` times the weight.
        decay_tables: Whether embeddings and heads decay too.
        cautious: Whether a weight decays only in steps whose update moves it towards 0 (arXiv 2510.12402).
        matrices: A tree like the model that marks its matrices, which decay; None: `nn.matrices(model)`.
        trained: Picks the parameters that are trained, such as `nn.lora_factors`.
    """
    if frequency < 1:
        raise ValueError(f"soap(frequency={frequency}): the frequency is a number of steps; pass at least 1.")
    marks = _mark_matrices(model, matrices, trained)
    turned = scale_by_soap(marks, b1=b1, b2=b2, eps=eps, frequency=frequency, max_size=max_size)
    hidden, adam = optax.chain(turned, optax.scale(-1.0)), optax.adam(1.0, b1=b1, b2=b2, eps=eps)
    by_label = _partition_hidden("soap", hidden, adam, marks)
    decay_weights = _decay_weights(-weight_decay, marks, decay_tables, cautious)
    return Optimizer(optax.chain(by_label, decay_weights), rate, trained, assignment=assign("soap", marks))


def sgd(
    model: PyTree,
    *,
    rate: Rates,
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay_tables: bool = True,
    cautious: bool = False,
    matrices: PyTree = None,
    trained: Trained = trainable,
) -> Optimizer:
    """Return stochastic gradient descent; weight decay is decoupled from the momentum, as in AdamW.

    Args:
        model: The model; only its structure is read.
        rate: The learning rate as a function of the step.
        momentum: The decay of the sum of gradients that replaces the gradient; None: no momentum.
        nesterov: Whether to use Nesterov momentum, which looks ahead along the sum of gradients.
        weight_decay: A step subtracts `rate * weight_decay` times the weight.
        decay_tables: Whether embeddings and heads decay too.
        cautious: Whether a weight decays only in steps whose update moves it towards 0 (arXiv 2510.12402).
        matrices: A tree like the model that marks the weights that decay; None: `nn.matrices(model)`.
        trained: Picks the parameters that are trained, such as `nn.lora_factors`.
    """
    step = optax.sgd(1.0, momentum=momentum, nesterov=nesterov)
    marks = _mark_matrices(model, matrices, trained)
    decay_weights = _decay_weights(-weight_decay, marks, decay_tables, cautious)
    return Optimizer(optax.chain(step, decay_weights), rate, trained, assignment=assign("sgd", marks))


# Rounding distorts a bfloat16 mean that falls by a small share in each step. Without gradients, a mean with the decay
# 0.98 falls at its exact rate within 1.1 %. With the decay 0.99 the rate is 7 % off, with 0.996 it is 37 % off, and
# with 0.997 the mean never falls.
_MAX_BFLOAT16_DECAY = 0.98
OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = MappingProxyType(
    {
        "adamw": adamw,
        "schedule-free-adamw": schedule_free_adamw,
        "muon": muon,
        "normuon": normuon,
        "soap": soap,
        "sgd": sgd,
    }
)


def optimizer(
    name: str, model: PyTree, *, rate: Rates | float, paths: Sequence[str] = (), **options: PyTree
) -> Optimizer:
    """Return the optimizer with a name in `OPTIMIZERS` for a model's structure.

    Raises a `ValueError` for an unknown name, for a choice in `paths` that cannot work, and for bfloat16 moments with
    `b2` or `row_decay` above 0.98, whose small changes in a step bfloat16 would distort.

    Args:
        name: A name in `OPTIMIZERS`.
        model: The model; only its structure is read.
        rate: The learning rate, a number or a function of the step.
        paths: Other optimizers for some parameters, as `PATTERN=NAME`. A pattern is a part of a parameter's path, such
            as `embedding`, `sublayers[1].layer` or `up.weight`; a `*` stands for any text. If several choices match a
            parameter, the last of them counts.
        options: The options of the named optimizers; `moments`, the dtype of their state between steps (float32,
            bfloat16, 8bit); and `group_rates`, a `GroupRates`.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer({name!r}): the optimizers are {', '.join(OPTIMIZERS)}; pass one of these.")
    moments, group_rates = options.pop("moments", "float32"), options.pop("group_rates", GroupRates())
    rate = rate if callable(rate) else constant(rate)
    means_of_squares = {"b2": options.get("b2"), "row_decay": options.get("row_decay")}
    for option, average_decay in means_of_squares.items():
        if moments == "bfloat16" and average_decay is not None and average_decay > _MAX_BFLOAT16_DECAY:
            raise ValueError(
                f"optimizer({name!r}, moments={moments!r}, {option}={average_decay}): in a step a mean of squares "
                f"falls by {1 - average_decay:.2g} of its value, and bfloat16 cannot store so small a change exactly; "
                f"take moments='float32' or '8bit', or {option} of at most {_MAX_BFLOAT16_DECAY}."
            )
    optimizer = (
        _choose_by_paths(name, model, rate, paths, options) if paths else OPTIMIZERS[name](model, rate=rate, **options)
    )
    if group_rates != GroupRates():
        marks = _mark_matrices(model, options.get("matrices"), optimizer.trained)
        scaled = optax.chain(optimizer.transform, optax.stateless(group_rates.scaling(marks)))
        optimizer = dataclasses.replace(optimizer, transform=scaled)
    return dataclasses.replace(optimizer, moments=moments)


def _choose_by_paths(
    name: str, model: PyTree, rate: Rates, paths: Sequence[str], options: Mapping[str, PyTree]
) -> Optimizer:
    """Return the named optimizer, with other optimizers for the parameters that `paths` choose (see `optimizer`)."""
    marks = _mark_matrices(model, options.get("matrices"), options.get("trained", trainable))
    assignment = assign(name, marks, paths, tuple(OPTIMIZERS))
    chosen_by_path = choose_optimizers(marks, paths, tuple(OPTIMIZERS), name)
    chosen_names = {choice.rpartition("=")[2] for choice in paths} - {name}
    takes = {chosen: option_names(chosen) for chosen in (name, *chosen_names)}
    # With `row_decay`, Muon would be NorMuon, which has its own name.
    takes |= {"muon": takes["muon"] - {"row_decay"}} if "muon" in takes else {}

    def build(optimizer_name: str) -> Optimizer:
        # An option that no optimizer has is passed to the named optimizer, which refuses it.
        is_first = optimizer_name == name
        taken = {
            option: value
            for option, value in options.items()
            if option in takes[optimizer_name] or (is_first and not any(option in known for known in takes.values()))
        }
        return OPTIMIZERS[optimizer_name](model, rate=rate, **taken)

    first = build(name)
    transforms: dict[Hashable, optax.GradientTransformation] = {name: first.transform}
    transforms |= {chosen: build(chosen).transform for chosen in sorted(chosen_names)}

    def label(path: tuple, _: nn.Matrix | Literal[False]) -> str:
        # The named optimizer's own AdamW trains parameters that no path matches and that are not hidden matrices.
        return chosen_by_path.get(nn.path_name(path), name)

    labels = jax.tree_util.tree_map_with_path(label, marks)
    transform = optax.partition(transforms, lambda _: labels)
    return dataclasses.replace(first, transform=transform, assignment=assignment)


def option_names(name: str) -> frozenset[str]:
    """Return the names of an optimizer's options."""
    options = frozenset(inspect.signature(OPTIMIZERS[name]).parameters)
    return options | option_names("muon") if name == "normuon" else options


def _mark_matrices(model: PyTree, matrices: PyTree, trained: Trained) -> PyTree:
    """Return a tree like the trained parameters, with an `nn.Matrix` for each matrix and False for other parameters."""
    marks = nn.matrices(model) if matrices is None else matrices

    def mark(parameter: PyTree, mark: nn.Matrix | None) -> nn.Matrix | bool | None:
        return None if parameter is None else False if mark is None else mark

    return jax.tree.map(mark, trained(model), marks, is_leaf=is_none)


def _partition_hidden(
    label: str, hidden: optax.GradientTransformation, adam: optax.GradientTransformation, marks: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that applies `hidden` to hidden matrices, and `adam` to all other parameters.

    `label` names the state of `hidden` in checkpoints.
    """
    labels = jax.tree.map(lambda mark: label if is_hidden(mark) else "adam", marks, is_leaf=is_none)
    return optax.partition({label: hidden, "adam": adam}, lambda _: labels)


def _decay_weights(
    weight_decay: float, marks: PyTree, decay_tables: bool, cautious: bool
) -> optax.GradientTransformation:
    """Return the transformation that adds `weight_decay * weight` to the updates of all weights that decay."""

    def decays(mark: nn.Matrix | Literal[False] | None) -> bool:
        return bool(mark and (decay_tables or not mark.table))

    mask = jax.tree.map(decays, marks, is_leaf=is_none)

    def add_in_its_direction(update: Array, parameter: Array) -> Array:
        decay = weight_decay * parameter
        return jnp.where(update * decay > 0, update + decay, update)

    def update(updates: PyTree, parameters: PyTree) -> PyTree:
        return jax.tree.map(add_in_its_direction, updates, parameters)

    if cautious:
        return optax.masked(optax.stateless(update), lambda _: mask)
    return optax.add_decayed_weights(weight_decay, lambda _: mask)  # Optax would call a mask that is a module.


def _muon_axes(mark: nn.Matrix) -> optax.contrib.MuonDimensionNumbers:
    """Return the input and output dims of a matrix; all its other dims are ensemble dims."""
    first, last = mark.ensemble + mark.outputs, mark.ensemble + mark.outputs + mark.inputs
    return optax.contrib.MuonDimensionNumbers(
        reduction_axis=tuple(range(first, last)), output_axis=tuple(range(mark.ensemble, first))
    )


def _matrix_sizes(x: Array, mark: nn.Matrix) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a matrix."""
    outputs = math.prod(x.shape[mark.ensemble : mark.ensemble + mark.outputs])
    return outputs, math.prod(x.shape[mark.ensemble + mark.outputs :])
