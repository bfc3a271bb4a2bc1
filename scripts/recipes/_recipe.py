"""Recipe of a run: everything that decides its numbers, and how often it reports."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from eqformer.models import ModelConfig
from eqformer.nn import Execution, Precision
from eqformer.parallel import ParallelConfig
from eqformer.training import Lora, Optimization


@dataclasses.dataclass(frozen=True)
class Text:
    """Documents, their tokens, and the rows that tokens are packed into."""

    hub: str | None = None
    """A Hugging Face dataset by name, in place of --data (extra `data`; needs the network)."""
    mix: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH=WEIGHT ...")] = ()
    """Several texts by weight, in place of --data; the weight is a share of rows, and hub:NAME=WEIGHT a dataset."""
    tokenizer: Path | None = None
    """A tokenizer.json; the model gets its vocabulary. Bytes by default: 256 ids, of which 0 ends a text."""
    round_vocab: int = 1
    """The model's vocabulary is the tokenizer's, rounded up to a multiple of this: 128 suits tensor parallelism."""
    end_of_text: str | None = None
    """The tokenizer's token that ends a document, if the file does not say which it is."""
    field: str = "text"
    """The field of .jsonl and .parquet rows that holds the text."""
    packing: Literal["windows", "documents", "pairs"] = "windows"
    """Rows are contiguous windows of the text, packed documents that do not attend to each other, or preferences."""
    validation: float = 0.05
    """The share of documents that is kept for validation, chosen by a hash of their names."""


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
class Spikes:
    """Spikes of the loss: the run goes back to its last checkpoint and leaves out the batches since (as PaLM's)."""

    factor: float | None = None
    """A spike is a loss above this many times the median of the steps before it; None watches for none."""
    window: int = 50
    """Of how many steps."""
    most: int = 3
    """How often a run goes back before it ends with an error."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The mesh of devices, with an axis for each way to split; the sizes multiply to the number of devices."""

    replica: int = 1
    """Data parallelism: the batch is split, and the state is replicated."""
    fsdp: int = 1
    """The batch is split, and the state by --zero."""
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
    """A model, its text, and how it is trained."""

    model: ModelConfig
    """The model's family and its hyperparameters."""
    published: Annotated[Path | None, tyro.conf.arg(name="model", metavar="FOLDER")] = None
    """A published model to train on: a folder with its tokenizer, a file of GGUF, or a name of the hub."""
    from_run: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A run whose weights this run starts from; its recipe is this one's too, where --recipe does not name another."""
    from_step: int | None = None
    """Which of that run's checkpoints; the latest by default."""
    from_optimizer: bool = False
    """Take the optimizer's memory too, and not the weights alone."""
    steps: int = 800
    """How many optimizer steps the run takes."""
    prolong: Literal["refuse", "hold", "rewarm", "reshape"] = "refuse"
    """If another --steps would make the rate jump: refuse, hold the last rate, warm up anew, or jump (reshape)."""
    seed: int = 0
    """Decides weights, order, dropout and samples."""
    data: Path | None = None
    """Text or chats (docs/data.md): a file, a folder or a dataset of the hub. Python's standard library by default."""
    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """The learned tokens of chats: the assistant's replies, those after the user's last message, or all."""
    loss: Literal["next-token", "dpo", "ipo", "orpo"] = "next-token"
    """Learn the next token, or to prefer the chosen to the rejected completion of each pair of --data."""
    beta: float = 0.1
    """How strongly DPO and IPO hold the model to its beginning; for ORPO the weight of the odds ratio."""
    seq: int = 256
    """Tokens a row."""
    batch: int = 16
    """Rows a step; a pair is two rows."""
    text: Text = Text()
    optimizer: Optimization = Optimization()
    lora: Lora = Lora()
    precision: Precision = Precision()
    execution: Execution = Execution()
    metrics: Metrics = Metrics()
    spikes: Spikes = Spikes()
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
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
    sample_every: int = 200
    """Steps between text samples of the model; 0 writes none, also at the end."""
    prompt: str = "def "
    """The prompt of those samples."""
    mesh: Mesh = Mesh()
    plan: Annotated[ParallelConfig, tyro.conf.arg(name="")] = ParallelConfig(zero=1)

    @property
    def compares_pairs(self) -> bool:
        """Whether the rows are pairs of completions, of which the loss learns to prefer one."""
        return self.loss != "next-token"


# Fields that may change when a run is continued, since they do not change the steps already taken.
CHANGEABLE = frozenset(
    ("steps", "prolong", "log_every", "checkpoint_every", "keep", "validate_every", "validation_batches")
    + ("sample_every", "prompt", "metrics", "execution", "profile", "debug_nans", "spikes")
    # The mesh and the microbatches decide where and when numbers are computed, not their values. Only mixtures differ
    # a little, whose balance losses are over a microbatch.
    + ("mesh", "plan")
)
