"""Batches of source and target texts for encoder-decoder models, against arrays by hand, and their loss."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from haste import put

from eqformer import models, nn
from eqformer.data import batch_pairs
from eqformer.training import loss_count, next_token_loss


SOURCES, TARGETS = [[5, 6, 7], [8]], [[1, 2], [3, 4, 9]]


def test_rows_begin_with_the_start_and_padding_counts_for_nothing():
    batch: Any = batch_pairs(SOURCES, TARGETS, start=11, seq=4, source_seq=3, first_example=6)
    assert batch.ids.tolist() == [[11, 1, 2, 0], [11, 3, 4, 9]] and batch.examples.tolist() == [6, 7]
    assert batch.targets.tolist() == [[1, 2, 0, 0], [3, 4, 9, 0]] and batch.weights.sum(1).tolist() == [2, 3]
    assert batch.source_ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.source_positions.tolist() == [[0, 1, 2], [0, -1, -1]]


@pytest.mark.grid
def test_the_loss_is_of_each_pair_alone():
    """The mean over target tokens, of logits of each pair in a call of its own without padding."""
    triple = lambda x: 3 * x if eqx.is_inexact_array(x) else x
    model = eqx.filter_jit(lambda: jax.tree.map(triple, models.build("t5-byte-200k", key=jax.random.key(0))))()
    batch = batch_pairs(SOURCES, TARGETS, start=0, seq=5, source_seq=6)
    total, count = eqx.filter_jit(next_token_loss)(model, batch)

    @eqx.filter_jit
    def log_chances(model, ids, source):
        read = nn.Source(source, nn.positions_like(source.shape))
        return jax.nn.log_softmax(model(ids, nn.with_source(nn.positions_like(ids.shape), read))[0][0])

    def nats(source, target):
        chances = np.asarray(log_chances(model, put([[0, *target[:-1]]], np.int32), put([source], np.int32)))
        return -sum(float(chances[place, wanted]) for place, wanted in enumerate(target))

    each = [*map(nats, SOURCES, TARGETS)]
    mean = sum(each) / 5
    assert abs(float(total) / float(loss_count(count)) / mean - 1) < 1e-5
    assert abs((nats(SOURCES[1], TARGETS[0]) + each[1]) / 5 / mean - 1) > 1e-4  # of the other's source


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq": 2}, r"batch_pairs\(targets\): text 1 has 3 ids, and a row holds 1 to 2; .*a larger seq"),
        ({"source_seq": 2}, r"batch_pairs\(sources\): text 0 has 3 ids, .* a larger source_seq"),
        ({"sources": [[1], []]}, r"batch_pairs\(sources\): text 1 has 0 ids"),
        ({"targets": [[1]]}, "batch_pairs: 2 sources and 1 targets; each source needs a target"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"sources": SOURCES, "targets": TARGETS, "start": 0, "seq": 4, "source_seq": 4} | change
    with pytest.raises(ValueError, match=message):
        batch_pairs(**given)


def test_segments_are_of_both_or_of_neither():
    batch, none = batch_pairs(SOURCES, TARGETS, start=0, seq=4, source_seq=4), np.zeros((2, 4), np.int32)
    fields = {name: getattr(batch, name) for name in ("ids", "targets", "weights", "examples", "source_ids")}
    with pytest.raises(ValueError, match="a target sees the source of its own segment, so packed rows need segments"):
        type(batch)(**fields, positions=none, segments=none, source_positions=none)
    type(batch)(**fields, positions=none, segments=none, source_positions=none, source_segments=none)
