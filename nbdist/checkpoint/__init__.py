"""Checkpoint storage on disk or at a URL. Imports no torch; used by the kernel and the ranks.

    nbdist.state.shard_io            tensors of this process
         |              ^
         | bytes        | safetensors library
         v              |
    safetensors_writer  reader       a file being written | a folder being read
         |              ^
         v              | verify     manifest.json: the expected files with size and crc32
    storage             |
      folder_storage    |            drafts, atomic rename, retention
      url_storage --> url            the same files at a URL, copied here before they are read

To save: ``Storage.begin``, then each rank writes its files and its report, then
``PendingCheckpoint.commit``. To read: ``Storage.open_checkpoint``, ``verify_files``.

Checkpoints may come from untrusted sources: nothing is unpickled, file names are checked
against an allow-list, links are not followed, and sizes and checksums are checked before the
content is used. An invalid checkpoint raises CheckpointError.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from nbdist.checkpoint.folder_storage import FolderStorage, PendingFolderCheckpoint
from nbdist.checkpoint.manifest import (
    BaseReference,
    CheckpointFile,
    Manifest,
    OptimizerMetadata,
    ParamGroup,
    RankWriteReport,
    TensorMetadata,
    merge_tensors,
)
from nbdist.checkpoint.reader import CheckpointReader, files_for_rank, verify_files
from nbdist.checkpoint.storage import CheckpointSummary, PendingCheckpoint, Storage
from nbdist.checkpoint.url import (
    CheckpointDownload,
    Url,
    is_url,
    location_with_password,
    parse_location,
)
from nbdist.checkpoint.url_storage import UrlStorage

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "BaseReference",
    "CheckpointDownload",
    "CheckpointFile",
    "CheckpointReader",
    "CheckpointSummary",
    "FolderStorage",
    "Manifest",
    "OptimizerMetadata",
    "ParamGroup",
    "PendingCheckpoint",
    "PendingFolderCheckpoint",
    "RankWriteReport",
    "Storage",
    "TensorMetadata",
    "Url",
    "UrlStorage",
    "files_for_rank",
    "is_url",
    "location_with_password",
    "merge_tensors",
    "parse_location",
    "storage_for",
    "verify_files",
]


@functools.lru_cache(maxsize=8)
def storage_for(where: Path | Url) -> Storage:
    """Return the storage for a folder or URL (cached)."""
    return UrlStorage(where) if isinstance(where, Url) else FolderStorage(where)
