"""Compilers for accelerators that are not here, where they are installed, and what is kept of their programs."""

import json

import jax
import jax.numpy as jnp
import pytest
from script_helpers import run_here
from support import not_here

from eqformer.parallel import make_mesh
from eqformer.planning import topology


TINY = "--model.embed 32 --model.layers 2 --model.heads 4 --model.mlp 64 --model.kv-heads 2 --seq 32 --batch 16"


@pytest.mark.parametrize("name, extra", [("v5e:2x4", "eqformer[tpu]"), ("h100:8", "eqformer[cuda]")])
def test_without_a_compiler_formulas_are_told_and_the_extra_is_named(name, extra, monkeypatch):
    monkeypatch.setattr(not_here, "compilers", lambda: ())
    found = run_here("plan.py", *f"{TINY} --topology {name} --mesh.fsdp 8".split())
    assert found.returncode == 0 and "an MFU of" in found.stdout
    assert f"so nothing is compiled for {name}: pip install '{extra}'" in found.stdout


def test_what_was_told_of_a_program_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lowered, chips = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((8, 8))), topology("v5e:2x2")
    mesh = make_mesh(devices=jax.devices()[:1])
    first = not_here.compilation_of(lowered, chips, mesh)
    monkeypatch.setattr(not_here, "_compiled", lambda *_: pytest.fail("compiled again"))
    again = not_here.compilation_of(lowered, chips, mesh)
    assert again.is_kept and not first.is_kept and again.program == first.program and again.seconds == first.seconds
    (file,) = (tmp_path / "eqformer" / "plans").iterdir()
    file.write_text("{}")  # another version's, or half a file
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        not_here.compilation_of(lowered, chips, mesh)
    file.unlink()
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        not_here.compilation_of(lowered, topology("v5e:2x4"), mesh)  # another topology's is another program


COMPILES = pytest.mark.skipif(
    not_here.missing_compiler(topology("v5e:2x2")) is not None, reason="the extra `tpu` is not installed"
)


@COMPILES
def test_a_step_compiled_for_tpus_holds_what_was_told(tmp_path, monkeypatch):
    """Of widths that fill a TPU's tiles of 128 columns."""
    for name, value in (("SKIP_MDS_QUERY", "1"), ("WORKER_HOSTNAMES", "localhost")):
        monkeypatch.setenv(f"TPU_{name}", value)
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wide = "--model.embed 512 --model.mlp 512 --mesh.fsdp 4 --zero 3 --optimizer.name adamw"
    found = run_here("plan.py", *f"{TINY} {wide} --topology v5e:2x2 --json".split())
    row = json.loads(found.stdout)
    held = row["held"]["parameters"] + row["held"]["optimizer state"]
    assert row["compiled"]["argument"] == pytest.approx(held, rel=0.05)
    assert row["compiled"]["cycles"] > 0 and len(row["compiled"]["buffers"]) > 3
