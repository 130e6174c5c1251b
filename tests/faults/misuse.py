"""TLS and node keys used wrongly, each tried with Flower's own client of the fleet, as a SuperNode uses it."""

from __future__ import annotations

import shutil
import socket
import ssl
import sys
import warnings
from pathlib import Path
from typing import Any

from osfl.deploy.flower.tls import load_authority, make_authority, make_node_key, make_server_certificate, private_pem
from tests.faults.machines import Machines, free_ports


def misuses(net: Machines) -> dict[str, str]:
    """What each of them hears; `accepted` if the SuperLink gave it an identity. Sites must be registered and not started."""
    good, site = f"127.0.0.1:{net.port}", net.folder / "sites" / "north"
    authority, key = (site / "ca.crt").read_bytes(), _key(site / "node.key")
    unknown = _key(_written(net.folder / "unknown.key", make_node_key()[0]))
    doors = {name: _door(net, name) for name in ("expired", "self-signed", "elsewhere")}
    for name, address in doors.items():
        net.wait_for(f"the door {name}", lambda address=address: _listens(address))  # type: ignore[misc]
    return {
        "another authority": try_node(good, make_authority("a stranger", 30).pem, key),
        "an expired certificate": try_node(doors["expired"], authority, key),
        "a self-signed certificate": try_node(doors["self-signed"], authority, key),
        "a name that is not in the certificate": try_node(doors["elsewhere"], authority, key),
        "plain HTTP to the TLS port": try_node(good, None, key),
        "an old version of TLS": try_old_tls(net),
        "no node key": try_node(good, authority, unknown, itself=True),
        "a node key that nobody registered": try_node(good, authority, unknown),
        "a registered key without its private half": try_node(good, authority, (unknown[0], key[1])),
        "a run submitted from outside": try_way(net, "/v1/control/start-run"),
        "a task taken from outside": try_way(net, "/v1/runtime/acquire-task"),
        "a node registered from outside": try_way(net, "/v1/control/register-node"),
        "a way out of the fleet": try_way(net, "/v1/fleet/../control/start-run"),
        "a page of the SuperLink": try_way(net, "/docs"),
        "none": try_node(good, authority, key),  # accepted, or the others show nothing
    }


def try_node(address: str, authority: bytes | None, key: tuple[Any, Any], itself: bool = False) -> str:
    """Ask for the identity of a node (`itself`: register it first) and give it back at once."""
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, RegisterNodeFleetRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    named: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(*key)]
    public = public_key_to_bytes(key[1])
    try:
        with FleetHttpClient.from_server_address(address, authority is None, authority, named) as client:
            if itself:
                client.RegisterNode(RegisterNodeFleetRequest(public_key=public))
            node = client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30.0)).node_id
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
            return "accepted"
    except httpx.HTTPStatusError as no:
        return f"HTTP {no.response.status_code} {no.response.text}"[:160]
    except httpx.TransportError as no:
        return f"{type(no).__name__}: {no}"[:160]


def try_way(net: Machines, path: str) -> str:
    """Something that only the coordinator's own machine may do, at the port that is open to the sites."""
    import httpx

    context = ssl.create_default_context(cafile=net.coordinator / "tls" / "ca.crt")
    output = httpx.post(f"https://127.0.0.1:{net.port}{path}", verify=context, content=b"")
    return "HTTP 403" if output.status_code == 403 else "accepted"


def try_old_tls(net: Machines) -> str:
    """TLS 1.1 at the port that is open to the sites, by a client that would take any certificate and cipher."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    try:
        with socket.create_connection(("127.0.0.1", net.port), 30) as plain, context.wrap_socket(plain):
            return "accepted"
    except (ssl.SSLError, ConnectionError) as no:
        return f"{type(no).__name__}: {no}"[:160]


def _door(net: Machines, name: str) -> str:
    """A door to the same SuperLink whose certificate is expired or signed by itself, or that is at another address."""
    tls = net.folder / name
    shutil.copytree(net.coordinator / "tls", tls)
    if name == "expired":
        pem, key = make_server_certificate(load_authority(tls / "ca.crt", tls / "ca.key"), ["127.0.0.1"], -1)
    elif name == "self-signed":
        alone = make_authority("127.0.0.1", 30)
        pem, key = alone.pem, private_pem(alone.key)
    else:
        pem, key = (tls / "server.pem").read_bytes(), (tls / "server.key").read_bytes()
    (tls / "server.pem").write_bytes(pem)
    (tls / "server.key").write_bytes(key)
    host, port = "127.0.0.2" if name == "elsewhere" else "127.0.0.1", free_ports(1)[0]
    where = ["--host", host, "--port", str(port), "--inner", str(net.inner), "--tls", str(tls)]
    net.start(f"door-{name}", [sys.executable, "-m", "osfl.deploy.flower.gateway", *where])
    return f"{host}:{port}"


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as knocking:
        return knocking.connect_ex((host, int(port))) == 0


def _key(path: Path) -> tuple[Any, Any]:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    text = path.read_bytes()
    private: Any = (load_ssh_private_key if b"OPENSSH" in text else load_pem_private_key)(text, None)
    return private, private.public_key()


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
