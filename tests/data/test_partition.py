"""Partitions: no image twice, none lost, the same every time, and the statistics that their names promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osfl.core.errors import DataError, OsflError, UsageError
from osfl.core.seeds import numpy_generator
from osfl.data import assign, domain_clients, parse_partition
from osfl.data.draws import client_sizes

LABELS = np.repeat(np.arange(10), 200)


@pytest.mark.parametrize(
    "text", ["iid", "dirichlet:0.1", "dirichlet-client:0.3", "dirichlet-client:0.3:0.5", "classes:3", "silos", "domains"]
)
def test_a_partition_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_partition(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dir:0.1",
        "dirichlet",
        "dirichlet:",
        "dirichlet:x",
        "dirichlet:0",
        "dirichlet:-1",
        "dirichlet:nan",
        "dirichlet:inf",
        "dirichlet:1:2",
        "classes",
        "classes:0",
        "classes:1.5",
        "silos:3",
        "iid:1",
        "dirichlet-client",
        "dirichlet-client:1:0",
    ],
)
def test_a_mistake_is_answered_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match=r"dirichlet:0\.1, dirichlet-client:0\.3, classes:3, silos"):
        parse_partition(text)


SPECS = st.one_of(
    st.just("iid"),
    st.sampled_from(["dirichlet:0.05", "dirichlet:0.1", "dirichlet:1", "dirichlet:100"]),
    st.sampled_from(["dirichlet-client:0.01", "dirichlet-client:0.1", "dirichlet-client:1:0.7"]),
    st.integers(1, 6).map("classes:{}".format),
    st.just("silos"),
)


@settings(max_examples=60, deadline=None)
@given(SPECS, st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(1, 12), st.integers(0, 2**40))
def test_every_image_has_exactly_one_client(spec: str, labels: list[int], clients: int, seed: int) -> None:
    try:
        drawn = assign(spec, np.array(labels), clients, seed)
    except OsflError:
        return  # too few images or classes for that many clients is refused, never half done
    together = np.concatenate(list(drawn.values()))
    assert sorted(together.tolist()) == list(range(len(labels)))
    assert len(drawn) == clients and min(len(part) for part in drawn.values()) > 0
    again = assign(spec, np.array(labels), clients, seed)
    assert all(np.array_equal(drawn[name], again[name]) for name in drawn)
    assert list(drawn) == sorted(drawn)


def test_seeds_differ_and_names_are_padded() -> None:
    first, second = assign("iid", LABELS, 12, 0), assign("iid", LABELS, 12, 1)
    assert not np.array_equal(first["client-01"], second["client-01"])
    assert list(first)[:2] == ["client-01", "client-02"] and list(first)[-1] == "client-12"
    assert next(iter(assign("iid", LABELS, 100, 0))) == "client-001"


def test_iid_shares_are_equal() -> None:
    assert {len(part) for part in assign("iid", LABELS, 7, 0).values()} <= {285, 286}


def _class_share_variance(alpha: float, clients: int) -> float:
    shares = []
    for seed in range(40):
        drawn = assign(f"dirichlet:{alpha}", LABELS, clients, seed, min_size=1)
        shares += [np.bincount(LABELS[part], minlength=10) / 200 for part in drawn.values()]
    return float(np.var(np.concatenate(shares)))


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
def test_dirichlet_has_the_variance_of_its_concentration(alpha: float) -> None:
    n = 5
    expected = (1 / n) * (1 - 1 / n) / (n * alpha + 1)  # Var of one coordinate of Dir(alpha · 1_n)
    assert _class_share_variance(alpha, n) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_leaves_no_client_below_ten(seed: int) -> None:
    assert min(len(part) for part in assign("dirichlet:0.1", LABELS, 10, seed).values()) >= 10


def test_dirichlet_takes_the_best_draw_where_the_least_is_out_of_reach_and_says_when_nothing_is() -> None:
    crowded = assign("dirichlet:0.1", LABELS, 25, 0, min_size=40)
    assert 2 <= min(len(part) for part in crowded.values()) < 40
    with pytest.raises(DataError, match="without images"):
        assign("dirichlet:0.000001", LABELS, 20, 0)


def test_balance_cap_keeps_the_largest_client_small() -> None:
    free = [max(map(len, assign("dirichlet:0.1", LABELS, 5, s).values())) for s in range(10)]
    capped = [max(map(len, assign("dirichlet:0.1", LABELS, 5, s, balance_cap=True).values())) for s in range(10)]
    assert np.mean(capped) < np.mean(free) and max(capped) < 2 * len(LABELS) / 5 + 200


def test_dirichlet_per_client_has_the_sizes_it_was_given() -> None:
    assert {len(part) for part in assign("dirichlet-client:0.1", LABELS, 5, 0).values()} == {400}
    sizes = [len(part) for part in assign("dirichlet-client:0.1:1", LABELS, 5, 0).values()]
    assert len(set(sizes)) > 1 and min(sizes) >= 10
    drawn = client_sizes(100_000, 2000, 0.5, numpy_generator(0, "sizes"), 0)
    assert np.std(np.log(drawn)) == pytest.approx(0.5, rel=0.1) and drawn.sum() == 100_000


def test_k_classes_each_and_every_class_somewhere() -> None:
    for seed in range(20):
        drawn = assign("classes:3", LABELS, 4, seed)
        held = [set(LABELS[part].tolist()) for part in drawn.values()]
        assert all(len(classes) == 3 for classes in held) and set.union(*held) == set(range(10))
        for value in range(10):
            counts = [int((LABELS[part] == value).sum()) for part in drawn.values()]
            assert max(counts) - min(c for c in counts if c) <= 1
    with pytest.raises(UsageError, match="between 3 and 10"):
        assign("classes:2", LABELS, 4, 0)


def test_silos_name_both_counts() -> None:
    assert [set(LABELS[part].tolist()) for part in assign("silos", LABELS, 10, 0).values()] == [{c} for c in range(10)]
    assert len(assign("silos", LABELS, None, 0)) == 10
    with pytest.raises(UsageError, match="5 clients do not fit 10 classes"):
        assign("silos", LABELS, 5, 0)


def test_domains_are_clients() -> None:
    domains = np.array(["Art Painting", "photo"] * 1000)
    drawn = assign("domains", LABELS, None, 0, domains)
    assert list(drawn) == ["art-painting", "photo"] and len(drawn["photo"]) == 1000
    assert domain_clients(["A b", "a-b", "A_B", "ß"]).keys() == {"A b", "a-b", "A_B", "ß"}
    assert len(set(domain_clients(["A b", "a-b", "A_B", "ß"]).values())) == 4
    with pytest.raises(UsageError, match="2 domains"):
        assign("domains", LABELS, 3, 0, domains)
    with pytest.raises(UsageError, match="no domains"):
        assign("domains", LABELS, None, 0)


@pytest.mark.parametrize("clients", [None, 0, -1])
def test_a_number_of_clients_is_needed(clients: int | None) -> None:
    with pytest.raises(UsageError, match="number of clients"):
        assign("iid", LABELS, clients, 0)
    with pytest.raises(DataError, match="cannot be shared by 5 clients"):
        assign("iid", np.zeros(3, np.int64), 5, 0)
