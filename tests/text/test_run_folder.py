"""`eqformer.load` of a run: the model of its latest checkpoint, with the tokenizer that it was trained with."""

import json
import shutil

import pytest
from text_cases import CONFIG, published_folder, small_model, TEMPLATE, USER

import eqformer
from eqformer import data, parallel, training
from eqformer.recipes import Recipe, Text
from eqformer.text import LLM, load_run_model


def make_run(path, *, checkpoint=True, **fields):
    """The folder of a run that holds the small model."""
    path.mkdir()
    folder = training.RunFolder(path)
    folder.write_recipe("name", Recipe(CONFIG, **fields))
    if checkpoint:
        with folder.checkpointer() as checkpointer:
            checkpointer.save({"model": small_model()}, 3, {})
    return path


@pytest.mark.grid
def test_a_run_writes_what_its_model_writes_on_any_mesh(tmp_path):
    folder = make_run(tmp_path / "run")
    llm = eqformer.load(folder)
    expected = LLM(small_model(), data.ByteTokenizer()).generate("def ", max_new_tokens=8)
    assert llm.generate("def ", max_new_tokens=8) == expected
    assert (llm.end_ids, llm.chat_template, llm.special_tokens) == ((0,), None, False)
    plan = parallel.Plan(parallel.make_mesh(pipe=1, fsdp=4, tensor=2), zero=3)
    assert eqformer.load(folder, plan=plan).generate("def ", max_new_tokens=8) == expected
    with pytest.raises(ValueError, match="has the dtypes of its recipe .* leave out dtype, weights and predictor"):
        eqformer.load(folder, dtype="bfloat16")


def test_a_run_keeps_the_tokenizer_and_the_template_that_it_began_from(tmp_path):
    published = published_folder(tmp_path / "published", chat_template__jinja=TEMPLATE)
    folder = make_run(tmp_path / "run", published=published)
    shutil.copytree(published, folder / "published")
    shutil.rmtree(published)
    llm = eqformer.load(folder)
    assert llm.special_tokens and llm.tokens("a<|endoftext|>") == [97, 0] and llm.chat_template is not None
    assert llm.chat([USER], max_new_tokens=4) == llm.generate("<user>Hi<assistant>", max_new_tokens=4)
    given = tmp_path / "bytes.json"
    given.write_text(data.ByteTokenizer().to_json())
    folder = make_run(tmp_path / "other", text=Text(tokenizer=given, end_of_text="a"))
    shutil.copyfile(given, folder / "tokenizer.json")
    given.unlink()
    assert eqformer.load(folder).end_ids == (97,)


def test_bad_runs_have_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match="the run has no checkpoint yet; let it train on"):
        load_run_model(make_run(tmp_path / "new", checkpoint=False))
    file = make_run(tmp_path / "mine", checkpoint=False) / "recipe.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content).replace('"LlamaConfig"', '"MineConfig"'))
    with pytest.raises(ValueError, match="names the class MineConfig, which eqformer does not define"):
        load_run_model(file.parent)
    recipes = [None, [], {}, {"model": 5}, content["recipe"] | {"text": [5]}, content["recipe"] | {"published": 5}]
    for recipe in recipes:
        file.write_text(json.dumps({"name": "x", "recipe": recipe}))
        with pytest.raises(ValueError, match="recipe.json: this is not a recipe that a run wrote"):
            load_run_model(file.parent)
