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
    """Simulate this number of CPU devices (in each process), to try any mesh on any machine."""
    coordinator: str | None = None
    """host:port of process 0, to which all processes connect; not needed under Slurm, Open MPI, TPUs, Kubernetes."""
    processes: int | None = None
    """How many processes the run has; with --coordinator."""
    process_id: int | None = None
    """This process's number, from 0; with --coordinator."""
    check_shapes: bool = False
    """Check the shapes and types of all arguments and results of eqformer's functions, while programs are traced."""


def check_machine(machine: Machine) -> None:
    """Raise a `ValueError` for flags that are out of range or incomplete."""
    if machine.simulate is not None and machine.simulate < 1:
        raise ValueError(f"--simulate {machine.simulate}: give a number of devices, at least 1.")
    flags = {"--coordinator": machine.coordinator, "--processes": machine.processes, "--process-id": machine.process_id}
    values = {flag: value for flag, value in flags.items() if value is not None}
    if not values:
        return
    words = " ".join(f"{flag} {value}" for flag, value in values.items())
    if missing := [flag for flag in flags if flag not in values]:
        raise ValueError(f"{words}: processes need all three flags to connect; give {' and '.join(missing)} too.")
    host, _, port = str(machine.coordinator).rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--coordinator {machine.coordinator}: give host:port, such as 10.0.0.1:1234.")
    count, number = machine.processes or 0, machine.process_id or 0
    if not 0 <= number < count:
        raise ValueError(
            f"--process-id {number} --processes {count}: there is at least one process, and processes are numbered "
            f"from 0 to {max(count - 1, 0)}; give each process its own number."
        )


def connect(machine: Machine) -> None:
    """Connect to the other processes of the run, which flags name, or a cluster that JAX knows."""
    check_machine(machine)
    with report.print_warnings():
        parallel.connect(machine.coordinator, machine.processes, machine.process_id)


def run_devices(machine: Machine) -> list[Any]:
    """Return all devices of the run, in order; with --simulate N, the first N devices of each process."""
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
