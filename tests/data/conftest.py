"""A small corpus, its store and its tokenizer, which are made once for all tests of the room."""

import numpy as np
import pytest

from eqformer.data import ByteTokenizer, open_store, texts


def _made_up(number: int) -> str:
    words = ["salt", "ocean", "né", "日本", "a", "🦋 wing", "line\n", "lantern", "x = 1\n\n"]
    random = np.random.default_rng(number)
    return " ".join(random.choice(words, size=int(random.integers(1, 60))))


@pytest.fixture(scope="session")
def corpus():
    """60 short documents of very unequal lengths, whose characters have one to four bytes."""
    return {f"folder/{number:02}.txt": _made_up(number) for number in range(60)}


@pytest.fixture(scope="session")
def store(corpus, tmp_path_factory):
    """A store of the whole corpus as bytes."""
    return open_store(texts(corpus), ByteTokenizer(), tmp_path_factory.mktemp("cache"), validation=0.0)


@pytest.fixture(scope="session")
def tokenizer_json(corpus, tmp_path_factory):
    """The path of a byte-level BPE tokenizer trained on the corpus, with one special token."""
    from tokenizers import decoders, models, pre_tokenizers, Tokenizer, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(list(corpus.values()), trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
