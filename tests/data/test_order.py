import numpy as np
import pytest

from eqformer.data import shuffle_indices


def _epoch(rows, seed, epoch):
    return shuffle_indices(np.arange(epoch * rows, (epoch + 1) * rows), rows=rows, seed=seed)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 16, 17, 97, 100, 1000, 4097, 36_619])
def test_each_epoch_is_a_permutation_and_another_one(rows):
    epochs = [_epoch(rows, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 5)]
    for order in epochs:
        assert order.dtype == np.int64 and np.array_equal(np.sort(order), np.arange(rows))
    if rows > 16:
        assert len({order.tobytes() for order in epochs}) == len(epochs)
        assert not np.array_equal(epochs[0], np.arange(rows))


def test_a_place_does_not_depend_on_what_else_is_asked():
    whole = shuffle_indices(np.arange(3000), rows=1000, seed=3)
    some = np.random.default_rng(0).integers(0, 3000, 200)
    np.testing.assert_array_equal(shuffle_indices(some, rows=1000, seed=3), whole[some])
    assert not np.array_equal(shuffle_indices(some, rows=1000, seed=4), whole[some])  # negative control


def test_known_values_so_that_no_version_changes_the_order_unseen():
    assert shuffle_indices(np.arange(8), rows=10, seed=0).tolist() == [8, 0, 4, 9, 1, 6, 5, 7]
    assert shuffle_indices(np.array([10**15]), rows=10**12, seed=-(2**70)).tolist() == [485669757528]


def _uniformity(orders):
    """Chi-square over degrees of freedom of where each row ends up: near 1 for a fair shuffle."""
    count, rows = orders.shape
    table = np.stack([np.bincount(orders[:, place], minlength=rows) for place in range(rows)])
    return float(((table - count / rows) ** 2 / (count / rows)).sum() / (rows - 1) ** 2)


@pytest.mark.by_default("2", "13")
@pytest.mark.parametrize("rows", [2, 3, 5, 6, 13, 20])
def test_every_row_is_equally_likely_everywhere(rows):
    orders = np.stack([_epoch(rows, seed, 0) for seed in range(1500)])
    bound = 1 + 5 * np.sqrt(2) / (rows - 1)  # five standard deviations
    assert _uniformity(orders) < bound
    epochs = shuffle_indices(np.arange(1500 * rows), rows=rows, seed=0).reshape(1500, rows)
    assert _uniformity(epochs) < bound
    # Negative control: rotations alone, or a row that prefers its place, are seen.
    assert _uniformity(np.where(np.arange(1500)[:, None] % 4 == 0, np.arange(rows), orders)) > bound


def test_every_order_of_four_rows_comes_up():
    orders = shuffle_indices(np.arange(4 * 4800), rows=4, seed=1).reshape(-1, 4)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24 and ((counts - 200) ** 2 / 200).sum() < 60  # 23 degrees of freedom: mean 23, deviation 7


def test_neighbours_are_not_kept_together():
    order = _epoch(10_000, 0, 0)
    steps = np.diff(order)
    assert np.mean(np.abs(steps) == 1) < 0.002
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_places_and_rows_must_exist():
    with pytest.raises(ValueError, match=r"shuffle_indices\(indices, rows=5, seed=0\).*smallest index is -1"):
        shuffle_indices(np.array([3, -1]), rows=5, seed=0)
    with pytest.raises(ValueError, match=r"rows=0"):
        shuffle_indices(np.array([0]), rows=0, seed=0)
