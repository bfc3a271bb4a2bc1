"""A published configuration, of which every attribute must be read or known to change nothing."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from ..nn import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RotaryScaling,
    yarn_magnitude,
    YarnScaling,
)


_REQUIRED: Any = object()
_FULL, _SLIDING = "full_attention", "sliding_attention"
# What says how a model was trained, stored or is to be sampled from, and nothing of what it computes.
_WITHOUT_EFFECT = frozenset(
    "_name_or_path architectures attention_dropout attn_pdrop auto_map bos_token_id dtype embd_pdrop eos_token_id "
    "hidden_dropout initializer_range keys_to_ignore_at_inference max_position_embeddings model_type output_attentions "
    "output_hidden_states pad_token_id resid_pdrop return_dict torch_dtype transformers_version use_cache "
    "_attn_implementation chunk_size_feed_forward id2label label2id is_encoder_decoder problem_type "
    "output_router_logits pretraining_tp transformers.js_config unk_token_id".split()
)


class Config:
    """The attributes of a `config.json`, taken one by one; what is left and not empty is refused."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self._values, self._source, self._taken = dict(values), source, set[str]()

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The attribute's value; None where it is null. Raises a `ValueError` where it is needed and missing."""
        self._taken.add(name)
        if name not in self._values and default is _REQUIRED:
            raise ValueError(f"{self._source}: the configuration has no {name!r}, which this family needs.")
        value = self._values.get(name, default)
        return default if value is None and default is not _REQUIRED else value

    def nullable(self, name: str, missing: Any) -> Any:
        """The attribute's value; None where it is null, which says that there is no such thing, and not `missing`."""
        return self.take(name) if name in self._values else self.take(name, missing)

    def windowed(self, layers: int, window: int | None, default: Iterable[int]) -> tuple[int, ...]:
        """The numbers of the layers that `layer_types` calls sliding, by default these; none without a window."""
        types = self.take("layer_types", None)
        types = layer_types(layers, () if window is None else tuple(default)) if types is None else types
        if len(types) != layers or set(types) - {_FULL, _SLIDING}:
            raise ValueError(
                f"{self._source}: layer_types={types} must name {layers} layers, each {_FULL!r} or {_SLIDING!r}."
            )
        if _SLIDING in types and window is None:
            raise ValueError(f"{self._source}: layer_types={types} has sliding layers, and no window is in use.")
        return tuple(number for number, name in enumerate(types) if name == _SLIDING)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse any value but these; the first is the default."""
        if (value := self.take(name, allowed[0])) not in allowed:
            known = ", ".join(map(repr, allowed))
            raise ValueError(f"{self._source}: {name}={value!r} is not supported for this family, which has {known}.")

    def finish(self) -> None:
        """Raise a `ValueError` that lists every attribute that was not read and says something."""
        left = {
            name: value
            for name, value in sorted(self._values.items())
            if name not in self._taken and name not in _WITHOUT_EFFECT and value not in (None, False, 0, "", [], {})
        }
        if left:
            listed = ", ".join(f"{name}={value!r}" for name, value in left.items())
            raise ValueError(f"{self._source}: attributes that this family does not know: {listed}.")

    def partial_rotary(self, default: float = 1.0) -> float:
        """Which part of a head's channels turns; a family that does not ask for it has whole heads."""
        given = self.take("rope_parameters", None) or self.take("rope_scaling", None) or {}
        own = self.take("partial_rotary_factor", default)
        return given.get("partial_rotary_factor") or own

    def rotary(
        self,
        default_theta: float = 10_000.0,
        layer_type: str | None = None,
        older: tuple[str, str | None] = ("rope_theta", "rope_scaling"),
    ) -> tuple[float, RotaryScaling | None]:
        """Base and scaling of the rotary positions, of the `older` attributes or of `rope_parameters`.

        `layer_type` is for families whose `rope_parameters` say both for each type of layer. A type whose scaling has
        no older name is refused where it has one.
        """
        given = self.take("rope_parameters", None) or {}
        by_type = any(isinstance(value, dict) for value in given.values())
        if by_type and layer_type and (others := {name for name in given if name not in (_FULL, _SLIDING)}):
            raise ValueError(
                f"{self._source}: rope_parameters are by type of layer, and {sorted(others)} are no types."
            )
        given = dict(given.get(layer_type) or {} if by_type and layer_type else given)
        theta = self.take(older[0], None)
        scaling = older[1] and self.take(older[1], None)
        given = given or dict(scaling or {})
        if "partial_rotary_factor" in self._taken:
            given.pop("partial_rotary_factor", None)
        theta = given.pop("rope_theta", None) or theta or default_theta
        kind = given.pop("rope_type", given.pop("type", "default"))
        if kind == "default":
            longest = self.take("max_position_embeddings", 0)  # which says nothing here
        else:
            longest = self.take("max_position_embeddings")
        original = given.pop("original_max_position_embeddings", None) or self.take(
            "original_max_position_embeddings", longest
        )
        scaling = _scaling(self._source, kind, given, original, longest)
        if scaling is not None and older[1] is None:
            raise ValueError(f"{self._source}: rope_parameters: {layer_type} has {kind!r}, and this family no scaling.")
        return float(theta), scaling


def _scaling(source: str, kind: str, given: dict[str, Any], original: int, longest: int) -> RotaryScaling | None:
    take = given.pop
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(take("factor"))
    elif kind == "dynamic":
        scaling = DynamicScaling(take("factor"), original)
    elif kind == "llama3":
        scaling = Llama3Scaling(take("factor"), take("low_freq_factor"), take("high_freq_factor"), original)
    elif kind == "yarn":
        factor, magnitude = take("factor"), take("attention_factor", None)
        over, under = take("mscale", None), take("mscale_all_dim", None)
        if magnitude is None and over and under:
            magnitude = yarn_magnitude(factor, over) / yarn_magnitude(factor, under)
        fast, slow = take("beta_fast", None) or 32.0, take("beta_slow", None) or 1.0
        scaling = YarnScaling(factor, original, fast, slow, magnitude, take("truncate", True))
    elif kind in ("longrope", "su"):
        short, long = (tuple(map(float, take(f"{name}_factor"))) for name in ("short", "long"))
        factor, magnitude = take("factor", None) or longest / original, take("attention_factor", None)
        scaling = LongRopeScaling(short, long, original, factor, magnitude=magnitude)
    else:
        raise ValueError(f"{source}: rope_type={kind!r} is not known.")
    if given:
        raise ValueError(f"{source}: rope_type={kind!r} has attributes that are not known: {given}.")
    return scaling


def layer_types(layers: int, windowed: Container[int]) -> list[str]:
    """What `Config.windowed` reads."""
    return [_SLIDING if number in windowed else _FULL for number in range(layers)]


def rotary_attributes(theta: float, scaling: RotaryScaling | None) -> dict[str, Any]:
    """The older attributes for base and scaling, which every version of transformers reads."""
    found: dict[str, Any] = {"rope_theta": theta}
    match scaling:
        case None:
            return found
        case LinearScaling():
            said: dict[str, Any] = {"rope_type": "linear", "factor": scaling.factor}
        case DynamicScaling():
            said = {"rope_type": "dynamic", "factor": scaling.factor}
            said |= {"original_max_position_embeddings": scaling.original_length}
        case Llama3Scaling():
            said = {"rope_type": "llama3", "factor": scaling.factor}
            said |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
            said |= {"original_max_position_embeddings": scaling.original_length}
        case YarnScaling():
            said = {"rope_type": "yarn", "factor": scaling.factor, "beta_fast": scaling.beta_fast}
            said |= {"beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
            said |= {"original_max_position_embeddings": scaling.original_length}
            said |= {} if scaling.magnitude is None else {"attention_factor": scaling.magnitude}
        case LongRopeScaling():
            said = {"rope_type": "longrope", "factor": scaling.factor}
            said |= {"short_factor": list(scaling.short_divisors), "long_factor": list(scaling.long_divisors)}
            said |= {"original_max_position_embeddings": scaling.original_length}
            said |= {} if scaling.magnitude is None else {"attention_factor": scaling.magnitude}
        case _:
            raise ValueError(f"{type(scaling).__name__}: no configuration has a name for this scaling.")
    return found | {"rope_scaling": said}
