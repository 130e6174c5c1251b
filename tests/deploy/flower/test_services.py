"""Systemd units, container files, and a certificate authority of one's own."""

from __future__ import annotations

import configparser
import datetime
import zipfile
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from osfl.cli.main import answer
from osfl.core.errors import UsageError
from osfl.core.plan import write_plan
from osfl.deploy.flower.deployment import deploy
from osfl.deploy.flower.tls import make_authority, private_pem, write_private
from tests.faults.machines import CLIENTS, make_plan

PLAN, HOST = make_plan("fedavg"), "coordinator.example"
ROUND = f"fedavg-{PLAN.digest[:8]}"


def _unit(path: Path) -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(path.read_text())
    return found


def test_units_start_what_the_scripts_start(tmp_path: Path) -> None:
    deploy(PLAN, tmp_path, HOST, services=True)
    places = {"coordinator": [("osfl-superlink", "start.sh"), (f"osfl-run-{ROUND}", f"run.sh {ROUND}")]}
    places |= {f"sites/{client}": [(f"osfl-{client}", "start.sh /srv/images")] for client in CLIENTS}
    for place, units in places.items():
        for name, command in units:
            service = _unit(tmp_path / place / f"{name}.service")["Service"]
            home = f"/opt/osfl/{Path(place).name}"
            assert (
                service["ExecStart"] == f"{home}/{command}" and service["WorkingDirectory"] == service["ReadWritePaths"] == home
            )
            assert (tmp_path / place / command.split()[0]).exists()
            assert service["ProtectSystem"] == "strict" and service["User"] == "osfl" and service["UMask"] == "0077"


def test_an_image_holds_the_package_and_no_key(tmp_path: Path) -> None:
    wheel = tmp_path / "osfl-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("osfl/__init__.py", "")
    deploy(PLAN, tmp_path / "out", HOST, 9000, wheel=wheel, services=True)
    for folder in (tmp_path / "out" / "coordinator", *(tmp_path / "out" / "sites" / client for client in CLIENTS)):
        text = (folder / "Containerfile").read_text()
        assert [line for line in text.splitlines() if line.startswith("COPY")] == [f"COPY {wheel.name} /tmp/"]
        for name in (".containerignore", ".dockerignore"):  # everything stays out of the build but the wheel
            assert [line for line in (folder / name).read_text().splitlines() if line[0] != "#"] == ["*", "!osfl-*.whl"]
    assert "-p 9000:9000" in (tmp_path / "out" / "coordinator" / "Containerfile").read_text()
    assert "/srv/images:/images:ro" in (tmp_path / "out" / "sites" / CLIENTS[0] / "Containerfile").read_text()


def test_without_the_flag_there_are_none(tmp_path: Path) -> None:
    deploy(PLAN, tmp_path, HOST)
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".service" or path.name == "Containerfile"]


def _rsa_authority(folder: Path, days: int = 100, ca: bool = True) -> Path:
    """As an institution has it: RSA, made elsewhere."""
    folder.mkdir()
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "Hospital CA")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - datetime.timedelta(days=900))
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    (folder / "ca.crt").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / "ca.key").write_bytes(pem)
    return folder


def test_an_authority_of_ones_own_signs_and_keeps_its_key(tmp_path: Path) -> None:
    authority, out = _rsa_authority(tmp_path / "ca"), tmp_path / "out"
    deploy(PLAN, out, HOST, authority=authority)
    certificate = x509.load_pem_x509_certificate((out / "coordinator" / "tls" / "server.pem").read_bytes())
    signer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    public = signer.public_key()
    assert isinstance(public, rsa.RSAPublicKey) and certificate.signature_hash_algorithm is not None
    public.verify(
        certificate.signature, certificate.tbs_certificate_bytes, padding.PKCS1v15(), certificate.signature_hash_algorithm
    )
    assert certificate.issuer == signer.subject
    secret = (authority / "ca.key").read_bytes()
    assert not [path for path in out.rglob("*") if path.is_file() and path.read_bytes() == secret]
    assert all((out / "sites" / client / "ca.crt").read_bytes() == (authority / "ca.crt").read_bytes() for client in CLIENTS)
    deploy(PLAN, out, HOST)  # again, without it: nothing has to be signed
    with pytest.raises(UsageError, match="has to be made again") as caught:
        deploy(PLAN, out, "other.example")
    assert "--authority" in str(caught.value.fix)
    deploy(PLAN, out, "other.example", authority=authority)


@pytest.mark.parametrize("wrong", ["nothing", "expired", "no authority", "another key", "a password"])
def test_an_authority_that_cannot_sign(tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "ca"
    if wrong == "nothing":
        folder.mkdir()
    else:
        _rsa_authority(folder, days=-1 if wrong == "expired" else 100, ca=wrong != "no authority")
    other = make_authority("other", 10)
    if wrong == "another key":
        (folder / "ca.key").unlink()
        write_private(folder / "ca.key", private_pem(other.key))
    if wrong == "a password":
        secret = serialization.BestAvailableEncryption(b"x")
        pem = other.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
        (folder / "ca.key").write_bytes(pem)
    with pytest.raises(UsageError, match="--authority: "):
        deploy(PLAN, tmp_path / "out", HOST, authority=folder)
    assert not (tmp_path / "out").exists()


def test_sites_that_trust_one_authority_are_not_given_another(tmp_path: Path) -> None:
    deploy(PLAN, tmp_path / "out", HOST)
    with pytest.raises(UsageError, match="trust another authority already"):
        deploy(PLAN, tmp_path / "out", HOST, authority=_rsa_authority(tmp_path / "ca"))


def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(write_plan(PLAN))
    command = ["deploy", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out"), "--host", HOST, "--services"]
    assert answer([*command, "--authority", str(_rsa_authority(tmp_path / "ca"))]) == 0
    assert (tmp_path / "out" / "coordinator" / "osfl-superlink.service").exists()


def test_the_instructions_name_units_and_the_small_torch(tmp_path: Path) -> None:
    """`--services` used to print the same text as without it."""
    deploy(PLAN, tmp_path, HOST)
    assert "whl/cpu" in (tmp_path / "README.txt").read_text() and "systemd" not in (tmp_path / "README.txt").read_text()
    deploy(PLAN, tmp_path, HOST, services=True)
    assert "a systemd unit (*.service) and a Containerfile are in each folder" in (tmp_path / "README.txt").read_text()
