"""Connect the processes of one run, and choose its devices."""

import dataclasses
from typing import Any

import jax

from eqformer import parallel
from eqformer.recipes import report


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of this process, and its number among the processes of the run."""

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
    flags = {"--coordinator": machine.coordinator, "--processes": machine.processes, "--process-id": machine.process_id}
    values = {flag: value for flag, value in flags.items() if value is not None}
    if not values:
        return
    words = " ".join(f"{flag} {value}" for flag, value in values.items())
    if missing := [flag for flag in flags if flag not in values]:
        raise ValueError(f"{words}: processes meet by three flags together; give {' and '.join(missing)} too.")
    host, _, port = str(machine.coordinator).rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--coordinator {machine.coordinator}: give host:port, such as 10.0.0.1:1234.")
    count, number = machine.processes or 0, machine.process_id or 0
    if not 0 <= number < count:
        raise ValueError(
            f"--process-id {number} --processes {count}: there is at least one process, and they are numbered from 0 "
            f"to {max(count - 1, 0)}; give each its own of these numbers."
        )


def connect(machine: Machine) -> None:
    """Connect to the other processes, if flags or a cluster that JAX knows say that there are any."""
    check_machine(machine)
    with report.print_warnings():
        parallel.connect(machine.coordinator, machine.processes, machine.process_id)


def run_devices(machine: Machine) -> list[Any]:
    """Return all devices of the run, in order; with --simulate, that many of each process."""
    check_machine(machine)
    if machine.simulate is None:
        return jax.devices()
    devices: list[Any] = []
    for process in range(jax.process_count()):
        local = [device for device in jax.devices() if device.process_index == process][: machine.simulate]
        if len(local) < machine.simulate or local[0].platform != "cpu":
            raise ValueError(
                f"--simulate {machine.simulate}: JAX has started with {len(local)} {local[0].platform} devices; give "
                "the flag on the command line, where it is read before JAX starts."
            )
        devices += local
    return devices
