"""`plan.py` reports memory, communication and seconds of a step, for simulated devices and absent accelerators."""

import io
import json
import re
import sys

import plan
import pytest
from script_helpers import run_here
from support.command import parse

from eqformer import models, planning, PreferenceBatch
from eqformer.planning import _compile, missing_compiler, topology
from eqformer.program import CompiledCosts
from eqformer.recipes import _setup, Recipe
from eqformer.recipes._setup import make_abstract_plan, make_train_state


TINY = "--model.embed 32 --model.layers 2 --model.heads 4 --model.mlp 64 --model.kv-heads 2 --seq 32 --batch 16"


def told(arguments):
    found = run_here("plan.py", *f"{TINY} {arguments}".split())
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.grid
def test_a_topology_and_a_devices_memory_give_the_same_figures(tmp_path):
    mesh = "--mesh.fsdp 4 --mesh.tensor 2 --zero 3"
    found = json.loads(told(f"--topology h100:8 {mesh} --json --picture {tmp_path}/costs.png"))
    assert found["devices"] == 8 and found["fits"] and found["flags"] == mesh
    counted = told(f"{mesh} --memory 1GB")
    assert f"{sum(found['held'].values()):,}" in counted and "\nfits in 1.000 GB" in counted
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
    printed, programs = [], iter([None, None, None, CompiledCosts(1, 1, 2)])

    def step(*_):
        assert isinstance(sys.stdout, io.StringIO)
        printed.append(sys.stdout.getvalue())
        return planning.StepBytes({"all": 1}, 0)

    monkeypatch.setattr(planning._search, "step_bytes", step)
    monkeypatch.setattr(planning._search, "FIRST_SECONDS", float("inf"))  # on a busy machine, too
    monkeypatch.setattr(plan, "compile_for", lambda *_: planning.Compilation(next(programs), 1.0, False, "Used 99G"))
    monkeypatch.setattr(plan, "missing_compiler", lambda _: None)
    text = told("--recipe llama --topology h100:2 --search")
    assert all(
        "ranked by shapes alone\n" in printed_before and "ranked by formulas" not in printed_before
        for printed_before in printed
    )
    tables = text.split(" compiled\n")[1:]
    assert [(table.count("Used 99G"), table.count(" fits ")) for table in tables] == [(1, 3), (2, 2), (3, 1), (3, 1)]
    assert "<= " in text and len(printed) == 4


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
    assert "more than 16.9 GB" in text
    offered = text.partition("plans for the same number of devices, by formulas:\n")[2]
    plans, _, setups = offered.partition("setups that fit on the same mesh:\n")
    assert 1 <= len(plans.splitlines()) <= 3 and all(" s a step" in line for line in plans.splitlines())
    assert 1 <= len(setups.splitlines()) <= 3 and all("GB" in line for line in setups.splitlines())


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
        (
            "--topology v5e:1x1 --decode --weights quantized",
            "--weights quantized: only a published model has quantized weights",
        ),
        ("--topology v5e:1x1 --search --picture costs.png", "--search --picture costs.png: a search ranks meshes"),
        (
            "--topology v5e:1x1 --memory 80GB",
            "--topology v5e:1x1 --memory 80GB: the topology decides a device's memory",
        ),
        ("--topology v5e:1x1 --compile", "--topology v5e:1x1 --compile: a step is always compiled for the topology"),
        ("--search", "--topology is missing"),
        ("--decode", "--topology is missing"),
        ("--topology v5e:1x1 --search --decode", "--search --decode: a search ranks meshes"),
        ("--topology v5e:2x2 --search --model.vocab 2000000000", "no mesh fits into 16.9 GB"),
    ],
)
def test_bad_input_is_one_clear_error(flags, message):
    found = run_here("plan.py", *f"{TINY} {flags}".split())
    assert found.returncode == 2 and message in found.stderr and found.stderr.count("error:") == 1


@pytest.mark.grid
@pytest.mark.parametrize(
    "flags, line",
    [
        (
            "h100:1",
            "BlockwiseAttention; not CudnnAttention: it computes in bfloat16 or float16, not float32 (--precision.",
        ),
        ("h100:1 --precision.compute bfloat16", "CudnnAttention\n"),
        ("h100:1 --precision.compute bfloat16 --text.packing documents", "CudnnAttention\n"),
        (
            "v5e:1x1",
            "BlockwiseAttention; not SplashAttention: it takes rows of a multiple of 128 tokens, not 32 and 32",
        ),
        (
            "v5e:1x1 --seq 128 --execution.core blockwise",
            "BlockwiseAttention (--execution.core blockwise asks for it)",
        ),
        (
            "v5e:1x2 --mesh.context 2 --context-method gather --seq 256",
            "BlockwiseAttention; not a kernel: keys are gath",
        ),
    ],
)
def test_the_attention_that_runs_is_said(flags, line):
    assert f"\nattention: {line}" in told(f"--formulas --recipe llama --topology {flags}")


@pytest.mark.grid
def test_the_attention_that_decodes_is_said():
    """A kernel in 16 bits, for caches that are worth one."""
    line = "\ndecode attention: ReferenceDecoding; not FlashDecodingTpu: the slots of a head must have"
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
        ("b200:1", "\nproducts: in 8 bits, in experts too\n"),
        ("v6e:1x1", "\nproducts: in 8 bits, but the kernels for experts on v6e compute in bfloat16\n"),
    ],
)
def test_the_products_that_run_are_said(flags, line):
    precision = "--precision.compute bfloat16 --precision.products"
    ask = lambda products: told(f"--formulas --recipe moe --topology {flags} {precision} {products}")
    assert line in ask("fp8") and "products: " not in ask("compute").split("by formulas")[0]


@pytest.mark.by_default("h100:8-eqformer[cuda]")
@pytest.mark.parametrize("name, extra", [("v5e:2x4", "eqformer[tpu]"), ("h100:8", "eqformer[cuda]")])
def test_without_a_compiler_formulas_are_told_and_the_extra_is_named(name, extra, monkeypatch):
    monkeypatch.setattr(_compile, "compilers", lambda: ())
    mesh = "--mesh.fsdp 4 --mesh.tensor 2 --zero 3"
    text = told(f"--recipe llama --topology {name} {mesh} --precision.compute bfloat16")
    assert ("\nattention: CudnnAttention\n" in text) == (name == "h100:8")
    assert text.startswith(f"{name}; 8 devices: fsdp 4 x tensor 2; zero 3") and "an MFU of" in text and "fits" in text
    assert f"so nothing is compiled for {name}: pip install '{extra}'" in text
    assert ("fits in 76.4 GB, JAX's share of 84.9 GB" in text) == (name == "h100:8")


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


@pytest.fixture
def report(capsys):
    def text(arguments):
        plan.main(arguments.split() if "--recipe" in arguments else ["--recipe", "llama", *arguments.split()])
        return capsys.readouterr().out

    return text


def figure(text, name, column=0):
    """An exact number of bytes in the line that begins with a name, which stands behind the same in GB."""
    (line,) = re.findall(rf"^{name} .*$", text, re.MULTILINE)
    numbers = re.findall(r"[\d,]{2,}|\d", re.sub(r"[\d,.]+ GB", "", line[len(name) :]))
    return int(numbers[column].replace(",", ""))


def test_a_mesh_far_larger_than_the_machine_is_examined_from_shapes(report, tmp_path):
    """The flag of pretrain.py for a run's folder is taken, and no folder is made."""
    text = report(f"--recipe llama-3-8b --mesh.fsdp 64 --zero 3 --batch 64 --seq 8192 --run-dir {tmp_path}/run")
    assert not (tmp_path / "run").exists()
    assert text.startswith("64 devices: fsdp 64; zero 3")
    parameter_bytes = 8_030_261_248 * 4 + 32 * 4  # float32, and the layers' numbers
    assert figure(text, "parameters", 1) == parameter_bytes
    assert figure(text, "parameters") == pytest.approx(parameter_bytes / 64, rel=1e-6)
    assert figure(text, "optimizer state") == pytest.approx(2 * parameter_bytes / 64, rel=1e-6)
    # Each step gathers parameters in both passes and scatters gradients: 63/64 of 3 x 4 bytes.
    # The table of tokens is gathered once for both; the head, part by part, in each.
    gathered = 63 / 64 * (2 * parameter_bytes - 128256 * 4096 * 4)
    assert figure(text, "state  parameters, zero 3") == pytest.approx(gathered, rel=1e-4)
    assert figure(text, "state  gradients, zero 3") == pytest.approx(63 / 64 * parameter_bytes, rel=1e-4)


def test_a_pipeline_is_reported_with_its_timeline_and_pictures(report, tmp_path):
    mesh = "--mesh.fsdp 2 --mesh.tensor 2 --mesh.pipe 2 --microbatches 4"
    text = report(f"{mesh} --picture {tmp_path}/plan.png")
    assert "layers/pipe heads/tensor head_dim embed" in text and "device 0 |F0F1....F2B0--" in text
    parts = [figure(text, name) for name in ("parameters", "optimizer state")]
    parts += [int(size.replace(",", "")) for size in re.findall(r"^in a step: .*? GB +([\d,]+)", text, re.MULTILINE)]
    assert sum(parts) == figure(text, "sum at the peak of a step")
    # Two layers, four microbatches: the layers run forward once, and backward.
    assert figure(text, "tensor  layers with a replicated stream") == 4 * 2 * 8 * 2 * 256 * 128 * 4 // 2
    for name in ("plan.png", "plan-timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.grid
def test_the_compiled_step_holds_and_sends_what_was_reported(report):
    text = report("--mesh.replica 8 --model.embed 32 --model.mlp 64 --seq 32 --compile")
    state = figure(text, "parameters") + figure(text, "optimizer state")
    (compiled_state,) = re.findall(r"compiled: ([\d,]+) bytes of state", text)
    assert int(compiled_state.replace(",", "")) == pytest.approx(state, rel=0.05)
    sent = figure(text, "state  gradients, zero 1")
    assert figure(text, "all", 1) == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("loss,has_reference", [("dpo", True), ("ipo", True), ("orpo", False), ("next-token", None)])
def test_a_batch_of_pairs_has_groups_and_nats_of_a_reference(loss, has_reference):
    batch = Recipe(models.preset("llama-byte-1m"), loss=loss, seq=32, batch=4).batch_shapes()
    assert batch.group == (1 if has_reference is None else 2)
    if has_reference is not None:
        assert isinstance(batch, PreferenceBatch)
        assert batch.documents == 1 and (batch.reference_nats is not None) == has_reference


@pytest.mark.grid
@pytest.mark.parametrize("loss", ["dpo", "orpo", "kto"])
def test_a_step_over_preferences_is_compiled(loss, report, tmp_path, capsys):
    sizes = f"--mesh.fsdp 8 --model.embed 32 --model.mlp 64 --seq 32 --loss {loss} --data {tmp_path}/pairs.jsonl"
    assert "compiled: " in report(f"{sizes} --batch 16 --compile")
    if loss == "kto":
        return
    with pytest.raises(SystemExit):  # The control: a device would have half a pair.
        report(f"{sizes} --batch 8")
    assert "pieces of whole groups of 2 rows" in capsys.readouterr().err


@pytest.mark.by_default("--mesh.fsdp 4 --mesh.pipe 2 --microbatches 2")
@pytest.mark.parametrize("mesh", ["--mesh.fsdp 8", "--mesh.fsdp 4 --mesh.pipe 2 --microbatches 2"])
def test_gradients_are_split_as_soon_as_they_are_made_or_after_a_pipeline(mesh):
    def gradients(zero):
        recipe = parse(plan.Command, f"--recipe llama {mesh} --zero {zero}".split()).run
        model = _setup.model_shapes(recipe)
        states = make_train_state(recipe, make_abstract_plan(recipe), _setup.make_optimizer(recipe, model), model)
        return planning.state_bytes(states)["gradients"][0]

    gradient_bytes = {zero: gradients(zero) for zero in range(4)}
    assert gradient_bytes[1] == gradient_bytes[0] and gradient_bytes[3] < gradient_bytes[0] / 3
    assert gradient_bytes[2] == (gradient_bytes[0] if "pipe" in mesh else gradient_bytes[3])


@pytest.mark.quick
def test_spread_edges_are_reported(report):
    text = report("--mesh.fsdp 2 --mesh.pipe 4 --microbatches 4 --schedule gpipe --edges spread")
    assert figure(text, "sum at the peak of a step") > figure(text, "parameters") + figure(text, "optimizer state")


def test_help_reads_well(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--help-all"])
    assert "\nThe report has the sharding of each parameter" in capsys.readouterr().out


@pytest.mark.grid
def test_what_muon_sends_is_said_to_be_left_out(report):
    left_out = "Muon's products of whole matrices send more"
    assert left_out in report("--mesh.fsdp 2 --optimizer.name muon")
    assert left_out in report("--mesh.fsdp 2 --optimizer.name normuon")
    assert left_out not in report("--mesh.fsdp 2 --optimizer.name adamw")
    alone = report("--optimizer.name muon")
    assert alone.startswith("1 device") and left_out not in alone


TIGHT = "--mesh.fsdp 8 --model.layers 4 --seq 64 --batch 16"


@pytest.mark.grid
def test_memory_that_is_enough_and_meshes_where_it_is_not(report):
    """Each plan that is offered is then reported to hold what was said, and that fits."""
    sum_of = lambda text: figure(text, "sum at the peak of a step")
    bytes_held = sum_of(report(TIGHT))
    assert "\nfits in 1,000.0 GB" in report(f"{TIGHT} --memory 1TB")
    memory = bytes_held // 2
    text = report(f"{TIGHT} --memory {memory}B")
    assert f"\ndoes not fit: {(bytes_held - memory) / 1e9:.3f} GB more than {memory / 1e9:.3f} GB" in text
    offered = re.findall(r"^  (--.*): ([\d.]+) GB, sends ([\d.]+) GB a step(?:, too close.*)?$", text, re.MULTILINE)
    assert 1 <= len(offered) <= 3
    for flags, size, _ in offered[:2]:
        offered_report = report(f"{flags} --model.layers 4 --seq 64 --batch 16 --memory {memory}B")
        assert offered_report.startswith("8 devices") and sum_of(offered_report) / 1e9 == pytest.approx(
            float(size), abs=0.001
        )
        assert re.search("^(fits in|too close to tell without the compiler:)", offered_report, re.MULTILINE)
    sends = [float(sent) for *_, sent in offered]
    assert sends == sorted(sends)


@pytest.mark.grid
def test_where_nothing_fits_the_part_that_is_too_large_is_named(report, monkeypatch):
    text = report(f"{TIGHT} --memory 1k")
    assert "the state alone (parameters, gradients, optimizer) takes" in text and "more microbatches" not in text
    least, number = re.findall(r"of (\d+) possible meshes.* takes at least ([\d.]+) GB", text)[0][::-1]
    assert float(least) > 0 and int(number) >= 4
    # A row of 16384 tokens keeps far more than the state of a small model takes.
    long = "--mesh.fsdp 2 --model.layers 1 --batch 2 --seq 16384 --memory"
    text = report(f"{long} 12MB")
    assert (
        "but the temporaries of a step take at least" in text and "more microbatches" in text and "stopped" not in text
    )
    monkeypatch.setattr("eqformer.planning._search.MAX_TRACED_WITHOUT_FIT", 1)
    assert re.search(r"of \d+ plans ranked by formulas, only the first 1 were traced", report(f"{long} 12MB"))


@pytest.mark.grid
def test_models_are_made_once_for_all_meshes(report, monkeypatch):
    built, build = [], _setup.build_model
    monkeypatch.setattr(_setup, "build_model", lambda *arguments: built.append(arguments) or build(*arguments))
    report(f"{TIGHT} --memory 1k")
    assert len(built) <= 3  # the recipe's, and one in another precision


def test_help_leaves_out_what_is_not_looked_at(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    text = capsys.readouterr().out
    assert "--run-dir" not in text and "--memory " in text and "devices:" in text


@pytest.mark.parametrize("amount", ["much", "80QB", "0GB", "-1GB", "80", "80i", "80iB", "8.0.0GB", "80GBB"])
def test_memory_is_a_number_and_a_unit(amount, capsys):
    with pytest.raises(SystemExit):
        plan.main([f"--memory={amount}"])
    assert (
        f"--memory {amount}: parse_bytes({amount!r}): give a device's memory as a number and a unit"
        in capsys.readouterr().err
    )
