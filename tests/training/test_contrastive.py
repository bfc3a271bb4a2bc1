"""The contrastive loss against its formula in float64 and sentence-transformers; its metrics and errors."""

import dataclasses
import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder_folders import write_encoder
from token_table import make_table, Table, VOCAB

from eqformer import Batch, data, models, nn, text, training
from eqformer.training import loss_count
from eqformer.training.losses._loss_aux import loss_metrics
from eqformer.training.losses._row_losses import pool_rows, SUMMED_POOLINGS


ROWS, SEQ, TEMPERATURE = 12, 7, 0.2
LENGTHS = np.array([3, 5, 1, 7, 4, 2, 6, 7, 2, 3, 4, 5])
OPTIONS = {
    "pairs": (2, {}),
    "hard negatives": (3, {}),
    "symmetric dot": (2, {"symmetric": True, "similarity": "dot"}),
    "truncated": (3, {"dims": (2, 5), "symmetric": True}),
    "cls": (2, {"pooling": "cls"}),
    "last token": (2, {"pooling": "lasttoken"}),
    "weighted": (2, {"pooling": "weightedmean", "similarity": "dot"}),
    "root of the length": (2, {"pooling": "mean_sqrt_len_tokens", "similarity": "dot"}),
}


def batch_of(group: int) -> Batch:
    ids = np.random.default_rng(1).integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32)
    positions = np.where(np.arange(SEQ) < LENGTHS[:, None], np.arange(SEQ), -1).astype(np.int32)
    weights = (positions >= 0).astype(np.float64)
    batch = Batch(ids, ids, weights, np.arange(ROWS, dtype=np.int32), positions, group=group)
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize("mode", SUMMED_POOLINGS)
def test_rows_are_pooled_as_by_the_module(mode):
    """Only the first row differs, which is padding alone: it has the vector 0, and the module pools its padding."""
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, SEQ, 4)).astype(np.float32))
    positions = np.array(batch_of(2).positions)
    positions[0] = -1
    tokens, module = nn.Tokens(jnp.asarray(positions)), nn.Pooling((mode,))
    run = eqx.filter_jit(lambda hidden, tokens: (pool_rows(mode, hidden, tokens), module(hidden, tokens)))
    (vectors, devices), pooled = run(hidden, tokens)
    np.testing.assert_allclose(vectors[1:], pooled[1:], rtol=1e-5, atol=1e-6)
    assert devices == 1 and not np.any(vectors[0])
    assert np.any(pooled[0]) == (mode in ("cls", "lasttoken"))
    assert not np.allclose(vectors[1:], pooled[:-1], rtol=1e-2)  # the control


def pool(hidden, pooling: str):
    """The vector of each row, from its own tokens alone."""
    rows = [x[:length] for x, length in zip(hidden, LENGTHS)]
    if pooling == "weightedmean":
        weights = [jnp.asarray(np.arange(1.0, length + 1)) for length in LENGTHS]
        return jnp.stack([w @ x / jnp.sum(w) for x, w in zip(rows, weights)])
    functions = {"cls": lambda x: x[0], "lasttoken": lambda x: x[-1], "mean": lambda x: jnp.mean(x, 0)}
    functions["mean_sqrt_len_tokens"] = lambda x: jnp.sum(x, 0) / np.sqrt(len(x))
    return jnp.stack([functions[pooling](x) for x in rows])


def formula(model: Table, batch: Batch, pooling="mean", similarity="cosine", symmetric=False, dims=(5,)):
    """The sum over groups and dims, written out pair by pair."""
    vectors, total = pool(model.table[batch.ids], pooling), jnp.asarray(0.0)
    for width in dims:
        x = vectors[:, :width]
        x = x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True)) if similarity == "cosine" else x
        positives, anchors = x[1 :: batch.group], x[:: batch.group]
        others = jnp.stack([row for number, row in enumerate(x) if number % batch.group])
        for anchor, positive in zip(anchors, positives):
            forth = jnp.log(jnp.sum(jnp.exp((others @ anchor - positive @ anchor) / TEMPERATURE)))
            back = jnp.log(jnp.sum(jnp.exp((anchors @ positive - anchor @ positive) / TEMPERATURE)))
            total += (forth + back) / 2 if symmetric else forth
    return total


@pytest.mark.by_default("hard negatives", "truncated", "last token")
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_the_formula(name):
    group, options = OPTIONS[name]
    with jax.enable_x64(True):
        model, batch = make_table(), batch_of(group)
        want, want_gradients = eqx.filter_jit(eqx.filter_value_and_grad(formula))(model, batch, **options)
        run = eqx.filter_jit(
            training.make_gradient_function(training.contrastive_loss(temperature=TEMPERATURE, **options))
        )
        total, count, gradients = run(model, batch, None)
        assert float(total) == pytest.approx(float(want), rel=1e-12) and float(loss_count(count)) == ROWS // group
        assert np.allclose(gradients.table, want_gradients.table, rtol=1e-10, atol=1e-12)
        # The control: the same rows in other groups.
        moved = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), batch)
        assert abs(float(run(model, moved, None)[0]) / float(want) - 1) > 1e-3


def test_metrics():
    with jax.enable_x64(True):
        model, batch = make_table(), batch_of(2)
        x = np.asarray(eqx.filter_jit(pool)(model.table[batch.ids], "mean"))
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        similarities = x[::2] @ x[1::2].T
        for dims in ((), (2,), (2, 5)):
            loss = training.contrastive_loss(temperature=TEMPERATURE, dims=dims)
            metrics = loss_metrics(eqx.filter_jit(loss)(model, batch)[1])
            values = {name: float(total / weight) for name, (total, weight) in metrics.items()}
            correct = np.mean(np.argmax(similarities, 1) == np.arange(6))
            assert values["retrieval_accuracy"] == pytest.approx(correct) and 0 < correct < 1
            assert values["positive_similarity"] == pytest.approx(np.mean(np.diag(similarities)))


def test_microbatches_hold_whole_groups():
    """The candidates are those of a microbatch: groups 0, 2, 4 and groups 1, 3, 5."""
    model, batch, loss = make_table(), batch_of(2), eqx.filter_jit(training.contrastive_loss())
    total = eqx.filter_jit(training.make_gradient_function(loss, microbatches=2))(model, batch, None)[0]
    parts = [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    apart = [loss(model, jax.tree.map(lambda x, rows=rows: np.asarray(x)[rows], batch))[0] for rows in parts]
    assert float(total) == pytest.approx(float(sum(apart)), rel=1e-6)
    assert float(total) < float(loss(model, batch)[0])


def test_texts_become_rows(tmp_path):
    """The loss of texts is that of the vectors that a `TextEncoder` returns."""
    write_encoder(tmp_path, "bert mean")
    encoder = text.load_encoder(tmp_path)
    groups = [("a cat", "the cat sat"), ("a dog", "the lazy dog and the fox on the mat"), ("mat", "fox")]
    batch = data.batch_text_groups(groups, encoder.tokenizer, seq=10, first_example=4)
    assert batch.group == 2 and batch.examples.tolist() == [4, 5, 6, 7, 8, 9]
    short = dataclasses.replace(encoder, max_length=10)
    x = short.embed([line for group in groups for line in group], normalize=True)
    scores = np.exp(x[::2] @ x[1::2].T / 0.05)
    want = np.sum(np.log(scores.sum(1) / np.diag(scores)))
    total = eqx.filter_jit(training.contrastive_loss())(encoder.model, batch)[0]
    assert float(total) == pytest.approx(want, rel=1e-4)
    for wrong, words in (([("a",)], "have 1 text"), ([], "have no text"), ([("a", "b"), ("a", "b", "c")], "have 2, 3")):
        with pytest.raises(ValueError, match=words):
            data.batch_text_groups(wrong, encoder.tokenizer, seq=10)
    with pytest.raises(ValueError, match="all groups must have the same number"):
        data.batch_text_groups(["ab", "cd"], encoder.tokenizer, seq=10)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"temperature": 0.0}, r"temperature=0\.0\): the temperature must be above 0"),
        ({"pooling": "max"}, "pooling='max'.: the pooling must be one of cls, mean"),
        ({"dims": (4, 2)}, "in rising order"),
        ({"dims": (2, 9)}, "vectors have 5 channels"),
    ],
)
def test_bad_options(options, error):
    with pytest.raises(ValueError, match=error):
        training.contrastive_loss(**options)(make_table(), batch_of(2))


def test_rows_without_groups_are_refused():
    with pytest.raises(ValueError, match="group=1 and 12 rows; use data.batch_text_groups"):
        training.contrastive_loss()(make_table(), batch_of(1))


@pytest.mark.hf
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["negatives", "symmetric", "truncated"])
def test_sentence_transformers_has_the_same_loss_and_gradients(name, tmp_path):
    package = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    write_encoder(tmp_path, "bert mean")
    theirs, ours = package.SentenceTransformer(str(tmp_path), device="cpu").eval(), text.load_encoder(tmp_path)
    texts = ["a cat", "the cat", "a dog"], ["the cat sat on the mat", "cats", "the lazy dog"], ["fox", "mat", "dogs"]
    options: dict = {"negatives": {}, "symmetric": {"symmetric": True}, "truncated": {"dims": (8, 24)}}[name]
    losses = importlib.import_module("sentence_transformers.losses")
    if name == "symmetric":
        function = losses.MultipleNegativesSymmetricRankingLoss(theirs, scale=10.0)
    else:
        function = losses.MultipleNegativesRankingLoss(theirs, scale=10.0)
    function = losses.MatryoshkaLoss(theirs, function, [24, 8]) if name == "truncated" else function
    want = function([theirs.tokenize(list(column)) for column in texts], None)
    want.backward()
    batch = data.batch_text_groups(list(zip(*texts)), ours.tokenizer, seq=12)
    run = training.make_gradient_function(training.contrastive_loss(temperature=0.1, **options))
    total, _, gradients = run(ours.model, batch, None)
    assert float(total) / 3 == pytest.approx(want.item(), rel=1e-5)
    (table,) = [x.grad.numpy() for key, x in theirs.named_parameters() if key.endswith("word_embeddings.weight")]
    got = np.asarray(gradients.embedding.weight) / 3
    assert np.allclose(got[: len(table)], table, atol=1e-6) and np.abs(table).max() > 1e-3


@pytest.mark.grid
def test_training_brings_pairs_together():
    """A few steps of a small model, whose texts of a pair share no token."""
    model = eqx.filter_jit(models.build)(models.preset("bert-byte-200k"), key=jax.random.key(0))
    rng = np.random.default_rng(0)
    anchors, positives = rng.integers(1, 128, (8, 6)), rng.integers(128, 256, (8, 6))
    ids = np.stack([anchors, positives], axis=1).reshape(16, 6).astype(np.int32)
    batch = Batch(ids, ids, np.ones(ids.shape, np.float32), np.arange(16, dtype=np.int32), group=2)
    optimizer = training.optimizer("adamw", model, rate=3e-3)
    step = training.make_step(training.contrastive_loss(), optimizer)
    state = training.init_state(model, optimizer)
    metrics = []
    for _ in range(8):
        state, values = step(state, batch, None)
        metrics.append({name: float(values[name]) for name in ("loss", "retrieval_accuracy")})
    assert metrics[-1]["loss"] < metrics[0]["loss"] / 4 and metrics[-1]["retrieval_accuracy"] == 1
