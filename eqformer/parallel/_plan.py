"""One entry for all transforms: a mesh and choices, and how a plain model is laid out, checked and run by them."""

import dataclasses

import equinox as eqx

from .. import nn
from ._check_plan import check_choices, check_model, check_rows
from ._on_device import OnDevice
from ._placement import Placement


@dataclasses.dataclass(frozen=True)
class Plan(Placement):
    """How a model runs over a mesh: `Plan(mesh, zero=3, residual="sequence")`, by the choices of `Choices`.

    A plan takes and gives global arrays, laid out by its specs; what happens on each device happens inside one
    `filter_shard_map`, where `on_device(model)` does its work.
    """

    def __post_init__(self):
        check_choices(self)

    def check(self, model: nn.Transformer, *, rows: int, seq: int, group: int = 1) -> None:
        """Raise a `ValueError`, before anything is compiled, where model, rows or tokens do not fit the mesh.

        `group` is the batch's: so many rows stay together.
        """
        check_model(self, model)
        check_rows(self, model, rows, seq, group)

    def on_device(self, model: nn.Transformer) -> OnDevice:
        """What each device does with its slices of a model, which is given whole and may be of shapes."""
        return OnDevice(self, self.leaves(model), eqx.filter_eval_shape(lambda: model))
