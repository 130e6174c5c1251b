"""`osfl cache`: what is kept of images on this machine, and how to delete it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from osfl.cli import options
from osfl.cli.terminal import echo, escape, put_json

EXAMPLES = ("osfl cache", "osfl cache --format json", "osfl cache --verify", "osfl cache --clear")
WHAT = {
    "decoded": "images of folders, zips and tables, decoded and resized",
    "features": "features of images that frozen encoders made",
    "datasets": "downloads, checked by their hash",
}

Clear = Annotated[bool, typer.Option("--clear", help="Delete what was made of images; the images themselves are elsewhere.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Read all kept files of many images, and delete those that are not what was written.")
]
Downloads = Annotated[bool, typer.Option("--downloads", help="With --clear: delete downloaded datasets, too.")]


def cache(
    clear: Clear = False, downloads: Downloads = False, verify: Verify = False, output_format: options.Format = "text"
) -> None:
    """Show what the cache holds, where, and its limit; --clear empties it, --verify reads what a start takes on trust.

    Decoded images are as confidential as the files they come from. OSFL_CACHE_LIMIT sets the limit in GB (0: nothing is kept),
    OSFL_CACHE the place; `--no-cache` of a verb keeps nothing for once.
    """
    from osfl.core.errors import UsageError
    from osfl.runtime.cache import FROM_IMAGES, cache_folder, cache_limit, contents
    from osfl.runtime.cache import clear as delete

    if downloads and not clear:
        raise UsageError(
            "--downloads selects what --clear deletes, and --clear is missing", field="downloads", fix="Add --clear."
        )
    limit = cache_limit()
    verified = _verified() if verify else {}
    before = contents()
    if clear:
        delete(downloads)
    now = contents()
    freed = sum(size for _, size in before.values()) - sum(size for _, size in now.values())
    if output_format == "json":
        rows = {name: {"files": files, "bytes": size} for name, (files, size) in now.items()}
        put_json({"folder": str(cache_folder()), "limit_bytes": limit, "contents": rows, "deleted_bytes": freed, **verified})
        _stop_if_changed(verified)
        return
    echo(f"Cache  {escape(str(cache_folder()))}")
    for name, (files, size) in now.items():
        echo(f"  {name}: {files:,} files, {size / 1e6:,.1f} MB [dim]({WHAT[name]})[/]")
    kept = sum(now[name][1] for name in FROM_IMAGES)
    echo(f"Of images {kept / 1e6:,.1f} MB are kept, at most {limit / 1e9:,.1f} GB; what was used longest ago goes first.")
    if clear:
        echo(f"Deleted {freed / 1e6:,.1f} MB.")
    if verify:
        found = verified["verified"]
        changed = ", ".join(found["changed"]) or "none"
        echo(f"Read {found['files']:,} kept files of images; not what was written, and deleted: {escape(changed)}.")
    _stop_if_changed(verified)


def _verified() -> dict[str, Any]:
    from osfl.data.kept import verify

    files, changed = verify()
    return {"verified": {"files": files, "changed": [path.name for path in changed]}}


def _stop_if_changed(verified: dict[str, Any]) -> None:
    if verified and verified["verified"]["changed"]:
        raise typer.Exit(1)
