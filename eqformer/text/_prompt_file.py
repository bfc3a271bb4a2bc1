"""`complete_file`: generate a text for each row of a file of prompts; an interrupted call can be repeated."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._files import open_regular, parse_json, write_atomic
from ._text_engine import TextEngine, TextRequest, TextResult


class FileSummary(NamedTuple):
    """Counts of a call of `complete_file`."""

    rows: int
    """Rows of the file of prompts."""
    kept: int
    """Rows that an earlier call had written."""
    errors: int
    """Rows written by this call that have an error instead of a text."""
    tokens: int
    """Tokens that this call generated."""


@dataclasses.dataclass(frozen=True)
class _PromptFileJob:
    """A file of prompts, the file of its texts, and the settings of the texts."""

    engine: TextEngine
    source: Path
    target: Path
    request: TextRequest
    ask: Callable[[str], Any]
    best_of: int
    log_probs: bool
    settings: str
    """A digest of everything on which the texts depend, except for the rows."""


def complete_file(
    engine: TextEngine,
    source: str | Path,
    target: str | Path,
    *,
    request: TextRequest,
    ask: Callable[[str], Any] = lambda prompt: prompt,
    best_of: int = 1,
    log_probs: bool = False,
    fingerprint: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FileSummary:
    """Write a text for each row of a file of JSON lines, and go on where an earlier call stopped.

    A row is an object with a `prompt` (a text or ids) or `messages`, and may set fields of `TextRequest` for itself.
    Each line of the target holds the line number of a row, the row and its text. A line is written as soon as its text
    has ended, so a killed process loses only unfinished texts. Once all lines are written, they are put into the order
    of the rows. If an interrupted call is repeated, the target is the same as after an uninterrupted call.

    All rows are read before anything is generated. Raises a `ValueError` that names the line for a row that is no JSON
    object, has unknown fields, or is refused by `TextEngine.encode`, and for a target that was begun with other rows,
    other settings or another `fingerprint`. If an error ends a text, the text's line has the `error`.

    Args:
        engine: The engine. The texts do not depend on its sizes.
        source: The file of rows. Empty lines are left out.
        target: The file of texts.
        request: Default settings, which a row's own fields replace; the prompt of this request is not used.
        ask: A function that turns a row's text into the prompt of a request, such as a list of messages.
        best_of: Number of texts that are generated for each row. All are written, the likeliest first.
        log_probs: Whether to write the ids of each text and their log-probabilities.
        fingerprint: A string for everything else that the texts depend on, such as the name of the model.
        progress: A function that is called with the number of rows that this call has written and the number that it
            must write.
    """
    source, target = Path(source), Path(target)
    if best_of < 1:
        raise ValueError(f"complete_file(best_of={best_of}): at least 1 text must be generated for a row.")
    reason = engine.engine.unsupported.get("log_probabilities")
    if reason and (best_of > 1 or log_probs):
        option = "log_probs=True" if log_probs else f"best_of={best_of}"
        raise ValueError(f"complete_file({option}): {reason}; leave {option.partition('=')[0]} out.")
    if target.resolve() == source.resolve():
        raise ValueError(f"complete_file({str(source)!r}): the texts would replace the rows; write to another file.")
    values = [getattr(request, field.name) for field in dataclasses.fields(request) if field.name != "prompt"]
    settings = _digest(f"{values} {best_of} {log_probs} {fingerprint}")
    job = _PromptFileJob(engine, source, target, request, ask, best_of, log_probs, settings)
    digests = _check_rows(job)
    written = _read_written(job, digests)
    errors = tokens = 0
    # UTF-8 cannot encode a lone surrogate of a row; `backslashreplace` writes the JSON escape of the surrogate.
    with target.open("a", encoding="utf-8", errors="backslashreplace") as file:
        remaining = [line for line in digests if line not in written]
        progress(0, len(remaining))
        for done, (record, count) in enumerate(_complete_rows(job, remaining, list(digests)), 1):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            tokens += count
            if "error" in record:
                errors += 1
            progress(done, len(remaining))
    _sort(target)
    return FileSummary(len(digests), len(written), errors, tokens)


def count_prompts(source: str | Path) -> int:
    """Return the number of rows of a file of prompts; raise a `ValueError` if the file cannot be read.

    The rows themselves are not checked.
    """
    return sum(1 for _ in _read_rows(Path(source)))


def _read_rows(source: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file of prompts with their numbers, from 1 on, without empty lines."""
    with open_regular(source) as file:
        for line, content in enumerate(file, 1):
            if content.strip():
                yield line, content


def _parse_row(job: _PromptFileJob, line: int, content: bytes) -> tuple[dict[str, Any], TextRequest]:
    """Return a row and its request; raise a `ValueError` that names the line."""
    try:
        row = parse_json(content)
        if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
            raise ValueError('a row is an object with either a "prompt" or "messages"; correct it.')
        request = job.request.with_fields(row)
        if isinstance(row.get("prompt"), str):
            request = dataclasses.replace(request, prompt=job.ask(row["prompt"]))
    except ValueError as error:
        raise ValueError(f"{job.source}, line {line}: {error}") from None
    return row, request


def _check_rows(job: _PromptFileJob) -> dict[int, str]:
    """Return a digest of each row by the number of its line; raise a `ValueError` for a row that would be refused."""
    digests: dict[int, str] = {}
    for line, content in _read_rows(job.source):
        row, request = _parse_row(job, line, content)
        try:
            job.engine.encode(request)
        except ValueError as error:
            raise ValueError(f"{job.source}, line {line}: {error}") from None
        digests[line] = _digest_row(row)
    return digests


def _read_written(job: _PromptFileJob, digests: dict[int, str]) -> set[int]:
    """Return the line numbers of rows whose texts the target has; cut off an incomplete last line of the target.

    Raises a `ValueError` for a target with other rows or settings, or with lines that `complete_file` does not write.
    """
    written: set[int] = set()
    if not job.target.exists():
        return written
    length = 0
    with open_regular(job.target) as file:
        for number, content in enumerate(file, 1):
            if not content.endswith(b"\n"):
                break
            written.add(_check_record(job, number, content, digests))
            length += len(content)
    os.truncate(job.target, length)
    return written


def _check_record(job: _PromptFileJob, number: int, content: bytes, digests: dict[int, str]) -> int:
    """Return the line number of the row whose text is in line `number` of the target."""
    call = f"{job.target}, line {number}"
    try:
        record = parse_json(content)
        line, row, settings = record["line"], record["row"], record["settings"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{call}: complete_file has not written this line; write to another file, or delete this file."
        ) from None
    if digests.get(line) != _digest_row(row):
        raise ValueError(
            f"{call}: it has a text for line {line} of {job.source}, which has changed since; write to another file, "
            "or delete this one."
        )
    if settings != job.settings:
        raise ValueError(
            f"{call}: it was written with other settings ({settings} instead of {job.settings}); repeat the command "
            "with the same model and settings, or write to another file."
        )
    return line


def _complete_rows(
    job: _PromptFileJob, remaining: Sequence[int], lines: Sequence[int]
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield a record for each remaining row when its texts have ended, and the number of tokens that were generated.

    `lines` has the line numbers of all rows, and `remaining` the line numbers of the rows without a written text.
    """
    positions = {line: position for position, line in enumerate(lines)}
    started: dict[int, tuple[int, dict[str, Any]]] = {}  # Index among the remaining rows -> line number and row.
    unfinished: dict[int, list[TextResult]] = {}  # Index among the remaining rows -> texts of the row so far.

    def make_requests() -> Iterator[TextRequest]:
        unwritten = set(remaining)
        index = 0
        for line, content in _read_rows(job.source):
            if line in unwritten:
                row, request = _parse_row(job, line, content)
                started[index] = line, row
                index += 1
                example = positions[line] if request.example is None else request.example
                for sample in range(job.best_of):
                    yield dataclasses.replace(request, example=job.best_of * example + sample)

    for result in job.engine.run(make_requests()):
        index = result.number // job.best_of  # Each row has `best_of` requests, one after another.
        results = unfinished.setdefault(index, [])
        results.append(result)
        if len(results) == job.best_of:
            line, row = started.pop(index)
            record = {"line": line, "row": row, "settings": job.settings, **_describe(job, unfinished.pop(index))}
            yield record, sum(len(result.ids) for result in results)


def _describe(job: _PromptFileJob, results: list[TextResult]) -> dict[str, Any]:
    """Return the texts of one row as JSON: a single text, or a list of samples, the likeliest first."""
    results.sort(key=lambda result: (bool(result.error), -sum(result.log_probs), result.number))
    samples: list[dict[str, Any]] = []
    for result in results:
        if result.error:
            samples.append({"error": result.error})
            continue
        sample: dict[str, Any] = {
            "text": result.text,
            "finish_reason": result.finish_reason,
            "tokens": len(result.ids),
        }
        if "log_probabilities" not in job.engine.engine.unsupported:
            sample["log_prob"] = _round(sum(result.log_probs))
        if job.log_probs:
            sample |= {"ids": list(result.ids), "log_probs": [_round(value) for value in result.log_probs]}
        samples.append(sample)
    if job.best_of == 1:
        return samples[0]
    errors = {"error": samples[0]["error"]} if "error" in samples[0] else {}
    return {"samples": samples, **errors}


def _round(log_prob: float) -> float:
    """Round a log-probability to 4 decimals, since further digits may change with the batch size in float32."""
    return round(log_prob, 4)


def _sort(target: Path) -> None:
    """Put the lines of a complete file into the order of their rows, if they have another order."""
    starts: list[tuple[int, int, int]] = []
    with open_regular(target) as file:
        start = 0
        for content in file:
            starts.append((parse_json(content)["line"], start, len(content)))
            start += len(content)
        if starts == sorted(starts):
            return

        def write(path: Path) -> None:
            with path.open("wb") as sorted_file:
                for _, start, length in sorted(starts):
                    file.seek(start)
                    sorted_file.write(file.read(length))

        write_atomic(target, write)


def _digest_row(row: Any) -> str:
    return _digest(json.dumps(row, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
