"""Block diffusion equals a literal sampler without a cache, which reads whole rows again in each pass."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import generation, models, nn


BLOCK, MASK, VOCAB = 4, 28, 29
CONFIG = models.LlamaConfig(vocab=VOCAB, embed=8, layers=1, heads=2, kv_heads=1, mlp=12)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7]]
KEY = jax.random.key(3)


@functools.cache
def model(window: int | None = None):
    """A model of sharp distributions, whose blocks have four tokens."""

    def build(key):
        model = nn.with_blocks(models.build(CONFIG, key=key), BLOCK)
        return jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model)

    built = eqx.filter_jit(build)(jax.random.key(0))
    if window is None:
        return built
    return nn.map_modules(lambda mask: nn.Mask(False, window, block=BLOCK), built, nn.Mask)


@eqx.filter_jit
def logits_of(model, ids, length):
    """The logits of a row, read without a cache; tokens from `length` on are padding."""
    positions = jnp.where(jnp.arange(len(ids)) < length, jnp.arange(len(ids)), -1)
    return model(ids[None], nn.Tokens(positions[None]))[0][0]


@jax.jit
def noise(row, position, number):
    """The random numbers of one token in one pass: of its id, and of its place in a random order."""
    key = nn.token_keys(jax.random.fold_in(KEY, number), row[None], position[None, None])[0, 0]
    return jax.random.gumbel(key, (VOCAB,), jnp.float32), jax.random.uniform(
        jax.random.fold_in(key, 1), (), jnp.float32
    )


def literal(model, row, prompt, new, *, steps, order, threshold=1.0, temperature=1.0, end=None) -> list[int]:
    """Continue one prompt, block by block, pass by pass, token by token."""
    ids, start = list(prompt), len(prompt) // BLOCK * BLOCK
    while True:
        block = ids[start:] + [MASK] * (BLOCK - len(ids) + start)
        masked = [place for place in range(BLOCK) if start + place >= len(ids)]
        first = masked[0]
        for number in range(steps):
            if not masked:
                break
            read = np.pad(ids[:start] + block, (0, 40 - start - BLOCK)).astype(np.int32)
            logits = np.asarray(logits_of(model, read, start + BLOCK), np.float64)[start : start + BLOCK]
            proposals = []
            for place in masked:
                scores = np.where(np.arange(VOCAB) == MASK, -np.inf, logits[place])
                scores = scores / temperature if temperature else scores
                probabilities = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                gumbel, priority = map(np.asarray, noise(*map(np.int32, (row, start + place, number))))
                chosen = int(np.argmax(scores + gumbel if temperature else scores))
                confidence = probabilities[chosen]
                proposals.append((priority if order == "random" else confidence, place, chosen, confidence))
            proposals.sort(key=lambda proposal: (-proposal[0], proposal[1]))
            count = -(-len(masked) // (steps - number))
            for rank, (_, place, chosen, confidence) in enumerate(proposals):
                if rank < count or confidence > threshold:
                    block[place] = chosen
                    masked.remove(place)
        ids, start = ids[:start] + block, start + BLOCK
        ends = [start - BLOCK + place for place in range(first, BLOCK) if block[place] == end]
        if ends:
            return ids[: min(ends[0] + 1, len(prompt) + new)]
        if len(ids) >= len(prompt) + new:
            return ids[: len(prompt) + new]


def rows_of(text: generation.Generation) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(text.ids, text.lengths)]


def generated(new: int = 10, window: int | None = None, temperature: float = 1.0, **options: Any) -> list[list[int]]:
    transforms = () if temperature == 1 else generation.sampling(temperature=temperature)
    text = generation.generate_blocks(
        model(window), PROMPTS, max_new_tokens=new, mask_id=MASK, transforms=transforms, key=KEY, **options
    )
    return rows_of(text)


CASES = {
    "one token a pass": {"steps": BLOCK, "order": "confidence"},
    "random order, two passes": {"steps": 2, "order": "random"},
    "three passes, greedy": {"steps": 3, "order": "confidence", "temperature": 0.0},
    "threshold": {"steps": BLOCK, "order": "confidence", "threshold": 0.5},
    "window": {"steps": 2, "order": "confidence", "window": 6},
}


@pytest.mark.by_default("threshold")
@pytest.mark.parametrize("name", CASES)
def test_a_text_is_that_of_the_literal_sampler(name):
    options = dict(CASES[name])
    expected_options = {key: value for key, value in options.items() if key != "window"}
    expected = [
        literal(model(options.get("window")), row, prompt, 10, **expected_options) for row, prompt in enumerate(PROMPTS)
    ]
    text = generated(**options)
    assert text == expected
    assert MASK not in np.concatenate(text) and [len(row) for row in text] == [15, 18, 11]
    other = {"steps": 1} if "threshold" not in options else {"threshold": 1.0}
    changed = [
        literal(model(options.get("window")), row, prompt, 10, **expected_options | other)
        for row, prompt in enumerate(PROMPTS)
    ]
    assert changed != text


@pytest.mark.grid
def test_a_row_ends_at_its_end_and_does_not_depend_on_other_rows():
    whole = generated(steps=2)
    end = whole[0][8]
    text = generated(steps=2, end_of_text=end)
    assert text == [
        literal(model(), row, prompt, 10, steps=2, order="confidence", end=end) for row, prompt in enumerate(PROMPTS)
    ]
    assert len(text[0]) < len(whole[0]) and text[0][-1] == end
    alone = generation.generate_blocks(
        model(), PROMPTS[1:2], max_new_tokens=10, mask_id=MASK, steps=2, examples=[1], key=KEY
    )
    assert rows_of(alone) == whole[1:2]


def test_bad_arguments_are_refused():
    shapes = eqx.filter_eval_shape(models.build, CONFIG, key=KEY)
    call = functools.partial(generation.generate_blocks, prompts=PROMPTS, max_new_tokens=2, key=KEY)
    with pytest.raises(ValueError, match=r"generate_blocks\(model\): the masks of the model have no blocks"):
        call(shapes, mask_id=MASK)
    blocks: Any = nn.with_blocks(shapes, BLOCK)
    wrong: list[dict[str, Any]] = [{"mask_id": VOCAB}, {"mask_id": 0, "steps": 0}, {"mask_id": 0, "threshold": 0.0}]
    for options in wrong:
        with pytest.raises(
            ValueError, match=r"generate_blocks\(mask_id=.*steps must be at least 1, and threshold above"
        ):
            call(blocks, **options)
    with pytest.raises(ValueError, match=r"init_cache: .* tokens cannot be sampled one by one"):
        blocks.init_cache(1, 4)
    recurrent: Any = nn.with_blocks(
        eqx.filter_eval_shape(models.build, models.preset("qwen3-next-byte-500k"), key=KEY), BLOCK
    )
    with pytest.raises(ValueError, match=r"generate_blocks\(model\): only models whose mixers all attend"):
        call(recurrent, mask_id=MASK)


@pytest.mark.grid
@pytest.mark.parametrize("order", ["confidence", "random"])
def test_logits_that_are_no_numbers_and_rows_without_candidates_end_the_loop(order):
    """Their priorities are NaN, so no token of such a row is filled in a pass."""
    call = functools.partial(
        generation.generate_blocks, prompts=PROMPTS, max_new_tokens=2, mask_id=MASK, order=order, key=KEY
    )
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if eqx.is_inexact_array(x) else x, model())
    with pytest.raises(ValueError, match="NaN"):
        call(broken)
    with pytest.raises(ValueError, match="left a row no token to sample"):
        call(model(), transforms=lambda logits, history: jnp.full_like(logits, -jnp.inf))
