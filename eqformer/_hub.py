"""Models and datasets of the Hugging Face hub, by name; their files are downloaded into the hub's own cache."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ._failures import explain_error, load_extra


_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<file>[^@]+))?(?:@(?P<revision>[\w./-]+))?")


def is_hub_name(name: str) -> bool:
    """Return whether a text may be the name of a model or a dataset of the hub, `OWNER/NAME`."""
    match = _HUB_NAME.fullmatch(name)
    return match is not None and match["name"] == name


def hub_name(path: str | Path) -> str | None:
    """Return the name of the model of the hub whose files are at a path in the hub's cache; None for another path."""
    folders = [part.split("--") for part in Path(path).parts]
    return next(("/".join(parts[1:]) for parts in folders if parts[0] == "models" and len(parts) == 3), None)


@dataclass(frozen=True)
class Repository:
    """Repository of the hub at one revision, or one file of the repository.

    All methods use the token of the hub's own login (`hf auth login`, or `HF_TOKEN`). Without a network, or with
    `HF_HUB_OFFLINE=1`, they read only the cache. They raise a `ValueError` that states the reason and the fix.
    """

    name: str
    """The owner and the name, `OWNER/NAME`."""
    file: str | None
    """The path of the file in the repository; None for the whole repository."""
    revision: str | None
    """A branch, a tag or a commit; None for the main branch."""
    kind: Literal["model", "dataset"]
    call: str
    """The user's call, for messages."""

    def download(self, patterns: Sequence[str], exclude: Sequence[str] = ()) -> Path:
        """Download the files that match a pattern and are not in the cache yet; return the cached folder.

        The folder is complete: without a network the client refuses a folder that an interrupted download left.
        """
        with self._explain_errors():
            folder = self._client().snapshot_download(
                self.name,
                repo_type=self.kind,
                revision=self.revision,
                allow_patterns=[*patterns],
                ignore_patterns=[*exclude],
            )
        return Path(folder)

    def download_file(self) -> Path:
        """Download the file if it is not in the cache yet; return its path there."""
        assert self.file is not None
        with self._explain_errors():
            return Path(
                self._client().hf_hub_download(self.name, self.file, repo_type=self.kind, revision=self.revision)
            )

    def list_files(self) -> list[str]:
        """Return the paths of all files of the repository, as the last download listed them; empty if unknown."""
        client = self._client()
        errors = load_extra("huggingface_hub.errors", extra="hub", call=self.call)
        try:
            files = client.get_cached_repo_tree(self.name, repo_type=self.kind, revision=self.revision)
        except errors.CachedRepoTreeNotFoundError:
            # Another program downloaded the folder, without a list of its files.
            return []
        return sorted(file.path for file in files)

    def _client(self):
        return load_extra("huggingface_hub", extra="hub", call=f"{self.call}: {self._missing}, and the hub")

    @property
    def _missing(self) -> str:
        return f"there is no such {'folder' if self.kind == 'model' else 'file or folder'} here"

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn the errors of the hub's client into a `ValueError` that states the reason and the fix."""
        errors = load_extra("huggingface_hub.errors", extra="hub", call=f"{self.call}: {self._missing}, and the hub")
        name, revision, check = self.name, self.revision or "main", "check the network, and that HF_HUB_OFFLINE is"
        # Subclasses come before their bases.
        reasons = {
            errors.GatedRepoError: f"{name} is gated; accept its terms on its page and log in (hf auth login)",
            errors.RepositoryNotFoundError: (
                f"{self._missing}, and the hub has no {self.kind} {name}, or it is private; correct the name, or log "
                "in (hf auth login)"
            ),
            errors.RevisionNotFoundError: f"{name} has no revision {revision!r}; give a branch, a tag or a commit",
            errors.IncompleteSnapshotError: (
                f"the hub cannot be reached, and its cache holds only some files of {name}, since a download was "
                f"interrupted; {check} not set, and call it again for the missing files"
            ),
            errors.LocalEntryNotFoundError: (
                f"{self._missing}, the hub cannot be reached, and its cache does not hold {name}; {check} not set"
            ),
            errors.EntryNotFoundError: f"{name} has no file {self.file}; correct the file's name",
            errors.HFValidationError: f"the hub has no {self.kind}s of such a name; correct the name",
            errors.HfHubHTTPError: "the hub refuses the download",
        }
        try:
            yield
        except tuple(reasons) as error:
            reason = next(text for kind, text in reasons.items() if isinstance(error, kind))
            raise ValueError(f"{self.call}: {reason}.") from error
        except (errors.HTTPError, OSError) as error:
            reason, fix = explain_error(error)
            again = "call it again, which downloads the files that are not in the cache yet"
            raise ValueError(f"{self.call}: the download of {name} broke off ({reason}); {fix or again}.") from error


def find_repository(
    source: str | Path, kind: Literal["model", "dataset"], file_kinds: Sequence[str], call: str
) -> Repository | None:
    """Return the repository of the hub that a text names; None for a path that exists and for a text of another form.

    The forms are `OWNER/NAME`, `OWNER/NAME@REVISION` and `OWNER/NAME/FILE`, for a file whose name ends with one of
    `file_kinds`.
    """
    match = _HUB_NAME.fullmatch(str(source))
    if match is None or Path(source).exists():
        return None
    if match["file"] is not None and not match["file"].endswith(tuple(file_kinds)):
        return None
    return Repository(**match.groupdict(), kind=kind, call=call)
