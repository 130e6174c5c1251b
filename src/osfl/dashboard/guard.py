"""Access control of the dashboard: requests must come from its own pages, under its own name, and with the token.

Three attackers are meant: a web page in the coordinator's browser that sends requests here (cross-site requests), one that gave
its own name our address (DNS rebinding, so the Host header is checked), and others on the network (the token).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from osfl.core.errors import UsageError

HEADER = "X-OSFL-Dashboard"  # a page of another site cannot send it without asking first, and we never answer such questions
LEAST_TOKEN = 16


@dataclass(frozen=True)
class No:
    """Why a request is refused."""

    status: int
    reason: str
    login: bool = False  # the token is missing: show the page that asks for it


@dataclass(frozen=True)
class Guard:
    host: str
    port: int
    token: str = ""  # empty: anybody on this machine
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # in our pages only: proves that they sent a request

    @property
    def cookie_name(self) -> str:
        return f"osfl-dashboard-{self.port}"  # cookies are shared between the ports of a machine

    @property
    def session(self) -> str:
        """What a browser keeps instead of the token."""
        return hmac.new(self.token.encode(), b"osfl dashboard session", hashlib.sha256).hexdigest()

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> No | None:
        """None if the request may be answered."""
        host = headers.get("Host") or ""
        if not self._is_ours(host):
            return No(421, "this address is not the dashboard's; open it as it was printed when the dashboard started")
        if not _from_ourselves(method, headers, host):
            return No(403, "this request comes from another page")
        if path == "/login":
            return None if method == "POST" and headers.get(HEADER) else No(404, "there is nothing here")
        if not self._is_known(headers):
            return No(401, "the token is missing", login=True)
        if method == "POST" and not hmac.compare_digest((headers.get(HEADER) or "").encode(), self.secret.encode()):
            return No(403, "this page is older than the dashboard; load it again")
        return None

    def opens(self, token: str) -> bool:
        return bool(self.token) and hmac.compare_digest(token.encode(), self.token.encode())

    def _is_known(self, headers: Mapping[str, str]) -> bool:
        if not self.token:
            return True
        try:
            kept = SimpleCookie(headers.get("Cookie") or "").get(self.cookie_name)
        except CookieError:
            return False
        return kept is not None and hmac.compare_digest(kept.value.encode(), self.session.encode())

    def _is_ours(self, header: str) -> bool:
        name, _, port = header.rpartition(":")
        if port != str(self.port):
            return False
        name = name.strip("[]").lower()
        if is_loopback(self.host):
            return name in ("127.0.0.1", "localhost", "::1", self.host)
        # A name that somebody else may point here is refused; addresses, and what this machine calls itself, are not.
        return is_address(name) or name in {self.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}


def _from_ourselves(method: str, headers: Mapping[str, str], host: str) -> bool:
    """As far as the browser reports it: it names the page that asks (Origin) and how near it is (Sec-Fetch-Site)."""
    origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site", "none")
    if origin is not None and origin != f"http://{host}":
        return False
    followed = method == "GET" and headers.get("Sec-Fetch-Mode") == "navigate"  # a link may lead here; it reads nothing
    return site in ("none", "same-origin") or followed


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def token_for(host: str, token: str | None) -> str:
    """The token that this host needs: generated where none was given; on this machine itself none is needed."""
    if token is None:
        return "" if is_loopback(host) else secrets.token_urlsafe(32)
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"the token is too easy to guess: it needs {LEAST_TOKEN} or more plain characters",
            field="token",
            fix="Leave --token out, and a good one is made and printed.",
        )
    return token
