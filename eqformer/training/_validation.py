"""What a run has not trained on, from time to time."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import PyTree

from ._loop import Every, Progress
from ._metrics import bits_per_byte


class Validation(Every):
    """Writes `validation_loss`, `validation_bits_per_byte` and `validation_accuracy` after each `every` steps.

    Of several sources it writes `validation_loss/NAME` of each too.
    """

    def __init__(
        self,
        every: int,
        means: Callable[[PyTree], tuple[Any, Mapping[str, Any]]],
        write: Callable[[dict[str, Any]], Any],
    ):
        """`means(model)` gives those of all that was held out and of each source, as `data.Corpus.validation` does.

        They have a `loss` in nats, an `accuracy` and `bytes_per_token`. `write` is given the row.
        """
        super().__init__(every, self._validate)
        self._means, self._to = means, write

    def _validate(self, run: Progress) -> None:
        mean, each = self._means(run.state.model)
        row = {
            "step": run.step,
            "validation_loss": mean.loss,
            "validation_bits_per_byte": bits_per_byte(mean.loss, mean.bytes_per_token),
            "validation_accuracy": mean.accuracy,
        }
        several = each if len(each) > 1 else {}
        self._to(row | {f"validation_loss/{name}": its.loss for name, its in several.items()})
