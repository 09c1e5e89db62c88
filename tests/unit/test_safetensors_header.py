"""safetensors files: what is written others read, what strangers write is checked first."""

from __future__ import annotations

import json
import os
import random
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.checkpoint import checksum, safetensors_header
from nbdist.checkpoint.safetensors_header import DTYPES, Header, StoredTensor
from nbdist.checkpoint.writer import SafetensorsWriter
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SHARDED = "DCP_SHARDING_INFO"


def parsed(content: bytes) -> Header:
    fd = os.memfd_create("a")
    try:
        os.write(fd, content)
        return safetensors_header.read_header(fd, "a")
    finally:
        os.close(fd)


def file_of(tree: Any, data: bytes = bytes(8)) -> bytes:
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_a_header_comes_back_as_it_was() -> None:
    tensors = [
        StoredTensor(name="double", dtype="F64", shape=(3,), offsets=(5,)),
        StoredTensor(name="none", dtype="F32", shape=(0, 4), offsets=(2, 0)),
        StoredTensor(name="scalar", dtype="F32", shape=(), offsets=()),
        StoredTensor(name="half é", dtype="BF16", shape=(1, 2, 3), offsets=(0, 1, 0)),
        StoredTensor(name="flag", dtype="BOOL", shape=(1,), offsets=(0,)),
    ]
    head = safetensors_header.build_header(tensors)
    assert len(head) % safetensors_header.ALIGNMENT == 0
    found = parsed(head + bytes(24 + 0 + 4 + 12 + 1))
    assert list(found.tensors.values()) == tensors
    assert found.starts["double"] == len(head)
    assert found.starts["flag"] == len(head) + 40
    sharding = json.loads(found.metadata[SHARDED])
    assert sharding["half é"] == {"saved_offsets": [0, 1, 0]}
    assert found.metadata["format"] == "pt"


def test_a_file_without_tensors() -> None:
    assert parsed(safetensors_header.build_header([])).tensors == {}


def test_a_file_of_others_says_nothing_of_boxes() -> None:
    found = parsed(file_of({"__metadata__": {"format": "pt"}, "w": GOOD}))
    assert found.tensors["w"].offsets is None


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "no header": (0).to_bytes(8, "little"),
    "longer than the file": (1000).to_bytes(8, "little") + b"{}",
    "header of 2**63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    "header of 2**64 - 1 bytes": b"\xff" * 8 + b"{}",
    "no JSON": file_of(b"{"),
    "a list": file_of([]),
    "pickle": file_of(b"\x80\x04N."),
    "deep": file_of(b"[" * 50_000),
    "a tensor twice": file_of(b'{"w":%s,"w":%s}' % ((json.dumps(GOOD).encode(),) * 2)),
    "a gap": file_of({"w": GOOD | {"data_offsets": [8, 16]}}, bytes(16)),
    "bytes at the end": file_of({"w": GOOD}, bytes(9)),
    "cut": file_of({"w": GOOD}, bytes(7)),
    "overlap": file_of({"a": GOOD, "b": GOOD | {"data_offsets": [4, 12]}}, bytes(12)),
    "the same place": file_of({"a": GOOD, "b": GOOD}),
    "backwards": file_of({"w": GOOD | {"data_offsets": [8, 0]}}),
    "negative": file_of({"w": GOOD | {"data_offsets": [-8, 0]}}),
    "float offsets": file_of({"w": GOOD | {"data_offsets": [0, 8.0]}}),
    "one offset": file_of({"w": GOOD | {"data_offsets": [0]}}),
    "three offsets": file_of({"w": GOOD | {"data_offsets": [0, 4, 8]}}),
    "another size": file_of({"w": GOOD | {"shape": [3]}}),
    "huge shape": file_of({"w": GOOD | {"shape": [1 << 61, 1 << 61]}}),
    "float shape": file_of({"w": GOOD | {"shape": [2.0]}}),
    "bool shape": file_of({"w": GOOD | {"shape": [True, 2]}}),
    "many dimensions": file_of({"w": GOOD | {"shape": [2] + [1] * 64}}),
    "unknown dtype": file_of({"w": GOOD | {"dtype": "C128"}}),
    "dtype as list": file_of({"w": GOOD | {"dtype": ["F32"]}}),
    "a field too many": file_of({"w": GOOD | {"x": 1}}),
    "no fields": file_of({"w": {}}),
    "name with NUL": file_of({"w\0": GOOD}),
    "long name": file_of({"w" * 2000: GOOD}),
    "metadata as list": file_of({"__metadata__": [], "w": GOOD}),
    "metadata nested": file_of({"__metadata__": {"a": {}}, "w": GOOD}),
}
HOSTILE |= {
    f"boxes {name}": file_of({"__metadata__": {SHARDED: json.dumps(it)}, "w": GOOD})
    for name, it in {
        "as list": [],
        "of others": {"v": {"saved_offsets": [0]}},
        "of one more": {"w": {"saved_offsets": [0]}, "v": {"saved_offsets": [0]}},
        "negative": {"w": {"saved_offsets": [-1]}},
        "of other dimensions": {"w": {"saved_offsets": [0, 0]}},
        "without offsets": {"w": {}},
        "as text": {"w": {"saved_offsets": "0"}},
    }.items()
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="Invalid safetensors file") as caught:
        parsed(content)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_header_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes((safetensors_header.MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, 1 << 30)  # sparse
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(CheckpointError, match="100000001 bytes"):
            safetensors_header.read_header(fd, "a")
    finally:
        os.close(fd)


def test_random_damage_never_does_more_than_refuse() -> None:
    dice = random.Random(0)  # noqa: S311 - cases of a test
    stored = [
        StoredTensor(name=str(n), dtype="F32", shape=(2, n), offsets=(n, 0)) for n in range(5)
    ]
    good = safetensors_header.build_header(stored) + bytes(4 * 2 * 10)
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        try:
            parsed(bytes(bad))
        except CheckpointError:
            continue


def test_a_writer_gives_the_checksum_of_the_file(tmp_path: Path) -> None:
    large, small = random.Random(0).randbytes(3 << 20), bytes(range(8))  # noqa: S311
    tensors = [
        StoredTensor(name="large", dtype="F32", shape=(len(large) // 4,), offsets=(0,)),
        StoredTensor(name="none", dtype="F32", shape=(0,), offsets=(0,)),
        StoredTensor(name="small", dtype="I16", shape=(4,), offsets=(0,)),
        StoredTensor(name="last", dtype="U8", shape=(0,), offsets=(0,)),
    ]
    path = tmp_path / "a.safetensors"
    with SafetensorsWriter(path, tensors) as writer:
        writer.write(memoryview(large)[: 2 << 20])  # one tensor in several slices
        writer.write(memoryview(large)[2 << 20 :])
        writer.write(memoryview(b""))
        writer.write(memoryview(small).cast("H"))
    content = path.read_bytes()
    assert content.endswith(large + small)
    assert writer.result.name == "a.safetensors"
    assert writer.result.size_bytes == len(content)
    assert writer.result.crc32 == zlib.crc32(content)
    assert parsed(content).tensors.keys() == {"large", "none", "small", "last"}


@pytest.mark.parametrize("content", [bytes(3), bytes(5)], ids=["too little", "too much"])
def test_a_writer_wants_what_it_was_told(tmp_path: Path, content: bytes) -> None:
    stored = [StoredTensor(name="w", dtype="U8", shape=(4,), offsets=(0,))]
    with (
        pytest.raises(ValueError, match=r"missing|more than"),
        SafetensorsWriter(tmp_path / "a", stored) as writer,
    ):
        writer.write(memoryview(content))
    assert list(tmp_path.iterdir()) == []


def test_a_writer_never_writes_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path / "a", [])
    assert (tmp_path / "a").read_text() == "mine"


def test_elements_lie_where_their_dtype_can(tmp_path: Path) -> None:
    odd = [
        StoredTensor(name="flag", dtype="BOOL", shape=(1,), offsets=(0,)),
        StoredTensor(name="w", dtype="F32", shape=(1,), offsets=(0,)),
    ]
    with pytest.raises(ValueError, match="misaligned at byte 1"):
        SafetensorsWriter(tmp_path / "a", odd)
    with pytest.raises(ValueError, match="is a duplicate"):
        SafetensorsWriter(tmp_path / "a", [odd[1], odd[1]])
    assert list(tmp_path.iterdir()) == []


def test_checksums_of_parts_make_the_checksum_of_all() -> None:
    dice = random.Random(0)  # noqa: S311 - cases of a test
    for size in [0, 1, 7, 100, 65_537]:
        first, second = dice.randbytes(333), dice.randbytes(size)
        both = checksum.combine_crc32(zlib.crc32(first), zlib.crc32(second), size)
        assert both == zlib.crc32(first + second)


def test_checksums_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "PART_BYTES", 1 << 19)
    dice = random.Random(0)  # noqa: S311 - cases of a test
    contents = [dice.randbytes(size) for size in (0, 5, 1 << 19, (3 << 19) + 11)]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    files = [path.open("rb") for path in paths]
    try:
        sizes = [
            (file.fileno(), len(content)) for file, content in zip(files, contents, strict=True)
        ]
        assert checksum.crc32_of_files(sizes) == [zlib.crc32(content) for content in contents]
        with pytest.raises(OSError, match="truncated"):
            checksum.crc32_of_files([(files[1].fileno(), 6)])
    finally:
        for file in files:
            file.close()


def test_dtypes_are_those_of_torch_and_safetensors() -> None:
    torch = pytest.importorskip("torch")
    for torch_name, itemsize in DTYPES.values():
        assert getattr(torch, torch_name).itemsize == itemsize
