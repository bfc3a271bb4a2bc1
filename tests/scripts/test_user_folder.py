"""The user's folder of compiled programs: its place, cases without a folder, and its maximum size."""

import json
import os

import jax
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
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    yield tmp_path / "eqformer" / "programs"
    for name, value in before.items():  # The tests' own process caches nothing.
        jax.config.update(name, value)


@pytest.mark.grid
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
