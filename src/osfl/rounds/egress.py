"""The egress check: the client's check of its own upload. Any doubt blocks it: after the upload it is too late.

The gate at the other end checks the same contract, but a site must not rely on others for its own secrets.
"""

from __future__ import annotations

import hashlib
import math

import torch

from osfl.core.errors import RoundError, UploadBlocked
from osfl.core.method import Context, Method
from osfl.core.types import ClientId, Contract, Field, Limits, Payload, Plan, Shard, Task, Upload, canonical
from osfl.rounds.exposure import BOUND, Ratio, attack, of_which, worst
from osfl.runtime.payloads import to_raw

_OPEN = (
    "Agree on a plan with `secure_sum = true` or `[privacy]`; or on `--set readable=send`, if whoever receives the sums may "
    "know the features of single images."
)
MODELS_ONLY = "This is a mistake in the method, not in your data; please report it."


def check_payload(
    payload: Payload, contract: Contract, shard: Shard, task: Task, limits: Limits, *, private: bool = False
) -> None:
    """Raise UploadBlocked unless the payload is exactly what the contract announces and holds no image of the shard. A
    `private` one is noisy or public, and not compared with images: public numbers may happen to look like one, and to stop
    would say so."""
    for name in payload.tensors:
        if name not in contract:
            raise UploadBlocked(f"tensor {name!r} is not in the contract", client=shard.client, field=name, fix=MODELS_ONLY)
    for name, field in contract.items():
        if name in payload.tensors:
            _check_tensor(name, payload.tensors[name], field, shard)
        elif field.required:
            raise UploadBlocked(f"tensor {name!r} is missing", client=shard.client, field=name, fix=MODELS_ONLY)
    _check_size(payload, shard, limits)
    if not private:
        check_no_image(payload, shard, task)


def check_exposure(
    method: Method, payload: Payload, shard: Shard, task: Task, ctx: Context, *, real: bool = True
) -> list[Ratio]:
    """Attack what a generator, statistics or synthetic data show (osfl.rounds.exposure); raise UploadBlocked where an image
    shows, else return what was found. Not `real`: nothing leaves, and what stops real sites alone is only found. With
    [privacy] noise protects, and nothing is tried: to stop would say something about the images."""
    if not method.provides("exposed") or ctx.plan.privacy is not None:
        return []
    exposed = list(method.exposed(payload, shard, ctx))
    found = attack(exposed)
    kinds = [worst(found, (stops,)) for stops in (("all", "real") if real else ("all",))]
    least = next((one for one in kinds if one is not None and one.ratio < BOUND), None)
    if least is None:
        return found
    setting = next(one.setting for one in exposed if one.label == least.label)
    fix = (
        f"Agree on a larger {setting!r} in the plan (`--set {setting}=20`), or leave this class out at your site. "
        "Several images of one person or object in a class, and copies with noise, are a usual cause."
    )
    if least.stops == "real":
        setting, fix = "readable", _OPEN
    raise UploadBlocked(
        f"{of_which(least.label, task.classes)}: a {least.what} in the upload is much nearer to one of your training images "
        "than to images that were not used",
        client=shard.client,
        field=setting,
        expected=f"a distance ratio of at least {BOUND}",
        got=f"{least.ratio:.2f}",
        fix=fix,
    )


def check_open_sums(method: Method, payload: Payload, client: ClientId, plan: Plan) -> None:
    """Raise UploadBlocked where a real site has too few images for what its upload adds up (`Method.too_few`)."""
    if few := method.too_few(payload, plan):
        images, least = few
        raise UploadBlocked(
            "the features of single images can be computed from exact sums of so few",
            client=client,
            field="readable",
            expected=f"at least {least} images",
            got=images,
            fix=_OPEN,
        )


def check_numbers(method: Method, payload: Payload, shard: Shard, ctx: Context) -> None:
    """Raise UploadBlocked where the server would refuse the numbers: sums that no images have."""
    try:
        method.check_upload(Upload(shard.client, ctx.plan.digest, payload), ctx)
    except RoundError as no:
        raise UploadBlocked(
            f"the server would refuse it: {no.reason}",
            client=shard.client,
            field=no.field,
            expected=no.expected,
            got=no.got,
            fix=MODELS_ONLY,
        ) from None


def _check_tensor(name: str, tensor: torch.Tensor, field: Field, shard: Shard) -> None:
    raw = to_raw({name: tensor})[name]
    fits = len(raw.shape) == len(field.shape) and all(
        isinstance(want, str) or want == have for want, have in zip(field.shape, raw.shape, strict=True)
    )
    if raw.dtype != field.dtype or not fits:
        raise UploadBlocked(
            f"tensor {name!r} is not as agreed",
            client=shard.client,
            field=name,
            expected=f"{field.dtype} {list(field.shape)}",
            got=f"{raw.dtype} {list(raw.shape)}",
            fix=MODELS_ONLY,
        )
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise UploadBlocked(
            f"tensor {name!r} holds values that are not finite",
            client=shard.client,
            field=name,
            fix="Training diverged; lower the learning rate (`--set lr=...`) and run again.",
        )


def _check_size(payload: Payload, shard: Shard, limits: Limits) -> None:
    facts = len(canonical(dict(payload.facts)))
    if facts > limits.facts_bytes:
        raise UploadBlocked(
            "the facts are too long",
            client=shard.client,
            field="facts",
            expected=f"at most {limits.facts_bytes} bytes",
            got=facts,
            fix=MODELS_ONLY,
        )
    total = sum(tensor.numel() * tensor.element_size() for tensor in payload.tensors.values())
    if total > limits.upload_bytes:
        raise UploadBlocked(
            "the upload is larger than the plan allows",
            client=shard.client,
            field="limits.upload_bytes",
            expected=f"at most {limits.upload_bytes} bytes",
            got=total,
            fix="Choose a smaller architecture, or agree on a larger limit in the plan.",
        )


def image_rows(payload: Payload, task: Task) -> dict[str, torch.Tensor]:
    """The tensors whose rows are as long as an image, as rows (n, pixels); a vector of that length is one row."""
    pixels = math.prod(task.image)
    found = {name: tensor[None] if tensor.ndim == 1 else tensor for name, tensor in payload.tensors.items()}
    return {name: rows.flatten(1) for name, rows in found.items() if rows.ndim > 1 and len(rows) and rows[0].numel() == pixels}


def check_no_image(payload: Payload, shard: Shard, task: Task) -> None:
    """No row of any tensor may be a training image, whatever its scale: compared after standardizing each row."""
    rows = image_rows(payload, task)
    known = _prints(shard.train.images) | _prints(shard.val.images) if rows else set()
    for name, tensor in rows.items():
        if known & _prints(tensor):
            raise UploadBlocked(
                f"tensor {name!r} contains an image of yours",
                client=shard.client,
                field=name,
                expected="no raw sample in an upload",
                got="a training image",
                fix=MODELS_ONLY,
            )


def _prints(images: torch.Tensor) -> set[bytes]:
    """A fingerprint of each row that does not change with brightness or contrast; constant rows have none."""
    if not len(images):
        return set()
    rows = images.reshape(len(images), -1).double()
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    varied = (high > low).squeeze(1)
    scaled = ((rows - low) / (high - low).clamp_min(1e-12) * 64).round().to(torch.uint8)[varied]
    return {hashlib.sha256(row.numpy().tobytes()).digest() for row in scaled}
