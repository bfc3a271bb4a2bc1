"""Bytes of each inference layout: the paper's formulas against compiled prefill and decode, layer by layer."""

import equinox as eqx
import jax
import pytest
from plan_models import filled
from weight_stationary_cases import EMBED, gathered, HEAD_DIM, HEADS, LAYERS, MLP, palm, ROWS, sent, stationary, VOCAB

from eqformer import planning, systems
from eqformer.program import bytes_sent, list_transfers, read_hlo


QUERIES = HEADS * HEAD_DIM
WIDENED, NARROWED = QUERIES + 2 * MLP, QUERIES + MLP
STATISTICS = 2 * 2 * 7 / 8 * 4  # a norm's mean and mean square, a token, summed over all devices
DECODE, PREFILL = 1, 16


@pytest.fixture(scope="module")
def model():
    return filled(palm)


@pytest.mark.grid
@pytest.mark.parametrize(
    "x,y,attention,overlap,seq",
    [
        (2, 4, "rows", "none", DECODE),
        (2, 4, "rows", "bidirectional", PREFILL),
        (1, 8, "heads", "ring", DECODE),
        *(
            (x, 8 // x, attention, overlap, seq)
            for x in (1, 2, 4, 8)
            for attention in ("rows", "heads")
            for overlap in ("none", "ring", "bidirectional")
            for seq in (DECODE, PREFILL)
        ),
    ],
)
def test_weights_that_stay(model, x, y, attention, overlap, seq):
    split, tokens = stationary(model, x, y, attention=attention, overlap=overlap), ROWS * seq
    devices = {"embed_devices": x, "feature_devices": y, "activation_bytes": 4}
    layer = systems.weight_stationary_bytes(tokens, EMBED, widened=WIDENED, narrowed=NARROWED, **devices)
    layer += systems.attention_exchange_bytes(tokens, QUERIES, HEAD_DIM, over=attention, **devices)
    inside, outside, transfers = sent(split, split.mesh, seq)
    assert inside == pytest.approx(layer + tokens * STATISTICS)
    devices = {"embed_devices": y, "feature_devices": x, "activation_bytes": 4}  # a control: the axes exchanged
    other = systems.weight_stationary_bytes(tokens, EMBED, widened=WIDENED, narrowed=NARROWED, **devices)
    assert inside != pytest.approx(other, rel=0.3)
    looked_up = planning.gather_bytes(tokens * EMBED / x * 4, y)
    assert outside == pytest.approx(looked_up + tokens * STATISTICS)
    # An overlapped ring in the place of a collective: over `tensor` at least, and where it has devices over `fsdp`.
    kinds = {(one.kind, one.axes) for one in transfers}
    assert (("collective-permute", ("tensor",)) in kinds) == (overlap != "none" and y > 1)
    assert (("collective-permute", ("fsdp",)) in kinds) == (overlap != "none" and x > 1)


def test_logits(model):
    """Hidden vectors gathered over one axis, partial logits scattered over the other."""
    split = stationary(model, 2, 4)
    arrays, rest = eqx.partition(split, eqx.is_array)
    run = jax.jit(lambda arrays, x: eqx.combine(arrays, rest).unembed(x))
    program = run.lower(arrays, jax.ShapeDtypeStruct((ROWS, EMBED), "float32")).compile()
    sent_in_all = bytes_sent(list_transfers(read_hlo(program, mesh=split.mesh)))
    whole = planning.gather_bytes(ROWS * EMBED / 2 * 4, 4) + planning.gather_bytes(ROWS * VOCAB / 4 * 4, 2)
    assert sent_in_all == pytest.approx(whole)


GATHERED = [(8, DECODE), (2, PREFILL), (8, PREFILL), (2, DECODE), (4, PREFILL)]


@pytest.mark.grid
@pytest.mark.parametrize("gathered_over,seq", GATHERED)
def test_weights_that_are_gathered(model, gathered_over, seq):
    split, tokens = gathered(model, gathered_over, 8 // gathered_over), ROWS * seq
    arrays = [x for x in jax.tree.leaves(model.stacks[0].blocks) if eqx.is_inexact_array(x)]
    layer = systems.weight_gathered_bytes(
        sum(x.size for x in arrays) / LAYERS,
        tokens,
        EMBED,
        gathered=gathered_over,
        stationary=8 // gathered_over,
        whole=2 * HEAD_DIM * EMBED + EMBED,
        sums=2,
        weight_bytes=4,
        activation_bytes=4,
    )
    devices = {"feature_devices": 8 // gathered_over, "activation_bytes": 4}  # they share one key head
    layer += systems.attention_exchange_bytes(tokens / gathered_over, QUERIES, HEAD_DIM, over="rows", **devices)
    inside, outside, _ = sent(split, split.plan.mesh, seq)
    assert inside == pytest.approx(layer)
    assert outside >= planning.gather_bytes(VOCAB * EMBED * 4 * gathered_over / 8, gathered_over)  # the table


def test_the_papers_forms():
    """Without `(n-1)/n` the formulas are those of its section 3.2; the best splits are minima."""
    tokens, embed, hidden, many = 512, 1024, 4096, 10**9
    one = systems.weight_stationary_bytes(tokens, embed, widened=hidden, narrowed=hidden, feature_devices=many)
    assert one == pytest.approx(2 * tokens * embed * 2)
    at = lambda x, n=64: tokens * 2 * 2 * (embed / x + hidden * x / n)
    best = systems.best_embed_devices(64, embed, hidden)
    assert best == 4 and all(at(best) <= at(x) for x in (1, 2, 8, 16, 32, 64))
    assert at(best) == pytest.approx(8 * tokens * embed / 64**0.5 * 2)
    two = systems.weight_stationary_bytes(
        tokens, embed, widened=hidden, narrowed=hidden, embed_devices=4, feature_devices=16
    )
    assert 0.8 * at(4) < two < at(4)
    weights = 2 * embed * hidden
    found = systems.best_gathered(weights, tokens, embed, 64)
    assert found == pytest.approx((tokens * 64 / hidden) ** 0.5)
    sizes = {n: weights * n / 64 + 2 * tokens * embed / n for n in (1, 2, 4, 8, 16)}
    assert min(sizes, key=sizes.__getitem__) == 2 and 2 < found < 4
    with pytest.raises(ValueError, match="over='keys'"):
        systems.attention_exchange_bytes(1, 1, 1, over="keys")
