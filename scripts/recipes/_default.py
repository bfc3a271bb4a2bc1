"""Small models of bytes that a laptop trains in minutes, by Muon: AdamW needs twice as many bytes to write as well."""

import dataclasses

from eqformer.models import preset

from ._recipe import Optimization, Recipe


def default() -> Recipe:
    """A byte-level Llama of 0.8 million parameters, on the sources of Python's standard library."""
    return _small("llama-byte-1m")


def gpt2() -> Recipe:
    """The same with GPT-2's architecture: learned positions, LayerNorm, biases."""
    return _small("gpt2-byte-1m")


def jaxformer() -> Recipe:
    """The same with JAXformer's: latent attention, blocks of two layers, the second without rotary positions."""
    return _small("jaxformer-byte-1m")


def moe() -> Recipe:
    """A mixture of experts, two of eight a token: 0.8 million parameters at work, as in the default model, of 2.6."""
    return _small("mixtral-byte-3m")


def adamw() -> Recipe:
    """The default recipe with AdamW, which needs about twice the steps."""
    return dataclasses.replace(default(), steps=800, optimizer=Optimization())


def _small(name: str) -> Recipe:
    """The recipe for a preset of a small model."""
    return Recipe(model=preset(name), steps=320, optimizer=Optimization(name="muon", learning_rate=1e-2))
