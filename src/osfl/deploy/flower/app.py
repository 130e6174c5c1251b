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

from osfl.core.errors import RoundError, UsageError
from osfl.core.names import check_client_id
from osfl.core.types import ClientId, Json, Plan
from osfl.deploy.flower.collector import Collector, CollectorConfig
from osfl.deploy.flower.grid import GridChannel, require_flower, site_node_app
from osfl.deploy.flower.site_node import SiteNode
from osfl.rounds.lock import folder_lock
from osfl.rounds.state import read_policy
from osfl.runtime.atomic import locked
from osfl.wire.inbox import Inbox
from osfl.wire.masks import keys_digest
from osfl.wire.signing import SigningKey, read_public

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


def collect(grid: Any, config: Mapping[str, Json]) -> bool:
    """One run of the ServerApp: goes on with the round where the last one stopped."""
    home = coordinator_home()
    folder = home / "rounds" / check_client_id(str(config["round"]))
    if not (folder / "plan.json").exists():
        raise RoundError(
            f"there is no round {folder.name!r} here",
            field="round",
            fix="Write it with `osfl deploy`, or name another with -c 'round=\"NAME\"'.",
        )
    with contextlib.ExitStack() as stack:
        if _waited_for_others(folder, stack) and (folder / DONE).exists():
            log(f"round {folder.name}: another run brought it to its end")
            return True
        log(
            f"round {folder.name}: {', '.join(Inbox(folder / 'inbox', read_policy(folder)).delivered()) or 'nobody'} "
            "has delivered so far"
        )
        channel = GridChannel(grid, long_ttl=float(config["ttl"]))
        everyone = Collector(folder, home / SERVER_KEY, channel, collector_config(config), log=log).run()
        if everyone:
            (folder / DONE).touch()
        return everyone


def _waited_for_others(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Lock the round, or every site would be asked twice; True if another run was at work. The program of a run may outlive
    its SuperLink, and it goes on when that is back: to start others all the time until it has ended would help nobody."""
    try:
        stack.enter_context(folder_lock(folder, ".flower.lock"))
        return False
    except RoundError:
        log(f"round {folder.name}: another run is at work; waiting for it (`flwr stop` ends a run)")
        stack.enter_context(locked(folder / ".flower.lock"))
        return True


def coordinator_home() -> Path:
    """Set by the machine that runs the SuperLink; whoever submits a run cannot choose it."""
    if not os.environ.get(HOME):
        raise UsageError(
            f"{HOME} is not set where the SuperLink was started",
            field=HOME,
            fix="Start the SuperLink with the start.sh that `osfl deploy` wrote.",
        )
    return Path(os.environ[HOME])


def collector_config(config: Mapping[str, Json]) -> CollectorConfig:
    times = {name: float(config[name]) for name in SECONDS if name in config}
    sizes = {name: max(1, int(config[name])) for name in SIZES if name in config}
    return CollectorConfig(**times, **sizes)  # type: ignore[arg-type]


def log(body: str) -> None:
    print(f"[osfl] {body}", flush=True)


# --- site ------------------------------------------------------------------------------------------------------------


def client_app() -> ClientApp:
    require_flower()
    return site_node_app(open_site)


def open_site(config: Mapping[str, Json]) -> SiteNode:
    """A site as its own node describes it: client, data, key, work, server (public key), plans it agreed to, and for a secure
    sum a folder of the other sites' public keys."""
    missing = [name for name in ("client", "data", "key", "work", "server", "plans") if not config.get(name)]
    if missing:
        raise UsageError(
            [f"the node's configuration has no {name!r}" for name in missing],
            field="node-config",
            fix="Start the SuperNode with the start.sh that `osfl deploy` wrote.",
        )
    client, data, work = check_client_id(str(config["client"])), Path(str(config["data"])), Path(str(config["work"]))
    key, plans = SigningKey.load(Path(str(config["key"]))), Path(str(config["plans"]))

    def make(plan: str) -> Path:
        from osfl.roles.site import make_upload

        asked, keys = accepted_plan(plan, plans), others()
        if asked.secure_sum:
            log(f"masked with the keys {keys_digest({**keys, client: key.public_hex})}: all sites must see the same")
        return make_upload(asked, client, data, key, work, progress=_progress, sealed=True, notice=log, keys=keys)

    def others() -> dict[ClientId, str]:
        """Public keys of the other sites, which a secure sum needs."""
        folder = Path(str(config.get("keys") or "keys"))
        return {path.stem: read_public(path) for path in sorted(folder.glob("*.pub"))}

    def repair(plan: str, request: bytes) -> Path:
        from osfl.roles.repair import make_repair
        from osfl.roles.site import work_folder

        asked = accepted_plan(plan, plans)
        folder = work_folder(asked, client, work)
        return make_repair(asked, client, request, key, others(), str(config["server"]), folder)

    def take(plan: str, release: Path, personal: Path | None) -> Path:
        from osfl.roles.site import take_release

        return take_release(
            accepted_plan(plan, plans),
            client,
            release,
            personal,
            str(config["server"]),
            work,
            data=data,
            progress=_progress,
            spare=True,
        )

    return SiteNode(client, key, work, make, take, str(config["server"]), repair)


def accepted_plan(text: str, plans: Path) -> Plan:
    """The plan of the message, if people at this site put the same one into their folder of plans."""
    from osfl.core.plan import plan_from, read_plan

    asked = plan_from(json.loads(text), "the coordinator's plan")
    if any(read_plan(path).digest == asked.digest for path in sorted(plans.glob("*.toml"))):
        return asked
    raise UsageError(
        f"this site has not agreed to the plan {asked.digest[:16]} ({asked.method})",
        field="plan",
        fix=f"Look at the coordinator's plan.toml; to take part, put it into {plans}.",
    )


def _progress(what: str, done: int, total: int) -> None:
    if done in (0, total):
        log(f"{what} {done}/{total}")
