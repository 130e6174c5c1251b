"""Load a finished classifier from a round folder or from the folder where a site keeps its model."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from osfl.core.errors import RoundError
from osfl.core.method import Method
from osfl.core.plan import plan_from
from osfl.core.registry import load
from osfl.core.types import ClientId, Payload, Plan, Task
from osfl.rounds.folder import existing_round
from osfl.rounds.state import read_json, read_policy
from osfl.rounds.storage import load_model_of
from osfl.runtime.payloads import load_payload


def load_model(folder: Path | str, client: ClientId | None = None) -> tuple[nn.Module, Task]:
    """A finished classifier, ready for evaluation: of a round folder, or of the folder where a site keeps its model.

    `client` picks one where each has its own.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("release.safetensors", "model.safetensors")):
        raise RoundError(
            f"{folder} holds no finished round and no site's model",
            field="run",
            fix="Run `osfl run --out DIR` first, or at a site of a real round `osfl personalize --out DIR`.",
        )
    plan = plan_from(read_json(folder / "plan.json"), str(folder / "plan.json"))
    method = load(plan.method)(plan.task, plan.settings)
    if client is not None and client not in plan.clients:
        raise RoundError(
            f"{client!r} took no part in this round",
            field="client",
            expected=" or ".join(plan.clients),
            got=client,
            fix="Leave --client out where all share one model.",
        )
    _check_withdrawn(folder)
    payload = load_payload(folder / "model.safetensors") or _joint_model(folder, method, client)
    payload = payload or _finished_model(folder, plan, client)
    return method.build(payload).eval(), plan.task


def _check_withdrawn(folder: Path) -> None:
    """Refuse models that were made of a release which was withdrawn, where this is a round's folder and knows of it."""
    if not (folder / "enrolled.json").exists():
        return
    withdrawn = read_policy(folder).withdrawn
    for path in [folder / "model.safetensors", *sorted((folder / "models").glob("*.safetensors"))] if withdrawn.digests else []:
        kept = load_model_of(path)
        why = withdrawn.digests.get(kept[1]) if kept is not None else None
        if why is not None:
            raise RoundError(
                f"{path.relative_to(folder)} was made of a release that was {why}", field="run", fix=f"Delete {path}."
            )


def _joint_model(folder: Path, method: Method, client: ClientId | None) -> Payload | None:
    """Where clients answer together and none is asked for: all their models as one."""
    if client is not None or not method.provides("after_round"):
        return None
    kept = {path.stem: load_payload(path) for path in sorted((folder / "models").glob("*.safetensors"))}
    return method.after_round({name: model for name, model in kept.items() if model is not None}) if kept else None


def _finished_model(folder: Path, plan: Plan, client: ClientId | None) -> Payload:
    """What a round folder gives to this client, or to all."""
    with existing_round(folder, plan) as fl_round:
        published = fl_round.release()
    assert published is not None
    own = sorted(path.stem for path in (folder / "models").glob("*.safetensors"))
    if own and client not in own:
        raise RoundError(
            f"each client has a model of its own here, and {client!r} is none of them"
            if client
            else "each client has a model of its own here",
            field="client",
            expected=" or ".join(own),
            got=client or "nothing",
            fix=f"Add --client {own[0]}.",
        )
    payload = load_payload(folder / "models" / f"{client}.safetensors") if own else published[0].for_client(client or "")
    assert payload is not None
    return payload
