"""What is said about a bundle: hand-made ones, each with one thing to notice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osfl.core.errors import Rejected, UsageError
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.tensors import RawTensor
from osfl.core.types import Contract, Field, Plan, Task
from osfl.reports.figures import figure_views
from osfl.reports.inspection import inspection_page
from osfl.roles.inspection.known import Known, gather
from osfl.roles.inspection.look import Look, look, worst
from osfl.roles.inspection.numbers import histogram, numbers_of
from osfl.roles.inspection.tensor_descriptions import describe_tensor, owner_of
from osfl.wire.bundle import pack
from osfl.wire.signing import SigningKey

KEY, OTHER = (SigningKey.from_seed(bytes([n]) * 32) for n in (1, 2))
TASK = Task("cells", ("basophil", "eosinophil"), (1, 8, 8))
PLAN = Plan(TASK, "fedavg", resolve_settings(load("fedavg"), "smoke"), ("north", "south"))
CONTRACT: Contract = {"model/head.weight": Field("F32", (2, 3))}
KNOWN = Known(PLAN.as_json(), {"": CONTRACT}, {"north": KEY.public_hex}, OTHER.public_hex, where="the round")


def floats(*shape: int, seed: int = 0) -> RawTensor:
    return RawTensor("F32", shape, np.random.default_rng(seed).normal(size=shape).astype("<f4").tobytes())


WEIGHTS = {"model/head.weight": floats(2, 3)}


def seen(
    tensors: dict[str, RawTensor] = WEIGHTS,
    facts: dict[str, Any] | None = None,
    known: Known = KNOWN,
    key: SigningKey = KEY,
    plan: str = PLAN.digest,
    **more: Any,
) -> Look:
    facts = {"samples": 100} if facts is None else facts
    return look(pack("upload", "north", plan, tensors, facts, key), known, name="x.safetensors", **more)


def output(found: Look, check: str) -> list[tuple[str, str]]:
    return [(f["severity"], f["message"]) for f in found["findings"] if f["check"] == check]


def test_a_good_upload_is_described_completely() -> None:
    found = seen(draw=False)
    assert worst(found) == "note" and found["sender"] == "north" and found["receiver"] == "the server"
    assert found["summary"][0] == "This is the one message that 'north' sends to the server in this round."
    assert "6 numbers: weights of the network (6 numbers)" in found["summary"][1] and "no picture" in found["summary"][2]
    (row,) = found["tensors"]
    assert row["name"] == "model/head.weight" and row["shape"] == [2, 3] and row["bytes"] == 24
    assert row["what"] == "connections of a layer"
    assert [f["check"] for f in found["findings"] if f["severity"] == "good"] == [
        "Signature",
        "Integrity",
        "Round",
        "Contents",
        "Pictures",
        "Numbers",
    ]
    assert any("membership" in sentence for sentence in found["not_checked"])
    json.dumps(found, allow_nan=False)


def test_who_made_it() -> None:
    assert output(seen(draw=False), "Signature")[0][0] == "good"
    severity, command = output(seen(known=Known(), draw=False), "Signature")[0]
    assert severity == "caution" and "WHO MADE THIS FILE IS NOT KNOWN" in command
    severity, command = output(seen(key=OTHER, draw=False), "Signature")[0]
    assert severity == "serious" and "NOT BY THE KEY OF 'NORTH'" in command


def test_another_round_and_another_sender() -> None:
    assert output(seen(plan="0" * 64, draw=False), "Round")[0][0] == "serious"
    unknown_sender = look(pack("upload", "east", PLAN.digest, WEIGHTS, {"samples": 9}, KEY), KNOWN, name="x", draw=False)
    assert output(unknown_sender, "Sender")[0][0] == "serious" and output(unknown_sender, "Signature")[0][0] == "caution"


@pytest.mark.parametrize(
    ("tensors", "facts"),
    [
        ({"model/head.weight": floats(2, 4)}, {"samples": 1}),
        ({**WEIGHTS, "extra": floats(1)}, {"samples": 1}),
        ({}, {"samples": 1}),
        (WEIGHTS, {"samples": 0}),
        (WEIGHTS, {"class_counts": [1]}),
    ],
)
def test_what_was_not_announced(tensors: dict[str, RawTensor], facts: dict[str, Any]) -> None:
    assert output(seen(tensors, facts, draw=False), "Contents")[0][0] == "serious"


def test_damage_is_reported_and_the_rest_is_shown() -> None:
    data = bytearray(pack("upload", "north", PLAN.digest, WEIGHTS, {"samples": 100}, KEY))
    data[-1] ^= 1
    found = look(bytes(data), KNOWN, name="x", draw=False)
    assert output(found, "Integrity")[0][0] == "serious" and len(found["tensors"]) == 1


@pytest.mark.parametrize("data", [b"", b"hello", bytes(64), b"\x89PNG" + bytes(500), b"\x05\0\0\0\0\0\0\0{}   "])
def test_what_is_no_bundle_is_refused(data: bytes) -> None:
    with pytest.raises(Rejected):
        look(data, KNOWN, name="x")


def test_numbers_of_patients_that_leave() -> None:
    found = seen(facts={"class_counts": [2, 40], "samples": 42}, draw=False)
    assert output(found, "Images by class") == [
        ("note", "The number of training images of each class leaves: basophil 2, eosinophil 40.")
    ]
    assert output(found, "Rare classes")[0][0] == "caution" and "basophil 2" in output(found, "Rare classes")[0][1]
    assert output(found, "One class") == []
    alone = seen(facts={"class_counts": [0, 40], "samples": 40}, draw=False)
    assert output(alone, "Rare classes") == [] and "'eosinophil'" in output(alone, "One class")[0][1]
    assert output(seen(facts={"samples": 5}, draw=False), "Few images")[0][0] == "caution"


def test_text_that_could_hold_a_name() -> None:
    found = seen(facts={"samples": 50, "remark": "x" * 200}, draw=False)
    assert output(found, "Text")[0][0] == "caution" and "remark" in output(found, "Facts")[0][1]


def test_values_that_are_no_numbers() -> None:
    bad = RawTensor("F32", (2, 3), np.array([[0, 1, np.nan], [np.inf, 2, 3]], "<f4").tobytes())
    found = seen({"model/head.weight": bad})
    assert "2 values" in output(found, "Numbers")[0][1] and worst(found) == "serious"
    assert found["tensors"][0]["most"] == 3.0
    json.dumps(found, allow_nan=False)


def test_pictures_are_found_whatever_they_are_called_and_drawn() -> None:
    pixels = RawTensor("U8", (30, 1, 8, 8), np.random.default_rng(0).integers(0, 256, 30 * 64, np.uint8).tobytes())
    labels = RawTensor("I64", (30,), np.array([0, 1] * 15, "<i8").tobytes())
    found = seen({"model/head.weight": pixels, "labels": labels})
    assert output(found, "Pictures")[0][0] == "caution" and "pictures in it" in found["summary"][2]
    images = found["figures"]["Pictures in model/head.weight"]["images"]
    assert len(images) == 24 and images[0]["caption"] == "basophil"
    assert all(view["problem"] == "" for view in figure_views(found["figures"]))
    assert "data:image/png;base64," in inspection_page(found)


def test_a_training_image_inside_is_serious(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(3)
    for name in TASK.classes:
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(tmp_path / name / f"{i}.png")
    stolen = np.asarray(Image.open(tmp_path / "basophil" / "1.png"), "<f4") / 255
    leak = {"model/head.weight": RawTensor("F32", (1, 1, 8, 8), stolen.tobytes())}
    assert output(seen(leak, data=tmp_path), "Your images")[0][0] == "serious"
    other = {"model/head.weight": floats(1, 64)}
    assert output(seen(other, data=tmp_path), "Your images") == [
        ("good", "None of the 1 rows that are as long as an image is a copy of one of your 6 images.")
    ]
    assert output(seen(data=tmp_path), "Your images") == [
        ("note", "No tensor has rows as long as an image: no copy of your 6 images was looked for.")
    ]


def test_the_method_draws_only_what_its_round_would_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def preview(self: Any, payload: Any, ctx: Any) -> dict[str, Any]:
        asked.append("drawn")
        return {"Lines": {"kind": "lines", "x": [0, 1], "series": {"a": [0, 1]}}}

    monkeypatch.setattr(load("fedavg"), "preview", preview, raising=False)
    assert next(iter(seen()["figures"])) == "Lines"
    seen(key=OTHER)
    seen({**WEIGHTS, "extra": floats(3)})
    assert asked == ["drawn"]
    monkeypatch.setattr(load("fedavg"), "preview", lambda self, payload, ctx: 1 / 0)
    assert any("drawing failed (ZeroDivisionError" in sentence for sentence in seen()["not_checked"])


def test_releases_too() -> None:
    tensors, origin = {"north/model/a.weight": floats(3)}, {"upload/north": "0" * 64}
    data = pack("release", "", PLAN.digest, tensors, {}, OTHER, made_from=origin)
    found = look(data, KNOWN, name="r", draw=False)
    assert found["sender"] == "the server" and output(found, "Signature")[0][0] == "good"
    assert found["groups"][0]["owner"] == "network of north" and "uploads of north" in output(found, "Origin")[0][1]
    own = look(pack("personal", "north", PLAN.digest, {}, {}, OTHER), KNOWN, name="p")
    assert own["receiver"] == "north" and "It holds no tensor." in own["summary"]


def test_names_of_strangers_stay_text_on_the_page() -> None:
    page = inspection_page(seen({"<script>alert(1)</script>": floats(2)}, {"<b>": "<img src=x>"}, draw=False))
    assert "<script>" not in page and "<img src=x>" not in page and "&lt;script&gt;" in page
    assert "http://" not in page and "https://" not in page


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "kind"),
    [
        ("model/bn.running_mean", "F32", (8,), "statistics"),
        ("model/bn.num_batches_tracked", "I64", (), "counter"),
        ("model/conv.weight", "F32", (8, 1, 3, 3), "weights"),
        ("model/conv.weight", "F32", (8, 1, 8, 8), "pictures"),
        ("labels", "I64", (9,), "labels"),
        ("tokens", "F16", (9, 5, 16), "tokens"),
        ("class-0/mean", "F32", (4,), "weights"),
        ("sequences", "F16", (9, 5, 16), "tokens"),
        ("sums", "F64", (2, 16), "features"),
        ("class-1/gram", "F32", (9,), "features"),
        ("blob", "U8", (900,), "numbers"),
        ("scans", "U8", (2, 3, 64, 64), "pictures"),
    ],
)
def test_roles(name: str, dtype: str, shape: tuple[int, ...], kind: str) -> None:
    assert describe_tensor(name, dtype, shape, (1, 8, 8)).kind == kind


def test_the_sum_of_one_image_is_that_image() -> None:
    sums = {"sums": floats(2)}
    (one,) = output(seen(sums, {"samples": 10, "class_counts": [9, 1]}, draw=False), "Sums")
    assert one[0] == "caution" and "eosinophil 1" in one[1]
    (two,) = output(seen(sums, {"samples": 10, "class_counts": [8, 2]}, draw=False), "Sums")
    assert two[0] == "note"
    assert not output(seen(draw=False), "Sums")


def test_owners() -> None:
    assert owner_of("class-1/mean", TASK.classes) == "generator of class eosinophil"
    assert owner_of("south/class-7/mean", TASK.classes) == "generator of class 7 of south"
    assert owner_of("plain", ()) == "unnamed part" and owner_of("tokens/x", ()) == "part tokens"


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "I8", "U8", "BOOL"])
def test_numbers_of_every_type(dtype: str) -> None:
    values = np.array([0, 1, 1, 0, 1, 1])
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1", "BOOL": "u1"}
    data = (values.astype("<f4").view("<u4") >> 16).astype("<u2") if dtype == "BF16" else values.astype(kinds[dtype])
    found = numbers_of(RawTensor(dtype, (6,), data.tobytes()))
    assert (found.count, found.least, found.most, found.not_finite) == (6, 0.0, 1.0, 0)
    assert found.mean == pytest.approx(2 / 3) and found.deviation == pytest.approx(math.sqrt(2) / 3)


def test_numbers_at_the_edge() -> None:
    assert numbers_of(RawTensor("F32", (0,), b"")).least is None
    huge = RawTensor("F64", (2,), np.array([1e308, -1e308]).tobytes())
    assert numbers_of(huge).deviation is None and histogram([huge], [numbers_of(huge)]) is None
    flat = RawTensor("F32", (2,), np.ones(2, "<f4").tobytes())
    assert histogram([flat], [numbers_of(flat)]) is None
    some = floats(50)
    figure = histogram([some, some], [numbers_of(some)] * 2)
    assert figure is not None and sum(figure["series"]["numbers"]) == 100


def test_what_the_reader_names_must_fit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="already"):
        gather(tmp_path / "x", plan=tmp_path / "plan.toml", fl_round=tmp_path)
    assert gather(tmp_path / "x") == Known()
