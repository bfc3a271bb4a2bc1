import gc
import threading
import time

import numpy as np
import pytest

from eqformer.data import Loader, Prefetch, prefetch


def _threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("eqformer-prefetch")]


def _until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.fixture(autouse=True)
def mine():
    """A function that lists the threads this test has begun and not ended; at its end there must be none."""
    before = set(_threads())
    yield lambda: set(_threads()) - before
    assert set(_threads()) <= before


@pytest.fixture
def loader(store):
    return Loader(store, seq=16, batch=4, seed=5)


@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_resuming_at_any_step_gives_the_same_batches(store, packing, start):
    loader = Loader(store, seq=16, batch=4, seed=5, packing=packing)
    with prefetch(loader, start, 12, depth=3) as batches:
        found = list(batches)
    assert len(found) == 12 - start
    for step, batch in zip(range(start, 12), found):
        np.testing.assert_array_equal(batch.ids, loader.batch(step).ids)
        assert batch.examples[0] == 4 * step
    assert not np.array_equal(found[0].ids, found[1].ids)  # negative control


def test_a_hosts_rows_and_a_transform_in_the_background(loader):
    names = []

    def transform(batch):
        names.append(threading.current_thread().name)
        return batch.ids * 2

    with prefetch(loader, 3, rows=(1, 3), transform=transform) as batches:
        first, second = next(batches), next(batches)
    np.testing.assert_array_equal(first, loader.rows(3, 1, 3).ids * 2)
    np.testing.assert_array_equal(second, loader.rows(4, 1, 3).ids * 2)
    assert all(name.startswith("eqformer-prefetch") for name in names)


def test_it_works_ahead_and_not_farther():
    made = []
    with Prefetch(lambda step: made.append(step) or step, depth=3) as steps:
        assert _until(lambda: made == [0, 1, 2])
        assert next(steps) == 0 and _until(lambda: made == [0, 1, 2, 3])
        time.sleep(0.02)
        assert made == [0, 1, 2, 3]


def test_an_error_comes_out_at_its_own_step_and_ends_the_iterator(mine):
    def make(step):
        if step == 2:
            raise FileNotFoundError("the cache is gone")
        return step

    steps = Prefetch(make, depth=4)
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(FileNotFoundError, match="the cache is gone"):
        next(steps)
    assert not mine()
    with pytest.raises(StopIteration):
        next(steps)


def test_closing_stops_what_is_under_way(mine):
    started, release = threading.Event(), threading.Event()
    made = []

    def make(step):
        started.set()
        release.wait(10)
        made.append(step)

    steps = Prefetch(make, depth=5)
    assert started.wait(10)
    threading.Timer(0.02, release.set).start()
    steps.close()
    steps.close()
    assert made == [0] and not mine()
    with pytest.raises(StopIteration):
        next(steps)


def test_leaving_it_behind_leaves_no_thread(mine):
    steps = Prefetch(lambda step: step)
    assert next(steps) == 0 and mine()
    del steps
    gc.collect(1)  # the young objects, of which it is one
    assert _until(lambda: not mine())


def test_bad_arguments_are_reported(loader):
    with pytest.raises(ValueError, match=r"start_step=5, stop_step=3"):
        prefetch(loader, 5, 3)
    with pytest.raises(ValueError, match=r"start_step=-1"):
        prefetch(loader, -1)
    with pytest.raises(ValueError, match=r"Prefetch\(depth=0\)"):
        prefetch(loader, depth=0)
    with prefetch(loader, rows=(2, 9)) as batches, pytest.raises(ValueError, match=r"batch is 4"):
        next(batches)
