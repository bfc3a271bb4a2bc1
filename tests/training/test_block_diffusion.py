"""Block diffusion: the noise of a batch, and its loss against the blocks of each document one by one, in float64."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import Batch, models, nn, training


BLOCK, MASK, VOCAB, SEQ = 4, 28, 29, 10
KEY = jax.random.key(7)
CONFIG = models.LlamaConfig(vocab=VOCAB, embed=8, layers=1, heads=2, kv_heads=1, mlp=12)
noised = eqx.filter_jit(
    lambda batch, key, least_noise=1e-3: training.noise_blocks(
        batch, key, mask_id=MASK, block=BLOCK, least_noise=least_noise
    )
)


def rows(count: int, seq: int = SEQ) -> Batch:
    """Rows of one text each."""
    ids = np.random.default_rng(0).integers(0, VOCAB - 1, (count, seq)).astype(np.int32)
    return Batch(ids, np.roll(ids, -1, 1), np.ones(ids.shape, np.float32), np.arange(count, dtype=np.int32))


def packed() -> Batch:
    """Two rows of two documents each, the second with padding."""
    positions = np.array([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 3, 4, -1, -1]], np.int32)
    segments = np.array([[0] * 6 + [1] * 4, [0] * 3 + [1] * 7], np.int32)
    return dataclasses.replace(rows(2), positions=positions, segments=segments)


def test_blocks_have_times_and_tokens_are_masked_by_them():
    count, seq = 64, 128
    batch = rows(count, seq)
    noisy = noised(batch, KEY)
    weights, ids = np.asarray(noisy.weights, np.float64), np.asarray(noisy.ids)
    assert np.array_equal(ids[:, seq:], batch.ids) and not weights[:, seq:].any()
    assert np.array_equal(noisy.targets, np.tile(batch.ids, 2))
    masked = ids[:, :seq] == MASK
    assert np.array_equal(weights[:, :seq] > 0, masked)
    assert np.array_equal(np.where(masked, 0, ids[:, :seq]), np.where(masked, 0, batch.ids))
    assert np.array_equal(np.asarray(noisy.positions), np.tile(np.arange(seq), (count, 2)))
    assert np.array_equal(np.asarray(noisy.segments), np.tile(np.repeat([-1, 0], seq), (count, 1)))
    by_block = weights[:, :seq].reshape(-1, BLOCK)
    times = np.array([1 / block.max() if block.any() else np.nan for block in by_block])
    for block in by_block[:200]:
        assert len(np.unique(block[block > 0])) <= 1
    # The number of masked tokens of a block of uniform time is uniform too: each of 0 to 4 in a fifth of the blocks.
    shares = np.bincount((by_block > 0).sum(1), minlength=BLOCK + 1) / len(by_block)
    assert np.allclose(shares, 1 / (BLOCK + 1), atol=0.04) and len(np.unique(times[~np.isnan(times)])) > 1000
    assert abs(weights[:, :seq].mean() - 1) < 0.1  # the mean of a mask over its probability


def test_noise_depends_on_the_example_and_the_index_alone():
    batch, packed_rows = rows(4), packed()
    noisy, other = noised(batch, KEY), noised(batch, jax.random.key(8))
    order = np.array([2, 0, 3, 1])
    again = noised(jax.tree.map(lambda x: x[order], batch), KEY)
    assert np.array_equal(again.weights, np.asarray(noisy.weights)[order])
    assert not np.array_equal(other.weights, noisy.weights)
    weights = np.asarray(noised(packed_rows, KEY).weights)[:, :SEQ]
    assert not weights[np.asarray(packed_rows.positions) < 0].any()
    for row, block in ((0, [0, 1, 2, 3]), (0, [4, 5]), (0, [6, 7, 8, 9]), (1, [0, 1, 2]), (1, [3, 4, 5, 6]), (1, [7])):
        assert len(np.unique(weights[row, block][weights[row, block] > 0])) <= 1


def documents(batch: Batch) -> list[tuple[int, np.ndarray]]:
    """The row of each document, and the indices of its tokens."""
    found = []
    for row, (positions, segments) in enumerate(zip(np.asarray(batch.positions), np.asarray(batch.segments))):
        found += [(row, np.flatnonzero((segments == s) & (positions >= 0))) for s in np.unique(segments)]
    return found


def literal(model, batch: Batch, noisy: Batch) -> float:
    """The sum of -log p / t, from a row for each block: its clean past and its noisy tokens, under the block mask."""
    all_ids, weights, targets = (np.asarray(x) for x in (noisy.ids, noisy.weights, batch.ids))
    blocks, read = [], []
    for row, indices in documents(batch):
        for start in range(0, len(indices), BLOCK):
            past, here = indices[:start], indices[start : start + BLOCK]
            blocks.append((row, here, start))
            read.append(np.concatenate([targets[row, past], all_ids[row, here]]))
    ids = np.stack([np.pad(row, (0, SEQ - len(row))) for row in read]).astype(np.int32)
    positions = np.stack([np.where(np.arange(SEQ) < len(row), np.arange(SEQ), -1) for row in read]).astype(np.int32)
    logits = np.asarray(eqx.filter_jit(lambda *rows: model(*rows)[0])(ids, nn.Tokens(jnp.asarray(positions))))
    nats = np.log(np.exp(logits).sum(-1))
    return sum(
        weights[row, index] * (nats[number, place] - logits[number, place, targets[row, index]])
        for number, (row, here, start) in enumerate(blocks)
        for place, index in enumerate(here, start)
    )


def test_the_loss_is_that_of_each_block_after_its_clean_past():
    with jax.enable_x64(True):
        precision = nn.Precision("float64", "float64")
        build = eqx.filter_jit(lambda key: precision.apply(nn.with_blocks(models.build(CONFIG, key=key), BLOCK)))
        model, batch = build(jax.random.key(0)), dataclasses.replace(packed(), weights=np.ones((2, SEQ)))
        noisy, loss = noised(batch, KEY), eqx.filter_jit(training.block_diffusion_loss)
        total, count = loss(model, noisy)
        expected = literal(model, batch, noisy)
        assert abs(total - expected) < 1e-10 * expected and float(training.loss_count(count)) == 18
        # The control: noisy copies that see the clean tokens of their own document alone, their own ids among them.
        leaking = dataclasses.replace(noisy, segments=jnp.abs(jnp.asarray(noisy.segments)))
        assert abs(loss(model, leaking)[0] - expected) > 1e-3 * expected


def test_only_answers_are_masked_and_counted():
    """Tokens 3 to 5 and 8 to 9 of the first row are answers, and tokens 4 to 7 of the second row."""
    batch = packed()
    answers = np.zeros(batch.ids.shape, bool)
    answers[0, [3, 4, 5, 8, 9]] = answers[1, [4, 5, 6, 7]] = True
    batch = dataclasses.replace(batch, weights=np.roll(answers, -1, 1).astype(np.float32))
    noise = eqx.filter_jit(
        lambda batch, key, answers_only: training.noise_blocks(
            batch, key, mask_id=MASK, block=BLOCK, answers_only=answers_only
        )
    )
    of_answers, of_all = noise(batch, KEY, True), noise(batch, KEY, False)
    # The random numbers are the same, and copies of other tokens are clean.
    expected = np.where(answers, np.asarray(of_all.ids)[:, :SEQ], batch.ids)
    assert np.array_equal(np.asarray(of_answers.ids)[:, :SEQ], expected) and (expected == MASK).any()
    expected = np.where(answers, np.asarray(of_all.weights)[:, :SEQ], 0)
    # The two programs may round differently.
    assert np.asarray(of_answers.weights[:, :SEQ]) == pytest.approx(expected, rel=1e-6)
    loss = eqx.filter_jit(training.block_diffusion_loss)
    model = eqx.filter_jit(lambda key: nn.with_blocks(models.build(CONFIG, key=key), BLOCK))(jax.random.key(0))
    total, count = loss(model, of_answers)
    assert float(total) == pytest.approx(literal(model, batch, of_answers), rel=1e-5)
    assert float(training.loss_count(count)) == 9
    total_of_all, count_of_all = loss(model, of_all)
    assert float(training.loss_count(count_of_all)) == 18 and float(total_of_all) > 1.01 * float(total)


def test_models_and_batches_that_cannot_learn_are_refused():
    model = eqx.filter_eval_shape(models.build, CONFIG, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"check_block_diffusion\(model\): the masks of the model"):
        training.check_block_diffusion(model)
    assert training.check_block_diffusion(nn.with_blocks(model, BLOCK)) == BLOCK
    assert nn.with_causal_masks(nn.with_blocks(model, BLOCK)) == model
    with pytest.raises(ValueError, match="the batch has no noisy copies"):
        training.block_diffusion_loss(model, rows(2))
    for options in ({"block": 0}, {"least_noise": 0.0}, {"least_noise": 1.0}, {"mask_id": -1}):
        with pytest.raises(ValueError, match=r"noise_blocks\(mask_id=.*at least 1, and least_noise must be above 0"):
            training.noise_blocks(rows(2), KEY, **{"mask_id": MASK, "block": BLOCK, **options})
