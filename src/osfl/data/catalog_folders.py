"""Sheets of published image folders that their users download themselves, under the name of the folder.

What we could not look at is not stated: these have no hash here, so nobody checks that the images are the published ones.
Where a sheet has no classes, they are the names of the folders.
"""

from __future__ import annotations

from osfl.data.catalog import Sheet
from osfl.data.catalog_files import PACS as PACS_SUBSET
from osfl.data.catalog_files import PATIENTS

UNCHECKED = "Checksum: not known to us."
IMAGENET = "non-commercial research and education, as ImageNet's terms of access state"
OFFICEHOME = (
    "Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards Computer Couch "
    "Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder Fork Glasses Hammer Helmet "
    "Kettle Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug Notebook Oven Pan Paper_Clip Pen Pencil "
    "Postit_Notes Printer Push_Pin Radio Refrigerator Ruler Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon "
    "TV Table Telephone ToothBrush Toys Trash_Can Webcam"
)

PACS = Sheet(
    name="pacs",
    title="PACS, four visual domains of seven classes",
    source=PACS_SUBSET.source,
    license=PACS_SUBSET.license,
    classes=PACS_SUBSET.classes,
    counts={"all": 9991},
    native=PACS_SUBSET.native,
    size=224,
    channels=3,
    layout="folder",
    folders=("pacs", "PACS", "PACS/kfold"),
    domains=PACS_SUBSET.domains,
    notes=f"Expected: pacs/<domain>/<class>/*. {UNCHECKED}",
)

OFFICE_HOME = Sheet(
    name="officehome",
    title="Office-Home, objects of 65 classes in four visual domains",
    source="Venkateswara et al., Deep Hashing Network for Unsupervised Domain Adaptation, CVPR 2017",
    license="non-commercial research only",
    classes=tuple(OFFICEHOME.split()),
    counts={"all": 15588},
    native=(3, 224, 224),
    size=224,
    channels=3,
    layout="folder",
    folders=("officehome", "OfficeHome", "OfficeHomeDataset_10072016"),
    domains=("Art", "Clipart", "Product", "Real World"),
    notes=f"Expected: officehome/<domain>/<class>/*; files of different sizes, `native` is the usual input. {UNCHECKED}",
)

ISIC2019 = Sheet(
    name="isic2019",
    title="ISIC 2019, dermoscopic images of eight diagnoses (training part of the challenge)",
    source="Tschandl et al. 2018 (HAM10000); Codella et al. 2018; Hernández-Pérez et al. 2024 (BCN20000)",
    license="CC BY-NC 4.0 (non-commercial use only)",
    classes=("AK", "BCC", "BKL", "DF", "MEL", "NV", "SCC", "VASC"),
    counts={"all": 25331},
    native=(3, 1024, 1024),
    size=128,
    channels=3,
    layout="folder",
    folders=("isic2019",),
    notes="Expected: isic2019/<diagnosis>/*.jpg, sorted by the one column of 1 in ISIC_2019_Training_GroundTruth.csv; files of "
    f"different sizes. A lesion may have several images, and folders do not say which. {UNCHECKED}",
    ethics="Mostly light skin: results do not carry over to other skin tones. " + PATIENTS,
)

TUBERCULOSIS = Sheet(
    name="tuberculosis",
    title="Chest X-rays with and without tuberculosis, each collection a domain",
    source="Jaeger et al., Two public chest X-ray datasets, Quant. Imaging Med. Surg. 2014, and collections of your own",
    license="as each collection states",
    classes=("normal", "tuberculosis"),
    counts={"all": 800},
    native=(1, 3000, 3000),
    size=448,
    channels=1,
    layout="folder",
    folders=("tuberculosis",),
    notes="Expected: tuberculosis/<collection>/<normal|tuberculosis>/*, such as shenzhen (662 images) and montgomery (138), "
    f"whose file names end in _0 and _1. Which three collections FALCON used, we do not know. {UNCHECKED}",
    ethics=PATIENTS,
)

MINI_IMAGENET = Sheet(
    name="mini-imagenet",
    title="Mini-ImageNet, 600 photographs of each of 100 classes",
    source="Vinyals et al., Matching Networks for One Shot Learning, NeurIPS 2016; classes of Ravi and Larochelle 2017",
    license=IMAGENET,
    classes=(),
    counts={"all": 60000},
    native=(3, 84, 84),
    size=224,
    channels=3,
    layout="folder",
    folders=("mini-imagenet", "miniimagenet"),
    notes=f"Expected: mini-imagenet/<class>/*; all 100 classes in one place, since the usual parts share none. {UNCHECKED}",
)

TINY_IMAGENET = Sheet(
    name="tiny-imagenet",
    title="Tiny ImageNet, 550 photographs of each of 200 classes, 64 px",
    source="Le, Yang: Tiny ImageNet Visual Recognition Challenge, Stanford CS231N 2015",
    license=IMAGENET,
    classes=(),
    counts={"train": 100000, "test": 10000},
    native=(3, 64, 64),
    size=64,
    channels=3,
    layout="folder",
    folders=("tiny-imagenet", "tiny-imagenet-200"),
    notes="Expected: tiny-imagenet/train/<class>/* and tiny-imagenet/test/<class>/*. The archive has train/<class>/images/*, "
    "and its val/ becomes test/, sorted by val_annotations.txt; its own test/ has no labels. " + UNCHECKED,
)

SHEETS = (PACS, OFFICE_HOME, ISIC2019, TUBERCULOSIS, MINI_IMAGENET, TINY_IMAGENET)
