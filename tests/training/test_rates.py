"""Learning rates against their formulas in plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import training


def cosine(step, peak, steps, warmup, final):
    if step < warmup:
        return peak / (warmup + 1) + (peak - peak / (warmup + 1)) * step / warmup
    share = min(1.0, (step - warmup) / (steps - warmup))
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share)))


def stable(step, peak, steps, warmup, decay, final):
    if step < warmup:
        return peak * (1 + step) / (warmup + 1)
    share = min(1.0, max(0.0, (step - (steps - decay)) / decay))
    return peak * (1 - share * (1 - final))


def test_cosine_and_plateau_follow_their_formulas():
    steps = np.arange(0, 130)
    rates = training.rates("warmup-cosine", peak=3e-3, steps=100, warmup=7, final=0.2)
    expected = [cosine(step, 3e-3, 100, 7, 0.2) for step in steps]
    np.testing.assert_allclose([rates(int(step)) for step in steps], expected, rtol=2e-6)
    rates = training.rates("warmup-stable-decay", peak=3e-3, steps=100, warmup=7, decay=30, final=0.1)
    expected = [stable(step, 3e-3, 100, 7, 30, 0.1) for step in steps]
    np.testing.assert_allclose(jax.vmap(rates)(jnp.asarray(steps)), expected, rtol=2e-6)
    # The control: the two differ where they should.
    assert abs(cosine(60, 3e-3, 100, 7, 0.1) - stable(60, 3e-3, 100, 7, 30, 0.1)) > 1e-3


def test_constant_and_defaults():
    rates = training.rates("constant", peak=0.5, steps=9, warmup=3)
    np.testing.assert_allclose([rates(step) for step in (0, 1, 2, 3, 800)], [0.125, 0.25, 0.375, 0.5, 0.5])
    assert rates(4).dtype == np.float32
    rates = training.rates("warmup-stable-decay", peak=1.0, steps=100)
    assert rates(80) == 1 and rates(81) < 1 and rates(100) == 0
    rates = training.warmup_stable_decay(1.0, steps=10, warmup=9)  # the default decay fits beside a long warmup
    assert rates(9) == 1 and rates(10) == 0


def test_a_descent_may_be_a_share_of_the_run():
    settings = training.Optimization(learning_rate=3e-3, rates="warmup-stable-decay", warmup=7, decay_share=0.65)
    steps = np.arange(0, 130)
    expected = [stable(step, 3e-3, 100, 7, 65, 0.0) for step in steps]
    np.testing.assert_allclose(
        jax.vmap(settings.make_rates(settings.phases(100)))(jnp.asarray(steps)), expected, rtol=2e-6
    )
    assert abs(expected[60] - stable(60, 3e-3, 100, 7, 20, 0.0)) > 1e-3  # The control: a fifth, the default.
    (phase,) = settings.phases(100)
    rewarmed = training.SchedulePhase(100, 200, 7, "rewarm")
    rates = training.phase_rates("warmup-stable-decay", [phase, rewarmed], peak=3e-3, decay_share=0.65)
    np.testing.assert_allclose(jax.vmap(rates)(jnp.arange(100, 200)), expected[:100], rtol=2e-6)
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"decay_share={share}"):
            training.phase_rates("warmup-stable-decay", [phase], peak=3e-3, decay_share=share)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(name="cosine", peak=1.0, steps=5), "warmup-cosine"),
        (dict(name="warmup-cosine", peak=1.0, steps=5, warmup=5), "warmup=5, steps=5"),
        (dict(name="constant", peak=1.0, steps=5, warmup=6), "warmup=6, steps=5"),
        (dict(name="warmup-stable-decay", peak=1.0, steps=10, warmup=5, decay=6), "5 \\+ 6 > 10"),
        (dict(name="warmup-cosine", peak=-1.0, steps=5), "peak=-1.0"),
        (dict(name="warmup-cosine", peak=float("inf"), steps=5), "peak=inf"),
        (dict(name="warmup-cosine", peak=1.0, steps=0), "steps=0"),
        (dict(name="warmup-cosine", peak=1.0, steps=5, warmup=-1), "warmup=-1"),
        (dict(name="warmup-cosine", peak=1.0, steps=5, final=1.5), "final=1.5"),
        (dict(name="constant", peak=1.0, steps=5, decay=2), "no `decay`"),
        (dict(name="warmup-cosine", peak=1.0, steps=5, decay=2), "no `decay`"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        training.rates(**arguments)
