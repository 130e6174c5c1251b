"""An upload beside its site's images: the figures of the egress check are reported, and nothing more is claimed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.types import Payload, Shard
from osfl.methods.federated_factory import FederatedFactory
from osfl.reports.figures import figure_views
from osfl.roles.inspection.known import Known
from osfl.roles.inspection.look import Look, look
from osfl.roles.inspection.own_images import ratio_chart
from osfl.rounds.exposure import BOUND, attack
from osfl.runtime.payloads import to_raw
from osfl.simulate.checks import small_federation
from osfl.wire.bundle import pack
from osfl.wire.signing import SigningKey

KEY = SigningKey.from_seed(bytes([1]) * 32)
FEDERATION = small_federation("federated_factory", partition="iid", samples=400)
PLAN, SHARD = FEDERATION.plan, FEDERATION.shards[0]


@pytest.fixture(scope="module")
def payload() -> Payload:
    return FederatedFactory(PLAN.task, PLAN.settings).client_phase(SHARD, Context(PLAN, torch.device("cpu")))


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> object:
    """Inspect an upload of the site, as `osfl inspect --data` does."""
    monkeypatch.setattr("osfl.roles.site.open_shard", lambda plan, client, data: SHARD)

    def inspect(sent: Payload, **options: object) -> Look:
        bundle = pack("upload", SHARD.client, PLAN.digest, to_raw(sent.tensors), dict(sent.facts), KEY)
        known = Known(PLAN.as_json(), clients={SHARD.client: KEY.public_hex}, where="the round")
        return look(bundle, known, name="x.safetensors", **options)  # type: ignore[arg-type]

    return inspect


def findings(seen: Look) -> dict[str, tuple[str, str]]:
    return {str(f["check"]): (str(f["severity"]), str(f["message"])) for f in seen["findings"]}


def planted(payload: Payload, shard: Shard) -> Payload:
    """The center of one component is moved to a training image, as far as the basis reaches, which here is all the way."""
    tensors = dict(payload.tensors)
    label = next(name.split("/")[0] for name in tensors)
    mine = shard.train.images[shard.train.labels == int(label.removeprefix("class-"))][0].float().flatten() / 127.5 - 1
    tensors[f"{label}/mean"] = mine.reshape(tensors[f"{label}/mean"].shape)
    tensors[f"{label}/centers"] = torch.zeros_like(tensors[f"{label}/centers"])
    return Payload(tensors, payload.facts)


def test_honest_figures_are_those_of_the_egress_check(payload: Payload, inspected: object, tmp_path: Path) -> None:
    seen = inspected(payload, data=tmp_path)  # type: ignore[operator]
    method = FederatedFactory(PLAN.task, PLAN.settings)
    expected = attack(method.exposed(payload, SHARD, Context(PLAN, torch.device("cpu"))))
    assert seen["ratios"] == [ratio.as_json() for ratio in expected] and expected
    severity, command = findings(seen)["Reconstruction"]
    assert severity == "good" and f"distance ratio of {min(ratio.ratio for ratio in expected):.2f}" in command
    assert "What the reconstruction attack found" in seen["figures"]
    assert all(view["problem"] == "" for view in figure_views(seen["figures"]))


def test_an_image_that_can_be_read_out_is_serious(payload: Payload, inspected: object, tmp_path: Path) -> None:
    seen = inspected(planted(payload, SHARD), data=tmp_path, draw=False)  # type: ignore[operator]
    severities = {check: severity for check, (severity, _) in findings(seen).items()}
    assert "serious" in (severities["Your images"], severities.get("Reconstruction"))
    noise = torch.linspace(-0.02, 0.02, 64)  # no copy any more, but as near as one
    tensors = planted(payload, SHARD).tensors
    near = {name: tensor + noise if name.endswith("mean") else tensor for name, tensor in tensors.items()}
    seen = inspected(Payload(near, payload.facts), data=tmp_path, draw=False)  # type: ignore[operator]
    assert findings(seen)["Reconstruction"][0] == "serious" and min(row["ratio"] for row in seen["ratios"]) < BOUND


def test_nothing_is_stated_that_was_not_checked(payload: Payload, inspected: object, tmp_path: Path) -> None:
    without_data = inspected(payload, draw=False)  # type: ignore[operator]
    assert not {"Your images", "Reconstruction"} & set(findings(without_data)) and without_data["ratios"] == []
    assert "Image-long rows" in findings(without_data) and "can be images" in without_data["summary"][2]
    assert any("no attack was tried" in sentence for sentence in without_data["not_checked"])
    broken = {name: tensor * float("nan") if name.endswith("centers") else tensor for name, tensor in payload.tensors.items()}
    seen = inspected(Payload(broken, payload.facts), data=tmp_path, draw=False)  # type: ignore[operator]
    assert "Reconstruction" not in findings(seen)
    assert any("no attack was tried" in sentence for sentence in seen["not_checked"])


def test_the_span_of_sums_is_a_caution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sums of few images: a membership test is possible, which stops nothing; a row that is one image is serious."""
    federation = small_federation("onesum")
    plan, shard = federation.plan, federation.shards[0]
    monkeypatch.setattr("osfl.roles.site.open_shard", lambda plan, client, data: shard)
    sent = load("onesum")(plan.task, plan.settings).client_phase(shard, Context(plan, torch.device("cpu")))
    bundle = pack("upload", shard.client, plan.digest, to_raw(sent.tensors), dict(sent.facts), KEY)
    seen = look(
        bundle, Known(plan.as_json(), clients={shard.client: KEY.public_hex}, where="the round"), name="x", data=tmp_path
    )
    severity, message = findings(seen)["Membership"]
    assert severity == "caution" and "membership test" in message and "shows no image" in message
    (span, *_) = [row for row in seen["ratios"] if row["what"] == "second moments"]
    assert span["residuals"][0] < 1e-3 < span["residuals"][1]
    assert "second moments" not in str(seen["figures"]["What the reconstruction attack found"]["columns"])


def test_an_attack_that_fails_is_stated_to_have_failed(
    payload: Payload, inspected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FederatedFactory, "exposed", lambda *_: 1 / 0)
    seen = inspected(payload, data=tmp_path, draw=False)  # type: ignore[operator]
    assert any("attack failed (ZeroDivisionError" in sentence for sentence in seen["not_checked"])
    assert "Reconstruction" not in findings(seen)


def test_the_chart_shows_kinds_that_all_classes_have(payload: Payload) -> None:
    method = FederatedFactory(PLAN.task, PLAN.settings)
    ratios = attack(method.exposed(payload, SHARD, Context(PLAN, torch.device("cpu"))))
    some = [replace(ratio, what="odd") if i == 0 else ratio for i, ratio in enumerate(ratios)]
    (figure,) = ratio_chart(some, PLAN.task.classes).values()
    assert "odd" not in figure["columns"] and ratio_chart([], PLAN.task.classes) == {}
