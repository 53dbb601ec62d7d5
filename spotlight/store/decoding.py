"""JSON into records; what is damaged is refused in one paragraph that names the place, the field and the way out.

Types are strict: a number in quotes is no number. Fields that a record does not have are left out, so that files of a
newer version can be read; those that have a default may be absent, so that files of an older one can.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from spotlight.records import SpotlightError

Record = TypeVar("Record")

TOLD_MAX = 3
"""Of what is wrong with one record: the first few say what happened to it."""
CHARACTERS_MAX = 80
"""Of a value that is wrong."""


def from_json(kind: type[Record], content: bytes, where: object, way_out: str) -> Record:
    """The record that a JSON text holds.

    Args:
        kind: a dataclass, or any other type that pydantic knows.
        where: the file, with its line where it has several records.
        way_out: what a person can do about a damaged one.

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
    return record


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
        return f"no field {field!r}; it has {_shown(sorted(error['input']))}"
    if error["type"] == "value_error":
        said = rule.removeprefix("Value error, ")
    else:
        said = f"{rule.replace('Input should be', 'expected')}, found {_shown(error['input'])}"
    return f"{field}: {said}" if field else said


def _field(path: Sequence[str | int]) -> str:
    """A field's name as people write it: ``kept[0].prompt.id``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path if part != "[key]")[1:]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}..."
