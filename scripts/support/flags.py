"""The flags of a command, the names that other programs have for them, and the library's errors with flags in front."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def flags_of(command: Any) -> dict[str, Any]:
    """Every flag of a command with its value; a dataclass, or its class, of which the defaults are taken."""
    return {flag: value for flag, value, _, _ in fields_of(command)}


def fields_of(command: Any, prefix: str = "--") -> Iterator[tuple[str, Any, type, str]]:
    """Every flag of a command with its value, and the dataclass and the name of its field."""
    for field in dataclasses.fields(command):
        value = getattr(command, field.name, None)
        name = _NAMED.get(field.name, field.name.replace("_", "-"))
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{prefix}{name}." if name else prefix)
        else:
            yield prefix + name, value, type(command), field.name


def spelled(flag: str, value: Any) -> str:
    """A flag with its value as one types them; of a choice of two, the flag alone or `--no-` before its name."""
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"


def given(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Each flag on a command line, spelled with hyphens, with its words; of one that is there twice, the last ones."""
    found: dict[str, list[str]] = {}
    words: list[str] = []
    for name, value in map(_parted, arguments):
        if name:
            words = found[name.replace("_", "-")] = [value[1:]] if value else []
        else:
            words.append(value)
    return found


def with_hyphens(arguments: Sequence[str]) -> list[str]:
    """The arguments with hyphens in the names of flags: `--run_dir=a_b` becomes `--run-dir=a_b`."""
    return [name.replace("_", "-") + value for name, value in map(_parted, arguments)]


def _parted(argument: str) -> tuple[str, str]:
    """A flag's name and the rest of the argument; the name is empty if the argument is not a flag."""
    name, equals, value = argument.partition("=")
    return (name, equals + value) if argument.startswith("--") else ("", argument)


def check_names(arguments: Sequence[str], flags: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for an unknown flag whose name here is known; it says that name."""
    for argument in arguments:
        given, _ = _parted(argument)
        if not given or given in flags:
            continue
        ours = _ours(given[2:], flags)
        if ours is not None:
            raise ValueError(f"{given}: there is no such flag; it is {ours} here (--help-all lists every flag).")


def _ours(given: str, flags: Mapping[str, Any]) -> str | None:
    """The command's flag that other programs call `given`, or that ends in the same last part; or None."""
    last = given.rpartition(".")[2]
    for name in (given, last):
        usual = [flag for flag, others in USUAL_NAMES.items() if name in others.split() and flag in flags]
        same = [flag for flag in flags if flag[2:].rpartition(".")[2] == name]
        if len(usual or same) == 1:
            return (usual or same)[0]
    return None


@contextmanager
def naming_flags(command: Any) -> Iterator[None]:
    """Put flags in front of a `ValueError` that the library raises inside, see `in_flags`."""
    try:
        yield
    except ValueError as error:
        named = in_flags(str(error), flags_of(command))
        if named == str(error):
            raise
        raise ValueError(named) from error


def in_flags(message: str, flags: Mapping[str, Any]) -> str:
    """The library's message, `call(name=value): rule`, with the flags in front that set the call and those arguments.

    Messages of any other form, also those that begin with a flag, stay as they are.
    """
    call = re.match(r"(\w+)\(.*?\): ", message, re.DOTALL)
    if call is None:
        return message
    names = [f"{call[1]}(", *re.findall(r"\b\w+(?==)", call[0])]
    chosen = dict.fromkeys(flag for name in names if (flag := _flag_of(name, flags)) is not None)
    front = " ".join(f"{flag} {_spelled(flags[flag])}" for flag in chosen)
    return f"{front}: {message}" if front else message


def _spelled(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _flag_of(name: str, flags: Mapping[str, Any]) -> str | None:
    """The flag that sets the argument or call `name` of the library, if the command has that flag and it is set."""
    hyphens = name.replace("_", "-")
    ours = WORDS.get(name, (f"--{hyphens}", *(flag for flag in flags if flag.endswith(f".{hyphens}"))))
    return next((flag for flag in ours if flags.get(flag) not in (None, ())), None)


# Fields whose flags have another name.
_NAMED = {"run": "", "machine": "", "plan": "", "published": "model"}

# Names of the library that differ from the flags': calls (with a bracket) and arguments, with the flags that set them.
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

# The names that other programs have for our flags.
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
