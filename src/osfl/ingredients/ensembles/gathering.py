"""Several payloads in one, each under the name of its sender, and back."""

from __future__ import annotations

from collections.abc import Mapping

from osfl.core.types import ClientId, Payload


def gather(payloads: Mapping[ClientId, Payload], under: str = "") -> Payload:
    """Tensors as `under` + `<name>/<tensor>`; the facts of all are kept as `members`."""
    tensors = {f"{under}{name}/{key}": value for name, payload in payloads.items() for key, value in payload.tensors.items()}
    return Payload(tensors, {"members": {name: dict(payload.facts) for name, payload in payloads.items()}})


def members(payload: Payload, under: str = "") -> dict[ClientId, Payload]:
    """What was gathered, by name, sorted; nothing where nothing was."""
    found = {}
    for name, facts in sorted(payload.facts.get("members", {}).items()):
        prefix = f"{under}{name}/"
        own = {key.removeprefix(prefix): value for key, value in payload.tensors.items() if key.startswith(prefix)}
        found[name] = Payload(own, facts)
    return found
