"""The user's folder of compiled programs: where it is, when there is none, and how much it keeps."""

import json
import os
import shutil
from pathlib import Path

import pytest
from script_helpers import PLAIN, start_code
from support import environment

from eqformer import _prepare


@pytest.fixture
def at_home(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_prepare, "_has_started", lambda: False)
    return tmp_path / "eqformer" / "programs"


def test_a_second_process_compiles_nothing_anew(at_home, monkeypatch):
    code = """
from support import environment
environment.prepare()
import json, jax, jax.numpy as jnp
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name.rpartition("/")[2]))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))
print(json.dumps([found.count("cache_hits"), found.count("cache_misses")]))
"""
    monkeypatch.setitem(PLAIN, "XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"])
    monkeypatch.delitem(PLAIN, "JAX_COMPILATION_CACHE_DIR")
    outputs = [json.loads(start_code(code).communicate()[0]) for _ in range(2)]
    (hits, misses), again = outputs
    assert hits == 0 and misses > 0 and again == [misses, 0]
    assert [file.name.endswith("-cache") for file in next(at_home.iterdir()).iterdir()] == [True] * misses


@pytest.mark.parametrize("flags", [["--simulate", "2"], ["--coordinator", "localhost:1"]])
def test_programs_of_several_devices_of_a_cpu_are_not_kept(flags, at_home, monkeypatch):
    for name in ("XLA_FLAGS", "JAX_ENABLE_COMPILATION_CACHE", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
    environment.prepare()
    assert at_home.exists() and not os.environ["JAX_ENABLE_COMPILATION_CACHE"]
    environment.prepare(flags)
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "0"


@pytest.mark.quick
@pytest.mark.parametrize("why", ["said by the user", "no room", "no right to write", "no home"])
def test_no_folder_is_used_where_there_can_be_none(why, at_home, monkeypatch):
    if why == "said by the user":
        monkeypatch.setenv(environment.PROGRAMS, "")
    elif why == "no room":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    elif why == "no right to write":
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    environment.share_programs()
    assert not os.environ.get(environment.PROGRAMS)


def test_the_oldest_programs_go(tmp_path):
    for age, name in enumerate(["new", "newer", "newest"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (age, age))
    environment.delete_oldest(tmp_path, 250)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["newer", "newest"]
    environment.delete_oldest(tmp_path / "absent", 250)
