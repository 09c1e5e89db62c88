"""Names and manifests of strangers: refused in one sentence, and nothing is allocated."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import small_checkpoints

from nbdist import checkpoint
from nbdist.checkpoint import FolderStorage, name_validation
from nbdist.checkpoint.manifest import Manifest
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

TRICKS = [
    *("", ".", "..", ".hidden", "../../x", "a/b", "/etc/passwd", "a\0b", "a" * 65, "a" * 300),
    *("<img src=x onerror=alert(1)>", "a b", "ä", "a\n", "\u202ea", "a\\b", "~", "$HOME", "con|"),
]
FILE = checkpoint.CheckpointFile(name="model-00000-0.safetensors", size_bytes=10, crc32=1)


def tree(**changes: Any) -> dict[str, Any]:
    return json.loads(small_checkpoints.manifest((FILE,)).to_json()) | changes


def read(content: object) -> Manifest:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Manifest.from_json(text)


@pytest.mark.fault("E10")
@pytest.mark.fault("S15")
@pytest.mark.parametrize("name", TRICKS, ids=ascii)
def test_tricky_names_are_refused(tmp_path: Path, name: str) -> None:
    for use in (name_validation.check_name, lambda it: FolderStorage(tmp_path / "root").begin(it)):
        with pytest.raises(CheckpointError, match="Invalid checkpoint name") as caught:
            use(name)
        assert str(caught.value).isascii()
        assert len(str(caught.value)) < 250
    with pytest.raises(CheckpointError, match="Invalid checkpoint name"):
        FolderStorage(tmp_path).find(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "step-100", "best_2.1", "A" * 64, "_-", "0"])
def test_good_names_are_taken(name: str) -> None:
    assert name_validation.check_name(name) == name


@pytest.mark.fault("E10")
@pytest.mark.fault("S15")
def test_a_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = small_checkpoints.save(tmp_path / "elsewhere", "good")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(elsewhere)
    for use in (FolderStorage(root).find, FolderStorage(root).begin):
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            use("link")
    with pytest.raises(CheckpointError, match="not a complete nbdist checkpoint"):
        checkpoint.verify_files(root / "link")
    assert FolderStorage(root).list_checkpoints() == []


def test_a_manifest_comes_back_as_it_was() -> None:
    made = small_checkpoints.manifest((FILE,))
    again = Manifest.from_json(made.to_json())
    assert again == made
    assert again.optimizers[0].groups[0].names == ("w",)
    assert again.size_bytes == 10
    assert b"Infinity" not in made.to_json()


def test_a_manifest_of_version_0_1_is_read() -> None:
    text = b"""{"format":1,"id":"33a872c6866b42c67be0affaf7005389",
    "created":"2026-11-23T08:34:43.194497+00:00","versions":{"nbdist":"0.1.0","torch":"2.13.0"},
    "backend":"zero3","world_size":3,"options":{"offload":null,"bucket":500000000.0},"step":7,
    "samples":28,"keys":{"model.w":{"shape":[7,5],"dtype":"float32","digest":"00000000000000ff"}},
    "files":[{"name":"model-00000-0.safetensors","bytes":1216,"crc32":"13bb1256"}],
    "aliases":{"model.tied":"model.w"},"optimizers":[{"prefix":"optim",
    "kind":"torch.optim.adamw.AdamW","defaults":{"lr":0.001,"betas":[0.9,0.999]},
    "groups":[{"options":{"lr":0.001,"fused":null},"names":["w"]}],"counts":{"w":{"step":7.0}}}],
    "schedulers":[{"best":{"$float":"inf"},"last_epoch":7}],"rng":[[3,[4294967295,5],null]],
    "positions":[{"epoch":1,"batch":3}],"extra":{}}"""
    manifest = Manifest.from_json(text)
    assert manifest.created == datetime(2026, 11, 23, 8, 34, 43, 194497, tzinfo=UTC)
    assert manifest.files == (
        checkpoint.CheckpointFile(
            name="model-00000-0.safetensors", size_bytes=1216, crc32=0x13BB1256
        ),
    )
    assert manifest.keys["model.w"].shape == (7, 5)
    assert manifest.keys["model.w"].digest == 255
    assert manifest.optimizers[0].groups[0].options == {"lr": 0.001, "fused": None}
    assert manifest.schedulers == ({"best": float("inf"), "last_epoch": 7},)
    assert manifest.id == "33a872c6866b42c67be0affaf7005389"


@pytest.mark.parametrize(
    "extra",
    [{"x": object()}, {"x": {1: 2}}, {"x": {"$float": "inf"}}, {"x": b"a"}, {"x": 2**64}],
    ids=["object", "number as a key", "our own mark", "bytes", "too large"],
)
def test_what_cannot_be_kept_is_refused_when_written(extra: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"Cannot write the manifest: extra"):
        small_checkpoints.manifest((FILE,), extra=extra).to_json()


def test_a_file_that_cannot_be_read_again_is_not_written() -> None:
    bad = checkpoint.CheckpointFile(name="../x", size_bytes=1, crc32=1)
    with pytest.raises(CheckpointError, match="is not a valid file name"):
        small_checkpoints.manifest((bad,)).to_json()


@pytest.mark.fault("E8")
def test_a_newer_format_says_so() -> None:
    newer = {"format": 3, "versions": {"nbdist": "9.1"}, "all": "new"}
    with pytest.raises(CheckpointError, match=r"newer nbdist \(9\.1\) in format 3"):
        read(newer)
    for versions in (None, 3, {"nbdist": "<img>" * 99}, {"nbdist": ["x"]}):
        with pytest.raises(CheckpointError, match="newer nbdist in format 99\\."):
            read({"format": 99, "versions": versions})


HOSTILE: dict[str, Any] = {
    "no JSON": b"{",
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep value": tree(extra={"x": json.loads("[" * 40 + "]" * 40)}),
    "NaN": json.dumps(tree()).encode().replace(b'"step": 7', b'"step": NaN'),
    "a long number": json.dumps(tree()).encode().replace(b'"step": 7', b'"step": ' + b"9" * 5000),
    "no format": {name: value for name, value in tree().items() if name != "format"},
    "format as text": tree(format="1"),
    "format as bool": tree(format=True),
    "format 0": tree(format=0),
    "negative format": tree(format=-3),
    "a field too many": tree(surprise=1),
    "a field too few": {name: value for name, value in tree().items() if name != "keys"},
    "step as float": tree(step=7.0),
    "step as bool": tree(step=True),
    "negative step": tree(step=-1),
    "huge step": tree(step=2**62),
    "world size as text": tree(world_size="2"),
    "keys as list": tree(keys=[]),
    "id as path": tree(id="../" * 10 + "xx"),
    "no time": tree(created="yesterday"),
    "time without zone": tree(created="2026-01-01T00:00:00"),
    "time as number": tree(created=1e9),
    "backend with escape": tree(backend="zero3\x1b[31m"),
    "backend too long": tree(backend="x" * 2000),
    "versions nested": tree(versions={"nbdist": {"x": 1}}),
    "alias of nothing": tree(aliases={"model.tied": "model.other"}),
    "reference without a key": tree(
        bases=[{"name": "base", "revision": "", "tensors": {"model.other": ["w"]}}]
    ),
    "reference to no tensor": tree(
        bases=[{"name": "base", "revision": "", "tensors": {"model.w": []}}]
    ),
    "alias that is a key": tree(aliases={"model.w": "model.w"}),
    "optimizer without kind": tree(optimizers=[{"prefix": "optim"}]),
    "counts as text": tree(optimizers=[tree()["optimizers"][0] | {"counts": {"w": {"step": "7"}}}]),
    "bad float": tree(extra={"x": {"$float": "1e999"}}),
}
HOSTILE |= {
    f"key {name}": tree(
        keys={"model.w": {"shape": [3], "dtype": "float32", "digest": "0" * 16} | it}
    )
    for name, it in {
        "negative": {"shape": [-1]},
        "float": {"shape": [1e9]},
        "huge": {"shape": [10**9] * 3},
        "many dimensions": {"shape": [1] * 65},
        "shape as text": {"shape": "3"},
        "other dtype": {"dtype": "object"},
        "dtype as list": {"dtype": ["float32"]},
        "digest as number": {"digest": 5},
        "short digest": {"digest": "0x00"},
    }.items()
}
HOSTILE |= {
    f"file {name!a}": tree(files=[{"name": name, "bytes": 1, "crc32": "0" * 8}])
    for name in [*TRICKS, "manifest.json", "part-00000.json", 3, None, ["x"]]
    if name != "a" * 65  # longer names are fine for files
}
HOSTILE |= {
    "file size as float": tree(files=[{"name": "a", "bytes": 1e9, "crc32": "0" * 8}]),
    "negative file size": tree(files=[{"name": "a", "bytes": -1, "crc32": "0" * 8}]),
    "upper case crc": tree(files=[{"name": "a", "bytes": 1, "crc32": "ABCDEF01"}]),
    "a file twice": tree(files=[{"name": "a", "bytes": 1, "crc32": "0" * 8}] * 2),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_is_refused(content: object) -> None:
    with pytest.raises(CheckpointError, match="Invalid manifest") as caught:
        read(content)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_a_sparse_manifest_is_not_read(tmp_path: Path) -> None:
    path = small_checkpoints.save(tmp_path, "a")
    os.truncate(path / "manifest.json", 1 << 40)
    with pytest.raises(CheckpointError, match="larger than"):
        checkpoint.verify_files(path)
    assert FolderStorage(tmp_path).list_checkpoints() == []


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_a_manifest_is_a_regular_file(tmp_path: Path, kind: str) -> None:
    path = small_checkpoints.save(tmp_path, "a")
    manifest = path / "manifest.json"
    manifest.rename(tmp_path / "aside.json")
    if kind == "fifo":
        os.mkfifo(manifest)  # opening it would wait for a writer
    elif kind == "folder":
        manifest.mkdir()
    else:
        manifest.symlink_to(tmp_path / "aside.json")
    with pytest.raises(CheckpointError, match="not a complete nbdist checkpoint"):
        checkpoint.verify_files(path)
    assert FolderStorage(tmp_path).list_checkpoints() == []
