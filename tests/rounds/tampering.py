"""Random tampering with a finished round folder: edits, truncations, swaps, deletions, older copies, strangers' files.

What is noticed ends `osfl verify --round FOLDER --head COPY` with exit code 1. What is not must be harmless: release, personal
parts, certificates, uploads, agreed files and the signed part of the logs say what they said.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from osfl.cli.main import answer
from osfl.core.errors import Rejected
from osfl.core.types import canonical, digest_of
from osfl.roles import coordinator, site
from osfl.rounds.folder import TOTAL
from osfl.rounds.forgetting import forget
from osfl.wire.envelope import read_envelope
from osfl.wire.gate import RELEASE_LIMITS
from osfl.wire.refusals import HEAD
from osfl.wire.source import opened as opened_file
from tests.roles.test_late import make_plan
from tests.roles.test_roles import ONE, keys, make_sites, opened

FIXED_FILES = ("plan.json", "contract.json", "enrolled.json")
Change = Callable[["Played"], str]


class Played:
    """A copy of the folder that one tampering works on, and the states that the folder was in before."""

    def __init__(self, folder: Path, older: Sequence[Path], draw: random.Random) -> None:
        self.folder, self.older, self.draw = folder, older, draw

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def pick(self) -> Path:
        """Small files as often as large ones, and what is signed more often than pages."""
        found = self.files()
        signed = [path for path in found if path.relative_to(self.folder).parts[0] not in ("report", "models", "figures")]
        return self.draw.choice(signed if self.draw.random() < 0.8 else found)


def edit(played: Played) -> str:
    path = played.pick()
    data = bytearray(path.read_bytes() or b"x")
    for _ in range(played.draw.choice((1, 1, 4))):
        place = played.draw.randrange(len(data))
        data[place] ^= 1 << played.draw.randrange(8)
    path.write_bytes(bytes(data))
    return path.name


def edit_number(played: Played) -> str:
    """One digit of a readable file becomes another: JSON stays JSON."""
    readable = [path for path in played.files() if path.suffix in (".json", ".jsonl")]
    path = played.draw.choice(readable)
    data = bytearray(path.read_bytes())
    digits = [place for place, byte in enumerate(data) if chr(byte) in "0123456789"]
    if digits:
        place = played.draw.choice(digits)
        data[place] = ord("0") + (data[place] - ord("0") + played.draw.randrange(1, 10)) % 10
    path.write_bytes(bytes(data))
    return path.name


def truncate(played: Played) -> str:
    path = played.pick()
    data = path.read_bytes()
    path.write_bytes(data[: played.draw.randrange(len(data)) if data else 0])
    return path.name


def drop_line(played: Played) -> str:
    logs = [path for path in played.files() if path.suffix == ".jsonl" and path.read_bytes()]
    path = played.draw.choice(logs)
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[played.draw.randrange(len(lines))]
    path.write_bytes(b"".join(lines))
    return path.name


def swap(played: Played) -> str:
    """Two files of one kind change places."""
    first = played.pick()
    alike = [path for path in played.files() if path.suffix == first.suffix and path != first]
    if not alike:
        return edit(played)
    second = played.draw.choice(alike)
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    return f"{first.name} and {second.name}"


def delete(played: Played) -> str:
    path = played.pick()
    path.unlink()
    return path.name


def delete_folder(played: Played) -> str:
    inside = sorted(path for path in played.folder.iterdir() if path.is_dir())
    path = played.draw.choice(inside)
    shutil.rmtree(path)
    return f"{path.name}/"


def older_copy(played: Played) -> str:
    """A file as it was in an earlier state, or one that was gone since."""
    state = played.draw.choice(played.older)
    source = played.draw.choice(sorted(path for path in state.rglob("*") if path.is_file()))
    where = played.folder / source.relative_to(state)
    where.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, where)
    return str(source.relative_to(state))


def older_set(played: Played) -> str:
    """Several files of one earlier state together, as a careful hand would choose them."""
    state = played.draw.choice(played.older)
    names = [HEAD, "release.safetensors", "personal", "forgotten", TOTAL, "journal.jsonl", "inbox"]
    chosen = [name for name in names if played.draw.random() < 0.6]
    for name in chosen:
        source, where = state / name, played.folder / name
        shutil.rmtree(where, ignore_errors=True) if where.is_dir() else where.unlink(missing_ok=True)
        if source.is_dir():
            shutil.copytree(source, where)
        elif source.exists():
            shutil.copyfile(source, where)
    return " ".join(chosen)


def older_folder(played: Played) -> str:
    state = played.draw.choice(played.older)
    shutil.rmtree(played.folder)
    shutil.copytree(state, played.folder)
    return state.name


def unknown_file(played: Played) -> str:
    """A file of another name, or one file under another file's name in a folder."""
    source, inside = played.pick(), [played.folder, *(path for path in played.folder.iterdir() if path.is_dir())]
    where = played.draw.choice(inside) / f"zz-{played.draw.randrange(99)}{source.suffix}"
    shutil.copyfile(source, where)
    return f"{source.name} as {where.parent.name}/{where.name}"


WAYS: Mapping[str, Change] = {
    change.__name__: change
    for change in (edit, edit_number, truncate, drop_line, swap, delete, delete_folder, older_copy, older_set, older_folder)
} | {"stranger": unknown_file}


def campaign(folder: Path, older: Sequence[Path], head: Path, times: int, seed: int, work: Path) -> dict[str, Any]:
    """So many tamperings of copies of the folder; what was noticed, what was harmless, and what was neither."""
    draw, counts, missed = random.Random(seed), {name: Counter[str]() for name in WAYS}, []
    meant = meaning(folder)
    for number in range(times):
        name = list(WAYS)[number % len(WAYS)]
        copy = Path(shutil.copytree(folder, work / str(number)))
        what = WAYS[name](Played(copy, older, draw))
        verdict = judged(copy, head, meant)
        counts[name][verdict] += 1
        if verdict == "missed":
            missed.append(f"{name} {what}")
        shutil.rmtree(copy)
    return {"tamperings": times, "by_kind": {name: dict(found) for name, found in counts.items()}, "missed": missed}


def judged(copy: Path, head: Path, meant: Mapping[str, Any]) -> str:
    if answer(["verify", "--round", str(copy), "--head", str(head), "--format", "json"]) != 0:
        return "noticed"
    return "harmless" if meaning(copy) == meant else "missed"


def meaning(folder: Path) -> dict[str, Any]:
    """All that a finished round says, whatever the spelling."""
    # the total is no part of it: without one, or with a damaged one, the next server phase adds all uploads up again
    bundles = [folder / "release.safetensors"]
    bundles += [path for name in ("inbox", "personal") for path in (folder / name).glob("*.safetensors")]
    read = {str(path.relative_to(folder)): _manifest(path) for path in bundles if path.exists() and path.stem[:3] != "zz-"}
    fixed = {name: json.loads((folder / name).read_bytes()) for name in FIXED_FILES}
    signed = sorted(path for path in (folder / "forgotten").glob("*.json") if path.stem[:3] != "zz-")
    certificates = [canonical(json.loads(path.read_bytes())["certificate"]) for path in signed]
    logs = json.loads((folder / HEAD).read_bytes())["head"]["logs"]
    lines = {name: (folder / name).read_bytes()[: log["bytes"]] for name, log in logs.items() if log["bytes"]}
    return {"bundles": read, "fixed files": fixed, "certificates": certificates, "logs": lines}


def _manifest(path: Path) -> str:
    """The content that its signer signed; the data are checked against it by `verify`."""
    with opened_file(path) as file:
        return digest_of(read_envelope(file, RELEASE_LIMITS).manifest)


def finished(work: Path) -> tuple[Path, list[Path], Path]:
    """A round with refusals, a release, a site that joined late and one that was forgotten; the states before, oldest first,
    and a copy of its head, as somebody keeps it elsewhere."""
    plan, known, older = make_plan(), keys(), list[Path]()
    sites = make_sites(work / "sites", images=20)
    made = {c: site.make_upload(plan, c, sites / c, known[c], work / c, machine=ONE) for c in plan.clients}
    fl_round = opened(work / "round", plan, known)
    damaged = work / "damaged"
    damaged.write_bytes(made["north"].read_bytes()[:-1] + b"?")
    with suppress(Rejected):
        coordinator.receive(fl_round, damaged)
    for clients in (("south", "west"), ("north",)):
        older.append(Path(shutil.copytree(fl_round, work / f"state-{len(older)}")))
        for client in clients:
            coordinator.receive(fl_round, made[client])
        older.append(Path(shutil.copytree(fl_round, work / f"state-{len(older)}")))
        coordinator.make_release(fl_round, known["server"], machine=ONE)
    older.append(Path(shutil.copytree(fl_round, work / f"state-{len(older)}")))
    forget(fl_round, known["server"], clients=["west"], machine=ONE)
    return fl_round, older, Path(shutil.copyfile(fl_round / HEAD, work / "kept-head.json"))
