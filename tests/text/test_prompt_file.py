"""Texts for a file of prompts: settings of each row, errors that name lines, and files that are continued."""

import json
import shutil
from pathlib import Path

import pytest
from test_text_engine import SIZES
from text_cases import scripted

from eqformer.text import complete_file, TextRequest


ROWS = [
    {"prompt": "one", "stop": "four"},
    {"prompt": "a much longer prompt than the others: ", "max_new_tokens": 3},
    {"prompt": "x", "temperature": 2.0, "max_new_tokens": 30},
    {"prompt": "é", "max_new_tokens": 1},
]


@pytest.fixture(scope="module")
def engine():
    return scripted("one two three four five six seven eight nine ten").engine(**SIZES)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(row) for row in ROWS[:2]] + [""] + [json.dumps(row) for row in ROWS[2:]]))
    return path


def complete(engine, source, target, **options):
    return complete_file(engine, source, target, request=TextRequest("", max_new_tokens=20), **options)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_row_has_its_text_in_the_order_of_rows(engine, source, tmp_path):
    shown = []
    summary = complete(engine, source, tmp_path / "out", progress=lambda done, total: shown.append((done, total)))
    first, second, third, fourth = records(tmp_path / "out")
    assert (summary.rows, summary.kept, summary.errors) == (4, 0, 0) and shown == [(n, 4) for n in range(5)]
    assert summary.tokens == sum(record["tokens"] for record in (first, second, third, fourth))
    assert (first["text"], first["finish_reason"], second["text"]) == (" two three ", "stop", "t n")
    assert [record["line"] for record in (first, second, third, fourth)] == [1, 2, 4, 5]
    assert third["row"] == ROWS[2] and third["text"] != engine.llm.generate("x", max_new_tokens=30)
    alone = engine.llm.generate(["a", "b", "x"], max_new_tokens=30, temperature=2.0)
    assert third["text"] == alone[2] and fourth["text"] == "e"


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_an_interrupted_file_goes_on_as_if_it_had_not_stopped(engine, source, tmp_path, written):
    """A process may be killed between any two bytes; lines are in the order in which texts end."""
    complete(engine, source, tmp_path / "whole", best_of=2, log_probs=True)
    whole = (tmp_path / "whole").read_bytes()
    lines = whole.splitlines(keepends=True)[::-1]
    (tmp_path / "part").write_bytes(b"".join(lines[:written]) + lines[written][:-3])
    summary = complete(engine, source, tmp_path / "part", best_of=2, log_probs=True)
    assert summary.kept == written and (tmp_path / "part").read_bytes() == whole
    again = complete(engine, source, tmp_path / "part", best_of=2, log_probs=True)
    assert again.kept == 4 and again.tokens == 0 and (tmp_path / "part").read_bytes() == whole


def test_samples_of_a_row_differ_and_the_likeliest_is_first(engine, source, tmp_path):
    complete(engine, source, tmp_path / "out", best_of=3, log_probs=True)
    greedy, _, sampled, _ = (record["samples"] for record in records(tmp_path / "out"))
    assert len({sample["text"] for sample in greedy}) == 1 and len({sample["text"] for sample in sampled}) == 3
    assert [sample["log_prob"] for sample in sampled] == sorted((s["log_prob"] for s in sampled), reverse=True)
    assert sum(sampled[0]["log_probs"]) == pytest.approx(sampled[0]["log_prob"], abs=1e-3)
    assert len(sampled[0]["ids"]) == len(sampled[0]["log_probs"]) == sampled[0]["tokens"]


def test_another_input_or_other_settings_are_refused(engine, source, tmp_path):
    complete(engine, source, tmp_path / "out")
    before = (tmp_path / "out").read_bytes()
    with pytest.raises(ValueError, match="line 1: it was written with other settings"):
        complete(engine, source, tmp_path / "out", best_of=2)
    source.write_text(source.read_text().replace("much longer", "longer"))
    with pytest.raises(ValueError, match=r"line 2: it has a text for line 2 of .*rows.jsonl, which has changed"):
        complete(engine, source, tmp_path / "out")
    with pytest.raises(ValueError, match="line 1: complete_file has not written this line"):
        complete(engine, source, Path(shutil.copy(source, tmp_path / "copied rows")))
    assert (tmp_path / "out").read_bytes() == before


@pytest.mark.parametrize(
    "line,words",
    [
        ('{"prompt": "a"', "line 6: "),
        ("[1]", 'line 6: a row is an object with either a "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"prompt": ["a"]}', "line 6: TextRequest: a list as prompt must hold ids, but one entry is 'a'"),
        ('{"prompt": "a", "temprature": 1}', "line 6: TextRequest: there is no field 'temprature'"),
        ('{"prompt": "a", "temperature": "hot"}', "line 6: TextRequest: temperature must be a number, but it is 'hot'"),
        (
            '{"prompt": "a", "max_new_tokens": 400}',
            "line 6: .*400 new tokens need a row of 401.*rows have 192",
        ),
        ('{"prompt": "a", "seed": -1}', "line 6: .*seed must be from 0 to 2147483647, but it is -1"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "line 6: .*no chat template"),
        ('{"prompt": "a\\ud800"}', "line 6: "),
    ],
)
def test_a_row_that_cannot_be_continued_is_named_before_anything_is_generated(engine, source, tmp_path, line, words):
    source.write_text(source.read_text() + "\n" + line)
    with pytest.raises(ValueError, match=words):
        complete(engine, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_row_with_a_lone_surrogate_is_written_and_read_again(engine, source, tmp_path):
    row = {"prompt": "x", "stop": "\ud800", "max_new_tokens": 3}
    source.write_text(json.dumps(row))
    assert complete(engine, source, tmp_path / "out").errors == 0
    assert records(tmp_path / "out")[0]["row"] == row and records(tmp_path / "out")[0]["tokens"] == 3
    assert complete(engine, source, tmp_path / "out").kept == 1
    source.write_text(json.dumps(row | {"stop": "\ud801"}))
    with pytest.raises(ValueError, match="line 1: it has a text for line 1 of .*, which has changed"):
        complete(engine, source, tmp_path / "out")


def test_an_error_of_a_row_is_written_and_ends_no_other(engine, source, tmp_path):
    forbidden = {str(token): float("-inf") for token in range(256)}
    source.write_text(source.read_text() + "\n" + json.dumps({"prompt": "a", "logit_bias": forbidden}))
    summary = complete(engine, source, tmp_path / "out")
    assert summary.errors == 1 and [set(record) & {"text", "error"} for record in records(tmp_path / "out")] == [
        *[{"text"}] * 4,
        {"error"},
    ]
    assert "left no token to sample" in records(tmp_path / "out")[-1]["error"]
