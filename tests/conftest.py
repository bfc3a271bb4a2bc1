"""Eight simulated CPU devices and strict dtype promotion, set before JAX is first used; a folder for texts' tokens.

Programs are compiled in haste, and without the lines that they came from: the tests run thousands of small ones, each
a few times.
"""

import gc
import itertools
import os
import resource
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))  # importable, as it is for a script that runs
# Bytecode is kept, also where the environment says not to: each process would compile the package, with its checks, and
# the tests for seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from haste import check_quickly, FLAGS, move_by_numpy, share_contexts, skip_abstract_draws


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(["--xla_force_host_platform_device_count=8", *FLAGS])
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # no lines, but the names of scopes
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # programs of several devices cannot be loaded again safely
# Tokens of the scripts' texts are made once for all tests, and kernels compiled, and none in the user's home. Workers
# have their parent's.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _TOKENS = tempfile.TemporaryDirectory(prefix="tokens", ignore_cleanup_errors=True)
    _KERNELS = tempfile.TemporaryDirectory(prefix="kernels", ignore_cleanup_errors=True)
    os.environ |= {"EQFORMER_TOKENS": _TOKENS.name, "EQFORMER_KERNELS": _KERNELS.name}

import jax
import pytest


share_contexts()
move_by_numpy()
skip_abstract_draws()
check_quickly()
jax.config.update("jax_numpy_dtype_promotion", "strict")
gc.disable()
TESTS = itertools.count(1)
KEPT = [0]  # bytes of memory when programs were last let go


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Leave the cases of a test to the grid whose names its mark `by_default` does not list."""
    items = yield
    if isinstance(items, list) and items and (mark := items[0].get_closest_marker("by_default")):
        names = [item.callspec.id for item in items]
        if unknown := set(mark.args) - set(names):
            raise ValueError(f"by_default of {items[0].originalname}: no case {sorted(unknown)} among {names}")
        for item, name in zip(items, names):
            if name not in mark.args:
                item.add_marker("grid")
            elif item.get_closest_marker("grid"):
                raise ValueError(f"by_default of {item.originalname}: the case {name} must not have the mark grid too")
    return items


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Scripts, the slowest, come first; one case of each other file is `quick`: its first, unless it marks another."""
    items.sort(key=lambda item: item.path.parent.name != "scripts")
    of_files = {}
    for item in items:
        if item.path.parent.name != "scripts" and not any(map(item.get_closest_marker, ("grid", "hf"))):
            of_files.setdefault(item.path, []).append(item)
    for own in of_files.values():
        if not any(item.get_closest_marker("quick") for item in own):
            own[0].add_marker("quick")


def pytest_collection_finish():
    """What was imported stays: collecting garbage need not go through it again and again."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_sessionfinish():
    """What is left at the end goes with the process; pytest would collect it first, which takes seconds."""
    gc.freeze()


def forget_programs(max_mappings: int | None = None) -> None:
    """Let programs go before memory is full, and before the system's limit of mappings a process ends the worker.

    Each module of code that XLA compiles for the CPU takes three mappings, and Linux allows 65,530; beyond them
    compiling segfaults. To count them takes long, and is left out where `max_mappings` is None.
    """
    mappings, pages = Path("/proc/self/maps"), Path("/proc/self/statm")
    if not mappings.exists():
        return
    resident = lambda: int(pages.read_text().split()[1]) * resource.getpagesize()
    is_full = max_mappings is not None and mappings.read_bytes().count(b"\n") > max_mappings
    if is_full or resident() > KEPT[0] + 2 * 2**30:
        jax.clear_caches()
        gc.collect()
        KEPT[0] = resident()


@pytest.fixture(scope="module", autouse=True)
def forgotten_programs():
    """Programs of finished files are let go; those of a file that is not finished only if there are very many."""
    yield
    forget_programs(24_000)


@pytest.fixture(autouse=True)
def forgotten_programs_of_long_files():
    yield
    forget_programs(None if next(TESTS) % 16 else 36_000)


@pytest.fixture(autouse=True)
def listed_families():
    """A family that a test registers is let go after it."""
    from eqformer.models import _registry  # here, so that what pytest checks the shapes of is not imported before

    before = dict(_registry._REGISTERED)
    yield
    if len(_registry._REGISTERED) != len(before):
        _registry._REGISTERED.clear()
        _registry._REGISTERED.update(before)


@pytest.fixture
def key():
    return jax.random.key(0)
