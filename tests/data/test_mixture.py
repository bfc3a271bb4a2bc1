"""Mixtures: the shares of sources against counts by numpy, and the rows of each source against its own loader."""

from dataclasses import replace

import numpy as np
import pytest

from eqformer.data import ByteTokenizer, Loader, Mixture, open_store, prefetch, texts


FIELDS = ("ids", "targets", "weights", "positions", "segments", "examples")
BLOCK = 1024
ALPHABETS = {"small": "abcdefgh", "large": "ABCDEFGH", "digits": "01234567"}  # a row's characters say whose it is
WEIGHTS = {"small": 0.7, "large": 0.2, "digits": 0.1}


def _text(name, number):
    letters = np.random.default_rng([number, len(name)]).choice([*ALPHABETS[name]], size=300)
    return "".join(letters)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder, sizes = tmp_path_factory.mktemp("cache"), {"small": 9, "large": 4, "digits": 14}
    return {
        name: open_store(
            texts({f"{name}{number}": _text(name, number) for number in range(size)}, name=name),
            ByteTokenizer(),
            folder,
            validation=0.0,
        )
        for name, size in sizes.items()
    }


def _mixture(stores, weights=WEIGHTS, seed=3, packing="windows", **options):
    options = {"seq": 16, "batch": 8, "packing": packing, **options}
    return Mixture({name: Loader(stores[name], seed=seed, **options) for name in weights}, weights, seed=seed)


def _equal(one, two):
    return all(np.array_equal(getattr(one, name), getattr(two, name)) for name in FIELDS)


def _whose(batch):
    """The index of the text that each row is of, by its characters."""
    held = [np.isin(batch.ids, list(letters.encode())).any(-1) for letters in ALPHABETS.values()]
    assert (np.sum(held, 0) == 1).all()
    return np.argmax(held, 0)


def _origins(mixture, blocks):
    return mixture.origin(np.arange(blocks * BLOCK))[0].reshape(blocks, BLOCK)


def test_every_stretch_has_the_shares_that_the_weights_say(stores):
    for weights in ({"small": 7, "large": 2, "digits": 1}, {"small": 1.0, "large": 1e-4, "digits": 0.333}):
        mixture = _mixture(stores, weights)
        exact = np.array([*weights.values()], np.float64) / sum(weights.values())
        assert np.allclose([*mixture.weights.values()], exact, rtol=1e-12)
        counts = np.stack([np.bincount(block, minlength=3) for block in _origins(mixture, 60)])
        off = np.cumsum(counts, 0) - BLOCK * np.arange(1, 61)[:, None] * exact
        assert np.abs(off).max() <= 1.5 and counts.min() >= 0
        # The control: as many draws by numpy, each by itself, are farther from their shares.
        drawn = np.random.default_rng(0).choice(3, p=exact, size=(60, BLOCK))
        alone = np.cumsum([np.bincount(block, minlength=3) for block in drawn], 0)
        assert np.abs(alone - np.cumsum(counts, 0)).max() > 20


def test_which_example_is_of_which_text_is_as_random_as_numpys_shuffle(stores):
    """Numbers of a text in pieces of 32 examples have the mean and the variance of draws without replacement."""
    taken = _origins(_mixture(stores), 100)
    shuffled = np.random.default_rng(1).permuted(taken, axis=1)
    share = np.array([*WEIGHTS.values()])
    formula = 32 * share * (1 - share) * (BLOCK - 32) / (BLOCK - 1)

    def variances(labels):
        return np.stack([(labels.reshape(-1, 32) == index).sum(1).var() for index in range(3)])

    assert np.allclose(variances(taken), formula, rtol=0.1) and np.allclose(variances(shuffled), formula, rtol=0.1)
    assert not np.allclose(variances(np.sort(taken, 1)), formula, rtol=0.5)  # the control: not shuffled
    together = (taken[:, 1:] == taken[:, :-1]).mean()  # neighbours of one text
    assert abs(together - (share**2).sum()) < 0.01
    assert (taken[0] != taken[1]).any() and (_origins(_mixture(stores, seed=4), 1) != taken[:1]).any()


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_each_text_comes_in_its_own_order_epoch_by_epoch(stores, packing):
    mixture = _mixture(stores, packing=packing, batch=40)
    batches = [mixture.batch(step) for step in range(40)]
    whose = np.concatenate([_whose(batch) for batch in batches])
    assert np.array_equal(whose, mixture.origin(np.arange(1600))[0])
    assert np.concatenate([batch.examples for batch in batches]).tolist() == [*range(1600)]
    for index, (name, loader) in enumerate(mixture.loaders.items()):
        alone = Loader(stores[name], seq=16, batch=int((whose == index).sum()), seed=3, packing=packing).batch(0)
        for field in FIELDS[:-1]:
            if getattr(alone, field) is not None:
                ours = np.concatenate([getattr(batch, field) for batch in batches])[whose == index]
                assert np.array_equal(ours, getattr(alone, field))
        assert mixture.epochs(40)[name] == pytest.approx((whose == index).sum() / loader.rows_per_epoch, rel=0.05)
    assert all(passes > 0.5 for passes in mixture.epochs(40).values()) and mixture.epochs(40)["small"] > 3


@pytest.mark.by_default("documents")
@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_run_that_goes_on_and_any_number_of_readers_have_the_same_rows(stores, packing):
    make = lambda weights=WEIGHTS, **changes: _mixture(stores, weights, **{"packing": packing, "batch": 32, **changes})
    mixture = make()
    whole = [mixture.batch(step) for step in range(35)]  # over a block's border
    with prefetch(make(), 30, 35) as resumed:
        assert all(_equal(batch, whole[step]) for step, batch in enumerate(resumed, 30))
    for readers in (1, 2, 4):
        each = 32 // readers
        own = [make() for _ in range(readers)]
        for step in (0, 31, 32, 10**12):
            parts = [own[reader].rows(step, reader * each, (reader + 1) * each) for reader in range(readers)]
            expected = whole[step] if step < 35 else own[0].batch(step)
            for field in FIELDS:
                if getattr(expected, field) is not None:
                    assert np.array_equal(
                        np.concatenate([getattr(part, field) for part in parts]), getattr(expected, field)
                    )
    # The same rows of other weights, of another seed, and of the next step are others.
    others = [
        make({**WEIGHTS, "large": 0.5}).batch(5),
        make(seed=4).batch(5),
        replace(whole[6], examples=whole[5].examples),
    ]
    assert not any(_equal(other, whole[5]) for other in others)
    # Twice the batch in half the steps is the same run, and only ratios of weights matter.
    wide = make({"small": 7, "large": 2, "digits": 1}, batch=64).batch(3)
    assert np.array_equal(wide.ids, np.concatenate([whole[6].ids, whole[7].ids]))


def test_rows_of_all_texts_hold_as_many_documents_as_the_most_of_any(stores):
    mixture = _mixture(stores, packing="documents", seq=1600)
    each = [loader.packing.documents for loader in mixture.loaders.values()]
    assert len({*each}) > 1 and {mixture.batch(step).documents for step in range(4)} == {max(each)}
    assert _mixture(stores).batch(0).documents is None


def test_one_text_alone_is_its_loader(stores):
    alone = Loader(stores["small"], seq=16, batch=8, seed=3)
    assert all(_equal(_mixture(stores, {"small": 0.2}).batch(step), alone.batch(step)) for step in (0, 1, 500))


@pytest.mark.parametrize(
    "weights, message",
    [
        ({"small": 1, "large": 0}, r"must be above 0 and finite, but large has 0"),
        ({"small": float("nan"), "large": 1}, r"small has nan"),
        ({"small": float("inf"), "large": 1}, r"small has inf"),
        ({"small": 1, "large": -0.5}, r"large has -0.5"),
        ({"small": 1}, r"each loader must have a weight and each weight a loader"),
        ({"small": 1, "large": 1, "unknown": 1}, r"give both the same names"),
    ],
)
def test_bad_weights_are_reported(stores, weights, message):
    loaders = {name: Loader(stores[name], seq=16, batch=8, seed=0) for name in ("small", "large")}
    with pytest.raises(ValueError, match=rf"Mixture\(loaders of small, large, .*{message}"):
        Mixture(loaders, weights, seed=0)


def test_texts_of_other_shapes_and_rows_outside_the_batch_are_reported(stores):
    make = lambda name, **options: Loader(stores[name], **{"seq": 16, "batch": 8, "seed": 0, **options})
    for other in ({"seq": 8}, {"batch": 4}, {"packing": "documents"}):
        with pytest.raises(ValueError, match="rows of one batch must have one shape"):
            Mixture({"small": make("small"), "large": make("large", **other)}, {"small": 1, "large": 1}, seed=0)
    with pytest.raises(ValueError, match=r"loaders of nothing"):
        Mixture({}, {}, seed=0)
    with pytest.raises(ValueError, match=r"Mixture\.rows\(step=0, start=0, stop=9\).*batch is 8"):
        _mixture(stores).rows(0, 0, 9)
