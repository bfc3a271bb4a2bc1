"""Runs of several processes: connection, barriers, work of the first process, and checks that processes agree."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import cast, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


Result = TypeVar("Result")


def connect(coordinator: str | None = None, processes: int | None = None, process_id: int | None = None) -> None:
    """Connect this process to the other processes of a run; call it before JAX creates an array or lists devices.

    Without arguments, connect the processes that a launcher has started: Slurm, Open MPI, Kubernetes or a TPU pod. If
    there is no launcher, do nothing. If the search for a launcher fails, a warning says why.

    Raises a `ValueError` if the processes cannot connect, or have different numbers of devices.

    Args:
        coordinator: Address of process 0, `host:port`, to which the processes connect.
        processes: Number of processes.
        process_id: Index of this process, from 0.
    """
    if coordinator is None and not _is_in_cluster():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if coordinator is None:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(coordinator, processes, process_id)
    except RuntimeError as error:
        raise ValueError(f"the processes of this run could not connect to each other: {error}") from error
    if jax.default_backend() == "cpu":  # Cached programs for several CPU devices may deadlock.
        jax.config.update("jax_enable_compilation_cache", False)
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"processes {', '.join(map(str, counts))} have {', '.join(map(str, counts.values()))} devices; give each "
            "process of a run the same number (--simulate or prepare(devices=) on a CPU, CUDA_VISIBLE_DEVICES on GPUs)."
        )


def _is_in_cluster() -> bool:
    """Return whether a launcher that JAX knows has started this process as one of several."""
    try:
        # Call only the detection of JAX, because `jax.distributed.initialize` fails in a process without a cluster.
        from jax._src.clusters import ClusterEnv

        kinds = (kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method)
        cluster = next((kind for kind in kinds if kind.is_env_present()), None)
        return cluster is not None and cluster.get_process_count() > 1
    except Exception as error:  # The library of a cluster, or another version of JAX, may raise any error.
        warnings.warn(
            f"the search for a cluster failed ({type(error).__name__}: {error}), so this process runs alone; to "
            "connect it to others, give a coordinator, the number of processes and a process id (--coordinator, "
            "--processes, --process-id).",
            stacklevel=3,
        )
        return False


def is_first_process() -> bool:
    """Return whether this process is the one that writes files and prints messages."""
    return jax.process_index() == 0


def on_all_processes(action: Callable[[], Result]) -> Result:
    """Run `action` in every process, wait for all processes, and return the result.

    If `action` raises in one process, the other processes raise a `ValueError` that names the process. So no process
    waits forever for a process that has ended.
    """
    if jax.process_count() == 1:
        return action()
    result: Result | None = None
    failure = None
    try:
        result = action()
    except Exception as error:
        failure = error
    failed = np.flatnonzero(multihost_utils.process_allgather(np.array(failure is not None)))
    if failure is not None:
        raise failure
    if failed.size:
        raise ValueError(f"process {failed[0]} failed, so this process stops too; its own message says why.")
    return cast(Result, result)


def on_first_process(action: Callable[[], Result]) -> Result | None:
    """Run `action` in the first process and return its result, or None in the other processes, which wait.

    If `action` raises, all processes raise, as in `on_all_processes`.
    """
    return on_all_processes(lambda: action() if is_first_process() else None)


def numbers_from_first_process(action: Callable[[], Sequence[float]], count: int) -> list[float]:
    """Run `action` in the first process; return its `count` numbers in all processes, bit for bit the same.

    If `action` raises, all processes raise, as in `on_all_processes`.
    """
    numbers = on_first_process(action)
    if jax.process_count() == 1:
        assert numbers is not None
        return list(numbers)
    # Send bytes, because JAX would round float64 to float32.
    sent = np.asarray(np.zeros(count) if numbers is None else numbers, np.float64).view(np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(sent)).view(np.float64).tolist()


def check_alike(values: Mapping[str, object]) -> None:
    """Raise a `ValueError` in every process if the `repr` of any value differs between processes."""
    digests = [list(hashlib.sha256(repr(value).encode()).digest()) for value in values.values()]
    # The dims of `all_digests` are processes, values and bytes.
    all_digests = multihost_utils.process_allgather(np.array(digests, np.uint8))
    differs = (all_digests != all_digests[0]).any(-1)
    if differs.any():
        names = ", ".join(name for name, differ in zip(values, differs.any(0)) if differ)
        raise ValueError(
            f"process {np.flatnonzero(differs.any(1))[0]} differs from process 0 in {names}; start all processes of a "
            "run with the same flags, in one folder that all of them see, on the same text."
        )


class Votes:
    """Votes of all processes on stopping: all processes learn at the same step whether any process was asked to stop.

    The devices sum the votes of a step while the next step is prepared. No process waits for the sum of the current
    step, so each step gets the result of the previous step's vote.
    """

    def __init__(self, mesh: Mesh | AbstractMesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._shape = (mesh.size,)
        self._sum = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: jax.Array | None = None

    def any(self, mine: bool) -> bool:
        """Cast this process's vote; return whether any process voted to stop in the previous step.

        A single process gets its own vote back at once.
        """
        if jax.process_count() == 1:
            return mine
        vote = np.full(self._shape, int(mine), np.int32)
        pending, self._pending = (
            self._pending,
            self._sum(jax.make_array_from_callback(self._shape, self._sharding, vote.__getitem__)),
        )
        return pending is not None and int(pending) > 0
