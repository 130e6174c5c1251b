"""Who may talk to the dashboard, without a network."""

import pytest

from osfl.core.errors import UsageError
from osfl.dashboard.guard import Guard, is_loopback, token_for


def test_other_hosts_than_this_machine_get_a_token() -> None:
    assert token_for("127.0.0.1", None) == token_for("localhost", None) == token_for("::1", None) == ""
    made = token_for("0.0.0.0", None)
    assert len(made) >= 32 and made != token_for("0.0.0.0", None)
    assert token_for("192.0.2.7", "a long enough token") == "a long enough token"
    for poor in ("", "short", "fifteen letters", "ä" * 20, "line\nbreak in a token"):
        with pytest.raises(UsageError, match="guess"):
            token_for("0.0.0.0", poor)


@pytest.mark.parametrize(
    ("host", "fine", "strange"),
    [
        ("127.0.0.1", ["127.0.0.1:80", "localhost:80", "[::1]:80"], ["192.0.2.7:80", "evil:80", "127.0.0.1", "127.0.0.1:8080"]),
        ("0.0.0.0", ["192.0.2.7:80", "10.0.0.1:80", "[2001:db8::1]:80"], ["evil.example:80", "192.0.2.7:81"]),
        (
            "dashboard.example",
            ["dashboard.example:80", "DASHBOARD.example:80"],
            ["evil.example:80", "dashboard.example.evil:80"],
        ),
    ],
)
def test_only_our_own_names(host: str, fine: list[str], strange: list[str]) -> None:
    guard = Guard(host, 80)
    assert all(guard.check("GET", "/", {"Host": name}) is None for name in fine)
    assert all((no := guard.check("GET", "/", {"Host": name})) and no.status == 421 for name in strange)


def test_secrets_differ_from_dashboard_to_dashboard() -> None:
    one, other = Guard("127.0.0.1", 80, "t" * 20), Guard("127.0.0.1", 80, "t" * 20)
    assert one.secret != other.secret and one.session == other.session  # a fixed token outlives a restart
    assert not Guard("127.0.0.1", 80).opens("")


def test_loopback() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("0.0.0.0") and not is_loopback("evil.localhost.example")
