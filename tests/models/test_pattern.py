"""Layers of several kinds are divided into the fewest periods, and every layer keeps its index."""

import dataclasses
from typing import Any

import equinox as eqx
import jax

from eqformer import models, nn
from eqformer.models import decoders, layer_attributes
from eqformer.models._weight_rules import layer_groups


def pattern(period, layers):
    return tuple("full" if (layer + 1) % period == 0 else "local" for layer in range(layers))


def test_layers_are_cut_into_periods_and_what_is_left_over():
    six = pattern(6, 6)
    assert decoders.runs(pattern(6, 26)) == (decoders.Run(six, 4, 0), decoders.Run(("local",), 2, 24))
    assert decoders.runs(pattern(6, 18)) == (decoders.Run(six, 3, 0),)
    assert decoders.runs(("full",) * 28 + ("local",) * 4) == (
        decoders.Run(("full",), 28, 0),
        decoders.Run(("local",), 4, 28),
    )
    assert decoders.runs(("a", "b", "b")) == (decoders.Run(("a",), 1, 0), decoders.Run(("b",), 2, 1))


def test_layers_get_kinds_of_their_own_type():
    """Since 1 == True, divisions of layers of kind 1 and of kind True must not be cached as one."""
    for kinds in ((1, 1, 0, 0), (True, True, False, False)):
        divided = decoders.runs(kinds)
        assert [(run.periods, run.first) for run in divided] == [(2, 0), (2, 2)]
        assert [type(kind) for run in divided for kind in run.kinds] == [type(kinds[0])] * 2
    mixture: Any = models.preset("hunyuan-moe-byte-500k")
    hybrid: Any = models.preset("lfm2-byte-200k")
    models.shapes(dataclasses.replace(mixture, layers=3, top_ks=(1, 1, 1)))
    models.shapes(dataclasses.replace(hybrid, layers=3, attention_layers=(0, 1, 2)))  # its `block` takes a bool


def test_every_layer_has_one_place_of_its_kind():
    kinds = pattern(6, 26)
    windows = tuple(layer for layer, kind in enumerate(kinds) if kind == "local")
    config = models.Gemma3Config(9, 8, 26, heads=2, kv_heads=1, mlp=8, head_dim=4, window_layers=windows)
    model = eqx.filter_eval_shape(lambda: models.build(config, key=jax.random.key(0)))
    blocks: dict[int, Any] = {layer: where(model) for _, where, layers in layer_groups(model) for layer in layers}
    assert sorted(blocks) == list(range(26))
    assert all((blocks[n].mixer.layer.mask.window is None) == (kind == "full") for n, kind in enumerate(kinds))


def test_layers_that_stand_together_are_not_parted():
    """Though fewer blocks would be traced: a later turn would read what the first one has left."""
    plain = ("first", "reads", "reads", "leaves", "reads", "reads", "leaves", "reads")
    assert any(run.periods > 1 and run.kinds[0] == "reads" for run in decoders.runs(plain))
    both = decoders.Together(("leaves", "reads", "reads"))
    runs = decoders.runs(("first", both, both, decoders.Together(("leaves", "reads"))))
    assert [(run.kinds, run.periods) for run in runs][1] == ((both,), 2)
    numbers: Any = models.preset("glm-5-byte-500k")
    numbers = dataclasses.replace(numbers, layers=8, reading_layers=(2, 3, 5, 6))
    stacks = models.shapes(numbers).stacks
    assert [(len(stack), nn.shared_names_read(stack)) for stack in stacks] == [
        (1, frozenset()),
        (2, frozenset()),
        (1, frozenset()),
    ]
    period: Any = stacks[1].blocks
    blocks = period.blocks
    assert [(its.mixer.shares, its.mixer.reads) for its in blocks] == [("choice", None), *[(None, "choice")] * 2]


def test_layers_are_numbered_from_zero_and_counted_from_one():
    assert layer_attributes.every(4, 9) == (3, 7) and layer_attributes.all_but_every(4, 9) == (0, 1, 2, 4, 5, 6, 8)
