"""Weights in 8 and 4 bits: their bytes, how fast text is written with them, and what they cost in bits a byte."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from support.published import tokenizer_of
from support.run_directory import RunDirectory
from support.screen import Screen
from support.setup import latest_model
from support.text import open_texts, sources_of

from benchmarks import _ours
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import models, nn, training


RUN = Path("runs/default")
FORMS: dict[str, Callable[[nn.Transformer], nn.Transformer]] = {
    "float32": lambda model: model,
    "int8": partial(nn.quantise, form="int8"),
    "fp8": partial(nn.quantise, form="fp8"),
    "int4": partial(nn.quantise, form="int4"),
    "int4, groups of 32": partial(nn.quantise, form="int4", group=32),
}


def quantised(rounds: int) -> Iterator[Row]:
    """Greedy decoding in 8 and 4 bits (8 M parameters, prompt 32, 128 new tokens) and bits a byte of runs/default."""
    config, prompt, new = models.preset("llama-byte-8m"), 32, 128
    for batch in (1, 16):
        ids = np.random.default_rng(0).integers(1, config.vocab, (batch, prompt), dtype=np.int32)
        contenders = {name: _ours.decode(config, ids, new, apart=False, change=form) for name, form in FORMS.items()}
        times = seconds_in_turn(contenders, max(2, rounds // 3))
        yield from rate_rows(f"decode, batch {batch}", "tokens/s", batch * new, times)
    if (directory := RunDirectory(RUN)).recipe.exists():
        yield from _of_run(directory)


def _of_run(directory: RunDirectory) -> Iterator[Row]:
    _, recipe = directory.read()
    model = latest_model(directory, recipe)
    texts = open_texts(recipe, sources_of(recipe), tokenizer_of(recipe, directory), directory, Screen())
    sums = eqx.filter_jit(training.evaluation_sums)
    first = None
    for name, form in FORMS.items():
        rounded = eqx.filter_jit(form)(model)
        mean, _ = texts.validation(partial(sums, rounded), recipe.validation_batches, rows=(0, recipe.batch))
        bits = training.bits_per_byte(mean.loss, mean.bytes_per_token)
        first = first or bits
        note = f"{bits:.4f}; {_bytes(rounded):,} bytes of arrays"
        yield Row("validation text", name, bits, "bits a byte", bits / first, note)


def _bytes(model: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
