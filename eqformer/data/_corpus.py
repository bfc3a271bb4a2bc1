"""The text of a run: training batches of one or several sources, and held-out batches of each source."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import NamedTuple, SupportsFloat

from .._files import list_paths
from .._shapes import Batch
from ._conversations import RowEncoder
from ._documents import TextSource
from ._loader import Loader, Mixture, Packing
from ._token_store import check_vocab, EmptySplitError, is_stored, open_store, Split, SplitBy, TokenStore
from ._tokenizer import Tokenizer


class ValidationMeans(NamedTuple):
    """Means over the tokens of a text: the loss in nats, the share of correct tokens, and the bytes per token.

    `rewards` has means over pairs of completions, by name.
    """

    loss: float
    accuracy: float
    bytes_per_token: float
    rewards: Mapping[str, float] = {}


@dataclass(frozen=True)
class Corpus:
    """Text of a run, from one source or several.

    Args:
        train: The training batches.
        held_out: The held-out batches of each source for validation, by the source's name.
    """

    train: Loader | Mixture
    held_out: Mapping[str, Loader]

    @property
    def weights(self) -> Mapping[str, float]:
        """The share of each source in the training rows."""
        return dict.fromkeys(self.held_out, 1.0) if self._mixture is None else self._mixture.weights

    @property
    def loaders(self) -> Mapping[str, Loader]:
        """The training loader of each source, by the source's name."""
        train = self.train
        return train.loaders if isinstance(train, Mixture) else dict.fromkeys(self.held_out, train)

    @property
    def _mixture(self) -> Mixture | None:
        """The mixture of several sources; None for one source."""
        return self.train if isinstance(self.train, Mixture) else None

    @property
    def identity(self) -> str:
        """A text that differs between different sources and between mixtures of the same sources."""
        folders = {name: loader.store.path.name for name, loader in self.loaders.items()}
        if len(folders) == 1:
            return " + ".join(folders[name] for name in self.weights)
        return " + ".join(f"{weight:.9g} {folders[name]}" for name, weight in self.weights.items())

    @property
    def tokens(self) -> tuple[int, int]:
        """The number of training tokens, and the number of held-out tokens."""
        train, held_out = (
            sum(len(loader.store.tokens) for loader in loaders.values()) for loaders in (self.loaders, self.held_out)
        )
        return train, held_out

    def map_loaders(self, function: Callable[[Loader], Loader], *, held_out: bool = True) -> "Corpus":
        """Return the corpus with a function applied to each loader; the function may add stored arrays to rows.

        With `held_out=False`, the loaders of held-out text are not changed.
        """
        loaders = {name: function(loader) for name, loader in self.loaders.items()}
        held_out_loaders = {name: function(x) for name, x in self.held_out.items()} if held_out else self.held_out
        if self._mixture is None:
            return Corpus(next(iter(loaders.values())), held_out_loaders)
        return Corpus(self._mixture.with_loaders(loaders), held_out_loaders)

    def describe(self, steps: int) -> str:
        """Describe each source of a mixture: its tokens, its share of the rows and its epochs in the run."""
        if self._mixture is None:
            return ""
        epochs = self._mixture.epochs(steps)
        clauses = []
        for name, loader in self.loaders.items():
            tokens = f"{len(loader.store.tokens):,} tokens"
            clauses.append(f"{name} ({tokens}) {self.weights[name]:.3g} of the rows, {epochs[name]:.3g} epochs")
        return "the text is " + "; ".join(clauses)

    def describe_cuts(self) -> list[str]:
        """Return a note for each source with texts, conversations or completions that do not fit into a row."""
        notes = {name: loader.packing.cut_note for name, loader in self.loaders.items()}
        return [f"of {name}, {note}" for name, note in notes.items() if note]

    def validate(
        self, sums: Callable[[Batch], Mapping[str, SupportsFloat]], batches: int, *, rows: tuple[int, int] | None = None
    ) -> tuple[ValidationMeans, dict[str, ValidationMeans]]:
        """Return means over the held-out text: over all sources, weighted by their shares, and over each source.

        `sums` returns a batch's `nats`, `correct` and `count`, as `training.evaluation_sums` does; for preferences it
        also returns the sums of `training.make_reward_evaluation`. At most `batches` evenly spaced batches of each
        source are read. `rows` selects the rows `rows[0]` to `rows[1] - 1` of each batch.
        """
        means = {name: _average(loader, sums, batches, rows) for name, loader in self.held_out.items()}
        shares = [(self.weights[name], mean) for name, mean in means.items()]
        fields = ("loss", "accuracy", "bytes_per_token")
        total = (sum(share * getattr(mean, field) for share, mean in shares) for field in fields)
        names = shares[0][1].rewards
        rewards = {name: sum(share * mean.rewards[name] for share, mean in shares) for name in names}
        return ValidationMeans(*total, rewards=rewards), means


def open_corpus(
    sources: Mapping[str, TextSource],
    tokenizer: Tokenizer | RowEncoder,
    cache_dir: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    seq: int,
    batch: int,
    seed: int,
    packing: Packing = "windows",
    weights: Mapping[str, float] | None = None,
    validation: float = 0.05,
    vocab: int | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Corpus:
    """Open one text, or a mixture of several, as batches; text that is not in the cache is tokenized into it first.

    Args:
        sources: The sources, by a name for messages and metrics.
        tokenizer: The tokenizer of all sources, or an encoder of rows. An encoder of chat data needs
            `packing="documents"` for `conversations`, `"pairs"` for `preferences` and `"labelled"` for `labelled`. A
            `TextGroupEncoder` needs `packing="groups"`, and a `LabelledTextEncoder` needs `packing="classes"`.
        cache_dir: One or several cache folders, as in `open_store`. If a folder cannot be written, only the folders
            after it are tried.
        seq: The number of tokens in a row.
        batch: The number of rows in a batch.
        seed: The seed of the shuffled order, and of the choice of texts in a mixture.
        packing: As in `Loader`.
        weights: The share of each source in the rows of a `Mixture`; None: there is one source, and no mixture.
        validation: The share of the documents that is held out; a hash of a document's name decides. If a source has
            too few documents to hold any out, a warning is given, and the end of each document is held out instead, as
            by `open_store(split_by="position")`: at least a row, and at most half of the text.
        vocab: The number of the model's token ids, see `check_vocab`; None: no check.
        progress: Called with the source and split, `NAME (split)`, the bytes done and the total bytes (0: unknown).

    **Raises:** `ValueError` as `open_store`, `check_vocab`, `Loader` and `Mixture` do.
    """
    if weights is None and len(sources) != 1:
        raise ValueError(
            f"open_corpus({list(sources)}, weights=None): several sources need weights; pass one for each."
        )
    folders = list_paths(cache_dir)
    loaders: dict[Split, dict[str, Loader]] = {"train": {}, "validation": {}}
    for name, source in sources.items():
        show = None if progress is None else functools.partial(_show_split, progress, name)
        stores = _open_splits(name, source, tokenizer, folders, seq=seq, validation=validation, show=show)
        for split, store in stores.items():
            if vocab is not None:
                check_vocab(store, vocab)
            loaders[split][name] = Loader(store, seq=seq, batch=batch, seed=seed, packing=packing)
            folders = folders[folders.index(store.path.parent) :]
    train = loaders["train"]
    mixed = next(iter(train.values())) if weights is None else Mixture(train, weights, seed=seed)
    return Corpus(mixed, loaders["validation"])


# The smaller split comes first: if it is empty, the larger split need not be tokenized.
_SPLITS: tuple[Split, Split] = ("validation", "train")


def _open_splits(
    name: str,
    source: TextSource,
    tokenizer: Tokenizer | RowEncoder,
    folders: Sequence[Path],
    *,
    seq: int,
    validation: float,
    show: Callable[[Split, int, int], object] | None,
) -> dict[Split, TokenStore]:
    """Open both splits of a source, by document; if one of them would be empty, by position."""
    # The cache hashes files once for all splits.
    source = replace(source, fingerprint=functools.cache(source.fingerprint))

    def open_both(split_by: SplitBy, share: float) -> dict[Split, TokenStore]:
        nonlocal folders
        stores: dict[Split, TokenStore] = {}
        for split in _SPLITS:
            progress = None if show is None else functools.partial(show, split)
            stores[split] = open_store(
                source, tokenizer, folders, split, validation=share, split_by=split_by, progress=progress
            )
            # A folder that could not be written is not tried again.
            folders = folders[folders.index(stores[split].path.parent) :]
        return stores

    if isinstance(tokenizer, RowEncoder):
        return open_both("document", validation)  # The end of a conversation cannot be held out.
    # Tokens of a split by position exist only if an earlier run found that a split by document is empty.
    if not is_stored(source, tokenizer, folders, "validation", validation=validation, split_by="position"):
        with suppress(EmptySplitError):
            return open_both("document", validation)
    stores, share = open_both("position", validation), validation
    if (held_out := len(stores["validation"].tokens)) <= seq:
        share = min(0.5, 1.1 * (seq + 1) / (held_out + len(stores["train"].tokens)))
        stores = open_both("position", share)
    warnings.warn(
        f"open_corpus({name!r}, validation={validation}): there are too few documents to hold out some of them, so the "
        f"last {share:.3g} of each document is held out.",
        stacklevel=3,
    )
    return stores


def _show_split(progress: Callable[[str, int, int], object], name: str, split: Split, done: int, total: int) -> None:
    progress(f"{name} ({split})", done, total)


def _average(
    loader: Loader, sums: Callable[[Batch], Mapping[str, SupportsFloat]], batches: int, rows: tuple[int, int] | None
) -> ValidationMeans:
    """Average the held-out batches of one source."""
    start, stop = (0, loader.batch_size) if rows is None else rows
    total: dict[str, float] = {}
    for batch in loader.epoch(batches, start=start, stop=stop):
        total = {name: total.get(name, 0.0) + float(value) for name, value in sums(batch).items()}
    nats, correct, count, pairs = (total.pop(name, 0.0) for name in ("nats", "correct", "count", "pairs"))
    rewards = {name: value / max(pairs, 1) for name, value in total.items()}
    return ValidationMeans(nats / count, correct / count, loader.store.bytes_per_token, rewards)
