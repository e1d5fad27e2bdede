import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from schemas.errors import InputError
from tasks.models.headers import file_headers, read_file, read_headers, read_tensor, weight_files


def write_raw(path, entries, data):
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)}, path)
    return path


def test_headers_give_names_types_and_shapes_as_the_library_wrote_them(whole):
    found = {name: (header.dtype, header.shape) for name, header in file_headers(whole).items()}
    assert found == {"a": ("F32", (2, 3)), "b": ("F16", (4,))}


def test_float32_keeps_its_bits(whole):
    assert dict(read_file(whole))["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_value_is_widened_as_numpy_does(tmp_path, dtype):
    values = np.arange(2**16, dtype=np.uint16).view(dtype)  # with subnormals, infinities and NaN
    path = tmp_path / "all.safetensors"
    name = "F16" if dtype is np.float16 else "BF16"
    write_raw(path, {"x": entry(name, (256, 256), (0, 2**17))}, values.tobytes())

    (header,) = file_headers(path).values()
    read = read_tensor(header)

    assert read.dtype == np.float32
    np.testing.assert_array_equal(read.ravel(), values.astype(np.float32))


def test_a_scalar_and_an_empty_tensor_are_read(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 3), np.float32)}, path)
    read = dict(read_file(path))
    assert read["scalar"] == 2.5
    assert read["empty"].shape == (0, 3)


def test_an_integer_tensor_is_not_read_as_a_weight(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"ids": np.arange(3)}, path)
    (header,) = file_headers(path).values()
    with pytest.raises(InputError, match=r"holds tensors of type I64; supported: F32, F16, BF16"):
        read_tensor(header)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda raw: b"", "it is cut short, with 0 bytes only"),
        (lambda raw: raw[:5], "it is cut short, with 5 bytes only"),
        (lambda raw: raw[:40], r"its header is cut short, 32 of \d+ bytes"),
        (lambda raw: raw[:-1], r"it has (\d+) bytes, but its header says \d+"),
        (lambda raw: raw + b"\0", r"it has (\d+) bytes, but its header says \d+"),
        (lambda raw: b"PK\x03\x04" + raw, "it is not a safetensors file"),
        (lambda raw: bytes(len(raw)), "it is not a safetensors file"),
        (lambda raw: raw.replace(b'{"', b"{'", 1), "its header is not that of a safetensors file"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(whole, damage, problem):
    whole.write_bytes(damage(whole.read_bytes()))
    with pytest.raises(InputError, match=rf"{whole.name} can't be read: {problem}") as error:
        file_headers(whole)
    assert error.value.code == "model.weights_unreadable"


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([1, 2], "its header is not that of a safetensors file"),
        ({"x": 3}, "its header is not that of a safetensors file"),
        ({"x": {"dtype": "F32"}}, "its header is not that of a safetensors file"),
        ({"x": entry(dtype="F4")}, r"\(unknown type F4\)"),
        ({"x": entry(shape=(3,))}, r"\(8 bytes for a tensor \(3,\) of F32\)"),
        ({"x": entry(offsets=(-8, 0))}, r"8 bytes for a tensor"),
        ({"x": entry(), "y": entry()}, "its tensors overlap or leave gaps"),
        ({"x": entry(offsets=(8, 16))}, "its tensors overlap or leave gaps"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, entries, problem):
    path = write_raw(tmp_path / "x.safetensors", entries, bytes(8))
    with pytest.raises(InputError, match=problem):
        file_headers(path)


def test_metadata_is_no_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.zeros(2, np.float32)}, path, metadata={"format": "np"})
    assert list(file_headers(path)) == ["a"]


def test_one_file_is_taken_before_other_copies_of_the_weights(whole):
    save_file({"other": np.zeros(2, np.float32)}, whole.parent / "consolidated.safetensors")
    assert weight_files(whole.parent) == (whole,)


def test_without_the_usual_names_all_files_are_taken(tmp_path):
    for name in ("part2", "part1"):
        save_file({name: np.zeros(2, np.float32)}, tmp_path / f"{name}.safetensors")
    assert list(read_headers(tmp_path)) == ["part1", "part2"]


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("part1", "part2"):
        save_file({"a": np.zeros(2, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InputError, match=r"part2.safetensors can't be read: the tensor a is also in part1.safetensors"):
        read_headers(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path} holds no weights"):
        weight_files(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="absent does not exist"):
        weight_files(tmp_path / "absent")


@pytest.fixture
def sharded(tmp_path):
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in parts.items():
        save_file({name: np.full(2, ord(name), np.float32)}, tmp_path / file)
    save_file({"stray": np.zeros(2, np.float32)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    return tmp_path


def test_the_index_says_which_files_belong_to_the_model(sharded):
    assert list(read_headers(sharded)) == ["a", "b"]


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a": "gone.safetensors"}, "it names the file gone.safetensors, which is not in the folder"),
        ({"a": "../model.safetensors"}, "it names the file ../model.safetensors, which is not in the folder"),
        (
            {"a": "model-00001-of-00002.safetensors", "c": "model-00001-of-00002.safetensors"},
            "it says that model-00001-of-00002.safetensors holds c, which it does not",
        ),
        ({}, "it names no tensor"),
        ([], "it is not an index of safetensors files"),
        ({"a": 3}, "it names the file 3, which is not in the folder"),
        (None, "it is not an index of safetensors files"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(sharded, weight_map, problem):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=rf"index.json can't be read: {problem}"):
        read_headers(sharded)
