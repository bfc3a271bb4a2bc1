"""Small models for the tests of interpretability, and their forward passes written out layer by layer."""

from typing import Any

import jax
import jax.numpy as jnp
from nn_reference import random_module

from eqformer import nn


KEY = jax.random.key(0)
IDS = jnp.array([[3, 1, 4, 1, 5], [6, 0, 6, 5, 3]], jnp.int32)
LAYER, MLP = "stacks[0].blocks.sublayers[0].layer", "stacks[0].blocks.sublayers[1].layer"


def make_block(key, feed_forward=None):
    attention_key, mlp_key = jax.random.split(key)
    rotary = nn.Rotary(2, 100.0)
    attention = nn.Attention(embed=4, heads=2, kv_heads=1, head_dim=2, rotary=rotary, key=attention_key)
    mlp = nn.MLP(embed=4, mlp=6, key=mlp_key) if feed_forward is None else feed_forward(mlp_key)
    return nn.Block(
        nn.Residual(attention, nn.RMSNorm("embed", embed=4)),
        nn.Residual(mlp, nn.RMSNorm("embed", embed=4)),
    )


def make_model(layers=(3, 1), make=make_block, remat="none"):
    return nn.with_execution(random_module(build_model, layers, make), remat=remat)


def build_model(layers, make):
    stacks = tuple(nn.Stack(make, count, key=jax.random.fold_in(KEY, count)) for count in layers)
    return nn.Transformer(nn.Embedding(vocab=7, embed=4, key=KEY), stacks, nn.RMSNorm("embed", embed=4))


def make_model_with_encoder():
    """Return a model with an encoder, and one decoder block of cross-attention and an MLP."""
    return random_module(build_model_with_encoder)


def build_model_with_encoder():
    norm = nn.RMSNorm("embed", embed=4)
    cross: dict[str, Any] = {"embed": 4, "heads": 2, "kv_heads": 1, "head_dim": 2}
    make_layer = lambda key: nn.Block(
        nn.Residual(nn.CrossAttention(**cross, key=key), norm, reads="source"),
        nn.Residual(nn.MLP(embed=4, mlp=6, key=key), norm),
    )
    encoder = nn.Encoder((nn.Stack(make_block, 1, key=KEY),), norm)
    stacks = (nn.Stack(make_layer, 1, key=KEY),)
    return nn.Transformer(nn.Embedding(vocab=7, embed=4, key=KEY), stacks, norm, encoder=encoder)


def streams_of(model, ids=IDS):
    """Return the residual stream after each layer of the first stack, computed by calling each layer by itself."""
    x, streams = model.embed(ids, nn.positions_like(ids.shape)), []
    for number in range(len(model.stacks[0])):
        x = model.stacks[0][number](x)[0]
        streams.append(x)
    return jnp.stack(streams)


def layer_paths(model):
    """Return the paths of all layers of a model in the order in which they run; a super-block's blocks count singly."""
    paths = []
    for number, stack in enumerate(model.stacks):
        members = stack.blocks.members
        inner = [""] if len(members) == 1 else [f".blocks[{member}]" for member in range(len(members))]
        paths += [f"stacks[{number}][{layer}]{suffix}" for layer in range(len(stack)) for suffix in inner]
    return paths
