"""Client ids and digests that are safe as file names everywhere, and untrusted text made safe for messages."""

from __future__ import annotations

import re

from osfl.core.errors import UsageError
from osfl.core.types import ClientId, Json

_CLIENT = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENSOR = re.compile(r"[!-~]{1,200}")
# Windows opens a device for these, whatever follows the first dot; "server" is who signs releases.
_RESERVED = {"server", "con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}


def is_client_id(value: Json) -> bool:
    """Lower case only, so that two clients never share a file where case is ignored; no separators, no hidden names."""
    if not isinstance(value, str) or not _CLIENT.fullmatch(value):
        return False
    return not value.endswith(".") and value.split(".")[0] not in _RESERVED


def check_client_id(value: str) -> ClientId:
    """The id itself, or an error that lists the valid ids."""
    if is_client_id(value):
        return value
    raise UsageError(
        f"{shown(value)} cannot be a client's name: it names files on every system",
        field="client",
        fix="Use 1 to 64 of a-z 0-9 . _ - starting with a letter or digit, e.g. 'st-mary'; not server, con, nul, com1, ...",
    )


def is_digest(value: Json) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def is_tensor_name(value: Json) -> bool:
    return isinstance(value, str) and value != "__metadata__" and _TENSOR.fullmatch(value) is not None


def shown(value: object, limit: int = 120) -> str:
    """An untrusted value for an error message: escaped, so that it cannot steer a terminal, and never long."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def architecture_rule(text: str) -> tuple[ClientId, str]:
    """(client, architecture) of `client-01:cnn`; the client is "" in `cnn` and in `timm:resnet18`."""
    client, _, name = (part.strip() for part in text.rpartition(":"))
    if client == "timm" or client.endswith(":timm"):
        return client.removesuffix("timm").rstrip(": "), f"timm:{name}"
    return client, name
