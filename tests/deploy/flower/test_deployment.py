"""What `osfl deploy` writes: each machine gets what it needs, and nothing that belongs to another."""

from __future__ import annotations

import base64
import hashlib
import io
import ipaddress
import json
import shutil
import ssl
import stat
import subprocess
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from packaging.requirements import Requirement

import osfl
from osfl.core.errors import UsageError
from osfl.core.plan import read_plan, write_plan
from osfl.deploy.flower import deployment
from osfl.deploy.flower.app import accepted_plan, collector_config, open_site
from osfl.deploy.flower.deployment import SETTINGS, deploy
from osfl.deploy.flower.package import from_source, packed_here
from osfl.deploy.flower.tls import days_left, names_of
from osfl.roles.coordinator import status
from osfl.wire.signing import SigningKey, save_public
from tests.faults.machines import CLIENTS, make_plan

PLAN = make_plan("fedavg")
HOST = "coordinator.example"


def private_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]


def test_private_keys_are_their_owners_alone(tmp_path: Path) -> None:
    deploy(PLAN, tmp_path, HOST)
    found = private_files(tmp_path)
    expected = {"tls/ca.key", "tls/server.key", "keys/server.key"}
    assert {str(path.relative_to(tmp_path / "coordinator")) for path in found if "coordinator" in path.parts} == expected
    assert len(found) == 3 + 2 * len(CLIENTS)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in found)


def test_a_site_has_nothing_of_others(tmp_path: Path) -> None:
    deploy(PLAN, tmp_path, HOST)
    secrets = {path: path.read_bytes() for path in private_files(tmp_path)}
    for client in CLIENTS:
        folder = tmp_path / "sites" / client
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        plan = f"plans/fedavg-{PLAN.digest[:8]}.toml"
        names = {name for name in names if not name.startswith("osfl-")}  # the package
        assert names == {"ca.crt", "node.key", "node.pub", "site.key", "site.pub", "start.sh", plan}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        others = [secret for path, secret in secrets.items() if folder not in path.parents]
        assert not [path for path in folder.rglob("*") if path.is_file() and path.read_bytes() in others]
        assert read_plan(folder / plan).digest == PLAN.digest


@pytest.mark.parametrize("host", [HOST, "192.0.2.7", "2001:db8::1", "127.0.0.1"])
def test_the_certificate_is_for_the_names_that_are_used(tmp_path: Path, host: str) -> None:
    deploy(PLAN, tmp_path, host)
    tls = tmp_path / "coordinator" / "tls"
    assert names_of((tls / "server.pem").read_bytes()) == {host, "localhost", "127.0.0.1"}
    ssl.create_default_context(cafile=tls / "ca.crt")
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls / "server.pem", tls / "server.key")
    server, authority = (x509.load_pem_x509_certificate((tls / name).read_bytes()) for name in ("server.pem", "ca.crt"))
    server.verify_directly_issued_by(authority)
    node = serialization.load_ssh_public_key((tmp_path / "sites" / "north" / "node.pub").read_bytes())
    assert isinstance(node, ec.EllipticCurvePublicKey) and node.curve.name == "secp384r1"
    start = (tmp_path / "sites" / "north" / "start.sh").read_text()
    assert (f"[{host}]:8000" if ":" in host else f"{host}:8000") in start


def test_a_certificate_that_ends_soon_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "SERVER_DAYS", 59)
    deploy(PLAN, tmp_path, HOST)
    first = (tmp_path / "coordinator/tls/server.pem").read_bytes()
    monkeypatch.setattr(deployment, "SERVER_DAYS", 825)
    deploy(PLAN, tmp_path, HOST)
    second = (tmp_path / "coordinator/tls/server.pem").read_bytes()
    assert second != first and days_left(second) > 800 > days_left(first)
    deploy(PLAN, tmp_path, HOST)
    assert (tmp_path / "coordinator/tls/server.pem").read_bytes() == second


def test_only_loopback_binds_to_loopback(tmp_path: Path) -> None:
    deploy(PLAN, tmp_path / "a", "127.0.0.1")
    deploy(PLAN, tmp_path / "b", HOST)
    assert "OSFL_BIND:-127.0.0.1" in (tmp_path / "a" / "coordinator" / "start.sh").read_text()
    assert f"OSFL_BIND:-{ipaddress.ip_address(0)}" in (tmp_path / "b" / "coordinator" / "start.sh").read_text()


def test_again_with_another_plan_keeps_identities_and_adds_a_round(tmp_path: Path) -> None:
    deploy(PLAN, tmp_path, HOST)
    before = {path: path.read_bytes() for path in private_files(tmp_path)}
    second = make_plan("ensemble")
    named = deploy(second, tmp_path, HOST)
    assert {path: path.read_bytes() for path in private_files(tmp_path)} == before
    rounds = tmp_path / "coordinator" / "rounds"
    assert {path.name for path in rounds.iterdir()} == {f"fedavg-{PLAN.digest[:8]}", named.round}
    assert status(rounds / named.round).missing == list(CLIENTS)
    deploy(PLAN, tmp_path, "other.example")  # another name: a new server certificate by the same authority
    pem = (tmp_path / "coordinator" / "tls" / "server.pem").read_bytes()
    assert {HOST, "other.example"} <= names_of(pem)
    assert (tmp_path / "coordinator" / "tls" / "ca.key").read_bytes() in before.values()


@pytest.mark.parametrize("own_keys", [False, True])
def test_again_when_sites_have_taken_their_folders_away(tmp_path: Path, own_keys: bool) -> None:
    """As README.txt tells: a folder is deleted here once it is there. The site's keys are still the site's."""
    keys = tmp_path / "keys" if own_keys else None
    if keys is not None:
        keys.mkdir()
        for client in CLIENTS:
            save_public(keys / f"{client}.pub", SigningKey.generate().public_hex)
    out = tmp_path / "out"
    first = deploy(PLAN, out, HOST, keys=keys)
    node = (out / "coordinator" / "nodes" / "north.pub").read_bytes()
    shutil.rmtree(out / "sites" / "north")
    second = deploy(make_plan("ensemble"), out, HOST)
    enrolled = [(out / "coordinator" / "rounds" / found.round / "enrolled.json").read_bytes() for found in (first, second)]
    assert enrolled[0] == enrolled[1] and (out / "coordinator" / "nodes" / "north.pub").read_bytes() == node
    assert not private_files(out / "sites" / "north") and len(private_files(out / "sites" / "south")) == 2 - own_keys
    (command,) = second.machines["site north"]
    assert command.startswith(f"copy sites/north/plans/{second.round}.toml there")
    assert deploy(PLAN, out, HOST).round == first.round


def test_sites_that_made_their_own_keys(tmp_path: Path) -> None:
    """Best: the private half was never on the coordinator's machine."""
    own, keys = SigningKey.generate(), tmp_path / "keys"
    keys.mkdir()
    save_public(keys / "north.pub", own.public_hex)
    with pytest.raises(UsageError, match=r"no south\.pub(.|\n)*no west\.pub"):  # not replaced by one of ours
        deploy(PLAN, tmp_path / "out", HOST, keys=keys)
    assert not (tmp_path / "out").exists()
    for other in ("south", "west"):
        save_public(keys / f"{other}.pub", SigningKey.generate().public_hex)
    found = deploy(PLAN, tmp_path / "out", HOST, keys=keys)
    assert not (tmp_path / "out" / "sites" / "north" / "site.key").exists()
    assert any("north.key" in command for command in found.machines["site north"])
    enrolled = (tmp_path / "out" / "coordinator" / "rounds" / found.round / "enrolled.json").read_text()
    assert own.public_hex in enrolled


def test_a_site_that_has_its_folder_needs_the_new_plan_alone(tmp_path: Path) -> None:
    assert deploy(PLAN, tmp_path, HOST).machines["site north"][0].startswith("copy the folder sites/north/")
    again = deploy(make_plan("ensemble"), tmp_path, HOST)
    assert again.machines["site north"][0].startswith(f"copy sites/north/plans/{again.round}.toml there")
    assert any(f"./run.sh {again.round} " in command for command in again.machines[f"coordinator ({HOST})"])


def test_a_round_that_is_not_there_is_reported_at_once(tmp_path: Path) -> None:
    named = deploy(PLAN, tmp_path / "out", HOST)
    (tmp_path / "bin").mkdir()
    for program in ("flower-supernode", "flwr"):
        (tmp_path / "bin" / program).symlink_to("/bin/true")
    output = subprocess.run(
        [tmp_path / "out" / "coordinator" / "run.sh", "nosuch"],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        timeout=600,
    )
    assert output.returncode == 2 and "no round nosuch" in output.stderr and named.round in output.stderr


def test_what_the_superlink_says_is_reported_once(tmp_path: Path) -> None:
    """The second attempt succeeds; the first refusal is not hidden."""
    deploy(PLAN, tmp_path / "out", HOST)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flower-supernode").symlink_to("/bin/true")
    flwr = tmp_path / "bin" / "flwr"
    flwr.write_text(
        '#!/bin/sh\n[ -e "$0.asked" ] && { echo registered successfully; exit; }\ntouch "$0.asked"\n'
        'echo "certificate has expired"\nexit 1\n'
    )
    flwr.chmod(0o755)
    output = subprocess.run(
        [tmp_path / "out" / "coordinator" / "run.sh", "--register"],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        timeout=600,
    )
    assert output.returncode == 0 and output.stderr.count("certificate has expired") == 1
    assert len(list((tmp_path / "out" / "coordinator" / "link").glob("registered-*"))) == len(CLIENTS)


def test_scripts_are_valid_and_say_what_is_missing(tmp_path: Path) -> None:
    deploy(PLAN, tmp_path, HOST)
    for script in tmp_path.rglob("*.sh"):
        subprocess.run(["sh", "-n", script], check=True)
    output = subprocess.run([tmp_path / "sites" / "north" / "start.sh"], capture_output=True, text=True)
    assert output.returncode == 2 and "Usage:" in output.stderr
    output = subprocess.run(
        ["/bin/sh", tmp_path / "sites" / "north" / "start.sh", tmp_path],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert output.returncode == 1 and "pip install './osfl-*.whl[flower]'" in output.stderr


@pytest.mark.parametrize(("host", "port"), [("bad host", 1), ("", 1), ("a;b", 1), (HOST, 0), (HOST, 70000)])
def test_mistakes_are_messages(tmp_path: Path, host: str, port: int) -> None:
    with pytest.raises(UsageError, match=r"--host|--port"):
        deploy(PLAN, tmp_path / "out", host, port)
    assert not (tmp_path / "out").exists()


def test_the_apps_settings_are_understood() -> None:
    assert collector_config(SETTINGS).chunk == SETTINGS["chunk"] and collector_config({"wait": 5.0}).wait == 5.0


def test_a_site_takes_part_only_in_plans_that_it_has(tmp_path: Path) -> None:
    text = json.dumps(PLAN.as_json())
    with pytest.raises(UsageError, match="has not agreed"):
        accepted_plan(text, tmp_path)
    (tmp_path / "round.toml").write_text(write_plan(PLAN))
    assert accepted_plan(text, tmp_path) == PLAN
    with pytest.raises(UsageError, match="has not agreed"):
        accepted_plan(json.dumps(make_plan("ensemble").as_json()), tmp_path)


def test_a_node_without_configuration_is_reported_all_that_is_missing() -> None:
    with pytest.raises(UsageError) as caught:
        open_site({"client": "north", "data": "/images"})
    assert all(f"'{name}'" in str(caught.value) for name in ("key", "work", "server", "plans"))


def test_the_package_goes_into_each_folder(tmp_path: Path) -> None:
    wheel = tmp_path / "osfl-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("osfl/__init__.py", "")
    done = deploy(PLAN, tmp_path / "out", HOST, wheel=wheel)
    folders = [tmp_path / "out" / "coordinator", *(tmp_path / "out" / "sites" / client for client in CLIENTS)]
    assert all((folder / wheel.name).read_bytes() == wheel.read_bytes() for folder in folders)
    assert all(f"pip install './{wheel.name}[flower]'" in commands for commands in done.machines.values())


def test_without_a_file_the_package_that_runs_here_goes_into_each_folder(tmp_path: Path) -> None:
    """Before it is on an index, `pip install osfl` finds nothing, or somebody else's package."""
    done = deploy(PLAN, tmp_path, HOST)
    wheels = sorted(tmp_path.rglob("osfl-*.whl"))
    assert len(wheels) == len(CLIENTS) + 1 and len({wheel.read_bytes() for wheel in wheels}) == 1
    assert all(f"pip install './{wheels[0].name}[flower]'" in commands for commands in done.machines.values())
    with zipfile.ZipFile(wheels[0]) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    source = Path(osfl.__file__).parent
    assert content["osfl/cli/main.py"] == (source / "cli" / "main.py").read_bytes()
    assert {"osfl/py.typed", "osfl/reports/templates/run.html"} <= content.keys()
    info = wheels[0].name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert b"osfl = osfl.cli.main:main" in content[f"{info}/entry_points.txt"]
    recorded = dict(line.rsplit(",", 2)[:2] for line in content.pop(f"{info}/RECORD").decode().splitlines()[:-1])
    hashes = {
        name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() for name, data in content.items()
    }
    assert recorded == {name: f"sha256={value}" for name, value in hashes.items()}


def test_the_metadata_of_a_source_tree_are_those_of_its_pyproject(tmp_path: Path) -> None:
    """What pip noted at the last `pip install --editable` may lack an extra that was added since."""
    root = Path(osfl.__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    name, wheel = packed_here()
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        found = message_from_bytes(archive.read(f"osfl-{project['version']}.dist-info/METADATA"))
    assert name == f"osfl-{project['version']}-py3-none-any.whl" and found["Version"] == project["version"]
    assert found["Requires-Python"] == project["requires-python"]
    assert found.get_payload(decode=True) == (root / "README.md").read_bytes()
    assert set(found.get_all("Provides-Extra") or ()) == project["optional-dependencies"].keys()
    by_extra: dict[str, set[str]] = {}
    for requirement in map(Requirement, found.get_all("Requires-Dist") or ()):
        extra = "" if requirement.marker is None else str(requirement.marker).split('"')[1]
        by_extra.setdefault(extra, set()).add(f"{requirement.name}{requirement.specifier}")
    wanted = {"": project["dependencies"], **project["optional-dependencies"]}
    parsed = {extra: {f"{r.name}{r.specifier}" for r in map(Requirement, lines)} for extra, lines in wanted.items()}
    assert by_extra == parsed


def test_a_folder_that_is_no_source_tree_of_ours_has_no_metadata(tmp_path: Path) -> None:
    assert from_source(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "1"\n')
    assert from_source(tmp_path) is None


@pytest.mark.parametrize("name", ["other-1.0-py3-none-any.whl", "osfl-0.1.0.tar.gz", "osfl-0.1.0-py3-none-any.whl"])
def test_a_file_that_is_no_wheel_of_ours_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("no archive")
    with pytest.raises(UsageError, match=r"--wheel: expected a file osfl-\*\.whl"):
        deploy(PLAN, tmp_path / "out", HOST, wheel=tmp_path / name)
    assert not (tmp_path / "out").exists()
