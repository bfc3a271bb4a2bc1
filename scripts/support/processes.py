"""One run by several processes: how they connect, and which devices they have."""

import dataclasses
import warnings
from collections import Counter
from typing import Any

import jax

from support.screen import warn


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices of this process, and its place among the other processes."""

    simulate: int | None = None
    """Have the CPU act as so many devices (of each process): any mesh can be tried on any machine."""
    coordinator: str | None = None
    """host:port of process 0, where the processes of a run meet; not needed under Slurm, Open MPI, TPUs, Kubernetes."""
    processes: int | None = None
    """How many processes the run has; with --coordinator."""
    process_id: int | None = None
    """This process's number, from 0; with --coordinator."""
    check_shapes: bool = False
    """Check the shapes and types of all that eqformer's functions take and give, while the program is traced."""


def check_machine(machine: Machine) -> None:
    """Raise a `ValueError` for flags that do not go together."""
    if machine.simulate is not None and machine.simulate < 1:
        raise ValueError(f"--simulate {machine.simulate}: it counts devices, so give at least 1.")
    place = {"--coordinator": machine.coordinator, "--processes": machine.processes, "--process-id": machine.process_id}
    given = {flag: value for flag, value in place.items() if value is not None}
    if not given:
        return
    called = " ".join(f"{flag} {value}" for flag, value in given.items())
    if missing := [flag for flag in place if flag not in given]:
        raise ValueError(f"{called}: processes meet by three flags together; give {' and '.join(missing)} too.")
    host, _, port = str(machine.coordinator).rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--coordinator {machine.coordinator}: give host:port, such as 10.0.0.1:1234.")
    number, own = machine.processes or 0, machine.process_id or 0
    if not 0 <= own < number:
        raise ValueError(
            f"--process-id {own} --processes {number}: there is at least one process, and they are numbered from 0 to "
            f"{max(number - 1, 0)}; give each its own of these numbers."
        )


def join(machine: Machine) -> None:
    """Connect to the other processes, if flags or a cluster that JAX knows say that there are any."""
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
    if jax.default_backend() == "cpu":  # as in `environment.prepare`
        jax.config.update("jax_enable_compilation_cache", False)
    numbers = Counter(device.process_index for device in jax.devices())
    if len(set(numbers.values())) > 1:
        raise ValueError(
            f"processes {', '.join(map(str, numbers))} have {', '.join(map(str, numbers.values()))} devices; give each "
            "process of a run as many (--simulate on a CPU, CUDA_VISIBLE_DEVICES on GPUs)."
        )


def devices_of(machine: Machine) -> list[Any]:
    """All devices of the run, in order; with --simulate, that many of each process."""
    check_machine(machine)
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


def _in_cluster() -> bool:
    """Whether a launcher that JAX knows has started this process as one of several."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # `jax.distributed.initialize` fails in a process without a cluster, so only its detection is called.
            from jax._src.clusters import ClusterEnv

            kinds = (kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method)
            found = next((kind for kind in kinds if kind.is_env_present()), None)
            several = found is not None and found.get_process_count() > 1
        except Exception as error:  # whatever a cluster's own library raises, or another version of JAX
            several = False
            warnings.warn(
                f"no cluster could be looked for ({type(error).__name__}: {error}), so this process trains alone; "
                "--coordinator, --processes and --process-id have it meet others.",
                stacklevel=1,
            )
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        warn(text)
    return several
