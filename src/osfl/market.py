"""A market of models: checkpoints that no OSFL client made become the uploads of a round, and one model comes out.

    files ─► offers, accepted or refused ─► plan ─► inbox(gate) ─► server phase ─► model.safetensors, report, card

Whoever offers a model needs nothing of ours: any training, timm's or transformers' naming, one safetensors file. The plan
names all accepted weights by their digest, so the folder is the state as in any round: killed, the same words continue.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from osfl.environment import describe_environment
from osfl.errors import RoundError, UsageError
from osfl.models.architectures import parse
from osfl.models.companions import Pixels
from osfl.models.kinship import cosines, families
from osfl.models.naming import ModelError, named
from osfl.models.offers import (
    ASSUMED,
    CONTRADICTED,
    Image,
    Offer,
    blank,
    check_fits,
    fitted,
    image_of,
    pixels_of,
    read_offer,
    scale_name,
)
from osfl.phases import Machine, computing, serve
from osfl.plan import check_plan, deviations, resolve_settings
from osfl.protocol import ClientId, Json, Payload, Plan, Progress, Relaying, Release, Task, quiet
from osfl.registry import load, one_shot
from osfl.reports.market import write_market_card, write_market_report
from osfl.result import write_json
from osfl.round import Round, check_server_key, contracts_of, open_round, simulated_key
from osfl.storage import payload_digest, save_payload, to_raw
from osfl.transports.memory import deliver
from osfl.wire.agreed import read_json
from osfl.wire.bundle import pack
from osfl.wire.signing import SigningKey
from osfl.workers import default_workers

SCHEMA = 1
_FUSES = "Choose a method that fuses models, such as fedmitr, ensemble or fedavg."
_ALREADY_TRAINED = (
    "the models came trained: how, from which weights and on how many images of each class is not known here, and what is said "
    "of clients' training below has no effect; where class counts would weigh the models, they weigh alike",
)


@dataclass(frozen=True)
class Market:
    """What is asked for. The order of the files does not matter."""

    models: Sequence[Path]
    architecture: str
    classes: Sequence[str]  # in the order of the heads' rows
    method: str = "fedmitr"
    preset: str = "cpu"
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    image_size: int | None = None  # None: as the positional embeddings say
    channels: int | None = None
    pixels: str | None = None  # what the models were trained on; None: as the files beside them tell, else [-1, 1]

    def command(self, classes: str, out: str) -> str:
        """The words that repeat it."""
        words = ["osfl", "server", "--models", *(str(path) for path in self.models), "--architecture", self.architecture]
        words += ["--classes", classes, "--method", self.method, "--preset", self.preset, "--seed", str(self.seed)]
        words += ["--pixels", self.pixels] if self.pixels else []
        for name, value in (("--image-size", self.image_size), ("--channels", self.channels)):
            words += [name, str(value)] if value is not None else []
        return shlex.join([*words, *(f"--set={key}={value}" for key, value in self.changes.items()), "--out", out])


@dataclass(frozen=True)
class Accepted:
    client: ClientId  # its name in the round
    digest: str  # of its weights, whatever the file calls them
    offer: Offer
    payload: Payload
    pixels: Pixels  # that it was trained on, folded into the payload
    pixels_by: str  # who says so
    family: int = 1  # models of one number have a start in common


@dataclass(frozen=True)
class Refused:
    file: str
    reason: str
    tensor: str
    fix: str


def fuse(
    market: Market, out: Path, *, command: str = "", machine: Machine = Machine(), progress: Progress = quiet,
    key: SigningKey | None = None, examined: Examined | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Make one model of those that are offered, in `out`, or continue; what market.json says then. `examined`: the market's
    files, if somebody has looked at them already."""
    started = time.perf_counter()
    check_words(market)
    found = examined or examine(market)
    accepted, refused = found.accepted, found.refused
    plan = _plan(market, found.task, {one.client: one.digest for one in accepted})
    method = one_shot(plan)
    _check_fuses(method, accepted[0])
    key = key or simulated_key(plan.seed, "server")
    enrolled = {one.client: simulated_key(plan.seed, one.client).public_hex for one in accepted}
    with open_round(out, plan, contracts_of(method), enrolled, key) as round:
        check_server_key(round)
        finished = _finished(round)
        if finished is not None:
            return _drawn(_with_refusals(finished, refused, command, out), out)
        accepted = _related([one for one in accepted if one.client in round.present])  # `osfl forget` has the last word
        for one in accepted:
            if one.client not in round.delivered():
                _hand_in(one, round)
        with computing(plan, machine, progress, round.scratch, show=round.show) as ctx:
            if round.release() is None:
                serve(method, round, ctx)
        published = round.release()
        assert published is not None
        models = _keep(round, *published)
        said = {**_described(market, plan, method, accepted, refused), "models": models,
                "command": command, "release_digest": published[1],
                "costs": {"server": round.journal().get(("server", ""), {}), "wall_seconds": time.perf_counter() - started},
                "environment": describe_environment(machine.device, machine.workers or default_workers()),
                "figures": round.figures()}  # fmt: skip
        write_json(out / "market.json", said)  # it marks the end
        round.tidy()
    return _drawn(said, out)


def _drawn(said: dict[str, Any], out: Path) -> dict[str, Any]:
    """With its report and card, drawn again if they were lost."""
    if not (out / "report" / "index.html").exists():
        write_market_report(said, out / "report")
    if not (out / "model_card.md").exists():
        write_market_card(said, out)
    return said


# --- offers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Examined:
    """What became of the files that were offered, and the task of those that were accepted."""

    task: Task
    accepted: Sequence[Accepted]
    refused: Sequence[Refused]
    cautions: Sequence[str] = ()  # nothing that stops anybody, but that whoever uses the result should know


def examine(market: Market) -> Examined:
    """Which files are models of this architecture for these classes, and why the others are not."""
    offers: list[Offer] = []
    unread: list[Refused] = []
    for path in sorted(set(market.models)):
        try:
            offers.append(read_offer(path))
        except ModelError as error:
            unread.append(_refusal(str(path), error))
    found = _chosen(market, offers)
    refused = sorted([*unread, *found.refused], key=lambda one: one.file)
    if not found.accepted:
        why = "".join(f"\n  - {one.file}: {one.reason}. {one.fix}" for one in refused)
        raise RoundError(f"none of {len(refused)} files can be used{why}", field="models",
                         fix="" if refused else "Name at least one file after --models.")  # fmt: skip
    accepted = _related(found.accepted)
    return replace(found, accepted=accepted, refused=refused, cautions=_cautions(market, accepted))


def _related(accepted: Sequence[Accepted]) -> list[Accepted]:
    """With the number of each model's family: models whose weights have a start in common."""
    numbers = families(cosines([one.payload.tensors for one in accepted]))
    return [replace(one, family=number) for one, number in zip(accepted, numbers, strict=True)]


def _cautions(market: Market, accepted: Sequence[Accepted]) -> list[str]:
    """What may well be wrong though every file fits, and the words that would set it right."""
    settings, found = resolve_settings(load(market.method), market.preset, market.changes), []
    kin = [[one for one in accepted if one.family == number] for number in sorted({one.family for one in accepted})]
    averaged, begins = market.method == "fedavg", getattr(settings, "init", "") == "average"
    if len(kin) > 1 and (averaged or begins):
        other = " or begin at one of them (--set init=client)" if begins else ""
        found.append(f"the weights are of {len(kin)} starts that have little in common ({'; '.join(map(_files, kin))}), and "
                     f"{market.method} {'is' if averaged else 'begins at'} a mean of weights, which then knows next to "
                     f"nothing. Use --method ensemble,{other} or offer models of one start")  # fmt: skip
    foreign = [one for one in accepted if one.pixels_by == ASSUMED]
    if foreign and (usual := parse(market.architecture)[0].pixels):
        found.append(f"that pixels in [-1, 1] go into {_files(foreign)} is an assumption, and {market.architecture} is "
                     f"published for others. Say --pixels {usual}, or --pixels symmetric if it is right")  # fmt: skip
    against = [one for one in accepted if one.pixels_by == CONTRADICTED]
    if against:
        found.append(f"what lies beside {_files(against)} tells of other pixels than --pixels {market.pixels}, which is what "
                     "counts. Leave --pixels out if the files are right")  # fmt: skip
    return found


def _files(some: Sequence[Accepted]) -> str:
    return ", ".join(one.offer.file for one in some)


def _chosen(market: Market, offers: Sequence[Offer]) -> Examined:
    """The offers at the image size with which most can be used. How many would fit is told by shapes alone; networks, which
    may be large, are asked for one size, and for the next one only if it can still win."""
    sizes = sorted(((_fitting(market, offers, image), image) for image in _images(market, offers)), reverse=True)
    best = _judged(market, offers, sizes[0][1])
    for most in sizes[1:]:
        if most < _most(best):
            break
        best = max(best, _judged(market, offers, most[1]), key=_most)
    return best


def _most(found: Examined) -> tuple[int, Image]:
    return len(found.accepted), found.task.image


def _fitting(market: Market, offers: Sequence[Offer], image: Image) -> int:
    """How many offers have the names and shapes of a model for such images."""
    task, found = Task("market", tuple(market.classes), image), 0
    model = blank(market.architecture, task)
    for offer in offers:
        try:
            check_fits(offer, model, market.architecture, task, pixels_of(offer, market.pixels)[0])
            found += 1
        except ModelError:
            pass  # why is told for the size that wins
    return found


def _judged(market: Market, offers: Sequence[Offer], image: Image) -> Examined:
    """The offers that are models for images of this size, and the others. A model is named after its weights alone: neither
    its file's name nor what else is offered changes what is drawn for it."""
    task = Task("market", tuple(market.classes), image)
    accepted: list[Accepted] = []
    refused: list[Refused] = []
    for offer in offers:
        try:
            pixels, by = pixels_of(offer, market.pixels)
            model = fitted(offer, market.architecture, task, pixels)
        except ModelError as error:
            refused.append(_refusal(offer.file, error))
            continue
        payload = Payload(named(model, "model"), {"architecture": market.architecture, "samples": 1})
        digest = payload_digest(payload)
        twin = next((one for one in accepted if digest == one.digest or offer.sha256 == one.offer.sha256), None)
        if twin is not None:  # also if other files beside it made other weights of it
            refused.append(Refused(offer.file, f"it holds the same weights as {twin.offer.file}", "",
                                   "Offer a model once: twice, it would count double."))  # fmt: skip
            continue
        about = replace(offer, tensors={})  # the payload has them: large models need not be held twice
        accepted.append(Accepted(f"model-{digest[:12]}", digest, about, payload, pixels, by))
    return Examined(task, sorted(accepted, key=lambda one: one.client), refused)


def _refusal(file: str, error: ModelError) -> Refused:
    got = f", got {_cut(str(error.got))}" if error.got is not None else ""
    expected = f" (expected {error.expected}{got})" if error.expected is not None else ""
    tensor = (error.field or "").removeprefix(f"{file}/")
    reason = re.sub(r"[^\s/]{256,}", lambda word: _cut(word[0]), error.reason)  # no part of a path is so long
    told = (file, reason + expected, "" if tensor == Path(file).name else tensor, error.fix or "")
    return Refused(*("".join(char if char.isprintable() else "?" for char in text) for text in told))  # names are the file's


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:60]}…"


def _images(market: Market, offers: Sequence[Offer]) -> set[Image]:
    """The images that offers were trained for, of the size that was asked for if any; the one with which most can be used is
    taken, and the others are then refused by name."""
    told = {image for offer in offers if (image := image_of(offer, market.architecture)) is not None}
    patch = parse(market.architecture)[1].get("p")
    if offers and not told and not patch and not market.image_size:
        raise UsageError(f"no offered file tells which images {market.architecture} was trained for", field="image_size",
                         fix="Add --image-size PX (and --channels 1 for gray images).")  # fmt: skip
    # a transformer that does not tell fits no size: with any, it is refused by name
    told = told or {(3, 16 * (patch or 14), 0)}
    sides = {(channels, market.image_size or side) for channels, side, _ in told}
    return {(market.channels or channels, side, side) for channels, side in sides}


# --- the round ----------------------------------------------------------------------------------------------------------


def check_words(market: Market) -> None:
    """Refuse what no file could make right, before any is read: method, settings, classes. Where only files know the size of
    images, two are tried: what is wrong with both of them alike has nothing to do with it."""
    patch = parse(market.architecture)[1].get("p", 4)
    sides = [market.image_size] if market.image_size else [16 * patch, 32 * patch]
    models = {f"model-{number}": "" for number in range(max(1, len(set(market.models))))}  # as many as there can be
    wrong = []
    for side in sides:
        try:
            plan = _plan(market, Task("market", tuple(market.classes), (market.channels or 3, side, side)), models)
            _check_serves(market.method, one_shot(plan))
            return
        except UsageError as error:
            wrong.append(error)
    alike = [problem for problem in wrong[0].problems if problem in wrong[-1].problems]
    if alike:
        raise UsageError(alike, field=wrong[0].field, fix=wrong[0].fix)


def _plan(market: Market, task: Task, models: Mapping[ClientId, str]) -> Plan:
    """The agreement that nobody else signs: it names all weights by their digest, so that another model is another round."""
    method = load(market.method)
    if "architecture" in market.changes:
        raise UsageError("the architecture of offered models is no setting", field="architecture",
                         fix=f"Say --architecture {market.changes['architecture']} instead of --set.")  # fmt: skip
    if "architecture" not in method.Settings.__dataclass_fields__:
        raise UsageError(f"clients of {market.method} do not upload a model of an architecture", field="method",
                         fix=_FUSES)  # fmt: skip
    settings = resolve_settings(method, market.preset, {**market.changes, "architecture": market.architecture})
    # pixels: as it was said; what a file's own became is in its digest
    data = {"dataset": "none", "models": dict(models), "pixels": market.pixels or "symmetric"}
    plan = Plan(task, market.method, settings, tuple(models), seed=market.seed, data=data)
    check_plan(plan)
    return plan


def _check_serves(name: str, method: Any) -> None:
    """Its server must make something of the models."""
    if isinstance(method, Relaying):
        raise UsageError(f"the server of {name} passes models on and fuses nothing", field="method", fix=_FUSES)


def _check_fuses(method: Any, one: Accepted) -> None:
    """The method must expect exactly a model from each client, and nothing else."""
    architecture = str(one.payload.facts["architecture"])
    promised = method.contract(architecture)
    if set(promised) != set(one.payload.tensors):
        raise UsageError(f"clients of this method upload {', '.join(sorted(promised)[:3]) or 'nothing'}, not a model",
                         field="method", fix=_FUSES)  # fmt: skip


def _hand_in(one: Accepted, round: Round) -> None:
    """Through the same gate as any upload. The key is the market's own: what vouches for a model is its digest in the plan."""
    key = simulated_key(round.plan.seed, one.client)
    raw, facts = to_raw(one.payload.tensors), dict(one.payload.facts)
    deliver(pack("upload", one.client, round.plan.digest, raw, facts, key), round.inbox)


def _keep(round: Round, release: Release, digest: str) -> dict[ClientId, str]:
    """The model where `osfl predict --run` looks for it; several, by client, where a method gives each its own."""
    if not release.personal:
        save_payload(round.folder / "model.safetensors", release.shared)
        return {"": "model.safetensors"}
    for client in release.personal:
        round.keep_model(client, release.for_client(client), digest)
    return {client: f"models/{client}.safetensors" for client in sorted(release.personal)}


def _finished(round: Round) -> dict[str, Any] | None:
    """What was said, if this very release was described already."""
    path, release = round.folder / "market.json", round.release()
    said = read_json(path) if path.exists() else None
    return said if said is not None and release is not None and said.get("release_digest") == release[1] else None


def _with_refusals(said: dict[str, Any], refused: Sequence[Refused], command: str, out: Path) -> dict[str, Any]:
    """What was said, with the files that are refused now: they are no part of the round, and other ones may be offered."""
    listed = _listed(refused)
    if said["refused"] == listed:
        return said
    said = {**said, "refused": listed, "command": command}
    for page in ("report/index.html", "model_card.md"):
        (out / page).unlink(missing_ok=True)  # they are drawn again
    write_json(out / "market.json", said)
    return said


def _listed(refused: Sequence[Refused]) -> list[Json]:
    return [{"file": one.file, "tensor": one.tensor, "reason": one.reason, "fix": one.fix} for one in refused]


def _described(
    market: Market, plan: Plan, method: Any, accepted: Sequence[Accepted], refused: Sequence[Refused]
) -> dict[str, Json]:
    described = plan.as_json()
    trained: set[str] = getattr(method, "only_for_clients", set)()
    if getattr(plan.settings, "init", "") == "pretrained":  # then the server begins where clients would
        trained = {name for name in trained if not name.startswith("pretrained")}
    kept = {name: value for name, value in described["settings"].items() if name not in trained}
    return {
        "schema": SCHEMA, "method": plan.method, "preset": market.preset, "seed": plan.seed, "plan_digest": plan.digest,
        "task": described["task"], "architecture": market.architecture,
        "accepted": [
            {"client": one.client, "file": one.offer.file, "sha256": one.offer.sha256, "bytes": one.offer.size,
             "naming": one.offer.naming, "parameters": one.offer.parameters, "head": list(one.offer.head),
             "unused": list(one.offer.unused), "pixels": scale_name(one.pixels), "pixels_by": one.pixels_by,
             "family": one.family}
            for one in accepted
        ],
        "cautions": _cautions(market, accepted), "refused": _listed(refused),
        "settings": kept, "deviations": [*_ALREADY_TRAINED, *deviations(method, plan.settings, trained)],
    }  # fmt: skip
