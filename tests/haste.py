"""How the tests compile: with no care for speed, since each program runs a few times, on any XLA that is installed."""

from typing import Any

from support.xla import as_flags, known


# One module of code a program: making and joining 32 takes a fifth of the time.
FAST: dict[str, Any] = known({"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1})
HASTE: dict[str, Any] = FAST | known({"xla_cpu_use_fusion_emitters": False})
FLAGS = as_flags(HASTE)
