"""Which methods ask for the site's images after the round: only those that read them with these settings."""

import pytest

from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Task


@pytest.mark.parametrize(
    ("method", "changes", "needed"),
    [
        ("fedavg", {}, False),
        ("ensemble", {}, False),
        ("ensemble", {"personalize": "prior"}, True),
        ("fedcgs", {}, False),
        ("fedcgs", {"personal": "true"}, True),
        ("fedcgs", {"personalize": "prior"}, True),
        ("onesum", {"prior": "global"}, False),
        ("onesum", {"prior": "site"}, True),
        ("fedbicross", {}, True),
    ],
)
def test_images_are_asked_for_only_where_they_are_read(method: str, changes: dict[str, str], needed: bool) -> None:
    cls = load(method)
    settings = resolve_settings(cls, "smoke", changes)
    assert cls(Task("cells", ("a", "b"), (1, 8, 8)), settings).needs_images_after_round() is needed
