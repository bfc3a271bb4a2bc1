"""The benchmark of recipes: its rows have the final losses and the seconds of the training commands."""

import dataclasses
import math

import pytest
from benchmarks import _learning, _learning_peers, _peer_optimizers, _peers

from eqformer.recipes import find_recipe


TINY = ("--model.embed", "32", "--model.layers", "2", "--model.heads", "2", "--model.kv-heads", "1")
SHORT = ("--seq", "32", "--batch", "2", "--validation-batches", "1", "--sample-every", "0", "--text.validation", "0.5")


@pytest.mark.grid
def test_each_recipe_has_a_row_of_losses_and_a_row_of_seconds(monkeypatch, tmp_path):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # One device.
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(f"{index} and one and two and three\n" * 100)
    flags = ("--recipe", "llama", "--data", str(tmp_path), *TINY, *SHORT)
    monkeypatch.setattr(_learning, "SEEDS", (0, 1))
    monkeypatch.setattr(_learning, "RUNS", {"longer": (*flags, "--steps", "20"), "shorter": (*flags, "--steps", "1")})
    rows = {row.name: row for row in _learning.learning(1)}
    assert list(rows) == ["longer", "... longer", "shorter", "... shorter"]
    longer, shorter = rows["longer"].value, rows["shorter"].value
    assert longer is not None and shorter is not None
    assert longer < shorter < math.log2(256) + 1  # Ids that are equally likely have 8 bits.
    assert rows["... longer"].ratio == 1 and all(rows[name].unit == "s" for name in ("... longer", "... shorter"))


@pytest.mark.grid
@pytest.mark.skipif(not _peers.are_installed(), reason="needs PyTorch and transformers")
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_a_peer_learns_the_same(name, tmp_path):
    """Ten steps from the same weights on the same batches; one step fewer gives another loss."""
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(f"{index} and one and two and three\n" * 100)
    recipe = find_recipe(name)
    model = dataclasses.replace(recipe.model, embed=32, layers=1, heads=2, kv_heads=1, mlp=32)
    text = dataclasses.replace(recipe.text, validation=0.5)
    small = {"model": model, "text": text, "data": tmp_path, "seq": 32, "batch": 4, "validation_batches": 1}
    recipe = dataclasses.replace(recipe, steps=10, validate_every=10, sample_every=0, **small)
    outcomes = _learning_peers.train_all(recipe)
    assert list(outcomes) == ["eqformer", *(f"PyTorch, {name}" for name in _peer_optimizers.OPTIMIZERS)]
    ours, theirs = outcomes["eqformer"], outcomes["PyTorch, the same settings"]
    assert ours == pytest.approx(theirs, rel=0.02)
    assert len({round(bits, 3) for bits in outcomes.values()}) >= 4  # Other settings learn other things.
    assert all(math.isfinite(bits) for bits in outcomes.values())
    shorter = _learning_peers.train_all(dataclasses.replace(recipe, steps=5, validate_every=5), {})
    assert shorter["eqformer"] > 1.05 * ours
