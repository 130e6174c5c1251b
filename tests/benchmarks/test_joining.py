"""Records that are filled on several machines: nothing committed is lost, nothing is counted twice, settings do not mix."""

from typing import Any

from benchmarks.joining import joined, lost
from osfl.evaluation.comparison import over

LABELS = ("local_only", "fol", "fedavg")


def row(date: str | None = None, settings: int = 1, **seeds: float) -> dict[str, Any]:
    """Made on a day; `seed0=0.5` and so on."""
    row = {
        "acc": over(seeds.values()),
        "settings": {"epochs": settings},
        "release_digests": {s: f"{v}" for s, v in seeds.items()},
        "own_by_encounter": {"1": list(seeds.values())},
    }
    return {**row, "date": date} if date else row


def record(methods: dict[str, Any], digest: str = "d", date: str = "2026-01-01", pairs: tuple[Any, ...] = ()) -> dict[str, Any]:
    pairs = tuple({"method": one, "reference": other, "ratio": ratio} for one, other, ratio in pairs)
    made = {"data": {"digest": digest}, "date": date, "methods": methods, "equal_accuracy": list(pairs)}
    return {**made, "simulation": "osfl run"}


def test_rows_without_a_run_here_stay_and_say_when_they_were_made() -> None:
    old = record({"fol": row(seed0=0.5, seed1=0.6), "gone": row(seed0=0.1)})
    new = record({"local_only": row("2026-02-02", seed0=0.3)}, date="2026-02-02")
    found = joined(old, new, LABELS)
    assert list(found["methods"]) == ["local_only", "fol"]  # in the order of the grid; what the grid dropped is dropped
    assert found["methods"]["fol"] == {**old["methods"]["fol"], "date": "2026-01-01"}
    assert found["methods"]["local_only"]["date"] == "2026-02-02" == found["date"]


def test_seeds_of_one_row_come_together_once_each_in_order() -> None:
    old = record({"fol": row(seed0=0.5, seed2=0.7)})
    new = record({"fol": row("2026-02-02", seed1=0.6, seed2=0.9)})
    fol = joined(old, new, LABELS)["methods"]["fol"]
    assert fol["acc"]["values"] == [0.5, 0.6, 0.9] and fol["acc"]["n"] == 3 and abs(fol["acc"]["mean"] - 2 / 3) < 1e-12
    assert fol["release_digests"] == {"seed0": "0.5", "seed1": "0.6", "seed2": "0.9"}
    assert fol["own_by_encounter"] == {"1": [0.5, 0.6, 0.9]} and fol["date"] == "2026-02-02"


def test_other_settings_or_other_images_never_mix() -> None:
    old = record({"fol": row(seed0=0.5), "fedavg": row(seed0=0.2)})
    changed = record({"fol": row("2026-02-02", settings=2, seed1=0.6)})
    assert joined(old, changed, LABELS)["methods"]["fol"] == changed["methods"]["fol"]
    elsewhere = record({"fol": row("2026-02-02", seed1=0.6)}, digest="other")
    assert joined(old, elsewhere, LABELS) == elsewhere
    assert joined({}, elsewhere, LABELS) == elsewhere  # the first record of a cell
    exchange = {**record({"fol": row("2026-02-02", seed1=0.6)}), "simulation": "osfl run --encounters 3"}
    assert joined(old, exchange, LABELS) == exchange
    earlier = {key: value for key, value in old.items() if key not in ("simulation", "equal_accuracy")}  # did not say either
    assert list(joined(earlier, record({"fol": row("2026-02-02", seed1=0.6)}), LABELS)["methods"]) == ["fol", "fedavg"]


def test_equal_accuracy_is_that_of_the_runs_at_hand_and_else_stays() -> None:
    old = record(
        {"fol": row(seed0=0.5), "fedavg": row(seed0=0.2), "local_only": row(seed0=0.2)},
        pairs=(("fol", "fedavg", 1), ("local_only", "fedavg", 2)),
    )
    new = record({"fol": row("2026-02-02", seed0=0.6)})
    pairs = joined(old, new, LABELS)["equal_accuracy"]
    assert [(pair["method"], pair["ratio"]) for pair in pairs] == [("local_only", 2)]  # fol's accuracy is not what it was
    again = record({"fol": row("2026-02-02", seed0=0.6), "fedavg": row("2026-02-02", seed0=0.2)}, pairs=(("fol", "fedavg", 3),))
    assert [pair["ratio"] for pair in joined(old, again, LABELS)["equal_accuracy"]] == [3]


def test_rows_that_would_go_are_named() -> None:
    old = record({"fol": row(seed0=0.5, seed1=0.6), "fedavg": row(seed0=0.2)})
    elsewhere = record({"fol": row("2026-02-02", seed0=0.6)}, digest="another start")
    assert lost(old, joined(old, elsewhere, LABELS)) == ["fol", "fedavg"]
    assert lost(old, joined(old, record({"local_only": row(seed0=0.3)}), LABELS)) == [] == lost({}, elsewhere)
    whole = record({"fol": row(seed0=0.6, seed1=0.7), "fedavg": row(seed0=0.1)}, digest="another start")
    assert lost(old, joined(old, whole, LABELS)) == []
