"""The benchmark of fine-tuning on conversations: all libraries are trained on the same conversations."""

import dataclasses
from importlib.util import find_spec

import jax
import pytest
from benchmarks import _peers, _tuning

from eqformer import models


def test_packed_rows_hold_complete_conversations():
    """Each conversation comes at most once, as it was, and most of a row is text."""
    conversations = _tuning.random_conversations()
    lengths = [len(ids) for ids in conversations]
    assert 20 <= min(lengths) < 60 and 200 < max(lengths) <= 250
    batches = _tuning.pack(conversations)
    expected = {ids.tobytes() for ids in conversations}
    packed = [ids.astype(conversations[0].dtype).tobytes() for batch in batches for ids in _tuning.unpack(batch)]
    assert expected.issuperset(packed) and len({*packed}) == len(packed) > 0.8 * len(conversations)
    positions = sum(batch.ids.size for batch in batches)
    assert 0.9 < sum(len(ids) for batch in batches for ids in _tuning.unpack(batch)) / positions < 1


@pytest.mark.grid
@pytest.mark.skipif(
    not _peers.are_installed() or not find_spec("peft") or not find_spec("trl"), reason="needs peft and TRL"
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # Read by peft.
def test_contenders_have_one_loss(monkeypatch, tmp_path):
    """Losses are equal however batches are made; without positions TRL's packed conversations attend to each other."""
    small = dataclasses.replace(_tuning.SMOLLM2, vocab=512, embed=144, layers=2, mlp=128)
    monkeypatch.setattr(_tuning, "SMOLLM2", small)
    monkeypatch.setattr(_tuning, "CONVERSATIONS", 24)
    monkeypatch.setattr(_tuning, "memory_rows", lambda works: iter(()))  # Its processes have the large model.
    folder = tmp_path / "model"
    models.save(models.build(small, key=jax.random.key(0)), folder, config=small)
    rows = list(_tuning.unlike_lengths(folder, 1))
    assert [row.name for row in rows] == ["eqformer, packed", "peft, padded by TRL", "peft, packed by TRL"]
    padding = [int(row.note.split("; ")[1].split("%")[0]) for row in rows]
    assert padding[2] == 0 < padding[0] < padding[1]

    batches = _peers.trl_batches

    def batches_without_positions(*args):
        return [
            ({name: value for name, value in inputs.items() if name != "position_ids"}, targets)
            for inputs, targets in batches(*args)
        ]

    monkeypatch.setattr(_peers, "trl_batches", batches_without_positions)
    with pytest.raises(AssertionError, match="first losses differ"):
        list(_tuning.unlike_lengths(folder, 1))
