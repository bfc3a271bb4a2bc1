"""Published models at the scale that they are trained at, by name of model and accelerators: for scripts/plan.py.

None has been run: each is planned and compiled (docs/accelerators-planning.md). By AdamW, in float32 with products in
bfloat16; moments of 8 bits, on the host, where wide ones do not fit.
"""

from typing import Any

from eqformer.models import preset
from eqformer.nn import Execution, Precision
from eqformer.parallel import ParallelConfig
from eqformer.training import Optimization

from ._recipe import Mesh, Recipe


_ALL_AGAIN = Execution(remat="full")
_ADAMW = Optimization(name="adamw", learning_rate=3e-4)
_NARROW = Optimization(name="adamw", learning_rate=3e-4, moments="8bit")


def _of(
    model: str,
    mesh: Mesh,
    batch: int,
    seq: int,
    execution: Execution = _ALL_AGAIN,
    optimizer: Optimization = _ADAMW,
    **choices: Any,
) -> Recipe:
    return Recipe(
        model=preset(model),
        batch=batch,
        seq=seq,
        optimizer=optimizer,
        precision=Precision("float32", "bfloat16"),
        execution=execution,
        mesh=mesh,
        plan=ParallelConfig(zero=3, **choices),
    )


_TOKENS: dict[str, Any] = {"residual": "sequence"}

# For each, the topology to plan it on and the recipe.
LARGE: dict[str, tuple[str, Recipe]] = {
    "llama-3-8b-v5e-256": ("v5e:16x16", _of("llama-3-8b", Mesh(fsdp=256), 256, 4096)),
    "llama-3-8b-h100-8": ("h100:8", _of("llama-3-8b", Mesh(fsdp=8), 16, 4096)),
    "llama-3-8b-h100-64": ("h100:8x8", _of("llama-3-8b", Mesh(fsdp=64), 128, 4096, Execution())),
    "llama-3-70b-v5p-512": ("v5p:8x8x8", _of("llama-3-70b", Mesh(fsdp=512), 512, 8192)),
    "llama-3-70b-h100-128": ("h100:8x16", _of("llama-3-70b", Mesh(fsdp=16, tensor=8), 32, 8192, **_TOKENS)),
    "llama-3.1-405b-v5p-2048": (
        "v5p:8x16x16",
        _of("llama-3.1-405b", Mesh(fsdp=256, tensor=8), 512, 8192, **_TOKENS),
    ),
    "mixtral-8x7b-v5p-128": ("v5p:4x4x8", _of("mixtral-8x7b", Mesh(fsdp=16, expert=8), 128, 4096)),
    "deepseek-v3-v5p-2048": ("v5p:8x16x16", _of("deepseek-v3", Mesh(fsdp=32, expert=64), 2048, 4096)),
    "deepseek-v3-tpu7x-512": ("tpu7x:8x8x8", _of("deepseek-v3", Mesh(fsdp=32, expert=32), 1024, 4096)),
    "deepseek-v3-h100-256": (
        "h100:8x32",
        _of("deepseek-v3", Mesh(fsdp=8, expert=32), 256, 4096, optimizer=_NARROW, optimizer_memory="pinned_host"),
    ),
    "qwen3-30b-a3b-h100-64": ("h100:8x8", _of("qwen3-30b-a3b", Mesh(fsdp=8, expert=8), 256, 4096)),
}
