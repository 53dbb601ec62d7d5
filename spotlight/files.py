"""Reads files that a person named, if they are regular and of a bounded size, so that no read blocks; checks paths and
addresses."""

from __future__ import annotations

import errno
import operator
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Literal

from spotlight.records import SpotlightError

LARGEST_BYTES = 256 * 2**20
"""Largest file: ten million prompts of 25 characters, or five years of a trace with an event a second.
"""


PATH_MAX = 1024
"""Most characters of a path in the settings; systems take four times as many, and other names are appended."""
SHOWN_MAX = 80
"""Characters that an error shows of a wrong value."""

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
"""Object stores in which a run can live."""
SECRETS_COME_FROM = "keys come from the environment, such as AWS_ACCESS_KEY_ID"


def is_url(place: str | Path) -> bool:
    """Whether it is the address of an object store rather than a path; ``file://`` is a path."""
    return "://" in str(place) and not str(place).startswith("file://")


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: a file name's bytes that are no text become lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_url(url: str) -> None:
    """Check an address: it is shown and written down, so it may hold no secret; an object store's must name a bucket.

    Raises:
        ValueError: this one may hold a secret, names no bucket, or leads upwards.
    """
    scheme, _, rest = url.partition("://")
    if "@" in rest.partition("/")[0] or "?" in rest:
        raise ValueError(
            f"the address {scheme}://... holds a user, a password or a query, and it would be written down: leave "
            f"them out; {SECRETS_COME_FROM}"
        )
    if scheme in OBJECT_SCHEMES and not rest.strip("/"):
        raise ValueError(f"{url!r} names no bucket: expected {scheme}://BUCKET, and a path in it")
    if scheme in OBJECT_SCHEMES and not {".", ".."}.isdisjoint(rest.split("/")):
        raise ValueError(f"{shown(url)}: an object store has no '.' and no '..': write out where that leads")


def check_slashes(place: str | Path) -> None:
    """
    Raises:
        SpotlightError: it is an object store's address with one slash, as a `pathlib.Path` has it.
    """
    scheme, _, rest = str(place).partition(":/")
    if scheme in OBJECT_SCHEMES and not rest.startswith("/"):
        raise SpotlightError(
            f"{shown(str(place))}: an object store's address has two slashes: give {scheme}://{rest}, and as text, for "
            "a pathlib.Path keeps only one"
        )


def shown(value: object) -> str:
    """A wrong value as an error shows it: its beginning, if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # it has too many digits, or is too deep
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def whole(value: object, name: str) -> int:
    """An integer from a value that Python code gave.

    Raises:
        SpotlightError: it is no whole number.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise SpotlightError(f"{name} = {shown(value)}: give a whole number") from None


def home() -> Path:
    """This user's home directory.

    Raises:
        SpotlightError: the system knows of none.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise SpotlightError(
            f"this system knows of no home directory of user {os.getuid()}: set HOME to a directory of yours"
        ) from None


def from_home(path: str) -> str:
    """A path with a user's home directory in place of the ``~`` or ``~user`` that it begins with, if it does.

    Raises:
        SpotlightError: there is no such user.
    """
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except (RuntimeError, ValueError):  # the latter if its name could be nobody's
        raise SpotlightError(
            f"{shown(path)}: there is no such user, in whose home directory it would be: write that out, or ./ before "
            "a name that begins with ~"
        ) from None


def absolute(base: Path, path: str) -> str:
    """A path of a setting, which is relative to ``base``, or to a home directory (``~``), without links on its way.

    Raises:
        SpotlightError: no file can be there.
    """
    check_slashes(path)
    if len(path) > PATH_MAX:
        raise SpotlightError(f"{shown(path)}: has {len(path)} characters, and a path has {PATH_MAX} at most")
    path = from_home(path)
    try:
        found = os.path.realpath(base / path)
    except (OSError, ValueError) as error:
        raise SpotlightError(f"{path!r}: is no path ({error}); give the path of a file") from None
    if _leads_in_a_circle(found):
        raise SpotlightError(f"{path!r}: links lead in a circle there; give the path of a file")
    return found


def _leads_in_a_circle(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def kind_of(path: str | Path) -> Literal["", "file", "directory", "other"]:
    """What is at a path that a person named; "" where there is nothing.

    Raises:
        SpotlightError: the system does not say, as of what is in a directory into which this user may not look.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last of what is no path
        return ""
    except OSError as error:
        raise SpotlightError(
            f"{shown(str(path))}: cannot be looked at: {error.strerror}; name what this user may read"
        ) from None
    return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other"


def read_bytes(path: str | Path, what: str) -> bytes:
    """All of a file.

    Args:
        what: the kind of file, for the error: "a prompt file".

    Raises:
        SpotlightError: there is no such file, or it cannot be read, or not safely.
    """
    path = Path(path)
    where = f"{path}: cannot be read as {what}"
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                content = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise SpotlightError(f"{where}: {error.strerror}") from None
    except ValueError as error:
        raise SpotlightError(f"{where!r}: {error}; give the path of a file") from None
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a named pipe, a socket or a device"
        raise SpotlightError(f"{where}: it is {kind}; give a regular file")
    if len(content) > LARGEST_BYTES:
        raise SpotlightError(f"{where}: it has more than {LARGEST_BYTES} bytes; give a smaller one")
    return content


def read_files(path: str | Path, what: str) -> dict[str, bytes]:
    """``{"": content}`` of a file; or of a directory, ``{name: content}`` of its files.

    Raises:
        SpotlightError: as `read_bytes`; all of them together may have as many bytes as one file.
    """
    path = Path(path)
    if kind_of(path) != "directory":
        return {"": read_bytes(path, what)}
    found: dict[str, bytes] = {}
    try:
        names = sorted(path.iterdir())
    except OSError as error:
        raise SpotlightError(f"{path}: cannot be read as {what}: {error.strerror}") from None
    for file in names:
        found[file.name] = read_bytes(file, what)
        if sum(map(len, found.values())) > LARGEST_BYTES:
            raise SpotlightError(f"{path}: its files have more than {LARGEST_BYTES} bytes; give a smaller directory")
    return found


def digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 of what `read_files` read: of a file's content, or of a directory's names and hashes."""
    hashes = {name: sha256(content).hexdigest() for name, content in files.items()}
    if hashes.keys() == {""}:
        return hashes[""]
    return sha256(os.fsencode("".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes)))).hexdigest()


@contextmanager
def writing(place: str | Path) -> Iterator[None]:
    """Turn errors of writing inside into one sentence about the place that a person chose.

    Raises:
        SpotlightError: it cannot be written to, or is full.
    """
    try:
        yield
    except OSError as error:
        raise SpotlightError(f"{place}: cannot be written: {error}; make room, or choose another place") from error
