"""Settings of all tests, made before JAX is first used: eight simulated CPU devices and strict dtype promotion.

Programs are compiled quickly rather than well, and without source lines, because the tests run thousands of small
programs, each a few times.
"""

import gc
import itertools
import os
import resource
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))  # importable, as for a script that runs
# Bytecode is written even if the environment forbids it. Without bytecode, each process would compile the package, with
# its checks, and the tests for seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from haste import check_quickly, draw_rounded_sizes, FLAGS, move_by_numpy, share_contexts, skip_abstract_draws


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(["--xla_force_host_platform_device_count=8", *FLAGS])
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # names of scopes only, no source lines
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # programs of several devices cannot be loaded again safely
# The scripts' tokens and compiled kernels are made once for all tests, in temporary folders instead of the user's home.
# Worker processes use the folders of their parent.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _TOKENS = tempfile.TemporaryDirectory(prefix="tokens", ignore_cleanup_errors=True)
    _KERNELS = tempfile.TemporaryDirectory(prefix="kernels", ignore_cleanup_errors=True)
    os.environ |= {"EQFORMER_TOKENS": _TOKENS.name, "EQFORMER_KERNELS": _KERNELS.name}

import jax
import pytest


share_contexts()
move_by_numpy()
draw_rounded_sizes()
skip_abstract_draws()
check_quickly()
jax.config.update("jax_numpy_dtype_promotion", "strict")
gc.disable()
TESTS = itertools.count(1)
KEPT = [0]  # bytes of memory in use when programs were last deleted


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Mark the cases of a test as `grid`, except for the cases that the test's mark `by_default` lists."""
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
    """Run the tests of scripts first, because they are slowest, and mark a case of each other file as `quick`.

    It is the first case of the file, unless the file marks another case.
    """
    items.sort(key=lambda item: item.path.parent.name != "scripts")
    of_files = {}
    for item in items:
        if item.path.parent.name != "scripts" and not any(map(item.get_closest_marker, ("grid", "hf"))):
            of_files.setdefault(item.path, []).append(item)
    for own in of_files.values():
        if not any(item.get_closest_marker("quick") for item in own):
            own[0].add_marker("quick")


def pytest_collection_finish():
    """Exclude everything that has been imported from garbage collection, which need not visit it again and again."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_sessionfinish():
    """Exclude all objects from garbage collection at the end, which would take seconds before the process exits."""
    gc.freeze()


def forget_programs(max_mappings: int | None = None) -> None:
    """Delete compiled programs if they use much memory, or more than `max_mappings` memory mappings of the process.

    Each module of code that XLA compiles for the CPU takes three mappings. Linux allows a process 65,530 mappings;
    compiling beyond this number segfaults. Counting mappings takes long, so `max_mappings=None` leaves it out.
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
    """Delete programs after a file of tests if there are many."""
    yield
    forget_programs(24_000)


@pytest.fixture(autouse=True)
def forgotten_programs_of_long_files():
    """Delete programs within a file of tests if there are very many, which is counted after every 16 tests."""
    yield
    forget_programs(None if next(TESTS) % 16 else 36_000)


@pytest.fixture(autouse=True)
def listed_families():
    """Remove the families that a test has registered."""
    from eqformer.models import _registry  # here, because shapes are checked only in modules that are imported later

    before = dict(_registry._REGISTERED)
    yield
    if len(_registry._REGISTERED) != len(before):
        _registry._REGISTERED.clear()
        _registry._REGISTERED.update(before)


@pytest.fixture
def key():
    return jax.random.key(0)
