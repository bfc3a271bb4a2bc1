"""Accelerators that are not here: their compilers' devices, and what is known of programs compiled for them."""

import contextlib
import dataclasses
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

from eqformer.nn import compilers
from eqformer.planning import Accelerator, Program, program_of, Topology
from support.user_folder import delete_oldest, user_folder


MOST = 2**26  # the bytes of what is kept of compiled programs


def missing_compiler(topology: Topology) -> str | None:
    """How to install the compiler for a topology; None where it is installed."""
    platform = topology.accelerator.platform
    if platform in compilers():
        return None
    return f"its compiler is not installed, so nothing is compiled for {topology}: pip install 'eqformer[{platform}]'"


def devices_of(topology: Topology) -> list[Any]:
    """Devices to compile for, none of which is here; raises a `ValueError` where the compiler knows no such shape."""
    one, shape = topology.accelerator, "x".join(map(str, topology.shape))
    gpus = {"topology": f"1x{math.prod(topology.shape[1:])}x{topology.shape[0]}", "target_config": _target(one)}
    name, more = (f"{one.name}:{shape}", {}) if one.platform == "tpu" else (one.name, gpus)
    try:
        devices = list(topologies.get_topology_desc(name, platform=one.platform, **more).devices)
    except Exception as error:  # jaxlib's own kind of error, which JAX does not name
        raise ValueError(
            f"--topology {topology}: its compiler makes no such topology ({str(error).splitlines()[0][:200]}); give a "
            "shape that is sold, such as v5e:4x4, v5p:4x4x4 or h100:8, or --formulas."
        ) from error
    if len(devices) != topology.devices:
        raise ValueError(
            f"--topology {topology}: its compiler makes {len(devices)} devices of it, where a run has "
            f"{topology.devices}; give --formulas, which compiles nothing."
        )
    return devices


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What is known of a program, with the seconds that its compilation took, and whether it is an earlier one's."""

    program: Program | None
    seconds: float
    is_kept: bool
    failure: str = ""
    """The compiler's words where the program does not fit into memory; there is no program then."""


def compilation_of(lowered: jax.stages.Lowered, topology: Topology, mesh: Any) -> Compilation:
    """What is known of a program once it is compiled; the same program for the same topology is compiled once."""
    order = [device.id for device in mesh.devices.flat]
    versions = [jax.__version__, *(_version(name) for name in ("jaxlib", "libtpu", "jax_cuda13_plugin"))]
    asked = [str(topology), order, versions, os.environ.get("XLA_FLAGS", ""), lowered.as_text()]
    path = _kept(hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32])
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or another version's
        if path is not None:
            row = json.loads(path.read_text(encoding="utf-8"))
            program = None if row["program"] is None else Program.from_dict(row["program"])
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
            delete_oldest(path.parent, MOST)
    return made


def _compiled(lowered: jax.stages.Lowered, mesh: Any) -> tuple[Program | None, str]:
    try:
        return program_of(lowered.compile(), mesh), ""
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "memory" not in text.lower():
            raise
        used = re.search(r"Used \S+ of \S+ hbm", text)
        return None, used.group() if used else text.splitlines()[0][:300]


def _kept(key: str) -> Path | None:
    folder = user_folder("plans")
    return None if folder is None else folder / f"{key}.json"


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def _target(one: Accelerator) -> str:
    """What XLA must know of a GPU that is not here, as a text of protocol buffers."""
    return _GPU.format(one=one, major=10 if one.name.startswith("b") else 9, name=f"NVIDIA {one.name.upper()}")


_GPU = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {one.bandwidth:.0f}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {one.memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
