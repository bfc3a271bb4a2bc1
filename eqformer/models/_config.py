"""A published configuration, of which every attribute must be read or known to change nothing."""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NoReturn

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
# What says how a model was trained, stored or is to be run, and nothing of what it computes.
_OF_MODELS = (
    "attention_dropout attn_pdrop auto_map embd_pdrop hidden_dropout initializer_range keys_to_ignore_at_inference "
    "max_position_embeddings output_router_logits pretraining_tp resid_pdrop transformers.js_config unsloth_fixed "
    "unsloth_version"
)
# What every configuration of transformers has or had, whatever its model. `add_cross_attention`, `is_decoder`,
# `is_encoder_decoder`, `per_layer_config`, `pruned_heads` and `tie_encoder_decoder` are missing, since they change the
# model where they say anything, and `tie_word_embeddings`, which the families read.
_OF_EVERY_CONFIGURATION = (
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash "
    "_experts_implementation _experts_implementation_internal _flash_attn_2_enabled _name_or_path _output_attentions "
    "architectures attn_implementation bos_token_id chunk_size_feed_forward decoder_start_token_id dtype eos_token_id "
    "experts_implementation finetuning_task gradient_checkpointing id2label label2id model_type name_or_path "
    "num_labels output_attentions output_hidden_states output_past pad_token_id prefix problem_type return_dict "
    "sep_token_id task_specific_params tf_legacy_loss tokenizer_class torch_dtype torchscript transformers_version "
    "unk_token_id use_bfloat16 use_cache xla_device"
)
# What transformers takes out of a configuration, since it says how to sample.
_OF_GENERATION = (
    "assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty "
    "do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length "
    "no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams "
    "num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate "
    "suppress_tokens target_lookbehind temperature top_k top_p typical_p"
)
_WITHOUT_EFFECT = frozenset(f"{_OF_MODELS} {_OF_EVERY_CONFIGURATION} {_OF_GENERATION}".split())


class Config:
    """The attributes of a `config.json`, taken one by one; what is left and not empty is refused."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self._values, self._source, self._taken = dict(values), source, set[str]()

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The attribute's value; None where it is null. Raises a `ValueError` where it is needed and missing."""
        self._taken.add(name)
        if name not in self._values and default is _REQUIRED:
            self.refuse(f"the configuration has no {name!r}, which this family needs.")
        value = self._values.get(name, default)
        return default if value is None and default is not _REQUIRED else value

    def refuse(self, text: str) -> NoReturn:
        """Raise a `ValueError` that names the file."""
        raise ValueError(f"{self._source}: {text}")

    def count(self, name: str, default: Any = _REQUIRED) -> int:
        """The attribute's value, by which something is counted or divided: a whole number of at least 1."""
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(f"{name}={value!r}: it must be a whole number of at least 1.")
        return value

    def nested(self, name: str) -> dict[str, Any]:
        """An attribute that has attributes of its own; none where it is missing."""
        value = self.take(name, None) or {}
        if not isinstance(value, dict):
            self.refuse(f"{name}={value!r}: it must be an object.")
        return value

    def nullable(self, name: str, missing: Any) -> Any:
        """The attribute's value; None where it is null, which says that there is no such thing, and not `missing`."""
        return self.take(name) if name in self._values else self.take(name, missing)

    def windowed(self, layers: int, window: int | None, default: Iterable[int]) -> tuple[int, ...]:
        """The numbers of the layers that `layer_types` calls sliding, by default these; none without a window."""
        types = self.take("layer_types", None)
        types = layer_types(layers, () if window is None else tuple(default)) if types is None else types
        if len(types) != layers or set(types) - {_FULL, _SLIDING}:
            self.refuse(f"layer_types={types} must name {layers} layers, each {_FULL!r} or {_SLIDING!r}.")
        if _SLIDING in types and window is None:
            self.refuse(f"layer_types={types} has sliding layers, and no window is in use.")
        return tuple(number for number, name in enumerate(types) if name == _SLIDING)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse any value but these; the first is the default."""
        if (value := self.take(name, allowed[0])) not in allowed:
            known = ", ".join(map(repr, allowed))
            self.refuse(f"{name}={value!r} is not supported for this family, which has {known}.")

    def finish(self) -> None:
        """Raise a `ValueError` that lists every attribute that was not read and says something."""
        left = {
            name: value
            for name, value in sorted(self._values.items())
            if name not in self._taken and name not in _WITHOUT_EFFECT and value not in (None, False, 0, "", [], {})
        }
        if left:
            listed = ", ".join(f"{name}={value!r}" for name, value in left.items())
            self.refuse(f"attributes that this family does not know: {listed}.")

    def partial_rotary(self, default: float = 1.0) -> float:
        """Which part of a head's channels turns; a family that does not ask for it has whole heads."""
        given = self.nested("rope_parameters") or self.nested("rope_scaling")
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
        given = self.nested("rope_parameters")
        by_type = any(isinstance(value, dict) for value in given.values())
        if by_type and layer_type and (others := {name for name in given if name not in (_FULL, _SLIDING)}):
            self.refuse(f"rope_parameters are by type of layer, and {sorted(others)} are no types.")
        given = dict(given.get(layer_type) or {} if by_type and layer_type else given)
        theta = self.take(older[0], None)
        scaling = self.nested(older[1]) if older[1] else {}
        given = given or dict(scaling)
        if (part := given.pop("partial_rotary_factor", None)) is not None:
            self._values["partial_rotary_factor"] = part  # `finish` refuses it of a family that never asks for it
        theta = given.pop("rope_theta", None) or theta or default_theta
        kind = given.pop("rope_type", given.pop("type", "default"))
        longest = 0 if kind == "default" else self.count("max_position_embeddings")
        original = self.take("original_max_position_embeddings", None)
        original = given.pop("original_max_position_embeddings", None) or original or longest
        scaling = _scaling(self.refuse, kind, given, original, longest)
        if scaling is not None and older[1] is None:
            self.refuse(f"rope_parameters: {layer_type} has {kind!r}, and this family no scaling.")
        return float(theta), scaling


def _scaling(
    refuse: Callable[[str], NoReturn], kind: str, given: dict[str, Any], original: int, longest: int
) -> RotaryScaling | None:
    maybe = lambda name: given.pop(name, None)

    def take(name: str) -> Any:
        value = maybe(name)
        return refuse(f"rope_type={kind!r} needs {name!r}, which is not said.") if value is None else value

    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(take("factor"))
    elif kind == "dynamic":
        scaling = DynamicScaling(take("factor"), original)
    elif kind == "llama3":
        scaling = Llama3Scaling(take("factor"), take("low_freq_factor"), take("high_freq_factor"), original)
    elif kind == "yarn":
        factor, magnitude = take("factor"), maybe("attention_factor")
        over, under = maybe("mscale"), maybe("mscale_all_dim")
        if magnitude is None and over and under:
            magnitude = yarn_magnitude(factor, over) / yarn_magnitude(factor, under)
        fast, slow = maybe("beta_fast") or 32.0, maybe("beta_slow") or 1.0
        scaling = YarnScaling(factor, original, fast, slow, magnitude, given.pop("truncate", True))
    elif kind in ("longrope", "su"):
        short, long = (tuple(map(float, take(f"{name}_factor"))) for name in ("short", "long"))
        factor, magnitude = maybe("factor") or longest / original, maybe("attention_factor")
        scaling = LongRopeScaling(short, long, original, factor, magnitude=magnitude)
    else:
        refuse(f"rope_type={kind!r} is not known.")
    if given:
        refuse(f"rope_type={kind!r} has attributes that are not known: {given}.")
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
