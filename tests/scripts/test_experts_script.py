"""Training of a mixture over devices: reported metrics of experts, and samples colored by experts."""

import html
import re

import experts
import jax.numpy as jnp
import numpy as np
import pretrain
import pytest
from script_helpers import LLAMA, rows, TINY, write_corpus

from eqformer import nn
from eqformer.text import load_run_model


pytestmark = pytest.mark.grid  # each looks at a run of some seconds

MOE = [*TINY, *LLAMA, "--recipe", "moe", "--model.experts", 4]
TEXT = "def a(b):\n\treturn <b> & 'é', '\u07e7', '\x01'\n"  # NKo, of which the picture has no letters


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(folder / "corpus")
    arguments = ["--run-dir", folder / "moe", "--data", corpus, *MOE, "--validate-every", 100, "--simulate", 2]
    pretrain.main([*map(str, arguments), "--mesh.expert", "2"])
    return folder / "moe"


def test_a_run_reports_and_draws_what_its_experts_do(run_dir):
    reported = rows(run_dir, "expert_load")
    assert [row["step"] for row in reported] == [1, 2, 3, 4, 5, 6]
    loads = np.asarray([row["expert_load"] for row in reported])
    assert loads.shape == (6, 2, 4) and np.allclose(loads.sum(-1), 1, atol=1e-5)
    assert all(0 < row["router_entropy"] <= np.log(4) + 1e-6 and row["dropped_share"] == 0 for row in reported)
    assert all(
        row["load_violation"] == pytest.approx(4 * load.max() - 1, abs=1e-4) for row, load in zip(reported, loads)
    )
    for name in ("load.png", "experts.png"):
        assert (run_dir / name).read_bytes().startswith(b"\x89PNG")
    assert "<h2>mixture 1</h2>" in (run_dir / "experts.html").read_text()


def test_the_page_shows_each_tokens_first_expert(run_dir, capsys):
    experts.main(["--run-dir", str(run_dir), "--text", TEXT])
    assert f"look at {run_dir}/experts.html" in capsys.readouterr().out
    page = (run_dir / "experts.html").read_text()
    _, *layers = page.split("<h2>")
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    wanted = np.asarray(nn.first_experts(load_run_model(run_dir), jnp.asarray(ids)))
    assert len(layers) == len(wanted) == 2
    for layer, row in zip(layers, wanted):
        spans = re.findall(r'<span class="e(\d+)" title="expert (\d+)">(.*?)</span>', layer, re.DOTALL)
        assert "".join(html.unescape(text) for _, _, text in spans) == TEXT  # with all bytes of é at its last one
        assert [int(number) for number, _, _ in spans] == [int(title) for _, title, _ in spans] == row.tolist()


def test_a_long_text_is_cut_for_the_picture_and_a_file_is_read(run_dir, tmp_path):
    (tmp_path / "long.txt").write_text("a" * 96 * 20)
    experts.main(["--run-dir", str(run_dir), "--file", str(tmp_path / "long.txt"), "--tokens", "100"])
    assert (run_dir / "experts.html").read_text().count(">a</span>") == 200
    assert (run_dir / "experts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--text", "a", "--file", "b"], ["leave one of the two out"]),
        (["--file", "no-such-file"], ["no-such-file"]),
        (["--text", ""], ["nothing to color"]),
        (["--tokens", "0"], ["--tokens 0", "at least 1"]),
    ],
)
def test_bad_input_is_one_message(arguments, words, run_dir, capsys):
    before = (run_dir / "experts.html").stat().st_mtime_ns
    with pytest.raises(SystemExit) as stopped:
        experts.main(["--run-dir", str(run_dir), *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and all(word in error for word in words), error
    assert (run_dir / "experts.html").stat().st_mtime_ns == before
