"""How the tests compile: with no care for speed, since each program runs a few times, on any XLA that is installed."""

from typing import Any

from support.xla import as_flags, known


FAST: dict[str, Any] = known({"xla_backend_optimization_level": 0})
HASTE: dict[str, Any] = FAST | known({"xla_cpu_use_fusion_emitters": False})
FLAGS = as_flags(HASTE)
