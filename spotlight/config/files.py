"""Reads, checks and writes settings files; an error names the setting and what would be right."""

from __future__ import annotations

import difflib
import json
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import tomli_w
from pydantic import (
    ValidationError,
)

from spotlight.config.learning import FILES_IN_OPTIONS, RewardSection
from spotlight.config.section import Section
from spotlight.config.settings import Config
from spotlight.files import absolute, is_text, kind_of, read_bytes, shown
from spotlight.records import SpotlightError

RESOLVED = "config.toml"
"""The resolved settings' name in a run directory."""
WHOLE = "# The settings above are whole: sha256 "
"""Begins the last line of a file that `resolved` wrote."""
KEYS_MAX = 8
"""Most names in a dotted key: settings are three deep, changes of simulated strategies two deeper."""
NOTHING = ("null", "none", "nil")
"""Words for no value in other languages; TOML has none."""

SectionT = TypeVar("SectionT", bound=Section)
Place = Callable[..., str]
"""A function that says where a setting's value is from: `_place`, given one file and its overrides."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a settings file.

    Args:
        path: a TOML file; the prompt files and the model path in it are relative to its directory.
        overrides: ``"section.key=value"`` each, the value in TOML (bare words are taken as text).

    Raises:
        SpotlightError: the file, a key or a value is not usable; the text says which and why.
    """
    if not str(path).strip():  # an unset variable of a shell
        raise SpotlightError(f"{str(path)!r} is no settings file: name one; examples/ holds some to start from")
    path = Path(path)
    if not kind_of(path):
        raise SpotlightError(f"{path}: no such settings file; examples/ holds some to start from")
    if kind_of(path / RESOLVED) == "file":
        resume = f"`spotlight resume {shlex.quote(str(path))}`"
        raise SpotlightError(f"{path}: is a run, and no settings file: {resume} goes on with it")
    return parse(read_bytes(path, "a settings file"), path.parent, str(path), overrides)


def parse(content: bytes, base: Path, source: str, overrides: Sequence[str] = (), *, of_a_run: bool = False) -> Config:
    """As `load`, from a file's content.

    Args:
        base: what the paths in it are relative to.
        source: where it is from, for the errors.
        of_a_run: whether `resolved` wrote it, perhaps that of an older version: settings that no longer are, and that a
            live run did not use, are left out.
    """
    check_overrides(overrides)
    try:
        tree = tomllib.loads(content.decode())
    except ValueError as error:  # of TOML, of UTF-8, or a number of thousands of digits
        raise SpotlightError(f"{source}: not valid TOML: {error}") from None
    except RecursionError:
        raise SpotlightError(
            f"{source}: not valid TOML: it is nested too deeply; settings are two tables deep"
        ) from None
    if of_a_run and isinstance(simulation := tree.get("simulation"), dict):
        simulation.pop("target", None)  # until 2026-11-30
    for override in overrides:
        set_value(tree, override)
    return resolve(tree, base, source, overrides)


def check_overrides(overrides: Sequence[str]) -> None:
    """
    Raises:
        SpotlightError: it is no list of texts.
    """
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not is_list or not all(isinstance(override, str) for override in overrides):
        raise SpotlightError(f'overrides = {shown(overrides)}: give a list of texts, such as ["run.seed=3"]')


def resolve(tree: Mapping[str, Any], base: Path, source: str = "settings", overrides: Sequence[str] = ()) -> Config:
    """Check a tree of settings and make the paths in it absolute.

    Args:
        overrides: what was put into it, for the errors.
    """
    where = partial(_place, source, overrides)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise SpotlightError("\n".join(_explain(where, detail) for detail in error.errors())) from None
    return config.model_copy(
        update={
            "data": _with_paths(config.data, base, where, "data", "train_prompts", "validation_prompts"),
            "model": _with_paths(config.model, base, where, "model", "path"),
            "train": _with_paths(config.train, base, where, "train", "lora_path"),
            "reward": _with_checkpoints(config.reward, base, where),
            "latents": _with_paths(config.latents, base, where, "latents", "url"),
            "pools": config.pools.model_copy(
                update={
                    name: _with_paths(pool, base, where, f"pools.{name}", "prices", "trace")
                    for name, pool in config.pools
                }
            ),
        }
    )


def _with_checkpoints(reward: RewardSection, base: Path, where: Place) -> RewardSection:
    """The table of a reward, and those beside it, with absolute paths of checkpoints and modules."""
    also = tuple(_with_checkpoints(table, base, where) for table in reward.also)
    named = FILES_IN_OPTIONS.get(reward.name, ())
    options = {
        name: _absolute(base, value, where, f"reward.options.{name}")
        if name in named and isinstance(value, str)
        else value
        for name, value in reward.options.items()
    }
    own = ":" in reward.name or ":" in str(reward.options.get("detector", ""))
    module_dir = reward.module_dir or ("." if own else "")
    given = reward.model_copy(update={"also": also, "options": options, "module_dir": module_dir})
    return _with_paths(given, base, where, "reward", "path", "module_dir")


def _with_paths(section: SectionT, base: Path, where: Place, name: str, *fields: str) -> SectionT:
    """The section with its files as absolute paths; URLs are that already."""
    paths: dict[str, str] = {}
    for field in fields:
        path = getattr(section, field)
        if path and "://" not in path:
            paths[field] = _absolute(base, path, where, f"{name}.{field}")
    return section.model_copy(update=paths)


def _absolute(base: Path, path: str, where: Place, name: str) -> str:
    """As `absolute`, of a setting of this name."""
    try:
        return absolute(base, path)
    except SpotlightError as error:
        raise SpotlightError(f"{where(name.split('.'))}: {name} = {error}") from None


def dump(config: Config) -> str:
    """The settings as TOML, every default written out that has a value.

    Raises:
        SpotlightError: a value is no text, such as a path with bytes that are not UTF-8.
    """
    tree = config.model_dump(mode="json", exclude_none=True)
    for name, value in leaves(tree):
        if not is_text(str(value)):
            raise SpotlightError(
                f"{name} = {shown(value)}: has bytes that are not UTF-8, which a file of settings cannot hold: give "
                "it another name, or a path through another directory"
            )
    return tomli_w.dumps(tree)


def resolved(config: Config) -> bytes:
    """The settings file of a run directory: `dump`, and a last line with a hash, by which a file that was cut short is
    known."""
    return _sealed(dump(config))


def changed(content: bytes, overrides: Sequence[str]) -> bytes:
    """A file that `resolved` wrote, with some values changed: ``"section.key=value"`` each."""
    tree = tomllib.loads(content.decode())
    for override in overrides:
        set_value(tree, override)
    text = tomli_w.dumps(tree)
    return _sealed(text) if is_whole(content) else text.encode()


def _sealed(text: str) -> bytes:
    return f"{text}{WHOLE}{sha256(text.encode()).hexdigest()}\n".encode()


def is_whole(content: bytes) -> bool:
    """Whether nothing of a file that `resolved` wrote was cut off, or changed."""
    text, mark, digest = content.rpartition(WHOLE.encode())
    return bool(mark) and digest.strip() == sha256(text).hexdigest().encode()


def differences(first: Config, second: Config) -> Iterator[str]:
    """Where two differ, as ``section.key = VALUE there and VALUE here``."""
    there, here = (dict(leaves(settings.model_dump(mode="json"))) for settings in (first, second))
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            yield f"{name} = {there.get(name)!r} there and {here.get(name)!r} here"


def not_written(config: Config, content: bytes) -> list[str]:
    """Settings, as ``section.key``, that `dump` writes and that such a file lacks: it was cut short, or is older.

    Args:
        content: of the file that the settings were read from.
    """
    written = dict(leaves(tomllib.loads(content.decode())))
    return [name for name, _ in leaves(tomllib.loads(dump(config))) if name not in written]


def leaves(tree: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a tree, dotted: ``"pools.spot.workers" = 0`` and ``pools.spot.workers = 0`` are one."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def set_value(tree: dict[str, Any], override: str, *, sections: int = 1, example: str = "run.seed=3") -> None:
    """Put ``"section.key=value"`` into a tree of settings, the value in TOML; bare words are taken as text.

    Args:
        sections: least number of names before the key.
        example: of an override, for the error.

    Raises:
        SpotlightError: it has another form, or what should be a section is a value.
    """
    _, equals, text = override.partition("=")
    keys = _keys(override)
    if not equals or not sections < len(keys) <= KEYS_MAX or not all(keys):
        hint = _elsewhere(keys[0]) if equals and len(keys) == sections == 1 else ""
        raise SpotlightError(f"--set {shown(override)}: expected section.key=value, for example --set {example}{hint}")
    value = _value(override, text)
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if isinstance(tree, list):
            raise SpotlightError(f"--set {shown(override)}: there are several [[{key}]] tables: change the file")
        if not isinstance(tree, dict):
            raise SpotlightError(f"--set {shown(override)}: {shown(key)} is a value, not a section")
    tree[keys[-1]] = value


def _keys(override: str) -> list[str]:
    return [key.strip() for key in override.partition("=")[0].split(".")]


def _value(override: str, text: str) -> Any:
    """The one value that an override holds."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text.strip()
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets as deep
        raise SpotlightError(f"--set {shown(override)}: not valid TOML: {error}") from None
    if tree.keys() != {"value"}:
        raise SpotlightError(f"--set {shown(override)}: expected one value; give each setting a --set of its own")
    return tree["value"]


def _place(source: str, overrides: Sequence[str], parts: Sequence[str], rule: str = "") -> str:
    """Where the value of a setting is from: an override, or the file; of a section, the file with its overrides.

    Overrides are named without their values, for a value may hold a secret.

    Args:
        parts: of the setting's, or the section's, name.
        rule: of a section, the rule that is broken, which names the settings that break it. "": any may.
    """
    parts = list(parts)
    if given := [override for override in overrides if (keys := _keys(override)) == parts[: len(keys)]]:
        return f"--set {shown('.'.join(_keys(given[-1])))}"
    within = [override for override in overrides if _keys(override)[: len(parts)] == parts]
    named = [override for override in within if not rule or _keys(override)[-1] in rule]
    return " ".join([source, *(f"with --set {shown('.'.join(_keys(override)))}" for override in named)])


def _explain(where: Place, error: Mapping[str, Any]) -> str:
    """One pydantic error as one sentence: where, the rule, what came, the way out."""
    parts = [str(part) for part in error["loc"]]
    source = where(parts, str(error["msg"]) if error["type"] == "value_error" else "")
    while parts[:2] == ["reward", "also"]:  # further [[reward]] tables are reported as what they are
        parts = ["reward", *parts[3:]]
    *sections, field = parts or [""]
    name = ".".join((*sections, field))
    message = str(error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            return f"{source}: {_unknown(sections, field)}"
        case "missing" if field.isdecimal():  # a place in a list
            return f"{source}: {'.'.join(sections)}: expected {_list_of(sections[:-1], sections[-1], None)}"
        case "missing" if not sections:
            return f"{source}: the section [{name}] is missing; it has {_known([name])}"
        case "missing" if field == "usd_per_h":
            gpu = ".".join((*sections, "gpu"))
            return f"{source}: {name} is missing: give a worker's price per hour, or {gpu}, whose listed price is taken"
        case "missing":
            return f"{source}: {name} is missing, and it has no default"
        case "model_type":
            known = _known([*sections, field])
            return f"{source}: {name} = {shown(error['input'])}, but it is a section; it has {known}"
        case "tuple_type":
            return f"{source}: {name} = {shown(error['input'])}: expected {_list_of(sections, field, error['input'])}"
        case "string_type" if isinstance(error["input"], int | float):
            return f"{source}: {name} = {shown(error['input'])}: expected a text, so put it into quotation marks"
        case "value_error":  # ours: its text names the fields
            return f"{source}: {message}"
        case "int_parsing" | "float_parsing" | "bool_parsing" if str(error["input"]).lower() in NOTHING:
            return f"{source}: {name} = {shown(error['input'])}: TOML has no null; leave it out, and it has its default"
        case _:
            return f"{source}: {name} = {shown(error['input'])}: {message[0].lower()}{message[1:]}"


def _list_of(sections: Sequence[str], field: str, value: Any) -> str:
    """What list a setting is, with an example: its default, if its length is fixed; else the value that was given."""
    info = _section_at(sections).model_fields[field]
    items = get_args(info.annotation)
    if Ellipsis not in items and all(get_origin(item) is None for item in items) and isinstance(info.default, tuple):
        return f"a list of {len(items)}, such as {json.dumps(info.default)}"
    return f"a list, such as [{json.dumps(value)}]" if isinstance(value, str | int | float) else "a list"


def _unknown(sections: Sequence[str], field: str) -> str:
    close = difflib.get_close_matches(field, _section_at(sections).model_fields, n=1)
    hint = _elsewhere(field) or (f" (did you mean {close[0]!r}?)" if close else "")
    where = f"[{'.'.join(sections)}] has no field" if sections else "there is no section"
    return f"{where} {shown(field)}{hint}; {'it has' if sections else 'there are'} {_known(sections)}"


def _elsewhere(field: str) -> str:
    """A hint at settings of this name in other sections; empty where there are none."""
    found = settings_named(field)
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def settings_named(field: str) -> list[str]:
    """The settings of that name, as ``section.key``."""
    return list(_named(field))


def _named(field: str, within: tuple[str, ...] = ()) -> Iterator[str]:
    for name, info in _section_at(within).model_fields.items():
        if name == field and within:
            yield ".".join((*within, name))
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from _named(field, (*within, name))


def _known(sections: Sequence[str]) -> str:
    return ", ".join(map(repr, sorted(_section_at(sections).model_fields)))


def _section_at(sections: Sequence[str]) -> type[Section]:
    section: type[Section] = Config
    for name in sections:
        annotation = section.model_fields[name].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, Section)
        section = annotation
    return section
