"""Types of config fields, with ranges for numbers, and `PublishedConfig`, which reads a `config.json` by these types.

Every attribute of a published configuration must be read by the family, or be known to change nothing.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, TypeAlias

from .._annotation_checks import fits, name_class


Attributes: TypeAlias = dict[str, Any]
"""Attributes of a `config.json`, or of an object in it, by name."""
LARGEST_INT, LARGEST_FLOAT = 2**31 - 1, 3.4028234663852886e38  # of int32 and of float32


@dataclasses.dataclass(frozen=True)
class Range:
    """The minimum and the maximum of a number; with `exclusive`, the number must be above `minimum`."""

    minimum: int | float
    maximum: int | float
    exclusive: bool = False
    counts: str = ""
    """For a number that `load` compares with a folder's arrays, its unit: `"entries"` of a dim, or `"layers"`."""

    def __contains__(self, value: int | float) -> bool:
        return (self.minimum < value if self.exclusive else self.minimum <= value) and value <= self.maximum


Size = Annotated[int, Range(1, LARGEST_INT, counts="entries")]
"""Entries of a dim of some weight: channels, heads, ids, experts."""
OptionalSize = Annotated[int, Range(0, LARGEST_INT, counts="entries")]
"""The size of an optional part of the model; 0: the model does not have the part."""
Length = Annotated[int, Range(1, LARGEST_INT)]
"""A number of tokens."""
Index = Annotated[int, Range(0, LARGEST_INT)]
"""The index of a layer, or an id; both are counted from 0."""
LayerCount = Annotated[int, Range(1, 4096, counts="layers")]
"""Layers of a model."""
Number = Annotated[float, Range(-LARGEST_FLOAT, LARGEST_FLOAT)]
"""A finite number."""
Positive = Annotated[float, Range(0.0, LARGEST_FLOAT, exclusive=True)]
"""A finite number above 0."""
NotNegative = Annotated[float, Range(0.0, LARGEST_FLOAT)]
"""A finite number of at least 0."""
Fraction = Annotated[float, Range(0.0, 1.0, exclusive=True)]
"""A fraction above 0, and at most 1."""
Rate = Annotated[float, Range(0.0, 1.0)]
"""A probability."""
FieldType: TypeAlias = object
"""The annotation of a config's field: a class, a class with a `Range`, or a union, a list or a tuple of these."""


def ranges_in(field_type: FieldType) -> list[Range]:
    """Return the ranges of the numbers of a type, also within unions and tuples."""
    args = typing.get_args(field_type)
    if typing.get_origin(field_type) is Annotated:
        return [args[1]]
    return [bounds for part in args for bounds in ranges_in(part)]


def as_list(value: Any) -> list[Any]:
    """Return a value that is stated once or as a list, as a list."""
    return value if isinstance(value, list) else [value]


def convert(value: Any, field_type: FieldType) -> Any:
    """Return a value that fits its type, with whole numbers converted to floats if the type has floats."""
    origin, args = typing.get_origin(field_type), typing.get_args(field_type)
    if origin is Annotated:
        return convert(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return convert(value, next(option for option in args if fits(value, option)))
    if origin is list:
        return [convert(item, args[0]) for item in value]
    if origin is tuple:
        args = args[:1] * len(value) if args[1:] == (...,) else args
        return tuple(map(convert, value, args))
    return float(value) if field_type is float else value


_NAMES: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "an object",
    type(None): "null",
}


def describe_type(field_type: FieldType, value: object) -> str:
    """Return what a type requires of a value, in words, such as "a whole number of at least 1".

    `value` does not fit the type; only the requirement that it breaks is described.
    """
    origin, args = typing.get_origin(field_type), typing.get_args(field_type)
    if origin is Annotated:
        return _describe_range(args[0], args[1], value)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(option, value) for option in args)
    if origin is list or (origin is tuple and args[1:] == (...,)):
        wrong = [item for item in value if not fits(item, args[0])] if isinstance(value, list | tuple) else []
        return f"a list, each item {describe_type(args[0], wrong[0] if wrong else value)}"
    if origin is tuple:
        return f"a list of {len(args)}: {', '.join(describe_type(item, value) for item in args)}"
    return _NAMES.get(field_type, str(field_type))


def _describe_range(number_type: type, bounds: Range, value: Any) -> str:
    is_number = fits(value, number_type)
    name = "a finite number" if is_number and not _is_finite(value) else _NAMES[number_type]
    if is_number and value > bounds.maximum and _is_finite(value):
        maximum = f"{bounds.maximum:.9g}" if number_type is float else f"{bounds.maximum}"
        return f"{name} of at most {maximum}"
    if bounds.minimum <= -LARGEST_FLOAT:
        return name
    upper = f" and at most {bounds.maximum:g}" if number_type is float and bounds.maximum < LARGEST_FLOAT else ""
    return f"{name} {'above' if bounds.exclusive else 'of at least'} {bounds.minimum:g}{upper}"


def _is_finite(value: int | float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def format_value(value: object) -> str:
    """Return a value as errors show it: in full, unless it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of thousands of digits.
        return f"{name_class(value)} too long to print"
    return text if len(text) <= 400 else f"{text[:400]}..."


REQUIRED: object = object()
"""A marker in the place of a default: the configuration must have the attribute."""
# Attributes that do not change what a model computes: how it was trained or stored, or how it is to be run. A few
# families read `max_window_layers` and `model_max_length`; in folders of other families these have no effect.
_OF_MODELS = (
    "attention_dropout attn_pdrop auto_map custom_pipelines embd_pdrop embed_dropout hidden_dropout "
    "initializer_range keys_to_ignore_at_inference max_position_embeddings max_window_layers model_max_length "
    "output_router_logits pretraining_tp resid_pdrop sbert_ce_default_activation_function sentence_transformers "
    "transformers.js_config unsloth_fixed unsloth_version"
)
# Attributes that transformers puts, or has put, into the configuration of any model; `tests/fixtures/make_generic.py`
# lists them. `add_cross_attention`, `is_decoder`, `is_encoder_decoder`, `per_layer_config`, `pruned_heads` and
# `tie_encoder_decoder` are missing here, since they change the model where they have a value. `tie_word_embeddings` is
# missing too, since the families read it. Names that begin with an underscore are passed over even if they are missing
# here: `private_names` lists them for a warning.
_OF_EVERY_CONFIGURATION = (
    "__float__ _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash "
    "_experts_implementation _experts_implementation_internal _flash_attn_2_enabled _from_model_config "
    "_model_name_or_path _name_or_path _output_attentions _sliding_window_pattern "
    "architectures attn_implementation bos_token_id chunk_size_feed_forward decoder_start_token_id dtype eos_token_id "
    "experts_implementation finetuning_task gradient_checkpointing id2label label2id model_type name_or_path "
    "num_labels output_attentions output_hidden_states output_past pad_token_id prefix problem_type return_dict "
    "sep_token_id task_specific_params tf_legacy_loss tie_last_hidden_states tokenizer_class torch_dtype torchscript "
    "transformers_version unk_token_id use_bfloat16 use_cache use_return_dict xla_device"
)
# Settings of sampling, which older releases of transformers wrote into configurations.
_OF_GENERATION = (
    "assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids "
    "begin_suppress_tokens cache_config cache_implementation compile_config constraints continuous_batching_config "
    "disable_compile diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size "
    "encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids "
    "forced_bos_token_id forced_eos_token_id guidance_scale is_assistant length_penalty low_memory max_cache_len "
    "max_length max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size "
    "num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits "
    "output_scores penalty_alpha prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits "
    "repetition_penalty return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens "
    "target_lookbehind temperature token_healing top_h top_k top_p typical_p use_mtp watermarking_config"
)
_CAUSAL = "is_causal"  # transformers reads it in every configuration, and its default is True
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})  # values of an attribute without effect
_WITHOUT_EFFECT = frozenset(f"{_OF_MODELS} {_OF_EVERY_CONFIGURATION} {_OF_GENERATION}".split())


def private_names(values: Mapping[str, object]) -> list[str]:
    """Return the attributes, also nested attributes, that are not read because their names begin with an underscore.

    Private names hold a program's bookkeeping, and each release may have new ones. Known names, and names with an empty
    value, are left out.
    """
    unknown = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT and value not in _EMPTY}
    private = [name for name in unknown if name.startswith("_")]
    nested = {name: value for name, value in unknown.items() if name not in private and isinstance(value, dict)}
    return sorted(private + [f"{name}.{inner}" for name, value in nested.items() for inner in private_names(value)])


class PublishedConfig:
    """The attributes of a `config.json`, read one by one; `finish` refuses attributes that nothing has read."""

    def __init__(self, values: Mapping[str, object], source: str, reader: str = "this family"):
        self._values, self.source, self._reader = dict(values), source, reader
        self._names_read, self._defaults = list[str](), dict[str, object]()

    def declare(self, defaults: Mapping[str, object]) -> None:
        """Set defaults of attributes, for calls that pass no default of their own."""
        self._defaults |= defaults

    def take(self, name: str, default: object = REQUIRED) -> object:
        """Return the attribute's value, or the default if the attribute is missing or null.

        A null without a default is returned as None. Raises a `ValueError` if a required attribute is missing, and for
        a null if the default is True, because transformers reads such a null as False.
        """
        self._names_read.append(name)
        default = self._defaults.get(name, REQUIRED) if default is REQUIRED else default
        if name not in self._values and default is REQUIRED:
            self.refuse(f"the configuration has no {name!r}, which {self._reader} needs.")
        value = self._values.get(name, default)
        if value is None and default is True:
            self.refuse(f"{name}=None: it must be true or false; if the attribute is left out, it is true.")
        return default if value is None and default is not REQUIRED else value

    @contextmanager
    def record_names(self) -> Iterator[list[str]]:
        """Yield a list that gets the name of each attribute that is read within the `with` statement."""
        earlier, self._names_read = self._names_read, list[str]()
        try:
            yield self._names_read
        finally:
            self._names_read = earlier + self._names_read

    def has_read(self, name: str) -> bool:
        """Return whether the attribute was read."""
        return name in self._names_read

    def names_with_value(self, names: Iterable[str], value: object) -> list[str]:
        """Return the attributes out of `names` whose value is this object (`is`, not `==`), without duplicates."""
        return [name for name in dict.fromkeys(names) if self._values.get(name) is value]

    def add(self, name: str, value: object) -> None:
        """Add an attribute that was found within another attribute; `finish` refuses it if nothing reads it."""
        self._values[name] = value

    def refuse(self, text: str) -> NoReturn:
        """Raise a `ValueError` that names the file."""
        raise ValueError(f"{self.source}: {text}")

    def read(self, name: str, field_type: FieldType, default: object = REQUIRED) -> Any:
        """Return the attribute's value, which must be of `field_type`, or the default if it is missing or null."""
        value = self.take(name, default)
        has_default = default is not REQUIRED or name in self._defaults
        return value if has_default and self._values.get(name) is None else self.checked(name, value, field_type)

    def checked(self, name: str, value: object, field_type: FieldType) -> Any:
        """Return `value`, which must be of `field_type`; raises a `ValueError` that names the attribute."""
        if not fits(value, field_type):
            self.refuse(f"{name}={format_value(value)}: it must be {describe_type(field_type, value)}.")
        return convert(value, field_type)

    def count(self, name: str, default: object = REQUIRED, minimum: int = 1) -> int:
        """Return the attribute's value, a count or a divisor: a whole number, `minimum` or more."""
        return self.read(name, Annotated[int, Range(minimum, LARGEST_INT)], default)

    def number(self, name: str, default: object = REQUIRED) -> float:
        """Return the attribute's value, a finite number."""
        return self.read(name, Number, default)

    def flag(self, name: str, default: bool) -> bool:
        """Return the attribute's value, true or false."""
        return self.read(name, bool, default)

    def text(self, name: str, default: object = REQUIRED) -> str:
        """Return the attribute's value, a text."""
        return self.read(name, str, default)

    def nested(self, name: str) -> Attributes:
        """Return a copy of an attribute that is an object; an empty object if it is missing or null."""
        return dict(self.read(name, dict, None) or {})

    def listed(self, name: str, item_type: FieldType = object, *, empty: bool = False) -> list[Any] | None:
        """Return an attribute that is a list whose items are of a type; None if it is missing or null.

        With `empty`, an empty list counts as missing.
        """
        value = self.take(name, None)
        if value is None or (empty and value == []):
            return None
        return list(self.checked(name, list(value) if isinstance(value, tuple) else value, list[item_type]))

    def nullable(self, name: str, missing: object) -> object:
        """Return the attribute's value: None if it is null, and `missing` if the attribute is missing."""
        self._names_read.append(name)
        return self._values.get(name, missing)

    def expect(self, name: str, *allowed: object) -> None:
        """Refuse a value that is not among `allowed`; the first of `allowed` is the default."""
        value = self.take(name, allowed[0])
        is_flag = isinstance(value, bool)  # True equals 1 in Python, but not in a configuration.
        if not any(value == option and isinstance(option, bool) == is_flag for option in allowed):
            known = ", ".join(map(repr, allowed))
            self.refuse(f"{name}={format_value(value)} is not supported for {self._reader}, which supports {known}.")

    def finish_strictly(self, is_without_effect: Callable[[str, object], bool]) -> None:
        """Raise a `ValueError` that lists every attribute that was not read and has an effect, or may have one.

        Null and empty values have no effect. False and 0 may have one, as `causal=False` does.
        """
        unread = {
            name: value
            for name, value in sorted(self._values.items())
            if name not in self._names_read and value not in (None, "", [], {}) and not is_without_effect(name, value)
        }
        self._refuse_unknown(unread)

    def finish(self, is_known: Callable[[str], object] = lambda name: False) -> None:
        """Raise a `ValueError` that lists every attribute that was not read, is not known and is not empty."""
        if _CAUSAL not in self._names_read:
            self.expect(_CAUSAL, True)
        unread = {
            name: value
            for name, value in sorted(self._values.items())
            if value not in _EMPTY and not self._is_passed_over(name) and not is_known(name)
        }
        self._refuse_unknown(unread)

    def _is_passed_over(self, name: str) -> bool:
        return name in self._names_read or name in _WITHOUT_EFFECT or name.startswith("_")

    def _refuse_unknown(self, attributes: Mapping[str, object]) -> None:
        if attributes:
            listed = ", ".join(f"{name}={format_value(value)}" for name, value in attributes.items())
            self.refuse(f"attributes that {self._reader} does not know: {listed}.")
