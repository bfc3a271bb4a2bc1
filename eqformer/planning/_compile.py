"""Steps lowered from shapes, and compiled for devices that need not be present."""

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
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.extend.core import Jaxpr
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from .. import nn, parallel, training
from .._files import JsonObject, JsonValue, read_json
from .._prepare import compiler_flags
from .._shapes import Batch, is_shape
from ..kernels import compilers
from ..parallel import COLLECTIVES
from ..program import CompiledCosts, read_compiled
from ._accelerators import Accelerator, Device, Topology


def lowered_step(states: training.PlannedState, step: training.Step, batch: Batch) -> jax.stages.Lowered:
    """Lower a training step under a plan from the shapes of its state and batch; the state is donated."""
    shapes = states.step_shapes(batch)
    if states.plan.optimizer_memory == "device" or _has_memories(states.plan.mesh):
        return step.lower(*shapes)
    # With `keep_unused`, the program has one argument for each array of the state, in the order of `is_on_host`.
    lowered = step.lower(*shapes, keep_unused=True)
    arrays = eqx.filter(shapes[0], is_shape)
    optimizer_on_host = training.is_on_host(states.plan, states.optimizer, arrays.optimizer_state)
    nothing_on_host = jax.tree.map(lambda _: False, arrays)
    is_on_host = eqx.tree_at(lambda state: state.optimizer_state, nothing_on_host, optimizer_on_host)
    _keep_on_host(lowered, jax.tree.leaves(is_on_host))
    return lowered


def _has_memories(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether JAX knows the memories of a mesh's devices, such as host memory; True for an abstract mesh."""
    return not isinstance(mesh, Mesh) or bool(mesh.devices.flat[0].addressable_memories())


def _keep_on_host(lowered: jax.stages.Lowered, on_host: list[bool]) -> None:
    """Let a program take some of its first arguments from the host's memory.

    For real devices, the shardings of arguments name the memory. A compiler for absent GPUs has devices without
    memories, so JAX drops the memory from shardings over such devices, and this function restores it.
    """
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    with module.context:
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        arguments = list(main.attributes["arg_attrs"])
        for index, is_on_host in enumerate(on_host):
            if is_on_host:
                attributes = {attribute.name: attribute.attr for attribute in arguments[index]}
                attributes["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
                arguments[index] = ir.DictAttr.get(attributes)
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(arguments)


def decode_shapes(
    plan: parallel.Plan, model: nn.LanguageModel, rows: int, capacity: int, cache_dtype: str | None = None
) -> tuple[parallel.ShardedModel, PyTree]:
    """Return the shapes of a model that a plan serves, and of its cache for `rows` rows of up to `capacity` tokens."""
    served = parallel.ShardedModel(model, plan)
    shardings = parallel.shardings(plan.parameter_specs(served.model), plan.mesh)
    arrays, static = eqx.partition(served.model, is_shape)
    arrays = jax.tree.map(
        _place_shapes, arrays, eqx.filter(shardings, lambda leaf: isinstance(leaf, jax.sharding.Sharding))
    )
    served = eqx.tree_at(lambda s: s.model, served, eqx.combine(arrays, static))
    return served, served.cache_shapes(rows, capacity, cache_dtype)


def lowered_decode(
    plan: parallel.Plan,
    model: nn.LanguageModel,
    rows: int,
    capacity: int,
    cache_dtype: str | None = None,
    *,
    tokens: int = 1,
) -> jax.stages.Lowered:
    """Lower a step that decodes one more token of each row, greedily, from shapes; the cache is donated.

    Args:
        plan: The plan that serves the model.
        model: The model's shapes.
        rows: Rows that are decoded together.
        capacity: Tokens of each row that the caches have room for.
        cache_dtype: Dtype of cached keys and values; None: the compute dtype.
        tokens: Tokens of each row that the step reads: 1 to decode, or the number of tokens of a prompt.
    """
    run, shapes = _decode(plan, *decode_shapes(plan, model, rows, capacity, cache_dtype), rows, tokens)
    return jax.jit(run, donate_argnums=1).lower(*shapes)


def traced_decode(plan: parallel.Plan, served: PyTree, cache: PyTree, rows: int) -> Jaxpr:
    """Trace a step that decodes one more token of each row, from the shapes of `decode_shapes`."""
    run, shapes = _decode(plan, served, cache, rows)
    return jax.make_jaxpr(run)(*shapes).jaxpr


def _decode(
    plan: parallel.Plan, served: PyTree, cache: PyTree, rows: int, tokens: int = 1
) -> tuple[Callable[..., tuple[PyTree, Int[Array, "batch"]]], tuple]:
    """Return a decode step, and the shapes of its arguments."""
    arrays, static = eqx.partition(served, is_shape)
    cache_arrays, cache_static = eqx.partition(cache, is_shape)
    ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32, sharding=NamedSharding(plan.mesh, PartitionSpec()))

    def run(
        arrays: PyTree, cache_arrays: PyTree, ids: Int[Array, "batch seq"], positions: Int[Array, "batch seq"]
    ) -> tuple[PyTree, Int[Array, "batch"]]:
        served = eqx.combine(arrays, static)
        logits, cache = served.decode(ids, nn.Tokens(positions), eqx.combine(cache_arrays, cache_static))
        return eqx.filter(cache, eqx.is_array), jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return run, (arrays, cache_arrays, ids, ids)


def _place_shapes(tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def missing_compiler(topology: Topology) -> str | None:
    """Return how to install the compiler for a topology; None if it is installed."""
    platform = topology.accelerator.platform
    if platform in compilers():
        return None
    return f"the compiler is missing, so nothing is compiled for {topology}: pip install 'eqformer[{platform}]'"


def devices_of(topology: Topology) -> list[Device]:
    """Return the devices of a topology, which need not be present, to compile programs for.

    Raises a `ValueError` if the compiler cannot build the topology.
    """
    accelerator = topology.accelerator
    if accelerator.platform == "tpu":
        name, options = str(topology), {"chips_per_host_bounds": chips_per_host(topology.shape)}
    else:
        gpus = f"1x{math.prod(topology.shape[1:])}x{topology.shape[0]}"
        name, options = accelerator.name, {"topology": gpus, "target_config": _target(accelerator)}
    try:
        devices = list(topologies.get_topology_desc(name, platform=accelerator.platform, **options).devices)
    except Exception as error:  # jaxlib raises a class of errors that JAX does not export
        raise ValueError(
            f"devices_of(topology={topology}): the compiler cannot build this topology "
            f"({str(error).splitlines()[0][:200]}); give a shape that is sold, such as v5e:4x4, v5p:4x4x4 or h100:8, "
            "or take planning.forecast (plan.py --formulas), which compiles nothing."
        ) from error
    if len(devices) != topology.devices:
        raise ValueError(
            f"devices_of(topology={topology}): the compiler makes {len(devices)} devices, but the topology has "
            f"{topology.devices}; take planning.forecast (plan.py --formulas), which compiles nothing."
        )
    return devices


def chips_per_host(shape: tuple[int, ...]) -> list[int]:
    """Return how many chips along each dim of a torus share a host: up to 2 along the first two dims, otherwise 1.

    libtpu's default is 2 x 2 for every shape, which does not divide the shape of a single chip.
    """
    first, second, *_ = (*shape, 1)
    return [min(first, 2), min(second, 2), 1]


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Costs of a program that was compiled for devices that need not be present, and of its compilation."""

    program: CompiledCosts | None
    """None if the program does not fit into memory."""
    seconds: float
    """Seconds that the compilation took."""
    from_cache: bool
    """Whether the costs were read from the file of an earlier compilation."""
    failure: str = ""
    """The compiler's message if the program does not fit."""

    def fits(self, memory: int) -> bool:
        """Return whether a device with `memory` bytes can run the program."""
        return self.program is not None and self.program.fits(memory)

    def as_dict(self) -> JsonObject:
        """Return all costs as plain data, with the names of collectives."""
        program, costs = self.program, {}
        if program is not None:
            costs = {"held": program.held, **program.as_dict()}
            for row, transfer in zip(costs["transfers"], program.transfers, strict=True):
                row["name"] = transfer.named(COLLECTIVES)
        return {"seconds_to_compile": self.seconds, "kept": self.from_cache, "failure": self.failure, **costs}


def compilation_of(
    lowered: jax.stages.Lowered,
    topology: Topology,
    mesh: Mesh,
    folder: Path | None = None,
) -> Compilation:
    """Compile a program for the devices of a topology, which need not be present, and return its costs.

    The `folder` keeps a file with the costs of each program. A program is compiled only once for the same topology and
    the same flags of XLA and libtpu. Raises JAX's `JaxRuntimeError` if the compiler fails for another reason than
    memory.
    """
    accelerator = topology.accelerator
    key_parts = [str(topology), [device.id for device in mesh.devices.flat], compiler_flags(), lowered.as_text()]
    key_parts += [_target(accelerator)] if accelerator.platform == "cuda" else []
    path = None if folder is None else folder / f"{_key(key_parts)}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # The file is missing, or of another version.
        if path is not None:
            row = read_json(path)
            program = None if row["program"] is None else CompiledCosts.from_dict(row["program"])
            return Compilation(program, row["seconds"], True, row["failure"])
    start = time.perf_counter()
    program, failure = _compiled(lowered, mesh)
    compilation = Compilation(program, time.perf_counter() - start, False, failure)
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            row = {"program": program and program.as_dict(), "seconds": compilation.seconds, "failure": failure}
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(row), encoding="utf-8")
            part.replace(path)
    return compilation


def _key(key_parts: list[JsonValue]) -> str:
    """Return a hash of a program, of the versions that compile it, and of the source that counts its costs."""
    versions = [jax.__version__, *(_version(name) for name in ("jaxlib", "libtpu", "jax_cuda13_plugin"))]
    return hashlib.sha256(json.dumps([key_parts, versions, _source_hash()]).encode()).hexdigest()[:32]


@functools.cache
def _source_hash() -> str:
    """Return a hash of the source of `eqformer.program`, so that costs that other code has counted are not reused."""
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


def _target(gpu: Accelerator) -> str:
    """Return the description of an absent GPU that XLA needs, as a protocol buffer in text form.

    The description names versions of CUDA, because without them XLA does not call cuBLAS for 8-bit products.
    """
    major = 10 if gpu.name.startswith("b") else 9
    cores, cache, clock = _CORES[major]
    return _GPU.format(gpu=gpu, major=major, cores=cores, cache=cache, clock=clock, name=f"NVIDIA {gpu.name.upper()}")


# Compute capability of a GPU -> its cores, the bytes of its L2 cache, and its clock rate in GHz, as XLA describes SXM
# cards.
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
  memory_bandwidth: {gpu.bandwidth:.0f}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {gpu.whole}
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
