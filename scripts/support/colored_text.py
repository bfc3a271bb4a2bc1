"""A run's text coloured by each token's first expert: a web page and a picture in its folder."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from eqformer import nn, training
from support.run_directory import RunDirectory


def has_choices(model: nn.Transformer) -> bool:
    """Whether the model has a mixture whose tokens choose their experts."""
    return any(not moe.router.facts().gives_slots for moe in nn.modules(model, nn.ExpertMixture))


def color(directory: RunDirectory, model: nn.Transformer, ids: Sequence[int], pieces: Sequence[str]) -> None:
    """Write experts.html and experts.png of a text's ids and their pieces, as far as the model has positions for them.

    Raises a `ValueError` if tokens do not choose their experts.
    """
    known = model.max_seq
    chosen = np.asarray(eqx.filter_jit(nn.first_experts)(model, jnp.asarray(ids[:known], jnp.int32)))
    title = f"{directory.path.name}: the expert that each token takes first"
    for path in (directory.experts_page, directory.experts):
        training.plot_experts(chosen, pieces[:known], path, title=title)
