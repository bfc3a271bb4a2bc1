"""`LEGEND`, the names of dims in shape annotations, einops patterns, layouts and messages; batches; helpers for sizes.

The output dims of a parameter come first (`heads head_dim embed`), as in published checkpoints. A tensor has a `dim`; a
mesh has an `axis`.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, cast, TypeGuard, TypeVar

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from ._annotation_checks import checked_fields


LEGEND = {
    "batch": "examples",
    "seq": "tokens of a call",
    "kv_seq": "tokens that may be attended to",
    "embed": "channels of the residual stream",
    "streams": "residual streams of a token, in models with several",
    "stream_logits": "logits of the weights with which a layer reads, writes and mixes streams",
    "stream_rank": "channels between the two maps of the gates of streams",
    "uses": "uses of streams by a layer: reading, writing, mixing",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "channels of a head",
    "source": "channels of a sequence that cross-attention reads",
    "hidden": "features between an encoder and its logits",
    "group": "heads that share a key head",
    "group_heads": "heads of a group that share a map of their output",
    "group_rank": "channels of a group between the two maps of its output",
    "block_size": "tokens of a block that share a compressed key",
    "pool_size": "tokens of a pool that an indexer selects as a whole",
    "series": "overlapping blocks from which a compressed key is made",
    "entry_dim": "channels of a compressed key",
    "mlp": "hidden features of a feed-forward layer, channels of a short convolution",
    "vocab": "token ids",
    "ids": "token ids of a table that a layer holds",
    "ngrams": "rows of a table of hashed n-grams",
    "ngram_heads": "rows of such a table that are looked up for each token",
    "ngram_dim": "channels of a row of such a table",
    "max_seq": "learned positions",
    "labels": "classes of a classifier",
    "types": "types of tokens, such as the two texts of a pair",
    "ranges": "distances of positions that share a bias",
    "layers": "blocks of a stack",
    "depth": "layers that are given a vector of each token beside the stream",
    "experts": "experts of a mixture",
    "candidates": "experts that a router chooses among, all on every device",
    "top_k": "experts that a token takes, or keys that a query selects",
    "expert_latent": "channels of the sum of experts that read a latent",
    "gate": "the one number that a gated layer is multiplied by",
    "latent": "compressed keys and values",
    "q_latent": "compressed queries",
    "rope_dim": "rotated channels of the decoupled key",
    "index_heads": "small heads of an indexer",
    "index_dim": "channels of an indexer's head",
    "half": "pairs of channels that are rotated together",
    "v_dim": "value channels of a head",
    "rank": "between the factors of a low-rank map",
    "sides": "the inputs that a predictor merges: an embedding and a hidden vector",
    "merged": "channels of a predictor's stream, as many as `embed`",
    "taps": "tokens that a convolution reads",
}

ENSEMBLE_DIMS = ("layers", "experts")  # A vmapped ensemble puts these dims before a leaf's dims.

T = TypeVar("T")
Array = jax.Array | np.ndarray
ArrayOrShape = Array | jax.ShapeDtypeStruct


def is_shape(leaf: object) -> TypeGuard[jax.ShapeDtypeStruct]:
    """Return whether a leaf is the shape of an array, as in the trees of `eqx.filter_eval_shape`."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def as_tuple(values: T | Iterable[T]) -> tuple[T, ...]:
    """Return a single value (a string counts as one), or the values of an iterable, as a tuple."""
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else cast(tuple[T], (values,))


def count_pieces(count: int, total_bytes: int, piece_bytes: int) -> int:
    """Return the smallest number of equal pieces of `count` items so that a piece takes at most `piece_bytes`.

    If a single item takes more, the number is `count`; it is at least 1. `total_bytes` are the bytes of all items.
    """
    fewest = max(1, -(-total_bytes // piece_bytes))
    return next((pieces for pieces in range(fewest, count) if count % pieces == 0), max(count, 1))


def next_power_of_two(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least the number and at least `least`, which is a power of two.

    Few different sizes remain after this rounding, so compiled programs are reused.
    """
    return max(least, 1 << (number - 1).bit_length())


@checked_fields
class Batch(eqx.Module):
    """Rows of tokens with targets, weights, positions and segments; made by `eqformer.data`, as numpy or jax arrays.

    `weights` is 1 for a target that counts and 0 for any other target (padding, the end of a document). `examples`
    numbers the rows over the whole run, so that randomness depends on the example and not on its device. In packed
    rows, `positions` restart and `segments` change at each document. If both are `None`, each row is one text from
    position 0 on without padding, and attention knows this at compile time. Each `group` consecutive rows form a group,
    whose rows a loss may compare; devices and microbatches never split a group.

    `documents` is the maximum number of documents in any row of the run, or None. If it is given, each row has whole
    documents one after another, each at positions 0, 1, 2, ..., and the padding behind them; attention kernels that
    need this order are then used. `source_ids` are the tokens that an encoder reads for each row, with
    `source_positions` (-1 at padding) and `source_segments`: in packed rows a target sees the source of the same
    segment. `types` are the types of tokens, 0 and 1 for the two texts of a pair; if None, all tokens have type 0.
    `row_numbers` are the numbers of the rows in their batch; only a step that measures rows one by one sets them.
    """

    ids: Int[Array, "batch seq"]
    targets: Int[Array, "batch seq"]
    weights: Float[Array, "batch seq"]
    examples: Int[Array, "batch"]
    positions: Int[Array, "batch seq"] | None = None
    segments: Int[Array, "batch seq"] | None = None
    group: int = eqx.field(static=True, default=1)
    documents: int | None = eqx.field(static=True, default=None)
    source_ids: Int[Array, "batch kv_seq"] | None = None
    source_positions: Int[Array, "batch kv_seq"] | None = None
    source_segments: Int[Array, "batch kv_seq"] | None = None
    types: Int[Array, "batch seq"] | None = None
    row_numbers: Int[Array, "batch"] | None = None

    def __check_init__(self):
        if self.positions is None and self.segments is not None:
            raise ValueError(
                "Batch(segments=..., positions=None): positions start anew in each document, so packed rows need both; "
                "give positions, or leave out both where each row is one text."
            )
        if (self.source_segments is None) != (self.segments is None or self.source_ids is None) or (
            self.source_segments is not None and self.source_positions is None
        ):
            raise ValueError(
                "Batch(source_segments=...): a target sees the source of its own segment, so packed rows need segments "
                "of targets and source; give segments, source_segments and source_positions, or no segments."
            )
        if self.documents is not None and (self.segments is None or self.documents < 1):
            raise ValueError(
                f"Batch(documents={self.documents}): the maximum number of packed documents in a row must be at least "
                "1, and packed rows have segments; give segments, or leave out documents."
            )


def batch_fields(batch: Batch) -> dict[str, Any]:
    """Return the fields of `Batch` by name, to make a batch of another class with the same rows."""
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(Batch)}


@checked_fields
class PreferenceBatch(Batch):
    """Rows whose completions a `training.preference_loss` compares; made by `eqformer.data`.

    The weights of the prompts' targets are 0. In a batch of pairs (`group` 2) each chosen row stands before its
    rejected row. In a batch for KTO each row has a label.
    """

    reference_nats: Float[Array, "batch"] | None = None
    """The nats of each row under the reference model, from `training.make_row_nats`; None until they are computed."""
    labels: Float[Array, "batch"] | None = None
    """1 for a desirable completion and 0 for an undesirable one; None for pairs."""
    baseline: Float[Array, "batch"] | None = None
    """KTO's reference point, the same number for each row of the batch, see `training.kto_baseline`."""
    mismatched: "PreferenceBatch | None" = None
    """The prompts with other rows' completions, from which `baseline` is computed; None for pairs."""


@checked_fields
class LabelBatch(Batch):
    """Texts with labels, from which `training.classification_loss` learns; made by `data.batch_labelled_texts`."""

    labels: Int[Array, "batch"] | Float[Array, "batch *labels"] | None = None
    """For each text: the number of its label, or 0 or 1 for each of several labels, or the value to predict."""


@checked_fields
class PolicyBatch(Batch):
    """Rows of prompts with sampled completions, from which a `training.policy_loss` learns; made by `text.Rollouts`.

    The weights are 1 for the targets of a completion, and 0 for the prompt and for completions that are left out.
    Log-probabilities are given for each target, after division by the temperature; they are not read where the weight
    is 0.
    """

    advantages: Float[Array, "batch"] | None = None
    """How much better each completion is than the mean of its group, see `training.group_advantages`."""
    old_log_probs: Float[Array, "batch seq"] | None = None
    """Log-probabilities under the model that sampled the completions; None: under the model before this step."""
    reference_log_probs: Float[Array, "batch seq"] | None = None
    """Log-probabilities under a frozen model; a loss with `beta` keeps the trained model near the frozen model."""
    sampler_log_probs: Float[Array, "batch seq"] | None = None
    """Log-probabilities as sampling computed them, only for the metric `sampler_difference`."""
    row_metrics: dict[str, Float[Array, "batch"]] = eqx.field(default_factory=dict)
    """Numbers of each row, such as its reward, whose means the step reports as metrics."""
    temperature: float = eqx.field(static=True, default=1.0)
    """The temperature of sampling, by which logits are divided."""

    def __check_init__(self):
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"PolicyBatch(temperature={self.temperature}): it must be the temperature of sampling, finite and "
                "above 0, since greedy completions of a prompt are all equal."
            )


@checked_fields
class DistillationBatch(Batch):
    """Rows with a teacher's probabilities of their next tokens, for `training.distillation_loss`.

    The batch has either a frozen teacher with its hidden states of the rows, or stored probabilities of the teacher's
    most probable ids (`training.teacher_arrays`).
    """

    teacher: PyTree = None
    """The teacher, a model of the same token ids, sharded by the plan if any; None for stored probabilities."""
    teacher_hidden: Float[Array, "batch seq teacher_embed"] | None = None
    """The teacher's output before its logits."""
    top_ids: Int[Array, "batch seq top"] | None = None
    """The teacher's most probable ids for each target; None for a teacher that is a model."""
    top_nats: Float[Array, "batch seq buckets"] | None = None
    """The `-log p` of each id in `top_ids` and, in the last place, of all other ids together."""
    temperature: float = eqx.field(static=True, default=1.0)
    """The temperature of the probabilities in `top_nats`."""
