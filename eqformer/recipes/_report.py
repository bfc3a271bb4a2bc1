"""Output of a run for people: progress bars, notes, lines about its steps and losses, and the kernels that it uses."""

import datetime
import functools
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import kernels, nn, training
from .._annotation_checks import name_class
from ..parallel import is_first_process, Plan, replicated_layers, TENSOR
from ._recipe import Recipe
from ._run_directory import RunDirectory


SECONDS_A_LINE = 5.0  # Without a terminal, seconds between two lines of progress.
# A function that is called with the steps done, the metrics as text, and whether the metrics are of this step.
Show = Callable[[int, str, bool], None]


class Screen:
    """Notes and progress on standard output; errors on standard error."""

    def __init__(self, *, silent: bool = False, errors: bool = False):
        """Open the terminal, if there is one.

        Args:
            silent: Whether only errors are shown, for processes other than the first.
            errors: Whether notes go to standard error, so that they do not mix with the output of a script.
        """
        self.silent, self._errors = silent, errors
        self.console = None if silent else _open_terminal(errors)

    def note(self, text: str) -> None:
        """Print a line; if a progress bar is shown, print the line above the bar."""
        if self.console is not None:
            self.console.out(text)
        elif not self.silent:
            _write_line(text, errors=self._errors)

    @contextmanager
    def steps(self, total: int, done: int) -> Iterator[Show]:
        """Show a progress bar over steps or, without a terminal, lines.

        The caller calls the function that is yielded after each step.
        """
        if self.silent:
            yield lambda done, figures, is_new: None
            return
        if self.console is None:
            yield _lines(total)
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", table_column=Column()),  # on a narrow terminal in two lines
        )
        with Progress(*columns, console=self.console, refresh_per_second=4) as progress:
            task = progress.add_task("train", total=total, completed=done, figures="compiling the step ...")
            yield lambda done, figures, is_new: progress.update(task, completed=done, figures=figures)

    @contextmanager
    def bar(self) -> Iterator[Callable[[str, int, int], None]]:
        """Show a progress bar in a terminal, from the first call of the function that is yielded.

        The function's arguments are a title, the amount that is done, and the whole amount (0: unknown). The amounts
        may be bytes, or any other unit.
        """
        if self.console is None:
            yield lambda title, done, total: None
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"))
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True) as progress:
            task = progress.add_task("", total=None, visible=False)
            shown = functools.partial(progress.update, task, visible=True)
            yield lambda title, done, total: shown(description=title, completed=done, total=total or None)

    @contextmanager
    def counting(self) -> Iterator[Callable[[str, int, int], None]]:
        """Show a progress bar as `bar` does or, without a terminal, a line at most every five seconds.

        The time left is estimated from the speed since the first call with an amount above zero. The time before that
        call does not count, because it may be a compilation. The amount of that call does not count either, because an
        earlier command may have done it.
        """
        if self.console is not None:
            with self.bar() as show:
                yield show
            return
        first: dict[str, tuple[float, int]] = {}
        last = time.monotonic()

        def line(title: str, done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            started, first_done = first.setdefault(title, (now, done)) if done else (now, 0)
            if now - last >= SECONDS_A_LINE:
                last, newly_done = now, done - first_done
                has_rate = total and now > started and newly_done > 0
                eta = f", ETA {_format_time((now - started) / newly_done * (total - done))}" if has_rate else ""
                self.note(f"{title}: {done} of {total}{eta}")

        yield line

    @contextmanager
    def working(self, title: str) -> Iterator[None]:
        """Show `title` and the time since the block began: each second in a terminal, else every five seconds."""
        if self.console is not None:
            from rich.progress import Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=self.console, transient=True) as progress:
                progress.add_task(title, total=None)
                yield
            return
        self.note(title)
        ended, started = threading.Event(), time.monotonic()

        def report() -> None:
            while not ended.wait(SECONDS_A_LINE):
                self.note(f"{title}: {_format_time(time.monotonic() - started)} so far")

        reporter = threading.Thread(target=report, daemon=True)
        reporter.start()
        try:
            yield
        finally:
            ended.set()
            reporter.join()


def _format_time(seconds: float) -> str:
    """Return a number of seconds as text, such as `0:01:05`."""
    return str(datetime.timedelta(seconds=int(seconds)))


def _lines(total: int) -> Show:
    """Return a function that prints new metrics at most every five seconds, and after the last step."""
    first: tuple[float, int] | None = None  # The time and the index of the first step, which included compilation.
    last = -math.inf

    def line(done: int, figures: str, is_new: bool) -> None:
        nonlocal first, last
        now = time.monotonic()
        first = first or (now, done)
        since, first_done = first
        if is_new and (now - last >= SECONDS_A_LINE or done == total):
            last = now
            seconds = int((now - since) / (done - first_done) * (total - done)) if done > first_done else None
            time_left = "-:--:--" if seconds is None else datetime.timedelta(seconds=seconds)
            _write_line(f"step {done}/{total}  {figures}  ETA {time_left}")

    return line


def _open_terminal(errors: bool) -> Any:
    """Return a console of the package `rich`; None if there is no terminal, or if the package is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False, soft_wrap=True, stderr=errors)
    return console if console.is_terminal else None


def _write_line(text: str, *, errors: bool = False) -> None:
    file = sys.stderr if errors else sys.stdout
    file.write(f"{text}\n")
    file.flush()


@contextmanager
def print_warnings() -> Iterator[None]:
    """Print each warning that a library raises in the block on its own line; only the first process prints."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught) if caught and is_first_process() else ():
        _write_line(f"warning: {text}", errors=True)


def opening_line(
    name: str, recipe: Recipe, directory: RunDirectory, start: int, parameters: tuple[int, int], data: str
) -> str:
    """Return a line about a run that begins or goes on.

    Args:
        name: The recipe's name.
        recipe: The recipe.
        directory: The run's folder.
        start: The step at which the run goes on.
        parameters: The number of trained parameters, and the number of all parameters.
        data: What the run learns from, such as `7 training tokens, 5 for validation`.
    """
    begin = f"goes on at step {start}" if start else "starts"
    if not start and recipe.from_run is not None:
        begin += f" from {recipe.from_run}" + (f" at step {recipe.from_step}," if recipe.from_step else "")
    trained, total = parameters
    share = "all trained" if trained == total else f"{trained:,} of them trained ({trained / total:.2%})"
    return f"{name}: {name_class(recipe.model)} of {total:,} parameters, {share}, {begin} in {directory.path}; {data}"


def metrics_line(last: Mapping[str, Any]) -> str:
    """Return the latest metrics in one line: losses, learning rate and speed; empty before the first row."""
    if "loss" not in last:
        return ""
    validation = f"  validation {last['validation_loss']:.3f}" if "validation_loss" in last else ""
    validation += f"  margin {last['reward_margin']:.3f}" if "reward_margin" in last else ""
    return f"loss {last['loss']:.3f}{validation}  rate {last['learning_rate']:.2e}  {format_speed(last)}"


def closing_lines(
    recipe: Recipe, directory: RunDirectory, done: int, skipped: int, empty: int, last: Mapping[str, Any]
) -> str:
    """Return four lines (work done, losses, checkpoint, files), or a single line if the run was stopped.

    Args:
        recipe: The recipe.
        directory: The run's folder.
        done: The last step.
        skipped: The number of steps that changed nothing, because a gradient was not finite.
        empty: The number of batches in which no token had a weight.
        last: The latest metrics.
    """
    if done < recipe.steps:
        return f"stopped at step {done} of {recipe.steps}; the checkpoint is saved, and the same command goes on"
    tokens = done * recipe.batch * recipe.seq
    without = f", {empty} batches whose weights were all 0" if empty else ""
    return "\n".join(
        (
            f"trained    {done} steps, {tokens:,} tokens, {skipped} steps skipped{without}; {format_speed(last)}",
            _closing_loss_line(recipe, last),
            f"checkpoint {directory.checkpoints / str(done)}",
            f"look at    {', '.join(map(str, directory.files_to_look_at()))}",
        )
    )


def _closing_loss_line(recipe: Recipe, last: Mapping[str, Any]) -> str:
    """Return the line of the last losses, in training and validation."""
    words = {
        "contrastive": ("a group", "of positives found"),
        "mlm": ("a masked token", "of masked tokens right"),
        "classification": ("a text", "of texts right"),
        "block-diffusion": ("a token at most", "of masked tokens right"),
    }
    unit, right = words.get(recipe.loss, ("a token", "of tokens right"))
    bits = f"{last['validation_bits_per_byte']:.3f} bits a byte, " if "validation_bits_per_byte" in last else ""
    return (
        f"loss       {last['loss']:.3f} nats {unit} in training; validation {last['validation_loss']:.3f} nats, "
        f"{bits}{last['validation_accuracy']:.0%} {right}"
    )


def format_speed(rate: Mapping[str, Any]) -> str:
    """Return a text with the tokens a second and the MFU, the share of the measured peak."""
    return f"{rate['tokens_per_second']:,.0f} tokens/s  MFU {rate['mfu']:.0%}"


# Words in the reason why a kernel cannot be used, and the flag that removes this reason.
_FLAGS = {
    "computes in": "--precision.compute bfloat16",
    "tokens, not": "another --seq",
    "documents a row": "--text.packing windows",
}
DECODING = (
    "attention to a cache: computed in blocks; if each row decodes one token and the cache has 16 bits, GPUs and TPUs "
    "use a kernel that reads the cache once (no flag chooses between the two)"
)


def local_platform() -> str:
    """Return the compiler's name for the platform of JAX's devices: `cpu`, `cuda` or `tpu`."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def has_kernels(platform: str) -> bool:
    """Return whether any operation has a kernel for the platform."""
    return platform in kernels.ATTENTION.platforms


def training_lines(recipe: Recipe, model: nn.LanguageModel, platform: str, chip: str) -> list[str]:
    """Return a line about the kernel of each operation of a training step, and a line about products in 8 bits if any.

    Only the platforms `cuda` and `tpu` have lines about kernels. `chip` is the accelerator's name, in `planning` or in
    JAX.
    """
    lines = _fp8_lines(recipe, model, chip)
    if not has_kernels(platform):
        return lines
    batch = recipe.batch_shapes()
    tokens = eqx.filter_eval_shape(training.batch_tokens, batch)
    explanations = kernels.explain(model.encode, batch.ids, tokens, platform=platform)
    kernel_lines = [_kernel_line(explanation, recipe) for explanation in explanations]
    return [*(kernel_lines or ["attention: the model has none"]), *lines]


def decode_lines(recipe: Recipe, model: nn.LanguageModel, platform: str, cache_dtype: str | None) -> list[str]:
    """Return a line about the kernel of each operation of a decode step on `cuda` or `tpu`, except cache writes."""
    if not has_kernels(platform):
        return []
    compute, rows = recipe.precision.compute, recipe.batch
    computed = eqx.filter_eval_shape(nn.Precision(compute, compute).apply, model)
    integers = jax.ShapeDtypeStruct((rows, 1), jnp.int32)

    def decode(model: nn.LanguageModel, ids: jax.Array, positions: jax.Array) -> jax.Array:
        return model.encode(ids, nn.Tokens(positions), model.init_cache(rows, recipe.seq, cache_dtype))[0]

    explanations = kernels.explain(decode, computed, integers, integers, platform=platform)
    return [str(explanation) for explanation in explanations if explanation.operation != "cache write"]


def _kernel_line(explanation: kernels.Explanation, recipe: Recipe) -> str:
    if explanation.operation == "attention" and recipe.mesh.context > 1 and recipe.plan.context_method == "gather":
        reason = "keys are gathered over --mesh.context (--context-method ring or heads changes that)"
        return f"attention: BlockwiseAttention; not a kernel: {reason}"
    if explanation.operation == "attention" and recipe.execution.core != "auto":
        return f"{explanation} (--execution.core {recipe.execution.core} asks for it)"
    refusals = tuple((name, _with_flag(reason)) for name, reason in explanation.refusals)
    return str(explanation._replace(refusals=refusals))


def _with_flag(reason: str) -> str:
    flag = next((flag for words, flag in _FLAGS.items() if words in reason), "")
    return f"{reason} ({flag} changes that)" if flag else reason


def _fp8_lines(recipe: Recipe, model: nn.LanguageModel, chip: str) -> list[str]:
    """Return a line that says which matrix products the chip computes in 8 bits, if the recipe asks for 8 bits."""
    compute = recipe.precision.compute
    if recipe.precision.products != "fp8":
        return []
    if chip == "cpu":
        return [f"products: in 8 bits; a CPU converts 8-bit numbers to a wider dtype, which is slower than {compute}"]
    experts = nn.modules(model, nn.Experts)
    has_fp8_experts = bool(nn.modules(experts, nn.Fp8Linear))
    if not has_fp8_experts or kernels.has_fp8_grouped_matmul(chip):
        return ["products: in 8 bits, in experts too" if has_fp8_experts else "products: in 8 bits"]
    return [f"products: in 8 bits, but the kernels for experts on {chip} compute in {compute}"]


def replicated_lines(plan: Plan, model: nn.LanguageModel) -> list[str]:
    """Return a line about the layers that each device of the tensor axis computes in full, if there are any."""
    layers = replicated_layers(model) if plan.size(TENSOR) > 1 else []
    if not layers:
        return []
    paths = ", ".join(path for path, _ in layers)
    return [f"layers that every device of {TENSOR} computes in full, because no dim of them is split: {paths}"]
