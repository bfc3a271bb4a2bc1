"""Requests of unlike lengths that are continued together: `generation.Engine` beside transformers and llama.cpp."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from benchmarks import _llama_cpp, _peers
from benchmarks._measure import rate_rows, Row, seconds_in_turn
from eqformer import generation, models
from eqformer._prepare import last_level_cache
from eqformer.generation import Engine, Request


SMOLLM2 = models.LlamaConfig(vocab=49_152, embed=576, layers=30, heads=9, kv_heads=3, mlp=1536, tied=True)
CONFIGS = {"8 M": models.preset("llama-byte-8m"), "135 M": SMOLLM2}
COUNTS = (1, 8, 32)
CAPACITY = 256


def engine(rounds: int) -> Iterator[Row]:
    """New tokens a second of 1, 8 and 32 greedy requests of unlike lengths (8 M, and SmolLM2's shape of 135 M)."""
    for name, config in CONFIGS.items():
        assert isinstance(config, models.LlamaConfig)
        model = eqx.filter_jit(lambda key, config=config: models.build(config, key=key))(jax.random.key(0))
        platform, chip = jax.default_backend(), jax.devices()[0].device_kind
        peer = _peers.build_model(config, CAPACITY).eval() if _peers.are_installed() else None
        for count in COUNTS:
            requests, slots = make_requests(config.vocab, count), min(count, 16)
            fast = generation.unstack_for_platform(
                model, platform, chip, processor_cache=last_level_cache(), rows=slots, capacity=CAPACITY
            )
            ours = Engine(fast, slots=slots, capacity=CAPACITY, stride=16)
            prompts, new = [list(r.prompt) for r in requests], [r.max_new_tokens for r in requests]
            contenders: dict[str, Callable[[], Any]] = {"eqformer": lambda ours=ours, r=requests: list(ours.run(r))}
            if peer is not None:
                contenders["transformers, generate"] = _peers.padded(peer, prompts, new)
            if _llama_cpp.is_installed():
                context = _llama_cpp_context(config, slots)
                contenders["llama.cpp"] = lambda run=context.run, p=prompts, n=new: run(p, n)
            tokens = sum(request.max_new_tokens for request in requests)
            times = seconds_in_turn(contenders, max(2, rounds // 3))
            yield from rate_rows(f"engine, {name}, {count} requests", "tokens/s", tokens, times)


def make_requests(vocab: int, count: int) -> list[Request]:
    """Return requests with prompts of 8 to 120 ids and 8 to 96 new tokens; one alone has a prompt of 64 and 64 new."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 121, count) if count > 1 else [64]
    new = rng.integers(8, 97, count) if count > 1 else [64]
    return [Request(rng.integers(1, vocab, n).tolist(), int(m)) for n, m in zip(lengths, new)]


def _llama_cpp_context(config: models.LlamaConfig, slots: int) -> _llama_cpp.Context:
    """Return a context of llama.cpp of a model with these numbers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        _llama_cpp.write_model(path, config, CAPACITY)
        return _llama_cpp.Context(path, config.vocab, slots=slots, capacity=CAPACITY)
