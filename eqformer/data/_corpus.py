"""A run's text: what it trains on, and what each source has held out to validate it."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .._shapes import Batch
from ._documents import Source
from ._loader import Loader
from ._mixture import Mixture
from ._store import check_vocab, EmptySplitError, is_stored, open_store, Split, SplitBy, TokenStore
from ._tokenizer import Tokenizer


class Means(NamedTuple):
    """Means over the tokens of a text: of the loss, in nats; of the tokens that were right; and of their bytes."""

    loss: float
    accuracy: float
    bytes_per_token: float


@dataclass(frozen=True)
class Corpus:
    """What a run reads: a text, or several.

    Args:
        train: What batches are made of.
        held_out: What each source has held out for validation, by its name.
    """

    train: Loader | Mixture
    held_out: Mapping[str, Loader]

    @property
    def weights(self) -> Mapping[str, float]:
        """The share of each source in the rows."""
        return self.train.weights if isinstance(self.train, Mixture) else dict.fromkeys(self.held_out, 1.0)

    @property
    def loaders(self) -> Mapping[str, Loader]:
        """What is trained on, by the names of sources."""
        return self.train.loaders if isinstance(self.train, Mixture) else dict.fromkeys(self.held_out, self.train)

    @property
    def identity(self) -> str:
        """What differs between texts and between mixtures of the same texts."""
        names = {name: one.store.path.name for name, one in self.loaders.items()}
        return " + ".join(
            names[name] if len(names) == 1 else f"{its:.9g} {names[name]}" for name, its in self.weights.items()
        )

    @property
    def tokens(self) -> tuple[int, int]:
        """The tokens for training and those held out."""
        count = lambda loaders: sum(len(one.store.tokens) for one in loaders.values())
        return count(self.loaders), count(self.held_out)

    def description(self, steps: int) -> str:
        """A line on each source of a mixture: its tokens, its share, and how often the run goes through it."""
        if not isinstance(self.train, Mixture):
            return ""
        epochs = self.train.epochs(steps)
        each = (
            f"{name} ({len(one.store.tokens):,} tokens) {self.weights[name]:.3g} of the rows, {epochs[name]:.3g} epochs"
            for name, one in self.loaders.items()
        )
        return "the text is " + "; ".join(each)

    def validation(
        self, sums: Callable[[Batch], Mapping[str, Any]], batches: int, *, rows: tuple[int, int] | None = None
    ) -> tuple[Means, dict[str, Means]]:
        """The means over what was held out: those of the sources by their shares, and those of each source.

        `sums` gives a batch's `nats`, `correct` and `count`, as `training.evaluation_sums` does. Of each source,
        `batches` evenly spaced batches are read at most; of each batch, the rows from `rows[0]` to before `rows[1]`.
        """
        each = {name: _means(loader, sums, batches, rows) for name, loader in self.held_out.items()}
        total = (sum(self.weights[name] * its[field] for name, its in each.items()) for field in range(3))
        return Means(*total), each


def open_corpus(
    sources: Mapping[str, Source],
    tokenizer: Tokenizer,
    cache_dir: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    seq: int,
    batch: int,
    seed: int,
    packing: Literal["windows", "documents"] = "windows",
    weights: Mapping[str, float] | None = None,
    validation: float = 0.05,
    vocab: int | None = None,
    progress: Callable[[str, int, int], Any] | None = None,
) -> Corpus:
    """A text, or a mixture of several, as batches; their tokens from the cache, or tokenised into it now.

    Args:
        sources: The documents of each, by a name for messages and metrics.
        tokenizer: What makes ids of their texts.
        cache_dir: As `open_store` takes it; one that could not be written is not tried again.
        seq: The tokens of a row.
        batch: The rows of a batch.
        seed: Decides the order.
        packing: As `Loader` takes it.
        weights: The share of the rows that each source has, for a `Mixture`; None: there is one source, and no mixture.
        validation: The share of the documents that is held out, by a hash of their names. Of a source whose documents
            are too few for that, the end of each document is held out instead, as by `open_store(split_by="position")`;
            a warning says so. Where this share would be less than a row, more is held out, half of the text at most.
        vocab: The ids of the model that is to read them, see `check_vocab`; None: it is not compared.
        progress: Called with what is read, `NAME (split)`, the bytes done and the bytes in all (0: unknown).

    **Raises:** `ValueError` as `open_store`, `check_vocab`, `Loader` and `Mixture` do.
    """
    if weights is None and len(sources) != 1:
        raise ValueError(f"open_corpus({list(sources)}, weights=None): several sources need weights; pass one of each.")
    folders = [Path(one) for one in ([cache_dir] if isinstance(cache_dir, (str, PathLike)) else cache_dir)]
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


_SPLITS: tuple[Split, Split] = ("validation", "train")  # the smaller one first, since it may turn out to be empty


def _open_splits(
    name: str,
    source: Source,
    tokenizer: Tokenizer,
    folders: Sequence[Path],
    *,
    seq: int,
    validation: float,
    show: Callable[[Split, int, int], Any] | None,
) -> dict[Split, TokenStore]:
    """Open both splits of a source: by document or, if that leaves one of them without text, by position."""
    source = replace(source, fingerprint=functools.cache(source.fingerprint))  # files are hashed once for all splits

    def open_both(split_by: SplitBy, share: float) -> dict[Split, TokenStore]:
        nonlocal folders
        stores: dict[Split, TokenStore] = {}
        for split in _SPLITS:
            progress = None if show is None else functools.partial(show, split)
            how: dict[str, Any] = {"validation": share, "split_by": split_by, "progress": progress}
            stores[split] = open_store(source, tokenizer, folders, split, **how)
            folders = folders[folders.index(stores[split].path.parent) :]  # one that failed is not tried again
        return stores

    # Tokens of both splits by position exist only where the splits by document were tried before, and one was empty.
    if not is_stored(source, tokenizer, folders, "validation", validation=validation, split_by="position"):
        with suppress(EmptySplitError):
            return open_both("document", validation)
    stores, share = open_both("position", validation), validation
    if (held_out := len(stores["validation"].tokens)) <= seq:
        share = min(0.5, 1.1 * (seq + 1) / (held_out + len(stores["train"].tokens)))
        stores = open_both("position", share)
    warnings.warn(
        f"open_corpus({name!r}, validation={validation}): there are too few documents to hold some of them out, so the "
        f"last {share:.3g} of each document is held out.",
        stacklevel=3,
    )
    return stores


def _show_split(progress: Callable[[str, int, int], Any], name: str, split: Split, done: int, total: int) -> None:
    progress(f"{name} ({split})", done, total)


def _means(
    loader: Loader, sums: Callable[[Batch], Mapping[str, Any]], batches: int, rows: tuple[int, int] | None
) -> Means:
    start, stop = (0, loader.batch_size) if rows is None else rows
    total = {"nats": 0.0, "correct": 0.0, "count": 0.0}
    for batch in loader.epoch(batches, start=start, stop=stop):
        found = sums(batch)
        total = {name: before + float(found[name]) for name, before in total.items()}
    return Means(total["nats"] / total["count"], total["correct"] / total["count"], loader.store.bytes_per_token)
