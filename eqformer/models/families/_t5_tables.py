"""Names of the arrays of a published T5."""

from .._weights import Rule
from ._common import INTO_HEADS, OUT_OF_HEADS


def _sublayer(part: str, prefix: str, own: str, rules: dict[str, tuple[str, str]]) -> tuple[Rule, ...]:
    maps = (Rule(f"{prefix}{name}", f"{own}.layer.{path}", how, part=part) for name, (path, how) in rules.items())
    return Rule(f"{prefix}layer_norm.weight", f"{own}.norm.weight", part=part), *maps


def _attention(name: str) -> dict[str, tuple[str, str]]:
    maps = {"q": "query", "k": "key", "v": "value"}
    rules = {f"{name}.{its}.weight": (f"{own}.weight", INTO_HEADS) for its, own in maps.items()}
    return rules | {f"{name}.o.weight": ("output.weight", OUT_OF_HEADS)}


_FED = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}


def _stack(part: str, name: str, fed: int) -> tuple[Rule, ...]:
    """The arrays of the encoder or of the decoder, whose sublayer number `fed` is its feed-forward layer."""
    layer, its = f"{name}.block.{{layer}}.layer.", f"{part}." if part else ""
    gate = "feed_forward.layer.gate"
    table = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    cross = () if part else _sublayer(part, f"{layer}1.", "cross", _attention("EncDecAttention"))
    return (
        *_sublayer(part, f"{layer}0.", "mixer", _attention("SelfAttention")),
        *cross,
        *_sublayer(part, f"{layer}{fed}.", "feed_forward", {}),
        *(
            Rule(
                f"{layer}{fed}.DenseReluDense.{theirs}.weight",
                f"feed_forward.layer.{own}.weight",
                part=part,
                needs=gate if theirs[-2:] in ("_0", "_1") else "",
                lacks=gate if theirs == "wi" else "",
            )
            for theirs, own in _FED.items()
        ),
        Rule(table, f"{its}score_bias.weight"),
        Rule(f"{name}.final_layer_norm.weight", f"{its}norm.weight"),
    )


T5_WEIGHTS = (
    Rule("shared.weight", "embedding.weight"),
    *_stack("encoder", "encoder", 1),
    *_stack("", "decoder", 2),
    Rule("lm_head.weight", "head.weight"),
)
