"""The two programs that Flower starts: what `osfl deploy` writes to disk only names them.

    server_app   on the coordinator's machine; OSFL_COORDINATOR, set where the SuperLink is started, names its folder
    client_app   on a site's machine; `flower-supernode --node-config` names its images, key and folders

Neither takes a path from the other side.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osfl.errors import RoundError, UsageError
from osfl.protocol import ClientId, Plan
from osfl.transports.answering import Answers
from osfl.transports.collecting import Collector, Counter, Manner
from osfl.transports.flower import GridPost, answering_app, require_flower
from osfl.wire.agreed import alone, read_json, standing_desk, unfinished
from osfl.wire.atomic import locked
from osfl.wire.gate import read_manifest
from osfl.wire.inbox import Inbox
from osfl.wire.names import check_client_id
from osfl.wire.sealing import sealed_size
from osfl.wire.signing import SigningKey

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

HOME = "OSFL_COORDINATOR"
SERVER_KEY = "keys/server.key"
DONE = "everyone-has-it"  # what run.sh waits for
SECONDS = ("wait", "linger", "again", "poll")
SIZES = ("chunk", "window")


# --- coordinator -----------------------------------------------------------------------------------------------------


def server_app() -> ServerApp:
    require_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        collect(grid, context.run_config)

    return app


def collect(grid: Any, config: Mapping[str, Any]) -> bool:
    """One run of the ServerApp: goes on with the round where the last one stopped."""
    home = coordinator_home()
    folder = home / "rounds" / check_client_id(str(config["round"]))
    if not (folder / "plan.json").exists():
        raise RoundError(f"there is no round {folder.name!r} here", field="round",
                         fix="Write it with `osfl deploy`, or name another with -c 'round=\"NAME\"'.")  # fmt: skip
    with contextlib.ExitStack() as stack:
        if _waited_for_others(folder, stack) and (folder / DONE).exists():
            tell(f"round {folder.name}: another run brought it to its end")
            return True
        tell(f"round {folder.name}: {', '.join(Inbox(folder / 'inbox', standing_desk(folder)).delivered()) or 'nobody'} "
             "has delivered so far")  # fmt: skip
        post = GridPost(grid, long_ttl=float(config["ttl"]))
        everyone = Collector(counter_of(folder, home / SERVER_KEY), post, manner_from(config), tell=tell).run()
        if everyone:
            (folder / DONE).touch()
        return everyone


def _waited_for_others(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Alone at this round, or everybody would be asked twice; True if another run was at work. The program of a run may outlive
    its SuperLink, and it goes on when that is back: to start others all the time until it has ended would help nobody."""
    try:
        stack.enter_context(alone(folder, ".flower.lock"))
        return False
    except RoundError:
        tell(f"round {folder.name}: another run is at work; waiting for it (`flwr stop` ends a run)")
        stack.enter_context(locked(folder / ".flower.lock"))
        return True


def coordinator_home() -> Path:
    """Set by the machine that runs the SuperLink; whoever submits a run cannot choose it."""
    if not os.environ.get(HOME):
        raise UsageError(f"{HOME} is not set where the SuperLink was started", field=HOME,
                         fix="Start the SuperLink with the start.sh that `osfl deploy` wrote.")  # fmt: skip
    return Path(os.environ[HOME])


def manner_from(config: Mapping[str, Any]) -> Manner:
    times = {name: float(config[name]) for name in SECONDS if name in config}
    sizes = {name: max(1, int(config[name])) for name in SIZES if name in config}
    return Manner(**times, **sizes)  # type: ignore[arg-type]


def counter_of(folder: Path, key: Path) -> Counter:
    """A round folder as the network's program uses it."""
    from osfl.coordinator import receive, status
    from osfl.coordinator import serve as run_server_phase

    desk = standing_desk(folder)

    def serve() -> None:
        run_server_phase(folder, SigningKey.load(key), progress=lambda what, done, total: tell(f"{what} {done}/{total}"))

    return Counter(
        round=desk.plan,
        plan=json.dumps(read_json(folder / "plan.json"), sort_keys=True),
        enrolled=desk.enrolled,
        limit=sealed_size(desk.limits.upload_bytes),
        folder=folder / "partial",
        standing=lambda client: Inbox(folder / "inbox", desk).path(client),
        receive=lambda path: receive(folder, path, SigningKey.load(key)),
        refuse=Inbox(folder / "inbox", desk).note,
        ready=lambda: status(folder).ready,
        serve=serve,
        parts=lambda client: released(folder, client),
        forgotten=lambda: standing_desk(folder).gone,
    )


def released(folder: Path, client: ClientId) -> dict[str, Path] | None:
    """The files that a client fetches; None before the server phase has finished, and while something is being forgotten."""
    shared, own = folder / "release.safetensors", folder / "personal" / f"{client}.safetensors"
    if not shared.exists() or unfinished(folder) is not None:
        return None
    if standing_desk(folder).withdrawn.of(read_manifest(shared)) is not None:
        return None  # somebody put an old release back; the server phase says so
    return {"release": shared, **({"personal": own} if client and own.exists() else {})}


def tell(words: str) -> None:
    print(f"[osfl] {words}", flush=True)


# --- site ------------------------------------------------------------------------------------------------------------


def client_app() -> ClientApp:
    require_flower()
    return answering_app(open_site)


def open_site(config: Mapping[str, Any]) -> Answers:
    """A site as its own node describes it: client, data, key, work, server (public key), plans it agreed to."""
    missing = [name for name in ("client", "data", "key", "work", "server", "plans") if not config.get(name)]
    if missing:
        raise UsageError([f"the node's configuration has no {name!r}" for name in missing], field="node-config",
                         fix="Start the SuperNode with the start.sh that `osfl deploy` wrote.")  # fmt: skip
    client, data, work = check_client_id(str(config["client"])), Path(str(config["data"])), Path(str(config["work"]))
    key, plans = SigningKey.load(Path(str(config["key"]))), Path(str(config["plans"]))

    def make(plan: str) -> Path:
        from osfl.site import make_upload

        return make_upload(agreed(plan, plans), client, data, key, work, progress=_progress, sealed=True, notice=tell)

    def take(plan: str, release: Path, personal: Path | None) -> Path:
        from osfl.site import take_release

        return take_release(agreed(plan, plans), client, release, personal, str(config["server"]), work,
                            data=data, progress=_progress, spare=True)  # fmt: skip

    return Answers(client, key, work, make, take, seal=str(config["server"]))


def agreed(text: str, plans: Path) -> Plan:
    """The plan of the message, if people at this site put the same one into their folder of plans."""
    from osfl.plan import plan_from, read_plan

    asked = plan_from(json.loads(text), "the coordinator's plan")
    if any(read_plan(path).digest == asked.digest for path in sorted(plans.glob("*.toml"))):
        return asked
    raise UsageError(f"this site has not agreed to the plan {asked.digest[:16]} ({asked.method})", field="plan",
                     fix=f"Look at the coordinator's plan.toml; to take part, put it into {plans}.")  # fmt: skip


def _progress(what: str, done: int, total: int) -> None:
    if done in (0, total):
        tell(f"{what} {done}/{total}")
