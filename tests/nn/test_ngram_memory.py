"""Tables of hashed n-grams: the hash in Python's whole numbers, the layer by loops in float64, and its cache."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import linear, normal, random_module, sigmoid, wide
from selection_cases import by_document, packed, POSITIONS, SEGMENTS, to_float64

from eqformer import nn


KEY = jax.random.key(0)
VOCAB, EMBED, STREAMS, DIM, END = 13, 6, 3, 2, 5
HASH = nn.splitmix_hash(vocab=VOCAB, longest=3, heads=2, smallest=7, end_id=END)


def memory(hash_: nn.NGramHash = HASH) -> nn.NGramMemory:
    """Return a layer with random weights."""
    return random_module(
        lambda: nn.NGramMemory(hash_, embed=EMBED, streams=STREAMS, dim=DIM, divisor=8, taps=3, key=KEY)
    )


def token_ids(*shape: int, vocab: int = VOCAB) -> np.ndarray:
    """Return random ids."""
    return np.random.default_rng(0).integers(0, vocab, shape).astype(np.int32)


def rows_by_hand(hash_: nn.NGramHash, ids: np.ndarray) -> list[list[int]]:
    """Return the rows of each token of one document, in Python's whole numbers."""
    heads, starts = len(hash_.sizes) // hash_.context, np.cumsum([0, *hash_.sizes])
    rows = []
    for token in range(len(ids)):
        gram = [int(ids[token])]
        for distance in range(1, hash_.context + 1):
            ended = token < distance or hash_.end_id in ids[token - distance : token]
            gram.append(hash_.end_id if ended else int(ids[token - distance]))
        rows.append([])
        for head, size in enumerate(hash_.sizes):
            mixed = 0
            for token_id, multiplier in list(zip(gram, hash_.multipliers))[: head // heads + 2]:
                mixed ^= token_id * multiplier % 2**64
            rows[-1].append(int(starts[head]) + mixed % size)
    return rows


@pytest.mark.parametrize(
    "hash_",
    [
        HASH,
        nn.splitmix_hash(vocab=248_320, longest=3, heads=8, smallest=20_000_000, end_id=77, table_index=1),
        nn.NGramHash((2**63 - 1, 2**40 + 3, 1, 2**62), (1, 2**30 + 5, 2**31 - 2**30 - 9), 4),
    ],
)
def test_rows_are_remainders_of_64_bit_numbers(hash_):
    ids = token_ids(len(POSITIONS), vocab=20 if hash_.end_id < 20 else 248_320)
    ids[[9, 14]] = hash_.end_id
    documents = np.cumsum(np.r_[True, SEGMENTS[1:] != SEGMENTS[:-1]])
    rows = np.asarray(jax.jit(hash_)(ids, documents))
    expected = np.concatenate([rows_by_hand(hash_, ids[documents == number]) for number in np.unique(documents)])
    assert np.array_equal(rows, expected) and rows.max() < hash_.rows
    assert not np.array_equal(jax.jit(hash_)(ids, np.ones_like(documents)), expected)  # n-grams of two documents


def test_the_published_hash_has_the_numbers_of_transformers():
    tables = [
        nn.splitmix_hash(vocab=248_320, longest=3, heads=8, smallest=20_000_000, end_id=0, table_index=index)
        for index in (0, 2)
    ]
    multipliers = (23703573157769, 20109073645365, 8052911324071), (35243655749357, 23198521423797, 25737225394503)
    assert tuple(table.multipliers for table in tables) == multipliers
    assert [(table.sizes[0], table.sizes[-1]) for table in tables] == [(20000003, 20000171), (20000443, 20000689)]


def literal(layer: nn.NGramMemory, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return what is added to the streams of the tokens of one document; `x` is `seq streams embed`."""
    table, weight = wide(layer.table.weight), wide(layer.conv.weight)
    vectors = np.array([[table[row] for row in rows] for rows in rows_by_hand(layer.hash, ids)])

    def normed(y: np.ndarray, norm: Any) -> np.ndarray:
        scale = norm.offset + wide(norm.weight)
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + norm.eps) * scale

    key, value = normed(linear(vectors, layer.key), layer.key_norm), linear(vectors, layer.value)
    scores = (normed(x, layer.query_norm) * key).sum(-1) / np.sqrt(EMBED)
    gates = sigmoid(np.sign(scores) * np.sqrt(np.maximum(abs(scores), 1e-6)))
    gated = gates[..., None] * value[:, None]
    inputs, taps, reach = normed(gated, layer.conv_norm), weight.shape[-1], layer.hash.context + 1
    added = np.zeros_like(gated)
    for token in range(len(x)):
        total = np.zeros((STREAMS, EMBED))
        for tap in range(taps):
            source = token - reach * (taps - 1 - tap)
            total += inputs[source] * weight[..., tap] if source >= 0 else 0
        added[token] = gated[token] + total * sigmoid(total)
    return added


def test_packed_documents_follow_the_formula():
    with jax.enable_x64(True):
        layer, ids = to_float64(memory()), token_ids(1, len(POSITIONS))
        x = np.random.default_rng(1).normal(size=(len(POSITIONS), STREAMS, EMBED))
        tokens = packed().replace(ids=jnp.asarray(ids))
        streams = jnp.asarray(x).swapaxes(0, 1)[None]
        y = np.asarray(eqx.filter_jit(layer)(streams, tokens)[0][0]).swapaxes(0, 1)
        both = np.concatenate([x, np.broadcast_to(ids[0, :, None, None], (*x.shape[:2], 1))], -1)
        alone = lambda layer, part, start: literal(layer, part[..., :-1], part[:, 0, -1].astype(int))
        expected = by_document(alone, layer, both)
        assert np.allclose(y[: len(expected)], expected, rtol=0, atol=1e-12)
        one = eqx.filter_jit(layer)(streams, nn.positions_like((1, len(POSITIONS))).replace(ids=jnp.asarray(ids)))[0][0]
        assert abs(np.asarray(one).swapaxes(0, 1)[7:] - y[7:]).max() > 1e-2  # the control: all one document


@pytest.mark.grid
def test_gradients_are_slopes():
    with jax.enable_x64(True):
        layer, rng = to_float64(memory()), np.random.default_rng(2)
        x, tokens = jnp.asarray(rng.normal(size=(1, STREAMS, len(POSITIONS), EMBED))), packed()
        tokens = tokens.replace(ids=jnp.asarray(token_ids(1, len(POSITIONS))))
        loss = lambda parts: jnp.sum(jnp.sin(parts[0](parts[1], tokens)[0]))
        leaves, structure = jax.tree.flatten((layer, x))
        step = [rng.normal(size=leaf.shape) for leaf in leaves]
        run = jax.jit(lambda at: loss(structure.unflatten([v + at * d for v, d in zip(leaves, step)])))
        slope = (float(run(1e-6)) - float(run(-1e-6))) / 2e-6
        gradients = jax.tree.leaves(eqx.filter_jit(eqx.filter_grad(loss))((layer, x)))
        assert sum(float(np.sum(g * d)) for g, d in zip(gradients, step, strict=True)) == pytest.approx(slope, rel=1e-6)


def test_pieces_of_any_length_decode_alike():
    layer, ids, x = memory(), token_ids(2, 17), normal(3, 2, STREAMS, 17, EMBED)
    run = eqx.filter_jit(lambda x, positions, ids, cache: layer(x, nn.Tokens(positions, ids=ids), cache))
    positions = np.broadcast_to(np.arange(17, dtype=np.int32), (2, 17))
    whole = np.asarray(run(x, positions, ids, None)[0])

    def read(start, stop, cache, shift=0):
        """Read some tokens and padding behind them, which leaves no trace; 8 in all."""
        pad = [(0, 0), (0, 8 - (stop - start))]
        piece = np.pad(positions[:, start:stop] + shift, pad, constant_values=-1)
        piece_ids = np.pad(ids[:, start:stop], pad, constant_values=3)
        y, cache = run(jnp.pad(x[:, :, start:stop], [(0, 0), *pad, (0, 0)]), piece, piece_ids, cache)
        return np.asarray(y)[:, :, : stop - start], cache

    cache: Any = layer.init_cache((2,), 17)
    outputs, cuts = [], (0, 1, 2, 9, 16)
    for start, stop in zip(cuts, cuts[1:]):
        y, cache = read(start, stop, cache)
        outputs.append(y)
    last = whole[:, :, 16:]
    assert np.allclose(np.concatenate([*outputs, read(16, 17, cache)[0]], 2), whole, atol=1e-5)
    # Other ids in the cache give other n-grams, and a token at a wrong position gives NaN.
    other = eqx.tree_at(lambda cache: cache.ids, cache, cache.ids + 1)
    assert not np.allclose(read(16, 17, other)[0], last, atol=1e-2) and np.isnan(read(16, 17, cache, 1)[0]).any()
    # A new text in the row of an old one begins anew.
    assert np.allclose(read(0, 4, cache)[0], whole[:, :, :4], atol=1e-5)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"NGramMemory\(x\): the layer reads the ids of its tokens"):
        memory()(normal(1, 1, STREAMS, 4, EMBED))
    with pytest.raises(ValueError, match=r"splitmix_hash\(longest=1, heads=2"):
        nn.splitmix_hash(vocab=VOCAB, longest=1, heads=2, smallest=7, end_id=0)
    with pytest.raises(ValueError, match=r"splitmix_hash\(.*smallest=1000000000000, table_index=0\)"):
        nn.splitmix_hash(vocab=VOCAB, longest=3, heads=2, smallest=10**12, end_id=0)
    for end in (-1, VOCAB):
        with pytest.raises(ValueError, match=rf"splitmix_hash\(vocab=13, end_id={end}\): .* ids from 0 to 12; give an"):
            nn.splitmix_hash(vocab=VOCAB, longest=3, heads=2, smallest=7, end_id=end)
    with pytest.raises(ValueError, match=r"NGramHash: there are 3 heads, and n-grams of 2 to 3 tokens"):
        nn.NGramHash((1, 3, 5), (7, 7, 7), 0)
    with pytest.raises(ValueError, match=r"NGramHash: the heads have 4294967296 rows"):
        nn.NGramHash((1, 3), (2**32,), 0)
