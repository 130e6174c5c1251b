"""`osfl doctor`: check this machine; PASS or FAIL with a fix."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from osfl.cli import options
from osfl.cli.terminal import echo, escape, put_json

EXAMPLES = ("osfl doctor", "osfl doctor --out runs", "osfl doctor --format json")
STYLES = {"PASS": "green", "FAIL": "bold red", "NOTE": "yellow"}

Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", parser=options.new_folder, help="Where runs will be written.")]


@dataclass(frozen=True)
class Finding:
    """NOTE: something optional is absent; nothing fails for want of it."""

    name: str
    verdict: Literal["PASS", "FAIL", "NOTE"]
    found: str
    fix: str = ""


def doctor(out: Out = Path("runs"), output_format: options.Format = "text") -> None:
    """Check this machine: versions, memory, disk, data, and that equal seeds give equal bytes."""
    findings = []
    for finding in _findings(out):
        findings.append(finding)
        if output_format == "text":
            _show(finding)
    failed = [finding.name for finding in findings if finding.verdict == "FAIL"]
    if output_format == "json":
        put_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        echo(f"\n[bold red]{len(failed)} failed:[/] {', '.join(failed)}" if failed else "\n[green]Everything works.[/]")
    if failed:
        raise typer.Exit(1)


def _show(finding: Finding) -> None:
    style = STYLES[finding.verdict]
    echo(f"[{style}]{finding.verdict}[/]  {finding.name:<15} {escape(finding.found)}")
    if finding.fix and finding.verdict != "PASS":
        echo(f"      {'':<15} [dim]{escape(finding.fix)}[/]")


def _findings(out: Path) -> Iterator[Finding]:
    yield _python()
    yield _system()
    yield from _packages()
    yield _machine()
    yield _gpu()
    yield _data()
    yield _writable("cache", _cache(), "Set OSFL_CACHE to a folder that you may write.")
    yield _writable("runs", out, "Choose another --out.")
    yield _links(out)
    yield _folder_sync(out)
    yield _freed_memory()
    yield _disk(out)
    yield _chromium()
    yield _deterministic()


def _verdict(good: bool) -> Literal["PASS", "FAIL"]:
    return "PASS" if good else "FAIL"


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding(
        "python",
        _verdict(good),
        f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "Install Python 3.11 or newer and make a new environment.",
    )


def _system() -> Finding:
    """What the tests run on, and what is weaker elsewhere."""
    if sys.platform == "linux":
        return Finding("system", "PASS", "Linux")
    return Finding(
        "system",
        "NOTE",
        f"{platform.system()}: not tested; after a power cut acknowledged files may be missing, and training is slower",
        "Keep the coordinator's round on Linux.",
    )


def _packages() -> Iterator[Finding]:
    """What pyproject.toml asks for, against what is installed."""
    from importlib.metadata import PackageNotFoundError, requires, version

    for wanted in requires("osfl") or []:
        if "extra ==" in wanted:  # optional
            continue
        name = re.match(r"[\w.-]+", wanted)[0]  # type: ignore[index]  # "typer<1,>=0.20" as well as "torch>=2.6"
        bounds = dict(re.findall(r"(>=|<)\s*([\d.]+)", wanted))
        least, below = bounds.get(">=", "0"), bounds.get("<", "")
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, "FAIL", "not installed", f"pip install '{wanted}'")
            continue
        fits = _numbers(found) >= _numbers(least) and (not below or _numbers(found) < _numbers(below))
        range_of = f"at least {least}" + (f", below {below}" if below else "")
        yield Finding(name, _verdict(fits), f"{found} ({range_of})", f"pip install --upgrade '{wanted}'")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _machine() -> Finding:
    from osfl.runtime.workers import default_workers

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Finding(
        "machine",
        _verdict(memory >= 2),
        f"{default_workers()} cores, {memory:.1f} GB of memory",
        "Below 2 GB use --workers 1, fewer --samples and small images.",
    )


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("gpu", "PASS", f"{torch.cuda.get_device_name(0)}: use --device cuda")
    if torch.backends.mps.is_available():
        return Finding("gpu", "PASS", "Apple: use --device mps")
    return Finding("gpu", "NOTE", "none; the preset cpu is made for this", "The preset paper wants a GPU for most methods.")


def _data() -> Finding:
    from osfl.data.places import data_folder

    folder = data_folder()
    if folder is not None:
        return Finding("data", "PASS", f"{folder} with {sum(1 for path in folder.iterdir() if path.is_file())} files")
    wanted = os.environ.get("OSFL_DATA")
    fix = "Set OSFL_DATA to a folder with .npz or .zip files; digits needs none."
    if wanted:
        return Finding("data", "FAIL", f"OSFL_DATA is {wanted}, which is no folder", fix)
    return Finding("data", "NOTE", "OSFL_DATA is not set; the embedded digits are always there", fix)


def _cache() -> Path:
    from osfl.runtime.cache import cache_folder

    return cache_folder()


def _writable(name: str, folder: Path, fix: str) -> Finding:
    place = _nearest(folder)
    good = os.access(place, os.W_OK | os.X_OK)
    return Finding(name, _verdict(good), f"{folder} can {'' if good else 'not '}be written", fix)


def _nearest(folder: Path) -> Path:
    """The folder, or the closest one above it that exists: nothing is made only to be looked at."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def _links(out: Path) -> Finding:
    from osfl.runtime.atomic import supports_hard_links

    try:
        good = supports_hard_links(_nearest(out))
    except OSError as error:
        return Finding("hard links", "FAIL", f"{error.strerror}", "Choose another --out.")
    if good:
        return Finding("hard links", "PASS", "uploads are received exactly once, by the file system")
    return Finding("hard links", "NOTE", "none here; a lock file is used instead", "Any ordinary local disk has them.")


def _folder_sync(out: Path) -> Finding:
    from osfl.runtime.atomic import sync_folder

    try:
        good = sync_folder(_nearest(out))
    except OSError as error:
        return Finding("power cuts", "FAIL", f"{error.strerror}", "Choose another --out.")
    if good:
        return Finding("power cuts", "PASS", "what is acknowledged is on disk, with its name")
    what = "this system cannot sync a folder: a power cut within seconds may forget the name of an accepted upload"
    return Finding("power cuts", "NOTE", what, "Collect uploads on Linux or macOS, on a local disk.")


def _freed_memory() -> Finding:
    from osfl.runtime.workers import keep_freed_memory

    if keep_freed_memory():
        return Finding("freed memory", "PASS", "is kept for the next step of training")
    return Finding(
        "freed memory", "NOTE", "goes back to the system after each step: slower, with the same bits (no mallopt here)"
    )


def _disk(out: Path) -> Finding:
    free = shutil.disk_usage(_nearest(out)).free / 1e9
    return Finding("disk", _verdict(free >= 1), f"{free:.1f} GB free", "Free at least 1 GB, or choose another --out.")


def _chromium() -> Finding:
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if found:
        return Finding("chromium", "PASS", f"{found}: browser tests of the report can run")
    return Finding("chromium", "NOTE", "none; only a test of the report's looks needs it", "apt install chromium")


def _deterministic() -> Finding:
    """Train the same small network in two threads at once; equal seeds must give equal bytes."""
    from osfl.runtime.workers import Workers

    try:
        first, second = Workers(2).map(_trained, [0, 0])
    except Exception as error:  # whatever is broken here, the line below reports it
        return Finding("determinism", "FAIL", f"{type(error).__name__}: {error}", "Reinstall torch.")
    return Finding(
        "determinism",
        _verdict(first == second),
        f"two trainings {'equal' if first == second else 'differ'}",
        "Report your processor and torch version; results will not repeat bit for bit.",
    )


def _trained(seed: int) -> str:
    import torch

    from osfl.core.seeds import torch_generator
    from osfl.core.types import Dataset, Payload, Task
    from osfl.ingredients.training.local import Training, fit
    from osfl.models.build import build_model
    from osfl.models.naming import named
    from osfl.runtime.payloads import payload_digest

    task = Task("probe", ("a", "b"), (1, 8, 8))
    rng = torch_generator(seed, "doctor")
    images = torch.randint(0, 256, (64, 1, 8, 8), generator=rng, dtype=torch.uint8)
    model = build_model("cnn-w4", task, rng)
    fit(model, Dataset(images, torch.arange(64) % 2), Training("cnn-w4", epochs=2, batch_size=16), rng)
    return payload_digest(Payload(named(model, "model")))
