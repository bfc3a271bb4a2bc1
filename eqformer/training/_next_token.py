"""Whether a model learns by predicting the next token of a text."""

from .. import nn


def check_next_token(model: nn.Transformer, *, seq: int) -> None:
    """Raise a `ValueError` if a model (or its shapes) does not learn from predicting the next of `seq` tokens.

    That is one with an encoder, which reads another text, one whose tokens see later ones, and one with fewer learned
    positions. Recurrent mixers read in order, and always learn.
    """
    if model.start is not None:
        raise ValueError(
            "check_next_token(model): the model's encoder reads a text beside the one that is written; train it on "
            "pairs, by eqformer.data.batch_pairs(sources, targets)."
        )
    for path, mixer in nn.named_modules(model, nn.Mixer):
        attends = mixer.facts().attends
        if attends is not None and not attends.mask.is_causal:
            raise ValueError(
                f"check_next_token(model): in {path} a token sees later ones, so nothing is learned by predicting the "
                "next; train it on hidden ones, by eqformer.training.masked_batch(batch, ...)."
            )
    if model.positions is not None and seq > (longest := model.positions.weight.shape[0]):
        raise ValueError(
            f"check_next_token(model, seq={seq}): the model has {longest} learned positions; give it more (max_seq), "
            "or rows of at most as many."
        )
