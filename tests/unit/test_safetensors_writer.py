"""safetensors files: what is written the library reads, what strangers write is checked first."""

from __future__ import annotations

import json
import random
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.checkpoint.durable_io import DurableFile
from nbdist.checkpoint.manifest import SAFETENSORS_DTYPES
from nbdist.checkpoint.safetensors_writer import (
    ALIGNMENT,
    SHARDING_KEY,
    SafetensorsWriter,
    StoredTensor,
    build_header,
)
from nbdist.errors import CheckpointError
from nbdist.state.tensor_index import open_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from safetensors import safe_open

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def opened(path: Path, content: bytes) -> safe_open:
    path.write_bytes(content)
    return open_safetensors(path, path.name)


def file_of(tree: Any, data: bytes = bytes(8)) -> bytes:
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_the_library_reads_a_header(tmp_path: Path) -> None:
    tensors = [
        StoredTensor(name="double", dtype="float64", shape=(3,), offsets=(5,)),
        StoredTensor(name="none", dtype="float32", shape=(0, 4), offsets=(2, 0)),
        StoredTensor(name="scalar", dtype="float32", shape=()),
        StoredTensor(name="half é", dtype="bfloat16", shape=(1, 2, 3), offsets=(0, 1, 0)),
        StoredTensor(name="flag", dtype="bool", shape=(1,)),
    ]
    head = build_header(tensors)
    assert len(head) % ALIGNMENT == 0
    file = opened(tmp_path / "a", head + bytes(24 + 0 + 4 + 12 + 1))
    for tensor in tensors:
        part = file.get_slice(tensor.name)
        assert tuple(part.get_shape()) == tensor.shape
        assert part.get_dtype() == SAFETENSORS_DTYPES[tensor.dtype][0]
    sharding = json.loads(file.metadata()[SHARDING_KEY])
    assert sharding["half é"] == {"saved_offsets": [0, 1, 0]}
    assert sharding["flag"] == {"saved_offsets": [0]}
    assert file.metadata()["format"] == "pt"


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "no header": (0).to_bytes(8, "little"),
    "longer than the file": (1000).to_bytes(8, "little") + b"{}",
    "header of 2**63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    "no JSON": file_of(b"{"),
    "pickle": file_of(b"\x80\x04N."),
    "a gap": file_of({"w": GOOD | {"data_offsets": [8, 16]}}, bytes(16)),
    "bytes at the end": file_of({"w": GOOD}, bytes(9)),
    "overlap": file_of({"a": GOOD, "b": GOOD | {"data_offsets": [4, 12]}}, bytes(12)),
    "another size": file_of({"w": GOOD | {"shape": [3]}}),
    "huge shape": file_of({"w": GOOD | {"shape": [1 << 61, 1 << 61]}}),
    "unknown dtype": file_of({"w": GOOD | {"dtype": "C128"}}),
    "metadata nested": file_of({"__metadata__": {"a": {}}, "w": GOOD}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError, match="Invalid safetensors file") as caught:
        opened(tmp_path / "a", content)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_random_damage_never_does_more_than_refuse(tmp_path: Path) -> None:
    dice = random.Random(0)  # noqa: S311 - cases of a test
    stored = [
        StoredTensor(name=str(n), dtype="float32", shape=(2, n), offsets=(n, 0)) for n in range(5)
    ]
    good = build_header(stored) + bytes(4 * 2 * 10)
    for _ in range(1000):
        bad = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        try:
            file = opened(tmp_path / "a", bytes(bad))
        except CheckpointError:
            continue
        for name in file.keys():  # noqa: SIM118 - it is not a mapping
            file.get_tensor(name)


def test_a_writer_gives_the_checksum_of_the_file(tmp_path: Path) -> None:
    large, small = random.Random(0).randbytes(3 << 20), bytes(range(8))  # noqa: S311
    tensors = [
        StoredTensor(name="large", dtype="float32", shape=(len(large) // 4,), offsets=(0,)),
        StoredTensor(name="none", dtype="float32", shape=(0,), offsets=(0,)),
        StoredTensor(name="small", dtype="int16", shape=(4,), offsets=(0,)),
        StoredTensor(name="last", dtype="uint8", shape=(0,), offsets=(0,)),
    ]
    path = tmp_path / "a.safetensors"
    with SafetensorsWriter(path.name, tensors, DurableFile(path)) as writer:
        writer.write(memoryview(large)[: 2 << 20])  # one tensor in several slices
        writer.write(memoryview(large)[2 << 20 :])
        writer.write(memoryview(b""))
        writer.write(memoryview(small).cast("H"))
    content = path.read_bytes()
    assert content.endswith(large + small)
    assert writer.result.name == "a.safetensors"
    assert writer.result.size_bytes == len(content)
    assert writer.result.crc32 == zlib.crc32(content)
    assert set(open_safetensors(path, "a").keys()) == {"large", "none", "small", "last"}


@pytest.mark.parametrize("content", [bytes(3), bytes(5)], ids=["too little", "too much"])
def test_a_writer_accepts_only_the_declared_tensors(tmp_path: Path, content: bytes) -> None:
    stored = [StoredTensor(name="w", dtype="uint8", shape=(4,), offsets=(0,))]
    with (
        pytest.raises(ValueError, match=r"missing|more than"),
        SafetensorsWriter("a", stored, DurableFile(tmp_path / "a")) as writer,
    ):
        writer.write(memoryview(content))
    assert list(tmp_path.iterdir()) == []


def test_a_writer_never_writes_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        SafetensorsWriter("a", [], DurableFile(tmp_path / "a"))
    assert (tmp_path / "a").read_text() == "mine"


def test_elements_lie_where_their_dtype_can(tmp_path: Path) -> None:
    odd = [
        StoredTensor(name="flag", dtype="bool", shape=(1,), offsets=(0,)),
        StoredTensor(name="w", dtype="float32", shape=(1,), offsets=(0,)),
    ]
    with pytest.raises(ValueError, match="misaligned at byte 1"):
        SafetensorsWriter("a", odd, DurableFile(tmp_path / "a"))
    with pytest.raises(ValueError, match="is a duplicate"):
        SafetensorsWriter("a", [odd[1]] * 2, DurableFile(tmp_path / "a"))
    assert list(tmp_path.iterdir()) == []
