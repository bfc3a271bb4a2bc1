"""Weights in 8 and 4 bits: their bytes, how fast text is written with them, and what they cost in bits a byte."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from support.published import tokenizer_of
from support.run_directory import RunDirectory
from support.screen import Screen
from support.setup import latest_model
from support.text import open_texts, sources_of

from benchmarks import _ours, _peers
from benchmarks._formats import write
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import generation, models, nn, training


RUN = Path("runs/default")
BATCHES = (1, 16)
FOLDERS = ("INT4", "FP8", "MXFP4")
CLOSE = {"INT4": 1e-3, "FP8": 1e-3, "MXFP4": 3e-3}  # of random codes float32 is 5e-4 to 7e-4 off float64 in MXFP4
FORMS: dict[str, Callable[[nn.Transformer], nn.Transformer]] = {
    "float32": lambda model: model,
    "int8": partial(nn.quantize, form="int8"),
    "fp8": partial(nn.quantize, form="fp8"),
    "int4": partial(nn.quantize, form="int4"),
    "int4, groups of 32": partial(nn.quantize, form="int4", group=32),
}


def quantized(rounds: int) -> Iterator[Row]:
    """Greedy decoding in 8 and 4 bits, of our own (8 M parameters) and of folders, and bits a byte of runs/default."""
    config, prompt, new = models.preset("llama-byte-8m"), 32, 128
    for batch in BATCHES:
        ids = _ids(config.vocab, batch, prompt)
        contenders = {name: _ours.decode(config, ids, new, apart=False, change=form) for name, form in FORMS.items()}
        times = seconds_in_turn(contenders, max(2, rounds // 3))
        yield from rate_rows(f"decode, batch {batch}", "tokens/s", batch * new, times)
    for name in FOLDERS:
        with tempfile.TemporaryDirectory() as folder:
            yield from _of_folder(Path(folder), name, rounds)
    if (directory := RunDirectory(RUN)).recipe.exists():
        yield from _of_run(directory)


def _of_folder(folder: Path, name: str, rounds: int) -> Iterator[Row]:
    """Prompt 32, 16 new tokens, with a folder's codes kept, with them decoded, and with transformers."""
    write(folder / "coded", name)
    load = partial(models.load, folder / "coded", dtype="float32")
    decoded, new = load(), 16
    found, config = {"kept": load(weights="quantized"), "decoded": decoded}, models.read_config(folder / "coded")
    apart = {way: generation.unstack_layers(one) for way, one in found.items()}
    run = eqx.filter_jit(lambda model, ids: model(ids)[0])
    theirs = None
    if _peers.are_installed():
        models.save(decoded, folder / "decoded", config=config)
        theirs = _peers.read(folder / "decoded")
    for batch in BATCHES:
        ids = _ids(config.vocab, batch, 32)
        want, kept = (np.asarray(run(one, jnp.asarray(ids))) for one in (decoded, found["kept"]))
        assert np.array_equal(want, kept), f"{name}: kept and decoded differ by {np.max(np.abs(want - kept))}"
        contenders = {way: _ours.greedy(one, ids, new) for way, one in apart.items()}
        if theirs is not None:
            contenders["transformers, decoded weights"] = _peers.greedy(theirs, ids, new)
            distance = np.max(np.abs(want - _peers.forward(theirs, ids)[0]())) / np.max(np.abs(want))
            assert distance < CLOSE[name], f"{name}: logits differ by {distance}"
        times = seconds_in_turn(contenders, max(2, rounds // 3))
        yield from rate_rows(f"decode {name}, batch {batch}", "tokens/s", batch * new, times)


def _ids(vocab: int, batch: int, prompt: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, vocab, (batch, prompt), dtype=np.int32)


def _of_run(directory: RunDirectory) -> Iterator[Row]:
    _, recipe = directory.read()
    model = latest_model(directory, recipe)
    texts = open_texts(recipe, sources_of(recipe), tokenizer_of(recipe, directory), directory, Screen())
    sums = eqx.filter_jit(training.evaluation_sums)
    first = None
    for name, form in FORMS.items():
        rounded = eqx.filter_jit(form)(model)
        mean, _ = texts.validate(partial(sums, rounded), recipe.validation_batches, rows=(0, recipe.batch))
        bits = training.bits_per_byte(mean.loss, mean.bytes_per_token)
        first = first or bits
        note = f"{bits:.4f}; {_bytes(rounded):,} bytes of arrays"
        yield Row("validation text", name, bits, "bits a byte", bits / first, note)


def _bytes(model: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
