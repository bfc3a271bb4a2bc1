"""Rows about weights in 8 and 4 bits: their bytes, the speed of decoding, and bits a byte on validation text."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _ours, _peers
from benchmarks._folders import write_quantized_folder
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import generation, kernels, models, nn, training
from eqformer.recipes import RunDirectory, Screen, texts
from eqformer.text import load_run_model


RUN = Path("runs/default")
BATCHES = (1, 16)
FOLDERS = ("INT4", "FP8", "MXFP4")
# With random codes in MXFP4, float32 results differ from float64 results by 5e-4 to 7e-4.
TOLERANCES = {"INT4": 1e-3, "FP8": 1e-3, "MXFP4": 3e-3}
FORMS: dict[str, Callable[[nn.Transformer], nn.Transformer]] = {
    "float32": lambda model: model,
    "int8": partial(nn.quantize, form="int8"),
    "fp8": partial(nn.quantize, form="fp8"),
    "int4": partial(nn.quantize, form="int4"),
    "int4, groups of 32": partial(nn.quantize, form="int4", group=32),
}


def quantized(rounds: int) -> Iterator[Row]:
    """Greedy decoding in 8 and 4 bits, of a model of 8 M parameters and of folders; bits a byte of runs/default."""
    if kernels.find_compiler() is not None:
        kernels.build_native()
    config, prompt, new = models.preset("llama-byte-8m"), 32, 128
    for batch in BATCHES:
        ids = _ids(config.vocab, batch, prompt)
        contenders = {
            name: _ours.decode(config, ids, new, unstacked=False, change=form) for name, form in FORMS.items()
        }
        times = seconds_in_turn(contenders, max(2, rounds // 3))
        yield from rate_rows(f"decode, batch {batch}", "tokens/s", batch * new, times)
    for name in FOLDERS:
        with tempfile.TemporaryDirectory() as folder:
            yield from _folder_rows(Path(folder), name, rounds)
    if (directory := RunDirectory(RUN)).recipe.exists():
        yield from _run_rows(directory)


def _folder_rows(folder: Path, name: str, rounds: int) -> Iterator[Row]:
    """Yield rates of decoding 16 tokens after 32, with quantized weights, decoded weights, and transformers."""
    write_quantized_folder(folder / "coded", name)
    load = partial(models.load, folder / "coded", dtype="float32")
    decoded, new = load(), 16
    quantized_model, config = load(weights="quantized"), models.read_config(folder / "coded")
    ways = {"kept": quantized_model, "decoded": decoded}
    unstacked = {way: generation.unstack_layers(model) for way, model in ways.items()}
    run = eqx.filter_jit(lambda model, ids: model(ids)[0])
    peer = None
    if _peers.are_installed():
        models.save(decoded, folder / "decoded", config=config)
        peer = _peers.read(folder / "decoded")
    for batch in BATCHES:
        ids = _ids(config.vocab, batch, 32)
        logits, kept_logits = (np.asarray(run(model, jnp.asarray(ids))) for model in (decoded, quantized_model))
        difference = np.max(np.abs(logits - kept_logits)) / np.max(np.abs(logits))
        # Sums in another order may differ by less than this.
        assert difference < 2e-4, f"{name}: kept and decoded differ by {difference}"
        contenders = {way: _ours.greedy(model, ids, new) for way, model in unstacked.items()}
        if peer is not None:
            contenders["transformers, decoded weights"] = _peers.greedy(peer, ids, new)
            distance = np.max(np.abs(logits - _peers.forward(peer, ids)[0]())) / np.max(np.abs(logits))
            assert distance < TOLERANCES[name], f"{name}: logits differ by {distance}"
        times = seconds_in_turn(contenders, max(2, rounds // 3))
        yield from rate_rows(f"decode {name}, batch {batch}", "tokens/s", batch * new, times)


def _ids(vocab: int, batch: int, prompt: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, vocab, (batch, prompt), dtype=np.int32)


def _run_rows(directory: RunDirectory) -> Iterator[Row]:
    _, recipe = directory.read()
    model = load_run_model(directory.path)
    corpus = texts.open_texts(
        recipe, texts.open_sources(recipe), texts.recipe_tokenizer(recipe, directory), directory, Screen()
    )
    sums = eqx.filter_jit(training.evaluation_sums)
    first = None
    for name, form in FORMS.items():
        rounded = eqx.filter_jit(form)(model)
        mean, _ = corpus.validate(partial(sums, rounded), recipe.validation_batches, rows=(0, recipe.batch))
        bits = training.bits_per_byte(mean.loss, mean.bytes_per_token)
        first = first or bits
        note = f"{bits:.4f}; {_bytes(rounded):,} bytes of arrays"
        yield Row("validation text", name, bits, "bits a byte", bits / first, note)


def _bytes(model: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
