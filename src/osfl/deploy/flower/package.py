"""The package that runs here, as a wheel for the other machines of a deployment: no index has to have it."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from osfl.core.errors import UsageError

PACKAGE = Path(__file__).parents[2]
METADATA = ("METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE")  # not what pip noted about this installation
_WITHOUT = "Name the package: `pip wheel --no-deps .` in the checkout makes it, --wheel FILE takes it."
_DATE = (2020, 1, 1, 0, 0, 0)  # the same files are the same wheel


def packed_here() -> tuple[str, bytes]:
    """The installed package as a wheel: name and content. Of an installation with `--editable` these are the files as they
    are now, with the metadata of its last `pip install`."""
    try:
        found = distribution("osfl")
    except PackageNotFoundError:
        raise UsageError("osfl is not installed here, so there is no package to copy", field="wheel", fix=_WITHOUT) from None
    info = f"osfl-{found.version}.dist-info"
    files = {f"osfl/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in _sources()}
    for name in METADATA:
        text = found.read_text(name)
        if text is None:
            raise UsageError(f"this installation of osfl lacks {name}", field="wheel", fix=_WITHOUT)
        files[f"{info}/{name}"] = text.encode()
    record = "".join(f"{name},{_digest(content)},{len(content)}\n" for name, content in sorted(files.items()))
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    return f"osfl-{found.version}-py3-none-any.whl", stream.getvalue()


def _sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _digest(content: bytes) -> str:
    """As RECORD has it: PEP 427."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
