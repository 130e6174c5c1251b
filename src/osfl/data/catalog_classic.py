"""Sheets of the usual benchmark files: Fashion-MNIST, CIFAR-10, CIFAR-100, SVHN.

Hashes are those on the publishers' pages. CIFAR is read from the binary version: the Python version is pickled.
"""

from __future__ import annotations

from osfl.data.catalog import File, Sheet
from osfl.data.catalog_files import CIFAR10

FASHION_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
CIFAR_URL = "https://www.cs.toronto.edu/~kriz"
SVHN_URL = "http://ufldl.stanford.edu/housenumbers"
TORONTO = "Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009"

CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail "
    "snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout "
    "tulip turtle wardrobe whale willow_tree wolf woman worm"
)


def _fashion_file(name: str, md5: str) -> File:
    return File(name, f"{FASHION_URL}/{name}", md5)


FASHION = Sheet(
    name="fashion-mnist",
    title="Fashion-MNIST, articles of clothing, 28 px gray",
    source="Xiao, Rasul, Vollgraf: Fashion-MNIST, 2017 (Zalando Research)",
    license="MIT",
    classes=(
        "t-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
    counts={"train": 60000, "test": 10000},
    native=(1, 28, 28),
    size=28,
    channels=1,
    layout="idx",
    files=(
        _fashion_file("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        _fashion_file("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        _fashion_file("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        _fashion_file("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    folders=("fashion-mnist", "FashionMNIST/raw"),
    notes="On Debian and Ubuntu: apt install dataset-fashion-mnist (same images, packed again, so other hashes).",
)

CIFAR_10 = Sheet(
    name="cifar10",
    title="CIFAR-10, 60,000 small photographs",
    source=TORONTO,
    license="none stated; used for research",
    classes=CIFAR10,
    counts={"train": 50000, "test": 10000},
    native=(3, 32, 32),
    size=32,
    channels=3,
    layout="cifar10",
    files=(File("cifar-10-binary.tar.gz", f"{CIFAR_URL}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    folders=("cifar-10-batches-bin",),
    notes="The binary version, as archive or unpacked; the Python version is pickled and never read.",
)

CIFAR_100 = Sheet(
    name="cifar100",
    title="CIFAR-100, 60,000 small photographs in 100 fine classes",
    source=TORONTO,
    license="none stated; used for research",
    classes=tuple(CIFAR100.split()),
    counts={"train": 50000, "test": 10000},
    native=(3, 32, 32),
    size=32,
    channels=3,
    layout="cifar100",
    files=(File("cifar-100-binary.tar.gz", f"{CIFAR_URL}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
    folders=("cifar-100-binary",),
    notes=CIFAR_10.notes,
)

SVHN = Sheet(
    name="svhn",
    title="Street View House Numbers, cropped digits",
    source="Netzer et al., Reading Digits in Natural Images with Unsupervised Feature Learning, 2011",
    license="non-commercial use only",
    classes=tuple("0123456789"),
    counts={"train": 73257, "test": 26032},
    native=(3, 32, 32),
    size=32,
    channels=3,
    layout="svhn",
    files=(
        File("train_32x32.mat", f"{SVHN_URL}/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        File("test_32x32.mat", f"{SVHN_URL}/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    ),
    folders=("svhn",),
    notes="The files call the digit zero 10; here it is class 0. The 'extra' part is not used.",
)

SHEETS = (FASHION, CIFAR_10, CIFAR_100, SVHN)
