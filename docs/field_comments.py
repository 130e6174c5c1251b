"""A Griffe extension: the comment beside a field of a dataclass is its description in the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

COMMENT = re.compile(r"\s#\s(.*)$")


class FieldComments(griffe.Extension):
    """`seed: int = 0  # of all draws` is shown with "of all draws"."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.source and (found := COMMENT.search(attr.source.splitlines()[-1])):
            attr.docstring = griffe.Docstring(found[1], parent=attr)
