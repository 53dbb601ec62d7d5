"""Reads records from JSON; damage is refused in one paragraph that names the place, the field and the way out.

Types are strict: a number in quotes is no number. Fields that a record does not have are left out, so that files of a
newer version can be read; those that have a default may be absent, so that files of an older one can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from math import isfinite
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from spotlight.files import shown
from spotlight.records import SpotlightError

Record = TypeVar("Record")

TOLD_MAX = 3
"""Most faults of one record that an error names: the first few say what happened to it."""


def from_json(kind: type[Record], content: bytes, where: object, way_out: str, *, finite: bool = False) -> Record:
    """The record that a JSON text holds.

    Args:
        kind: a dataclass, or any other type that pydantic knows.
        where: the file, with its line where it has several records.
        way_out: what a person can do about a damaged one.
        finite: whether NaN and infinity are damage.

    Raises:
        SpotlightError: it is damaged.
    """
    try:
        record: Record = _adapter(cast(Any, kind)).validate_json(content, strict=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        told = [_sentence(dict(detail)) for detail in wrong[:TOLD_MAX]]
        more = [f"and {len(wrong) - TOLD_MAX} more"] if len(wrong) > TOLD_MAX else []
        raise SpotlightError(f"{where}: {'; '.join([*told, *more])}; {way_out}") from None
    wrong_field = next(_infinite(record), None) if finite else None
    if wrong_field is not None:
        raise SpotlightError(f"{where}: {_field(wrong_field)}: expected a finite number; {way_out}")
    return record


def readable(text: str) -> str:
    """A text that `from_json` reads: a lone surrogate, such as half an emoji, is replaced by "?"."""
    return text.encode(errors="replace").decode()


def _infinite(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of the numbers in a record that are not finite."""
    if isinstance(value, float):
        if not isfinite(value):
            yield path
    elif is_dataclass(value):
        for name in value.__dataclass_fields__:
            yield from _infinite(getattr(value, name), (*path, name))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _infinite(each, (*path, str(key)))
    elif isinstance(value, list | tuple) and not _is_plainly_finite(value):
        for index, each in enumerate(value):
            yield from _infinite(each, (*path, index))


def _is_plainly_finite(values: Sequence[Any]) -> bool:
    """Whether a quick look shows a list to hold only finite numbers and text: most lists are long and of numbers."""
    kinds = set(map(type, values))
    return kinds <= {int, str, bool, type(None)} or (kinds == {float} and all(map(isfinite, values)))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _sentence(error: dict[str, Any]) -> str:
    """One thing that is wrong: in which field, what was expected, what came."""
    rule, field = error["msg"], _field(error["loc"])
    if error["type"] == "json_invalid":
        said = rule.removeprefix("Invalid JSON: ").replace(" at line 1 column ", " at column ")
        return f"not JSON ({said})"
    if error["type"] == "missing":
        return f"no field {field!r}; it has {shown(sorted(error['input']))}"
    if error["type"] == "value_error":
        said = rule.removeprefix("Value error, ")
    else:
        said = f"{rule.replace('Input should be', 'expected')}, found {shown(error['input'])}"
    return f"{field}: {said}" if field else said


def _field(path: Sequence[str | int]) -> str:
    """A field's name as people write it: ``kept[0].prompt.id``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path if part != "[key]")[1:]
