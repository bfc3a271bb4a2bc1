"""Published models: how fast a folder is read, and how fast families run beside transformers with the same weights."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _peers
from benchmarks._formats import formats
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import generation, models, nn


LARGE = models.LlamaConfig(vocab=32_000, embed=1024, layers=18, heads=16, kv_heads=8, mlp=2816, tied=True)
SHAPE: dict[str, Any] = {"vocab": 8192, "embed": 512, "layers": 6, "heads": 8, "kv_heads": 4}
FAMILIES: dict[str, models.ModelConfig] = {
    "Llama": models.LlamaConfig(**SHAPE, mlp=1536),
    "Qwen3": models.Qwen3Config(**SHAPE, mlp=1536, head_dim=64),
    "Gemma 2": models.Gemma2Config(
        **SHAPE, mlp=1536, head_dim=64, query_scalar=64, window_layers=(0, 2, 4), window=128
    ),
    "Mixtral": models.MixtralConfig(**SHAPE, mlp=768, experts=8, top_k=2),
}
ROWS, SEQ = 4, 256


def zoo(rounds: int) -> Iterator[Row]:
    """Reading safetensors, in fewer bits too, tokens a second of forward passes, and milliseconds to a first token."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _loading(Path(folder), rounds)
        yield from formats(Path(folder), rounds)
        for name, config in FAMILIES.items():
            yield from _forward(Path(folder) / name, name, config, rounds)


def _loading(folder: Path, rounds: int) -> Iterator[Row]:
    models.save(models.build(LARGE, key=jax.random.key(0)), folder / "large", config=LARGE)
    (file,) = (folder / "large").glob("*.safetensors")
    size = file.stat().st_size

    def raw() -> None:
        with open(file, "rb", buffering=0) as opened:
            opened.readinto(np.empty(size, np.uint8).data)

    contenders: dict[str, Callable[[], Any]] = {
        "eqformer": lambda: jax.block_until_ready(eqx.filter(models.load(folder / "large"), eqx.is_array)),
        "the file's bytes, read into memory": raw,
    }
    if _peers.are_installed():
        contenders["transformers, from_pretrained"] = lambda: _peers.read(folder / "large")
    yield from rate_rows(f"load {size / 1e9:.2f} GB", "MB/s", size / 1e6, seconds_in_turn(contenders, rounds))
    file.unlink()


def _forward(folder: Path, name: str, config: models.ModelConfig, rounds: int) -> Iterator[Row]:
    models.save(models.build(config, key=jax.random.key(0)), folder, config=config)
    model = models.load(folder)
    ids = np.random.default_rng(0).integers(1, SHAPE["vocab"], (ROWS, SEQ), dtype=np.int32)
    run = eqx.filter_jit(lambda model, ids: model(ids)[0])
    apart = generation.unstack_layers(model)
    forward: dict[str, Callable[[], Any]] = {
        "eqformer": lambda: run(model, jnp.asarray(ids)).block_until_ready(),
        "eqformer, layers apart": lambda: run(apart, jnp.asarray(ids)).block_until_ready(),
    }
    latency: dict[str, Callable[[], Any]] = {
        "eqformer": _first_token(model, ids),
        "eqformer, layers apart": _first_token(apart, ids),
    }
    if _peers.are_installed():
        theirs, their_first = _peers.forward(_peers.read(folder), ids)
        forward["transformers"], latency["transformers"] = theirs, their_first
        distance = np.max(np.abs(np.asarray(run(model, jnp.asarray(ids))) - theirs()))
        assert distance < 1e-3, f"{name}: logits differ by {distance}"
    yield from rate_rows(f"forward, {name}", "tokens/s", ROWS * SEQ, seconds_in_turn(forward, rounds))
    yield from rate_rows(f"first token, {name}", "a second", 1, seconds_in_turn(latency, rounds))


def _first_token(model: nn.Transformer, ids: np.ndarray) -> Callable[[], int]:
    greedy = generation.sampling(temperature=0)
    return lambda: next(
        generation.stream(model, ids[0], max_new_tokens=8, stride=1, transforms=greedy, key=jax.random.key(0))
    )
