"""A site's answer to a request for repairs of a secure sum: once, for a round that it delivered in, and never for itself.

work/<round>/<client>/repair_request.json   the request that was answered, signed by the server: evidence
work/<round>/<client>/repair.safetensors    its answer
work/<round>/<client>/refused-<digest>.json   a request that was not answered, and contradicts what this site knows
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from osfl.core.errors import RoundError, UsageError
from osfl.core.types import ClientId, Plan, digest_of
from osfl.rounds.lock import folder_lock
from osfl.runtime.atomic import replace_atomically
from osfl.wire.gate import read_manifest
from osfl.wire.masks import pair_seed
from osfl.wire.repair import REQUEST, RepairRequest, RequestRejected, pack_repair, read_request
from osfl.wire.signing import SigningKey

REPAIR = "repair.safetensors"
_IF_DELIVERED = (
    "If that site did deliver, the server could read its upload with your answer. Keep this file, and call the other sites."
)

_ITSELF = (
    "If you have not sent your upload, do not send it any more: it could be read. If you have, the server's statement is "
    "false: keep this file, and ask the other sites not to answer."
)


def make_repair(
    plan: Plan, client: ClientId, request: bytes, key: SigningKey, keys: Mapping[ClientId, str], server: str, folder: Path
) -> Path:
    """This site's repair, a signed bundle to be sealed to the server; the same request gives the same bytes.

    `keys`: the public keys of all sites; `folder`: where the site keeps its upload of this round, and the request.
    """
    keys = all_keys(plan, client, key, keys)
    asked = read_request(request, server, plan.digest, plan.clients)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with folder_lock(folder, fix="Wait for it, or choose another --work."):
        try:
            _check_known(asked, client, folder, server, plan)
        except RequestRejected:
            replace_atomically(folder / f"refused-{asked.digest[:16]}.json", request)
            raise
        if not (folder / REQUEST).exists():
            replace_atomically(folder / REQUEST, request)
        seeds = {name: pair_seed(key, client, name, keys[name], plan.digest) for name in asked.missing}
        replace_atomically(folder / REPAIR, pack_repair(asked, client, seeds, key))
    return folder / REPAIR


def all_keys(plan: Plan, client: ClientId, key: SigningKey, keys: Mapping[ClientId, str]) -> dict[ClientId, str]:
    """The public keys of all sites of a secure sum, each known, each another, the site's own among them."""
    problems = [f"no key for {name!r}" for name in plan.clients if name != client and name not in keys]
    if keys.get(client, key.public_hex) != key.public_hex:
        problems.append(f"the key for {client!r} is not the public half of this site's private key")
    found = {**{name: keys[name] for name in plan.clients if name in keys}, client: key.public_hex}
    if len(set(found.values())) < len(found):
        problems.append("two sites have one key")
    if problems:
        raise UsageError(
            problems,
            field="keys",
            fix="A secure sum needs NAME.pub of every other site of the plan, compared with its owner: give --keys DIR.",
        )
    return found


def _check_known(asked: RepairRequest, client: ClientId, folder: Path, server: str, plan: Plan) -> None:
    """What a site can know: the plan's quorum, its own upload, and what it was asked before."""
    least = plan.quorum or len(plan.clients)
    if len(asked.delivered) < least:
        reason = "with so few uploads the plan allows no release, so nobody needs repairs"
        raise _no("delivered", reason, f"at least {least} uploads", str(len(asked.delivered)), "Answer no such request.")
    if client in asked.missing:
        raise _no("missing", "the server says that this site has not delivered", "this site's upload", "missing", _ITSELF)
    upload = folder / "upload.safetensors"
    own = digest_of(read_manifest(upload)) if upload.exists() else "no upload"
    if own != asked.delivered[client]:
        reason = "the server names another upload of this site than the one that is kept here"
        raise _no(f"delivered.{client}", reason, own, asked.delivered[client], "Use the --work of `osfl client`.")
    if (folder / REQUEST).exists():
        before = read_request((folder / REQUEST).read_bytes(), server, plan.digest, plan.clients)
        if before.digest != asked.digest:
            reason = "it contradicts the request that this site has answered: a server asks once"
            missing = [f"missing: {', '.join(one.missing)}" for one in (before, asked)]
            raise _no("missing", reason, missing[0], missing[1], _IF_DELIVERED)


def check_not_missing(folder: Path, client: ClientId) -> None:
    """Refuse to upload once the others were asked to take this site's masks out: the upload could be read."""
    if any(folder.glob("refused-*.json")):
        raise RoundError(
            "the server has said that this site is missing, or contradicted itself: its upload could be read",
            client=client,
            field="repair request",
            expected="no refused request",
            got=", ".join(path.name for path in sorted(folder.glob("refused-*.json"))),
            fix="Take part in another round.",
        )


def _no(field: str, reason: str, expected: str, got: str, fix: str) -> RequestRejected:
    return RequestRejected(reason, client="server", field=field, expected=expected, got=got, fix=fix)
