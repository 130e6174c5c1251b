"""What a release was made with: a software bill of materials (CycloneDX 1.5, JSON) of this package and all that it needs.

Only what is installed and leads from osfl by its requirements, extras included where they are there. No time and no serial
number: the same installation writes the same bytes.
"""

from __future__ import annotations

import json
import platform
import re
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution

NAME = "sbom.cdx.json"
_FIRST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LICENSE = re.compile(r"[A-Za-z0-9.+() -]{1,100}")


@cache
def bill_of_materials() -> bytes:
    """The whole file."""
    found, needs = _installed("osfl")
    own = found.pop("osfl", None)
    version = own.version if own else "unknown"
    value = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "application", "bom-ref": "osfl", "name": "osfl", "version": version},
            "properties": [
                {"name": "python", "value": platform.python_version()},
                {"name": "system", "value": f"{platform.system()} {platform.machine()}"},
            ],
        },
        "components": [_component(name, found[name]) for name in sorted(found)],
        "dependencies": [{"ref": name, "dependsOn": sorted(needs[name])} for name in sorted(needs)],
    }
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _installed(start: str) -> tuple[dict[str, Distribution], dict[str, set[str]]]:
    """Everything that is installed and needed, and what each of them needs."""
    found: dict[str, Distribution] = {}
    needs: dict[str, set[str]] = {}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in needs:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # of an extra, or of another system
            continue
        needs[name] = {_normal(match[0]) for line in found[name].requires or () if (match := _FIRST.match(line))}
        waiting += needs[name]
    return found, {name: {one for one in wanted if one in found} for name, wanted in needs.items()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _component(name: str, one: Distribution) -> dict[str, object]:
    version = one.version
    stated = dict(one.metadata.items())  # type: ignore[attr-defined]
    license_name = stated.get("License-Expression") or stated.get("License") or ""
    licenses = {"licenses": [{"license": {"name": license_name}}]} if _LICENSE.fullmatch(license_name) else {}
    return {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        **licenses,
    }
