"""Everything that the machines of a round over Flower need, written to one folder: certificates, keys, app and scripts.

    coordinator/   tls/  keys/server.key  nodes/<site>.pub  app/  rounds/<name>/  start.sh  run.sh
    sites/<name>/  ca.crt  node.key  site.key  plans/  start.sh      all that this site may have, and nothing of others but,
                   keys/                                             for a secure sum, their public keys
    each           osfl-*.whl                                        the package

Called again with another plan it keeps certificates and keys, and adds a round. Folders of sites may be gone by then, as they
should: the coordinator has the public halves of their keys, and no others are made.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from osfl.core.errors import UsageError
from osfl.core.plan import write_plan
from osfl.core.types import ClientId, Plan
from osfl.deploy.flower.package import packed_here
from osfl.deploy.flower.services import write_coordinator, write_site
from osfl.deploy.flower.tls import (
    days_left,
    load_authority,
    make_authority,
    make_node_key,
    make_server_certificate,
    names_of,
    private_pem,
    signs_certificates,
    write_private,
)
from osfl.roles.coordinator import open_new
from osfl.wire.signing import SigningKey, read_public, save_public

AUTHORITY_DAYS, SERVER_DAYS = 3650, 825
RENEW_DAYS = 60  # a certificate that ends sooner is made again by the next deployment
ALWAYS = ("localhost", "127.0.0.1")  # the coordinator talks to its own SuperLink by these
SETTINGS = {"wait": 604800.0, "linger": 86400.0, "again": 300.0, "poll": 1.0, "ttl": 1800.0, "chunk": 16 << 20, "window": 2}
TORCH_FIRST = """\
Without an NVIDIA GPU install torch first, or pip brings several GB of CUDA libraries:
    pip install torch --index-url https://download.pytorch.org/whl/cpu"""
UNITS = """\
Instead of the start scripts: a systemd unit (*.service) and a Containerfile are in each folder. Their first lines say how."""


@dataclass(frozen=True)
class Deployment:
    """What was written, and what to do on each machine."""

    out: Path
    round: str
    machines: Mapping[str, tuple[str, ...]]  # "coordinator" or "site NAME" -> commands
    notes: tuple[str, ...] = ()  # what holds for all of them


def deploy(
    plan: Plan,
    out: Path,
    host: str,
    port: int = 8000,
    *,
    keys: Path | None = None,
    settings: Mapping[str, float] | None = None,
    wheel: Path | None = None,
    authority: Path | None = None,
    services: bool = False,
) -> Deployment:
    """Write the folders. `keys`: what `osfl keys` wrote, NAME.pub of every site and perhaps NAME.key; without it they are made
    here. `wheel`: the package for each folder; without it, the one that runs here. `authority`: a folder with ca.crt and
    ca.key of one's own, whose key is not copied. `services`: systemd units and container files, too."""
    coordinator = out / "coordinator"
    problems = [*_wrong(host, port, settings or {}), *_without_key(plan, coordinator, keys), *_no_wheel(wheel)]
    problems += _wrong_authority(authority, coordinator / "tls")
    if problems:
        raise UsageError(problems, field="deploy")
    name_of_package, package = (wheel.name, wheel.read_bytes()) if wheel else packed_here()
    handed = [client for client in plan.clients if (coordinator / "nodes" / f"{client}.pub").exists()]
    (coordinator / "keys").mkdir(parents=True, exist_ok=True)
    _write_tls(coordinator / "tls", host, authority)
    server = _identity(coordinator / "keys" / "server.key", keys, "server")
    sites = {client: out / "sites" / client for client in plan.clients}
    enrolled = {client: _write_keys(folder, client, coordinator, keys) for client, folder in sites.items()}
    name = f"{plan.method}-{plan.digest[:8]}"
    open_new(coordinator / "rounds" / name, plan, enrolled, server)
    _write_app(coordinator / "app", name, {**SETTINGS, **(settings or {})})
    _write_scripts(coordinator, name, host, port)
    for client, folder in sites.items():
        if plan.secure_sum:
            _write_others(folder / "keys", client, enrolled)
        _write_site(folder, client, server, coordinator / "tls" / "ca.crt", name, plan, host, port)
    for folder in (coordinator, *sites.values()):
        (folder / name_of_package).write_bytes(package)
    install = f"pip install './{name_of_package}[flower]'"
    if services:
        write_coordinator(coordinator, name, port, name_of_package)
        for client, folder in sites.items():
            write_site(folder, client, name_of_package)
    deployment = Deployment(
        out, name, _commands(sites, host, name, handed, install), (TORCH_FIRST, *((UNITS,) if services else ()))
    )
    (out / "README.txt").write_text(readme(deployment), encoding="utf-8")
    return deployment


def readme(deployment: Deployment) -> str:
    lines = [f"Round {deployment.round} over Flower: what to do on each machine", ""]
    for machine, commands in deployment.machines.items():
        lines += [f"{machine}:", *(f"    {command}" for command in commands), ""]
    lines += [line for note in deployment.notes for line in (note, "")]
    return "\n".join(lines)


def _without_key(plan: Plan, coordinator: Path, keys: Path | None) -> list[str]:
    """Sites that made their own keys made all of them: one that is not there is not replaced by one of ours."""
    if keys is None:
        return []
    known = (coordinator / "keys", keys)
    return [
        f"--keys: there is no {client}.pub in {keys}; ask the site for it (`osfl keys`), or leave out --keys to make all here"
        for client in plan.clients
        if not any((place / f"{client}.{half}").exists() for place in known for half in ("pub", "key"))
    ]


def _wrong(host: str, port: int, settings: Mapping[str, float]) -> list[str]:
    problems = [f"unknown setting {key!r}; settings: {', '.join(SETTINGS)}" for key in settings if key not in SETTINGS]
    if not host or not all(c.isascii() and (c.isalnum() or c in ".-:") for c in host):
        problems.append(f"--host: expected a name or an address such as coordinator.example, got {host!r}")
    if not 0 < port < 65536:
        problems.append(f"--port: expected 1 to 65535, got {port}")
    return problems


def _no_wheel(wheel: Path | None) -> list[str]:
    good = wheel is None or (wheel.name.startswith("osfl-") and wheel.suffix == ".whl" and zipfile.is_zipfile(wheel))
    return [] if good else [f"--wheel: expected a file osfl-*.whl, or leave it out for the package that runs here; got {wheel}"]


# --- keys and certificates ---------------------------------------------------------------------------------------------


def _wrong_authority(given: Path | None, folder: Path) -> list[str]:
    """What is wrong with an authority of one's own."""
    if given is None:
        return []
    try:
        loaded = load_authority(given / "ca.crt", given / "ca.key")
    except (OSError, ValueError, TypeError) as error:  # TypeError: the key has a password
        return [f"--authority: expected ca.crt and ca.key (PEM, without a password) in {given}: {error}"]
    if not signs_certificates(loaded):
        return [f"--authority: {given / 'ca.crt'} is no certificate of an authority, or not that of ca.key"]
    known = folder / "ca.crt"
    if known.exists() and known.read_bytes() != loaded.pem:
        return [
            "--authority: the sites trust another authority already; deploy into a new folder, and give each site its new one"
        ]
    return []


def _write_tls(folder: Path, host: str, given: Path | None = None) -> None:
    """The authority stays; the server's certificate is made again when it lacks this name or ends soon."""
    folder.mkdir(exist_ok=True)
    if given is not None:
        (folder / "ca.crt").write_bytes(load_authority(given / "ca.crt", given / "ca.key").pem)
    elif not (folder / "ca.crt").exists():
        made = make_authority("osfl round authority", AUTHORITY_DAYS)
        write_private(folder / "ca.key", private_pem(made.key))
        (folder / "ca.crt").write_bytes(made.pem)
    certificate = folder / "server.pem"
    known = names_of(certificate.read_bytes()) if certificate.exists() else set()
    if host not in known or days_left(certificate.read_bytes()) < RENEW_DAYS:
        if given is None and not (folder / "ca.key").exists():
            raise UsageError(
                "the server's certificate has to be made again", field="authority", fix="Name --authority DIR again."
            )
        authority = load_authority(folder / "ca.crt", (given or folder) / "ca.key")
        names = dict.fromkeys([host, *sorted(known), *ALWAYS])
        pem, key = make_server_certificate(authority, list(names), SERVER_DAYS)
        (folder / "server.key").unlink(missing_ok=True)
        write_private(folder / "server.key", key)
        certificate.write_bytes(pem)


def _identity(path: Path, keys: Path | None, name: str, known: Path | None = None) -> str:
    """The public key of `name`, whose private half is at `path`: kept, taken from `keys`, or made. Only a site may have
    its private half elsewhere, which is best; `known` is its public half of an earlier call."""
    given = keys / f"{name}.key" if keys else path
    if not path.exists() and given.exists():
        SigningKey.load(given).save(path)
    elsewhere = [keys / f"{name}.pub" if keys else path.with_suffix(".pub"), *([known] if known else [])]
    public = next((half for half in elsewhere if half.exists()), None)
    if not path.exists() and name != "server" and public is not None:
        return read_public(public)
    if not path.exists():
        SigningKey.generate().save(path)
    found = SigningKey.load(path).public_hex
    save_public(path.with_suffix(".pub"), found)
    return found


def _write_others(folder: Path, client: ClientId, enrolled: Mapping[ClientId, str]) -> None:
    """The public keys of the other sites, with which a secure sum masks uploads."""
    folder.mkdir(parents=True, exist_ok=True)
    for other, public in enrolled.items():
        if other != client:
            (folder / f"{other}.pub").write_text(f"{public}\n", encoding="ascii")


def _write_keys(folder: Path, client: ClientId, coordinator: Path, keys: Path | None) -> str:
    """Node key and site key of one site; the coordinator keeps the public halves. Returns the site's public key."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    (coordinator / "nodes").mkdir(exist_ok=True)
    registered = coordinator / "nodes" / f"{client}.pub"
    if not (folder / "node.key").exists() and not registered.exists():
        private, node = make_node_key()
        write_private(folder / "node.key", private)
        (folder / "node.pub").write_bytes(node)
    if (folder / "node.pub").exists():
        shutil.copyfile(folder / "node.pub", registered)
    known = coordinator / "keys" / f"{client}.pub"
    public = _identity(folder / "site.key", keys, client, known)
    known.write_text(f"{public}\n", encoding="ascii")
    return public


# --- the Flower app ------------------------------------------------------------------------------------------------------

_APP = Template("""\
# The Flower app of the round: two files that name the programs in the installed package `osfl`.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "osfl-round"
version = "1.0.0"
description = "One-shot federated learning: each site uploads exactly once."
license = "Apache-2.0"
dependencies = ["osfl[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "osfl"

[tool.flwr.app.components]
serverapp = "osfl_round.server_app:app"
clientapp = "osfl_round.client_app:app"

[tool.flwr.app.config]     # change one with: flwr run app round -c 'wait=3600.0'
round = "$round"
$settings
""")
_COMMENTS = {
    "wait": "seconds that a run waits for uploads; start it again to go on",
    "linger": "seconds that it offers the release to sites that are away",
    "again": "at most so long until a site that failed is asked once more",
    "poll": "seconds between two looks",
    "ttl": "a question not answered by then is asked again; learning may take longer",
    "chunk": "bytes in one message; bounds the memory of every program in between",
    "window": "messages under way to one site",
}


def _write_app(folder: Path, fl_round: str, settings: Mapping[str, float]) -> None:
    package = folder / "osfl_round"
    package.mkdir(parents=True, exist_ok=True)
    lines = [f"{key} = {json.dumps(type(SETTINGS[key])(value))}  # {_COMMENTS[key]}" for key, value in settings.items()]
    (folder / "pyproject.toml").write_text(_APP.substitute(round=fl_round, settings="\n".join(lines)), encoding="utf-8")
    (package / "__init__.py").write_text('"""The round as Flower starts it."""\n', encoding="utf-8")
    for role in ("server", "client"):
        text = f"from osfl.deploy.flower.app import {role}_app\n\napp = {role}_app()\n"
        (package / f"{role}_app.py").write_text(text, encoding="utf-8")


# --- scripts ---------------------------------------------------------------------------------------------------------------

_ENVIRONMENT = """\
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.5
command -v flower-supernode > /dev/null || {
    echo "Flower is not installed here: pip install './osfl-*.whl[flower]', with the file's whole name" >&2
    exit 1
}
python="$(dirname "$(command -v flower-supernode)")/python"
[ -x "$python" ] || python=python3
umask 077
"""
_COORDINATOR = Template("""\
#!/bin/sh
# Shared by start.sh and run.sh: where things are, and how `flwr` reaches the SuperLink of this machine.
export OSFL_COORDINATOR="$$PWD" FLWR_HOME="$$PWD/flwr"
port="$${OSFL_PORT:-$port}"               # open to the sites
inner="$${OSFL_INNER:-$$((port + 1))}"     # on this machine only
${environment}mkdir -p flwr link
cat > flwr/config.toml <<END
[superlink]
default = "round"

[superlink.round]
address = "127.0.0.1:$$inner"
root-certificates = "$$PWD/tls/ca.crt"
END
""")
_START = Template("""\
#!/bin/sh
# The SuperLink of the round, always on: stop it and start it again whenever you like, nothing is lost.
# It listens on this machine only; sites connect through the gateway, which forwards nothing else (osfl.deploy.flower.gateway).
# The programs of
# runs are started by osfl.deploy.flower.tasks, which ends with the SuperLink, as the gateway does.
cd "$$(dirname "$$0")" && . ./environment.sh || exit 1
"$$python" -m osfl.deploy.flower.gateway --host "$${OSFL_BIND:-$bind}" --port "$$port" --inner "$$inner" --tls tls &
"$$python" -m osfl.deploy.flower.tasks --runtime-api-address "127.0.0.1:$$inner" \\
    --root-certificates tls/ca.crt --parent-pid $$$$ &
exec flower-superlink --ssl-ca-certfile tls/ca.crt --ssl-certfile tls/server.pem --ssl-keyfile tls/server.key \\
    --enable-supernode-auth --host 127.0.0.1 --port "$$inner" --database link/state.db \\
    --isolation process --disable-runtime-dependency-installation
""")
_RUN = Template("""\
#!/bin/sh
# Runs the round until every site has the release. Stop it and start it again whenever you like, nothing is lost.
cd "$$(dirname "$$0")" && . ./environment.sh || exit 1
round="$${1:-$round}"                 # --register: only register the sites' nodes at the SuperLink
if [ ! -d "rounds/$$round" ] && [ "$$round" != --register ]; then
    echo "There is no round $$round here. Rounds: $$(ls rounds | tr '\n' ' ')" >&2
    exit 2
fi
for key in nodes/*.pub; do
    mark="link/registered-$$(basename "$$key" .pub)"
    until [ -e "$$mark" ]; do
        answer=$$(flwr supernode register "$$key" round 2>&1)
        case "$$answer" in
            *successfully*|*"already in use"*) touch "$$mark" ;;
            *)  # printed once, and again when it is another
                [ "$$answer" = "$$before" ] || echo "waiting for the SuperLink (./start.sh), which says: $$answer" >&2
                before=$$answer
                sleep 2 ;;
        esac
    done
done
[ "$$round" = --register ] && exit 0
while :; do
    flwr run app round --stream -c "round=\\"$$round\\"" || true
    [ -e "rounds/$$round/everyone-has-it" ] && break
    echo "the run ended before every site had the release; started again in $${OSFL_AGAIN:-10} s" >&2
    sleep "$${OSFL_AGAIN:-10}"
done
echo "every site has the release of $$round"
""")
_SITE = Template("""\
#!/bin/sh
# The site $client, always on. Usage: ./start.sh IMAGES     (a folder class/*, .zip, .csv or .npz; it never leaves this machine)
[ -e "$${1:-}" ] || { echo "Usage: $$0 IMAGES, where IMAGES is a folder class/*, .zip, .csv or .npz" >&2; exit 2; }
case "$$(realpath -- "$$1")$$PWD" in *\\"*|*\\\\*) echo "Use a path without quotes and backslashes." >&2; exit 2 ;; esac
data=$$(realpath -- "$$1")
cd "$$(dirname "$$0")" || exit 1
[ -e site.key ] || { echo "Put the private key that is enrolled for $client here as site.key (osfl keys)." >&2; exit 1; }
export FLWR_HOME="$$PWD/flwr"
${environment}mkdir -p flwr work
cat > node.toml <<END
client = "$client"
data = "$$data"
key = "$$PWD/site.key"
work = "$$PWD/work"
plans = "$$PWD/plans"
keys = "$$PWD/keys"
server = "$server"
END
port="$${OSFL_NODE_PORT:-9094}"            # on this machine only
trap 'kill $$node 2> /dev/null; wait; exit 130' INT TERM
while :; do
    flower-supernode --root-certificates ca.crt --superlink "$${OSFL_SUPERLINK:-$address}" --isolation process \\
        --auth-supernode-private-key node.key --port "$$port" --node-config node.toml &
    node=$$!
    "$$python" -m osfl.deploy.flower.tasks --insecure --runtime-api-address "127.0.0.1:$$port" --parent-pid "$$node" &
    wait "$$node" && exit 0
    # After a crash the SuperLink believes for about a minute that the old process is still there, and refuses the new one.
    echo "the SuperNode ended; started again in $${OSFL_AGAIN:-15} s" >&2
    sleep "$${OSFL_AGAIN:-15}"
done
""")


def _write_scripts(coordinator: Path, fl_round: str, host: str, port: int) -> None:
    bind = host if _is_loopback(host) else "0.0.0.0"
    _script(coordinator / "environment.sh", _COORDINATOR.substitute(port=port, environment=_ENVIRONMENT))
    _script(coordinator / "start.sh", _START.substitute(bind=bind))
    _script(coordinator / "run.sh", _RUN.substitute(round=fl_round))


def _write_site(
    folder: Path, client: ClientId, server: str, authority: Path, fl_round: str, plan: Plan, host: str, port: int
) -> None:
    (folder / "plans").mkdir(exist_ok=True)
    (folder / "plans" / f"{fl_round}.toml").write_text(write_plan(plan), encoding="utf-8")
    shutil.copyfile(authority, folder / "ca.crt")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    script = _SITE.substitute(client=client, server=server, address=address, environment=_ENVIRONMENT)
    _script(folder / "start.sh", script)


def _script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _commands(
    sites: Mapping[ClientId, Path], host: str, fl_round: str, handed: Sequence[ClientId], install: str
) -> dict[str, tuple[str, ...]]:
    """`handed`: the sites that have had a folder before."""
    machines: dict[str, tuple[str, ...]] = {
        f"coordinator ({host})": (
            "copy the folder coordinator/ there",
            install,
            "./start.sh          # one terminal: the SuperLink",
            f"./run.sh {fl_round}   # another: ends when every site has the release",
        )
    }
    for client, folder in sites.items():
        plan = f"copy sites/{client}/plans/{fl_round}.toml there, into plans/ of the folder it has"
        plan += f"; sites/{client}/keys/, too" if (folder / "keys").exists() else ""
        if not (folder / "node.key").exists():  # it was handed over with an earlier round
            machines[f"site {client}"] = (plan,)
            continue
        if client in handed:
            machines[f"site {client}"] = (f"{plan}; if it has none yet:", *_first(client, folder, install))
            continue
        machines[f"site {client}"] = _first(client, folder, install)
    return machines


def _first(client: ClientId, folder: Path, install: str) -> tuple[str, ...]:
    """What a site does that never had a folder."""
    own = () if (folder / "site.key").exists() else (f"put the private key {client}.key of that site there as site.key",)
    return (
        f"copy the folder sites/{client}/ there, by a way that nobody else can read, and delete it here",
        *own,
        install,
        "./start.sh IMAGES   # a folder class/*, .zip, .csv or .npz, which stays where it is",
    )
