"""The flags of a command: which there are, what other programs call them, and errors of the library said in them."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def flags_of(command: Any, prefix: str = "--") -> dict[str, Any]:
    """Every flag of a command (a dataclass, or a class of which defaults are enough) with its value."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name, None)
        name = _NAMED.get(field.name, field.name.replace("_", "-"))
        if dataclasses.is_dataclass(value):
            found |= flags_of(value, f"{prefix}{name}." if name else prefix)
        else:
            found[prefix + name] = value
    return found


def with_hyphens(arguments: Sequence[str]) -> list[str]:
    """The arguments with the names of flags as `flags_of` has them: `--run_dir=a_b` is `--run-dir=a_b`."""
    return [name.replace("_", "-") + value for name, value in map(_parted, arguments)]


def _parted(argument: str) -> tuple[str, str]:
    """A flag's name, empty where the argument is none, and the rest."""
    name, equals, value = argument.partition("=")
    return (name, equals + value) if argument.startswith("--") else ("", argument)


def check_names(arguments: Sequence[str], flags: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a flag that is not among the command's, but has a name there that is told."""
    for argument in arguments:
        given, _ = _parted(argument)
        if not given or given in flags:
            continue
        ours = _ours(given[2:], flags)
        if ours is not None:
            raise ValueError(f"{given}: there is no such flag; it is {ours} here (--help-all lists every flag).")


def _ours(given: str, flags: Mapping[str, Any]) -> str | None:
    """The command's flag that another program calls `given`, or that has its last part; None for any other."""
    last = given.rpartition(".")[2]
    for name in (given, last):
        usual = [flag for flag, others in USUAL_NAMES.items() if name in others.split() and flag in flags]
        same = [flag for flag in flags if flag[2:].rpartition(".")[2] == name]
        if len(usual or same) == 1:
            return (usual or same)[0]
    return None


@contextmanager
def naming_flags(command: Any) -> Iterator[None]:
    """A `ValueError` that the library raises inside goes on with the flags in front that its call was made of."""
    try:
        yield
    except ValueError as error:
        named = in_flags(str(error), flags_of(command))
        if named == str(error):
            raise
        raise ValueError(named) from error


def in_flags(message: str, flags: Mapping[str, Any]) -> str:
    """The library's message, `call(name=value): rule`, with the flags that the call and the names stand for in front.

    One that begins with a flag stays, and so does one of another form.
    """
    call = re.match(r"(\w+)\(.*?\): ", message, re.DOTALL)
    if call is None:
        return message
    names = [f"{call[1]}(", *re.findall(r"\b\w+(?==)", call[0])]
    chosen = dict.fromkeys(flag for name in names if (flag := _flag_of(name, flags)) is not None)
    told = " ".join(f"{flag} {flags[flag]}" for flag in chosen)
    return f"{told}: {message}" if told else message


def _flag_of(name: str, flags: Mapping[str, Any]) -> str | None:
    """The flag that sets what the library calls `name`, if the command has it and it is set."""
    hyphens = name.replace("_", "-")
    ours = WORDS.get(name, (f"--{hyphens}", *(flag for flag in flags if flag.endswith(f".{hyphens}"))))
    return next((flag for flag in ours if flags.get(flag) is not None), None)


# Fields that are not called what their flags are.
_NAMED = {"run": "", "machine": "", "published": "model"}

# What the library calls otherwise than the flags: names of calls with a bracket, and of arguments.
WORDS = {
    "FileTokenizer(": ("--text.tokenizer", "--model"),
    "files(": ("--data",),
    "hub(": ("--text.hub",),
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
    "name": (),
    "split": (),
}

# What other programs call our flags.
USUAL_NAMES = {
    "--optimizer.learning-rate": "lr learning-rate max-lr peak-lr",
    "--optimizer.weight-decay": "wd weight-decay",
    "--optimizer.warmup": "warmup-steps warmup-iters num-warmup-steps",
    "--optimizer.rates": "scheduler lr-scheduler lr-scheduler-type lr-schedule optimizer.schedule",
    "--optimizer.clip": "clip grad-clip max-grad-norm gradient-clip-val clip-grad",
    "--optimizer.name": "optimizer optim opt",
    "--steps": "max-steps num-steps train-steps iterations iters max-iters num-iterations train-iters",
    "--batch": "batch-size global-batch-size train-batch-size per-device-train-batch-size bs",
    "--seq": "seq-len seq-length sequence-length max-seq-len max-seq-length context-length block-size max-length",
    "--accumulate": "gradient-accumulation-steps grad-accum accumulation-steps accumulate-grad-batches",
    "--data": "dataset data-dir data-path dataset-path train-data input corpus",
    "--run-dir": "output-dir out-dir output out save-dir checkpoint-dir run logdir",
    "--seed": "random-seed rng-seed",
    "--precision.compute": "dtype precision mixed-precision compute-dtype bf16 fp16",
    "--precision.parameters": "param-dtype params-dtype",
    "--model.embed": "hidden-size d-model dim n-embd embed-dim width",
    "--model.layers": "num-layers n-layer n-layers num-hidden-layers depth",
    "--model.heads": "num-heads n-head n-heads num-attention-heads",
    "--model.kv-heads": "num-kv-heads n-kv-heads num-key-value-heads",
    "--model.mlp": "ffn intermediate-size d-ff ffn-hidden-size",
    "--model.vocab": "vocab-size",
    "--text.tokenizer": "tokenizer tokenizer-path tokenizer-file",
    "--model": "model-name-or-path pretrained checkpoint init-from model-path",
    "--lora.rank": "lora-r lora-rank r",
    "--lora.alpha": "lora-alpha",
    "--execution.remat": "gradient-checkpointing activation-checkpointing checkpointing",
    "--checkpoint-every": "save-steps save-every save-interval checkpoint-interval",
    "--validate-every": "eval-steps eval-every eval-interval",
    "--validation-batches": "eval-iters eval-batches",
    "--metrics.wandb": "wandb-project wandb report-to",
    "--mesh.tensor": "tp tensor-parallel-size tensor-model-parallel-size tensor-parallel",
    "--mesh.pipe": "pp pipeline-parallel-size pipeline-model-parallel-size",
    "--mesh.context": "cp context-parallel-size",
    "--mesh.expert": "ep expert-parallel-size expert-model-parallel-size",
    "--mesh.replica": "dp data-parallel-size",
    "--zero": "zero-stage",
    "--simulate": "devices num-devices",
    "--tokens": "max-tokens max-new-tokens num-tokens n",
    "--dtype": "torch-dtype",
    "--temperature": "temp",
}
