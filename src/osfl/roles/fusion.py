"""Fusion of plain checkpoints: checkpoints that no OSFL client made become the uploads of a round, and one model comes out.

    files ─► offers, accepted or refused ─► plan ─► inbox(gate) ─► server phase ─► model.safetensors, report, card

Whoever offers a model needs nothing of ours: any training, timm's or transformers' naming, one safetensors file. The plan
names all accepted weights by their digest, so the folder is the state as in any round: run the same command to continue.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from osfl.core.errors import RoundError, UsageError
from osfl.core.method import Method, quiet
from osfl.core.plan import check_plan
from osfl.core.registry import load, one_shot
from osfl.core.result import write_json
from osfl.core.settings import deviations, resolve_settings
from osfl.core.types import ClientId, Json, Payload, Plan, Progress, Release, Task
from osfl.models.architectures import parse
from osfl.models.common_start import cosines, groups_of_one_start
from osfl.models.companions import Pixels
from osfl.models.naming import ModelError, named
from osfl.models.plain_checkpoints import (
    ASSUMED,
    CONTRADICTED,
    Image,
    PlainCheckpoint,
    blank,
    check_fits,
    fitted,
    image_of,
    pixels_of,
    read_checkpoint,
    scale_name,
)
from osfl.reports.fusion import write_fusion_card, write_fusion_report
from osfl.rounds.folder import Round, check_server_key, contracts_of, open_round, simulated_key
from osfl.rounds.phases import computing, run_server_phase
from osfl.rounds.state import read_json
from osfl.runtime.environment import describe_environment
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import payload_digest, save_payload, to_raw
from osfl.runtime.workers import default_workers
from osfl.wire.bundle import pack
from osfl.wire.signing import SigningKey

SCHEMA = 1
_FUSES = "Choose a method that fuses models, such as fedmitr, ensemble or fedavg."
_ALREADY_TRAINED = (
    "the models came trained: how, from which weights and on how many images of each class is not known here; what is written "
    "of clients' training below has no effect; where class counts would weigh the models, they weigh alike",
)


@dataclass(frozen=True)
class FusionRequest:
    """What is asked for. The order of the files does not matter."""

    models: Sequence[Path]
    architecture: str
    classes: Sequence[str]  # in the order of the heads' rows
    method: str = "fedmitr"
    preset: str = "cpu"
    seed: int = 0
    changes: Mapping[str, Json] = field(default_factory=dict)
    image_size: int | None = None  # None: as the positional embeddings say
    channels: int | None = None
    pixels: str | None = None  # what the models were trained on; None: as given by the files beside them, else [-1, 1]

    def command(self, classes: str, out: str) -> str:
        """The command that repeats it."""
        parts = ["osfl", "fuse", *(str(path) for path in self.models), "--architecture", self.architecture]
        parts += ["--classes", classes, "--method", self.method, "--preset", self.preset, "--seed", str(self.seed)]
        parts += ["--pixels", self.pixels] if self.pixels else []
        for name, value in (("--image-size", self.image_size), ("--channels", self.channels)):
            parts += [name, str(value)] if value is not None else []
        return shlex.join([*parts, *(f"--set={key}={value}" for key, value in self.changes.items()), "--out", out])


@dataclass(frozen=True)
class AcceptedCheckpoint:
    client: ClientId  # its name in the round
    digest: str  # of its weights, whatever the file calls them
    checkpoint: PlainCheckpoint
    payload: Payload
    pixels: Pixels  # that it was trained on, folded into the payload
    pixels_by: str  # where that is known from
    family: int = 1  # models of one number have a start in common


@dataclass(frozen=True)
class RefusedCheckpoint:
    file: str
    reason: str
    tensor: str
    fix: str


def fuse(
    request: FusionRequest,
    out: Path,
    *,
    command: str = "",
    machine: Machine = Machine(),
    progress: Progress = quiet,
    key: SigningKey | None = None,
    examined: ExaminedCheckpoints | None = None,
) -> dict[str, Json]:
    """Make one model of those that are offered, in `out`, or continue; the contents of fusion.json. `examined`: the request's
    files, if somebody has looked at them already."""
    started = time.perf_counter()
    check_request(request)
    found = examined or examine_checkpoints(request)
    accepted, refused = found.accepted, found.refused
    plan = _plan(request, found.task, {one.client: one.digest for one in accepted})
    method = one_shot(plan)
    _check_fuses(method, accepted[0])
    key = key or simulated_key(plan.seed, "server")
    enrolled = {one.client: simulated_key(plan.seed, one.client).public_hex for one in accepted}
    with open_round(out, plan, contracts_of(method), enrolled, key) as fl_round:
        check_server_key(fl_round)
        finished = _finished(fl_round)
        if finished is not None:
            return _drawn(_with_refusals(finished, refused, command, out), out)
        accepted = _related(
            [one for one in accepted if one.client in fl_round.present]
        )  # without clients that `osfl forget` removed
        for one in accepted:
            if one.client not in fl_round.delivered():
                _hand_in(one, fl_round)
        with computing(plan, machine, progress, fl_round.scratch, show=fl_round.show) as ctx:
            if fl_round.release() is None:
                run_server_phase(method, fl_round, ctx)
        published = fl_round.release()
        assert published is not None
        models = _keep(fl_round, *published)
        record = {
            **_described(request, plan, method, accepted, refused),
            "models": models,
            "command": command,
            "release_digest": published[1],
            "costs": {"server": fl_round.journal().get(("server", ""), {}), "wall_seconds": time.perf_counter() - started},
            "environment": describe_environment(machine, machine.workers or default_workers()),
            "figures": fl_round.figures(),
        }
        write_json(out / "fusion.json", record)  # it marks the end
        fl_round.tidy()
    return _drawn(record, out)


def _drawn(record: dict[str, object], out: Path) -> dict[str, object]:
    """With its report and card, drawn again if they were lost."""
    if not (out / "report" / "index.html").exists():
        write_fusion_report(record, out / "report")
    if not (out / "model_card.md").exists():
        write_fusion_card(record, out)
    return record


# --- offers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExaminedCheckpoints:
    """What became of the files that were offered, and the task of those that were accepted."""

    task: Task
    accepted: Sequence[AcceptedCheckpoint]
    refused: Sequence[RefusedCheckpoint]
    cautions: Sequence[str] = ()  # nothing that stops anybody, but that whoever uses the result should know


def examine_checkpoints(request: FusionRequest) -> ExaminedCheckpoints:
    """Which files are models of this architecture for these classes, and why the others are not."""
    checkpoints: list[PlainCheckpoint] = []
    unread: list[RefusedCheckpoint] = []
    for path in sorted(set(request.models)):
        try:
            checkpoints.append(read_checkpoint(path))
        except ModelError as error:
            unread.append(_refusal(str(path), error))
    found = _chosen(request, checkpoints)
    refused = sorted([*unread, *found.refused], key=lambda one: one.file)
    if not found.accepted:
        why = "".join(f"\n  - {one.file}: {one.reason}. {one.fix}" for one in refused)
        raise RoundError(
            f"none of {len(refused)} files can be used{why}",
            field="models",
            fix=None if refused else "Name at least one file.",
        )
    accepted = _related(found.accepted)
    return replace(found, accepted=accepted, refused=refused, cautions=_cautions(request, accepted))


def _related(accepted: Sequence[AcceptedCheckpoint]) -> list[AcceptedCheckpoint]:
    """With the number of each model's family: models whose weights have a start in common."""
    numbers = groups_of_one_start(cosines([one.payload.tensors for one in accepted]))
    return [replace(one, family=number) for one, number in zip(accepted, numbers, strict=True)]


def _cautions(request: FusionRequest, accepted: Sequence[AcceptedCheckpoint]) -> list[str]:
    """What may well be wrong though every file fits, and the options that would correct it."""
    settings, found = resolve_settings(load(request.method), request.preset, request.changes), []
    kin = [[one for one in accepted if one.family == number] for number in sorted({one.family for one in accepted})]
    averaged, begins = request.method == "fedavg", getattr(settings, "init", "") == "average"
    if len(kin) > 1 and (averaged or begins):
        other = " or begin at one of them (--set init=client)" if begins else ""
        found.append(
            f"the weights are of {len(kin)} starts that have little in common ({'; '.join(map(_files, kin))}), and "
            f"{request.method} {'is' if averaged else 'begins at'} a mean of weights, which then knows next to "
            f"nothing. Use --method ensemble,{other} or offer models of one start"
        )
    foreign = [one for one in accepted if one.pixels_by == ASSUMED]
    if foreign and (usual := parse(request.architecture)[0].pixels):
        found.append(
            f"that pixels in [-1, 1] go into {_files(foreign)} is an assumption, and {request.architecture} is "
            f"published for others. Say --pixels {usual}, or --pixels symmetric if it is right"
        )
    against = [one for one in accepted if one.pixels_by == CONTRADICTED]
    if against:
        found.append(
            f"what lies beside {_files(against)} gives other pixels than --pixels {request.pixels}, which is what "
            "counts. Leave --pixels out if the files are right"
        )
    return found


def _files(some: Sequence[AcceptedCheckpoint]) -> str:
    return ", ".join(one.checkpoint.file for one in some)


def _chosen(request: FusionRequest, checkpoints: Sequence[PlainCheckpoint]) -> ExaminedCheckpoints:
    """The offers at the image size with which most can be used. How many would fit follows from shapes only; networks, which
    may be large, are asked for one size, and for the next one only if it can still win."""
    sizes = sorted(((_fitting(request, checkpoints, image), image) for image in _images(request, checkpoints)), reverse=True)
    best = _judged(request, checkpoints, sizes[0][1])
    for most in sizes[1:]:
        if most < _most(best):
            break
        best = max(best, _judged(request, checkpoints, most[1]), key=_most)
    return best


def _most(found: ExaminedCheckpoints) -> tuple[int, Image]:
    return len(found.accepted), found.task.image


def _fitting(request: FusionRequest, checkpoints: Sequence[PlainCheckpoint], image: Image) -> int:
    """How many offers have the names and shapes of a model for such images."""
    task, found = Task("fusion", tuple(request.classes), image), 0
    model = blank(request.architecture, task)
    for checkpoint in checkpoints:
        try:
            check_fits(checkpoint, model, request.architecture, task, pixels_of(checkpoint, request.pixels)[0])
            found += 1
        except ModelError:
            pass  # why is reported for the size that wins
    return found


def _judged(request: FusionRequest, checkpoints: Sequence[PlainCheckpoint], image: Image) -> ExaminedCheckpoints:
    """The offers that are models for images of this size, and the others. A model is named after its weights alone: neither
    its file's name nor what else is offered changes what is drawn for it."""
    task = Task("fusion", tuple(request.classes), image)
    accepted: list[AcceptedCheckpoint] = []
    refused: list[RefusedCheckpoint] = []
    for checkpoint in checkpoints:
        try:
            pixels, by = pixels_of(checkpoint, request.pixels)
            model = fitted(checkpoint, request.architecture, task, pixels)
        except ModelError as error:
            refused.append(_refusal(checkpoint.file, error))
            continue
        payload = Payload(named(model, "model"), {"architecture": request.architecture, "samples": 1})
        digest = payload_digest(payload)
        twin = next((one for one in accepted if digest == one.digest or checkpoint.sha256 == one.checkpoint.sha256), None)
        if twin is not None:  # also if other files beside it made other weights of it
            refused.append(
                RefusedCheckpoint(
                    checkpoint.file,
                    f"it holds the same weights as {twin.checkpoint.file}",
                    "",
                    "Offer a model once: twice, it would count double.",
                )
            )
            continue
        about = replace(checkpoint, tensors={})  # the payload has them: large models need not be held twice
        accepted.append(AcceptedCheckpoint(f"model-{digest[:12]}", digest, about, payload, pixels, by))
    return ExaminedCheckpoints(task, sorted(accepted, key=lambda one: one.client), refused)


def _refusal(file: str, error: ModelError) -> RefusedCheckpoint:
    got = f", got {_cut(str(error.got))}" if error.got is not None else ""
    expected = f" (expected {error.expected}{got})" if error.expected is not None else ""
    tensor = (error.field or "").removeprefix(f"{file}/")
    reason = re.sub(r"[^\s/]{256,}", lambda part: _cut(part[0]), error.reason)  # no part of a path is so long
    declared = (file, reason + expected, "" if tensor == Path(file).name else tensor, error.fix or "")
    return RefusedCheckpoint(
        *("".join(char if char.isprintable() else "?" for char in text) for text in declared)
    )  # names are the file's


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:60]}…"


def _images(request: FusionRequest, checkpoints: Sequence[PlainCheckpoint]) -> set[Image]:
    """The images that offers were trained for, of the size that was asked for if any; the one with which most can be used is
    taken, and the others are then refused by name."""
    declared = {image for checkpoint in checkpoints if (image := image_of(checkpoint, request.architecture)) is not None}
    patch = parse(request.architecture)[1].get("p")
    if checkpoints and not declared and not patch and not request.image_size:
        raise UsageError(
            f"no offered file shows which images {request.architecture} was trained for",
            field="image_size",
            fix="Add --image-size PX (and --channels 1 for gray images).",
        )
    # a transformer without this information fits no size: with any, it is refused by name
    declared = declared or {(3, 16 * (patch or 14), 0)}
    sides = {(channels, request.image_size or side) for channels, side, _ in declared}
    return {(request.channels or channels, side, side) for channels, side in sides}


# --- the round ----------------------------------------------------------------------------------------------------------


def check_request(request: FusionRequest) -> None:
    """Refuse what no file could make right, before any is read: method, settings, classes. Where only files know the size of
    images, two are tried: what is wrong with both of them alike has nothing to do with it."""
    patch = parse(request.architecture)[1].get("p", 4)
    sides = [request.image_size] if request.image_size else [16 * patch, 32 * patch]
    models = {f"model-{number}": "" for number in range(max(1, len(set(request.models))))}  # as many as there can be
    wrong = []
    for side in sides:
        try:
            plan = _plan(request, Task("fusion", tuple(request.classes), (request.channels or 3, side, side)), models)
            _check_not_relayed(request.method, one_shot(plan))
            return
        except UsageError as error:
            wrong.append(error)
    alike = [problem for problem in wrong[0].problems if problem in wrong[-1].problems]
    if alike:
        raise UsageError(alike, field=wrong[0].field, fix=wrong[0].fix)


def _plan(request: FusionRequest, task: Task, models: Mapping[ClientId, str]) -> Plan:
    """The agreement that nobody else signs: it names all weights by their digest, so that another model is another round."""
    method = load(request.method)
    if "architecture" in request.changes:
        raise UsageError(
            "the architecture of offered models is no setting",
            field="architecture",
            fix=f"Say --architecture {request.changes['architecture']} instead of --set.",
        )
    if "architecture" not in method.Settings.__dataclass_fields__:
        raise UsageError(f"clients of {request.method} do not upload a model of an architecture", field="method", fix=_FUSES)
    settings = resolve_settings(method, request.preset, {**request.changes, "architecture": request.architecture})
    # pixels: as given; what a file's own became is in its digest
    data = {"dataset": "none", "models": dict(models), "pixels": request.pixels or "symmetric"}
    plan = Plan(task, request.method, settings, tuple(models), seed=request.seed, data=data)
    check_plan(plan)
    return plan


def _check_not_relayed(name: str, method: Method) -> None:
    """Its server must make something of the models."""
    if method.provides("relay"):
        raise UsageError(f"the server of {name} passes models on and fuses nothing", field="method", fix=_FUSES)


def _check_fuses(method: Method, one: AcceptedCheckpoint) -> None:
    """The method must expect exactly a model from each client, and nothing else."""
    architecture = str(one.payload.facts["architecture"])
    promised = method.contract(architecture)
    if set(promised) != set(one.payload.tensors):
        raise UsageError(
            f"clients of this method upload {', '.join(sorted(promised)[:3]) or 'nothing'}, not a model",
            field="method",
            fix=_FUSES,
        )


def _hand_in(one: AcceptedCheckpoint, fl_round: Round) -> None:
    """Through the same gate as any upload. The key is the fusion's own: what vouches for a model is its digest in the plan."""
    key = simulated_key(fl_round.plan.seed, one.client)
    raw, facts = to_raw(one.payload.tensors), dict(one.payload.facts)
    fl_round.inbox.receive(pack("upload", one.client, fl_round.plan.digest, raw, facts, key))


def _keep(fl_round: Round, release: Release, digest: str) -> dict[ClientId, str]:
    """The model where `osfl predict --run` looks for it; several, by client, where a method gives each its own."""
    if not release.personal:
        save_payload(fl_round.folder / "model.safetensors", release.shared)
        return {"": "model.safetensors"}
    for client in release.personal:
        fl_round.keep_model(client, release.for_client(client), digest)
    return {client: f"models/{client}.safetensors" for client in sorted(release.personal)}


def _finished(fl_round: Round) -> dict[str, Json] | None:
    """The record, if this very release was described already."""
    path, release = fl_round.folder / "fusion.json", fl_round.release()
    record = read_json(path) if path.exists() else None
    return record if record is not None and release is not None and record.get("release_digest") == release[1] else None


def _with_refusals(
    record: dict[str, object], refused: Sequence[RefusedCheckpoint], command: str, out: Path
) -> dict[str, object]:
    """The record, with the files that are refused now: they are no part of the round, and other ones may be offered."""
    listed = _listed(refused)
    if record["refused"] == listed:
        return record
    record = {**record, "refused": listed, "command": command}
    for page in ("report/index.html", "model_card.md"):
        (out / page).unlink(missing_ok=True)  # they are drawn again
    write_json(out / "fusion.json", record)
    return record


def _listed(refused: Sequence[RefusedCheckpoint]) -> list[Json]:
    return [{"file": one.file, "tensor": one.tensor, "reason": one.reason, "fix": one.fix} for one in refused]


def _described(
    request: FusionRequest,
    plan: Plan,
    method: Method,
    accepted: Sequence[AcceptedCheckpoint],
    refused: Sequence[RefusedCheckpoint],
) -> dict[str, Json]:
    described = plan.as_json()
    trained: set[str] = method.only_for_clients()
    if getattr(plan.settings, "init", "") == "pretrained":  # then the server begins where clients would
        trained = {name for name in trained if not name.startswith("pretrained")}
    kept = {name: value for name, value in described["settings"].items() if name not in trained}
    return {
        "schema": SCHEMA,
        "method": plan.method,
        "preset": request.preset,
        "seed": plan.seed,
        "plan_digest": plan.digest,
        "task": described["task"],
        "architecture": request.architecture,
        "accepted": [
            {
                "client": one.client,
                "file": one.checkpoint.file,
                "sha256": one.checkpoint.sha256,
                "bytes": one.checkpoint.size,
                "naming": one.checkpoint.naming,
                "parameters": one.checkpoint.parameters,
                "head": list(one.checkpoint.head),
                "unused": list(one.checkpoint.unused),
                "pixels": scale_name(one.pixels),
                "pixels_by": one.pixels_by,
                "family": one.family,
            }
            for one in accepted
        ],
        "cautions": _cautions(request, accepted),
        "refused": _listed(refused),
        "settings": kept,
        "deviations": [*_ALREADY_TRAINED, *deviations(method, plan.settings, trained)],
    }
