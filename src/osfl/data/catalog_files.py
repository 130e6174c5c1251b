"""Sheets of the embedded digits and of the prepared files that are looked for under OSFL_DATA."""

from __future__ import annotations

from osfl.data.catalog import File, Sheet

BLOOD = (
    "basophil",
    "eosinophil",
    "erythroblast",
    "immature granulocyte",
    "lymphocyte",
    "monocyte",
    "neutrophil",
    "platelet",
)
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PATIENTS = "Images of real patients, published without names. Not for clinical use; do not try to identify anyone."

DIGITS = Sheet(
    name="digits",
    title="Handwritten digits, 8 × 8 gray, inside scikit-learn (no file, no download)",
    source="Alpaydin, Kaynak: Optical Recognition of Handwritten Digits, UCI 1998 (test part)",
    license="CC BY 4.0",
    classes=tuple("0123456789"),
    counts={"train": 1346, "test": 451},
    native=(1, 8, 8),
    size=16,
    channels=1,
    layout="embedded",
    notes="Values 0..16 are scaled to 0..255. A quarter of each class is the test part, the same one for every seed.",
)

BLOODCELLS = Sheet(
    name="bloodcells-28",
    title="Peripheral blood cells, 28 px RGB: the images BloodMNIST is made from, with a split of their own",
    source="Acevedo et al., A dataset of microscopic peripheral blood cell images, Data in Brief 2020",
    license="CC BY 4.0",
    classes=BLOOD,
    counts={"train": 11965, "val": 1710, "test": 3417},
    native=(3, 28, 28),
    size=28,
    channels=3,
    layout="npz",
    files=(File("bloodcells-28.npz", sha256="f177523ad67c01d53170d7e79aedd7bb7faffac2e6cb9f0ebd87205b478269eb"),),
    notes="Not the official BloodMNIST split: do not compare with its tables digit for digit.",
    ethics="Cells of healthy donors. " + PATIENTS,
)

SKINLESIONS = Sheet(
    name="skinlesions-28",
    title="Pigmented skin lesions (HAM10000), 28 px RGB, split by lesion",
    source="Tschandl, Rosendahl, Kittler: The HAM10000 dataset, Scientific Data 2018",
    license="CC BY-NC 4.0 (non-commercial use only)",
    classes=("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"),
    counts={"train": 7017, "val": 1000, "test": 1998},
    native=(3, 28, 28),
    size=28,
    channels=3,
    layout="npz",
    files=(File("skinlesions-28.npz", sha256="2ee122ece6ab79803d6c94ecf2ec533b1d339faeda5becff7f28ea3c0bfb2d5f"),),
    notes="All pictures of a lesion are in the same part. Not the official DermaMNIST split.",
    ethics="Mostly light skin: results do not carry over to other skin tones. " + PATIENTS,
)

CIFAR = Sheet(
    name="cifar10-subset",
    title="CIFAR-10, balanced subset of 6,000 images",
    source="Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009",
    license="none stated; used for research",
    classes=CIFAR10,
    counts={"train": 5000, "test": 1000},
    native=(3, 32, 32),
    size=32,
    channels=3,
    layout="npz",
    files=(File("cifar10-subset.npz", sha256="64ef73801fccec3bd27fabbdc2edfd9ee703590eba5a943fb687bfe4769833be"),),
    notes="From a copy stored as JPEG: pixels differ slightly from the binary release.",
)

PACS = Sheet(
    name="pacs-subset",
    title="PACS, four visual domains, balanced subset",
    source="Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017",
    license="none stated; used for research",
    classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    counts={"all": 1120},
    native=(3, 227, 227),
    size=64,
    channels=3,
    layout="zip",
    files=(File("pacs-subset.zip", sha256="86954f6a15ff901e12af7368452dc8d8725099de21465d5742ac9b355ba65096"),),
    domains=("art_painting", "cartoon", "photo", "sketch"),
    notes="40 images a class and domain. A fifth of each class and domain is the test part.",
)

BRAIN = Sheet(
    name="brain-mri-subset",
    title="Brain tumour MRI slices, balanced subset",
    source="Nickparvar: Brain Tumor MRI Dataset (from Cheng et al., SARTAJ and Br35H)",
    license="CC0",
    classes=("glioma", "meningioma", "notumor", "pituitary"),
    counts={"train": 1600, "test": 400},
    native=(1, 224, 224),
    size=64,
    channels=1,
    layout="zip",
    files=(File("brain-mri-subset.zip", sha256="43d0bfa95137738f03571fa0209e88cb67bd2d255608348ae9aa1dc4da4426e9"),),
    notes="Always read as gray: whether a file is gray or RGB depends on its class and would give the answer away. "
    "19 training images are also in the test part, as in the original.",
    ethics="Patients are not identified, so slices of one patient may be in several parts. " + PATIENTS,
)

CHEST = Sheet(
    name="chest-xray-448-subset",
    title="Paediatric chest X-ray, normal or pneumonia, 448 px gray",
    source="Kermany et al., Identifying Medical Diagnoses and Treatable Diseases, Cell 2018",
    license="CC BY 4.0",
    classes=("normal", "pneumonia"),
    counts={"train": 600, "test": 624},
    native=(1, 448, 448),
    size=64,
    channels=1,
    layout="zip",
    files=(File("chest-xray-448-subset.zip", sha256="3e366edc96aba711a555d5ddd62e5c6cedc4308f546b1d65fbcc66bbf7e1a3b7"),),
    group="patient",
    group_pattern=r"(person\d+|IM-\d+)",
    notes="The official test part is whole. Validation splits keep the images of a patient together.",
    ethics="Children of one hospital. " + PATIENTS,
)

BLOODCELLS_360 = Sheet(
    name="bloodcells-360-subset",
    title="Peripheral blood cells at the original resolution, balanced subset",
    source=BLOODCELLS.source,
    license="CC BY 4.0",
    classes=("basophil", "eosinophil", "erythroblast", "ig", "lymphocyte", "monocyte", "neutrophil", "platelet"),
    counts={"all": 480},
    native=(3, 363, 360),
    size=64,
    channels=3,
    layout="zip",
    files=(File("bloodcells-360-subset.zip", sha256="4e0aa81b5172172fb11ffe4fd8fda47f3d66791b06bd80dce1798cd8261fe2e5"),),
    notes="60 images a class, a fifth of them the test part. The same images are in bloodcells-28.",
    ethics=BLOODCELLS.ethics,
)

SHEETS = (DIGITS, BLOODCELLS, SKINLESIONS, CIFAR, PACS, BRAIN, CHEST, BLOODCELLS_360)
