"""Small models, layouts and decoding steps for the tests of weight-stationary layouts."""

import equinox as eqx
import jax
import jax.numpy as jnp

from eqformer import nn
from eqformer.parallel import make_mesh, Plan, ShardedModel
from eqformer.program import bytes_sent, list_transfers, read_hlo
from eqformer.systems import WeightStationary


EMBED, HEADS, HEAD_DIM, MLP, VOCAB, LAYERS = 64, 8, 8, 128, 64, 5
ROWS, PROMPT = 8, 6


def palm():
    """Return a model like PaLM: attention of one key head beside a gated feed-forward layer, under one norm."""

    def block(key):
        attention, mlp = jax.random.split(key)
        rotary = nn.Rotary(HEAD_DIM, 10_000.0)
        layers = (
            nn.Attention(embed=EMBED, heads=HEADS, kv_heads=1, head_dim=HEAD_DIM, rotary=rotary, key=attention),
            nn.GatedMLP(embed=EMBED, mlp=MLP, key=mlp),
        )
        return nn.ParallelResidual(tuple(map(nn.Residual, layers)), nn.LayerNorm("embed", embed=EMBED, bias=False))

    embedding, stack = jax.random.split(jax.random.key(0))
    return nn.Transformer(
        embedding=nn.Embedding(vocab=VOCAB, embed=EMBED, std=0.2, key=embedding),
        stacks=(nn.Stack(block, LAYERS, key=stack),),
        norm=nn.LayerNorm("embed", embed=EMBED, bias=False),
    )


def serial():
    """Return a model with attention of two key heads before a plain feed-forward layer.

    It has biases, learned positions, and a head that is not tied to the embedding.
    """

    def block(key):
        attention, mlp = jax.random.split(key)
        return nn.Block(
            nn.Residual(
                nn.Attention(
                    embed=EMBED,
                    heads=HEADS,
                    kv_heads=2,
                    head_dim=HEAD_DIM,
                    bias=True,
                    query_norm=nn.RMSNorm("head_dim", head_dim=HEAD_DIM),
                    mask=nn.sliding_window(4),
                    key=attention,
                ),
                nn.RMSNorm("embed", embed=EMBED),
                scale=0.7,
            ),
            nn.Residual(
                nn.MLP(embed=EMBED, mlp=MLP, bias=True, key=mlp), nn.LayerNorm("embed", embed=EMBED), scale=0.7
            ),
        )

    keys = jax.random.split(jax.random.key(0), 5)
    model = nn.Transformer(
        embedding=nn.Embedding(vocab=VOCAB, embed=EMBED, scale=2.0, key=keys[0]),
        stacks=(nn.Stack(block, LAYERS, key=keys[1]),),
        norm=nn.LayerNorm("embed", embed=EMBED),
        head=nn.Linear("embed -> vocab", embed=EMBED, vocab=VOCAB, bias=True, key=keys[2]),
        positions=nn.LearnedPositions(max_seq=32, embed=EMBED, key=keys[3]),
        logit_softcap=5.0,
    )
    drawn = lambda x: x + 0.1 * jax.random.normal(keys[4], x.shape) if eqx.is_inexact_array(x) and x.ndim < 4 else x
    return jax.tree.map(drawn, model)  # biases must not stay 0, nor norms' weights 1


def stationary(model, embed_devices, feature_devices, **options):
    return WeightStationary(model, make_mesh(fsdp=embed_devices, tensor=feature_devices), **options)


def gathered(model, devices, stationary):
    return ShardedModel(model, Plan(make_mesh(fsdp=devices, tensor=stationary), zero=3, smallest=1))


def prefill(model, ids):
    return model.encode(ids, nn.positions_like(ids.shape), model.init_cache(len(ids), 16))[:2]


def decode(model, ids, cache, place=PROMPT):
    places = jnp.full(ids.shape, place, jnp.int32)
    return model.encode(ids, nn.Tokens(places), cache)[:2]


def step(model, ids):
    """Return the logits `2 batch vocab` after a prompt of `PROMPT` tokens, and after one more token."""
    hidden, cache = prefill(model, ids[:, :PROMPT])
    after, _ = decode(model, ids[:, PROMPT:], cache)
    return jnp.stack([model.unembed(hidden[:, -1]), model.unembed(after[:, 0])])


logits = eqx.filter_jit(step)


def sent(model, mesh, seq):
    """Return the bytes that a device sends in a step of `seq` tokens a row: for each layer, and outside of the layers.

    The third result is the list of transfers.
    """
    ids = jnp.zeros((ROWS, seq), jnp.int32)
    fresh = lambda m, ids: prefill(m, ids)[0]
    later = lambda m, ids: decode(m, ids, m.init_cache(ROWS, 16))[0]
    run = fresh if seq > 1 else later
    arrays, rest = eqx.partition(model, eqx.is_array)
    compiled = jax.jit(lambda arrays, ids: run(eqx.combine(arrays, rest), ids)).lower(arrays, ids).compile()
    transfers = list_transfers(read_hlo(compiled, mesh=mesh))
    inside = [one for one in transfers if (one.times or 0) % LAYERS == 0]
    outside = [one for one in transfers if one not in inside]
    return bytes_sent(inside) / LAYERS, bytes_sent(outside), transfers
