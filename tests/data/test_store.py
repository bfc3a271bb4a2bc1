import hashlib
import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from eqformer.data import ByteTokenizer, check_vocab, FileTokenizer, open_store, texts


ROOT = Path(__file__).parents[2]


class Counting:
    """A byte tokenizer that counts the texts it was given; it may call itself something else."""

    def __init__(self, fingerprint="counting", shift=0):
        self.vocab, self.end_of_text, self.fingerprint = 256 + shift, 0, fingerprint
        self.count, self.shift = 0, shift

    def encode(self, text):
        self.count += 1
        return ByteTokenizer().encode(text).astype(np.uint32) + np.uint32(self.shift)

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return ByteTokenizer().decode(ids)


def _open(documents, folder, tokenizer=None, split: Literal["train", "validation"] = "train", **options):
    options = {"validation": 0.0, **options}
    return open_store(texts(documents), tokenizer or ByteTokenizer(), folder, split, **options)


def _visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def _hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def _in_validation(name, share):
    """Written out again from the documented rule."""
    eight = hashlib.blake2b(b"eqformer:" + name.encode(), digest_size=8).digest()
    return int.from_bytes(eight, "big") / 2**64 < share


def test_the_store_holds_every_document_and_its_end(corpus, tmp_path):
    store = _open(corpus, tmp_path)
    wanted = [text.encode() + b"\0" for text in corpus.values()]
    assert store.tokens.dtype == np.uint8 and store.tokens.tobytes() == b"".join(wanted)
    assert [store.tokens[a:b].tobytes() for a, b in zip(store.offsets[:-1], store.offsets[1:])] == wanted
    assert store.documents == len(corpus) and store.text_bytes == sum(map(len, wanted)) - len(wanted)
    assert store.bytes_per_token == store.text_bytes / sum(map(len, wanted))
    assert store.largest == max(b"".join(wanted)) and (store.vocab, store.end_of_text) == (256, 0)
    assert not store.tokens.flags.writeable and not store.tokens.flags.owndata
    assert sorted(path.name for path in store.path.iterdir()) == ["meta.json", "offsets.bin", "tokens.bin"]


def test_the_smallest_sufficient_integers_are_stored(tokenizer_json, corpus, tmp_path):
    tokenizer = FileTokenizer(tokenizer_json)
    store = _open(corpus, tmp_path, tokenizer)
    assert store.tokens.dtype == np.dtype("<u2")
    for text, start, stop in zip(corpus.values(), store.offsets[:-1], store.offsets[1:]):
        assert store.tokens[start:stop].tolist() == [*tokenizer.encode(text).tolist(), tokenizer.end_of_text]
    assert _open(corpus, tmp_path, Counting("wide", shift=70_000)).tokens.dtype == np.dtype("<u4")


def test_a_second_opening_tokenises_nothing(corpus, tmp_path):
    tokenizer = Counting()
    first = _open(corpus, tmp_path, tokenizer)
    assert tokenizer.count == len(corpus)
    second = _open(dict(corpus), tmp_path, tokenizer)
    assert tokenizer.count == len(corpus) and second.path == first.path
    np.testing.assert_array_equal(second.tokens, first.tokens)


@pytest.mark.parametrize(
    "change",
    [
        {"documents": {"a": "one", "b": "two!"}},
        {"documents": {"a": "one", "c": "two"}},
        {"documents": {"b": "two", "a": "one"}},
        {"tokenizer": Counting("other")},
        {"validation": 0.000001},
    ],
)
def test_a_change_of_text_name_order_tokenizer_or_share_is_a_new_cache(tmp_path, change):
    arguments = {"documents": {"a": "one", "b": "two"}, "tokenizer": Counting()}
    first = _open(folder=tmp_path, **arguments)
    second = _open(folder=tmp_path, **{**arguments, **change})
    assert second.path != first.path and len(_visible(tmp_path)) == 2
    assert _open(folder=tmp_path, **arguments).path == first.path


def test_splits_part_the_documents_by_a_hash_of_the_name(corpus, tmp_path):
    train = _open(corpus, tmp_path, split="train", validation=0.2)
    validation = _open(corpus, tmp_path, split="validation", validation=0.2)
    wanted = {name: _in_validation(name, 0.2) for name in corpus}
    assert 4 < sum(wanted.values()) < 25
    pack = lambda held: b"".join(text.encode() + b"\0" for name, text in corpus.items() if wanted[name] == held)
    assert train.tokens.tobytes() == pack(False) and validation.tokens.tobytes() == pack(True)

    # Neither the text nor the other documents matter: what was held out stays held out.
    some = {name: "now another text" for name in list(corpus)[10:40]} | {"new": "x"}
    later = _open(some, tmp_path, split="validation", validation=0.2)
    assert later.documents == sum(_in_validation(name, 0.2) for name in some)
    # Known values, so that a change of the rule cannot pass unseen.
    held = ["functools.py", "configparser.py", "argparse.py", "asyncio/tasks.py"]
    assert [_in_validation(name, 0.05) for name in held] == [True, True, False, False]
    stays = _open(dict.fromkeys(held, "text"), tmp_path, split="validation", validation=0.05)
    assert stays.documents == 2


def test_progress_rises_to_the_total(corpus, tmp_path):
    big = {f"{number}": "x" * 500_000 for number in range(7)}
    seen = []
    _open(big, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) >= 4 and seen == sorted(seen) and seen[-1] == (3_500_000, 3_500_000)
    assert all(total == 3_500_000 for _, total in seen)
    seen.clear()
    _open(big, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert not seen


DAMAGE = {
    "tokens cut": lambda folder: os.truncate(folder / "tokens.bin", 100),
    "tokens flipped": lambda folder: _flip(folder / "tokens.bin"),
    "offsets flipped": lambda folder: _flip(folder / "offsets.bin"),
    "tokens absent": lambda folder: (folder / "tokens.bin").unlink(),
    "meta absent": lambda folder: (folder / "meta.json").unlink(),
    "meta cut": lambda folder: os.truncate(folder / "meta.json", 100),
    "meta without a count": lambda folder: _edit(folder / "meta.json", "tokens"),
    "meta of other counts": lambda folder: _edit(folder / "meta.json", "documents", 3),
    "meta without files": lambda folder: _edit(folder / "meta.json", "files"),
    "a meta that is a list": lambda folder: (folder / "meta.json").write_text("[]"),
}


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _edit(path, name, value=None):
    meta = json.loads(path.read_text())
    del meta[name]
    if value is not None:
        meta[name] = value
    path.write_text(json.dumps(meta))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_reported_and_written_anew(corpus, tmp_path, damage):
    path = _open(corpus, tmp_path).path
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    DAMAGE[damage](path)
    with pytest.warns(UserWarning, match=r"open_store\(.*is damaged: .*; the text is tokenized again"):
        store = _open(corpus, tmp_path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert store.tokens.tobytes() == before["tokens.bin"] and not _hidden(tmp_path)


def test_without_checksums_a_flipped_bit_would_pass(corpus, tmp_path):
    _flip(_open(corpus, tmp_path).path / "tokens.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flipped = _open(corpus, tmp_path, verify=False)
    assert flipped.tokens.tobytes() != b"".join(text.encode() + b"\0" for text in corpus.values())


def test_an_error_in_the_middle_leaves_nothing(corpus, tmp_path):
    source = texts(corpus)

    def breaks():
        yield from [document._replace(text=document.text + "x" * (1 << 20)) for document in list(source)[:3]]
        assert _hidden(tmp_path), "negative control: there was something to clean up"
        raise RuntimeError("the network is gone")

    with pytest.raises(RuntimeError, match="the network is gone"):
        open_store(replace(source, documents=breaks), ByteTokenizer(), tmp_path, validation=0.0)
    assert list(tmp_path.iterdir()) == []
    assert open_store(source, ByteTokenizer(), tmp_path, validation=0.0).documents == len(corpus)


WRITER = """
import sys, time
from eqformer.data import ByteTokenizer, open_store, TextSource, Document
def documents():
    for number in range({count}):
        yield Document(str(number), "x" * 1_000_000, 1_000_000)
    print("written", flush=True)
    time.sleep({seconds})
source = TextSource("killed", 0, lambda: "same", documents)
try:
    open_store(source, ByteTokenizer(), sys.argv[1], validation=0.0)
except ValueError as error:
    print(error)
    sys.exit(2)
"""


def test_a_killed_writer_leaves_nothing_visible_and_is_swept_up(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path)])
    write = lambda: exec(WRITER.format(count=2, seconds=0), {})
    code = WRITER.format(count=4, seconds=600)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "written\n"
        left = _hidden(tmp_path)
        assert len(left) == 1 and not _visible(tmp_path)

        # While it lives, nobody takes its folder away, and others may finish first.
        write()
        assert _hidden(tmp_path) == left and len(_visible(tmp_path)) == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert _hidden(tmp_path) == left

    whole = tmp_path / _visible(tmp_path)[0]
    os.truncate(whole / "tokens.bin", 10)
    with pytest.warns(UserWarning, match="is damaged"):
        write()
    assert not _hidden(tmp_path) and (whole / "tokens.bin").stat().st_size == 2_000_002


def test_of_two_writers_the_slower_takes_what_the_faster_made(corpus, tmp_path):
    source = texts(corpus)

    def while_another_writes():
        open_store(source, ByteTokenizer(), tmp_path, validation=0.0)
        yield from source

    store = open_store(replace(source, documents=while_another_writes), ByteTokenizer(), tmp_path, validation=0.0)
    assert store.documents == len(corpus)
    assert len(_visible(tmp_path)) == 1 and not _hidden(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="file size limits are POSIX")
def test_a_disk_that_is_full_is_reported_and_leaves_nothing(tmp_path):
    # A limit on the size of a file makes the system refuse a write in its middle, as a full disk does.
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2_500_000, 2_500_000))\n"
    done = subprocess.run(
        [sys.executable, "-c", code + WRITER.format(count=4, seconds=0), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout.splitlines()[-1].startswith("open_store('killed'")
    assert f"must be written to {tmp_path}" in done.stdout and "bytes are free" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_cache_directory_that_cannot_be_made_is_reported(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"must be written to .*file.*another `cache_dir`"):
        _open(corpus, tmp_path / "file")


def test_bad_input_is_reported_in_one_message(tmp_path):
    two = {"a": "one", "b": "two"}
    with pytest.raises(
        ValueError,
        match=r"the validation split must have a document with text, but it has none, and the other split has 2; "
        r".*piece=",
    ):
        _open(two, tmp_path, split="validation")
    with pytest.raises(
        ValueError, match=r"the train split must have a document with text, but it has none, and the other split has 0"
    ):
        _open({"a": ""}, tmp_path)
    with pytest.raises(ValueError, match=r"validation is a share of the documents.*below 1"):
        _open(two, tmp_path, validation=1.0)
    with pytest.raises(ValueError, match=r"b cannot be tokenized: .*no NUL"):
        _open({"a": "one", "b": "t\0wo"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_must_hold_every_token(tmp_path):
    store = _open({"a": "az"}, tmp_path)
    check_vocab(store, 123)
    with pytest.raises(ValueError, match=r"check_vocab\(store, vocab=122\).*contains the id 122; build .* vocab=256"):
        check_vocab(store, 122)
