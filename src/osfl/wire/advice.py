"""Advice for a release that was rejected: it comes from the coordinator, not from a client."""

from __future__ import annotations

from types import MappingProxyType

from osfl.core.errors import Rejected

_AS_MADE = "Another copy will not help: ask the coordinator to make it again with `osfl server` and this version of osfl."
_FIXES = MappingProxyType(  # by the last part of the field
    {
        "file": "Give the path of the .safetensors file that you got from the coordinator, who makes it with `osfl server`.",
        "seal": "This is a site's upload: a release is never sealed. Give the file that you got from the coordinator.",
        "signature": "Check that server.pub is the public key of this round's coordinator, who signs with the other half; "
        "if it does, the file was changed: get it again from the coordinator.",
        "plan": "Ask the coordinator for the release of this round, or give the plan.toml that it was made with; "
        "a plan that changed in any way is another round.",
        "sha256": "The file was damaged in transit; copy it again from the coordinator's round folder.",
        "values": _AS_MADE,
        "facts": _AS_MADE,
    }
)


def release_fix(no: Rejected) -> str | None:
    """The remedy for whoever holds a release; the gate's own where that does not mention uploads."""
    return _FIXES.get((no.field or "").rpartition(".")[2], no.fix)
