"""One run by several processes: how they find each other, and what only the first of them does."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of this process, and its place among others."""

    simulate: int | None = None
    """Have the CPU act as so many devices (of each process): any mesh can be tried on any machine."""
    coordinator: str | None = None
    """host:port of process 0, where the processes of a run meet; not needed under Slurm, Open MPI, TPUs, Kubernetes."""
    processes: int | None = None
    """How many processes the run has; with --coordinator."""
    process_id: int | None = None
    """This process's number, from 0; with --coordinator."""


def check_machine(machine: Machine) -> None:
    """Raise a `ValueError` for flags that do not go together."""
    if machine.simulate is not None and machine.simulate < 1:
        raise ValueError(f"--simulate {machine.simulate}: it counts devices, so give at least 1.")
    place = {"--coordinator": machine.coordinator, "--processes": machine.processes, "--process-id": machine.process_id}
    missing = [flag for flag, value in place.items() if value is None]
    if not missing:
        assert machine.processes is not None and machine.process_id is not None and machine.coordinator is not None
        if machine.processes < 1:
            raise ValueError(f"--processes {machine.processes}: it counts, so give at least 1.")
        if not 0 <= machine.process_id < machine.processes:
            raise ValueError(
                f"--process-id {machine.process_id} --processes {machine.processes}: processes are numbered from 0 to "
                f"{machine.processes - 1}; give each its own of these numbers."
            )
        host, _, port = machine.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"--coordinator {machine.coordinator}: give host:port, such as 10.0.0.1:1234.")
    elif len(missing) < len(place):
        given = " ".join(f"{flag} {value}" for flag, value in place.items() if value is not None)
        raise ValueError(f"{given}: processes meet by three flags together; give {' and '.join(missing)} too.")


def join(machine: Machine) -> None:
    """Meet the other processes, where flags or a cluster that JAX knows say that there are any."""
    check_machine(machine)
    flags = machine.coordinator is not None
    if not flags and not _in_cluster():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if flags:
            jax.distributed.initialize(machine.coordinator, machine.processes, machine.process_id)
        else:
            jax.distributed.initialize()
    except RuntimeError as error:
        raise ValueError(f"the processes of this run did not meet: {error}") from error


def devices_of(machine: Machine) -> list[Any]:
    """All devices of the run, in order; of each process as many as are simulated."""
    if machine.simulate is None:
        return jax.devices()
    chosen = []
    for process in range(jax.process_count()):
        local = [device for device in jax.devices() if device.process_index == process][: machine.simulate]
        if len(local) < machine.simulate or local[0].platform != "cpu":
            raise ValueError(
                f"--simulate {machine.simulate}: JAX has started with {len(local)} {local[0].platform} devices; give "
                "the flag on the command line, where it is read before JAX starts."
            )
        chosen += local
    return chosen


def is_first() -> bool:
    """Whether this process writes the run's files and speaks for all."""
    return jax.process_index() == 0


def first(action: Callable[[], Result]) -> Result | None:
    """What `action` gives, run by the first process alone; the others wait and get None. All fail where it fails."""
    if jax.process_count() == 1:
        return action()
    result, failure = None, None
    if is_first():
        try:
            result = action()
        except Exception as error:
            failure = error
    failed = bool(multihost_utils.broadcast_one_to_all(np.array(failure is not None)))
    if failure is not None:
        raise failure
    if failed:
        raise ValueError("process 0 could not go on, so neither can this one; its own message says why.")
    return result


class Votes:
    """Whether any process has asked to stop, known by all at the same step.

    A step's votes are added up on the devices while the next step is set up, so that nobody waits for them: an
    answer is one step old.
    """

    def __init__(self, mesh: Mesh | AbstractMesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._shape = (mesh.size,)
        self._sum = jax.jit(lambda votes: votes.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: Any = None

    def any(self, mine: bool) -> bool:
        """Cast this process's vote; whether there was any at the step before (of one process: now)."""
        if jax.process_count() == 1:
            return mine
        vote = np.full(self._shape, int(mine), np.int32)
        pending, self._pending = (
            self._pending,
            self._sum(jax.make_array_from_callback(self._shape, self._sharding, vote.__getitem__)),
        )
        return pending is not None and int(pending) > 0


def _in_cluster() -> bool:
    """Whether a launcher that JAX knows has started this process as one of several."""
    # JAX tells only by trying, which would fail in a plain process; what it asks first can be asked alone.
    from jax._src.clusters import ClusterEnv

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a package missing for Kubernetes, on any machine inside one
        found = next(
            (env for env in ClusterEnv._cluster_types if not env.opt_in_only_method and env.is_env_present()), None
        )
    return found is not None and found.get_process_count() > 1
