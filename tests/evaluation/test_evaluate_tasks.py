"""Scores of lm-evaluation-harness tasks equal the scores of the harness's own transformers backend."""

import dataclasses
import importlib.util
import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from text_cases import published_folder, Scripted, scripted, small_model

import eqformer
from eqformer import data, evaluation, generation


HARNESS = importlib.util.find_spec("lm_eval") is not None
GREEDY, KEY = generation.sampling(temperature=0), jax.random.key(0)
WORDS = ["salt", "ocean", "lantern", "paper", "wing", "glass", "stone", "rope"]
CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_without_the_harness_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r'pip install "eqformer\[eval\]"'):
        evaluation.harness_model(scripted("a"))


def make_tasks(folder) -> list[dict[str, Any]]:
    """A task of each kind, on documents of words."""
    rows = [
        {
            "question": f"{WORDS[number]} {WORDS[number - 1]} and",
            "choices": [WORDS[number - 2], f"{WORDS[number - 3]} too", "x"],
            "label": number % 3,
            "text": " ".join(WORDS[number:] + WORDS[:number]) * 4,
        }
        for number in range(len(WORDS))
    ]
    path = folder / "rows.json"
    path.write_text("\n".join(map(json.dumps, rows)))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    texts = {"doc_to_text": "{{question}}", "doc_to_target": "{{choices[label]}}"}
    return [
        common
        | {"task": "choose", "output_type": "multiple_choice", "doc_to_text": "{{question}}"}
        | {"doc_to_choice": "{{choices}}", "doc_to_target": "label", "metric_list": [{"metric": "acc"}]},
        common | texts | {"task": "last", "output_type": "loglikelihood", "metric_list": [{"metric": "perplexity"}]},
        common
        | {"task": "roll", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        | {"metric_list": [{"metric": "word_perplexity"}]},
        common
        | texts
        | {"task": "write", "output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
        | {"generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 12}},
    ]


def request(*arguments: Any) -> Any:
    """A request of the harness, which the adapter reads the arguments of alone."""
    from lm_eval.api.instance import Instance  # type: ignore[import-not-found]

    return Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0)


def answers(samples) -> dict[tuple[str, int], Any]:
    """The responses of each task's documents, without the lists around them."""
    return {
        (name, row["doc_id"]): [response for responses in row["filtered_resps"] for response in [responses]]
        for name, rows in samples.items()
        for row in rows
    }


def numbers(value: Any) -> list[float]:
    """The log-probabilities in a response, in order."""
    match value:
        case bool() | str():
            return []
        case int() | float():
            return [float(value)]
        case _:
            return [number for item in value for number in numbers(item)]


@pytest.mark.hf
@pytest.mark.skipif(not HARNESS, reason="the extra `eval` is not installed")
@pytest.mark.filterwarnings("default")
def test_each_kind_of_task_as_its_own_backend_of_transformers(tmp_path):
    import lm_eval  # type: ignore[import-not-found]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

    folder = published_folder(tmp_path / "model", chat_template__jinja=CHAT)
    tasks = make_tasks(tmp_path)
    llm = eqformer.load(folder)
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=2, max_length=64)
    for template in (False, True):
        expected = lm_eval.simple_evaluate(
            model=theirs, tasks=[dict(task) for task in tasks], apply_chat_template=template, bootstrap_iters=10
        )
        found = evaluation.evaluate_tasks(llm, tasks, apply_chat_template=template, batch_size=4, max_length=64)
        ours, reference = answers(found.samples), answers(expected["samples"])
        assert ours.keys() == reference.keys() and len(ours) == 4 * len(WORDS)
        for key, response in ours.items():
            assert numbers(response) == pytest.approx(numbers(reference[key]), rel=1e-6, abs=1e-4), key
            if key[0] == "write":
                assert response == reference[key] and any(response)
        assert found.metrics["choose"]["acc"] == expected["results"]["choose"]["acc,none"]
        # The control: another template gives other numbers.
        bare = answers(evaluation.evaluate_tasks(llm, tasks[:1], apply_chat_template=not template).samples)
        assert numbers(bare["choose", 0]) != pytest.approx(numbers(ours["choose", 0]), abs=1e-2)
    with pytest.raises(ValueError, match="has no task 'hellaswagg'; near names are hellaswag"):
        evaluation.evaluate_tasks(llm, "hellaswagg")


def test_averages_are_centred_by_chance():
    def report(**accuracies: float) -> evaluation.TaskResults:
        quiz = {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
        twice = {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"}, {"metric": "acc_mutual_info"}]}
        configs = {"quiz": quiz, "easy": quiz, "hard": twice, "sums": {"output_type": "generate_until"}}
        samples = {
            "quiz": [{"resps": [0] * 4}, {"resps": [0] * 2}],  # chances of 1/4 and 1/2
            "easy": [{"resps": [0] * 2}] * 3,
            "hard": [{"resps": [0] * 10}],  # five answers, asked for twice
            "sums": [{"resps": [0]}],
        }
        groups = {"all": ["easy", "hard"], "loose": ["sums"]}
        metrics: dict[str, dict[str, float]] = {name: {"acc": value} for name, value in accuracies.items()}
        metrics |= {"sums": {"exact_match_stderr (strict)": 9.0, "exact_match (strict)": 0.5}, "loose": {}}
        metrics |= {"book": {"word_perplexity": 9.0}}
        return evaluation.TaskResults(metrics, samples, {"configs": configs, "group_subtasks": groups})

    average = report(quiz=0.5, easy=0.9, hard=0.1, all=0.7).average
    assert average is not None
    # The group counts once, with the chance of its documents; `loose` has no accuracy, so its task counts.
    assert average.chances == pytest.approx({"quiz": 0.375, "all": (3 * 0.5 + 0.2) / 4, "sums": 0.0})
    assert average.accuracy == pytest.approx((0.5 + 0.7 + 0.5) / 3)
    assert average.centered_accuracy == pytest.approx((0.125 / 0.625 + (0.7 - 0.425) / 0.575 + 0.5) / 3)
    # The control: guessing is worth nothing where it is by choice, and a task without an accuracy has no average.
    guessed = report(quiz=0.375, all=0.425).average
    assert guessed is not None and guessed.centered_accuracy == pytest.approx(0.5 / 3)
    assert evaluation.TaskResults({"book": {"word_perplexity": 9.0}}, {}, {}).average is None


@pytest.mark.skipif(not HARNESS, reason="the extra `eval` is not installed")
@pytest.mark.filterwarnings("default")
def test_an_evaluator_scores_texts_and_tasks_again_and_again(tmp_path):
    tasks = make_tasks(tmp_path)[::3]
    llm = eqformer.load(published_folder(tmp_path / "model"))
    evaluator = evaluation.Evaluator(texts={"book": ["a text", "another"]}, tasks=tasks, limit=4)
    row = evaluator(llm)
    assert row == evaluator(llm)  # the tasks are loaded once
    results = evaluation.evaluate_tasks(llm, tasks, limit=4)
    average = results.average
    assert average is not None and average.chances == pytest.approx({"choose": 1 / 3, "write": 0.0})
    assert row["evaluation/choose/acc"] == results.metrics["choose"]["acc"]
    assert row["evaluation/average/centered_accuracy"] == average.centered_accuracy
    assert row["evaluation/book/bits_per_byte"] == evaluation.evaluate_texts(llm, ["a text", "another"]).bits_per_byte
    # The control: another model has other scores.
    other = dataclasses.replace(llm, model=small_model(1))
    assert evaluator(other)["evaluation/book/bits_per_byte"] != row["evaluation/book/bits_per_byte"]
    with pytest.raises(ValueError, match=r"cannot load the task 'gone' \(.*correct its configuration, or see that"):
        evaluation.load_tasks([tasks[0] | {"task": "gone", "dataset_path": str(tmp_path / "gone.py")}])


def test_an_evaluator_without_work_is_refused():
    with pytest.raises(ValueError, match=r"Evaluator\(\): there is nothing to score; give texts or tasks"):
        evaluation.Evaluator()
    with pytest.raises(ValueError, match="'book' has no text; leave it out"):
        evaluation.Evaluator(texts={"book": [""]})


@pytest.mark.skipif(not HARNESS, reason="the extra `eval` is not installed")
def test_a_stop_string_may_name_a_special_token(tmp_path):
    content = json.loads(data.ByteTokenizer().to_json())
    content["added_tokens"] += [content["added_tokens"][0] | {"id": 256, "content": "<|im_end|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = data.FileTokenizer(tmp_path / "tokenizer.json", end_of_text="<|endoftext|>")
    written = [*"Q: né".encode(), 256, *b"\nQ: and more, and more", 0]
    llm = dataclasses.replace(
        scripted(""), model=Scripted(jnp.asarray(written, jnp.int32), vocab=257), tokenizer=tokenizer
    )
    model = evaluation.harness_model(llm)

    def written_until(*stops: str) -> str:
        (text,) = model.generate_until([request("Q", {"until": [*stops], "max_gen_toks": 20})])
        return text

    assert written_until("<|im_end|>") == ": né" == written_until("<|im_end|>\nQ")
    assert written_until("or") == ": né\nQ: and m"
    assert written_until("d m") == ": né\nQ: an" and written_until(": ", "<|im_end|>") == ""
    # The control: strings that are not written, one of which is in the name of a special token.
    assert written_until("<|other|>") == written_until("im_") == ": né\nQ: and more, "


@pytest.mark.skipif(not HARNESS, reason="the extra `eval` is not installed")
def test_texts_of_many_contexts_are_those_of_each_alone(tmp_path):
    """More contexts than rows, with and without examples that all share, of which rows begin with stored caches."""
    llm = eqformer.load(published_folder(tmp_path / "model"))
    contexts = [f"{shared}{word} and" for shared in ("", "glass and stone, " * 24) for word in WORDS[:4]]
    requests = [request(context, {"until": ["zz"], "max_gen_toks": 8}) for context in contexts]
    texts = evaluation.harness_model(llm, batch_size=2, max_length=640).generate_until(requests)
    ids = [data.ByteTokenizer().encode(context).tolist() for context in contexts]
    alone = [generation.generate(llm.model, [row], max_new_tokens=8, transforms=GREEDY, key=KEY) for row in ids]
    assert texts == [llm.tokenizer.decode(sampled.new_ids()[0]) for sampled in alone] and len({*texts}) > 1


@pytest.mark.skipif(not HARNESS, reason="the extra `eval` is not installed")
def test_block_diffusion_answers_each_kind_of_request():
    """The scripted model gives its byte a logit of 4 and each of the other 255 bytes 0, whatever is masked."""
    llm, log_sum = scripted("Q: abcdefghij", block=4), math.log(math.exp(4) + 255)
    model = evaluation.harness_model(llm, max_length=12)
    (right, is_greedy), (wrong, is_wrong_greedy) = model.loglikelihood([request("Q:", " abc"), request("Q:", " abd")])
    assert right == pytest.approx(4 * (4 - log_sum), rel=1e-5) and is_greedy
    assert wrong == pytest.approx(12 - 4 * log_sum, rel=1e-5) and not is_wrong_greedy
    (rolling,) = model.loglikelihood_rolling([request("xQ: abcdefgh")])  # In one window, the prefix is position 0.
    assert rolling == pytest.approx(-12 * log_sum, rel=1e-5)
    assert model.generate_until([request("Q: ab", {"until": ["g"], "max_gen_toks": 7})]) == ["cdef"]
    # The model reads the last id of an answer, so an answer has one id less than a model of next tokens has.
    assert len(model.loglikelihood([request("Q", "x" * 11)])) == 1
    with pytest.raises(ValueError, match="of 12 tokens, but the model has 11 tokens for an answer"):
        model.loglikelihood([request("Q", "x" * 12)])


@pytest.mark.skipif(not HARNESS, reason="the extra `eval` is not installed")
def test_what_the_model_cannot_answer(tmp_path):
    model = evaluation.harness_model(scripted("abc"), max_length=4)
    ask = lambda answer: [request("Q", answer)]
    assert len(model.loglikelihood(ask("abcd"))) == 1
    with pytest.raises(ValueError, match="an answer 'abcde' of 5 tokens, but the model has 4 tokens.*max_length"):
        model.loglikelihood(ask("abcde"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    chat = dataclasses.replace(scripted("abc"), chat_template=data.ChatTemplate(tmp_path))
    model = evaluation.harness_model(chat)
    assert model.apply_chat_template([{"role": "user", "content": "A"}], add_generation_prompt=False) == "A"
    with pytest.raises(ValueError, match="the final message 'a' is continued, but the template in .* writes"):
        model.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=False)
