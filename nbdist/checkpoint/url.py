"""A URL that fsspec knows, and the file system behind it; pure, imports fsspec when it is used.

Who may read and write there is known to each file system itself: from the environment, from its
own files, or from the URL. What is said of a URL has no password.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from nbdist.errors import CheckpointError
from nbdist.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_MAX_WORDS = 200
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "tos"}
"""Where a path needs no folders, and making one could make a bucket."""


@dataclass(frozen=True, slots=True, repr=False)
class Url:
    """A URL, as `pathlib.Path` is a path; shown without its password."""

    full: str

    def __truediv__(self, name: str) -> Url:
        """What lies below it."""
        return Url(f"{self.full.rstrip('/')}/{name}")

    def __str__(self) -> str:
        """For messages."""
        return redacted(self.full)

    def __repr__(self) -> str:
        """For messages of others."""
        return f"Url({str(self)!r})"

    @property
    def name(self) -> str:
        """The last part."""
        return self.full.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """All but the last part."""
        return Url(self.full.rstrip("/").rpartition("/")[0])

    def opened(self) -> tuple[Any, str]:
        """Give the file system, and the path that it has there.

        Raises:
            CheckpointError: fsspec does not know it, or a package is missing.
        """
        from fsspec.core import url_to_fs

        if _SCHEME.fullmatch(self.full):
            raise CheckpointError(
                f"{self} names no folder; use a URL such as s3://bucket/path, or a folder."
            )
        try:
            system, path = url_to_fs(self.full)
        except ImportError as error:
            raise CheckpointError(
                f"{self} needs a package that is not installed here: {error}. Install it wherever"
                " ranks run."
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"{self} is no URL that fsspec knows ({words(error)}); use one such as"
                " s3://bucket/path, or a folder."
            ) from error
        except Exception as error:
            raise CheckpointError(
                f"{self} cannot be reached ({words(error)}); look at the URL and at the network."
            ) from error
        if "memory" in _protocols(system):
            raise CheckpointError(
                f"{self} is the memory of one process, which no other sees; use a URL such as"
                " s3://bucket/path, or a folder."
            )
        return system, path

    def make(self) -> None:
        """Make it where it has to be a folder."""
        system, path = self.opened()
        if not _BUCKETS & _protocols(system):
            system.makedirs(path, exist_ok=True)


def is_url(text: object) -> TypeGuard[str]:
    """Whether a user means a URL and no path."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


def located(text: object, within: Path = Path()) -> Path | Url:
    """Give a URL, or the path of a folder."""
    if isinstance(text, Url):
        return text
    return Url(text) if is_url(text) else within / str(text)


def full(where: Path | Url) -> str:
    """Give what `located` takes; of a URL it may have a password."""
    return where.full if isinstance(where, Url) else str(where)


@contextmanager
def in_words(problem: str) -> Iterator[None]:
    """Say in one sentence what a file system raises, whatever class that is of.

    Raises:
        CheckpointError: the problem, and what the file system said.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{problem} ({words(error)}); look at the URL and at what this machine may do there."
        ) from error


def words(error: Exception) -> str:
    """An error of a file system on one line, without secrets."""
    text = redacted(" ".join(str(error).split()))
    text = text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _protocols(system: Any) -> set[str]:
    found = system.protocol
    return {found} if isinstance(found, str) else set(found)
