"""Layers of several kinds are cut into the fewest periods, and every layer has its place."""

from eqformer.models.families._pattern import all_but_every, every, places, Run, runs


def pattern(period, layers):
    return tuple("full" if (layer + 1) % period == 0 else "local" for layer in range(layers))


def test_layers_are_cut_into_periods_and_what_is_left_over():
    six = pattern(6, 6)
    assert runs(pattern(6, 26)) == (Run(six, 4, 0), Run(("local",), 2, 24))
    assert runs(pattern(6, 18)) == (Run(six, 3, 0),)
    assert runs(("full",) * 28 + ("local",) * 4) == (Run(("full",), 28, 0), Run(("local",), 4, 28))
    assert runs(("a", "b", "b")) == (Run(("a",), 1, 0), Run(("b",), 2, 1))


def test_every_layer_has_one_place_of_its_kind():
    kinds = pattern(6, 26)
    held = sorted(layer for _, layers in places(kinds) for layer in layers)
    assert held == list(range(26))
    assert all(len({kinds[layer] for layer in layers}) == 1 for _, layers in places(kinds))


def test_layers_are_numbered_from_zero_and_counted_from_one():
    assert every(4, 9) == (3, 7) and all_but_every(4, 9) == (0, 1, 2, 4, 5, 6, 8)
