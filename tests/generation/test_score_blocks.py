"""Scores of block diffusion: the bound as an integral over times of whole rows, read without a cache, in float64."""

import functools
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_blocks import CONFIG, MASK, VOCAB

from eqformer import generation, models, nn
from eqformer.generation import _score_blocks
from eqformer.generation._denoise import choose_filled, DenoisingRule


BLOCK, WIDTH = 3, 12
PROMPTS, NEW = [[3, 1, 4, 1], [9, 2, 6], [7]], [[5, 9, 2, 6, 5, 3], [5], [8, 9, 7, 9]]
GREEDY = generation.sampling(temperature=0)


@functools.cache
def model(dtype: str = "float32") -> nn.LanguageModel:
    """A model of sharp distributions, whose blocks have three tokens."""

    def build(key):
        model = nn.with_blocks(models.build(CONFIG, key=key), BLOCK)
        return nn.Precision(dtype, dtype).apply(jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, model))

    return eqx.filter_jit(build)(jax.random.key(0))


@eqx.filter_jit
def read(model, ids, positions):
    return jax.nn.log_softmax(model(ids, nn.Tokens(positions))[0])


def literal(model, prompt: list[int], new: list[int]) -> np.ndarray:
    """Each new token's part of the integral over `t` of its masked log-probabilities divided by `t`."""
    ids, parts = np.asarray(prompt + new), np.zeros(len(prompt + new))
    nodes, node_weights = np.polynomial.legendre.leggauss(6)  # exact, since the integrand is a polynomial in t
    times = (nodes + 1) / 2
    cases = []
    for start in range(len(prompt) // BLOCK * BLOCK, len(ids), BLOCK):
        stop = min(start + BLOCK, len(ids))
        here = range(max(start, len(prompt)), stop)
        for size in range(1, len(here) + 1):
            for masked in itertools.combinations(here, size):
                density = times**size * (1 - times) ** (len(here) - size) / times
                cases.append((stop, list(masked), float(density @ node_weights) / 2))
    rows, positions = np.zeros((len(cases), WIDTH), np.int32), np.full((len(cases), WIDTH), -1, np.int32)
    for row, place, (stop, masked, _) in zip(rows, positions, cases):
        row[:stop], place[:stop] = ids[:stop], np.arange(stop)
        row[masked] = MASK
    log_probs = np.asarray(read(model, jnp.asarray(rows), jnp.asarray(positions)))
    for table, (_, masked, weight) in zip(log_probs, cases):
        parts[masked] += weight * table[masked, ids[masked]]
    return parts[len(prompt) :]


def literal_greedy(model, prompt: list[int], new: list[int]) -> list[bool]:
    """Whether each new token is filled in, if the likeliest token of its block is filled in one after another."""
    ids, greedy = np.asarray(prompt + new), []
    for start in range(len(prompt) // BLOCK * BLOCK, len(ids), BLOCK):
        stop = min(start + BLOCK, len(ids))
        row, masked = np.zeros((1, WIDTH), np.int32), list(range(max(start, len(prompt)), stop))
        first = masked[0]
        row[0, :stop] = ids[:stop]
        row[0, masked] = MASK
        positions = np.where(np.arange(WIDTH) < stop, np.arange(WIDTH), -1)[None].astype(np.int32)
        while masked:
            log_probs = np.array(read(model, jnp.asarray(row), jnp.asarray(positions))[0])
            log_probs[:, MASK] = -np.inf
            log_probs -= np.log(np.exp(log_probs).sum(-1, keepdims=True))
            place = max(masked, key=lambda place: log_probs[place].max())
            row[0, place] = log_probs[place].argmax()
            masked.remove(place)
        greedy += (row[0, first:stop] == ids[first:stop]).tolist()
    return greedy


@functools.cache
def exact_scores() -> list[generation.TokenScores]:
    with jax.enable_x64(True):
        return generation.score_blocks(model("float64"), PROMPTS, NEW, mask_id=MASK, samples=7)


@pytest.mark.grid
def test_all_choices_of_masked_tokens_give_the_integral_over_times():
    with jax.enable_x64(True):
        exact, scores = model("float64"), exact_scores()
        for score, prompt, new in zip(scores, PROMPTS, NEW, strict=True):
            np.testing.assert_allclose(score.log_probabilities, literal(exact, prompt, new), rtol=1e-12)
            assert score.is_greedy.tolist() == literal_greedy(exact, prompt, new)
            assert score.alternative_ids.shape == (len(new), 0)
        # The control: another prompt.
        assert not np.allclose(literal(exact, [3, 1, 4, 2], NEW[0]), scores[0].log_probabilities, rtol=1e-2)


def estimate(prompts=PROMPTS, new=NEW, seed: int = 0) -> list[generation.TokenScores]:
    return generation.score_blocks(model(), prompts, new, mask_id=MASK, samples=6, seed=seed, batch_size=3)


@pytest.mark.grid
def test_random_choices_have_the_bound_as_their_mean():
    sums = lambda scores: np.array([score.log_probabilities.sum() for score in scores])
    estimates, bounds = np.stack([sums(estimate(seed=seed)) for seed in range(64)]), sums(exact_scores())
    assert np.array_equal(estimates[3], sums(estimate(seed=3))) and not np.array_equal(estimates[3], estimates[4])
    errors = np.abs(estimates.mean(0) - bounds) / np.maximum(estimates.std(0) / 8, 1e-5)
    assert (errors < 4).all() and (estimates.std(0)[[0, 2]] > 0.01).all()
    # A single token has one choice, so its estimate is exact.
    np.testing.assert_allclose(estimates[:, 1], bounds[1], rtol=1e-5)
    # A row's score does not depend on the batch.
    alone = estimate(PROMPTS[2:], NEW[2:])[0].log_probabilities
    np.testing.assert_allclose(alone, estimate()[2].log_probabilities, rtol=1e-4)
    assert generation.score_blocks(model(), [], [], mask_id=MASK) == []


@pytest.mark.grid
def test_texts_of_generate_blocks_are_greedy_and_other_texts_are_not():
    text = generation.generate_blocks(
        model(), [PROMPTS[1]], max_new_tokens=6, mask_id=MASK, transforms=GREEDY, key=jax.random.key(0)
    )
    new = text.new_ids()[0]
    changed = [*new[:4], (new[4] + 1) % MASK, new[5]]
    one, other = estimate([PROMPTS[1]] * 2, [new, changed])
    assert one.is_greedy.all() and other.is_greedy[:4].all() and not other.is_greedy[4]


@pytest.mark.parametrize("first", [0, 1])
def test_passes_fill_tokens_whose_priority_is_nan(first):
    """Each pass fills a token, also if all priorities are NaN and some tokens of the block are not masked."""
    rule, masked = DenoisingRule(MASK, 3, 3, "confidence", jnp.asarray(1.0)), np.arange(3)[None] >= first
    priorities = jnp.full((1, 3), jnp.nan)
    for number in range(3):
        is_filled = choose_filled(jnp.asarray(masked), priorities, priorities, jnp.asarray(number), rule)
        assert not np.any(is_filled & ~masked) and (np.any(is_filled) or not masked.any())
        masked &= ~np.asarray(is_filled)
    assert not masked.any()


@pytest.mark.grid
def test_nan_logits_give_nan_scores():
    """Before, the loop of greedy passes did not end if a block began with tokens of the prompt."""
    broken = eqx.tree_at(lambda model: model.norm.weight, model(), jnp.full(CONFIG.embed, jnp.nan))
    scores = generation.score_blocks(broken, PROMPTS, NEW, mask_id=MASK)
    assert all(np.isnan(score.log_probabilities).all() for score in scores)


@pytest.mark.parametrize("batch_size, sizes", [(None, [3]), (64, [3]), (2, [2, 2])])
def test_only_the_last_of_several_batches_is_padded(batch_size, sizes, monkeypatch):
    read_sizes = []

    def score_batch(model, rows, *options):
        read_sizes.append(len(rows.ids))
        return np.zeros(rows.ids.shape, np.float32), np.zeros(rows.ids.shape, bool)

    monkeypatch.setattr(_score_blocks, "_score_batch", score_batch)
    scores = generation.score_blocks(model(), PROMPTS, NEW, mask_id=MASK, batch_size=batch_size)
    assert read_sizes == sizes and [len(score.log_probabilities) for score in scores] == [6, 1, 4]
    assert scores[0].alternative_log_probabilities.shape == (6, 0)


def test_bad_input_is_refused():
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"samples": 0}, r"score_blocks\(samples=0\): samples must be at least 1"),
        ({"batch_size": 0}, r"score_blocks\(batch_size=0\)"),
        ({"mask_id": VOCAB}, r"score_blocks\(mask_id=29, .*must be one of the model's 29 ids"),
    ]
    for options, words in wrong:
        with pytest.raises(ValueError, match=words):
            generation.score_blocks(model(), PROMPTS, NEW, **{"mask_id": MASK, **options})
    with pytest.raises(ValueError, match=r"score_blocks\(model, prompts, continuations\): prompt 0 has 0 ids"):
        generation.score_blocks(model(), [[]], [[1]], mask_id=MASK)
    with pytest.raises(ValueError, match=r"score_blocks\(model\): the masks of the model have no blocks"):
        generation.score_blocks(nn.with_causal_masks(model()), PROMPTS, NEW, mask_id=MASK)
