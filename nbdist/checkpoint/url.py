"""URLs of checkpoints, accessed with fsspec, which is imported on first use.

Each fsspec file system takes credentials from the environment, its own configuration files, or
the URL. Passwords in a URL are redacted in all messages.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from nbdist.errors import CheckpointError
from nbdist.redaction import redact_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_MAX_WORDS = 200
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "tos"}
"""Object stores: they need no folders, and creating one could create a bucket."""


@dataclass(frozen=True, slots=True, repr=False)
class Url:
    """URL with an interface like `pathlib.Path`. Its password is redacted when printed."""

    unredacted: str

    def __truediv__(self, name: str) -> Url:
        """Return the URL of a child."""
        return Url(f"{self.unredacted.rstrip('/')}/{name}")

    def __str__(self) -> str:
        """Return the URL without its password."""
        return redact_secrets(self.unredacted)

    def __repr__(self) -> str:
        """Return the representation without the password."""
        return f"Url({str(self)!r})"

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.unredacted.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """URL without the last component of the path."""
        return Url(self.unredacted.rstrip("/").rpartition("/")[0])

    def open_filesystem(self) -> tuple[Any, str]:
        """Return the fsspec file system and the path in it.

        Raises:
            CheckpointError: the URL is not supported or reachable, or a package is missing.
        """
        from fsspec.core import url_to_fs

        if _SCHEME.fullmatch(self.unredacted):
            raise CheckpointError(
                f"{self} does not name a folder. Use a URL such as s3://bucket/path, or a folder."
            )
        try:
            system, path = url_to_fs(self.unredacted)
        except ImportError as error:
            raise CheckpointError(
                f"{self} needs a package that is not installed: {error}. Install it on all"
                " machines with ranks."
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"fsspec does not support the URL {self} ({describe_error(error)}). Use a URL such"
                " as s3://bucket/path, or a folder."
            ) from error
        except Exception as error:
            raise CheckpointError(
                f"Cannot reach {self} ({describe_error(error)}). Check the URL and the network."
            ) from error
        if "memory" in _protocols(system):
            raise CheckpointError(
                f"{self} is the memory of a single process, which other processes cannot read. Use"
                " a URL such as s3://bucket/path, or a folder."
            )
        return system, path

    def make_folder(self) -> None:
        """Create the folder, except in object stores, which need none."""
        system, path = self.open_filesystem()
        if not _BUCKETS & _protocols(system):
            system.makedirs(path, exist_ok=True)


def is_url(text: object) -> TypeGuard[str]:
    """Return whether the text is a URL rather than a path."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


def parse_location(text: object, within: Path = Path()) -> Path | Url:
    """Parse a URL or a path. A relative path is joined to `within`."""
    if isinstance(text, Url):
        return text
    return Url(text) if is_url(text) else within / str(text)


def location_with_password(where: Path | Url) -> str:
    """Return the text that ``parse_location`` accepts. A URL includes its password."""
    return where.unredacted if isinstance(where, Url) else str(where)


@contextmanager
def translate_errors(problem: str) -> Iterator[None]:
    """Convert any exception of a file system to a CheckpointError.

    Args:
        problem: beginning of the message; the exception is appended in parentheses.

    Raises:
        CheckpointError: the block raised an exception.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{problem} ({describe_error(error)}). Check the URL and the permissions of this"
            " machine."
        ) from error


def describe_error(error: Exception) -> str:
    """Describe an exception on one line, at most 200 characters long, with secrets redacted."""
    text = redact_secrets(" ".join(str(error).split()))
    text = text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _protocols(system: Any) -> set[str]:
    found = system.protocol
    return {found} if isinstance(found, str) else set(found)
