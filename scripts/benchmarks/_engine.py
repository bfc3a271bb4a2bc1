"""Rows about requests of different lengths in one batch: `generation.Engine` beside transformers and llama.cpp."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
SLOTS = 16


def engine(rounds: int) -> Iterator[Row]:
    """New tokens a second of 1, 8 and 32 greedy requests of different lengths; 8 M and 135 M parameters."""
    for name, config in CONFIGS.items():
        assert isinstance(config, models.LlamaConfig)
        model = eqx.filter_jit(lambda key, config=config: models.build(config, key=key))(jax.random.key(0))
        platform, chip = jax.default_backend(), jax.devices()[0].device_kind
        peer = _peers.build_model(config, CAPACITY).eval() if _peers.are_installed() else None
        with ExitStack() as stack:
            llama_cpp = None
            if _llama_cpp.is_installed():
                llama_cpp = stack.enter_context(_llama_cpp.Model(config, CAPACITY))
            for count in COUNTS:
                requests, slots = make_requests(config.vocab, count), min(count, SLOTS)
                fast = generation.unstack_for_platform(
                    model, platform, chip, processor_cache=last_level_cache(), rows=slots, capacity=CAPACITY
                )
                ours = Engine(fast, slots=slots, capacity=CAPACITY, stride=16)
                times = _time_contenders(ours, requests, peer, llama_cpp, max(2, rounds // 3))
                tokens = sum(request.max_new_tokens for request in requests)
                yield from rate_rows(f"engine, {name}, {count} requests", "tokens/s", tokens, times)


def _time_contenders(
    ours: Engine, requests: list[Request], peer: Any, llama_cpp: _llama_cpp.Model | None, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each contender, and free llama.cpp's slots."""
    prompts, new = [list(r.prompt) for r in requests], [r.max_new_tokens for r in requests]
    contenders: dict[str, Callable[[], Any]] = {"eqformer": lambda: list(ours.run(requests))}
    if peer is not None:
        contenders["transformers, generate"] = _peers.padded(peer, prompts, new)
    with ExitStack() as stack:
        if llama_cpp is not None:
            threads, slots = _llama_cpp.fastest_threads(llama_cpp), min(len(requests), SLOTS)
            context = _llama_cpp.Context(llama_cpp, slots=slots, capacity=CAPACITY, threads=threads)
            stack.enter_context(context)
            contenders[f"llama.cpp, threads: {threads}"] = lambda: context.run(prompts, new)
        return seconds_in_turn(contenders, rounds)


def make_requests(vocab: int, count: int) -> list[Request]:
    """Return requests with prompts of 8 to 120 ids and 8 to 96 new tokens; a single request has 64 of both."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 121, count) if count > 1 else [64]
    new = rng.integers(8, 97, count) if count > 1 else [64]
    return [Request(rng.integers(1, vocab, n).tolist(), int(m)) for n, m in zip(lengths, new)]
