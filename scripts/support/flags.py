"""Flags of a command line, and their names in other programs."""

from collections.abc import Mapping, Sequence
from typing import Any


def parse_words(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of each flag on a command line; if a flag is given twice, the last words count.

    Underscores in flags are replaced by hyphens.
    """
    words_by_flag: dict[str, list[str]] = {}
    words: list[str] = []
    for name, value in map(_split_equals, arguments):
        if name:
            words = [value[1:]] if value else []  # Further words of the flag are appended to this list.
            words_by_flag[name.replace("_", "-")] = words
        else:
            words.append(value)
    return words_by_flag


def _split_equals(argument: str) -> tuple[str, str]:
    """Split an argument into a flag's name and its value with "="; the name is empty if the argument is not a flag."""
    name, equals, value = argument.partition("=")
    return (name, equals + value) if argument.startswith("--") else ("", argument)


def check_names(arguments: Sequence[str], flags: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a flag of another program; the error names this command's flag."""
    for flag in parse_words(arguments):
        if flag not in flags and (known := _find_flag(flag[2:], flags)) is not None:
            raise ValueError(f"{flag}: there is no such flag; use {known} instead (--help-all lists every flag).")


def _find_flag(name: str, flags: Mapping[str, Any]) -> str | None:
    """Return the command's flag that other programs call `name`, or whose last part is `name`; None if there is none.

    If `name` begins with `no-`, as in other programs, the negative form of the flag is returned.
    """
    if name.startswith("no-"):
        group, dot, last = (_find_flag(name[3:], flags) or "").rpartition(".")
        return f"{group}{dot}no-{last}" if dot else None
    last = name.rpartition(".")[2]
    for candidate in (name, last):
        matches = [flag for flag, names in USUAL_NAMES.items() if candidate in names.split() and flag in flags]
        if not matches:
            matches = [flag for flag in flags if flag[2:].rpartition(".")[2] == candidate]
        if len(matches) == 1:
            return matches[0]
    return None


# Names of eqformer's flags in other programs.
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
    "--model.layers": "num-layers n-layer n-layers num-hidden-layers base-num-decoder-layers",
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
    "--tokens": "max-tokens max-new-tokens max-completion-length num-tokens n",
    "--group": "num-generations rollout-n",
    "--reward": "reward-funcs reward-fn",
    "--policy-loss": "loss-type",
    "--kl-weight": "kl-coef kl-loss-coef",
    "--clip-low": "epsilon cliprange-low",
    "--clip-high": "epsilon-high cliprange-high",
    "--dtype": "torch-dtype",
    "--temperature": "temp",
}
