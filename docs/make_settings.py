"""Writes docs/settings.md from the settings themselves: ``python docs/make_settings.py``. A test compares the two."""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from spotlight.config import Config, PoolSection, PoolsSection, Section, SlurmSection

PAGE = Path(__file__).parent / "settings.md"
HEAD = """# Settings

All settings of a run, with their defaults. Made from `spotlight/config/` by `python docs/make_settings.py`; do not
edit this page. A settings file is TOML; only `[data]`, and the price (or the GPU) of a pool whose section is given,
have no defaults. `--set section.key=value` changes one setting. An unknown key is an error that names the known ones.
Paths are relative to the settings file, but for `run.dir`.
"""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def page() -> str:
    """All sections, in the order of `Config`."""
    sections = (line for name, field in Config.model_fields.items() for line in _section(name, field))
    return "\n".join([HEAD, *sections, *_slurm()])


def _section(name: str, field: FieldInfo) -> Iterator[str]:
    kind: type[Section] = field.annotation  # type: ignore[assignment]  # a section holds sections
    if kind is PoolsSection:
        yield from (
            "## `[pools.reserved]`, `[pools.spot]` and `[pools.reward]`",
            "",
            _text(PoolSection.__doc__ or ""),
            "",
        )
        yield _notes(kind)["reward"].join(("`[pools.reward]`: ", "\n"))
        defaults = ", ".join(
            f"`{pool}` {section.workers} at ${section.usd_per_h} per hour" for pool, section in PoolsSection()
        )
        yield f"Workers of a pool whose section is left out: {defaults}."
        kind = PoolSection
    else:
        yield from (f"## `[{name}]`", "", _text(kind.__doc__ or ""))
    yield from _table(kind)


def _slurm() -> Iterator[str]:
    yield from ("## `[pools.reserved.slurm]`, `[pools.spot.slurm]`, `[pools.reward.slurm]` and `[cluster.slurm]`", "")
    yield _text(SlurmSection.__doc__ or "")
    yield from _table(SlurmSection)


def _table(kind: type[Section]) -> Iterator[str]:
    yield from ("", "| key | type | default | |", "|---|---|---|---|")
    notes = _notes(kind)
    yield from (_row(key, each, notes.get(key, "")) for key, each in kind.model_fields.items())
    yield ""


def _row(key: str, field: FieldInfo, note: str) -> str:
    bounds = (
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(rule, name)
    )
    default = "required" if field.is_required() else _value(field.default)
    return f"| `{key}` | {', '.join([_type(field.annotation), *bounds])} | {default} | {note} |"


def _type(annotation: Any) -> str:
    arguments = [each for each in get_args(annotation) if each is not types.NoneType]
    match get_origin(annotation):
        case origin if origin is Literal:
            return " or ".join(f'`"{each}"`' for each in arguments)
        case origin if origin in (Union, types.UnionType):
            return " or ".join(map(_type, arguments))
        case origin if origin is tuple and arguments[-1] is Ellipsis:
            return f"list of {_type(arguments[0])}"
        case origin if origin is tuple:
            return f"{len(arguments)} × {_type(arguments[0])}"
        case origin if origin is dict:
            return "table"
        case _ if isinstance(annotation, type) and issubclass(annotation, Section):
            return "table"
        case _:
            return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}[annotation.__name__]


def _value(default: Any) -> str:
    match default:
        case None:
            return "left out"
        case Section():
            return "see below"
        case bool():
            return f"`{str(default).lower()}`"
        case str():
            return f'`"{default}"`'
        case tuple():
            return "`[" + ", ".join(_value(each).strip("`") for each in default) + "]`"
        case dict():
            return "empty"
        case _:
            return f"`{default}`"


def _notes(kind: type[Section]) -> dict[str, str]:
    """The docstring below each field."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    notes = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                notes[name] = _text(text)
    return notes


def _text(docstring: str) -> str:
    """In one line of Markdown."""
    return re.sub(r"``([^`]+)``", r"`\1`", " ".join(docstring.split())).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
