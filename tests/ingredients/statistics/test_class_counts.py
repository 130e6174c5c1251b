"""Counts that an upload tells, and those that it does not."""

import pytest

from osfl.core.errors import RoundError
from osfl.ingredients.statistics.class_counts import facts_without, reported_counts


def test_a_client_that_does_not_tell_is_named() -> None:
    assert reported_counts({"class_counts": [3, 0]}, "north") == [3, 0]
    with pytest.raises(RoundError) as error:
        reported_counts({"samples": 3}, "north")
    assert (error.value.client, error.value.field) == ("north", "facts.class_counts")


def test_facts_without_a_class() -> None:
    reported = facts_without({"class_counts": [3, 2], "samples": 5, "encoder": "x"}, 0)
    assert reported == {"class_counts": [0, 2], "samples": 2, "encoder": "x"}
    assert facts_without({"class_counts": [9, 9], "samples": 1}, 0)["samples"] == 9  # odd before, right afterwards
    assert facts_without({"samples": 4}, 0) == {"samples": 4}
