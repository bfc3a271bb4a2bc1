"""Write processor times of calls and training steps to a file: `python _check_costs.py {none,own,hook} FILE.json`.

This file runs in a separate process, because an import hook must be installed before eqformer is imported.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def main(kind: str, file: str) -> None:
    """Measure with a kind of shape checks: "none", "own" (of eqformer's public calls), or "hook" (import hook too)."""
    if kind == "hook":
        from jaxtyping import install_import_hook

        install_import_hook("eqformer", "beartype.beartype")
    from eqformer import _annotation_checks

    if kind == "none":
        _annotation_checks.check_arguments = lambda *args, **options: None
    Path(file).write_text(json.dumps(_seconds()), encoding="utf-8")


def _seconds() -> dict[str, float]:
    """Return the seconds of each call, by name."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from benchmarks import _ours
    from eqformer import models, nn

    key, x = jax.random.key(0), jnp.ones((8, 64))
    linear = nn.Linear("embed -> mlp", embed=64, mlp=64, key=key)
    attention = eqx.filter_jit(nn.Attention(embed=64, heads=4, head_dim=16, mask=nn.causal(), key=key))
    config = models.preset("llama-byte-1m")
    batch = _ours.random_batch(config.vocab, 2, 64)
    step, state = _ours.step_and_state(config)
    traced = _least(lambda: step.lower(state, batch), calls=1, before=jax.clear_caches)
    compiled = _ours.train_step(config, batch)
    return {
        "nn.Linear, not compiled": _least(lambda: jax.block_until_ready(linear(x)), calls=100),
        "nn.Attention under filter_jit": _least(lambda: jax.block_until_ready(attention(x)[0]), calls=100),
        "training step, traced": traced,
        "training step, later ones": _least(compiled, calls=5),
    }


def _least(call: Callable[[], object], *, calls: int, before: Callable[[], object] = lambda: None) -> float:
    """Return the least processor time of a call, in seconds; a first call is not measured.

    There are 7 measurements of `calls` calls each or, if `calls` is 1, which is for slow calls, 3 measurements.
    """
    call()
    times = []
    for _ in range(7 if calls > 1 else 3):
        before()
        start = time.process_time()
        for _ in range(calls):
            call()
        times.append((time.process_time() - start) / calls)
    return min(times)


if __name__ == "__main__":
    main(*sys.argv[1:])
