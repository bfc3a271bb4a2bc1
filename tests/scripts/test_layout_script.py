"""layout.py reports a plan's costs from shapes: no device is needed, and what it says agrees with the compiled step."""

import re

import layout
import pytest
from support import setup as _setup
from support.command import parse
from support.mesh import abstract_plan, state_of

from eqformer import planning


@pytest.fixture
def report(capsys):
    def text(arguments):
        layout.main(arguments.split())
        return capsys.readouterr().out

    return text


def figure(text, name, column=0):
    (line,) = re.findall(rf"^{name} .*$", text, re.MULTILINE)
    return int(re.findall(r"[\d,]{2,}|\d", line[len(name) :])[column].replace(",", ""))


def test_a_mesh_far_larger_than_the_machine_is_examined_from_shapes(report):
    text = report("--recipe llama-3-8b --mesh.fsdp 64 --zero 3 --batch 64 --seq 8192")
    assert text.startswith("64 devices: fsdp 64; zero 3")
    whole = 8_030_261_248 * 4 + 32 * 4  # float32, and the layers' numbers
    assert figure(text, "parameters", 1) == whole
    assert figure(text, "parameters") == pytest.approx(whole / 64, rel=1e-6)
    assert figure(text, "optimizer state") == pytest.approx(2 * whole / 64, rel=1e-6)
    # Each step gathers parameters in both passes and scatters gradients: 63/64 of 3 x 4 bytes.
    # The table of tokens is gathered once for both; the head, part by part, in each.
    least = 63 / 64 * (2 * whole - 128256 * 4096 * 4)
    assert figure(text, "state  parameters, zero 3") == pytest.approx(least, rel=1e-4)
    assert figure(text, "state  gradients, zero 3") == pytest.approx(63 / 64 * whole, rel=1e-4)


def test_a_pipeline_is_reported_with_its_timeline_and_pictures(report, tmp_path):
    mesh = "--mesh.fsdp 2 --mesh.tensor 2 --mesh.pipe 2 --microbatches 4"
    text = report(f"{mesh} --picture {tmp_path}/plan.png")
    assert "layers/pipe heads/tensor head_dim embed" in text and "device 0 |F0F1....F2B0--" in text
    parts = [figure(text, name) for name in ("parameters", "optimizer state")]
    parts += [int(size.replace(",", "")) for size in re.findall(r"^in a step: .*?  +([\d,]+)", text, re.MULTILINE)]
    assert sum(parts) == figure(text, "sum when it is most")
    # Two layers, four microbatches: the layers run forward once, and backward.
    assert figure(text, "tensor  layers with a replicated stream") == 4 * 2 * 8 * 2 * 256 * 128 * 4 // 2
    for name in ("plan.png", "plan-timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.grid
def test_the_compiled_step_holds_and_sends_what_was_reported(report):
    text = report("--mesh.replica 8 --model.embed 32 --model.mlp 64 --seq 32 --compile")
    state = figure(text, "parameters") + figure(text, "optimizer state")
    (held,) = re.findall(r"compiled: ([\d,]+) bytes of state", text)
    assert int(held.replace(",", "")) == pytest.approx(state, rel=0.05)
    sent = figure(text, "state  gradients, zero 1")
    assert figure(text, "all", 1) == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("mesh", ["--mesh.fsdp 8", "--mesh.fsdp 4 --mesh.pipe 2 --microbatches 2"])
def test_gradients_are_split_as_soon_as_they_are_made_or_after_a_pipeline(mesh):
    def gradients(zero):
        recipe = parse(layout.Command, f"{mesh} --zero {zero}".split()).run
        model = _setup.shapes_of(recipe)
        states = state_of(recipe, abstract_plan(recipe), _setup.optimizer_of(recipe, model), model)
        return planning.state_bytes(states)["gradients"][0]

    held = {zero: gradients(zero) for zero in range(4)}
    assert held[1] == held[0] and held[3] < held[0] / 3
    assert held[2] == (held[0] if "pipe" in mesh else held[3])


@pytest.mark.quick
def test_spread_edges_are_reported(report):
    text = report("--mesh.fsdp 2 --mesh.pipe 4 --microbatches 4 --schedule gpipe --edges spread")
    assert figure(text, "sum when it is most") > figure(text, "parameters") + figure(text, "optimizer state")


def test_pretrains_flags_are_taken_and_help_reads_well(report, tmp_path, capsys):
    assert report(f"--run-dir {tmp_path}/run").startswith("1 device") and not (tmp_path / "run").exists()
    with pytest.raises(SystemExit):
        layout.main(["--help-all"])
    assert "\nPrints the sharding of each parameter" in capsys.readouterr().out


@pytest.mark.grid
def test_what_muon_sends_is_said_to_be_left_out(report):
    left_out = "Muon's products of whole matrices send more"
    assert left_out in report("--mesh.fsdp 2 --optimizer.name muon")
    assert left_out not in report("--mesh.fsdp 2 --optimizer.name adamw")
    assert left_out not in report("--optimizer.name muon")  # on one device


TIGHT = "--mesh.fsdp 8 --model.layers 4 --seq 64 --batch 16"


@pytest.mark.grid
def test_memory_that_is_enough_and_meshes_where_it_is_not(report):
    """Each plan that is offered is then reported to hold what was said, and that fits."""
    sum_of = lambda text: figure(text.partition("a microbatch on a device")[0], "sum when it is most")
    held = sum_of(report(TIGHT))
    assert f"fits: {held / 1e9:.3f} GB of 1,000.0 GB" in report(f"{TIGHT} --memory 1TB")
    memory = held * 3 // 4
    text = report(f"{TIGHT} --memory {memory}B")
    assert f"does not fit: {held / 1e9:.3f} GB of {memory / 1e9:.3f} GB" in text
    offered = re.findall(r"^  (--.*): ([\d.]+) GB, sends ([\d.]+) GB a step$", text, re.MULTILINE)
    assert 1 <= len(offered) <= 3
    for flags, size, _ in offered[:2]:
        again = report(f"{flags} --model.layers 4 --seq 64 --batch 16 --memory {memory}B")
        assert (
            "\nfits:" in again
            and again.startswith("8 devices")
            and sum_of(again) / 1e9 == pytest.approx(float(size), abs=0.001)
        )
    sends = [float(sent) for *_, sent in offered]
    assert sends == sorted(sends)


@pytest.mark.grid
def test_where_nothing_fits_the_part_that_is_too_large_is_named(report, monkeypatch):
    text = report(f"{TIGHT} --memory 1k")
    assert "the state alone (parameters, gradients, optimizer) takes" in text and "more microbatches" not in text
    least, number = re.findall(r"of (\d+) that are possible.* takes ([\d.]+) GB at least", text)[0][::-1]
    assert float(least) > 0 and int(number) >= 4
    # A row of 16384 tokens keeps far more than the state of a small model takes.
    long = "--mesh.fsdp 2 --model.layers 1 --batch 2 --seq 16384 --memory"
    text = report(f"{long} 12MB")
    assert (
        "but not the temporaries of a step beside it" in text and "more microbatches" in text and "stopped" not in text
    )
    monkeypatch.setattr("eqformer.planning._fitting.MOST_TRACED", 1)
    assert re.search(r"the search stopped after 1 of \d+ plans", report(f"{long} 12MB"))


@pytest.mark.grid
def test_models_are_made_once_for_all_meshes(report, monkeypatch):
    made, build = [], _setup.build_model
    monkeypatch.setattr(_setup, "build_model", lambda recipe: made.append(recipe) or build(recipe))
    report(f"{TIGHT} --memory 1k")
    assert len(made) <= 3  # as it is, for the report and for the search, and computing all again


def test_help_leaves_out_what_is_not_looked_at(capsys):
    with pytest.raises(SystemExit):
        layout.main(["--help"])
    text = capsys.readouterr().out
    assert "--run-dir" not in text and "--memory " in text and "devices:" in text


@pytest.mark.parametrize("amount", ["much", "80QB", "0GB", "-1GB", "80", "80i", "80iB", "8.0.0GB", "80GBB"])
def test_memory_is_a_number_and_a_unit(amount, capsys):
    with pytest.raises(SystemExit):
        layout.main([f"--memory={amount}"])
    assert (
        f"--memory {amount}: bytes_of({amount!r}): give what a device has as a number and a unit"
        in capsys.readouterr().err
    )
