"""Texts of models of block diffusion: whole, streamed, of a chat, by an engine and of a file of prompts."""

import asyncio
import dataclasses
import json
import math
from typing import Any

import equinox as eqx
import jax
import pytest
from text_cases import scripted, TEMPLATE

import eqformer
from eqformer import data, generation, models, nn, parallel, text
from eqformer.text import TextRequest


SCRIPT = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
CONFIG = models.SDARConfig(256, 16, 2, 2, 1, 24, head_dim=8, block=4)
ENGINE: dict[str, Any] = dict(slots=2, capacity=128)


@pytest.fixture(scope="module")
def llm():
    """A model that writes the script in blocks of 8 tokens."""
    return scripted(SCRIPT, block=8)


def test_texts_end_at_their_length_at_a_string_and_at_the_end(llm):
    assert isinstance(llm.sampler, generation.BlockSampler)
    assert llm.generate(["012", "0123456789"], max_new_tokens=9) == ["3456789AB", "ABCDEFGHI"]
    assert llm.generate("012", stop="GH") == "3456789ABCDEF" != llm.generate("012", stop="HG")
    assert llm.generate("012", max_new_tokens=100) == SCRIPT[3:]


def test_a_stream_grows_by_blocks(llm):
    stream = llm.generate("012", max_new_tokens=20, stop="KL", stream=True)
    first = next(stream)
    assert first == "3" and stream.draft is None and stream.ids == [ord("3")]
    assert first + "".join(stream) == "3456789ABCDEFGHIJ"
    engine = llm.engine(**ENGINE)

    async def read() -> list[text.TextPiece]:
        return [piece async for piece in engine.stream(TextRequest("012", max_new_tokens=20, stop="KL"))]

    pieces = asyncio.run(read())
    # The prompt's block has five more tokens. The J and the K after it may begin a stop string at first.
    assert [piece.text for piece in pieces] == ["34567", "89ABCDEF", "GHIJ"]
    result = pieces[-1].result
    assert result is not None and result.finish_reason == "stop" and result.log_probs == ()


def test_an_engine_and_a_file_have_the_texts_of_generate(llm, tmp_path):
    prompts = [SCRIPT[:length] for length in (3, 8, 17)]
    expected = [llm.generate(prompt, max_new_tokens=11) for prompt in prompts]
    engine = llm.engine(**ENGINE)
    results = sorted(
        engine.run([TextRequest(prompt, max_new_tokens=11) for prompt in prompts]), key=lambda result: result.number
    )
    assert [result.text for result in results] == expected
    source, target = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    text.complete_file(engine, source, target, request=TextRequest("", max_new_tokens=11))
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["text"] for row in rows] == expected and "log_prob" not in rows[0]
    wrong: list[tuple[dict[str, Any], str]] = [({"best_of": 2}, "best_of=2"), ({"log_probs": True}, "log_probs=True")]
    for options, words in wrong:
        with pytest.raises(ValueError, match=rf"complete_file\({words}\): a model of block diffusion fills"):
            text.complete_file(engine, source, tmp_path / "other.jsonl", request=TextRequest(""), **options)


def test_a_chat_is_answered(llm, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    chatting = dataclasses.replace(llm, chat_template=data.ChatTemplate(tmp_path))
    start = len("<user>Hi<assistant>")
    assert chatting.chat([{"role": "user", "content": "Hi"}], max_new_tokens=5) == SCRIPT[start : start + 5]


def test_a_likelihood_is_the_bound_of_the_blocks(llm):
    """Each byte of the script has a logit of 4 and each of the other 255 bytes 0, whatever is masked."""
    log_sum = math.log(math.exp(4) + 255)
    right, wrong = llm.log_likelihood("012", ["3456789", "x"])
    assert right == pytest.approx(7 * (4 - log_sum), rel=1e-5) and wrong == pytest.approx(-log_sum, rel=1e-5)


def test_options_that_need_one_token_after_another_are_refused(llm):
    wrong: list[tuple[Any, str]] = [
        (lambda: llm.generate("012", log_probs=True), r"generate\(log_probs=True\): a model of block diffusion"),
        (lambda: llm.generate("012", draft=llm), r"generate\(draft=\.\.\.\): a draft proposes one token after another"),
        (lambda: llm.engine(draft="mtp"), r"engine\(draft=\.\.\.\): a draft proposes one token after another"),
        (lambda: generation.score_tokens(llm.model, [[1]], [[2]]), r"score_tokens\(model\): with masks of blocks"),
    ]
    for call, words in wrong:
        with pytest.raises(ValueError, match=words):
            call()
    unknown = dataclasses.replace(llm, sampler=generation.BlockSampler())
    with pytest.raises(ValueError, match="generate: the model's files name no mask token"):
        unknown.generate("012")
    with pytest.raises(ValueError, match="score: the model's files name no mask token"):
        unknown.log_likelihood("0", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published SDAR of random weights, whose configuration names the mask token."""
    path = tmp_path_factory.mktemp("published") / "model"
    model = eqx.filter_jit(models.build)(CONFIG, key=jax.random.key(0))
    model = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model)
    files = data.tokenizer_files(data.ByteTokenizer(), max_length=64)
    models.save(model, path, config=CONFIG, files=files, attributes={"mask_token_id": 5})
    return path


def test_a_folder_names_its_mask_token(folder, tmp_path):
    assert eqformer.load(folder).sampler == generation.BlockSampler(mask_id=5)
    config = json.loads((folder / "config.json").read_text())
    del config["mask_token_id"]
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    unknown = eqformer.load(tmp_path)
    assert unknown.sampler == generation.BlockSampler(mask_id=None)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    mask = {"id": 3, "content": "<|MASK|>", "special": True, "normalized": False}
    tokenizer["added_tokens"].append(mask | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
    tokenizer["model"]["vocab"] = {
        ("<|MASK|>" if number == 3 else name): number for name, number in tokenizer["model"]["vocab"].items()
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert eqformer.load(tmp_path).sampler == generation.BlockSampler(mask_id=3)


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [None, {"fsdp": 2, "tensor": 2}, {"context": 2, "pipe": 2}])
def test_a_published_model_writes_the_texts_of_generate_blocks(folder, mesh):
    plan = mesh and parallel.Plan(parallel.make_mesh(**mesh, devices=jax.devices()[:4]))
    loaded = eqformer.load(folder, plan=plan)
    alone = eqformer.load(folder)
    prompts = ["def main(", "import"]
    options: dict[str, Any] = {"max_new_tokens": 14, "temperature": 0.9, "seed": 3}
    expected = generation.generate_blocks(
        alone.model,
        [list(prompt.encode()) for prompt in prompts],
        max_new_tokens=14,
        mask_id=5,
        transforms=generation.sampling(temperature=0.9),
        end_of_text=alone.end_ids,
        key=jax.random.key(3),
    )
    texts = [bytes(ids).decode(errors="replace") for ids in expected.new_ids()]
    assert loaded.generate(prompts, **options) == texts
    results = loaded.engine(**ENGINE).run([TextRequest(prompt, **options) for prompt in prompts])
    assert [result.text for result in sorted(results, key=lambda result: result.number)] == texts
    fewer = dataclasses.replace(alone, sampler=generation.BlockSampler(mask_id=5, steps=1))
    assert fewer.generate(prompts, **options) != texts
    assert nn.block_of(loaded.model) == 4
