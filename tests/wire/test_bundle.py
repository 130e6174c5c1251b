"""Bundles: round trips, other readers, sizes, and what an honest sender cannot pack."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from osfl.core.tensors import WIDTH, RawTensor
from osfl.core.types import Field
from osfl.wire.bundle import pack, size_of
from osfl.wire.gate import AcceptancePolicy, accept, verify_release
from osfl.wire.signing import SigningKey
from tests.wire.forge import CLIENT, KEY, PLAN, POLICY, SERVER, facts, tensors, upload

_shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
_names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=9),
    st.floats(allow_nan=False, allow_infinity=False),
)
_facts = st.dictionaries(st.text(max_size=9), _scalars | st.lists(_scalars, max_size=3), max_size=5)


@st.composite
def _tensors(draw: st.DrawFn) -> dict[str, RawTensor]:
    made = {}
    for name in draw(st.lists(_names, max_size=5, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(WIDTH))), draw(_shapes)
        made[name] = RawTensor(dtype, shape, bytes(WIDTH[dtype] * int(np.prod(shape, dtype=int))))
    return made


@given(_tensors(), _facts)
@settings(max_examples=150, deadline=None)
def test_what_is_packed_is_what_is_read(parts: dict[str, RawTensor], output: dict[str, Any]) -> None:
    data = pack("release", "", PLAN, parts, output, SERVER, made_from={CLIENT: PLAN})
    read = verify_release(data, SERVER.public_hex, PLAN)
    assert {name: (t.dtype, t.shape, bytes(t.data)) for name, t in read.tensors.items()} == {
        name: (t.dtype, t.shape, t.data) for name, t in parts.items()
    }
    assert (read.kind, read.client, read.plan, read.facts, read.made_from) == ("release", "", PLAN, output, {CLIENT: PLAN})
    assert size_of("release", "", PLAN, parts, output, made_from={CLIENT: PLAN}) == len(data)
    assert len(safetensors.deserialize(data)) == len(parts)


def test_the_official_reader_opens_it(tmp_path: Path) -> None:
    path = tmp_path / "upload.safetensors"
    path.write_bytes(upload(drop="model/scale"))  # numpy has no bfloat16
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata().keys() == {"manifest", "signature"}
        np.testing.assert_array_equal(file.get_tensor("model/w"), np.arange(6, dtype=np.float32).reshape(2, 3))
    loaded = safetensors.numpy.load(path.read_bytes())
    np.testing.assert_array_equal(loaded["labels"], [0, 1, 2])
    np.testing.assert_array_equal(loaded["mask"], [False, True, True, False])


def test_every_tensor_is_aligned_and_the_header_padded() -> None:
    data = upload()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    read = accept(data, POLICY)
    start = np.frombuffer(data, np.uint8).ctypes.data
    for tensor in read.tensors.values():
        at = np.frombuffer(tensor.data, np.uint8).ctypes.data - start
        assert at % WIDTH[tensor.dtype] == 0


def test_packing_is_deterministic_and_order_free() -> None:
    again = pack("upload", CLIENT, PLAN, dict(reversed(tensors().items())), dict(reversed(facts().items())), KEY)
    assert again == upload()


def test_identity_is_the_manifest_not_the_key_that_signed() -> None:
    """A client that signs the same content again has the same digest; another fact is another upload."""
    first, second = accept(upload(), POLICY), accept(upload(facts_changed={"samples": 13}), POLICY)
    assert first.digest == accept(bytearray(upload()), POLICY).digest != second.digest


def test_a_client_may_say_only_facts() -> None:
    policy = AcceptancePolicy(PLAN, {CLIENT: KEY.public_hex}, {"": {}}, classes=3)
    data = pack("upload", CLIENT, PLAN, {}, {"samples": 3}, KEY)
    read = accept(data, policy)
    assert read.tensors == {} and read.facts == {"samples": 3}
    assert size_of("upload", CLIENT, PLAN, {}, {"samples": 3}) == len(data)


def test_empty_and_scalar_tensors() -> None:
    policy = AcceptancePolicy(
        PLAN, {CLIENT: KEY.public_hex}, {"": {"none": Field("F32", ("n", 5)), "one": Field("I8", ())}}, classes=3
    )
    parts = {"none": RawTensor("F32", (0, 5), b""), "one": RawTensor("I8", (), b"\7")}
    read = accept(pack("upload", CLIENT, PLAN, parts, {}, KEY), policy)
    assert read.tensors["none"].shape == (0, 5) and bytes(read.tensors["one"].data) == b"\7"


def test_tensors_can_come_from_arrays_without_a_copy() -> None:
    array = np.arange(6, dtype="<f4")
    assert upload(model__w=RawTensor("F32", (2, 3), array.data)) == upload()


@pytest.mark.parametrize(
    "parts, output",
    [
        ({"": RawTensor("U8", (1,), b"\0")}, {}),
        ({"a b": RawTensor("U8", (1,), b"\0")}, {}),
        ({"__metadata__": RawTensor("U8", (1,), b"\0")}, {}),
        ({}, {1: 2}),
        ({}, {"a": {2: 3}}),
        ({}, {"a": (1, 2)}),
        ({}, {"a": float("nan")}),
        ({}, {"a": np.float64("inf")}),
        ({}, {"a": 2**63}),
        ({}, {"a": "\ud800"}),
        ({}, {"\ud800": 1}),
        ({}, {"a": [[[[1]]]]}),
        ({}, {"a": b"bytes"}),
    ],
)
def test_an_honest_sender_cannot_pack_what_the_gate_refuses(parts: dict[str, RawTensor], output: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        pack("upload", CLIENT, PLAN, parts, output, SigningKey.generate())


@pytest.mark.parametrize("dtype, shape, data", [("F8", (1,), b"\0"), ("F32", (2,), b"\0" * 7), ("U8", (), b"")])
def test_a_tensor_has_the_bytes_that_its_shape_needs(dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    with pytest.raises(ValueError):
        RawTensor(dtype, shape, data)


def test_sizes_in_bytes_are_counted_from_any_buffer() -> None:
    assert memoryview(RawTensor("F64", (2,), np.zeros(2).data).data).nbytes == 16
