"""Where the files of a dataset may be: OSFL_DATA, the cache, a system package; and fetching what is nowhere."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO

from osfl.core.errors import DataError
from osfl.core.types import Progress
from osfl.data.catalog import File, Sheet
from osfl.data.source import Problem
from osfl.runtime.cache import cache_folder, data_root

SYSTEM = Path("/usr/share/datasets")  # Debian's dataset-* packages
CHUNK = 1 << 20
LARGEST_DOWNLOAD = 40 << 30
TIMEOUT = 30  # seconds without a byte


def data_folder() -> Path | None:
    """OSFL_DATA, or ../shared/data where that exists."""
    folder = data_root()
    return folder if folder.is_dir() else None


def bases() -> list[Path]:
    """Folders that are searched, in this order."""
    return [data_root(), cache_folder() / "datasets", SYSTEM]


def find_file(sheet: Sheet, name: str) -> Path | None:
    """The file where users and packages usually put it."""
    for base in bases():
        for folder in (base, base / sheet.name, *(base / f for f in sheet.folders)):
            if (folder / name).is_file():
                return folder / name
    return None


def find_folder(sheet: Sheet) -> Path | None:
    """The folder of images that a user unpacked, or zipped, under one of its usual names."""
    names = [f"{name}{suffix}" for name in sheet.folders for suffix in ("", ".zip")]
    return next((base / name for base in bases() for name in names if (base / name).exists()), None)


def obtain_folder(sheet: Sheet) -> Path:
    path = find_folder(sheet)
    if path is None:
        raise DataError(
            f"the images of dataset '{sheet.name}' are not on this machine, and they are not offered for download",
            field="dataset",
            fix=f"Download them from their publisher ({sheet.source}) into a folder '{sheet.folders[0]}', and set OSFL_DATA "
            f"to the folder that holds it. {sheet.notes} Searched: {', '.join(map(str, bases()))}. "
            f"For images of your own in a folder of that name, give ./{sheet.name}.",
        )
    return path


def obtain(sheet: Sheet, file: File, progress: Progress) -> tuple[Path, list[Problem]]:
    """The file from disk or from its publisher; a file on disk that is not the published one is used, and reported."""
    path = find_file(sheet, file.name)
    downloaded = cache_folder() / "datasets" / file.name
    # A package has hashes of its own, checked by its installer; a damaged download is fetched again.
    if path is not None and (path.is_relative_to(SYSTEM) or matches(file, path)):
        return path, []
    if path is not None and path != downloaded:
        return path, [Problem(file.name, "not the published file: its hash differs", "used all the same")]
    if not file.url:
        raise DataError(
            f"'{file.name}' of dataset '{sheet.name}' is not on this machine and is not offered for download",
            field="dataset",
            fix=f"Put it in a folder and set OSFL_DATA to it. Searched: {', '.join(map(str, bases()))}.",
        )
    return download(file, downloaded, progress), []


def hashes(path: Path) -> dict[str, str]:
    """md5 (what publishers print) and sha256 (what we record)."""
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK):
            md5.update(chunk)
            sha256.update(chunk)
    return {"md5": md5.hexdigest(), "sha256": sha256.hexdigest()}


def matches(file: File, path: Path) -> bool:
    found = hashes(path)
    return found["md5"] == file.md5 or found["sha256"] == file.sha256


def download(file: File, target: Path, progress: Progress) -> Path:
    """Fetch into a temporary file, check its hash, then give it its name: a half download never has the name."""
    if not (file.md5 or file.sha256):
        raise DataError(
            f"'{file.name}' has no published hash, so a download could not be checked",
            field="dataset",
            fix=f"Download {file.url} yourself, look at it, and put it in the folder that OSFL_DATA names.",
        )
    handle, part = _temporary(target)
    try:
        with os.fdopen(handle, "wb") as out:
            _fetch(file, out, progress)
        if not matches(file, part):
            raise DataError(
                f"the download of '{file.name}' is damaged or was changed",
                field="hash",
                expected=file.md5 or file.sha256,
                got=hashes(part)["md5" if file.md5 else "sha256"],
                fix="Nothing was kept. Run the command again.",
            )
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _temporary(target: Path) -> tuple[int, Path]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise DataError(
            f"'{target.parent}' cannot be written: {error}", field="cache", fix="Set OSFL_CACHE to a folder of yours."
        ) from None
    return handle, Path(name)


def _fetch(file: File, out: IO[bytes], progress: Progress) -> None:
    try:
        with urllib.request.urlopen(file.url, timeout=TIMEOUT) as response:
            total, done = int(response.headers.get("Content-Length") or 0), 0
            for chunk in _chunks(response):
                done += out.write(chunk)
                progress(f"download {file.name}", done, max(total, done))
                if done > LARGEST_DOWNLOAD:
                    raise OSError("it does not end")
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        raise DataError(
            f"'{file.name}' could not be downloaded: {getattr(error, 'reason', None) or error}",
            field="dataset",
            fix=f"Offline? Download {file.url} elsewhere and put it in the folder that OSFL_DATA names.",
        ) from None


def _chunks(response: IO[bytes]) -> Iterator[bytes]:
    while chunk := response.read(CHUNK):
        yield chunk
