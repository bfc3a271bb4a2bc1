"""Models of the Hugging Face hub: downloads by name, and uploads of published folders with a model card."""

import dataclasses
import json
from pathlib import Path

from .._failures import explain_error, load_extra
from .._files import read_json
from .._hub import find_repository, is_hub_name
from ._folder import ADAPTER, ADAPTER_CONFIG, CONFIG, GENERATION_CONFIG, INDEX, MODELOPT, SINGLE


# The files of a published folder beside its configuration and weights.
COMPANION_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", GENERATION_CONFIG),
)
# The file of sentence-transformers that lists a text encoder's modules and their folders.
MODULES = "modules.json"
# Patterns of the files of sentence-transformers, which state the pooling and the prompts of a text encoder.
ENCODER_FILES = (MODULES, "sentence_*_config.json", "config_sentence_transformers.json")
ENCODER_FILES += tuple(f"*_{module}/config.json" for module in ("Pooling", "Dense", "Normalize"))
_ENCODER_WEIGHTS = ("*_Dense/model.safetensors",)


def local_path(source: str | Path) -> Path:
    """Return the path of a model on this machine; a model of the hub is downloaded if it is not in the cache.

    An existing path is returned as it is. A model of the hub is `OWNER/NAME`, `OWNER/NAME@REVISION` (a branch, a tag or
    a commit) or, for one file of GGUF, `OWNER/NAME/FILE.gguf`. Only the files that loading and saving need are
    downloaded, into the hub's own cache, with the token of the hub's own login (`hf auth login`, or `HF_TOKEN`).
    Without a network, or with `HF_HUB_OFFLINE=1`, only the cache is read.

    Raises a `ValueError` for a model that the hub does not have or that asks for a login, for a repository without
    safetensors, if files are not in the cache and the hub cannot be reached, and if the download breaks off. A text
    that is neither a path that exists nor the name of a model is returned as a path.
    """
    call = f"load({str(source)!r})"
    if not isinstance(source, str | Path):
        raise TypeError(
            f"load({source!r}): a model is a path, or a name such as 'HuggingFaceTB/SmolLM2-135M-Instruct', and the "
            f"argument has the type {type(source).__name__}; give a text or a Path."
        )
    repository = find_repository(source, "model", (".gguf",), call)
    if repository is None:
        return Path(source)
    if repository.file is not None:
        return repository.download_file()
    files = (CONFIG, SINGLE, INDEX, MODELOPT, ADAPTER_CONFIG, ADAPTER)
    folder = repository.download([*files, *COMPANION_FILES, *ENCODER_FILES, *_ENCODER_WEIGHTS])
    if any((folder / weights).exists() for weights in (SINGLE, ADAPTER)):
        return folder
    if not (folder / INDEX).exists():
        raise ValueError(
            f"{call}: the repository has no {SINGLE} and no {INDEX}. Pickled weights (.bin, .pt) are never read; "
            "take a repository of safetensors, or name a file of GGUF as OWNER/NAME/FILE.gguf."
        )
    shards = read_json(folder / INDEX).get("weight_map")
    return repository.download(sorted(set(shards.values()))) if isinstance(shards, dict) else folder


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """The model card of an uploaded model: its license, its base model, its training data and its recipe."""

    license: str
    """The license by its name on the hub, such as `apache-2.0`, or `other`."""
    base_model: str | None = None
    """The model of the hub whose weights the training began with; None for a model trained from scratch."""
    datasets: tuple[str, ...] = ()
    """The texts that the model was trained on: names of data sets of the hub, or descriptions."""
    recipe: str | None = None
    """The command or the settings of the training."""

    def to_markdown(self, name: str) -> str:
        """Return the text of the card's `README.md`, for a model of this name."""
        hub_datasets = [dataset for dataset in self.datasets if is_hub_name(dataset)]
        fields = {"license": self.license, "base_model": self.base_model, "datasets": hub_datasets or None}
        fields |= {"pipeline_tag": "text-generation", "tags": ["eqformer", "jax"]}
        # JSON values are also YAML values, so each is quoted correctly.
        header = [f"{field}: {json.dumps(value)}" for field, value in fields.items() if value is not None]
        lines = ["---", *header, "---", f"# {name.partition('/')[2]}", "", f"- License: {self.license}"]
        lines.append(f"- Base model: {self.base_model or 'none, trained from the start'}")
        lines.append(f"- Data: {', '.join(self.datasets) or 'not stated'}")
        load = ["```python", "import eqformer", "", f"llm = eqformer.load({name!r})", "```"]
        recipe = [] if self.recipe is None else ["", "## Training", "", "```text", self.recipe.strip(), "```"]
        return "\n".join([*lines, "", *load, *recipe, ""])


def push(folder: str | Path, name: str, card: ModelCard, *, private: bool = True) -> str:
    """Upload a published folder, as `save` writes it, to the hub with a model card; return the address of the commit.

    The repository is created if it does not exist, and all files are uploaded in one commit, with the token of the
    hub's own login. Raises a `ValueError` before anything is uploaded for a folder without `config.json` and for a name
    that is not `OWNER/NAME`, and also if the hub refuses the upload.

    Args:
        folder: The folder.
        name: The model's name on the hub, `OWNER/NAME`.
        card: The model card.
        private: Whether a repository that is created is private.
    """
    folder, call = Path(folder), f"push({str(folder)!r}, {name!r})"
    if not is_hub_name(name):
        raise ValueError(f"{call}: the name of a model of the hub is OWNER/NAME; correct it.")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{call}: there is no published folder (no {CONFIG}); save the model first.")
    hub = load_extra("huggingface_hub", extra="hub", call=call)
    errors = load_extra("huggingface_hub.errors", extra="hub", call=call)
    add = hub.CommitOperationAdd
    files = [add(file.name, str(file)) for file in sorted(folder.iterdir()) if file.is_file()]
    readme = add("README.md", card.to_markdown(name).encode())
    operations = [readme, *(file for file in files if file.path_in_repo != readme.path_in_repo)]
    api = hub.HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        return api.create_commit(name, operations, commit_message="Upload the model").commit_url
    except errors.HfHubHTTPError as error:
        raise ValueError(
            f"{call}: the hub refuses the upload ({explain_error(error)[0]}); log in with a token that may write "
            "(hf auth login)."
        ) from error
