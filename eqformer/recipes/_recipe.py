"""Recipe of a run: all settings of a training run, and the names of its fields as flags."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from .._annotation_checks import violated_annotation
from .._shapes import Batch
from ..data import Packing
from ..models import Classifier, ModelConfig
from ..nn import Execution, Precision
from ..parallel import ParallelConfig
from ..planning import batch_shapes, labelled_text_shapes, preference_shapes, text_group_shapes
from ..training import Divergence, Lora, Optimization, VectorSimilarity


def _set_paths(part: Any, *names: str) -> None:
    """Turn strings in fields of paths into paths, so that a recipe equals its saved copy."""
    for name in names:
        if isinstance(value := getattr(part, name), str):
            object.__setattr__(part, name, Path(value))


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents, their tokens, and the rows that tokens are packed into."""

    hub: str | None = None
    """A Hugging Face dataset by name, in place of --data (extra `data`; needs the network)."""
    mix: tuple[str, ...] = ()
    """Several texts with their shares of rows; SOURCE is a file, a folder or hub:DATASET; in place of --data."""
    tokenizer: Path | str | None = None
    """A tokenizer.json; the model gets its vocabulary. Bytes by default: 256 ids, of which 0 ends a text."""
    round_vocab: int = 1
    """The model's vocabulary is the tokenizer's, rounded up to a multiple of this: 128 suits tensor parallelism."""
    end_of_text: str | None = None
    """The tokenizer's token that ends a document, if the file does not say which it is."""
    field: str = "text"
    """The field of .jsonl and .parquet rows that holds the text."""
    packing: Packing = "windows"
    """Rows are windows of the text, packed documents that do not attend to each other, or preferences (by --loss)."""
    validation: float = 0.05
    """The share of documents that is kept for validation, chosen by a hash of their names."""

    def __post_init__(self):
        _set_paths(self, "tokenizer")


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Which metrics are written, and where beside metrics.jsonl."""

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
    """The divergence of the model's probabilities from the teacher's."""
    temperature: float = 1.0
    """Divisor of the logits of both models."""
    weight: float = 0.5
    """The share of the divergence in the loss; the rest is the next-token loss."""
    beta: float = 0.5
    """The share of the teacher in --distillation.divergence jsd."""
    top: int | None = None
    """Number of the teacher's top ids to learn from, stored once with the tokens; None: all ids, step by step."""


@dataclasses.dataclass(frozen=True)
class Contrastive:
    """The loss of a text encoder that learns from groups of texts, see `training.contrastive_loss`."""

    temperature: float = 0.05
    """Divisor of the similarities."""
    pooling: Literal["mean", "cls", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"] | None = None
    """How a text's vector is made of its tokens' vectors; by default as the published model states, or the mean."""
    similarity: VectorSimilarity = "cosine"
    """The similarity of two vectors."""
    symmetric: bool = False
    """Also tell positives from other anchors, as in CLIP."""
    dims: tuple[int, ...] = ()
    """Also learn from vectors cut to these widths (Matryoshka)."""
    group: int = 2
    """Texts of a row of --data: an anchor, its positive and its hard negatives."""


@dataclasses.dataclass(frozen=True)
class Masking:
    """The masked tokens of a text encoder that learns to restore them, see `training.mask_tokens`."""

    share: float = 0.3
    """The share of the tokens that are learned; ModernBERT's."""
    token: str | None = None
    """The tokenizer's mask token; [MASK] or <mask> by default, and the byte 1 where tokens are bytes."""


@dataclasses.dataclass(frozen=True)
class Labels:
    """The classifier of --loss classification, see `training.classification_loss`."""

    labels: tuple[str, ...] = ()
    """The names of the labels; by default those of the published classifier, or of the rows, in order."""
    pooling: Literal["mean", "cls", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"] | None = None
    """How a text's vector is made of its tokens'; by default as in the family's published classifiers."""


@dataclasses.dataclass(frozen=True)
class Spikes:
    """Spikes of the loss: the run goes back to its last checkpoint and skips the batches since, as in PaLM."""

    factor: float | None = None
    """A spike is a loss above this many times the median of the steps before it; None watches for none."""
    window: int = 50
    """Number of steps of that median."""
    max_rollbacks: int = 3
    """How often a run goes back before it ends with an error."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The mesh of devices, with an axis for each way to split; the sizes multiply to the number of devices."""

    replica: int = 1
    """Data parallelism: the batch is split, and the state is replicated."""
    fsdp: int = 1
    """The batch and the state of --zero are split."""
    expert: int = 1
    """The batch is split, and so are the experts of a mixture."""
    pipe: int = 1
    """Layers are split into a pipeline's stages."""
    context: int = 1
    """Each row's tokens are split."""
    tensor: int = 1
    """Heads, features and the vocabulary are split."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model, its text, and how it is trained; `train` runs it.

    Errors name a field as the flag of the commands that sets it: `--steps` is the field `steps`, `--optimizer.name` the
    field `name` of `optimizer`, `--model` is `published`, and fields of `plan` have no prefix, as `--zero`.
    """

    model: ModelConfig
    """The model's family and its hyperparameters."""
    published: Path | str | None = None
    """A published model to train on: a folder with its tokenizer, a file of GGUF, or a name of the hub."""
    weights: Literal["decoded", "quantized"] = "decoded"
    """Whether quantized weights of --model are decoded, or stay as they are, in less memory, beside --lora.rank."""
    from_run: Path | str | None = None
    """A run whose weights this run starts from; its recipe applies, too, unless --recipe names another."""
    from_step: int | None = None
    """The checkpoint of that run; the latest by default."""
    from_optimizer: bool = False
    """Start from the optimizer's state too, not only from the weights."""
    steps: int = 800
    """How many optimizer steps the run takes."""
    prolong: Literal["refuse", "hold", "rewarm", "reshape"] = "refuse"
    """If more --steps make the rate jump: refuse, hold the last rate, rewarm (warm up again), or reshape (jump)."""
    seed: int = 0
    """Decides weights, order, dropout and samples."""
    data: Path | str | None = None
    """Text or chats (docs/data.md): a file, a folder or a dataset of the hub. Python's standard library by default."""
    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """The learned tokens of chats: the assistant's replies, replies after the user's last message, or all."""
    loss: Literal["next-token", "dpo", "ipo", "orpo", "kto", "contrastive", "mlm", "classification"] = "next-token"
    """Learn the next token; preferences (DPO, IPO, ORPO, KTO); vectors of texts, masked tokens, or labels of texts."""
    beta: float = 0.1
    """How strongly DPO, IPO and KTO hold the model to the reference; for ORPO the weight of the odds ratio."""
    desirable_weight: float = 1.0
    """The weight of KTO's completions with the label true."""
    undesirable_weight: float = 1.0
    """The weight of KTO's completions with the label false."""
    reference: Literal["model", "stored"] = "model"
    """The reference: a copy of the first weights in memory, or its nats of all rows, stored once with the tokens."""
    teacher: Path | str | None = None
    """A published model with the same tokens to learn from beside the text: a folder, a GGUF file or a hub name."""
    distillation: Distillation = Distillation()
    """The loss of a model that learns from --teacher."""
    contrastive: Contrastive = Contrastive()
    """The loss of --loss contrastive."""
    masking: Masking = Masking()
    """The masked tokens of --loss mlm."""
    classification: Labels = Labels()
    """The classifier of --loss classification."""
    seq: int = 256
    """Tokens a row."""
    batch: int = 16
    """Rows a step; a pair is two rows, and a group of texts as many as it has texts."""
    text: Text = Text()
    """Tokenizer, packing and validation share of the text."""
    optimizer: Optimization = Optimization()
    """Optimizer and learning rates."""
    lora: Lora = Lora()
    """Low-rank changes, which are trained in place of all weights."""
    precision: Precision = Precision()
    """Dtypes of parameters and of computation."""
    execution: Execution = Execution()
    """Rematerialisation, and the implementation of attention."""
    metrics: Metrics = Metrics()
    """Further metrics, and further places where they are written."""
    spikes: Spikes = Spikes()
    """Watch for spikes of the loss."""
    profile: str | None = None
    """Write a trace of these steps into the run directory's profile/, for TensorBoard, XProf or Perfetto."""
    debug_nans: bool = False
    """End at the first loss or gradient that is not finite, and name the module and layer that it comes from."""
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
    """Files, folders or datasets of the hub, of which each token is scored once, as evaluate.py does."""
    evaluate_tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness (extra `eval`)."""
    evaluate_limit: int | None = None
    """How many documents of each of these tasks are evaluated; all by default."""
    evaluate_chat: bool = False
    """Whether these tasks use the model's chat template."""
    evaluate_include_path: Path | str | None = None
    """A folder with configurations of further tasks."""
    sample_every: int = 200
    """Steps between text samples of the model; 0 writes none, also at the end."""
    prompt: str = "def "
    """The prompt of those samples."""
    mesh: Mesh = Mesh()
    """The sizes of the mesh's axes."""
    plan: ParallelConfig = ParallelConfig(zero=1)
    """How the run is split over the mesh."""

    def __post_init__(self):
        _set_paths(self, "published", "from_run", "data", "teacher", "evaluate_include_path")

    @property
    def has_preferences(self) -> bool:
        """Whether the loss learns from preferences, that is from pairs of completions or from labelled ones."""
        return self.loss in ("dpo", "ipo", "orpo", "kto")

    @property
    def writes_text(self) -> bool:
        """Whether the trained model writes text; text encoders and classifiers write none."""
        return self.loss not in ("contrastive", "mlm", "classification")

    @property
    def has_text_rows(self) -> bool:
        """Whether the rows are whole texts of a form of their own: groups of texts, or texts with labels."""
        return self.loss in ("contrastive", "classification")

    @property
    def classifier(self) -> Classifier | None:
        """The sizes of the model's classifier; None for a model without one."""
        options = self.classification
        return Classifier(len(options.labels), pooling=options.pooling) if self.loss == "classification" else None

    @property
    def compares_pairs(self) -> bool:
        """Whether the rows are pairs of completions, of which the loss learns to prefer one."""
        return self.loss in ("dpo", "ipo", "orpo")

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return self.loss in ("dpo", "ipo", "kto")

    def batch_shapes(self) -> Batch:
        """Return the shapes of a batch."""
        if self.has_preferences:
            has_labels = not self.compares_pairs
            return preference_shapes(self.batch, self.seq, has_reference=self.has_reference, has_labels=has_labels)
        if self.loss == "contrastive":
            return text_group_shapes(self.batch, self.seq, group=self.contrastive.group)
        if self.loss == "classification":
            return labelled_text_shapes(self.batch, self.seq)
        return batch_shapes(self.batch, self.seq, packed=self.text.packing != "windows")


# Fields that may change when a run is resumed: how long it trains, what it reports and how often, and where and how its
# numbers are computed. They do not decide which data, loss and optimizer the earlier steps used.
CHANGEABLE = frozenset(
    ("steps", "prolong", "log_every", "checkpoint_every", "keep", "validate_every", "validation_batches")
    + ("evaluate_every", "evaluate_text", "evaluate_tasks", "evaluate_limit", "evaluate_chat", "evaluate_include_path")
    + ("sample_every", "prompt", "metrics", "execution", "profile", "debug_nans", "spikes")
    # The numbers of a step are the same on every mesh and with every plan, but for mixtures of experts: their balance
    # losses are computed for each microbatch, so that they differ a little with the number of microbatches.
    + ("mesh", "plan")
)


def flags_of(command: Any) -> dict[str, Any]:
    """Return every flag of a command with its value; `command` is a dataclass, or its class for the defaults."""
    return {flag: value for flag, value, _, _ in fields_of(command)}


def fields_of(command: Any, prefix: str = "--") -> Iterator[tuple[str, Any, type, str]]:
    """Yield every flag of a command with its value, and the dataclass and the name of its field."""
    return (field for field in _fields_and_parts(command, prefix) if not dataclasses.is_dataclass(field[1]))


def _fields_and_parts(command: Any, prefix: str) -> Iterator[tuple[str, Any, type, str]]:
    """Yield the fields of `fields_of`, and each field that holds a dataclass before the fields of that dataclass."""
    for field in dataclasses.fields(command):
        value = getattr(command, field.name, None)
        name = _FLAG_NAMES.get(field.name, field.name.replace("_", "-"))
        yield prefix + name, value, type(command), field.name
        if dataclasses.is_dataclass(value):
            yield from _fields_and_parts(value, f"{prefix}{name}." if name else prefix)


def check_types(command: Any) -> None:
    """Raise a `ValueError`, which names the flag, for a field with a value of another type than its annotation.

    `command` is a recipe, or a dataclass with one. Fields of the model are checked where the model is built.
    """
    for flag, value, kind, name in _fields_and_parts(command, "--"):
        if flag.startswith("--model."):
            continue
        if (hint := violated_annotation(kind, name, value)) is not None:
            expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            call = f"{flag} {value!r:.100}".removeprefix("-- ")  # Fields such as `plan` have no flag.
            raise ValueError(f"{call}: {kind.__name__}.{name} must be of {expected}; give such a value.")


def format_flag(flag: str, value: Any) -> str:
    """Return a flag with its value as a user types them; for a boolean the flag alone, or `--no-` before its name."""
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"


@contextmanager
def name_flags_in_errors(command: Any) -> Iterator[None]:
    """Prefix a `ValueError` that the block raises with the flags of the library's call, as `add_flags` does."""
    try:
        yield
    except ValueError as error:
        message = add_flags(str(error), flags_of(command))
        if message == str(error):
            raise
        raise ValueError(message) from error


def add_flags(message: str, flags: Mapping[str, Any]) -> str:
    """Return the library's message, `call(name=value): rule`, after the flags that set the call's arguments.

    Messages of any other form, also those that begin with a flag, stay as they are.
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
    """Return the flag that sets an argument of the library's call; "" stands for the call itself.

    None if the command has no such flag, or no value for it.
    """
    hyphens = argument.replace("_", "-")
    usual_flags = (f"--{hyphens}", *(flag for flag in flags if flag.endswith(f".{hyphens}")))
    candidates = FLAGS_OF_CALLS.get(f"{call}({argument}", FLAGS_OF_CALLS.get(argument, usual_flags))
    return next((flag for flag in candidates if flags.get(flag) not in (None, ())), None)


# Fields whose flags have another name.
_FLAG_NAMES = {"run": "", "machine": "", "plan": "", "rewards": "", "published": "model"}

# Flags of the library's calls and arguments whose names do not say the flag: `call(` is a call, `call(argument` the
# argument of one call, and `argument` that of any call.
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
