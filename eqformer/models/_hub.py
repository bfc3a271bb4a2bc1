"""Models of the Hugging Face hub, by name; their files are downloaded into the hub's own cache."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from .._failures import load_extra
from .._files import read_json
from ._folder import ADAPTER, ADAPTER_CONFIG, CONFIG, INDEX, SINGLE


# The files of a published folder beside its configuration and weights.
COMPANION_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>[\w./-]+))?")


class _HubModel(NamedTuple):
    """A model of the hub: `OWNER/NAME`, `OWNER/NAME@REVISION` or `OWNER/NAME/FILE.gguf`."""

    name: str
    file: str | None
    revision: str | None


def is_hub_name(name: str) -> bool:
    """Return whether a text may be the name of a model or a data set of the hub, `OWNER/NAME`."""
    match = _HUB_NAME.fullmatch(name)
    return match is not None and match["name"] == name


def hub_name(path: str | Path) -> str | None:
    """Return the name of the model of the hub whose files are at a path in the hub's cache; None for another path."""
    folders = [part.split("--") for part in Path(path).parts]
    return next(("/".join(parts[1:]) for parts in folders if parts[0] == "models" and len(parts) == 3), None)


def local_path(source: str | Path) -> Path:
    """Return the path of a model on this machine; a model of the hub is downloaded if it is not in the cache.

    An existing path is returned as it is. A model of the hub is `OWNER/NAME`, `OWNER/NAME@REVISION` (a branch, a tag or
    a commit) or, for one file of GGUF, `OWNER/NAME/FILE.gguf`. Only the files that loading and saving need are
    downloaded, into the hub's own cache, with the token of the hub's own login (`hf auth login`, or `HF_TOKEN`).
    Without a network, or with `HF_HUB_OFFLINE=1`, only the cache is read.

    Raises a `ValueError` for a model that the hub does not have or that asks for a login, for a repository without
    safetensors, and if files are not in the cache and the hub cannot be reached. A text that is neither a path that
    exists nor the name of a model is returned as a path.
    """
    path, match = Path(source), _HUB_NAME.fullmatch(str(source))
    if path.exists() or match is None:
        return path
    model, call = _HubModel(**match.groupdict()), f"load({str(source)!r})"
    hub = load_extra("huggingface_hub", extra="hub", call=f"{call}: there is no such folder here, and the hub")
    with _explain_hub_errors(model, call):
        return _download(hub, model, call)


def _download(hub: ModuleType, model: _HubModel, call: str) -> Path:
    """Download the files of a model that are not in the cache yet."""
    if model.file is not None:
        return Path(hub.hf_hub_download(model.name, model.file, revision=model.revision))

    def fetch(files: Sequence[str]) -> Path:
        return Path(hub.snapshot_download(model.name, revision=model.revision, allow_patterns=list(files)))

    folder = fetch([CONFIG, SINGLE, INDEX, ADAPTER_CONFIG, ADAPTER, *COMPANION_FILES])
    if any((folder / weights).exists() for weights in (SINGLE, ADAPTER)):
        return folder
    if not (folder / INDEX).exists():
        raise ValueError(
            f"{call}: the repository has no {SINGLE} and no {INDEX}. Pickled weights (.bin, .pt) are never read; "
            "take a repository of safetensors, or name a file of GGUF as OWNER/NAME/FILE.gguf."
        )
    shards = read_json(folder / INDEX).get("weight_map")
    return fetch(sorted(set(shards.values()))) if isinstance(shards, dict) else folder


@contextmanager
def _explain_hub_errors(model: _HubModel, call: str) -> Iterator[None]:
    """Turn the errors of the hub's client into a `ValueError` that states the reason and the fix."""
    errors = load_extra("huggingface_hub.errors", extra="hub", call=call)
    revision = model.revision or "main"
    # Subclasses come before their bases.
    reasons = {
        errors.GatedRepoError: f"{model.name} is gated; accept its terms on its page and log in (hf auth login)",
        errors.RepositoryNotFoundError: (
            f"there is no such folder here, and the hub has no model {model.name}, or it is private; correct the name, "
            "or log in (hf auth login)"
        ),
        errors.RevisionNotFoundError: f"{model.name} has no revision {revision!r}; give a branch, a tag or a commit",
        errors.LocalEntryNotFoundError: (
            f"there is no such folder here, the hub cannot be reached, and its cache does not hold {model.name}; check "
            "the network, and that HF_HUB_OFFLINE is not set"
        ),
        errors.EntryNotFoundError: f"{model.name} has no file {model.file}; correct it",
        errors.HFValidationError: "the hub has no models of such a name; correct it",
        errors.HfHubHTTPError: "the hub refuses the download",
    }
    try:
        yield
    except tuple(reasons) as error:
        reason = next(text for kind, text in reasons.items() if isinstance(error, kind))
        raise ValueError(f"{call}: {reason}.") from error
