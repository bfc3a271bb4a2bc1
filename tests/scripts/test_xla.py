"""Flags go to XLA only where it knows them: one that it does not would end the process."""

import ast
import logging
import os
import subprocess
import sys

import pytest
from script_helpers import SCRIPTS
from support import environment
from support.xla import as_flags, known


ROOT = SCRIPTS.parent
GONE = {"xla_cpu_no_such_flag": "1", "xla_cpu_use_fusion_emitter": True}  # the second but for its last letter


@pytest.mark.parametrize(
    "flags, found", [(["--check-shapes"], ["TypeCheckError"]), pytest.param([], [], marks=pytest.mark.grid)]
)
def test_shapes_are_checked_where_that_is_asked_for(flags, found):
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from support import environment
environment.prepare(sys.argv)
from eqformer import nn
try:
    nn.RMSNorm("embed", embed=8, eps="small")
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True)
    assert done.stdout.split() == found, done.stderr


def test_those_that_xla_does_not_know_are_a_line_each(caplog):
    with caplog.at_level(logging.WARNING, logger="eqformer"):
        assert known(GONE | {"xla_backend_optimization_level": 0}) == {"xla_backend_optimization_level": 0}
    assert len(caplog.records) == 2
    assert all(name in record.getMessage() for name, record in zip(GONE, caplog.records))


def test_xla_agrees():
    """XLA starts with what is given to it, and with no other: the control is a flag that is gone."""
    words = (
        environment._CPU_FLAGS
        | environment._GPU_FLAGS
        | {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    )
    assert _starts(as_flags(known(words | GONE)))
    assert not _starts(as_flags(GONE))


def test_flags_for_gpus_are_set_where_there_are_compilers_for_them_and_the_users_stay(monkeypatch):
    monkeypatch.setattr(environment, "keep_pages", lambda libc: None)
    monkeypatch.setattr(environment, "known", lambda options: options)
    set_by = {}
    for installed in ([], ["jax_cuda13_plugin"]):
        monkeypatch.setattr(
            environment.importlib.util, "find_spec", lambda name, there=installed: name in there or None
        )
        for given in ("", "--xla_gpu_enable_pipelined_all_gather=false"):
            monkeypatch.setenv("XLA_FLAGS", given)
            environment.prepare()
            flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "gpu" in flag]
            set_by[bool(installed), bool(given)] = [flag.partition("=")[2] for flag in flags]
    assert set_by == {(False, False): [], (False, True): ["false"], (True, False): ["true"], (True, True): ["false"]}


def _starts(flags: list[str]) -> bool:
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    code = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


def test_a_flag_that_is_gone_ends_no_script(monkeypatch, caplog):
    monkeypatch.setattr(environment, "_CPU_FLAGS", GONE)
    monkeypatch.setattr(environment, "keep_pages", lambda libc: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_the_user=1")
    with caplog.at_level(logging.WARNING, logger="eqformer"):
        environment.prepare()
    assert os.environ["XLA_FLAGS"].split() == ["--xla_of_the_user=1"]
    assert len(caplog.records) == 2


# Where names of flags may stand: where they are asked about, in what says how to simulate devices, and here. The last
# holds an attribute of transformers by such a name.
ASKED = {"scripts/support/environment.py", "tests/haste.py", "tests/conftest.py", "tests/scripts/test_xla.py"}
ASKED |= {"tests/fixtures/make_generic.py"}


@pytest.mark.parametrize("folder", ["eqformer", "scripts", "tests"])
def test_no_flag_is_given_unasked(folder):
    names = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / folder).rglob("*.py")}
    found = {name: _flags_in(path.read_text(encoding="utf-8")) for name, path in names.items() if name not in ASKED}
    assert {name: flags for name, flags in found.items() if flags} == {}


@pytest.mark.quick
def test_a_flag_given_unasked_is_found():
    unasked = 'jax.jit(f, compiler_options={"xla_of_today": 1}); flags += " --xla_too=1"'
    assert set(_flags_in(unasked)) == {"xla_of_today", " --xla_too=1"}


def _flags_in(source: str) -> list[str]:
    words = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [word for word in words if isinstance(word, str) and word.strip(" -").startswith("xla_")]
