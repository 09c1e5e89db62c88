"""Checkpoint storage on disk or at a URL. Imports no torch; used by the kernel and the ranks.

    nbdist.state.shard_io              tensors of this process
         |        ^
         | bytes  | bytes
         v        |
    writer      safetensors_header  one safetensors file: header, data, checksum
         |        ^
         |        |                 chunks: which part of a tensor is in which file
         v        |
    commit_     reader              a folder being written | a folder being read
    protocol      ^
         |        |
         | rename | verify          manifest.json: the expected files with size and crc32
         v        |
    root: checkpoints/<name>/       complete or absent; retention removes abandoned folders

``storage`` hides the difference between a folder and a URL (``url_storage``). Files at a URL
are the same; ``download`` copies them to this machine before they are read.

To save: ``create_draft``, then each rank writes its files and its report, then
``commit_draft``. To read: ``list_checkpoints``, ``open_checkpoint``, ``verify_files``.

Checkpoints may come from untrusted sources: nothing is unpickled, file names are checked
against an allow-list, links are not followed, and sizes and checksums are checked before the
content is used. An invalid checkpoint raises CheckpointError.
"""

from __future__ import annotations

from nbdist.checkpoint.catalog import (
    CheckpointSummary,
    find_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    open_checkpoint,
)
from nbdist.checkpoint.commit_protocol import commit_draft, create_draft, remove_draft
from nbdist.checkpoint.download import CheckpointDownload
from nbdist.checkpoint.manifest import (
    CheckpointFile,
    Manifest,
    OptimizerMetadata,
    ParamGroup,
    TensorMetadata,
)
from nbdist.checkpoint.rank_reports import (
    RankReport,
    collect_files,
    merge_tensors,
    read_report,
    write_failure,
    write_report,
)
from nbdist.checkpoint.reader import CheckpointReader
from nbdist.checkpoint.retention import remove_abandoned, remove_oldest
from nbdist.checkpoint.storage import PendingCheckpoint, Storage, storage_for
from nbdist.checkpoint.url import Url, is_url, location_with_password, parse_location
from nbdist.checkpoint.url_storage import UrlStorage
from nbdist.checkpoint.verify import files_for_rank, verify_files

__all__ = [
    "CheckpointDownload",
    "CheckpointFile",
    "CheckpointReader",
    "CheckpointSummary",
    "Manifest",
    "OptimizerMetadata",
    "ParamGroup",
    "PendingCheckpoint",
    "RankReport",
    "Storage",
    "TensorMetadata",
    "Url",
    "UrlStorage",
    "collect_files",
    "commit_draft",
    "create_draft",
    "files_for_rank",
    "find_checkpoint",
    "is_url",
    "latest_checkpoint",
    "list_checkpoints",
    "location_with_password",
    "merge_tensors",
    "open_checkpoint",
    "parse_location",
    "read_report",
    "remove_abandoned",
    "remove_draft",
    "remove_oldest",
    "storage_for",
    "verify_files",
    "write_failure",
    "write_report",
]
