"""Rows of preferences: pairs of rows of tokens, batches that keep pairs together, and errors for bad rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eqformer.data import (
    batch_labelled,
    batch_preferences,
    ByteTokenizer,
    ChatTemplate,
    ConversationEncoder,
    conversations,
    detect_form,
    labelled,
    LabelledPacking,
    Loader,
    Mixture,
    open_corpus,
    open_store,
    PairPacking,
    preferences,
    read_example,
    read_label,
    split_preference,
    texts,
)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no!"))
TEXT = {"prompt": "1 + 1", "chosen": " = 2", "rejected": " = 11"}


@pytest.fixture
def encoder(tmp_path) -> ConversationEncoder:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return ConversationEncoder(ByteTokenizer(), ChatTemplate(tmp_path))


def encode_pair(encoder: ConversationEncoder, row: Any):
    chosen, rejected = (
        encoder.encode(read_example(part, location="row")[1]) for part in split_preference(row, location="row")
    )
    return chosen, rejected


def trained_text(example) -> bytes:
    return bytes(example.ids[example.weights > 0].tolist())


@pytest.mark.parametrize(
    "row, texts, prompt",
    [
        (TEXT, (b" = 2\0", b" = 11\0"), b"1 + 1"),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, (b"yes\0", b"no!\0"), b"<u>Hi<a>"),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, (b"yes\0", b"no!\0"), b"<u>Hi<a>"),
        # A text of the prompt stands beside whole conversations, and earlier replies belong to the prompt.
        (
            {"prompt": "Hi", "chosen": [USER, YES, USER, NO], "rejected": [USER, YES, USER, YES]},
            (b"no!\0", b"yes\0"),
            b"<u>Hi<a>yes<u>Hi<a>",
        ),
    ],
)
def test_each_form_has_a_prompt_and_two_completions(row, texts, prompt, encoder):
    chosen, rejected = encode_pair(encoder, row)
    assert (trained_text(chosen), trained_text(rejected)) == texts
    for example, text in zip((chosen, rejected), texts):
        assert bytes(example.ids.tolist()) == prompt + text


def test_what_is_refused(encoder):
    def refused(row) -> str:
        with pytest.raises(ValueError) as error:
            split_preference(row, location="pairs.jsonl#4")
        assert str(error.value).startswith("pairs.jsonl#4")
        return str(error.value)

    assert "`rejected` equals `chosen`" in refused(TEXT | {"rejected": " = 2"})
    assert "but its fields are prompt (str), chosen (str); rename" in refused({"prompt": "a", "chosen": "b"})
    assert "rejected (list)" in refused(TEXT | {"rejected": [NO]})
    assert "their first messages differ" in refused({"chosen": [USER, YES], "rejected": [YES]})
    assert "must be an object" in refused([TEXT])
    assert read_label({"prompt": "a", "completion": "b", "label": False}, location="row") is False
    with pytest.raises(ValueError, match="row must have a `label` of true or false, but its label is 1"):
        read_label({"label": 1}, location="row")
    pair = encode_pair(encoder, TEXT)
    with pytest.raises(ValueError, match=r"batch_preferences\(pairs, seq=4\).* of pair 1 has 6 tokens; pass a longer"):
        batch_preferences(
            [
                encode_pair(encoder, {"prompt": "1", "chosen": "2", "rejected": "3"}),
                encode_pair(encoder, TEXT | {"prompt": "1 + 1 "}),
            ],
            seq=4,
        )
    with pytest.raises(ValueError, match="both completions of pair 0 have the same tokens"):
        batch_preferences([(pair[0], pair[0])], seq=16)
    with pytest.raises(ValueError, match="2 examples and 1 labels"):
        batch_labelled(pair, [True], seq=16)


def test_batches_of_pairs_and_of_labels(encoder):
    pair = encode_pair(encoder, TEXT)
    batch: Any = batch_preferences([pair, pair], seq=9, first_example=6)
    assert batch.group == 2 and batch.examples.tolist() == [6, 7, 8, 9] and batch.reference_nats is None
    for row, example in enumerate((*pair, *pair)):
        length = min(len(example.ids) - 1, 9)
        assert batch.ids[row, :length].tolist() == example.ids[:length].tolist()
        assert batch.targets[row, :length].tolist() == example.ids[1 : length + 1].tolist()
        assert batch.weights[row, :length].tolist() == example.weights[1 : length + 1].tolist()
        assert (batch.segments[row] >= 0).sum() == length and not batch.weights[row, length:].any()
    rows: Any = batch_labelled(pair, [True, False], seq=9)
    assert rows.group == 1 and rows.labels.tolist() == [1, 0]
    assert np.array_equal(rows.ids, batch.ids[:2])


def write_rows(path: Path, count: int) -> Path:
    rows = [{"prompt": f"{number}:", "chosen": f"{number} yes", "rejected": f"{number} no"} for number in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_loader_shuffles_pairs_and_splits_none(encoder, tmp_path):
    source = preferences(write_rows(tmp_path / "pairs.jsonl", 60))
    corpus = open_corpus({"pairs": source}, encoder, tmp_path / "c", seq=16, batch=4, seed=0, packing="pairs")
    train: Any = corpus.train
    held_out = corpus.held_out["pairs"]
    assert train.rows_per_epoch + held_out.rows_per_epoch == 120 and held_out.rows_per_epoch

    def texts(batch) -> list[str]:
        return [bytes(row[row > 0].astype(np.uint8).tolist()).decode() for row in batch.ids]

    seen = []
    for step in range(train.rows_per_epoch // 4):
        batch = train.batch(step)
        assert batch.group == 2
        for chosen, rejected in zip(texts(batch)[::2], texts(batch)[1::2]):
            prompt = chosen.split(":")[0]
            assert (chosen, rejected) == (f"{prompt}:{prompt} yes", f"{prompt}:{prompt} no")
            seen.append(int(prompt))
    assert len({*seen}) == len(seen) and seen != sorted(seen)
    assert np.array_equal(train.rows(3, 2, 4).ids, train.batch(3).ids[2:])
    with pytest.raises(ValueError, match="of 2 rows is never split, but rows 1 to 3 would split a group"):
        train.rows(0, 1, 4)
    epoch = [batch.ids for batch in held_out.epoch(1)]
    assert len(epoch) == 1 and len(epoch[0]) == 4
    with pytest.raises(ValueError, match="must have an even number"):
        Loader(train.store, seq=16, batch=3, seed=0, packing="pairs")


def test_a_mixture_splits_no_pair_and_takes_each_text_by_its_weight(encoder, tmp_path):
    loaders = {}
    for name, count in (("few", 5), ("many", 40)):
        store = open_store(
            preferences(write_rows(tmp_path / f"{name}.jsonl", count)), encoder, tmp_path / "c", validation=0.0
        )
        loaders[name] = Loader(store, seq=16, batch=8, seed=1, packing="pairs")
    mixture = Mixture(loaders, {"few": 1, "many": 3}, seed=0)
    rows: dict[str, list[np.ndarray]] = {"few": [], "many": []}
    for step in range(256):  # 1,024 pairs, one block
        batch = mixture.batch(step)
        assert batch.group == 2 and batch.examples.tolist() == [*range(8 * step, 8 * step + 8)]
        owner, _ = mixture.origin(np.arange(4 * step, 4 * step + 4))
        for pair, index in enumerate(owner):
            rows[("few", "many")[index]].append(np.asarray(batch.ids)[2 * pair : 2 * pair + 2])
    assert {name: len(pairs) for name, pairs in rows.items()} == {"few": 256, "many": 768}
    for name, pairs in rows.items():
        expected = loaders[name].at(np.arange(2 * len(pairs))).ids
        assert np.array_equal(np.concatenate(pairs), expected)
    assert mixture.epochs(256) == {"few": 256 / 5, "many": 768 / 40}
    assert np.array_equal(mixture.rows(3, 2, 4).ids, mixture.batch(3).ids[2:4])
    with pytest.raises(ValueError, match="of 2 rows is never split, but rows 1 to 3 would split a group"):
        mixture.rows(0, 1, 4)


def test_stores_that_are_no_pairs(encoder, tmp_path):
    pairs = open_store(preferences(write_rows(tmp_path / "pairs.jsonl", 3)), encoder, tmp_path / "c", validation=0.0)
    short = PairPacking(pairs, seq=5)
    assert short.cut == 6 and short.cut_note == "6 completions are cut at the end of a row"
    assert not PairPacking(pairs, seq=64).cut_note
    with pytest.raises(ValueError, match=r"pairs.jsonl#0 leaves no room for the chosen completion; pass a longer seq"):
        PairPacking(pairs, seq=1)
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps(TEXT | {"prompt": prompt}) for prompt in ("1", "1" * 9)))
    long = open_store(preferences(tmp_path / "long.jsonl"), encoder, tmp_path / "c", validation=0.0)
    with pytest.raises(ValueError, match=r"the prompt of long.jsonl#1 leaves no room for the chosen completion"):
        PairPacking(long, seq=8)
    row = json.dumps({"prompt": "a", "completion": "b"})
    lone = open_store(texts({"\udcff": row}), encoder, tmp_path / "c", validation=0.0)
    assert lone.name_document(0) == "\udcff"  # A lone surrogate, which UTF-8 does not have.
    (long.path / "names.bin").unlink()  # A store of an older version has no names.
    with pytest.raises(ValueError, match=r"the prompt of document 2 leaves no room for the chosen completion"):
        PairPacking(long, seq=8)
    (tmp_path / "one.jsonl").write_text(row)
    other = open_store(conversations(tmp_path / "one.jsonl"), encoder, tmp_path / "c", validation=0.0)
    with pytest.raises(ValueError, match=r"has other text; make the store from data.preferences\(path\)"):
        PairPacking(other, seq=8)
    assert detect_form(tmp_path / "pairs.jsonl") == "preferences"
    (tmp_path / "bad.jsonl").write_text(json.dumps({"chosen": [USER, YES], "rejected": [USER, NO]}))
    assert detect_form(tmp_path / "bad.jsonl") == "preferences of messages"
    (tmp_path / "bad.jsonl").write_text(json.dumps(TEXT) + "\n" + json.dumps({"prompt": "a", "chosen": "b"}))
    with pytest.raises(ValueError, match="bad.jsonl#1 must have `prompt`, `chosen` and `rejected`"):
        preferences(tmp_path / "bad.jsonl").check()


def test_labelled_rows_have_the_completion_of_the_row_before(encoder, tmp_path):
    rows = [{"prompt": f"{n}? ", "completion": f"answer {n}", "label": n % 3 == 0} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert detect_form(tmp_path / "rows.jsonl") == "labelled completion"
    store = open_store(labelled(tmp_path / "rows.jsonl"), encoder, tmp_path / "c", validation=0.0)
    batch: Any = Loader(store, seq=16, batch=5, seed=0, packing="labelled").batch(0)
    texts = [trim(row) for row in batch.ids]
    numbers = [int(text[:1]) for text in texts]
    assert sorted(numbers) == [0, 1, 2, 3, 4] and texts == [b"%d? answer %d" % (n, n) for n in numbers]
    assert batch.labels.tolist() == [n % 3 == 0 for n in numbers]
    assert [trim(row) for row in batch.mismatched.ids] == [b"%d? answer %d" % (n, (n - 1) % 5) for n in numbers]
    for part in (batch, batch.mismatched):
        assert [row.tolist() for row in part.weights] == [[0, 0] + [1] * 9 + [0] * 5] * 5
    mixture = Mixture(
        {"a": Loader(store, seq=16, batch=4, seed=0, packing="labelled")}
        | {"b": Loader(store, seq=16, batch=4, seed=1, packing="labelled")},
        {"a": 1, "b": 1},
        seed=0,
    )
    for row, other in zip(mixture.batch(3).ids, mixture.batch(3).mismatched.ids):  # type: ignore[attr-defined]
        assert trim(other).startswith(trim(row)[:3]) and trim(other)[-1] == b"40123"[int(trim(row)[:1])]


def trim(row: Any) -> bytes:
    """Return the bytes of a row of ids without its padding."""
    return bytes(row[row > 0].astype(np.uint8).tolist())


def test_labelled_rows_that_are_refused(encoder, tmp_path):
    def refused(*rows: Any) -> str:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        with pytest.raises(ValueError) as error:
            labelled(tmp_path / "rows.jsonl").check()
        return str(error.value)

    row = {"prompt": "1", "completion": "2", "label": True}
    assert "the label of every row is true; add rows of the other label" in refused(row, row)
    assert "rows.jsonl#1 must have a `label` of true or false, but its label is 'good'" in refused(
        row, row | {"label": "good"}
    )
    assert "rows.jsonl#1 must have `messages`" in refused(row, {"prompt": "1", "label": True})
    assert "rows.jsonl#0 must have `prompt`, `completion` and `label`, but is text" in refused(
        {"text": "a", "label": True}
    )
    long = {"prompt": "1" * 9, "completion": "2", "label": False}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, (row, long))))
    store = open_store(labelled(tmp_path / "rows.jsonl"), encoder, tmp_path / "c", validation=0.0)
    with pytest.raises(ValueError, match=r"the prompt of rows.jsonl#1 has 9 tokens; pass a longer seq"):
        LabelledPacking(store, seq=8)
    (tmp_path / "pairs.jsonl").write_text(json.dumps(TEXT))
    pairs = open_store(preferences(tmp_path / "pairs.jsonl"), encoder, tmp_path / "c", validation=0.0)
    with pytest.raises(ValueError, match=r"make the store from data.labelled\(path\)"):
        LabelledPacking(pairs, seq=8)
