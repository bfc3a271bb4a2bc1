"""Recipe `speedrun`: one number, the depth, decides the width, the heads, the batch, the rates and the horizon."""

import math

from ..models import SpeedrunConfig
from ..nn import Precision
from ..parallel import ParallelConfig
from ..training import Optimization
from ._recipe import Recipe


DEPTHS = (*range(1, 8), *range(8, 33, 2))
"""The depths of the recipe speedrun, whose width of 64 channels a layer divides into heads."""
TOKENS_PER_PARAMETER = 20  # Bytes; of the matrices alone. Hoffmann et al. 2022 (arXiv 2203.15556) has 20 tokens.
TOKENS_AT_ONCE = 2**15  # Tokens of a microbatch; their activations fit in 80 GB at depth 12.


def speedrun_recipe(depth: int = 2, *, tokens_per_parameter: float = TOKENS_PER_PARAMETER) -> Recipe:
    """The speedruns' layers by NorMuon, on bytes: --depth N decides all sizes and rates (2 by default).

    Raises a `ValueError` for a depth that does not fit.
    """
    # Width and heads: nanochat's aspect ratio of 64 (github.com/karpathy/nanochat, scripts/base_train.py) and heads of
    # 128 channels, which fill a GPU's tiles. Below depth 8 heads are half as wide, so that there is more than one.
    head_dim = 64 if depth < 8 else 128
    embed = 64 * depth
    if depth not in DEPTHS:
        nearest = sorted(sorted(DEPTHS, key=lambda fit: abs(fit - depth))[:2])
        raise ValueError(
            f"speedrun_recipe(depth={depth}): the depths are 1 to 7, and the even ones from 8 to {DEPTHS[-1]}, whose "
            f"width of 64 channels a layer divides into heads; take {' or '.join(map(str, nearest))}."
        )
    # Horizon: a constant number of tokens for each parameter of the matrices, 12 embed^2 in a layer.
    parameters = 12 * depth * embed**2
    tokens = tokens_per_parameter * parameters
    # Batch: the critical batch grows with the horizon as a power law (arXiv 2505.13738; nanochat's exponent is 0.38
    # from depth 12 on). Here 1,024 bytes at a million, where a larger batch was worse, and a quarter of a million at
    # depth 12 make an exponent of 3/4.
    batch_tokens = 2 ** round(math.log2(1024 * (tokens / 1e6) ** 0.75))
    # Rows: long enough for what a model of this depth can use; three layers of four see a quarter of a row (nanochat).
    seq = min(2048, max(256, 2 ** math.ceil(math.log2(128 * depth))))
    batch = max(1, batch_tokens // seq)
    steps = max(1, round(tokens / (batch * seq)))
    # Rates: nanochat's at depth 12. Updates of hidden matrices have the spectral norm sqrt(outputs / inputs) (arXiv
    # 2310.17813), those of the head shrink with the width (muP, arXiv 2203.03466), and so the same rates should serve
    # all depths. At depth 2, the best of the rates 0.005, 0.01, ..., 0.08 was 0.02 for the widths 64 and 128.
    optimizer = Optimization(
        name="normuon",
        learning_rate=0.02,
        rates="warmup-stable-decay",
        weight_decay=0.1,
        cautious=True,
        decay_tables=False,
        update_size="spectral",
        embedding_rate=10.0,
        head_rate=0.3 * 768 / embed,
    )
    is_large = depth >= 8
    return Recipe(
        model=SpeedrunConfig(
            256, embed, depth, embed // head_dim, embed // head_dim, 4 * embed, head_dim=head_dim, window=seq // 4
        ),
        steps=steps,
        seq=seq,
        batch=batch,
        optimizer=optimizer,
        precision=Precision("float32", "bfloat16") if is_large else Precision(),
        checkpoint_every=max(200, steps // 10),
        validate_every=max(100, steps // 20),
        sample_every=max(200, steps // 4),
        plan=ParallelConfig(zero=1, microbatches=max(1, batch * seq // TOKENS_AT_ONCE)),
    )


def describe_speedrun(recipe: Recipe) -> str:
    """Return the sizes, the horizon and the rates of a recipe with a speedrun model, in two lines."""
    model, optimizer = recipe.model, recipe.optimizer
    assert isinstance(model, SpeedrunConfig)
    parameters, tokens = 12 * model.layers * model.embed**2, recipe.steps * recipe.batch * recipe.seq
    window = "" if model.window is None else f", windows of {model.window}"
    return (
        f"depth {model.layers}: width {model.embed}, {model.heads} heads of {model.head_size}{window}; "
        f"{parameters:,} parameters in matrices\n"
        f"           {recipe.steps:,} steps of {recipe.batch} x {recipe.seq} tokens, {tokens:,} in all "
        f"({tokens / parameters:.3g} a parameter); {optimizer.name} at {optimizer.learning_rate:g}, embeddings at "
        f"{optimizer.learning_rate * optimizer.embedding_rate:.3g}, head at "
        f"{optimizer.learning_rate * optimizer.head_rate:.3g}"
    )
