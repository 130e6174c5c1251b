"""Save and load payloads on our own disk as ordinary safetensors files, written atomically.

What travels between sites is a signed bundle (osfl.wire). This is for what a process keeps for itself: checkpoints,
shared client models, personalized models. It is also where torch tensors become raw bytes for the wire and back.
"""

from __future__ import annotations

from pathlib import Path

from osfl.core.types import Payload
from osfl.runtime.payloads import from_raw, load_payload, save_payload
from osfl.wire.bundle import Bundle


def save_model(path: Path, payload: Payload, release: str) -> None:
    """What a client made of a release, with that release's digest."""
    save_payload(path, Payload(payload.tensors, {**payload.facts, "release": release}))


def load_model_of(path: Path) -> tuple[Payload, str] | None:
    """What `save_model` kept, and the digest of the release that it was made of."""
    kept = load_payload(path)
    if kept is None:
        return None
    facts = {name: fact for name, fact in kept.facts.items() if name != "release"}
    return Payload(kept.tensors, facts), str(kept.facts.get("release", ""))


def payload_of(bundle: Bundle) -> Payload:
    """The payload of a verified bundle, as torch tensors."""
    return Payload(from_raw(bundle.tensors), dict(bundle.facts))
