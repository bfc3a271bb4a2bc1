"""plan.py tells what a step holds, sends and takes on accelerators that are not here."""

import io
import json
import sys

import plan
import pytest
from script_helpers import run_here

from eqformer import planning
from eqformer.planning import _absent, missing_compiler, topology
from eqformer.program import CompiledCosts


TINY = "--model.embed 32 --model.layers 2 --model.heads 4 --model.mlp 64 --model.kv-heads 2 --seq 32 --batch 16"


def told(arguments):
    found = run_here("plan.py", *f"{TINY} {arguments}".split())
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.quick
def test_what_is_told_is_what_layout_counts(tmp_path):
    mesh = "--mesh.fsdp 4 --mesh.tensor 2 --zero 3"
    found = json.loads(told(f"--topology h100:8 {mesh} --json --picture {tmp_path}/costs.png"))
    assert found["devices"] == 8 and found["fits"] and found["flags"] == mesh
    counted = run_here("layout.py", *f"{TINY} {mesh} --memory 1GB".split()).stdout
    assert f"{sum(found['held'].values()):,}" in counted and "\nfits: " in counted
    assert f"{sum(found['sent'].values()):,.0f}" in counted
    assert 0 < found["mfu"] < 1 and found["seconds"] > max(found["seconds_by"].values()) > 0
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.grid
def test_meshes_are_ranked_by_time():
    found = json.loads(told("--topology h100:2 --search --json"))
    times = [one["seconds"] for one in found]
    assert times == sorted(times) and 2 <= len(times) <= 5
    again = json.loads(told(f"--topology h100:2 --json {found[1]['flags']}"))
    assert again["seconds"] == times[1] and sum(again["held"].values()) == found[1]["held"]


def test_a_search_prints_a_table_before_it_traces_and_one_as_each_compiler_answers(monkeypatch):
    """Until a compiled plan fits: three do not, so that a fourth is compiled."""
    seen, made = [], iter([None, None, None, CompiledCosts(1, 1, 2)])

    def step(*_):
        assert isinstance(sys.stdout, io.StringIO)
        seen.append(sys.stdout.getvalue())
        return planning.StepBytes({"all": 1}, 0)

    monkeypatch.setattr(planning._fitting, "step_bytes", step)
    monkeypatch.setattr(plan, "compiled", lambda *_: planning.Compilation(next(made), 1.0, False, "Used 99G"))
    monkeypatch.setattr(plan, "training", lambda *_: None)
    monkeypatch.setattr(plan, "missing_compiler", lambda _: None)
    text = told("--topology h100:2 --search")
    assert all("ranked by shapes alone\n" in each and "ranked by formulas" not in each for each in seen)
    tables = text.split(" compiled\n")[1:]
    assert [(table.count("Used 99G"), table.count(" fits ")) for table in tables] == [(1, 3), (2, 2), (3, 1), (3, 1)]
    assert "<= " in text and len(seen) == 4


@pytest.mark.grid
def test_a_model_that_learns_no_next_token_may_write():
    flags = "--recipe t5-small --topology h100:1 --formulas --batch 8 --seq 64".split()
    assert "check_next_token" in run_here("plan.py", *flags).stderr  # the control: it is not trained so
    found = run_here("plan.py", *flags, "--decode")
    assert found.returncode == 0 and "\nencoder  " in found.stdout, found.stderr


LARGE = "--model.layers 8 --seq 65536 --batch 2 --model.embed 1024 --model.mlp 4096 --mesh.fsdp 2 --zero 3"


@pytest.mark.grid
def test_what_does_not_fit_has_other_plans_that_do():
    found = run_here("plan.py", *f"{TINY} {LARGE} --topology v5e:1x2 --execution.remat none".split())
    assert "looking for plans that fit" in found.stderr
    text = found.stdout
    assert "too much, of 16.9 GB" in text
    offered = text.partition("as many devices would hold it by\n")[2].strip().splitlines()
    assert 1 <= len(offered) <= 3 and all(" s a step" in line for line in offered)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--topology v9:4x4", "topology('v9:4x4'): there is no accelerator 'v9'"),
        ("--topology v5e:4", "--topology v5e:4: Topology('v5e:4').speeds(mesh=1): the topology has 4 devices"),
        (
            "--topology v5e:2x2 --mesh.fsdp 8",
            "--mesh.fsdp 8 --topology v5e:2x2: Topology('v5e:2x2').speeds(",
        ),
        ("--topology h100:16", "a machine has at most 8 h100s"),
        ("--topology v5e:1x1 --cache-dtype int8", "--cache-dtype int8: training has no caches"),
        ("--topology v5e:1x1 --decode --weights kept", "--weights kept: it is a published folder's weights"),
        ("--topology v5e:1x1 --search --picture costs.png", "--search --picture costs.png: a search ranks meshes"),
        ("--topology v5e:1x1 --search --decode", "--search --decode: a search ranks meshes"),
        ("--topology v5e:2x2 --search --model.vocab 2000000000", "no mesh was found that fits into 16.9 GB"),
    ],
)
def test_bad_input_is_one_clear_error(flags, message):
    found = run_here("plan.py", *f"{TINY} {flags}".split())
    assert found.returncode == 2 and message in found.stderr and found.stderr.count("error:") == 1


@pytest.mark.parametrize(
    "flags, line",
    [
        (
            "h100:1",
            "BlockwiseAttention; not CudnnAttention: it computes in bfloat16 or float16, not float32 (--precision.",
        ),
        ("h100:1 --precision.compute bfloat16", "CudnnAttention\n"),
        pytest.param(
            "h100:1 --precision.compute bfloat16 --text.packing documents",
            "CudnnAttention\n",
            marks=pytest.mark.grid,
        ),
        (
            "v5e:1x1",
            "BlockwiseAttention; not SplashAttention: it takes rows of a multiple of 128 tokens, not 32 and 32",
        ),
        pytest.param(
            "v5e:1x1 --seq 128 --execution.core blockwise",
            "BlockwiseAttention (--execution.core blockwise asks for it)",
            marks=pytest.mark.grid,
        ),
        pytest.param(
            "v5e:1x2 --mesh.context 2 --context-method gather --seq 256",
            "BlockwiseAttention; not a kernel: keys are gath",
            marks=pytest.mark.grid,
        ),
    ],
)
def test_the_attention_that_runs_is_said(flags, line):
    assert f"\nattention: {line}" in told(f"--formulas --topology {flags}")


def test_the_attention_that_decodes_is_said():
    """A kernel in 16 bits, for caches that are worth one."""
    line = "\ndecode attention: ReferenceDecoding; not FlashDecodingTpu: a row's slots of a head must have"
    assert line in told("--formulas --topology v5e:1x1 --decode")
    wide = (
        "\ndecode attention: ReferenceDecoding; not FlashDecodingGpu: it computes in bfloat16 or float16, not float32"
    )
    assert wide in told("--formulas --topology h100:1 --decode")
    assert "\ndecode attention: FlashDecodingGpu\n" in told(
        "--formulas --topology h100:1 --decode --precision.compute bfloat16"
    )


@pytest.mark.grid
@pytest.mark.parametrize(
    "flags, line",
    [
        ("b200:1", "\nproducts: in 8 bits, those of experts too\n"),
        ("v6e:1x1", "\nproducts: in 8 bits, but those of experts in bfloat16 where they have kernels on v6e\n"),
    ],
)
def test_the_products_that_run_are_said(flags, line):
    precision = "--precision.compute bfloat16 --precision.products"
    ask = lambda products: told(f"--formulas --recipe moe --topology {flags} {precision} {products}")
    assert line in ask("fp8") and "products: " not in ask("compute").split("by formulas")[0]


@pytest.mark.parametrize("name, extra", [("v5e:2x4", "eqformer[tpu]"), ("h100:8", "eqformer[cuda]")])
def test_without_a_compiler_formulas_are_told_and_the_extra_is_named(name, extra, monkeypatch):
    monkeypatch.setattr(_absent, "compilers", lambda: ())
    text = told(f"--topology {name} --mesh.fsdp 4 --mesh.tensor 2 --zero 3")
    assert text.startswith(f"{name}; 8 devices: fsdp 4 x tensor 2; zero 3") and "an MFU of" in text and "fits," in text
    assert f"so nothing is compiled for {name}: pip install '{extra}'" in text
    assert ("fits, of 76.4 GB that JAX takes of 84.9 GB" in text) == (name == "h100:8")


@pytest.mark.skipif(missing_compiler(topology("v5e:2x2")) is not None, reason="the extra `tpu` is not installed")
def test_a_step_compiled_for_tpus_holds_what_was_told(tmp_path, monkeypatch):
    """Of widths that fill a TPU's tiles of 128 columns."""
    for name, value in (("SKIP_MDS_QUERY", "1"), ("WORKER_HOSTNAMES", "localhost")):
        monkeypatch.setenv(f"TPU_{name}", value)
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wide = "--model.embed 512 --model.mlp 512 --mesh.fsdp 4 --zero 3 --optimizer.name adamw"
    row = json.loads(told(f"{wide} --topology v5e:2x2 --json"))
    held = row["held"]["parameters"] + row["held"]["optimizer state"]
    assert row["compiled"]["argument"] == pytest.approx(held, rel=0.05)
    assert row["compiled"]["cycles"] > 0 and len(row["compiled"]["buffers"]) > 3
    (kept,) = (tmp_path / "eqformer" / "plans").iterdir()
    assert json.loads(told(f"{wide} --topology v5e:2x2 --json"))["compiled"]["kept"], kept
