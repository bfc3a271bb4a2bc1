"""Accelerators that are not here: devices to compile for, and what is known of programs compiled for them."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from .._prepare import compiler_flags
from .._read import read_json
from ..kernels import compilers
from ..parallel import COLLECTIVES
from ..program import CompiledCosts, read_compiled
from ._accelerators import Accelerator, Topology


def missing_compiler(topology: Topology) -> str | None:
    """How to install the compiler for a topology; None where it is installed."""
    platform = topology.accelerator.platform
    if platform in compilers():
        return None
    return f"its compiler is not installed, so nothing is compiled for {topology}: pip install 'eqformer[{platform}]'"


def devices_of(topology: Topology) -> list[Any]:
    """Return devices to compile for, none of which is here; a `ValueError` where the compiler knows no such shape."""
    accelerator = topology.accelerator
    if accelerator.platform == "tpu":
        name, options = str(topology), {"chips_per_host_bounds": chips_per_host(topology.shape)}
    else:
        gpus = f"1x{math.prod(topology.shape[1:])}x{topology.shape[0]}"
        name, options = accelerator.name, {"topology": gpus, "target_config": _target(accelerator)}
    try:
        devices = list(topologies.get_topology_desc(name, platform=accelerator.platform, **options).devices)
    except Exception as error:  # jaxlib's own kind of error, which JAX does not name
        raise ValueError(
            f"devices_of(topology={topology}): its compiler makes no such topology "
            f"({str(error).splitlines()[0][:200]}); give a shape that is sold, such as v5e:4x4, v5p:4x4x4 or h100:8, "
            "or go by formulas, which compile nothing."
        ) from error
    if len(devices) != topology.devices:
        raise ValueError(
            f"devices_of(topology={topology}): its compiler makes {len(devices)} devices of it, where a run has "
            f"{topology.devices}; go by formulas, which compile nothing."
        )
    return devices


def chips_per_host(shape: tuple[int, ...]) -> list[int]:
    """Return how many chips of each dim of a torus share a host: 2 x 2, or as many as a smaller shape has.

    libtpu takes 2 x 2 by itself, which divides no shape of a single chip.
    """
    first, second, *_ = (*shape, 1)
    return [min(first, 2), min(second, 2), 1]


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What is known of a program that was compiled for devices that are not here."""

    program: CompiledCosts | None
    """None where it does not fit into memory."""
    seconds: float
    """That its compilation took."""
    is_kept: bool
    """Whether an earlier compilation told."""
    failure: str = ""
    """The compiler's words where it does not fit."""

    def fits(self, memory: int) -> bool:
        """Return whether a device of so many bytes can run the program."""
        return self.program is not None and self.program.fits(memory)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data: the program's, with the names of what it sends, and its compilation's."""
        program, whole = self.program, {}
        if program is not None:
            whole = {"held": program.held, **program.as_dict()}
            for row, each in zip(whole["transfers"], program.transfers, strict=True):
                row["name"] = each.named(COLLECTIVES)
        return {"seconds_to_compile": self.seconds, "kept": self.is_kept, "failure": self.failure, **whole}


def compilation_of(
    lowered: jax.stages.Lowered,
    topology: Topology,
    mesh: Mesh,
    folder: Path | None = None,
) -> Compilation:
    """What is known of a program once it is compiled for devices of a topology, on which it cannot run.

    What is known is kept in the `folder`, a file each: the same program for the same topology and the same flags of
    XLA and libtpu is compiled once. Raises JAX's `JaxRuntimeError` where the compiler fails for another reason than
    memory.
    """
    one = topology.accelerator
    asked = [str(topology), [device.id for device in mesh.devices.flat], compiler_flags(), lowered.as_text()]
    asked += [_target(one)] if one.platform == "cuda" else []
    path = None if folder is None else folder / f"{_key(asked)}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or another version's
        if path is not None:
            row = read_json(path)
            program = None if row["program"] is None else CompiledCosts.from_dict(row["program"])
            return Compilation(program, row["seconds"], True, row["failure"])
    start = time.perf_counter()
    program, failure = _compiled(lowered, mesh)
    made = Compilation(program, time.perf_counter() - start, False, failure)
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            row = {"program": program and program.as_dict(), "seconds": made.seconds, "failure": failure}
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(row), encoding="utf-8")
            part.replace(path)
    return made


def _key(asked: list[Any]) -> str:
    """A name for what is compiled, by which versions, and by what its program is read and counted."""
    versions = [jax.__version__, *(_version(name) for name in ("jaxlib", "libtpu", "jax_cuda13_plugin"))]
    return hashlib.sha256(json.dumps([asked, versions, _counters()]).encode()).hexdigest()[:32]


@functools.cache
def _counters() -> str:
    """Return a name for the source of `program`: a program whose costs were counted by other code is counted anew."""
    sources = sorted((Path(__file__).parents[1] / "program").glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _compiled(lowered: jax.stages.Lowered, mesh: Mesh) -> tuple[CompiledCosts | None, str]:
    try:
        return read_compiled(lowered.compile(), mesh), ""
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "memory" not in text.lower():
            raise
        used = re.search(r"Used \S+ of \S+ hbm", text)
        return None, used.group() if used else text.splitlines()[0][:300]


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def _target(one: Accelerator) -> str:
    """What XLA must know of a GPU that is not here, as a text of protocol buffers.

    The versions are those of CUDA: without them it takes no call of cuBLAS for products of 8 bits.
    """
    major = 10 if one.name.startswith("b") else 9
    cores, cache, clock = _CORES[major]
    return _GPU.format(one=one, major=major, cores=cores, cache=cache, clock=clock, name=f"NVIDIA {one.name.upper()}")


# By compute capability, of SXM cards, as XLA describes them: cores, bytes of the second cache, gigahertz.
_CORES = {9: (132, 52_428_800, 1.98), 10: (148, 132_644_864, 1.965)}

_GPU = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {one.bandwidth:.0f}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {one.whole}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
