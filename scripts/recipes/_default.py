"""Small models of bytes that a laptop trains in minutes."""

import dataclasses

from eqformer.models import preset
from eqformer.training import Optimization

from ._recipe import Recipe


def default() -> Recipe:
    """A byte-level Llama of 0.8 million parameters, on the sources of Python's standard library.

    By Muon: AdamW needs twice as many bytes to write as well.
    """
    return Recipe(model=preset("llama-byte-1m"), steps=320, optimizer=_MUON)


def moe() -> Recipe:
    """A mixture of experts, two of eight a token: 0.8 million parameters at work, as in the default model, of 2.6."""
    return dataclasses.replace(default(), model=preset("mixtral-byte-3m"))


def adamw() -> Recipe:
    """The default recipe's model by AdamW, which needs more than twice the steps: 800."""
    return Recipe(model=preset("llama-byte-1m"))


_MUON = Optimization(name="muon", learning_rate=1e-2)
