import json
import os
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from eqformer._failures import quiet_panics
from eqformer.data import ByteTokenizer, FileTokenizer, open_store, texts, TextStream, Tokenizer, tokenizer_files


def _any_text(seed, length=200):
    """Characters from the whole of Unicode: one to four bytes each, no NUL, no surrogates."""
    draw = random.Random(seed)
    ranges = [(1, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFC), (0x10000, 0x10FFFF)]
    return "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(length))


@pytest.mark.parametrize("seed", range(5))
def test_bytes_round_trip_and_stream_without_half_characters(seed):
    tokenizer, text = ByteTokenizer(), _any_text(seed)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8 and ids.tobytes() == text.encode() and tokenizer.decode(ids) == text
    stream = TextStream(tokenizer)
    printed = [stream.push(int(token)) for token in ids]
    assert "".join(printed) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in printed)
    # Negative control: without holding back, half characters would have been printed.
    assert "\ufffd" in "".join(tokenizer.decode([int(token)]) for token in ids)


def test_bytes_that_are_no_text_stream_as_they_decode():
    tokenizer = ByteTokenizer()
    ids = np.random.default_rng(0).integers(0, 256, 500).tolist() + [0xE6, 0x97]
    stream = TextStream(tokenizer)
    printed = "".join(stream.push(token) for token in ids) + stream.finish()
    assert printed == tokenizer.decode(ids) and printed.endswith("\ufffd")
    pieces = TextStream(tokenizer).pieces([*ids[:300], 256, *ids[300:]])  # of a vocabulary that was rounded up
    assert len(pieces) == len(ids) + 1 and "".join(pieces) == printed and TextStream(tokenizer).pieces([]) == []
    assert tokenizer.decode([104, 0, 105, 0]) == "hi" and tokenizer.decode([]) == ""


def test_bytes_as_a_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_json(), encoding="utf-8")
    file, text = FileTokenizer(tmp_path / "tokenizer.json"), _any_text(9) + "\r\n \t don't"
    assert (file.vocab, file.end_of_text) == (256, 0)
    assert file.encode(text).tolist() == ByteTokenizer().encode(text).tolist()
    assert file.decode(file.encode(text)) == text
    assert file.encode_prompt("a<|endoftext|>").tolist() == [97, 0]
    assert ByteTokenizer().encode_prompt("ab", add_special_tokens=False).tolist() == [97, 98]
    for tokenizer in (file, ByteTokenizer()):
        files = tokenizer_files(tokenizer, max_length=77)
        assert files["tokenizer.json"] == (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
        settings = json.loads(files["tokenizer_config.json"])
        assert (settings["eos_token"], settings["model_max_length"]) == ("<|endoftext|>", 77)
    with ThreadPoolExecutor(4) as pool:  # A server encodes prompts and texts at once.
        encode = lambda number: (file.encode if number % 2 else file.encode_prompt)("a<|endoftext|>" * 500)
        lengths = [len(ids) for ids in pool.map(encode, range(100))]
        assert lengths == [1000, 500 * len("a<|endoftext|>")] * 50
    named = FileTokenizer(tmp_path / "tokenizer.json", end_of_text="a")  # no token of its own, which a name could mean
    assert "eos_token" not in json.loads(tokenizer_files(named, max_length=77)["tokenizer_config.json"])


def test_bytes_refuse_nul_and_foreign_ids():
    with pytest.raises(ValueError, match=r"no NUL.*character 2 is NUL.*UTF-16"):
        ByteTokenizer().encode("ab\0c")
    with pytest.raises(ValueError, match=r"0 to 255, but they reach from 3 to 300"):
        ByteTokenizer().decode([3, 300])


def test_every_tokenizer_has_the_common_surface(tokenizer_json):
    for tokenizer in (ByteTokenizer(), FileTokenizer(tokenizer_json)):
        assert isinstance(tokenizer, Tokenizer)
        assert 0 <= tokenizer.end_of_text < tokenizer.vocab
        both = tokenizer.encode_batch(["né", "x"])
        assert [ids.tolist() for ids in both] == [tokenizer.encode("né").tolist(), tokenizer.encode("x").tolist()]
        assert tokenizer.encode("").size == 0 and tokenizer.decode(tokenizer.encode("")) == ""


def test_file_tokenizer_agrees_with_the_package(tokenizer_json, corpus):
    from tokenizers import Tokenizer as Reference

    reference = Reference.from_file(str(tokenizer_json))
    tokenizer = FileTokenizer(tokenizer_json)
    assert tokenizer.vocab == reference.get_vocab_size()
    assert tokenizer.end_of_text == reference.token_to_id("<|endoftext|>")
    for text in list(corpus.values())[:10]:
        ids = tokenizer.encode(text)
        assert ids.tolist() == reference.encode(text).ids and tokenizer.decode(ids) == text
        stream = TextStream(tokenizer)
        printed = [stream.push(token) for token in ids.tolist()]
        assert "".join(printed) + stream.finish() == text and not any("\ufffd" in piece for piece in printed)


def test_a_continuation_begins_with_the_space_after_its_prompt(tmp_path):
    """As SentencePiece writes texts: a space belongs to the word after it, and a text's first space is left out."""
    strip = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Strip", "content": " "}]
    file = {"version": "1.0", "model": {"type": "BPE", "vocab": {"<eos>": 0, "▁a": 1, "▁b": 2, "c": 3}, "merges": []}}
    file["added_tokens"] = [{"id": 0, "content": "<eos>", "special": True, **dict.fromkeys(FLAGS, False)}]
    file["decoder"] = {"type": "Sequence", "decoders": [strip[0], {"type": "Fuse"}, strip[1] | {"start": 1, "stop": 0}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert TextStream(tokenizer, [1]).pieces([2, 3, 1]) == [" b", "c", " a"]
    assert TextStream(tokenizer, [0]).pieces([2, 3]) == TextStream(tokenizer).pieces([2, 3]) == ["b", "c"]


FLAGS = "single_word", "lstrip", "rstrip", "normalized"


def test_names_of_special_tokens_in_a_text_are_text(tokenizer_json):
    from tokenizers import Tokenizer as Reference

    text = "a<|endoftext|>b"
    tokenizer = FileTokenizer(tokenizer_json)
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_text not in ids and tokenizer.decode(ids) == text
    assert tokenizer.end_of_text in Reference.from_file(str(tokenizer_json)).encode(text).ids  # negative control
    assert tokenizer.decode([*ids.tolist(), tokenizer.end_of_text]) == text


@pytest.mark.grid
@pytest.mark.parametrize("method", ["encode_prompt", "encode_with_offsets"])
def test_other_threads_run_while_a_long_prompt_is_encoded(tokenizer_json, method):
    tokenizer = FileTokenizer(tokenizer_json)
    long = "a b " * 400_000

    def longest_pause(encode):
        """The longest share of the encoding in which this thread did not run."""
        encode("a")
        start = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(lambda: start.wait() and encode(long) and None)
            begin = last = time.monotonic()
            start.set()
            pauses = list[float]()
            while not future.done():
                time.sleep(0.001)
                pauses.append(time.monotonic() - last)
                last += pauses[-1]
        return max(pauses) / (time.monotonic() - begin)

    encode = getattr(tokenizer, method)
    assert longest_pause(lambda text: [encode(text)]) < 0.5
    assert longest_pause(lambda text: [tokenizer._prompt_tokenizer.encode(text)]) > 0.7  # the control keeps the lock


def _changed(path, to, **changes):
    written = json.loads(path.read_text())
    written.update(changes)
    to.write_text(json.dumps(written))
    return to


def test_padding_and_truncation_in_the_file_are_switched_off(tokenizer_json, tmp_path):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path = _changed(tokenizer_json, tmp_path / "tokenizer.json", truncation=truncation)
    assert len(FileTokenizer(path).encode("ocean lantern ocean lantern")) > 3


def test_streaming_keeps_the_spaces_that_a_decoder_strips_in_front(tmp_path):
    from tokenizers import decoders, models, pre_tokenizers, Tokenizer as Reference, trainers

    reference = Reference(models.BPE(unk_token="<unk>"))
    reference.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    reference.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    special = ["<unk>", "<s>", "</s>"]
    reference.train_from_iterator(
        ["the salt ocean"] * 5, trainers.BpeTrainer(special_tokens=special, show_progress=False)
    )
    reference.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.end_of_text == 2
    ids = [1, *tokenizer.encode("the salt").tolist(), 2, *tokenizer.encode("ocean the").tolist()]
    stream = TextStream(tokenizer)
    assert (
        "".join(stream.push(token) for token in ids) + stream.finish() == tokenizer.decode(ids) == "the salt ocean the"
    )
    assert "".join(tokenizer.decode([token]) for token in ids) != tokenizer.decode(ids)  # negative control


DECODERS: dict[str, dict[str, Any]] = {
    "clean-up": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "no clean-up": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    "ends of words": {"type": "BPEDecoder", "suffix": "s"},
    "repeats": {"type": "CTC", "pad_token": "a", "word_delimiter_token": ".", "cleanup": True},
}


@pytest.mark.parametrize("name", DECODERS)
def test_what_a_decoder_tidies_up_streams_as_it_decodes(name, tmp_path):
    """Clean-up takes away spaces before points and shortened words, which stand in another token than the space."""
    words = ["[SEP]", *"a do not n ' t m s . , ? ! ##ing ##. ##' n't 'm 's 're ##s é".split(), "do not"]
    model = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    written = {"version": "1.0", "added_tokens": _special(["[SEP]"], 0), "decoder": DECODERS[name]}
    written["model"] = model | {"vocab": {word: number for number, word in enumerate(words)}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    tokenizer, draw, alone = FileTokenizer(tmp_path / "tokenizer.json"), random.Random(0), 0
    for _ in range(300):
        ids = [draw.randrange(len(words)) for _ in range(12)]
        stream, whole = TextStream(tokenizer), tokenizer.decode(ids)
        assert "".join(stream.push(token) for token in ids) + stream.finish() == whole
        alone += "".join(tokenizer.decode([token]) for token in ids) == whole
    assert alone < 300  # a control: tokens one by one would give other texts


def test_a_text_that_the_tokenizer_cannot_spell_is_reported_with_its_document(tmp_path):
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "one": 1}, "unk_token": "<unk>"}
    written = {"version": "1.0", "added_tokens": _special(["</s>"], 0), "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written | {"pre_tokenizer": {"type": "WhitespaceSplit"}}))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"open_store\(.*b cannot be tokenized: .*refuses a text \(.*Missing"):
        open_store(texts({"a": "one one", "b": "one two"}), tokenizer, tmp_path, validation=0.0)


def test_fingerprint_changes_with_the_file_and_the_end_of_text(tokenizer_json, tmp_path):
    first = FileTokenizer(tokenizer_json)
    other = FileTokenizer(
        _changed(tokenizer_json, tmp_path / "tokenizer.json", version="1.0", normalizer={"type": "NFC"})
    )
    renamed = FileTokenizer(tokenizer_json, end_of_text="a")
    assert FileTokenizer(tokenizer_json).fingerprint == first.fingerprint
    assert len({first.fingerprint, other.fingerprint, renamed.fingerprint, ByteTokenizer().fingerprint}) == 4


def _special(names, start=1000):
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": start + number, "content": name, **rest} for number, name in enumerate(names)]


@pytest.mark.parametrize(
    "names, wanted",
    [
        (["<one>"], "<one>"),
        (["<s>", "</s>"], "</s>"),
        (["<pad>", "<|begin_of_text|>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["<eos>", "</s>"], "<eos>"),
        (["</s>", "<eos>"], "<eos>"),
    ],
)
def test_end_of_text_is_found_among_the_special_tokens(tokenizer_json, tmp_path, names, wanted):
    vocabulary = json.loads(tokenizer_json.read_text())["model"]["vocab"]
    path = _changed(tokenizer_json, tmp_path / "tokenizer.json", added_tokens=_special(names, len(vocabulary)))
    tokenizer = FileTokenizer(path)
    assert tokenizer.end_of_text == len(vocabulary) + names.index(wanted)
    assert FileTokenizer(path, end_of_text=names[0]).end_of_text == len(vocabulary)


def test_bad_tokenizer_files_are_reported_in_one_message(tokenizer_json, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"FileTokenizer\(.*no file .*absent\.json"):
        FileTokenizer(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"FileTokenizer\(.*must be a tokenizer\.json"):
        FileTokenizer(tmp_path / "bad.json")
    with pytest.raises(ValueError, match=r"no token '<stop>'.*\['<\|endoftext\|>'\]"):
        FileTokenizer(tokenizer_json, end_of_text="<stop>")
    start = len(json.loads(tokenizer_json.read_text())["model"]["vocab"])
    two = _changed(tokenizer_json, tmp_path / "two.json", added_tokens=_special(["<left>", "<right>"], start))
    with pytest.raises(ValueError, match=r"none has one of the usual names.*\['<left>', '<right>'\]"):
        FileTokenizer(two)
    none = _changed(tokenizer_json, tmp_path / "none.json", added_tokens=[])
    with pytest.raises(ValueError, match=r"there is none, so name any token"):
        FileTokenizer(none)
    with pytest.raises(ValueError, match=r"ids must be 0 to \d+, but one id is -1"):
        FileTokenizer(tokenizer_json).decode([-1])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"FileTokenizer\(.*tokenizers.*eqformer\[train\]"):
        FileTokenizer(tokenizer_json)


PANICS = {
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "no entry": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "Q", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
    "chunk size": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "index": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
}


def test_a_file_that_makes_the_package_panic_is_refused_in_one_line(tmp_path, capfd):
    file, path = json.loads(ByteTokenizer().to_json()), tmp_path / "tokenizer.json"
    for words, part in PANICS.items():
        path.write_text(json.dumps(file | part))
        with pytest.raises(ValueError, match=f"must be a tokenizer.json .*{words}.*; fetch it again"):
            FileTokenizer(path)
    assert capfd.readouterr().err == ""  # where the package writes a backtrace
    path.write_text(json.dumps(file))
    assert FileTokenizer(path).encode("a").tolist() == [97]


def test_words_of_others_come_through_when_panics_are_kept_quiet(capfd):
    with quiet_panics():
        os.write(2, b"words")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "words"
    with pytest.raises(BaseException, match="at"), quiet_panics():
        os.write(2, b"a backtrace")
        raise type("PanicException", (BaseException,), {})("at")
    assert capfd.readouterr().err == ""
