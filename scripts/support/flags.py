"""Flags of a command: names that other programs have for them, and flags in front of the library's errors."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def flags_of(command: Any) -> dict[str, Any]:
    """Return every flag of a command with its value; `command` is a dataclass, or its class for the defaults."""
    return {flag: value for flag, value, _, _ in fields_of(command)}


def fields_of(command: Any, prefix: str = "--") -> Iterator[tuple[str, Any, type, str]]:
    """Yield every flag of a command with its value, and the dataclass and the name of its field."""
    for field in dataclasses.fields(command):
        value = getattr(command, field.name, None)
        name = _FLAG_NAMES.get(field.name, field.name.replace("_", "-"))
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{name}." if name else prefix)
        else:
            yield prefix + name, value, type(command), field.name


def format_flag(flag: str, value: Any) -> str:
    """Return a flag with its value as a user types them; for a boolean the flag alone, or `--no-` before its name."""
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"


def parse_words(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of each flag on a command line; the last ones of a flag that is there twice.

    Flags are spelled with hyphens.
    """
    words_by_flag: dict[str, list[str]] = {}
    words: list[str] = []
    for name, value in map(_split_equals, arguments):
        if name:
            words = words_by_flag[name.replace("_", "-")] = [value[1:]] if value else []
        else:
            words.append(value)
    return words_by_flag


def _split_equals(argument: str) -> tuple[str, str]:
    """Split an argument into a flag's name and what follows; the name is empty if the argument is not a flag."""
    name, equals, value = argument.partition("=")
    return (name, equals + value) if argument.startswith("--") else ("", argument)


def check_names(arguments: Sequence[str], flags: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a flag of another program; it says this command's name for that flag."""
    for flag in parse_words(arguments):
        if flag not in flags and (known := _find_flag(flag[2:], flags)) is not None:
            raise ValueError(f"{flag}: there is no such flag; it is {known} here (--help-all lists every flag).")


def _find_flag(name: str, flags: Mapping[str, Any]) -> str | None:
    """Return the command's flag that other programs call `name`, or that ends in the same last part; or None."""
    last = name.rpartition(".")[2]
    for candidate in (name, last):
        usual = [flag for flag, names in USUAL_NAMES.items() if candidate in names.split() and flag in flags]
        ending = [flag for flag in flags if flag[2:].rpartition(".")[2] == candidate]
        if len(usual or ending) == 1:
            return (usual or ending)[0]
    return None


@contextmanager
def name_flags_in_errors(command: Any) -> Iterator[None]:
    """Put flags in front of a `ValueError` that the library raises inside, see `add_flags`."""
    try:
        yield
    except ValueError as error:
        message = add_flags(str(error), flags_of(command))
        if message == str(error):
            raise
        raise ValueError(message) from error


def add_flags(message: str, flags: Mapping[str, Any]) -> str:
    """Return the library's message, `call(name=value): rule`, with the flags in front that set the call's arguments.

    Messages of any other form, also those that begin with a flag, stay as they are.
    """
    call = re.match(r"(\w+)\(.*?\): ", message, re.DOTALL)
    if call is None:
        return message
    names = [f"{call[1]}(", *re.findall(r"\b\w+(?==)", call[0])]
    chosen = dict.fromkeys(flag for name in names if (flag := _flag_of(name, flags)) is not None)
    front = " ".join(f"{flag} {_format_value(flags[flag])}" for flag in chosen)
    return f"{front}: {message}" if front else message


def _format_value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _flag_of(name: str, flags: Mapping[str, Any]) -> str | None:
    """Return the flag that sets the argument or call `name` of the library, if the command has it and it is set."""
    hyphens = name.replace("_", "-")
    candidates = WORDS.get(name, (f"--{hyphens}", *(flag for flag in flags if flag.endswith(f".{hyphens}"))))
    return next((flag for flag in candidates if flags.get(flag) not in (None, ())), None)


# Fields whose flags have another name.
_FLAG_NAMES = {"run": "", "machine": "", "plan": "", "published": "model"}

# Flags that set a call (with a bracket) or an argument of the library whose name differs from theirs.
WORDS = {
    "FileTokenizer(": ("--text.tokenizer", "--model"),
    "files(": ("--data", "--text.mix"),
    "hub(": ("--text.hub", "--text.mix"),
    "parse_bytes(": ("--memory",),
    "check_next_token(": ("--model", "--recipe"),
    "load(": ("--model",),
    "optimizer(": ("--optimizer.name",),
    "rates(": ("--optimizer.rates",),
    "preset(": ("--recipe",),
    "Temperature(": ("--temperature",),
    "TopK(": ("--top-k",),
    "TopP(": ("--top-p",),
    "MinP(": ("--min-p",),
    "RepetitionPenalty(": ("--repetition-penalty",),
    "max_new_tokens": ("--tokens",),
    "rows": ("--batch",),
    "peak": ("--optimizer.learning-rate",),
    "rate": ("--model.dropout",),
    "where": ("--lora.maps",),
    "name": (),
    "split": (),
}

# Names that other programs have for our flags.
USUAL_NAMES = {
    "--optimizer.learning-rate": "lr learning-rate max-lr peak-lr",
    "--optimizer.weight-decay": "wd weight-decay",
    "--optimizer.warmup": "warmup-steps warmup-iters num-warmup-steps",
    "--optimizer.rates": "scheduler lr-scheduler lr-scheduler-type lr-schedule optimizer.schedule",
    "--optimizer.clip": "clip grad-clip max-grad-norm gradient-clip-val clip-grad",
    "--optimizer.name": "optimizer optim opt",
    "--steps": "max-steps num-steps train-steps iterations iters max-iters num-iterations train-iters",
    "--batch": "batch-size global-batch-size train-batch-size per-device-train-batch-size bs",
    "--seq": "seq-len seq-length sequence-length max-seq-len max-seq-length context-length block-size max-length "
    "max-target-length",
    "--microbatches": "accumulate gradient-accumulation-steps grad-accum accumulation-steps accumulate-grad-batches",
    "--data": "dataset data-dir data-path dataset-path train-data input corpus",
    "--run-dir": "output-dir out-dir output out save-dir checkpoint-dir run logdir",
    "--seed": "random-seed rng-seed",
    "--precision.compute": "dtype precision mixed-precision compute-dtype bf16 fp16",
    "--precision.products": "fp8 float8 fp8-format fp8-recipe",
    "--precision.parameters": "param-dtype params-dtype",
    "--model.embed": "hidden-size d-model dim n-embd embed-dim width base-emb-dim",
    "--model.layers": "num-layers n-layer n-layers num-hidden-layers depth base-num-decoder-layers",
    "--model.heads": "num-heads n-head n-heads num-attention-heads base-num-query-heads",
    "--model.kv-heads": "num-kv-heads n-kv-heads num-key-value-heads num-query-groups base-num-kv-heads",
    "--model.head-dim": "kv-channels",
    "--model.mlp": "ffn intermediate-size d-ff ffn-hidden-size base-mlp-dim",
    "--model.vocab": "vocab-size",
    "--text.tokenizer": "tokenizer tokenizer-path tokenizer-file",
    "--model": "model-name-or-path pretrained checkpoint init-from model-path",
    "--lora.rank": "lora-r lora-rank r",
    "--lora.alpha": "lora-alpha",
    "--execution.remat": "gradient-checkpointing activation-checkpointing checkpointing recompute-granularity "
    "remat-policy",
    "--checkpoint-every": "save-steps save-every save-interval checkpoint-interval",
    "--validate-every": "eval-steps eval-every eval-interval",
    "--validation-batches": "eval-iters eval-batches",
    "--metrics.wandb": "wandb-project wandb report-to",
    "--mesh.tensor": "tp tensor-parallel-size tensor-model-parallel-size tensor-parallel ici-tensor-parallelism",
    "--mesh.pipe": "pp pipeline-parallel-size pipeline-model-parallel-size ici-pipeline-parallelism",
    "--mesh.context": "cp context-parallel-size ici-context-parallelism",
    "--mesh.expert": "ep expert-parallel-size expert-model-parallel-size ici-expert-parallelism",
    "--mesh.replica": "dp data-parallel-size ici-data-parallelism",
    "--mesh.fsdp": "fsdp-size ici-fsdp-parallelism",
    "--zero": "zero-stage use-distributed-optimizer",
    "--residual": "sequence-parallel",
    "--simulate": "devices num-devices",
    "--tokens": "max-tokens max-new-tokens num-tokens n",
    "--dtype": "torch-dtype",
    "--temperature": "temp",
}
