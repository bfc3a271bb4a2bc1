"""Helpers for several processes; the tests of scripts cover how two real processes stop and resume together."""

import jax
import pytest

from eqformer import parallel


def test_one_process_is_all_and_the_first():
    assert parallel.is_first_process()
    assert parallel.on_all_processes(lambda: 3) == parallel.on_first_process(lambda: 3) == 3
    assert parallel.numbers_from_first_process(lambda: [1 / 3, 2.0], 2) == [1 / 3, 2.0]
    parallel.check_alike({"--seed": 0})
    with pytest.raises(OSError, match="no room"):
        parallel.on_first_process(_raise)


def _raise():
    raise OSError("no room")


def test_processes_learn_of_the_first_vote_a_step_later(monkeypatch):
    mesh = parallel.make_mesh(fsdp=8)
    assert [parallel.Votes(mesh).any(mine) for mine in (False, True)] == [False, True]  # alone: now
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    votes = parallel.Votes(mesh)
    assert [votes.any(mine) for mine in (False, False, True, False)] == [False, False, False, True]
