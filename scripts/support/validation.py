"""How well a model does on what each source of a text has held out."""

from collections.abc import Callable, Mapping
from typing import Any

from eqformer import Batch, data, training
from support.text import Texts


Sums = Callable[[Batch], Mapping[str, Any]]


def validation_row(texts: Texts, sums: Sums, batches: int, rows: tuple[int, int]) -> dict[str, float]:
    """The metrics of a validation: means of the sources by their weights and, of several, the loss of each.

    `sums` gives a batch's `nats`, `correct` and `count`, as `training.evaluation_sums` does; it is given the rows of
    each batch from `rows[0]` to before `rows[1]`.
    """
    each = {name: _means(loader, sums, batches, rows) for name, loader in texts.held_out.items()}
    loss, correct, size = (sum(texts.weights[n] * its[field] for n, its in each.items()) for field in range(3))
    row = {
        "validation_loss": loss,
        "validation_bits_per_byte": training.bits_per_byte(loss, size),
        "validation_accuracy": correct,
    }
    return row | ({f"validation_loss/{name}": its[0] for name, its in each.items()} if len(each) > 1 else {})


def _means(loader: data.Loader, sums: Sums, batches: int, rows: tuple[int, int]) -> tuple[float, float, float]:
    """A token's nats, whether it is right, and its bytes, in the mean over evenly spaced batches."""
    nats = correct = count = 0.0
    for batch in loader.epoch(batches, start=rows[0], stop=rows[1]):
        found = sums(batch)
        nats, correct, count = (
            nats + float(found["nats"]),
            correct + float(found["correct"]),
            count + float(found["count"]),
        )
    return nats / count, correct / count, loader.store.bytes_per_token
