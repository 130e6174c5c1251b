"""Sheets of the twelve official MedMNIST 2D datasets, at 28, 64, 128 and 224 pixels.

Classes, counts, licenses and md5 sums are those published in the `info.py` of medmnist 3.0.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from osfl.data.catalog import File, Sheet

RECORD = "https://zenodo.org/records/10519652/files"
PAPER = "Yang et al., MedMNIST v2, Scientific Data 2023"
ETHICS = "Images of real patients, published without names. Not for clinical use; do not try to identify anyone."
BLOOD = (
    "basophil",
    "eosinophil",
    "erythroblast",
    "immature granulocytes",
    "lymphocyte",
    "monocyte",
    "neutrophil",
    "platelet",
)
ORGANS = (
    "bladder",
    "femur-left",
    "femur-right",
    "heart",
    "kidney-left",
    "kidney-right",
    "liver",
    "lung-left",
    "lung-right",
    "pancreas",
    "spleen",
)


@dataclass(frozen=True)
class Entry:
    """One dataset at all its sizes."""

    name: str
    what: str
    classes: tuple[str, ...]
    counts: tuple[int, int, int]  # train, val, test
    channels: int
    md5: tuple[str, str, str, str]  # of the files of 28, 64, 128 and 224 pixels
    license: str = "CC BY 4.0"
    also: str = ""  # sha256 of another file of the same content that we accept
    notes: str = ""


ENTRIES = (
    Entry(
        "pathmnist",
        "colon pathology",
        (
            "adipose",
            "background",
            "debris",
            "lymphocytes",
            "mucus",
            "smooth muscle",
            "normal colon mucosa",
            "cancer-associated stroma",
            "colorectal adenocarcinoma epithelium",
        ),
        (89996, 10004, 7180),
        3,
        (
            "a8b06965200029087d5bd730944a56c1",
            "55aa9c1e0525abe5a6b9d8343a507616",
            "ac42d08fb904d92c244187169d1fd1d9",
            "2c51a510bcdc9cf8ddb2af93af1eadec",
        ),
    ),
    Entry(
        "chestmnist",
        "chest X-ray, 14 findings",
        (
            "atelectasis",
            "cardiomegaly",
            "effusion",
            "infiltration",
            "mass",
            "nodule",
            "pneumonia",
            "pneumothorax",
            "consolidation",
            "edema",
            "emphysema",
            "fibrosis",
            "pleural",
            "hernia",
        ),
        (78468, 11219, 22433),
        1,
        (
            "02c8a6516a18b556561a56cbdd36c4a8",
            "9de6cd0b934ebb5b7426cfba5efbae16",
            "db107e5590b27930b62dbaf558aebee3",
            "45bd33e6f06c3e8cdb481c74a89152aa",
        ),
        notes="Multi-label: an image can show several findings, or none; methods of one class an image refuse it.",
    ),
    Entry(
        "dermamnist",
        "skin lesions (HAM10000)",
        (
            "actinic keratoses and intraepithelial carcinoma",
            "basal cell carcinoma",
            "benign keratosis-like lesions",
            "dermatofibroma",
            "melanoma",
            "melanocytic nevi",
            "vascular lesions",
        ),
        (7007, 1003, 2005),
        3,
        (
            "0744692d530f8e62ec473284d019b0c7",
            "b70a2f5635c6199aeaa28c31d7202e1f",
            "2defd784463fa5243564e855ed717de1",
            "8974907d8e169bef5f5b96bc506ae45d",
        ),
        license="CC BY-NC 4.0 (non-commercial use only)",
        notes="Pictures of one lesion may be in several parts; skinlesions-28 is split by lesion.",
    ),
    Entry(
        "octmnist",
        "retinal OCT",
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
        (97477, 10832, 1000),
        1,
        (
            "c68d92d5b585d8d81f7112f81e2d0842",
            "e229e9440236b774d9f0dfef9d07bdaf",
            "0a97e76651ace45c5d943ee3f65b63ae",
            "abc493b6d529d5de7569faaef2773ba3",
        ),
    ),
    Entry(
        "pneumoniamnist",
        "paediatric chest X-ray",
        ("normal", "pneumonia"),
        (4708, 524, 624),
        1,
        (
            "28209eda62fecd6e6a2d98b1501bb15f",
            "8f4eceb4ccffa70c672198ea285246c6",
            "05b46931834c231683c68f40c47b2971",
            "d6a3c71de1b945ea11211b03746c1fe1",
        ),
        also="d0bfa3330f26554c4117328b1117f52bfb3746404b0594c58f37a09b4314d396",
        notes="A reassembled file with the same images in another order is accepted too.",
    ),
    Entry(
        "retinamnist",
        "fundus photographs, retinopathy grade",
        ("grade 0", "grade 1", "grade 2", "grade 3", "grade 4"),
        (1080, 120, 400),
        3,
        (
            "bd4c0672f1bba3e3a89f0e4e876791e4",
            "afda852cc34dcda56f86ad2b2457dbcc",
            "e48e916a24454daf90583d4e6efb1a18",
            "eae7e3b6f3fcbda4ae613ebdcbe35348",
        ),
        also="254915f5f0a2074665c4676356824cf4ef4a3bcab233894b4bafcaf48962bd69",
        notes="Ordinal grades, treated as classes.",
    ),
    Entry(
        "breastmnist",
        "breast ultrasound",
        ("malignant", "normal, benign"),
        (546, 78, 156),
        1,
        (
            "750601b1f35ba3300ea97c75c52ff8f6",
            "742edef2a1fd1524b2efff4bd7ba9364",
            "363e4b3f8d712e9b5de15470a2aaadf1",
            "b56378a6eefa9fed602bb16d192d4c8b",
        ),
    ),
    Entry(
        "bloodmnist",
        "blood cells under the microscope",
        BLOOD,
        (11959, 1712, 3421),
        3,
        (
            "7053d0359d879ad8a5505303e11de1dc",
            "2b94928a2ae4916078ca51e05b6b800b",
            "adace1e0ed228fccda1f39692059dd4c",
            "b718ff6835fcbdb22ba9eacccd7b2601",
        ),
    ),
    Entry(
        "tissuemnist",
        "kidney cortex cells",
        (
            "collecting duct, connecting tubule",
            "distal convoluted tubule",
            "glomerular endothelial cells",
            "interstitial endothelial cells",
            "leukocytes",
            "podocytes",
            "proximal tubule segments",
            "thick ascending limb",
        ),
        (165466, 23640, 47280),
        1,
        (
            "ebe78ee8b05294063de985d821c1c34b",
            "123ece2eba09d0aa5d698fda57103344",
            "61b955355d7425a89687b06cca3ce0c2",
            "b077128c4a949f0a4eb01517f9037b9c",
        ),
    ),
    Entry(
        "organamnist",
        "abdominal CT, axial",
        ORGANS,
        (34561, 6491, 17778),
        1,
        (
            "68e3f8846a6bd62f0c9bf841c0d9eacc",
            "2dcccc29b88e6da5a01161ef20cda288",
            "eeae80d0a227a8d099027e1b3cfd3b60",
            "50747347e05c87dd3aaf92c49f9f3170",
        ),
    ),
    Entry(
        "organcmnist",
        "abdominal CT, coronal",
        ORGANS,
        (12975, 2392, 8216),
        1,
        (
            "b9ceb9546e10131b32923c5bbeaea2b1",
            "3ce34a8724ea6f548e6db4744d03b6a9",
            "773c1f009daa3fe5d9a2a201b2a7ed94",
            "050f5e875dc056f6768abf94ec9995d1",
        ),
    ),
    Entry(
        "organsmnist",
        "abdominal CT, sagittal",
        ORGANS,
        (13932, 2452, 8827),
        1,
        (
            "9ab87b696fb54e2a387ebe992d6ed5f1",
            "53a6d115339d874c25e309a994ff46d3",
            "ded0c5fa01a95dc4978b956f613e9b8e",
            "b354719e553fbbb2513d5533f52a4cb1",
        ),
    ),
)


def _sheet(entry: Entry, size: int, md5: str) -> Sheet:
    name = entry.name if size == 28 else f"{entry.name}_{size}"
    file = f"{name}.npz"
    train, val, test = entry.counts
    return Sheet(
        name=name,
        title=f"MedMNIST: {entry.what}, {size} px",
        source=PAPER,
        license=entry.license,
        classes=entry.classes,
        counts={"train": train, "val": val, "test": test},
        native=(entry.channels, size, size),
        size=size,
        channels=entry.channels,
        layout="npz",
        files=(File(file, f"{RECORD}/{file}?download=1", md5, entry.also if size == 28 else ""),),
        notes=entry.notes,
        ethics=ETHICS,
    )


SHEETS = tuple(
    _sheet(entry, size, md5)
    for size, column in ((28, 0), (64, 1), (128, 2), (224, 3))
    for entry in ENTRIES
    for md5 in (entry.md5[column],)
)
