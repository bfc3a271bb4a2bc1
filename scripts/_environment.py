"""What must be set before JAX is imported: import this module first."""

import os


def prepare(simulate: int | None = None) -> None:
    """Choose XLA's flags for a CPU, leaving what the user has set; `simulate` makes one CPU look like many devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    wanted = dict(_CPU_FLAGS)
    if simulate is not None:
        wanted["--xla_force_host_platform_device_count"] = str(simulate)
    given = {flag.partition("=")[0] for flag in flags}
    flags += [f"{name}={value}" for name, value in wanted.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join(flags)


# Products by XLA's own library of kernels, fused with what surrounds them: see docs/benchmarks.md.
_CPU_FLAGS = {"--xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}
