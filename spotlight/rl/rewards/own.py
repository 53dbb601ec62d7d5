"""Imports rewards and detectors of a person's own, and reads a changed module again."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import psutil

from spotlight.records import SpotlightError
from spotlight.rl.rewards.base import Scorer, explained

Made = TypeVar("Made")


def imported(name: str, where: str, beside: str = "") -> Any:
    """What ``module:Class`` names.

    Args:
        beside: a directory to look in last, for this module and those that it imports, so that it hides nothing that
            Python finds elsewhere. "": none.

    Raises:
        SpotlightError: it has another form, there is no such thing, or the module cannot be imported, or is another
            than the one in that directory.
    """
    module, _, attribute = name.partition(":")
    way_out = (
        f"give module:Class, of a file in {beside or 'the directory of the settings file'}, or of a module that Python "
        "finds (PYTHONPATH); workers look there, too"
    )
    if module == "__main__":
        raise SpotlightError(
            f"{where} = {name!r}: workers are processes of their own, which do not see what a notebook or a script "
            f"defines: write it to a file, such as mine.py, and name mine:{attribute}"
        )
    if not all(part.isidentifier() for part in module.split(".")):
        raise SpotlightError(f"{where} = {name!r} names no module: {way_out}; mypkg/mine.py is mypkg.mine")
    if beside and beside not in sys.path:
        sys.path.append(beside)
        looked_in.add(beside)
    _importing.names.append(name)
    try:
        if module not in sys.modules:
            _read_s[module] = time.time()
        found = importlib.import_module(module)
        _check_is_beside(found, beside)
        return getattr(found, attribute)
    except SpotlightError as error:  # it has a way out of its own
        raise SpotlightError(f"{where} = {name!r}: {error}") from None
    except Exception as error:  # of anyone's code
        raise SpotlightError(f"{where} = {name!r} cannot be imported ({explained(error)}): {way_out}") from None
    finally:
        _importing.names.pop()


def _check_is_beside(module: ModuleType, folder: str) -> None:
    """
    Raises:
        ImportError: Python found this one, and another lies in the folder: workers might find that.
    """
    place, found = Path(folder, *module.__name__.split(".")), Path(module.__file__ or "")
    files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if folder and file.is_file()]
    if files and not any(found.exists() and file.samefile(found) for file in files):
        raise ImportError(f"Python finds {module.__file__ or 'one of its own'}, and {files[0]} is another: rename it")


looked_in: set[str] = set()
"""Directories that this process looks into for modules of rewards, at the end of ``sys.path``."""


class _Importing(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []


_importing = _Importing()
"""Names that this thread is importing. A module that begins a run as it is imported would begin one in every worker."""
_read_s: dict[str, float] = {}
"""{module: when it was read here}, in Unix seconds; others were read after this process began."""


def refuse_while_importing() -> None:
    """
    Raises:
        SpotlightError: a reward's module is being imported, here or in a worker.
    """
    if _importing.names:
        name = _importing.names[-1]
        raise SpotlightError(
            f"{name.partition(':')[0]} begins a run as it is imported, and all workers import it for {name}: begin it "
            f'under `if __name__ == "__main__":`, or give the scorer a file of its own'
        )


def read_again(names: Iterable[str]) -> None:
    """Reload the modules of rewards whose files were changed since they were read: new workers read the new files.

    Args:
        names: ``module:Class``; names of built-in rewards are skipped.

    Raises:
        SpotlightError: one cannot be read.
    """
    for name in names:
        module = sys.modules.get(name.partition(":")[0]) if ":" in name else None
        if module is None or name in _importing.names or _changed_s(module) <= _known_s(module):
            continue
        _importing.names.append(name)
        read_s = time.time()
        try:
            importlib.reload(module)
        except Exception as error:  # of anyone's code
            where = module.__file__
            raise SpotlightError(f"{where} was changed and cannot be imported again ({explained(error)})") from None
        finally:
            _importing.names.pop()
        _read_s[module.__name__] = read_s


def _known_s(module: ModuleType) -> float:
    return _read_s.get(module.__name__) or psutil.Process().create_time()


def _changed_s(module: ModuleType) -> float:
    """When its file was changed last; 0 where there is none."""
    try:
        return Path(module.__file__ or "").stat().st_mtime
    except OSError:
        return 0.0


def check_kind(kind: Any, setting: str) -> None:
    """
    Raises:
        SpotlightError: a person's own reward is no scorer, or cannot be called as one.
    """
    if not (isinstance(kind, type) and issubclass(kind, Scorer)):
        raise SpotlightError(
            f"{setting} is no subclass of spotlight.rl.rewards.Scorer: write a class that is one, with "
            "__call__(self, images_BHWC, prompts)"
        )
    if kind.__call__ is Scorer.__call__ and kind.of is Scorer.of:
        raise SpotlightError(f"{setting} scores nothing: give it __call__(self, images_BHWC, prompts), or of")
    for name in ("__call__", "of"):
        try:
            inspect.signature(getattr(kind, name)).bind(None, None, None)
        except TypeError as error:
            raise SpotlightError(
                f"{setting}: its {name} cannot be called with images and prompts ({error}): give it the arguments "
                "(self, images_BHWC, prompts)"
            ) from None
        if inspect.iscoroutinefunction(getattr(kind, name)):
            raise SpotlightError(
                f"{setting}: its {name} is a coroutine, which nothing awaits: write `def` instead of `async def`, and "
                "asyncio.run(...) in it"
            )


def made(kind: Callable[..., Made], setting: str, options: Mapping[str, Any]) -> Made:
    """A scorer or a detector of a person's own class.

    Args:
        setting: which names it.

    Raises:
        TypeError: its arguments are others.
    """
    inspect.signature(kind).bind(**options)
    try:
        return kind(**options)
    except SpotlightError:
        raise
    except Exception as error:  # of anyone's code
        raise SpotlightError(f"{setting} cannot be made: {explained(error)}") from None
