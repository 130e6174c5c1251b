"""What a client refuses to send."""

from collections.abc import Callable

import pytest
import torch

from osfl.core.errors import UploadBlocked
from osfl.core.types import Contract, Dataset, Field, Limits, Payload, Shard, Task
from osfl.rounds.egress import check_payload

TASK = Task("t", ("a", "b"), (1, 4, 4))
IMAGES = torch.randint(0, 256, (5, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
ZEROS = torch.zeros(5, dtype=torch.int64)
SHARD = Shard("st-mary", Dataset(IMAGES[:4], ZEROS[:4]), Dataset(IMAGES[4:], ZEROS[4:]))
CONTRACT: Contract = {"w": Field("F32", ("n", 1, 4, 4)), "extra": Field("F32", (2,), required=False)}
FINE = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def send(tensors: dict[str, torch.Tensor], facts: dict[str, object] | None = None, limits: Limits = Limits()) -> None:
    check_payload(Payload(tensors, facts or {}), CONTRACT, SHARD, TASK, limits)


def test_what_the_contract_announces_may_go() -> None:
    send({"w": FINE})
    send({"w": FINE, "extra": torch.zeros(2)})


REFUSED: dict[str, tuple[Callable[[], None], str, str]] = {
    "a tensor too many": (lambda: send({"w": FINE, "secret": FINE}), "secret", "not in the contract"),
    "a tensor too few": (lambda: send({}), "w", "missing"),
    "another dtype": (lambda: send({"w": FINE.double()}), "w", "F64"),
    "another shape": (lambda: send({"w": FINE[..., :2]}), "w", r"\[3, 1, 4, 2\]"),
    "not a number": (lambda: send({"w": FINE * torch.nan}), "w", "not finite"),
    "too large": (lambda: send({"w": FINE}, limits=Limits(upload_bytes=10)), "limits.upload_bytes", "larger than the plan"),
    "long facts": (lambda: send({"w": FINE}, {"note": "x" * 70000}), "facts", "too long"),
    "a training image": (lambda: send({"w": torch.cat([FINE, IMAGES[1:2].float()])}), "w", "an image of yours"),
    "a normalized one": (lambda: send({"w": IMAGES[2:3].float() / 127.5 - 1}), "w", "an image of yours"),
    "a validation image": (lambda: send({"w": IMAGES[4:5].float() * 3 + 7}), "w", "an image of yours"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_any_doubt_means_refuse(name: str) -> None:
    attempt, field, reason = REFUSED[name]
    with pytest.raises(UploadBlocked, match=reason) as caught:
        attempt()
    assert caught.value.field == field and caught.value.client == "st-mary" and caught.value.fix
    assert "Nothing was sent by 'st-mary'" in str(caught.value)
