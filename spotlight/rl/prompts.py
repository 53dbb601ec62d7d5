"""Reads prompt files, and chooses which prompts an iteration trains on.

The choice is pure: it depends on the seed and the iteration alone, so a resumed run makes it again.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight.files import kind_of, read_bytes
from spotlight.records import Prompt, SpotlightError

COLUMNS = ("prompt", "text", "caption", "input")
"""Columns of a table that may hold the prompt; the first that does is taken."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""{ending of a table's file: what separates its cells}"""
FIRST_ROW = 2
"""The line of a table's first row, which a line of headings precedes."""


def read_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """The prompts of a file: .txt, .jsonl, .csv, .tsv or .parquet, or of a directory that `datasets` saved.

    A text file has one prompt a line. The others have one a row, in the column "prompt" (or "text", "caption",
    "input"); all else that a row says becomes the prompt's metadata, so GenEval's and Flow-Factory's files are read as
    they are. Blank lines are skipped. A prompt's ``id`` is its line's or row's index, blank lines counted, so it always
    leads back to the line; of a table's row over several lines, to the last of them.

    Raises:
        SpotlightError: the file is missing, cannot be read, or has no prompt in it; or a row has none.
    """
    path = Path(path)
    if kind_of(path) == "directory":
        rows = _rows_of_dataset(path)
    elif path.suffix.lower() == ".parquet":
        rows = _rows_of_parquet(path)
    elif path.suffix.lower() in (".jsonl", ".json", ".ndjson"):
        rows = _rows_of_jsonl(path)
    elif path.suffix.lower() in DELIMITERS:
        rows = _rows_of_table(path)
    else:
        lines = enumerate(_text(path).split("\n"))
        rows = ((index, {"prompt": line.strip()}) for index, line in lines if line.strip())
    prompts = tuple(_prompt(path, index, row) for index, row in rows)
    if not prompts:
        raise SpotlightError(f"{path}: the file is empty: give it one prompt a line")
    return prompts


def _prompt(path: Path, index: int, row: Mapping[str, Any]) -> Prompt:
    column = next((name for name in COLUMNS if isinstance(row.get(name), str) and row[name].strip()), None)
    if column is None:
        raise SpotlightError(
            f"{path}:{line_of(path, index)}: no prompt: one of the columns {', '.join(COLUMNS)} must hold its text; "
            f"there is {', '.join(map(str, row)) or 'nothing'}"
        )
    more = {str(name): value for name, value in row.items() if name != column and value is not None}
    try:
        metadata = json.dumps(more, sort_keys=True, ensure_ascii=False, allow_nan=False) if more else ""
    except (TypeError, ValueError) as error:
        raise SpotlightError(f"{path}:{line_of(path, index)}: metadata that is no JSON: {error}") from None
    try:
        (row[column] + metadata).encode()
    except UnicodeEncodeError as error:
        raise SpotlightError(
            f"{path}:{line_of(path, index)}: text that is not Unicode, such as half an emoji: {error.reason}"
        ) from None
    return Prompt(id=index, text=row[column].strip(), metadata=metadata)


def line_of(path: Path, index: int) -> int:
    """The line, or row, of a prompt as a person counts: from 1, and after the heading of a table."""
    return index + (FIRST_ROW if path.suffix.lower() in DELIMITERS else 1)


def _text(path: Path) -> str:
    try:
        content = read_bytes(path, "a prompt file")
    except SpotlightError as error:
        raise SpotlightError(f"{error}; see [data]") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SpotlightError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8: save the file as UTF-8 text"
        ) from None


def _rows_of_jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for index, line in enumerate(_text(path).split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SpotlightError(f"{path}:{index + 1}: not JSON: {error}") from None
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, dict):
            raise SpotlightError(f"{path}:{index + 1}: a JSON object is expected on each line, and {line[:40]!r} came")
        yield index, row


def _rows_of_table(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    delimiter = DELIMITERS[path.suffix.lower()]
    table = csv.DictReader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        headings = table.fieldnames or ()
        if twice := sorted({name for name in headings if headings.count(name) > 1}):
            raise SpotlightError(f"{path}:1: the column {twice[0]!r} is there twice: rename one of the two")
        for row in table:
            if None in row:
                raise SpotlightError(
                    f"{path}:{table.line_num}: {len(headings) + len(row[None])} cells for {len(headings)} columns: put "
                    f'quotation marks around text that holds {delimiter!r}, as in "a cat{delimiter} a dog"'
                )
            yield table.line_num - FIRST_ROW, row
    except csv.Error as error:
        raise SpotlightError(
            f"{path}:{table.line_num + 1}: not CSV: {error}; is a quotation mark not closed, here or before? "
            'A cell that begins with one is written """47"" on a sign"'
        ) from None


def _rows_of_parquet(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise SpotlightError(
            f"{path}: reading .parquet needs pyarrow: install it, or save the prompts as .jsonl"
        ) from None
    try:
        yield from enumerate(parquet.read_table(io.BytesIO(read_bytes(path, "a prompt file"))).to_pylist())
    except (OSError, ValueError) as error:
        raise SpotlightError(f"{path}: cannot be read as a parquet file: {error}") from None


def _rows_of_dataset(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        import datasets
    except ImportError:
        raise SpotlightError(
            f"{path}: reading a saved data set needs the package datasets: install it, or save the prompts as .jsonl"
        ) from None
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise SpotlightError(f"{path}: cannot be read as a data set that was saved to disk: {error}") from None
    if isinstance(found, dict):
        raise SpotlightError(f"{path}: holds the splits {', '.join(found)}: name the directory of one of them")
    yield from enumerate(found)


def check_prompts(prompts: Iterable[Prompt], path: str | Path, check: Callable[[Prompt], None]) -> None:
    """Find the first prompt of a file that cannot be used.

    Args:
        prompts: of `read_prompts`.
        path: the file they are from.
        check: raises for a prompt that cannot be used, as `rewards.Scorer.check_prompt` does.

    Raises:
        SpotlightError: from ``check``, with the file and the line.
    """
    for prompt in prompts:
        try:
            answer: object = check(prompt)  # type: ignore[func-returns-value]
            if answer is not None:
                raise SpotlightError(
                    f"the reward's check returned {answer!r}: it has to raise ValueError, or return nothing"
                )
        except Exception as error:  # of a person's own reward, too
            said = error if isinstance(error, SpotlightError) else f"the reward refuses it: {error!r}"
            raise SpotlightError(f"{path}:{line_of(Path(path), prompt.id)}: {said}") from None


def choose_prompts(count_available: int, per_iteration: int, *, seed: int, iteration: int) -> tuple[int, ...]:
    """Indices of the prompts of one iteration, none twice within an epoch.

    An epoch is a permutation drawn from (seed, epoch) and cut into whole iterations; what is left over at its
    end, fewer than ``per_iteration``, waits for the next permutation.

    Args:
        count_available: prompts to choose from.
        per_iteration: how many to choose.

    Raises:
        SpotlightError: there are fewer prompts than one iteration needs.
    """
    if per_iteration > count_available:
        raise SpotlightError(
            f"an iteration takes {per_iteration} prompts (the larger of rollout.prompts and exploration.prompts), and "
            f"data.train_prompts has {count_available} prompts: lower it, or add prompts"
        )
    epoch, part = divmod(iteration, count_available // per_iteration)
    order = _epoch(count_available, seed=seed, number=epoch)
    return tuple(int(index) for index in order[part * per_iteration : (part + 1) * per_iteration])


def all_chosen(count_available: int, per_iteration: int, *, seed: int, iterations: int) -> list[int]:
    """Indices of all prompts of so many iterations, ascending; where few would be left out, all of the file's.

    Raises:
        SpotlightError: as `choose_prompts`.
    """
    chosen = {*choose_prompts(count_available, per_iteration, seed=seed, iteration=0)}
    whole = count_available // per_iteration * per_iteration  # of an epoch
    for epoch in range(-(-iterations * per_iteration // whole)):
        order = _epoch(count_available, seed=seed, number=epoch)
        chosen.update(order[: min(whole, iterations * per_iteration - epoch * whole)].tolist())
        if len(chosen) > count_available - per_iteration:
            return list(range(count_available))
    return sorted(chosen)


def _epoch(count_available: int, *, seed: int, number: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=[seed, number])).permutation(count_available)
