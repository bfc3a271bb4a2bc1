"""An Equinox-based, modular transformer zoo for JAX: one model, any mesh, the same numbers.

Import the rooms: `eqformer.nn`, `eqformer.models`, `eqformer.data`, `eqformer.parallel`, `eqformer.training`,
`eqformer.generation`, `eqformer.planning`.
"""

from ._failures import reason_and_fix as reason_and_fix
from ._shapes import Batch as Batch, LEGEND as LEGEND


__version__ = "0.1.0"  # the one place that says so: the build reads it here
