"""Small models of every attention kind, and slow, plain computations of the numbers that generation must give."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haste import FAST

from eqformer import kernels, nn


VOCAB, EMBED, HEADS, HEAD_DIM, LATENT, ROPE_DIM = 61, 32, 4, 8, 12, 4


def _attention(**given):
    return lambda key: nn.Attention(embed=EMBED, heads=HEADS, head_dim=HEAD_DIM, **given, key=key)


def _latent(**given):
    return lambda key: nn.LatentAttention(
        embed=EMBED,
        heads=HEADS,
        head_dim=HEAD_DIM,
        latent=LATENT,
        latent_norm=_norm("latent", LATENT),
        **given,
        key=key,
    )


def _norm(dim, size):
    return nn.RMSNorm(dim, **{dim: size})


def _rotary(scaling=None):
    return nn.Rotary(HEAD_DIM, 100.0, scaling=scaling)


def _sinks(**options):
    return nn.Scores(sinks=jnp.zeros(HEADS), **options)


_DECOUPLED = nn.Rotary(ROPE_DIM, 100.0, interleaved=True)
_DYNAMIC = nn.DynamicScaling(factor=2.0, original_length=5)
_LONG = nn.LongRopeScaling((1.0, 1.1, 1.2, 1.5), (1.0, 2.0, 3.0, 5.0), original_length=6, factor=4.0)

# Under each name: the constructors of the attentions of one period of blocks.
KINDS = {
    "multi-head": (_attention(rotary=_rotary()),),
    "grouped-query": (_attention(rotary=_rotary(), kv_heads=2, bias=True),),
    "multi-query": (_attention(rotary=_rotary(), kv_heads=1),),
    "learned positions": (_attention(),),
    "sliding window": (_attention(rotary=_rotary(), kv_heads=2, mask=nn.sliding_window(5)),),
    "chunked": (_attention(rotary=_rotary(), kv_heads=2, mask=nn.chunked(4)),),
    "local and global": (
        _attention(rotary=_rotary(), kv_heads=2, mask=nn.sliding_window(3)),
        _attention(rotary=_rotary(), kv_heads=2),
    ),
    "query and key norm, gate": (
        _attention(
            rotary=_rotary(), gate=True, query_norm=_norm("head_dim", HEAD_DIM), key_norm=_norm("head_dim", HEAD_DIM)
        ),
    ),
    "sinks and softcap": (
        _attention(rotary=_rotary(), kv_heads=2, scores=_sinks(softcap=3.0), core=kernels.ReferenceAttention()),
    ),
    "sinks, sliding window": (
        _attention(rotary=_rotary(), scores=_sinks(), core=kernels.ReferenceAttention(), mask=nn.sliding_window(5)),
    ),
    "latent": (_latent(rotary=_DECOUPLED),),
    "latent with biases": (_latent(rotary=_DECOUPLED, bias=True, q_latent=10, v_dim=6),),
    "latent without rotary": (_latent(bias=True),),
    "latent, sliding window": (_latent(rotary=_DECOUPLED, mask=nn.sliding_window(5)),),
    "latent, dynamic scaling": (_latent(rotary=nn.Rotary(ROPE_DIM, 100.0, scaling=_DYNAMIC)),),
    "dynamic scaling": (_attention(rotary=_rotary(_DYNAMIC), kv_heads=2),),
    "longrope scaling": (_attention(rotary=_rotary(_LONG), kv_heads=2),),
    "dynamic scaling, sliding window": (_attention(rotary=_rotary(_DYNAMIC), mask=nn.sliding_window(5)),),
    "sliding window, few slots": (_attention(rotary=_rotary(), kv_heads=2, mask=nn.sliding_window(3)),),
    "local and global, few slots": (
        _attention(rotary=_rotary(), kv_heads=2, mask=nn.sliding_window(3)),
        _attention(rotary=_rotary(), kv_heads=2),
    ),
}


def make_model(
    kind: str = "grouped-query", *, layers: int = 2, seed: int = 0, max_seq: int = 40, sharpness: float = 1.0
) -> nn.Transformer:
    """Return a Transformer of the named kind, its logits scaled by `sharpness`."""
    attentions = KINDS[kind]

    def mlp(key):
        return nn.GatedMLP(embed=EMBED, mlp=48, key=key)

    def mixture(key):  # capacity factor 0.5: training would drop half of the tokens' choices
        router = nn.TopKRouter(embed=EMBED, experts=4, top_k=2, key=key)
        return nn.MoE(router, nn.Experts(mlp, 4, key=key), dispatch=nn.Capacity(0.5))

    def block(attention, key):
        one, two = jax.random.split(key)
        fed = (mixture if kind.endswith("few slots") else mlp)(two)
        return nn.Block(nn.Residual(attention(one), _norm("embed", EMBED)), nn.Residual(fed, _norm("embed", EMBED)))

    def period(key):
        keys = jax.random.split(key, len(attentions))
        blocks = tuple(map(block, attentions, keys))
        return blocks[0] if len(blocks) == 1 else nn.SuperBlock(blocks)

    def build(key):
        positions = nn.LearnedPositions(max_seq=max_seq, embed=EMBED, key=key) if kind == "learned positions" else None
        return nn.Transformer(
            nn.Embedding(vocab=VOCAB, embed=EMBED, key=key),
            (nn.Stack(period, layers, key=key),),
            _norm("embed", EMBED),
            nn.Linear("embed -> vocab", embed=EMBED, vocab=VOCAB, key=key),
            positions=positions,
        )

    model = _filled(eqx.filter_eval_shape(build, jax.random.key(0)), np.random.default_rng(seed))
    return eqx.tree_at(lambda m: m.head.weight, model, replace_fn=lambda w: sharpness * w)


def _filled(shapes, rng):
    """Return a random array for each shape, biases and norms too: code that ignored a bias of 0 would not be seen."""

    def fill(path, leaf, matrix):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(np.arange(leaf.size, dtype=leaf.dtype))
        name = jax.tree_util.keystr(path)
        numbers = rng.normal(size=leaf.shape)
        if "norm" in name:
            numbers = 1 + 0.2 * numbers
        elif matrix is not None and not ("embedding" in name or "positions" in name):
            numbers = numbers / np.sqrt(np.prod(leaf.shape[matrix.ensemble + matrix.outputs :]))
        return jnp.asarray(numbers.astype(leaf.dtype))

    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    marks = structure.flatten_up_to(nn.matrices(shapes))
    return jax.tree.unflatten(structure, [fill(*leaf, mark) for leaf, mark in zip(leaves, marks, strict=True)])


def _ranked(logits):
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def _keep(logits, tokens):
    return np.array([logits[token] if token in tokens else -np.inf for token in range(len(logits))])


def _probabilities(logits):
    weights = np.exp(logits - max(logits))
    return weights / weights.sum()


def repetition_penalty(logits, held, value):
    changed = logits.copy()
    for token in set(held):
        changed[token] = logits[token] / value if logits[token] > 0 else logits[token] * value
    return changed


def temperature(logits, held, value):
    return _keep(logits, _ranked(logits)[:1]) if value == 0 else logits / value


def top_k(logits, held, value):
    return _keep(logits, _ranked(logits)[:value])


def top_p(logits, held, value):
    chosen, total, each = [], 0.0, _probabilities(logits)
    for token in _ranked(logits):
        chosen.append(token)
        total += each[token]
        if total >= value:
            break
    return _keep(logits, chosen)


def min_p(logits, held, value):
    each = _probabilities(logits)
    return _keep(logits, [token for token in range(len(logits)) if each[token] >= value * max(each)])


# Each transform of sampling for one row in float64, `(logits, ids held, value) -> logits`, in the order of application.
LITERAL = dict(repetition_penalty=repetition_penalty, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def quickly(function, model):
    """Return `function(model)`, run as one program that is compiled with the least optimisation: it runs only once."""
    arrays, static = eqx.partition(model, eqx.is_array)
    return jax.jit(lambda arrays: function(eqx.combine(arrays, static)), compiler_options=FAST)(arrays)


@eqx.filter_jit
def _forward(model, ids, positions):
    return model(ids, nn.Tokens(positions))[0]


def logits_after(model: nn.Transformer, row: list[int]) -> np.ndarray:
    """Return the logits after the last id of `row`, which holds up to 48 ids, from a forward pass without a cache."""
    places = np.arange(48, dtype=np.int32)[None]
    ids = np.zeros((1, 48), np.int32)
    ids[0, : len(row)] = row
    positions = jnp.asarray(np.where(places < len(row), places, -1))
    return np.asarray(_forward(model, jnp.asarray(ids), positions))[0, len(row) - 1].astype(np.float64)


def write_on(model, prompt, count, *, settings=None, key=None, example=0, ends=()) -> tuple[list[int], list[float]]:
    """Generate in a slow loop that reads the whole text again for each token; return the new ids and their
    log-probabilities."""
    row, nats = list(prompt), []
    for _ in range(count):
        logits = logits_after(model, row)
        changed = logits
        for name, transform in LITERAL.items():
            if settings is not None and name in settings:
                changed = transform(changed, row, settings[name])
        if key is not None:
            of_row = jax.random.fold_in(jax.random.fold_in(key, example), len(row))
            changed = changed + np.asarray(jax.random.gumbel(of_row, (VOCAB,)), np.float64)
        row.append(int(np.argmax(changed)))
        nats.append(float(np.log(_probabilities(logits)[row[-1]])))
        if row[-1] in ends:
            break
    return row[len(prompt) :], nats
