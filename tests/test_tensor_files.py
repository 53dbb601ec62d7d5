"""Safetensors files as views of the tensors' memory; and calls that are made ahead."""

from __future__ import annotations

import json
import threading
import time
from hashlib import sha256
from io import BytesIO

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from spotlight.store.tensor_files import THREADS, Content, ahead, hash_of, hashing, read_arrays

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
    )
)
def test_the_library_reads_what_was_written(shapes: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    tensors = {name: (torch.randn(shape) * 9).to(dtype) for name, (dtype, shape) in shapes.items()}

    content = Content(tensors)

    found = safetensors.torch.load(bytes(content))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert len(content) == len(bytes(content))
    assert hash_of(content) == sha256(bytes(content)).hexdigest()
    if all(name.isalnum() and name.isascii() for name in tensors) and len({dtype for dtype, _ in shapes.values()}) == 1:
        assert bytes(content) == safetensors.torch.save(tensors)


def test_versions_that_the_library_wrote_have_the_same_hash() -> None:
    tensors = {"b": torch.arange(6.0), "a.x": torch.ones(2, 3, dtype=torch.bfloat16), "a": torch.tensor(0.5)}

    assert bytes(Content(tensors)) == safetensors.torch.save(tensors)


def test_parts_of_larger_arrays_are_whole() -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = {"columns": whole[:, 1:3], "turned": whole.T, "scalar": np.array(3, np.float32)}
    as_tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    for found in (safetensors.numpy.load(bytes(Content(each))) for each in (arrays, as_tensors)):
        assert found.keys() == arrays.keys()
        assert all(np.array_equal(found[name], array) for name, array in arrays.items())


def test_nothing_is_copied() -> None:
    tensor, array = torch.zeros(4), np.zeros(4, np.float32)
    first, second = Content({"a": tensor}), Content({"a": array})

    tensor[0] = array[0] = 1.0

    for content in (first, second):
        assert safetensors.torch.load(bytes(content))["a"].tolist() == [1, 0, 0, 0]


def test_calls_ahead_come_in_order_and_their_number_is_bounded() -> None:
    begun: list[int] = []

    def late(item: int) -> int:
        begun.append(item)
        time.sleep(0.01 * (3 - item % 3))
        return item

    results = ahead(late, range(20))

    assert [next(results), len(begun) <= THREADS] == [0, True]
    assert list(results) == list(range(1, 20))


def test_an_error_ahead_is_raised_in_its_place_and_ends_the_rest() -> None:
    goes_on, begun = threading.Event(), []

    def fail_at_two(item: int) -> int:
        begun.append(item)
        if item == 2:
            raise OSError("no such slice")
        if item > 2:
            goes_on.wait(60)  # as a read that hangs
        return item

    results = ahead(fail_at_two, range(100))

    assert [next(results), next(results)] == [0, 1]
    began_s = time.monotonic()
    with pytest.raises(OSError, match="no such slice"):
        next(results)
    assert time.monotonic() - began_s < 30
    goes_on.set()
    time.sleep(0.1)
    assert len(begun) <= 2 + THREADS


def test_pieces_are_passed_on_in_order_and_hashed() -> None:
    pieces = [bytes([at % 251]) * size for at, size in enumerate([3, 1 << 20, 0, 1 << 17, 9, 1 << 18])]
    digest = sha256()

    assert list(hashing(iter(pieces), digest)) == pieces
    assert digest.hexdigest() == hash_of(pieces) == sha256(b"".join(pieces)).hexdigest()


def arrays() -> dict[str, np.ndarray]:
    return {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array(0.5), "c": np.zeros((0, 4), np.int8)}


def test_arrays_come_with_the_hash_of_their_bytes_from_wherever_they_lie_in_a_file() -> None:
    content = bytes(Content(arrays()))
    file = BytesIO(b"before" + content + b"after")
    file.seek(6)

    found, digest = read_arrays(file, len(content))

    assert digest == sha256(content).hexdigest()
    assert found.keys() == arrays().keys()
    for name, array in arrays().items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[name], array)
    assert file.read() == b"after"


@given(st.data())
def test_damaged_bytes_have_another_hash_or_are_no_safetensors_file(data: st.DataObject) -> None:
    content = bytes(Content(arrays()))
    at, size = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, len(content)))
    changed = bytearray(content)
    changed[at] ^= data.draw(st.integers(1, 255))

    for damaged in (bytes(changed), content[:size]):
        try:
            _, digest = read_arrays(BytesIO(damaged), len(content))
        except ValueError:
            continue
        assert (digest == sha256(content).hexdigest()) == (damaged == content)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}},
        {"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [[1], 10**10], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": ["x", 10**12], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32" * 100_000, "shape": [1], "data_offsets": [0, 4]}},
        {"a": 3},
        ["a"],
        {},
        "[" * 100_000,
    ],
    ids=range(13),
)
def test_headers_that_lie_are_refused_before_memory_is_taken(header: object) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(4)

    with pytest.raises(ValueError, match=r"\w") as refused:
        read_arrays(BytesIO(content), len(content))
    assert len(str(refused.value)) < 200


def test_a_length_that_lies_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="a header of 4294967296 bytes"):
        read_arrays(BytesIO((1 << 32).to_bytes(8, "little") + bytes(100)), 1 << 40)


def test_an_error_of_the_last_hash_is_told() -> None:
    class Broken:
        def update(self, piece: bytes | memoryview, /) -> None:
            raise MemoryError

        def hexdigest(self) -> str:
            return ""

    with pytest.raises(MemoryError):
        list(hashing([bytes(1 << 17)], Broken()))
