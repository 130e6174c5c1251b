"""The package that runs here, as a wheel for the other machines of a deployment: no index has to have it."""

from __future__ import annotations

import base64
import hashlib
import io
import tomllib
import zipfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from osfl.core.errors import UsageError
from osfl.core.types import Json

PACKAGE = Path(__file__).parents[2]
METADATA = ("METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE")  # not what pip noted about this installation
_WITHOUT = "Name the package: `pip wheel --no-deps .` in the checkout makes it, --wheel FILE takes it."
_DATE = (2020, 1, 1, 0, 0, 0)  # the same files are the same wheel


def packed_here() -> tuple[str, bytes]:
    """The package that runs here as a wheel: name and content. Of an installation with `--editable`, or a checkout that is on
    the path, the files and the metadata are those of the source tree as it is now."""
    version, metadata = from_source(PACKAGE.parents[1]) or _from_installation()
    info = f"osfl-{version}.dist-info"
    files = {f"osfl/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in _sources()}
    files |= {f"{info}/{name}": text.encode() for name, text in metadata.items()}
    record = "".join(f"{name},{_digest(content)},{len(content)}\n" for name, content in sorted(files.items()))
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    return f"osfl-{version}-py3-none-any.whl", stream.getvalue()


def _from_installation() -> tuple[str, dict[str, str]]:
    """Version and metadata files of what pip installed."""
    try:
        found = distribution("osfl")
    except PackageNotFoundError:
        raise UsageError("osfl is not installed here, so there is no package to copy", field="wheel", fix=_WITHOUT) from None
    texts = {name: found.read_text(name) for name in METADATA}
    for name, text in texts.items():
        if text is None:
            raise UsageError(f"this installation of osfl lacks {name}", field="wheel", fix=_WITHOUT)
    return found.version, {name: text or "" for name, text in texts.items()}


def from_source(root: Path) -> tuple[str, dict[str, str]] | None:
    """The same from pyproject.toml of a source tree; None where `root` is none of osfl. What pip noted at the last
    `pip install --editable` may be of an earlier version, with other requirements."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return None
    if project.get("name") != "osfl":
        return None
    scripts = "".join(f"{name} = {target}\n" for name, target in project["scripts"].items())
    return project["version"], {
        "METADATA": _core_metadata(project, (root / project["readme"]).read_text(encoding="utf-8")),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: osfl\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": f"[console_scripts]\n{scripts}",
        "licenses/LICENSE": (root / "LICENSE").read_text(encoding="utf-8"),
    }


def _core_metadata(project: Mapping[str, Json], readme: str) -> str:
    """As PyPA's core metadata 2.4 has it. Our requirements have no markers of their own."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        *(f"Classifier: {one}" for one in project["classifiers"]),
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {one}" for one in project["dependencies"]),
    ]
    for extra, wanted in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f"Requires-Dist: {one}; extra == '{extra}'" for one in wanted)]
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", readme])


def _sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _digest(content: bytes) -> str:
    """As RECORD has it: PEP 427."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
