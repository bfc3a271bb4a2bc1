"""A published configuration, of which every attribute must be read or known to change nothing."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn

from ._config_types import converted, described_kind, fits, LARGEST_WHOLE, Number, Range, shown


REQUIRED: Any = object()
# Attributes of how a model was trained or stored or is to be run, which do not change what it computes; the families
# of `max_window_layers` and `model_max_length` read them, and others' folders have them left over from another's.
_OF_MODELS = (
    "attention_dropout attn_pdrop auto_map embd_pdrop hidden_dropout initializer_range keys_to_ignore_at_inference "
    "max_position_embeddings max_window_layers model_max_length output_router_logits pretraining_tp resid_pdrop "
    "transformers.js_config unsloth_fixed unsloth_version"
)
# Attributes that transformers puts, or has put, into the configuration of any model; `tests/fixtures/make_generic.py`
# lists them. `add_cross_attention`, `is_decoder`, `is_encoder_decoder`, `per_layer_config`, `pruned_heads` and
# `tie_encoder_decoder` are missing here, since they change the model where they have a value, and so is
# `tie_word_embeddings`, which the families read. Names that begin with an underscore need not be here: `private_names`
# lists those that are not.
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
# Settings of sampling: transformers moves them out of a configuration, or has written them into one.
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
_CAUSAL = "is_causal"  # of any configuration transformers reads it, and takes True where nothing is said
_EMPTY: tuple[Any, ...] = (None, False, 0, "", [], {})  # values of an attribute that says nothing
_WITHOUT_EFFECT = frozenset(f"{_OF_MODELS} {_OF_EVERY_CONFIGURATION} {_OF_GENERATION}".split())


def private_names(values: Mapping[str, Any]) -> list[str]:
    """List the attributes, nested ones too, that are passed over since their names begin with an underscore.

    Private names hold a program's bookkeeping, and each release may have new ones. Known and empty ones are left out.
    """
    stated = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT and value not in _EMPTY}
    private = [name for name in stated if name.startswith("_")]
    inner = {name: value for name, value in stated.items() if name not in private and isinstance(value, dict)}
    return sorted(private + [f"{name}.{its}" for name, value in inner.items() for its in private_names(value)])


class PublishedConfig:
    """The attributes of a `config.json`, taken one by one; what is left and not empty is refused."""

    def __init__(self, values: Mapping[str, Any], source: str, reader: str = "this family"):
        self._values, self.source, self._reader, self._taken = dict(values), source, reader, list[str]()
        self._defaults = dict[str, Any]()

    def declare(self, defaults: Mapping[str, Any]) -> None:
        """State what attributes are where they are missing, for readers that name no default of their own."""
        self._defaults |= defaults

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The attribute's value, or the default where it is null; without a default, None.

        Raises a `ValueError` where it is needed and missing, and for a null in the place of what is true by default,
        since for transformers that is false.
        """
        self._taken.append(name)
        default = self._defaults.get(name, REQUIRED) if default is REQUIRED else default
        if name not in self._values and default is REQUIRED:
            self.refuse(f"the configuration has no {name!r}, which {self._reader} needs.")
        value = self._values.get(name, default)
        if value is None and default is True:
            self.refuse(f"{name}=None: it must be true or false; without it, it is true.")
        return default if value is None and default is not REQUIRED else value

    @property
    def taken(self) -> int:
        """How often something was taken."""
        return len(self._taken)

    def names_of(self, value: Any, since: int) -> str:
        """The attributes that were taken behind the first `since` and have this very value."""
        return ", ".join(dict.fromkeys(name for name in self._taken[since:] if self._values.get(name) is value))

    def add(self, name: str, value: Any) -> None:
        """Add an attribute that was found within another; `finish` refuses it if the family never takes it."""
        self._values[name] = value

    def refuse(self, text: str) -> NoReturn:
        """Raise a `ValueError` that names the file."""
        raise ValueError(f"{self.source}: {text}")

    def read(self, name: str, kind: Any, default: Any = REQUIRED) -> Any:
        """Return the attribute's value, which must be of a kind (see `_kinds`), or the default where it is null."""
        value = self.take(name, default)
        has_default = default is not REQUIRED or name in self._defaults
        return value if has_default and self._values.get(name) is None else self.checked(name, value, kind)

    def checked(self, name: str, value: Any, kind: Any) -> Any:
        """Return an attribute's value, which must be of a kind; raises a `ValueError` that names the attribute."""
        if not fits(value, kind):
            self.refuse(f"{name}={shown(value)}: it must be {described_kind(kind, value)}.")
        return converted(value, kind)

    def count(self, name: str, default: Any = REQUIRED, least: int = 1) -> int:
        """Return the attribute's value, by which something is counted or divided: a whole number, `least` or more."""
        return self.read(name, Annotated[int, Range(least, LARGEST_WHOLE)], default)

    def number(self, name: str, default: Any = REQUIRED) -> float:
        """Return the attribute's value, a finite number."""
        return self.read(name, Number, default)

    def flag(self, name: str, default: bool) -> bool:
        """Return the attribute's value, by which something is switched."""
        return self.read(name, bool, default)

    def text(self, name: str, default: Any = REQUIRED) -> str:
        """Return the attribute's value, which names something."""
        return self.read(name, str, default)

    def nested(self, name: str) -> dict[str, Any]:
        """Return an attribute that has attributes of its own; an empty one where it is missing or null."""
        return self.read(name, dict, None) or {}

    def listed(self, name: str, kind: Any = Any, *, empty: bool = False) -> list[Any] | None:
        """Return an attribute that is a list whose items are of a kind; None where it is missing or null.

        With `empty`, an empty list says nothing either.
        """
        value = self.take(name, None)
        if value is None or (empty and value == []):
            return None
        return list(self.checked(name, list(value) if isinstance(value, tuple) else value, list[kind]))

    def nullable(self, name: str, missing: Any) -> Any:
        """The attribute's value; None where it is null, which says that there is no such thing, and not `missing`."""
        self._taken.append(name)
        return self._values.get(name, missing)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse any value but these; the first is the default."""
        value = self.take(name, allowed[0])
        is_flag = isinstance(value, bool)  # True equals 1, but does not mean it
        if not any(value == option and isinstance(option, bool) == is_flag for option in allowed):
            known = ", ".join(map(repr, allowed))
            self.refuse(f"{name}={shown(value)} is not supported for {self._reader}, which has {known}.")

    def finish_strictly(self, is_without_effect: Callable[[str, Any], bool]) -> None:
        """Raise a `ValueError` that lists every attribute that was not read and has an effect, or may have one.

        False and 0 may ask for something, as `causal=False` does; only null and what is empty say nothing.
        """
        left = {
            name: value
            for name, value in sorted(self._values.items())
            if name not in self._taken and value not in (None, "", [], {}) and not is_without_effect(name, value)
        }
        self._refuse_unknown(left)

    def finish(self, is_known: Callable[[str], object] = lambda name: False) -> None:
        """Raise a `ValueError` that lists every attribute that was not read, is not known and says something."""
        if _CAUSAL not in self._taken:
            self.expect(_CAUSAL, True)
        passed = lambda name: name in self._taken or name in _WITHOUT_EFFECT or name.startswith("_") or is_known(name)
        left = {name: value for name, value in sorted(self._values.items()) if not passed(name) and value not in _EMPTY}
        self._refuse_unknown(left)

    def _refuse_unknown(self, left: Mapping[str, Any]) -> None:
        if left:
            listed = ", ".join(f"{name}={shown(value)}" for name, value in left.items())
            self.refuse(f"attributes that {self._reader} does not know: {listed}.")
