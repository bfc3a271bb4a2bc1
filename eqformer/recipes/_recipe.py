"""Recipe of a run: all settings of a training run, and the names of its fields as flags."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax

from .._annotation_checks import violated_annotation
from .._shapes import Batch
from ..data import Packing
from ..models import Classifier, ModelConfig
from ..nn import Execution, Precision
from ..parallel import ParallelConfig
from ..planning import batch_shapes, labelled_text_shapes, preference_shapes, text_group_shapes
from ..training import Divergence, Lora, noise_blocks, Optimization, VectorSimilarity


def _set_paths(part: Any, *names: str) -> None:
    """Turn the strings in these fields into paths, so that a recipe equals its saved copy."""
    for name in names:
        if isinstance(value := getattr(part, name), str):
            object.__setattr__(part, name, Path(value))


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents, their tokens, and the rows into which tokens are packed."""

    hub: str | None = None
    """A Hugging Face dataset by name, in place of --data (extra `data`; needs the network)."""
    mix: tuple[str, ...] = ()
    """Several texts, each as SOURCE=WEIGHT; a source is a file, a folder or hub:DATASET; in place of --data."""
    tokenizer: Path | str | None = None
    """A tokenizer.json; the model gets its vocabulary. By default tokens are bytes: 256 ids, and 0 ends a text."""
    round_vocab: int = 1
    """The model's vocabulary is rounded up to a multiple of this number: 128 suits tensor parallelism."""
    end_of_text: str | None = None
    """The tokenizer's token that ends a document, if the file does not name this token."""
    field: str = "text"
    """The field of .jsonl and .parquet rows that holds the text."""
    packing: Packing = "windows"
    """Rows are windows of the text, or packed documents that do not attend to each other; --loss may set other rows."""
    validation: float = 0.05
    """The share of documents that is kept for validation; a hash of a document's name decides."""

    def __post_init__(self):
        _set_paths(self, "tokenizer")


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Which metrics are written, and where they are written in addition to metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard events into the run directory (extra `metrics`)."""
    wandb: str | None = None
    """The Weights & Biases project to log to (extra `metrics`)."""
    gradient_norms: bool = False
    """Write the norm of each module's gradient too."""


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The loss of a model that learns from --teacher."""

    divergence: Divergence = "forward-kl"
    """The divergence between the teacher's and the model's probabilities."""
    temperature: float = 1.0
    """The number by which the logits of both models are divided."""
    weight: float = 0.5
    """The share of the divergence in the loss; the rest is the next-token loss."""
    beta: float = 0.5
    """The share of the teacher in --distillation.divergence jsd."""
    top: int | None = None
    """Learn from this many top ids of the teacher, stored once with the tokens; None: from all ids, in each step."""


@dataclasses.dataclass(frozen=True)
class Contrastive:
    """The loss of a text encoder that learns from groups of texts, see `training.contrastive_loss`."""

    temperature: float = 0.05
    """The number by which similarities are divided."""
    pooling: Literal["mean", "cls", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"] | None = None
    """How the vectors of tokens become a text's vector; by default as the published model states, or the mean."""
    similarity: VectorSimilarity = "cosine"
    """The similarity of two vectors."""
    symmetric: bool = False
    """Also learn to find the anchor of a positive among all anchors, as in CLIP."""
    dims: tuple[int, ...] = ()
    """Learn from vectors that are cut to these widths (Matryoshka); the full width counts only if it is named."""
    group: int = 2
    """The number of texts in a row of --data: an anchor, its positive and its hard negatives."""


@dataclasses.dataclass(frozen=True)
class Masking:
    """The tokens that are masked, and that a text encoder learns to restore, see `training.mask_tokens`."""

    share: float = 0.3
    """The share of the tokens that the model learns to restore; 0.3 as in ModernBERT."""
    token: str | None = None
    """The tokenizer's mask token; by default [MASK] or <mask>, and the byte 1 if tokens are bytes."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """The classifier of --loss classification, see `training.classification_loss`."""

    labels: tuple[str, ...] = ()
    """The names of the labels; by default the published classifier's labels, or the labels of the rows, in order."""
    pooling: Literal["mean", "cls", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"] | None = None
    """How the vectors of tokens become a text's vector; by default as in the family's published classifiers."""


@dataclasses.dataclass(frozen=True)
class Spikes:
    """Loss spikes: the run goes back to its last checkpoint and skips the batches since that checkpoint (PaLM)."""

    factor: float | None = None
    """A loss above this many times the median of the previous losses is a spike; None: spikes are not detected."""
    window: int = 50
    """The number of previous losses whose median is compared with the loss."""
    max_rollbacks: int = 3
    """How often a run goes back before it ends with an error."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The mesh of devices, with an axis for each kind of parallelism; the product of all sizes is the device count."""

    replica: int = 1
    """Data parallelism: the batch is split, and the state is replicated."""
    fsdp: int = 1
    """The batch is split; so are the parts of the training state that --zero names."""
    expert: int = 1
    """The batch is split, and so are the experts of mixtures."""
    pipe: int = 1
    """Layers are split into a pipeline's stages."""
    context: int = 1
    """Each row's tokens are split."""
    tensor: int = 1
    """Heads, features and the vocabulary are split."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model, its text, and how it is trained; `train` runs a recipe.

    Errors name a field by its flag in the commands: `--steps` is the field `steps`, and `--optimizer.name` is the field
    `name` of `optimizer`. There are two exceptions: `--model` is the field `published`, and the fields of `plan` have
    no prefix, as in `--zero`.
    """

    model: ModelConfig
    """The model's family and its hyperparameters."""
    published: Path | str | None = None
    """A published model to continue to train: a folder with its tokenizer, a GGUF file, or a name of the hub."""
    weights: Literal["decoded", "quantized"] = "decoded"
    """Decode the quantized weights of --model, or keep them quantized, which saves memory and needs --lora.rank."""
    from_run: Path | str | None = None
    """A run from whose weights this run starts; that run's recipe applies too, unless --recipe names another."""
    from_step: int | None = None
    """The step of that run's checkpoint; by default its latest checkpoint."""
    from_optimizer: bool = False
    """Start from the optimizer's state too, not only from the weights."""
    steps: int = 800
    """How many optimizer steps the run takes."""
    prolong: Literal["refuse", "hold", "rewarm", "reshape"] = "refuse"
    """If more --steps make the rate jump: refuse, hold the last rate, rewarm (a new warmup), or reshape (allow it)."""
    seed: int = 0
    """The seed of weights, order, dropout and samples."""
    data: Path | str | None = None
    """Text or chats (docs/data.md): a file, a folder or a dataset of the hub. Python's standard library by default."""
    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """The tokens of chats that the model learns: the assistant's replies, replies after the last question, or all."""
    loss: Literal[
        "next-token", "dpo", "ipo", "orpo", "kto", "contrastive", "mlm", "classification", "block-diffusion"
    ] = "next-token"
    """Learn the next token, preferences (dpo, ipo, orpo, kto), vectors of texts, masked tokens, or labels of texts."""
    beta: float = 0.1
    """How strongly DPO, IPO and KTO hold the model to the reference; for ORPO the weight of the odds ratio."""
    desirable_weight: float = 1.0
    """The weight of KTO's completions with the label true."""
    undesirable_weight: float = 1.0
    """The weight of KTO's completions with the label false."""
    reference: Literal["model", "stored"] = "model"
    """Keep a copy of the first weights in memory as the reference, or store the reference's nats with the tokens."""
    teacher: Path | str | None = None
    """A published model with the same tokens, from which the model learns too: a folder, a GGUF file or a hub name."""
    distillation: Distillation = Distillation()
    """The loss of a model that learns from --teacher."""
    contrastive: Contrastive = Contrastive()
    """The loss of --loss contrastive."""
    masking: Masking = Masking()
    """The masked tokens of --loss mlm; the mask token of --loss block-diffusion."""
    classification: Labels = Labels()
    """The classifier of --loss classification."""
    seq: int = 256
    """The number of tokens in a row."""
    batch: int = 16
    """The number of rows in a step; a pair of completions is two rows, and each text of a group is a row."""
    text: Text = Text()
    """Tokenizer, packing and validation share of the text."""
    optimizer: Optimization = Optimization()
    """Optimizer and learning rates."""
    lora: Lora = Lora()
    """Low-rank changes, which are trained instead of the weights."""
    precision: Precision = Precision()
    """Dtypes of parameters and of computation."""
    execution: Execution = Execution()
    """Rematerialisation, and the implementation of attention."""
    metrics: Metrics = Metrics()
    """Further metrics, and further places to which metrics are written."""
    spikes: Spikes = Spikes()
    """Loss spikes, after which the run goes back to its last checkpoint."""
    profile: str | None = None
    """Write a trace of these steps into the run directory's profile/, for TensorBoard, XProf or Perfetto."""
    debug_nans: bool = False
    """End at the first loss or gradient that is not finite, and name the module and layer that cause it."""
    log_every: int = 10
    """Steps between rows of metrics.jsonl."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    keep: int = 2
    """How many checkpoints are kept."""
    validate_every: int = 100
    """Steps between validations."""
    validation_batches: int = 16
    """Batches of a validation, spread evenly over the validation text."""
    evaluate_every: int = 0
    """Steps between evaluations on --evaluate-text and --evaluate-tasks; also before the first step; 0 for none."""
    evaluate_text: tuple[str, ...] = ()
    """Files, folders or datasets of the hub; each of their tokens is scored once, as in evaluate.py."""
    evaluate_tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness (extra `eval`)."""
    evaluate_limit: int | None = None
    """How many documents of each task are evaluated; all by default."""
    evaluate_chat: bool = False
    """Whether tasks use the model's chat template."""
    evaluate_include_path: Path | str | None = None
    """A folder with configurations of further tasks."""
    sample_every: int = 200
    """Steps between text samples of the model; 0: no samples, not even at the end."""
    prompt: str = "def "
    """The prompt of text samples."""
    mesh: Mesh = Mesh()
    """The sizes of the mesh's axes."""
    plan: ParallelConfig = ParallelConfig(zero=1)
    """How the run is split over the mesh."""

    def __post_init__(self):
        _set_paths(self, "published", "from_run", "data", "teacher", "evaluate_include_path")

    @property
    def has_preferences(self) -> bool:
        """Whether the loss learns from preferences: from pairs of completions, or from labelled completions."""
        return self.loss in ("dpo", "ipo", "orpo", "kto")

    @property
    def writes_text(self) -> bool:
        """Whether the trained model writes text; text encoders and classifiers write none."""
        return self.loss not in ("contrastive", "mlm", "classification")

    @property
    def has_text_rows(self) -> bool:
        """Whether each row is a whole text: a text of a group, or a text with a label."""
        return self.loss in ("contrastive", "classification")

    @property
    def classifier(self) -> Classifier | None:
        """The sizes of the model's classifier; None for a model without one."""
        options = self.classification
        return Classifier(len(options.labels), pooling=options.pooling) if self.loss == "classification" else None

    @property
    def compares_pairs(self) -> bool:
        """Whether the rows are pairs of completions: a chosen and a rejected completion of one prompt."""
        return self.loss in ("dpo", "ipo", "orpo")

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return self.loss in ("dpo", "ipo", "kto")

    @property
    def has_noisy_copies(self) -> bool:
        """Whether the rows of a batch have noisy copies of their tokens."""
        return self.loss == "block-diffusion"

    def batch_shapes(self) -> Batch:
        """Return the shapes of a batch."""
        if self.has_preferences:
            has_labels = not self.compares_pairs
            return preference_shapes(self.batch, self.seq, has_reference=self.has_reference, has_labels=has_labels)
        if self.loss == "contrastive":
            return text_group_shapes(self.batch, self.seq, group=self.contrastive.group)
        if self.loss == "classification":
            return labelled_text_shapes(self.batch, self.seq)
        shapes = batch_shapes(self.batch, self.seq, packed=self.text.packing != "windows")
        if self.has_noisy_copies:  # The shapes of these rows do not depend on the block.
            noise = functools.partial(noise_blocks, mask_id=0, block=1)
            return eqx.filter_eval_shape(noise, shapes, jax.random.key(0))
        return shapes


# Fields that may change when a run is resumed: the number of steps, what is reported and how often, and where and how
# the numbers are computed. These fields do not change the data, the loss and the optimizer of earlier steps.
CHANGEABLE = frozenset(
    ("steps", "prolong", "log_every", "checkpoint_every", "keep", "validate_every", "validation_batches")
    + ("evaluate_every", "evaluate_text", "evaluate_tasks", "evaluate_limit", "evaluate_chat", "evaluate_include_path")
    + ("sample_every", "prompt", "metrics", "execution", "profile", "debug_nans", "spikes")
    # The numbers of a step are the same on every mesh and with every plan. Mixtures of experts are an exception: their
    # balance losses are computed for each microbatch, and therefore depend a little on the number of microbatches.
    + ("mesh", "plan")
)


def flags_of(command: Any) -> dict[str, Any]:
    """Return every flag of a command with its value; `command` is a dataclass, or its class for the defaults."""
    return {flag: value for flag, value, _, _ in fields_of(command)}


def fields_of(command: Any, prefix: str = "--") -> Iterator[tuple[str, Any, type, str]]:
    """Yield every flag of a command with its value, and the dataclass and the name of its field."""
    for flag, value, kind, name in _fields_and_parts(command, prefix):
        if not dataclasses.is_dataclass(value):
            yield flag, value, kind, name


def _fields_and_parts(command: Any, prefix: str) -> Iterator[tuple[str, Any, type, str]]:
    """Yield the same as `fields_of`, and also each field that holds a dataclass, before that dataclass's fields."""
    for field in dataclasses.fields(command):
        value = getattr(command, field.name, None)
        name = _FLAG_NAMES.get(field.name, field.name.replace("_", "-"))
        yield prefix + name, value, type(command), field.name
        if dataclasses.is_dataclass(value):
            yield from _fields_and_parts(value, f"{prefix}{name}." if name else prefix)


def check_types(command: Any) -> None:
    """Raise a `ValueError`, which names the flag, for a field whose value does not have the annotated type.

    `command` is a recipe, or a dataclass that holds a recipe. Fields of the model are checked when the model is built.
    """
    for flag, value, kind, name in _fields_and_parts(command, "--"):
        if flag.startswith("--model."):
            continue
        if (expected := violated_annotation(kind, name, value)) is not None:
            call = f"{flag} {value!r:.100}".removeprefix("-- ")  # Fields such as `plan` have no flag.
            raise ValueError(f"{call}: {kind.__name__}.{name} must be of {expected}; give such a value.")


def format_flag(flag: str, value: Any) -> str:
    """Return a flag and its value as a user types them; for a boolean only the flag, as `--name` or `--no-name`."""
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"


@contextmanager
def name_flags_in_errors(command: Any) -> Iterator[None]:
    """Put flags in front of a `ValueError` that the block raises, as `add_flags` does."""
    try:
        yield
    except ValueError as error:
        message = add_flags(str(error), flags_of(command))
        if message == str(error):
            raise
        raise ValueError(message) from error


def add_flags(message: str, flags: Mapping[str, Any]) -> str:
    """Put the flags that set a call's arguments in front of the library's message, `call(name=value): rule`.

    A message of any other form, such as one that begins with a flag, is returned unchanged.
    """
    call = re.match(r"(\w+)\(.*?\): ", message, re.DOTALL)
    if call is None:
        return message
    arguments = ["", *re.findall(r"\b\w+(?==)", call[0])]
    chosen = dict.fromkeys(flag for name in arguments if (flag := _flag_of(call[1], name, flags)) is not None)
    front = " ".join(f"{flag} {_format_value(flags[flag])}" for flag in chosen)
    return f"{front}: {message}" if front else message


def _format_value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _flag_of(call: str, argument: str, flags: Mapping[str, Any]) -> str | None:
    """Return the flag that sets an argument of the library's call; the argument "" stands for the call itself.

    The result is None if the command has no such flag, or the flag has no value.
    """
    hyphens = argument.replace("_", "-")
    usual_flags = (f"--{hyphens}", *(flag for flag in flags if flag.endswith(f".{hyphens}")))
    candidates = FLAGS_OF_CALLS.get(f"{call}({argument}", FLAGS_OF_CALLS.get(argument, usual_flags))
    return next((flag for flag in candidates if flags.get(flag) not in (None, ())), None)


# Fields whose flags have another name; fields of a dataclass with the name "" have flags without a prefix.
_FLAG_NAMES = {"run": "", "machine": "", "plan": "", "rewards": "", "published": "model"}

# Flags of the library's calls and arguments, if the flag has another name than the argument. A key `call(` is a call,
# `call(argument` is an argument of one call, and `argument` is an argument of any call.
FLAGS_OF_CALLS = {
    "FileTokenizer(": ("--text.tokenizer", "--model"),
    "files(": ("--data", "--text.mix"),
    "hub(": ("--text.hub", "--text.mix"),
    "parse_bytes(": ("--memory",),
    "check_next_token(": ("--model", "--recipe"),
    "distillation_loss(beta": ("--distillation.beta",),
    "contrastive_loss(temperature": ("--contrastive.temperature",),
    "contrastive_loss(dims": ("--contrastive.dims",),
    "text_groups(": ("--contrastive.group",),
    "mask_tokens(mlm_probability": ("--masking.share",),
    "load(": ("--model",),
    "optimizer(": ("--optimizer.name",),
    "rates(": ("--optimizer.rates",),
    "read_prompts(": ("--data",),
    "Rollouts(rows": ("--data",),
    "preset(": ("--recipe",),
    "policy_loss(": ("--policy-loss",),
    "policy_loss(beta": ("--kl-weight",),
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
