"""Only flags that the installed XLA knows are passed to XLA, because unknown flags would end the process."""

import ast
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import eqformer
from eqformer import _prepare
from eqformer._prepare import format_flags, keep_known


ROOT = Path(__file__).parents[1]
GONE = {"xla_cpu_no_such_flag": "1", "xla_cpu_use_fusion_emitter": True}  # the second but for its last letter


def test_those_that_xla_does_not_know_are_a_line_each(caplog):
    with caplog.at_level(logging.WARNING, logger="eqformer"):
        assert keep_known(GONE | {"xla_backend_optimization_level": 0}) == {"xla_backend_optimization_level": 0}
    assert len(caplog.records) == 2
    assert all(name in record.getMessage() for name, record in zip(GONE, caplog.records))


def test_xla_agrees():
    """XLA starts with what is given to it, and with no other: the control is a flag that is gone."""
    words = (
        _prepare._CPU_FLAGS
        | _prepare._GPU_FLAGS
        | _prepare._GPU_FORWARD_FLAGS
        | {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    )
    assert _starts(format_flags(keep_known(words | GONE)))
    assert not _starts(format_flags(GONE))


def test_the_last_level_cache_is_the_largest_that_linux_lists(monkeypatch, tmp_path):
    monkeypatch.setattr(_prepare, "Path", lambda path: tmp_path)
    assert _prepare.last_level_cache() is None  # on other systems
    for name, size in {"index0": "32K\n", "index1": "1024K\n", "index3": "unknown\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(size)
    assert _prepare.last_level_cache() == 2**20


def test_flags_for_gpus_are_set_where_there_are_compilers_for_them_and_the_users_stay(monkeypatch):
    monkeypatch.setattr(_prepare, "keep_freed_memory", lambda libc: None)
    monkeypatch.setattr(_prepare, "_has_started", lambda: False)
    monkeypatch.setattr(_prepare, "keep_known", lambda options, library="jaxlib": options)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    set_by = {}
    for installed in ([], ["jax_cuda13_plugin"]):
        monkeypatch.setattr(_prepare.importlib.util, "find_spec", lambda name, there=installed: name in there or None)
        for given in ("", "--xla_gpu_enable_pipelined_all_gather=false"):
            monkeypatch.setenv("XLA_FLAGS", given)
            eqformer.prepare()
            flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "gpu" in flag]
            set_by[bool(installed), bool(given)] = [flag.partition("=")[2] for flag in flags]
    # Gathers are pipelined, scatters are not.
    wanted = {(False, False): [], (False, True): ["false"], (True, False): ["true", "false"]}
    assert set_by == wanted | {(True, True): ["false", "false"]}
    monkeypatch.setenv("XLA_FLAGS", "")
    eqformer.prepare(gradients=False)
    assert "--xla_gpu_dot_merger_threshold_mb=1" in os.environ["XLA_FLAGS"].split()


def test_flags_for_tpus_go_to_libtpu_where_it_is_and_knows_them(monkeypatch, tmp_path, caplog):
    """Another library's flags are none of its, and the control is a flag that is gone."""
    (tmp_path / "libtpu.so").write_bytes(b"..\0" + b"\0".join(name.encode() for name in _prepare._TPU_FLAGS) + b"\0..")
    spec = importlib.util.spec_from_file_location("libtpu", tmp_path / "__init__.py", submodule_search_locations=[])
    assert spec is not None
    spec.submodule_search_locations = [str(tmp_path)]
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: spec if name == "libtpu" else find(name))
        patch.setenv("LIBTPU_INIT_ARGS", "--xla_enable_async_all_gather=false --xla_of_the_user=1")
        names = [name for name in _prepare._TPU_FLAGS if name != "xla_enable_async_all_gather"]
        own = os.environ["LIBTPU_INIT_ARGS"]
        assert _prepare._tpu_flags() == {"LIBTPU_INIT_ARGS": " ".join([own, *(f"--{name}=true" for name in names)])}
        patch.setenv("LIBTPU_INIT_ARGS", _prepare._tpu_flags()["LIBTPU_INIT_ARGS"])
        assert _prepare._tpu_flags() == {}  # there is nothing left to set
        patch.setattr(_prepare, "_TPU_FLAGS", {"xla_tpu_no_such_flag": True, "xla_backend_optimization_level": 0})
        with caplog.at_level(logging.WARNING, logger="eqformer"):
            assert _prepare._tpu_flags() == {} and len(caplog.records) == 2
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name))
        assert _prepare._tpu_flags() == {} and len(caplog.records) == 2  # nothing is asked about


@pytest.mark.parametrize("own", [None, "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_jax_takes_most_of_a_gpus_memory_where_the_user_says_nothing(monkeypatch, own):
    """And jaxlib reads it so; it refuses both names at once."""
    from jaxlib.xla_client import generate_pjrt_gpu_plugin_options as options

    monkeypatch.setattr(_prepare, "keep_freed_memory", lambda libc: None)
    monkeypatch.setattr(_prepare, "_has_started", lambda: False)
    monkeypatch.setattr(_prepare, "_has_gpus", lambda: False)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS"):
        monkeypatch.setenv(name, "0.4" if name == own else "")
    eqformer.prepare()
    assert options().get("memory_fraction") == (0.4 if own else None)  # no GPU: nothing is set
    monkeypatch.setattr(_prepare, "_has_gpus", lambda: True)
    monkeypatch.setattr(_prepare, "keep_known", lambda options, library="jaxlib": options)
    eqformer.prepare()
    assert options()["memory_fraction"] == (0.4 if own else _prepare.GPU_SHARE)


def test_a_process_is_prepared_before_jax_starts_and_not_later(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    code = """
import eqformer
eqformer.prepare(devices=3)
import jax
assert len(jax.devices()) == 3 and jax.default_backend() == "cpu"
eqformer.prepare(devices=3)  # there is nothing left to set
try:
    eqformer.prepare(devices=2)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("prepare(): JAX has started already"), done.stderr
    with pytest.raises(ValueError, match=r"prepare\(devices=0\): the number of devices"):
        eqformer.prepare(devices=0)


def _starts(flags: list[str]) -> bool:
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    code = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


def test_a_flag_that_is_gone_ends_no_script(monkeypatch, caplog):
    monkeypatch.setattr(_prepare, "_CPU_FLAGS", GONE)
    monkeypatch.setattr(_prepare, "keep_freed_memory", lambda libc: None)
    monkeypatch.setattr(_prepare, "_has_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_the_user=1")
    with caplog.at_level(logging.WARNING, logger="eqformer"):
        eqformer.prepare()
    assert os.environ["XLA_FLAGS"].split() == ["--xla_of_the_user=1"]
    assert len(caplog.records) == 2


# Where names of flags may stand: where they are asked about, in what says how to simulate devices, and here. The last
# holds an attribute of transformers by such a name.
ASKED = {"eqformer/_prepare.py", "scripts/support/environment.py", "scripts/benchmarks/_apart.py", "tests/haste.py"}
ASKED |= {"tests/conftest.py", "tests/test_prepare.py", "tests/nn/test_compiled_products.py"}
ASKED |= {"tests/kernels/test_grouped_hopper.py", "tests/fixtures/make_generic.py", "tests/parallel/test_own_tokens.py"}


@pytest.mark.parametrize("folder", ["eqformer", "scripts", "tests"])
def test_no_flag_is_given_unasked(folder):
    names = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / folder).rglob("*.py")}
    found = {name: _flags_in(path.read_text(encoding="utf-8")) for name, path in names.items() if name not in ASKED}
    assert {name: flags for name, flags in found.items() if flags} == {}


@pytest.mark.quick
def test_a_flag_given_unasked_is_found():
    unasked = 'jax.jit(f, compiler_options={"xla_of_today": 1}); flags += " --xla_too=1"'
    assert set(_flags_in(unasked)) == {"xla_of_today", " --xla_too=1"}


@pytest.mark.quick
@pytest.mark.parametrize("why", ["said by the user", "no room", "no right to write", "no home"])
def test_no_folder_is_used_where_there_can_be_none(why, tmp_path, monkeypatch):
    monkeypatch.delenv(_prepare.PROGRAMS, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if why == "said by the user":
        monkeypatch.setenv(_prepare.PROGRAMS, "")
    elif why == "no room":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    elif why == "no right to write":
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    eqformer.cache_programs()
    assert not os.environ.get(_prepare.PROGRAMS)


def test_the_oldest_programs_go(tmp_path):
    for age, name in enumerate(["new", "newer", "newest"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (age, age))
    eqformer.delete_oldest(tmp_path, 250)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["newer", "newest"]
    eqformer.delete_oldest(tmp_path / "absent", 250)


def _flags_in(source: str) -> list[str]:
    if "xla_" not in source:
        return []
    words = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [word for word in words if isinstance(word, str) and word.strip(" -").startswith("xla_")]
