"""Checkpoints on disk or at a URL; pure, used by the kernel and the ranks, needs no torch.

    nbdist.state.shard_io              tensors of this process
         |        ^
         | bytes  | bytes
         v        |
    writer      headers             one safetensors file: its head, its bytes, its checksum
         |        ^
         |        |                 boxes: what part of a tensor is in which file
         v        |
    draft       opened              a folder being written | a folder being read
         |        ^
         | rename | verify          manifest.json: what must be there, with size and crc32
         v        |
    root: checkpoints/<name>/       found whole or not at all; leftovers removes what is dead

At a URL the same files lie, told apart in place | remote; brought here to be read.

`begin`, the ranks' files and reports, `commit`; then `entries`, `opened`, `verify`. No
pickle anywhere, and a file from a stranger gives a CheckpointError: names are from an
allow-list, nothing is a link, sizes and checksums come before content (strict, names).
"""

from __future__ import annotations

from nbdist.checkpoint.catalog import Entry, entries, find, latest, opened
from nbdist.checkpoint.commit_protocol import abort, begin, commit
from nbdist.checkpoint.download import Brought
from nbdist.checkpoint.manifest import FilePart, Group, Key, Manifest, Optimizer
from nbdist.checkpoint.rank_reports import Told, failed, keys, parts, report, told
from nbdist.checkpoint.reader import Opened
from nbdist.checkpoint.retention import keep, tidy
from nbdist.checkpoint.storage import Draft, Place, place
from nbdist.checkpoint.url import Url, full, is_url, located
from nbdist.checkpoint.url_storage import Remote
from nbdist.checkpoint.verify import share, verify

__all__ = [
    "Brought",
    "Draft",
    "Entry",
    "FilePart",
    "Group",
    "Key",
    "Manifest",
    "Opened",
    "Optimizer",
    "Place",
    "Remote",
    "Told",
    "Url",
    "abort",
    "begin",
    "commit",
    "entries",
    "failed",
    "find",
    "full",
    "is_url",
    "keep",
    "keys",
    "latest",
    "located",
    "opened",
    "parts",
    "place",
    "report",
    "share",
    "tidy",
    "told",
    "verify",
]
