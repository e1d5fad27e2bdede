"""Weight files written as a stream, read back by the safetensors library."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tasks.models.saving import WeightsDigest, write_weights

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def some_tensors(dtype):
    random = np.random.default_rng(0)
    shapes = {"b.weight": (3, 5), "a.weight": (7,), "c.weight": (2, 3, 4)}
    return {name: random.standard_normal(shape).astype(TYPES[dtype]) for name, shape in shapes.items()}


def write(folder, tensors, dtype, limit=1e9):
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return write_weights(folder, shapes, tensors.items(), dtype=dtype, max_shard_bytes=limit)


@pytest.mark.parametrize("dtype", TYPES)
def test_one_file_holds_the_bytes_that_came_in(tmp_path, dtype):
    tensors = some_tensors(dtype)
    write(tmp_path, tensors, dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tobytes() == tensor.tobytes()
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_keep_below_the_limit_and_the_index_finds_every_tensor(tmp_path):
    tensors = some_tensors("float32")  # 60, 28 and 96 bytes
    write(tmp_path, tensors, "float32", limit=90)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    index = json.loads((tmp_path / names[2]).read_text())
    assert index["metadata"] == {"total_size": 184}
    assert index["weight_map"] == {"b.weight": names[0], "a.weight": names[0], "c.weight": names[1]}
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / file)[name], tensors[name])


def test_a_tensor_that_is_no_whole_view_is_written_in_its_own_order(tmp_path):
    tensors = {"a": np.arange(12, dtype=np.float32).reshape(3, 4).T}
    write(tmp_path, tensors, "float32")
    np.testing.assert_array_equal(load_file(tmp_path / "model.safetensors")["a"], tensors["a"])


def test_the_digest_is_of_the_content_not_of_order_or_files(tmp_path):
    tensors = some_tensors("float32")
    turned = dict(reversed(tensors.items()))
    folders = [tmp_path / name for name in ("one", "shards", "turned")]
    for folder in folders:
        folder.mkdir()
    digests = {write(folders[0], tensors, "float32"), write(folders[1], tensors, "float32", limit=1)}
    digests.add(write(folders[2], turned, "float32"))
    assert len(digests) == 1
    again = WeightsDigest()
    for name, tensor in tensors.items():
        again.add(name, tensor)
    assert digests == {again.hexdigest()}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors | {"a.weight": np.nextafter(tensors["a.weight"], np.float32(9))},
        lambda tensors: tensors | {"a.weight": tensors["a.weight"].reshape(7, 1)},
        lambda tensors: tensors | {"a.weight": tensors["a.weight"].view(np.int32)},
        lambda tensors: {name.replace("a.", "d."): tensor for name, tensor in tensors.items()},
    ],
    ids=["one bit", "shape", "type", "name"],
)
def test_the_digest_sees_every_part_of_the_content(change):
    digests = []
    for tensors in (some_tensors("float32"), change(some_tensors("float32"))):
        digest = WeightsDigest()
        for name, tensor in tensors.items():
            digest.add(name, tensor)
        digests.append(digest.hexdigest())
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    "came",
    [
        {"x": np.zeros(2, np.float32), "y": np.zeros(3, np.float32)},
        {"y": np.zeros(3, np.float16)},
        {"y": np.zeros((3, 1), np.float32)},
        {},
    ],
    ids=["order", "type", "shape", "missing"],
)
def test_tensors_other_than_announced_are_refused(tmp_path, came):
    shapes = {"y": (3,), "x": (2,)}
    with pytest.raises(ValueError, match=r"y \(3,\) float32 expected"):
        write_weights(tmp_path, shapes, came.items(), dtype="float32", max_shard_bytes=1e9)


def test_a_tensor_too_many_is_refused(tmp_path):
    came = {"y": np.zeros(3, np.float32), "z": np.zeros(1, np.float32)}
    with pytest.raises(ValueError, match="z was not announced"):
        write_weights(tmp_path, {"y": (3,)}, came.items(), dtype="float32", max_shard_bytes=1e9)
