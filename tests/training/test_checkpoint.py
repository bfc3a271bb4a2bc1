"""A checkpoint is complete or refused, after damage, a full disk, or a kill."""

import dataclasses
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import AsyncCheckpointer

from eqformer import models, parallel, training


_KEY = jax.random.key(0)


class State(eqx.Module):
    table: jax.Array
    narrow: jax.Array
    count: jax.Array
    moments: dict
    activation: object


def make(seed=0, rows=6):
    draw = np.random.default_rng(seed)
    values = jnp.asarray(draw.normal(size=(rows, 50)), jnp.float32)
    return State(
        values, values.astype(jnp.bfloat16), jnp.int32(seed), {"mu/nu": [values + 1, None], "": values[0]}, jnp.tanh
    )


def assert_equal(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    for a, b in pairs:
        if eqx.is_array(a):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            assert a is b


def tree_of(folder):
    return sorted(path.name for path in folder.iterdir())


def test_random_keys_of_a_state_come_back_where_they_are_wanted(tmp_path):
    """Such as those of a layer with random features, which would otherwise train and fail at its first checkpoint."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    keys = {"one": jax.random.key(3), "many": jax.random.split(jax.random.key(4, impl="rbg"), 8)}
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(keys, 1, {})
        checkpointer.wait()
        place = NamedSharding(mesh, PartitionSpec("fsdp"))
        like = {"one": keys["one"], "many": jax.ShapeDtypeStruct((8,), keys["many"].dtype, sharding=place)}
        found = checkpointer.restore(like)[0]
        for name in keys:
            assert found[name].dtype == keys[name].dtype
            assert np.array_equal(jax.random.key_data(found[name]), jax.random.key_data(keys[name]))
        assert found["many"].sharding.is_equivalent_to(place, 1)
        assert not np.array_equal(jax.random.key_data(found["one"]), jax.random.key_data(jax.random.key(4)))
        with pytest.raises(
            training.CheckpointError, match=r"leaf one is key<fry>\[\] .* and key<rbg>\[\] in the model"
        ):
            checkpointer.restore({"one": jax.random.key(3, impl="rbg"), "many": keys["many"]})


def test_part_of_a_state_is_restored_by_name(tmp_path):
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"model": make(3), "moments": jnp.ones(7)}, 1, {})
        checkpointer.wait()
        like = {"model": eqx.filter_eval_shape(make)}
        assert_equal(checkpointer.restore(like, partial=True)[0]["model"], make(3))
        with pytest.raises(training.CheckpointError, match="leaf moments is in the checkpoint and not in the model"):
            checkpointer.restore(like)
        with pytest.raises(training.CheckpointError, match="leaf other is in the model and not in the checkpoint"):
            checkpointer.restore({"other": jnp.ones(7)}, partial=True)


def test_a_round_trip_keeps_k_and_the_metadata(tmp_path):
    with training.Checkpointer(tmp_path / "run", keep=2) as checkpointer:
        assert checkpointer.latest_step is None and not (tmp_path / "run").exists()
        for step in (1, 5, 12):
            checkpointer.save(make(step), step, {"recipe": {"name": "tiny", "at": step}})
        checkpointer.wait()
        assert checkpointer.steps == [5, 12] and checkpointer.latest_step == 12
        assert tree_of(tmp_path / "run") == ["12", "5"]
        like = eqx.filter_eval_shape(make)
        state, metadata = checkpointer.restore(like)
        assert_equal(state, make(12))
        assert metadata["recipe"] == {"name": "tiny", "at": 12} and metadata["versions"]["jax"] == jax.__version__
        assert_equal(training.Checkpointer(tmp_path / "run").restore(make(0), 5)[0], make(5))
        with pytest.raises(AssertionError):
            assert_equal(state, make(5))  # the control
        with pytest.raises(ValueError, match="step=12.*already holds step 12"):
            checkpointer.save(make(), 12, {})
    with training.Checkpointer(tmp_path / "all", keep=None) as checkpointer:
        for step in range(5):
            checkpointer.save(make(), step, {})
    assert checkpointer.steps == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="keep=0"):
        training.Checkpointer(tmp_path, keep=0)


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    state = {"x": jnp.arange(2.0**18)}
    with training.Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            checkpointer.save(state, step, {})
            for _ in range(4):
                state = {"x": double(state["x"])}
    for step in range(3):
        found, _ = checkpointer.restore({"x": jax.ShapeDtypeStruct((2**18,), jnp.float32)}, step)
        np.testing.assert_array_equal(found["x"], np.arange(2.0**18) * 16**step)


def test_arrays_go_straight_to_their_shardings(tmp_path):
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    value = jnp.arange(48.0).reshape(4, 12)
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": jax.device_put(value, split)}, 0, {})
        checkpointer.wait()
        for sharding in (split, NamedSharding(mesh, PartitionSpec("fsdp")), None):
            like = {"x": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)}
            found = checkpointer.restore(like)[0]["x"]
            np.testing.assert_array_equal(found, value)
            if sharding is not None:
                assert found.sharding.is_equivalent_to(sharding, 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with training.Checkpointer(folder) as checkpointer:
        checkpointer.save(make(1), 1, {})
        checkpointer.save(make(2), 2, {})
    return folder


def test_every_missing_or_truncated_or_altered_file_is_an_error(saved, tmp_path):
    files = [path.relative_to(saved / "2") for path in (saved / "2").rglob("*") if path.is_file()]
    assert len(files) >= 6 and Path("manifest.json") in files
    for number, file in enumerate(files):
        for damage in ("deleted", "truncated", "altered"):
            folder = tmp_path / f"{number}-{damage}"
            shutil.copytree(saved, folder)
            path = folder / "2" / file
            content = path.read_bytes()
            if not content and damage != "deleted":
                continue
            middle = len(content) // 2
            if damage == "deleted":
                path.unlink()
            elif damage == "truncated":
                path.write_bytes(content[:middle])
            else:
                path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
            checkpointer = training.Checkpointer(folder)
            with pytest.raises(training.CheckpointError, match=f"2: .*cannot be restored.*{file.name}"):
                checkpointer.restore(make())
            assert checkpointer.latest_step == 2  # it is still the latest: no silent return to an older one
            assert_equal(checkpointer.restore(make(), 1)[0], make(1))
            shutil.rmtree(folder)


def test_another_model_s_checkpoint_is_an_error_that_names_the_leaf(saved):
    checkpointer = training.Checkpointer(saved)
    with pytest.raises(training.CheckpointError, match=r"leaf table is float32\[6, 50\] .* float32\[7, 50\] in the m"):
        checkpointer.restore(make(rows=7))
    wide = eqx.tree_at(lambda s: s.narrow, make(), jnp.zeros((6, 50), jnp.float32))
    with pytest.raises(training.CheckpointError, match=r"narrow is bfloat16\[6, 50\] .* float32\[6, 50\]"):
        checkpointer.restore(wide)
    more = eqx.tree_at(lambda s: s.moments, make(), {"mu/nu": [jnp.zeros((6, 50))] * 2, "": jnp.zeros(50)})
    with pytest.raises(training.CheckpointError, match=r"moments\.mu/nu\.1 is in the model and not in the checkpoint"):
        checkpointer.restore(more)
    with pytest.raises(training.CheckpointError, match=r"moments\.mu/nu\.0 is in the checkpoint and not in the model"):
        checkpointer.restore(eqx.tree_at(lambda s: s.moments, make(), {"": jnp.zeros(50)}))
    with pytest.raises(training.CheckpointError, match="no checkpoint of step 3; the steps there are: 1, 2"):
        checkpointer.restore(make(), 3)


def test_no_checkpoint_is_an_error_and_leftovers_are_not_checkpoints(tmp_path):
    checkpointer = training.Checkpointer(tmp_path)
    for name in ("3.unfinished", "2.discarded", "notes", "4.unfinished.d"):
        (tmp_path / name).mkdir()
    (tmp_path / "7").write_text("a file is no checkpoint")
    assert checkpointer.latest_step is None
    with pytest.raises(training.CheckpointError, match="the steps there are: none"):
        checkpointer.restore(make())
    assert len(tree_of(tmp_path)) == 5  # a reader deletes nothing
    with checkpointer:
        checkpointer.save(make(), 5, {})
    assert tree_of(tmp_path) == ["4.unfinished.d", "5", "7", "notes"]


def test_a_full_disk_is_an_error_at_the_next_call_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would leave bytecode that is cut short
    draw = np.random.default_rng(0)
    large = {"x": jnp.asarray(draw.normal(size=2**18), jnp.float32)}
    checkpointer = training.Checkpointer(tmp_path)
    checkpointer.save(large, 1, {})
    checkpointer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, hard))  # no file may grow beyond it, as on a full disk
    try:
        with pytest.raises(training.CheckpointError, match=r"step=2\).*failed.*the checkpoint of step 1 is whole"):
            checkpointer.save(large, 2, {})
            checkpointer.save(large, 3, {})
        checkpointer.wait()  # warned once
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert tree_of(tmp_path) == ["1"]
    np.testing.assert_array_equal(checkpointer.restore(large)[0]["x"], large["x"])
    checkpointer.save(large, 4, {})  # with room again, the run goes on
    checkpointer.close()
    assert checkpointer.steps == [1, 4]


def test_an_error_of_the_commit_surfaces_in_close(tmp_path, monkeypatch):
    def fail(folder):
        raise OSError(28, "No space left on device")

    checkpointer = training.Checkpointer(tmp_path)
    monkeypatch.setattr("eqformer.training.checkpoint._checkpointer.sync_tree", fail)
    checkpointer.save(make(), 1, {})
    with pytest.raises(training.CheckpointError, match="No space left.*no checkpoint exists. Free some space, or"):
        checkpointer.close()
    assert tree_of(tmp_path) == []
    with pytest.raises(ValueError, match=r"metadata\['losses'\]\[1\] is nan, but JSON has only finite numbers"):
        checkpointer.save(make(), 2, {"losses": [1.0, float("nan")]})
    with pytest.raises(
        ValueError, match=r"metadata\['loss'\] has the type float32, which JSON does not have.*float\(x\)"
    ):
        checkpointer.save(make(), 2, {"loss": np.float32(1)})
    with pytest.raises(ValueError, match="save.step=-1.: steps count from 0"):
        checkpointer.save(make(), -1, {})
    assert tree_of(tmp_path) == []


# Saves step 1, then dies in the save of step 2 at a named point. Forked before JAX starts any thread.
KILLED = """
    import os, signal, sys, warnings

    import jax.numpy as jnp, numpy as np
    from eqformer import training
    from eqformer.training.checkpoint import _checkpointer

    _checkpointer._orbax()  # imported once, not by each child

    def state(step):
        return {"x": jnp.asarray(np.random.default_rng(step).normal(size=2**16), jnp.float32), "step": jnp.int32(step)}

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def run(point, folder):
        checkpointer = training.Checkpointer(folder, keep=1)
        checkpointer.save(state(1), 1, {"at": 1})
        checkpointer.wait()
        if point == "describe":
            _checkpointer.describe_files = die
        elif point == "sync":
            _checkpointer.sync_tree = die
        elif point == "after rename":
            _checkpointer.sync_path = die
        elif point == "prune":
            training.Checkpointer._prune = die
        elif point == "delete":
            _checkpointer.remove = die
        checkpointer.save(state(2), 2, {"at": 2})
        if point == "writing":
            die()
        checkpointer.wait()
        os._exit(0)

    for number, point in enumerate(sys.argv[2:]):
        child = os.fork()
        if child == 0:
            run(point, os.path.join(sys.argv[1], str(number)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if point == "none" else -signal.SIGKILL), point
"""


def test_sigkill_at_any_point_leaves_the_last_committed_step(tmp_path):
    points = {"writing": 1, "describe": 1, "sync": 1, "after rename": 2, "prune": 2, "delete": 2, "none": 2}
    root = Path(training.__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(KILLED), str(tmp_path), *points]
    subprocess.run(command, check=True, cwd=root, env=os.environ | {"XLA_FLAGS": ""}, timeout=120)
    like = {"x": jnp.zeros(2**16), "step": jnp.int32(0)}
    for number, (point, last) in enumerate(points.items()):
        folder = tmp_path / str(number)
        with training.Checkpointer(folder, keep=1) as checkpointer:
            assert checkpointer.latest_step == last, point
            state, metadata = checkpointer.restore(like)
            np.testing.assert_array_equal(state["x"], np.float32(np.random.default_rng(last).normal(size=2**16)))
            assert int(state["step"]) == metadata["at"] == last
            checkpointer.save(state, 9, {})
        assert tree_of(folder) == ["9"], point  # leftovers are gone, and so is what `keep` discards


# Ends without waiting for its save: as programs do, at once without Python's hooks, and where the commit fails.
ENDED = """
    import os, sys

    import jax.numpy as jnp
    from eqformer import training
    from eqformer.training.checkpoint import _checkpointer

    def fail(folder):
        raise OSError(28, "No space left on device")

    for how in sys.argv[2:]:
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            continue
        if how == "full":
            _checkpointer.sync_tree = fail
        checkpointer = training.Checkpointer(os.path.join(sys.argv[1], how))
        checkpointer.save({"x": jnp.ones((1024, 1024))}, 3, {})
        if how == "at once":
            os._exit(0)
        break  # to the program's end
"""


@pytest.mark.grid
@pytest.mark.parametrize("last_steps", [{"waits": 3, "at once": None}, {"full": None}])
def test_a_program_that_ends_waits_for_its_last_save(last_steps, tmp_path):
    root = Path(training.__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(ENDED), str(tmp_path), *last_steps]
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(root)}
    done = subprocess.run(command, check=True, env=environment, timeout=120, capture_output=True, text=True)
    assert {how: training.Checkpointer(tmp_path / how).latest_step for how in last_steps} == last_steps
    assert ("CheckpointError: Checkpointer.save(step=3)" in done.stderr) == ("full" in last_steps)


def test_a_checkpoint_is_bound_to_its_step_and_its_run(tmp_path):
    state = {"x": jnp.arange(3.0)}
    with training.Checkpointer(tmp_path / "a", run="aa") as checkpointer:
        checkpointer.save(state, 12, {})
        checkpointer.save(state, 28, {})
    with training.Checkpointer(tmp_path / "old") as checkpointer:
        checkpointer.save(state, 5, {})
    ours, other = (training.Checkpointer(tmp_path / "a", run=run) for run in ("aa", "bb"))
    assert ours.metadata()["run"] == "aa" and ours.restore(state)[0]["x"].tolist() == [0, 1, 2]
    with pytest.raises(training.CheckpointError, match="a/28: .*saved by run aa, and this folder holds run bb.*--from"):
        other.check(state)
    assert training.Checkpointer(tmp_path / "a").metadata(28)["run"] == "aa"  # weights of any run, for a warm start
    assert "run" not in training.Checkpointer(tmp_path / "old", run="aa").metadata()  # as older versions saved it
    shutil.copytree(tmp_path / "a" / "28", tmp_path / "a" / "99")
    (tmp_path / "a" / "12").rename(tmp_path / "a" / "11")
    for name, step in ((99, 28), (11, 12)):
        for read in (ours.metadata, lambda step: ours.restore(state, step)):
            with pytest.raises(
                training.CheckpointError, match=f"to step {step}, .* says {name}. Rename .* back to {step}"
            ):
                read(name)
    assert ours.metadata(28)["run"] == "aa"  # the control


def test_a_checkpoint_from_before_empty_batches_were_counted_is_restored_with_none_of_them(tmp_path):
    plan = parallel.Plan(parallel.make_mesh(devices=jax.devices()[:1]))
    build = lambda: models.build(dataclasses.replace(models.preset("llama-byte-1m"), embed=16, layers=1), key=_KEY)
    states = training.PlannedState(build, training.optimizer("sgd", jax.eval_shape(build), rate=0.1), plan)
    state = eqx.tree_at(lambda s: s.skipped, states.init(), jnp.int32(3))
    with training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(eqx.tree_at(lambda s: s.empty_batches, state, None), 1, {})
        checkpointer.save(eqx.tree_at(lambda s: s.empty_batches, state, jnp.int32(7)), 2, {})
    counts = lambda step: jax.tree.leaves(
        [(s.skipped, s.empty_batches) for s, _ in [states.restore(checkpointer, step)]]
    )
    assert counts(1) == [3, 0] and counts(2) == [3, 7]


def test_a_folder_that_is_deleted_during_a_run_is_one_error_without_tracebacks(tmp_path, caplog, monkeypatch):
    state = {f"x{number}": jnp.arange(9.0) for number in range(4)}
    with training.Checkpointer(tmp_path / "a") as checkpointer:
        checkpointer.save(state, 1, {})
        checkpointer.wait()
        shutil.rmtree(tmp_path / "a")
        with pytest.raises(training.CheckpointError, match="a was deleted or moved since the last save"):
            checkpointer.save(state, 2, {})
        assert not (tmp_path / "a").exists()
    wait = AsyncCheckpointer.wait_until_finished

    def deleted_while_writing(writer):
        if not (tmp_path / "gone").exists():
            (tmp_path / "b").rename(tmp_path / "gone")
        wait(writer)

    monkeypatch.setattr(AsyncCheckpointer, "wait_until_finished", deleted_while_writing)
    with training.Checkpointer(tmp_path / "b") as checkpointer:
        checkpointer.save(state, 1, {})
        with pytest.raises(training.CheckpointError, match="b/1.unfinished was deleted or moved while it was written"):
            checkpointer.wait()
    logging.getLogger("absl").error("of another library")
    assert [record.message for record in caplog.records] == ["of another library"]
