from __future__ import annotations

import errno
import json
import math
import os
import secrets
import sys
from collections import Counter, OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from nbdist.errors import PayloadError
from nbdist.protocol import serialization
from nbdist.protocol.serialization import format as payload_format
from nbdist.protocol.serialization import reader

TORCH_DTYPES = sorted(payload_format.TORCH_DTYPES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "value.payload"


def write_payload(value: object, path: Path) -> None:
    with mock.patch.object(secrets, "token_hex", return_value=path.stem):
        assert serialization.write_payload_to_free_folder(value, [path.parent]) == path


def there_and_back(value: object, path: Path, **options: Any) -> Any:
    write_payload(value, path)
    return serialization.read_payload(path, **options)


def tensor_of(dtype_name: str, count: int = 24) -> torch.Tensor:
    dtype = getattr(torch, dtype_name)
    octets = torch.arange(count * dtype.itemsize, dtype=torch.int64).remainder(
        2 if dtype is torch.bool else 251
    )
    return octets.to(torch.uint8).view(dtype)


def octets_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


# ---- plain values


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -1, 2**63, -(2**63), 7**900, 0.1, -0.0, 1e308, math.inf, -math.inf),
        *(1 + 2j, complex(math.inf, -0.0), "", "text \u00e4\U0001f600\ud800\0", b"", b"\0\xff"),
        b"long" * 1000,
        *([], (), {}, set(), frozenset(), OrderedDict()),
        [1, [2, (3, [4.5, None])], "x"],
        {1: "a", None: "b", 2.5: "c", "s": "d", (1, ("x", None)): "e", b"k": "f", True + 1: 3},
        {"dict": {"list": [1]}, "tuple": (2,)},
        OrderedDict([("z", 1), ("a", [2])]),
        {1, "two", (3, 4), frozenset({5}), None},
        frozenset({1.5, "x"}),
        [math.inf, 2**70, 1.0],
    ],
)
def test_plain_values_arrive_as_they_are(value: object, path: Path) -> None:
    back = there_and_back(value, path)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)
    assert not path.exists()


# ---- torch


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_torch_dtype_arrives_bit_for_bit(name: str, path: Path) -> None:
    tensor = tensor_of(name).reshape(2, 3, 4)
    back = there_and_back({"t": tensor}, path)["t"]
    assert back.dtype is tensor.dtype
    assert back.shape == tensor.shape
    assert octets_of(back) == octets_of(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12)[::3],
        torch.arange(5.0)[2],
        torch.ones(1).expand(4, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor(3.5),
        torch.empty(0, 5),
        torch.arange(10, dtype=torch.int16)[3:],
    ],
)
def test_views_arrive_contiguous_with_their_own_values_only(
    tensor: torch.Tensor, path: Path
) -> None:
    back = there_and_back(tensor, path)
    assert torch.equal(back, tensor)
    assert back.is_contiguous()
    assert back.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def test_parameters_arrive_as_detached_tensors(path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    back = there_and_back({"w": weight, "g": weight * 2}, path)
    assert type(back["w"]) is torch.Tensor
    assert not back["w"].requires_grad
    assert not back["g"].requires_grad
    back["w"].requires_grad_().sum().backward()  # usable as a leaf
    assert weight.grad is None


def test_a_state_dict_keeps_its_ties(path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    state = model.state_dict()
    back = there_and_back(state, path)
    assert type(back) is OrderedDict
    assert list(back) == list(state)
    assert back["0.weight"] is back["1.weight"]
    assert back["0.bias"] is not back["1.bias"]
    model.load_state_dict(back)


def test_part_of_a_tensor_is_not_taken_for_the_whole(path: Path) -> None:
    whole = torch.arange(6.0)
    back = there_and_back([whole, whole[:3], whole.view(2, 3), whole.view(torch.int32)], path)
    assert torch.equal(back[1], whole[:3])
    assert torch.equal(back[2], whole.view(2, 3))
    assert torch.equal(back[3], whole.view(torch.int32))


def test_torchs_small_values_arrive(path: Path) -> None:
    value = [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1")]
    back = there_and_back(value, path)
    assert back == value
    assert type(back[0]) is torch.Size


# ---- NumPy


@pytest.mark.parametrize(
    "array",
    [
        *(
            np.arange(6).astype(d).reshape(2, 3)
            for d in ("?", "i1", ">i4", "u8", "f2", "f4", ">f8")
        ),
        np.arange(3, dtype=np.longdouble),
        np.array([1 + 2j], "c8"),
        np.array(["a", "bcd", "\u00e4"]),
        np.array([b"a", b"bcd"]),
        np.array(["2026-01-01", "NaT"], "M8[D]"),
        np.array([1, 2], "m8[25us]"),
        np.array([b"abc", b"de\0"], "V3"),
        np.array([(1, 2.5, [1, 2])], [("a", "<i4"), ("b", ">f8"), ("c", "u1", (2,))]),
        np.zeros(2, np.dtype([("a", "u1"), ("b", [("c", "f8")])], align=True)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(10)[::-2],
        *(np.zeros((0, 3)), np.array(5.0), np.array([], "S"), np.array("", "U")),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_keep_dtype_shape_and_values(array: np.ndarray[Any, Any], path: Path) -> None:
    back = there_and_back([array], path)[0]
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


@pytest.mark.parametrize(
    "scalar",
    [
        *(np.float32(0.1), np.float64("nan"), np.int8(-3), np.bool_(1), np.complex64(1j)),
        *(np.str_("ab"), np.bytes_(b"x"), np.datetime64("2026-01-01"), np.longdouble(1) / 3),
    ],
)
def test_numpy_scalars_keep_their_type(scalar: Any, path: Path) -> None:
    for back in (
        there_and_back(scalar, path),
        serialization.from_inline_json(serialization.to_inline_json(scalar)),
    ):
        assert type(back) is type(scalar)
        assert back.dtype == scalar.dtype
        assert back.tobytes() == scalar.tobytes()


# ---- maps


def test_two_readers_never_share_what_they_write(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MIN_MMAP_BYTES", 1)
    write_payload({"t": torch.zeros(1 << 19), "a": np.zeros(1 << 19)}, path)
    first, second = (
        serialization.read_payload(path, delete=False),
        serialization.read_payload(path, delete=False),
    )
    first["t"].fill_(1)
    first["a"][:] = 1
    assert second["t"].sum() == 0
    assert second["a"].sum() == 0
    assert serialization.read_payload(path)["t"].sum() == 0
    assert first["t"].sum() == 1 << 19


def test_a_large_file_is_mapped_and_outlives_its_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MIN_MMAP_BYTES", 1)
    large, small = torch.arange(1 << 18), torch.arange(3)
    back = there_and_back([large, small, b"x" * 2000], path)
    assert not path.exists()
    assert torch.equal(back[0], large)
    assert torch.equal(back[1], small)
    assert back[2] == b"x" * 2000


def test_files_are_private_and_never_overwritten(path: Path) -> None:
    old = os.umask(0)
    try:
        write_payload(1, path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_payload(2, path)
    assert serialization.read_payload(path) == 1


def test_a_file_that_cannot_be_finished_is_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_fd: int, _content: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_payload(torch.ones(3), path)
    assert not path.exists()


# ---- where there is room


def test_the_first_folder_with_room_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    free = {small: 100, large: 1 << 30}
    for folder in free:
        folder.mkdir()
    monkeypatch.setattr(
        "shutil.disk_usage", lambda folder: type("Usage", (), {"free": free[folder]})
    )
    assert serialization.write_payload_to_free_folder(1, [small, large]).parent == small
    assert (
        serialization.write_payload_to_free_folder(
            {"t": torch.ones(99)}, [str(small), large]
        ).parent
        == large
    )
    free[large] = 100
    with pytest.raises(PayloadError, match=r"value needs 1 MiB\. Allowed: 0 MiB in .*small and"):
        serialization.write_payload_to_free_folder({"t": torch.ones(99)}, [small, large])


def test_a_folder_that_fills_up_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    genuine, calls = os.write, []

    def write(fd: int, content: bytes) -> int:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return genuine(fd, content)

    monkeypatch.setattr(os, "write", write)
    assert serialization.write_payload_to_free_folder(5, [first, second]).parent == second
    assert not list(first.iterdir())


# ---- without torch


def test_tensors_as_arrays_without_importing_torch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {
        "f": torch.arange(4.0),
        "b": torch.tensor([[1.5, -2.0], [math.inf, 3.0]], dtype=torch.bfloat16),
        "m": torch.tensor([True, False]),
        "s": torch.Size([2]),
        "d": torch.bfloat16,
        "where": torch.device("cpu"),
    }
    write_payload(value, path)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    back = serialization.read_payload(path, as_numpy=True)
    assert back["f"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert back["b"].dtype == np.float32
    assert back["b"].tolist() == [[1.5, -2.0], [math.inf, 3.0]]
    assert back["m"].tolist() == [True, False]
    assert back["m"].dtype == np.bool_
    assert (back["s"], back["d"], back["where"]) == ((2,), "bfloat16", "cpu")


def test_float8_as_numpy_is_refused_in_words(path: Path) -> None:
    write_payload(tensor_of("float8_e5m2"), path)
    with pytest.raises(PayloadError, match=r"float8_e5m2 tensor has no NumPy dtype\. Pull it with"):
        serialization.read_payload(path, as_numpy=True)


def test_a_missing_package_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_payload(torch.ones(1), path)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PayloadError, match=r"holds torch values .* as_numpy=True"):
        serialization.read_payload(path)


# ---- what is refused


class Colour(IntEnum):
    RED = 1


def loop() -> list[object]:
    value: list[object] = [1]
    value.append({"x": value})
    return value


def deep() -> object:
    value: object = 1
    for _ in range(payload_format.MAX_DEPTH + 1):
        value = [value]
    return value


def zero3_parameter() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_numel = 12  # type: ignore[attr-defined]
    return parameter


class WithFullTensor(torch.Tensor):
    def full_tensor(self) -> None: ...


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"model": {"layers": [0, {"fn": len}]}}, r"^model\['layers'\]\[1\]\['fn'\] is a builtin"),
        ({"f": lambda: 1}, r"^f is a function\. Allowed: numbers.*\. Define it in a cell"),
        ({"a b": object()}, r"^value\['a b'\] is an object"),
        ([1, (2, object())], r"^value\[1\]\[1\] is an object"),
        (object(), r"^value is an object"),
        ({"c": int}, r"^c is a type.*\. Define it"),
        ({"m": torch.nn.Linear(1, 1)}, r"^m is a Linear.*\. Send its state_dict\(\)"),
        ({"o": torch.optim.SGD([torch.ones(1)])}, r"^o is a SGD.*\. Send its state_dict\(\)"),
        ({"m": sys}, r"^m is a module.*\. Import it"),
        ({"r": range(3)}, r"^r is a range.*\. Make it a list"),
        ({"p": Path()}, r"^p is a PosixPath.*\. Send str\(value\)"),
        ({"c": Counter()}, r"^c is a Counter.*\. Send dict\(value\)"),
        ({"e": Colour.RED}, r"^e is a Colour.*\. Send value\.value"),
        ({"e": bytearray()}, r"^e is a bytearray.*\. Send bytes\(value\)"),
        ({"o": np.array([None])}, r"^o is of dtype object.*\. Send value\.tolist\(\)"),
        ({"o": np.zeros(1, [("a", "O")])}, r"^o is of dtype object"),
        ({"o": np.ma.array([1])}, r"^o is a MaskedArray.*\. Send numpy\.asarray"),
        ({"s": torch.ones(2).to_sparse()}, r"^s is a Tensor .*sparse_coo.*\. Send value\.to_dense"),
        ({"q": loop()}, r"^q\[1\]\['x'\] contains itself"),
        ({"d": deep()}, r"^d(\[0\])+ is nested deeper than 64"),
        ({"z": torch.ones(1, device="meta")}, r"^z is a Tensor.*no content yet"),
        ({"z": torch.nn.UninitializedParameter()}, r"^z is an Uninit.*no content yet"),
        ({"z": zero3_parameter()}, r"^z is a Parameter .*GatheredParameters"),
        ({"t": torch.ones(1).as_subclass(WithFullTensor)}, r"^t is a With.*\.full_tensor\(\) on"),
        ({(1, object()): 1}, r"^value has a tuple as a key or member\. Allowed: plain"),
        ({"s": {Colour.RED}}, r"^s has a Colour as a key or member"),
    ],
)
@pytest.mark.fault("D9")
def test_the_type_the_place_and_what_to_do_are_named(
    value: object, message: str, path: Path
) -> None:
    with pytest.raises(PayloadError, match=message) as caught:
        write_payload(value, path)
    assert not path.exists()
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_nested_tensors_are_refused(path: Path) -> None:
    with pytest.raises(PayloadError, match="dequantize"):
        write_payload(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), path)
    with pytest.raises(PayloadError, match="unbind"):
        write_payload(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), path)


# ---- inside of messages


@pytest.mark.parametrize(
    "value",
    [1, None, "x", b"x" * 5000, [1.5, math.inf], {"a": (1, 2)}, {3}, 1j, 2**80, math.pi],
)
def test_small_plain_values_go_inline(value: object) -> None:
    node = json.loads(json.dumps(serialization.to_inline_json(value), allow_nan=False))
    assert serialization.from_inline_json(node) == value


@pytest.mark.parametrize(
    "value",
    [torch.ones(1), np.ones(1), "x" * 70_000, b"x" * 70_000, [0.123456] * 60_000, [[0] * 999] * 99],
)
def test_large_values_tensors_and_arrays_do_not_go_inline(value: object) -> None:
    with pytest.raises(PayloadError, match="Pull it by name"):
        serialization.to_inline_json(value)


@pytest.mark.fault("D9")
@pytest.mark.parametrize("node", [{"raw": 0}, {"tensor": [0, "float32", [1]]}, {"x": 1}, {}])
def test_a_hostile_message_is_refused(node: object) -> None:
    with pytest.raises(PayloadError):
        serialization.from_inline_json(node)


# ---- hostile files


def forged(tree: object, buffers: bytes = b"", *, length: int | None = None) -> bytes:
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    head = (
        payload_format.MAGIC
        + (len(text) if length is None else length).to_bytes(8, "little")
        + text
    )
    return head.ljust(payload_format.align_offset(len(head)), b"\0") + buffers


HUGE = 1 << 40


@pytest.mark.fault("D9")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nbdist",
        b"\x80\x04garbage" * 20,
        payload_format.MAGIC,
        forged([[], 1], length=HUGE),
        forged([[], 1], length=2**64 - 1),
        forged([[], 1])[:-1],
        forged([[], 1], bytes(64)),
        forged(b"{"),
        forged(b"[" * 100_000),
        forged(b"[[], " + b'{"tuple":[' * 5000 + b"]}" * 5000 + b"]"),
        forged(b"[[], " + b"9" * 5000 + b"]"),
        forged(b"\xff\xfe"),
        *(forged(tree) for tree in (1, None, {}, [], [[]], [1, 2], [[], 1, 2])),
        *(forged([sizes, None]) for sizes in ([HUGE], [-64], [True], ["1"], [1.0], [None])),
        *(
            forged([[], node])
            for node in (
                *({}, {"a": 1, "b": 2}, {"eval": "1"}, {"tuple": 5}, {"tuple": "ab"}),
                *({"float": "1e5"}, {"float": 5}, {"int": 5}, {"int": "zz"}, {"complex": [1]}),
                *({"complex": ["1", "2"]}, {"bytes": 5}, {"bytes": "!"}, {"dict": [[1], []]}),
                *({"dict": [[[1]], [1]]}, {"dict": {"a": 1}}, {"set": [[1]]}, {"raw": 0}),
                *({"raw": -1}, {"raw": "0"}, {"array": [0, "<f4", [1]]}, {"array": 1}),
                *({"size": [-1]}, {"size": 1}, {"dtype": "load"}, {"dtype": ["bool"]}),
                *({"device": "x:y"}, {"device": 5}, {"numpy": ["O", ""]}),
                *(
                    {"numpy": ["<f4", ""]},
                    {"numpy": ["<f4", "AAA"]},
                    {"numpy": ["|O8", "AAAAAAAAAAA="]},
                ),
            )
        ),
        *(
            forged([[16], {"array": part}], bytes(64))
            for part in (
                *([0, "<f4", [5]], [0, "<f4", [-4]], [0, "<f4", [4.0]], [0, "<f4", [True, 4]]),
                *(
                    [1, "<f4", [4]],
                    [-1, "<f4", [4]],
                    [0, "O", [2]],
                    [0, "|O8", [2]],
                    [0, "f4", [4]],
                ),
                *([0, "<f4,<f4", [2]], [0, "<f4", [1] * 65], [0, "<f4", [HUGE, HUGE, HUGE]]),
                *([0, "<S999999999999999999", [1]], [0, ["<f4", [HUGE] * 5], [1]], [0, "<f4"]),
                [0, {"names": ["a"], "formats": ["O"], "offsets": [0], "itemsize": 16}, [1]],
                [0, {"names": ["a"], "formats": ["<f8"], "offsets": [12], "itemsize": 16}, [1]],
                [0, {"names": ["a"], "formats": ["<f8"], "offsets": [-8], "itemsize": 16}, [1]],
            )
        ),
        *(
            forged([[16], {"tensor": part}], bytes(64))
            for part in (
                *([0, "float32", [5]], [0, "float32", [-2, -2]], [0, "load", [4]], [0, ["x"], [4]]),
                *([0, "float32", [2**62, 2**62, 0]], [0, "qint8", [16]], [5, "float32", [4]]),
            )
        ),
        forged([[0], {"tensor": [0, "float32", [2**61, 2**61, 0]]}]),
    ],
)
def test_a_hostile_file_gives_a_payload_error(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(PayloadError, match=r"^Cannot read the transferred values: their file "):
        serialization.read_payload(path)
    assert not path.exists()


def test_every_cut_and_many_flips_of_a_file_are_survived(path: Path) -> None:
    value = {"a": np.arange(3), "t": torch.ones(2), "s": {1}, "f": math.inf}
    write_payload(value, path)
    content = path.read_bytes()
    head = content.index(b"\0" * 8, 16)
    wrong = [content[:end] for end in range(0, len(content), 7)]
    wrong += [
        content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :]
        for place in range(8, head)
        for flip in (1, 8, 64)
    ]
    for damaged in wrong:
        path.write_bytes(damaged)
        try:
            serialization.read_payload(path)
        except PayloadError:
            continue


def test_one_buffer_named_often_costs_its_size_once(path: Path) -> None:
    path.write_bytes(forged([[1 << 20], [{"raw": 0}] * 5000], bytes(1 << 20)))
    back = serialization.read_payload(path)
    assert all(part is back[0] for part in back)
    shapes = [[1] * ones + [1 << 19] for ones in range(50)]
    nodes = [{"tensor": [0, "bfloat16", shape]} for shape in shapes]
    path.write_bytes(forged([[1 << 20], nodes], bytes(1 << 20)))
    back = serialization.read_payload(path, as_numpy=True)
    assert np.shares_memory(back[0], back[49])


def test_a_pipe_is_refused_without_waiting(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(PayloadError, match="regular file"):
        serialization.read_payload(path)
