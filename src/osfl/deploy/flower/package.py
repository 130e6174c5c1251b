"""The package that runs here, as a wheel for the other machines of a deployment: no index has to have it."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from functools import cache
from importlib.metadata import Distribution, distribution
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
METADATA = ("METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE")  # not what pip noted about this installation
_DATE = (2020, 1, 1, 0, 0, 0)  # the same files are the same wheel


def write_wheel(folder: Path) -> Path:
    """Write the installed package, also one installed with `--editable`, to osfl-VERSION-py3-none-any.whl."""
    found = distribution("osfl")
    path = folder / f"osfl-{found.version}-py3-none-any.whl"
    path.write_bytes(_packed(found.version))
    return path


@cache
def _packed(version: str) -> bytes:
    info = f"osfl-{version}.dist-info"
    files = {f"osfl/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in _sources()}
    files |= {f"{info}/{name}": _metadata(distribution("osfl"), name) for name in METADATA}
    record = "".join(f"{name},{_digest(content)},{len(content)}\n" for name, content in sorted(files.items()))
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def _sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _metadata(found: Distribution, name: str) -> bytes:
    content = found.read_text(name)
    assert content is not None, f"the installation of osfl lacks {name}"
    return content.encode()


def _digest(content: bytes) -> str:
    """As RECORD has it: PEP 427."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
