"""Negative controls: a plan without one of its reductions, gathers or exchanges no longer gives one device's results.

If a value that differs between devices is used as if it were replicated, JAX's varying types refuse the program before
it is compiled. For such reductions, a second control reduces only the first device's part. The types accept this
program, and its results are wrong.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import plan_controls as control
import pytest
from plan_controls import nothing, of_first, own_exchange, own_part, own_piece, permuted_nowhere, without
from plan_models import batch_of, model_of
from plan_parity import Case, differences, hastily, of_one_device, of_plan, place

from eqformer import Batch, training
from eqformer.parallel import COLLECTIVES
from eqformer.parallel.tensor import _residual_stream as _stream_parts


TYPES = "var(y|ies|ying)|differ"
ROUNDING = 50 * float(np.finfo(np.float32).eps)

DATA = Case("llama", {"fsdp": 2})
ROWS = Case("llama", {"tensor": 2})
SEQUENCE = Case("gpt2", {"tensor": 2}, {"residual": "sequence"})
RINGED = Case("llama", {"tensor": 2}, {"residual": "sequence", "overlap": "ring"})
FEATURE = Case("gpt2", {"tensor": 2}, {"residual": "feature"})
LLAMA_FEATURE = Case("llama", {"tensor": 2}, {"residual": "feature"})
LATENTS = Case("jaxformer", {"tensor": 2}, {"residual": "feature"})
ROUND = Case("llama", {"context": 2}, {"context_method": "ring"})
DROPPED = Case("gpt2", {"context": 2}, {"context_method": "ring"})
GATHERED = Case("llama", {"context": 2}, {"context_method": "gather"})
EXCHANGED = Case("llama", {"context": 2}, {"context_method": "heads"})
STAGES = Case("llama", {"pipe": 2}, {"schedule": "1f1b", "microbatches": 2})
SPREAD = Case("llama", {"pipe": 2}, {"schedule": "gpipe", "microbatches": 2, "edges": "spread"})
CHUNKS = Case("llama", {"pipe": 2}, {"schedule": "looping", "microbatches": 2, "chunks": 2})
SHARED = Case("llama", {"tensor": 4})
FULL_NORMS = Case("full norms", {"tensor": 2})
EXPERTS = Case("mixture", {"expert": 2}, {"expert_method": "gather"})
SENT = Case("mixture", {"expert": 2}, {"expert_method": "exchange", "expert_factor": 0.25})
SLICES = Case("mixture", {"tensor": 2}, {"residual": "sequence"})
FEATURES = Case("mixture", {"tensor": 2}, {"residual": "feature"})


class Control(NamedTuple):
    """A negative control: a change of the program, the case in which it is made, and what notices the change."""

    change: Callable[[Any], None]
    case: Case
    caught_by: str = "numbers"  # or "types", or "nothing"


STREAMS = Case("streams", {"tensor": 2}, {"residual": "feature"})
CONTROLS: dict[str, Control] = {
    # Sums over rows and tokens.
    "total of losses, unsummed": Control(control.total_of(0, nothing), DATA, "types"),
    "total of losses": Control(control.total_of(0, of_first), DATA),
    "total of counts, unsummed": Control(control.total_of(1, nothing), DATA, "types"),
    "total of counts": Control(control.total_of(1, of_first), DATA),
    "gradients over fsdp, unsummed": Control(control.gradients_unsummed, DATA, "types"),
    "gradients over fsdp": Control(control.of_first_over("fsdp"), DATA),
    "gradients over replica": Control(control.of_first_over("replica"), Case("llama", {"replica": 2})),
    "gradients over expert": Control(control.of_first_over("expert"), Case("llama", {"expert": 2})),
    "gradients over context": Control(control.of_first_over("context"), ROUND),
    "gradients over tensor, of what is whole in slices": Control(control.of_first_over("tensor"), SEQUENCE),
    "gradients over tensor, of key heads that devices share": Control(control.of_first_over("tensor"), SHARED),
    # Sharded state.
    "scatter of gradients in ZeRO 1": Control(
        without("gradients over fsdp", own_part), DATA._replace(choices={"zero": 1})
    ),
    "scatter of gradients in ZeRO 2": Control(
        without("gradients over fsdp", own_part), DATA._replace(choices={"zero": 2})
    ),
    "scatter of gradients in ZeRO 3": Control(
        without("gradients over fsdp", own_part), DATA._replace(choices={"zero": 3})
    ),
    "gather of parameters": Control(without("weights over fsdp", own_piece), DATA._replace(choices={"zero": 3})),
    # Tensor parallelism.
    "sum of row maps, unsummed": Control(without("row-parallel output", nothing), ROWS, "types"),
    "sum of row maps": Control(without("row-parallel output", of_first), ROWS),
    "sum of the entry's gradient": Control(control.unsummed_entry, ROWS),
    "entry not said to vary": Control(control.untyped_entry, ROWS, "nothing"),
    "bias added once": Control(control.bias_before, ROWS),
    "gather of tokens before maps": Control(without("column-parallel input", own_piece), SEQUENCE),
    "sum and scatter over tokens": Control(without("row-parallel output", own_part), SEQUENCE),
    "messages of ringed maps from the stream": Control(without("column-parallel input", permuted_nowhere), RINGED),
    "messages of ringed maps to the stream": Control(without("row-parallel output", permuted_nowhere), RINGED),
    "messages of ringed maps of features": Control(
        without("feature-parallel output", permuted_nowhere),
        FEATURE._replace(choices=FEATURE.choices | {"overlap": "ring"}),
    ),
    "swaps of ringed maps in stages": Control(
        without("row-parallel output", control.kept_all),
        Case("llama", {"pipe": 2, "tensor": 2}, {**RINGED.choices, "schedule": "1f1b", "microbatches": 2}),
    ),
    "own key head of several": Control(control.first_device_in("tensor._tensor"), SHARED),
    "sum and scatter over features": Control(without("feature-parallel output", own_part), FEATURE),
    "sum of a map to no features, unsummed": Control(without("replicated feature-parallel output", nothing), LATENTS),
    "sum of a map to no features": Control(without("replicated feature-parallel output", of_first), LATENTS),
    "mean of means": Control(without("norm means", nothing), FEATURE),
    "mean of squares": Control(without("norm mean squares", nothing), FEATURE),
    "sums for the weights of streams": Control(without("stream weights", nothing), STREAMS),
    "mean of squares over all heads": Control(without("norm mean squares", nothing), FULL_NORMS),
    "own tokens' dropout": Control(control.first_tokens(_stream_parts.TokensDropout), SEQUENCE),
    "own tokens' positions": Control(control.first_tokens(_stream_parts.TokensPositions), SEQUENCE),
    "own features' dropout": Control(control.first_tokens(_stream_parts.FeatureDropout), FEATURE),
    "no array marked as meeting slices": Control(control.marks(False), SEQUENCE, "nothing"),
    "every array marked as meeting slices": Control(control.marks(True), ROWS, "types"),
    # Vocabulary.
    "sum of looked-up vectors, unsummed": Control(without("token embeddings", nothing), ROWS),
    "sum of looked-up vectors": Control(without("token embeddings", of_first), ROWS),
    "sum and scatter of looked-up vectors": Control(without("token embeddings", own_part), SEQUENCE),
    "gather of the head's tokens": Control(without("head input", own_piece), SEQUENCE),
    "gather of the head's features": Control(without("head input", own_piece), FEATURE),
    "exchange of features for rows": Control(without("vocabulary table by ids", own_exchange), LLAMA_FEATURE),
    "highest logit, unreduced": Control(without("logit maxima", nothing), ROWS, "types"),
    "sum of the normaliser": Control(without("softmax denominators", of_first), ROWS),
    "sum of the target's logit": Control(without("target logits", of_first), ROWS),
    "own rows of a whole table": Control(control.first_device_in("tensor._vocabulary"), Case("gpt2", {"tensor": 4})),
    # Mixtures of experts.
    "gather of tokens for experts": Control(without("gathered expert input", own_piece), EXPERTS),
    "sum and scatter of what experts give": Control(without("summed expert output", own_part), EXPERTS),
    "rounds that all take": Control(without("exchange rounds", of_first), SENT),
    "choices sent to their experts": Control(without("expert dispatch", control.kept_all), SENT),
    "and back": Control(without("expert combine", control.kept_all), SENT),
    "own experts of all": Control(control.first_device_in("_expert_parallel"), EXPERTS),
    "counts of all devices for the balance": Control(
        without("expert loads", nothing), Case("batch mixture", {"fsdp": 2})
    ),
    "sum over slices of hidden features": Control(without("expert output over tensor", own_part), SLICES),
    "sum over slices, whole": Control(without("expert output over tensor", of_first), SLICES._replace(choices={})),
    "bias of a sum added once": Control(control.first_device_in("_expert_parallel"), SLICES),
    "gather of rows for slices of experts": Control(without("expert input over tensor", own_piece), SLICES),
    "slices' counts said to be the same": Control(without("replicated values", nothing), SLICES, "types"),
    "features exchanged for tokens": Control(without("features to tokens", own_exchange), FEATURES),
    "tokens exchanged for features": Control(without("tokens to features", own_exchange), FEATURES),
    "experts' features exchanged": Control(without("expert weights by hidden features", own_exchange), FEATURES),
    "gather of the router's features": Control(without("weights over tensor", control.own_alone), FEATURES),
    # Context.
    "keys go round": Control(without("ring keys and values", permuted_nowhere), ROUND),
    "keys are gathered": Control(without("gathered keys and values", own_piece), GATHERED),
    "heads are exchanged": Control(without("tokens to heads", own_exchange), EXCHANGED),
    "outputs are exchanged back": Control(without("heads to tokens", own_exchange), EXCHANGED),
    "tokens are gathered beside heads": Control(without("token positions", own_piece), EXCHANGED),
    "positions in the order of the ring": Control(control.in_reading_order("positions"), ROUND),
    "documents in the order of the ring": Control(control.in_reading_order("segments"), ROUND),
    "keys of dropout in the order of the ring": Control(control.in_reading_order("keys"), DROPPED),
    "lengths of rows beside their pieces": Control(control.in_reading_order("lengths"), Case("long", {"context": 2})),
    # Pipelines.
    "sum of the edges' gradients, unsummed": Control(
        without("loss and edge gradients over stages", nothing), STAGES, "types"
    ),
    "sum of the edges' gradients": Control(without("loss and edge gradients over stages", of_first), STAGES),
    "messages between stages": Control(without("activations between stages", permuted_nowhere), STAGES),
    "gradients sent back between stages": Control(without("gradients between stages", permuted_nowhere), STAGES),
    "inputs one stage on": Control(without("inputs between stages", permuted_nowhere), SPREAD),
    "tokens of all stages' rows": Control(without("tokens for all stages", own_piece), SPREAD),
    "layers in the order of the ring": Control(control.in_order_read, CHUNKS),
}


@functools.cache
def right_guesses(name: str) -> Batch:
    """Return a batch whose targets are the model's most likely tokens, so that the accuracy is not 0."""
    model = model_of(name)
    batch = jax.tree.map(jnp.asarray, batch_of(model))

    def guesses(model: Any, batch: Any) -> jax.Array:
        hidden, *_ = model.encode(batch.ids, training.batch_tokens(batch))
        return model.unembed(hidden.reshape(-1, hidden.shape[-1])).argmax(-1).reshape(batch.targets.shape)

    return eqx.tree_at(lambda b: b.targets, batch, hastily(guesses, model, batch)(model, batch))


@pytest.mark.by_default("gradients over fsdp", "highest logit, unreduced")
@pytest.mark.parametrize(("change", "case", "caught_by"), CONTROLS.values(), ids=CONTROLS)
def test_a_plan_needs_it(change, case, caught_by, monkeypatch):
    expected = of_one_device(case)
    change(monkeypatch)
    if caught_by == "types":
        with pytest.raises((ValueError, TypeError), match=TYPES):
            of_plan(case)
        return
    wrong = differences(of_plan(case), expected, ROUNDING)
    # What only types say (where a sum stands in the backward pass) changes no number when it is left out.
    assert not wrong if caught_by == "nothing" else max(wrong.values()) > 1e-3


# Of what no training or evaluation under a plan sends: the tests of these have controls of their own.
ELSEWHERE = {
    "generation": {"split cache maxima", "split cache sums", "cached rows", "cached rows of shared key heads"},
    "weights that stay": {
        "column-parallel input over tensor",
        "column-parallel output over fsdp",
        "keys and values over fsdp",
        "heads to rows",
    }
    | {"rows to heads", "row-parallel input over fsdp", "logits input", "partial logits"},
    "functions of their own": {"all_gather_matmul", "matmul_reduce_scatter", "ring"},
    "losses of rows": {"row sums", "row vectors", "row vectors over tensor", "vectors of all rows"},
    "ragged exchanges": {"tokens per expert"},
    "tables inside of layers": {"table ids over fsdp", "looked-up vectors over fsdp"},
    "edits inside a model": {"values of all devices"},
}


@pytest.mark.quick
def test_every_collective_is_left_out_once():
    """Each collective has a control that leaves it out by its name, or as a sum over the axes of a plan."""
    changes = [control.change for control in CONTROLS.values()] + [change for change, _ in OF_EVALUATION.values()]
    left_out = {getattr(change, "collective", None) for change in changes} - {None}
    assert left_out | {"loss and token count", "gradients over replica"}.union(*ELSEWHERE.values()) == {*COLLECTIVES}


CASES = {control.case.name: control.case for control in CONTROLS.values()}


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_without_a_change_there_is_no_difference(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


EVALUATED = Case("llama", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"microbatches": 2})
OF_EVALUATION: dict[str, tuple[Callable[[Any], None] | None, str]] = {
    "nothing": (None, ""),
    "highest logit": (without("argmax logits", of_first), "correct"),
    "argmax ids": (without("argmax ids", of_first), "correct"),
    "first of the highest, unreduced": (without("argmax ids", nothing), "types"),
    "last stage's rows": (without("outputs of the last stage", of_first), "nats"),
    "last stage's rows, unreduced": (without("outputs of the last stage", nothing), "types"),
    "messages between stages": (without("activations between stages", permuted_nowhere), "nats"),
    # The third total of an evaluation, after the numbers of correct and of all tokens.
    "total over rows": (control.total_of(2, of_first), "nats"),
}


@pytest.mark.grid
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "nothing" else pytest.mark.grid) for name in OF_EVALUATION]
)
def test_an_evaluation_needs_it(name, monkeypatch):
    change, wrong = OF_EVALUATION[name]
    plan, model, batch = EVALUATED.plan, model_of("llama"), right_guesses("llama")
    want = hastily(training.evaluation_sums, model, batch)(model, batch)
    placed = place(model, plan)
    if change is not None:
        change(monkeypatch)
    if wrong == "types":
        with pytest.raises((ValueError, TypeError), match=TYPES):
            hastily(training.make_evaluation(plan), placed, batch)
        return
    got = hastily(training.make_evaluation(plan), placed, batch)(placed, batch)
    unlike = {name for name in want if not np.isclose(got[name], want[name], rtol=ROUNDING)}
    assert wrong in unlike if wrong else not unlike
