"""`osfl repair`: answer the coordinator's request about sites that stayed away from a secure sum."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osfl.cli import options
from osfl.cli.client import carry_out
from osfl.cli.enroll import gather
from osfl.cli.terminal import echo, escape, put_json
from osfl.core.errors import UsageError

LARGEST = 1 << 20

# the smallest round with a missing site
_ANSWER = (
    "osfl repair plan.toml --client {0} --request round/repair_request.json --key keys/{0}.key --keys keys "
    "--server keys/server.pub --out usb/{0}-repair.safetensors"
)
_UPLOAD = "osfl client plan.toml --client {0} --data sites/{0} --key keys/{0}.key --keys keys --out usb/{0}.safetensors"
EXAMPLES = (
    "osfl new --method onesum --dataset digits --clients north,south,west --partition iid --samples 150 --smoke --secure-sum "
    "--quorum 2 --sites sites --force",
    "osfl keys server north south west --out keys",
    "osfl enroll plan.toml --keys keys --out round",
    _UPLOAD.format("north"),
    _UPLOAD.format("south"),
    "osfl receive round usb",
    "osfl server round --key keys/server.key --without-missing",
    _ANSWER.format("north"),
    _ANSWER.format("south"),
    "osfl receive round usb --key keys/server.key",
    "osfl server round --key keys/server.key",
)

Request = Annotated[
    Path,
    typer.Option(
        "--request",
        "-r",
        metavar="FILE",
        rich_help_panel=options.SITE,
        help="The coordinator's repair_request.json, which the server has signed.",
    ),
]
Key = Annotated[
    Path, typer.Option("--key", "-k", metavar="FILE", rich_help_panel=options.SITE, help="This site's private key.")
]
Keys = Annotated[
    Path,
    typer.Option("--keys", metavar="DIR", rich_help_panel=options.SITE, help="A folder with NAME.pub of every other site."),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        parser=options.new_place,
        rich_help_panel=options.SITE,
        help="Where the answer goes, sealed to the server, such as a USB stick.",
    ),
]


def repair(
    plan: options.Plan,
    name: options.ClientName,
    request: Request,
    key: Key,
    keys: Keys,
    server: options.ServerKey,
    out: Out,
    work: options.Work = Path("work"),
    output_format: options.Format = "text",
) -> None:
    """Tell the server what this site shares with the missing ones, so that their masks can be taken out of the secure sum.

    Ask the missing sites first whether they have delivered: with all answers a server could read the upload of a site that has.
    The request is kept as evidence, and one that contradicts it, or names this site missing, is refused.
    """
    from osfl.core.plan import read_plan
    from osfl.roles.repair import make_repair
    from osfl.roles.site import method_for, work_folder
    from osfl.wire.repair import read_request
    from osfl.wire.signing import SigningKey, read_public

    round_plan, public, asked = read_plan(plan), read_public(server), _read(request)
    method_for(round_plan, name)
    folder = work_folder(round_plan, name, work)
    bundle = make_repair(round_plan, name, asked, SigningKey.load(key), gather(keys, []), public, folder)
    carry_out(bundle, out, public, name)
    missing = list(read_request(asked, public, round_plan.digest, round_plan.clients).missing)
    if output_format == "json":
        put_json(
            {"client": name, "round": round_plan.digest, "missing": missing, "path": str(out), "bytes": out.stat().st_size}
        )
        return
    echo(
        f"Repair  {escape(str(out))}, sealed to the server: what {name} shares with {', '.join(missing)}, who delivered nothing"
    )
    echo("Give it to the coordinator. If one of them did deliver, do not: the server could read that site's upload.")


def _read(path: Path) -> bytes:
    """A request is small; whatever else was named by mistake may not be."""
    try:
        with path.open("rb") as file:
            return file.read(LARGEST)
    except OSError as error:
        raise UsageError(
            f"the request {path} cannot be read: {error.strerror}",
            field="request",
            fix="Give the repair_request.json that the coordinator sent.",
        ) from None
