"""The section of a report about synthetic features: distance to real ones, and the reconstruction attack."""

from __future__ import annotations

from osfl.core.result import ClassOfTokens, Reconstruction, Result
from osfl.reports.figures import figure_views
from osfl.reports.text import NOTHING, count, decimal

_SOURCES = {
    "real": "real features, against its own image",
    "real_best": "real features, best match",
    "synthetic": "synthetic features, best match",
    "blind": "no features: the class' mean image, best match",
    "real_by_original": "real features: the best of all for each training image",
    "synthetic_by_original": "synthetic features: the best of all for each training image",
}


def tokens_section(result: Result) -> dict[str, object]:
    """What the template shows; nothing where the method showed no synthetic features."""
    found, attacked = result.get("tokens"), result.get("reconstruction")
    if found is None:
        return {"tokens": None}
    shape = " × ".join(count(side) for side in found["shape"])
    hint = (
        f"MMD is the squared maximum mean discrepancy of synthetic and training features ({shape} numbers an image, all in one "
        "vector), unbiased, with a Gaussian kernel whose width is the median distance of training features; in brackets the "
        "floor, the same between held-out and training features. 0 is the same distribution; it may be a little below."
    )
    rows = [_row(name, row) for name, row in found["classes"].items()]
    view: dict[str, object] = {"hint": hint, "rows": [*rows, _row("All classes", found["overall"])], "attack": None}
    if attacked is not None:
        view["attack"] = {
            "hint": _attack_hint(attacked),
            "rows": attack_rows(attacked),
            "figures": figure_views(attacked["figures"]),
        }
    return {"tokens": view}


def _attack_hint(found: Reconstruction) -> str:
    side = f"{found['side']} × {found['side']} pixels"
    return (
        f"Decoders were trained for {count(found['steps'])} steps to turn features of the attacker's images back into images "
        f"of {side}, given the class. Best match: against the training image of the class that comes nearest. "
        "The best of all: for each training image the highest PSNR and the highest SSIM of all reconstructions. PSNR and SSIM "
        "are means; higher is more alike. Features of real images never leave a client; synthetic ones do. Where synthetic "
        "features give no better match than no features at all, this attack learned nothing from them; another one might."
    )


def attack_rows(found: Reconstruction) -> list[dict[str, str]]:
    return [
        {
            "attacker": f"{name} ({count(row['images'])})",
            "source": text,
            "psnr": decimal(row[key]["psnr"], 2),  # type: ignore[literal-required]
            "ssim": decimal(row[key]["ssim"], 3),  # type: ignore[literal-required]
        }
        for name, row in found["attackers"].items()
        for key, text in _SOURCES.items()
        if key in row
    ]


def attack_sentences(found: Reconstruction) -> list[str]:
    """For the model card."""
    return [
        f"Reconstruction by an attacker who has {row['attacker']}, from {row['source']}: PSNR {row['psnr']} dB, "
        f"SSIM {row['ssim']}"
        for row in attack_rows(found)
    ]


def _row(name: str, row: ClassOfTokens) -> dict[str, str]:
    return {
        "name": name,
        "synthetic": count(row["synthetic"]),
        "training": count(row["training"]),
        "compared": count(row["compared"]),
        "mmd": discrepancy(row["mmd"]),
        "floor": discrepancy(row["mmd_floor"]),
    }


def discrepancy(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"
