"""Programs compiled for absent accelerators: errors for missing compilers, and the cache of compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from eqformer.parallel import make_mesh
from eqformer.planning import _compile, ACCELERATORS, compilation_of, devices_of, missing_compiler, topology


# Set for libtpu to compile where no TPU is.
TPU_ABSENT = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def test_a_missing_compiler_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(_compile, "compilers", lambda: ("tpu",))
    assert missing_compiler(topology("v5e:2x4")) is None
    assert "h100:8: pip install 'eqformer[cuda]'" in str(missing_compiler(topology("h100:8")))


def test_what_was_told_of_a_program_is_kept(tmp_path, monkeypatch):
    lowered, chips = jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((8, 8))), topology("v5e:2x2")
    mesh, folder = make_mesh(devices=jax.devices()[:1]), tmp_path / "plans"
    first = compilation_of(lowered, chips, mesh, folder)
    assert not compilation_of(lowered, chips, mesh).from_cache  # where no folder is given
    monkeypatch.setattr(_compile, "_compiled", lambda *_: pytest.fail("compiled again"))
    again = compilation_of(lowered, chips, mesh, folder)
    assert again.from_cache and not first.from_cache
    assert again.program == first.program and again.seconds == first.seconds
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):  # by which programs are others
        with monkeypatch.context() as other, pytest.raises(pytest.fail.Exception, match="compiled again"):
            other.setenv(name, "a flag more")
            compilation_of(lowered, chips, mesh, folder)
    with monkeypatch.context() as other, pytest.raises(pytest.fail.Exception, match="compiled again"):
        other.setattr(_compile, "_source_hash", lambda: "counted otherwise")
        compilation_of(lowered, chips, mesh, folder)
    (file,) = folder.iterdir()
    file.write_text("{}")  # another version's, or half a file
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        compilation_of(lowered, chips, mesh, folder)
    file.unlink()
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        compilation_of(lowered, topology("v5e:2x4"), mesh, folder)  # another topology's is another program


@pytest.mark.skipif(missing_compiler(topology("v5e:2x2")) is not None, reason="the extra `tpu` is not installed")
def test_shapes_smaller_than_a_host_have_devices(monkeypatch):
    """Of every generation that has a device a chip: each shape of at most a host's 2 x 2 chips, and larger ones."""
    for name, value in TPU_ABSENT.items():
        monkeypatch.setenv(name, value)
    names = [name for name, one in ACCELERATORS.items() if one.platform == "tpu" and name != "v4"]
    for name in names:
        more = "" if ACCELERATORS[name].links == 4 else "x1"
        for shape in ("1x1", "1x2", "2x1", "2x2", "1x4", "4x4"):
            chips = topology(f"{name}:{shape}{more}")
            assert len(devices_of(chips)) == chips.devices, chips
    with pytest.raises(ValueError, match="cannot build this topology"):  # the control: no host has part of this shape
        devices_of(topology("v5e:3x3"))


def test_a_gpu_is_described_by_its_own_generation():
    """Numbers of cores, and bytes of the second cache, of a SXM H100 and of a B200."""
    words = {name: _compile._target(topology(f"{name}:8").accelerator).split() for name in ("h100", "h200", "b200")}
    of = lambda name, field: words[name][words[name].index(field) + 1]
    assert [of(name, "core_count:") for name in words] == ["132", "132", "148"]
    assert int(of("b200", "l2_cache_size:")) > 2 * int(of("h100", "l2_cache_size:")) == 2 * 50 * 2**20
    assert [of(name, "major:") for name in words] == ["9", "9", "10"] and of("b200", "clock_rate_ghz:") == "1.965"
    assert of("h100", "device_memory_size:") == "84942979072"  # all of it, as a run's compiler sees it
