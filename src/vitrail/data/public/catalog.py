"""Public data sets by name: addresses, checksums, licenses and how the published parts are used.

Addresses, sizes and checksums are those of torchvision's data sets and of TensorFlow Datasets, which agree where both
state one; those of Multi30k are of its repository. Where only an MD5 is known, it is compared instead of a SHA-256.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitrail.base.files import get_cache_folder

UNSTATED = "not stated on its page"


@dataclass(frozen=True, kw_only=True)
class PublicFile:
    """A file to download; `mirror` is tried if the address does not have it."""

    url: str
    size: int  # bytes
    sha256: str = ""
    md5: str = ""  # where no SHA-256 is known
    mirror: str = ""

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class PublicDataset:
    """Archives are unpacked, other files stay as they are."""

    name: str
    title: str
    page: str
    files: tuple[PublicFile, ...]
    classes: int  # 0 for sentences
    parts: str  # what is used for training and for validation
    license: str = UNSTATED
    folder: str = ""  # of the data in the archives, for messages
    is_text: bool = False

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
MULTI30K_FILES = (  # name, bytes, SHA-256
    ("train.de.gz", 637_044, "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
    ("train.en.gz", 568_929, "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
    ("train.fr.gz", 604_242, "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c"),
    ("val.de.gz", 24_681, "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
    ("val.en.gz", 21_650, "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
    ("val.fr.gz", 23_001, "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9"),
    ("test_2016_flickr.de.gz", 22_890, "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8"),
    ("test_2016_flickr.en.gz", 21_077, "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9"),
    ("test_2016_flickr.fr.gz", 22_310, "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90"),
    ("test_2017_flickr.de.gz", 21_471, "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee"),
    ("test_2017_flickr.en.gz", 19_138, "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074"),
    ("test_2017_mscoco.de.gz", 10_230, "799e4854c25d601cb6cb6be29eabe5667734c61ace2f495e03e429031a0bc338"),
    ("test_2017_mscoco.en.gz", 8_844, "aab300bfb4427697987e02cd0aacd44bfe8aa50456231b6474c08038bbed2b58"),
)

PUBLIC_DATASETS: tuple[PublicDataset, ...] = (
    PublicDataset(
        name="cifar10",
        title="CIFAR-10",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        files=(
            PublicFile(
                url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                size=170_052_171,
                sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        classes=10,
        parts="50,000 images for training, 10,000 for validation (the test images)",
        folder="cifar-10-batches-bin",
    ),
    PublicDataset(
        name="cifar100",
        title="CIFAR-100",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        files=(
            PublicFile(
                url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                size=168_513_733,
                sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        classes=100,
        parts="50,000 images for training, 10,000 for validation (the test images)",
        folder="cifar-100-binary",
    ),
    PublicDataset(
        name="pets",
        title="Oxford-IIIT Pet",
        page="https://www.robots.ox.ac.uk/~vgg/data/pets/",
        files=(
            PublicFile(
                url="https://www.robots.ox.ac.uk/~vgg/data/pets/data/images.tar.gz",
                size=791_918_971,
                sha256="67195c5e1c01f1ab5f9b6a5d22b8c27a580d896ece458917e61d459337fa318d",
                mirror="https://thor.robots.ox.ac.uk/~vgg/data/pets/images.tar.gz",
            ),
            PublicFile(
                url="https://www.robots.ox.ac.uk/~vgg/data/pets/data/annotations.tar.gz",
                size=19_173_078,
                sha256="52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91",
                mirror="https://thor.robots.ox.ac.uk/~vgg/data/pets/annotations.tar.gz",
            ),
        ),
        classes=37,
        parts="trainval (3,680) for training, test (3,669) for validation",
        license="CC BY-SA 4.0",
        folder="images and annotations",
    ),
    PublicDataset(
        name="flowers",
        title="Oxford Flowers-102",
        page="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        files=(
            PublicFile(
                url="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/102flowers.tgz",
                size=344_862_509,
                sha256="2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246",
            ),
            PublicFile(
                url="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/imagelabels.mat",
                size=502,
                sha256="4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d",
            ),
            PublicFile(
                url="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/setid.mat",
                size=14_989,
                sha256="46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd",
            ),
        ),
        classes=102,
        parts="train and val (2,040) for training, test (6,149) for validation",
        folder="jpg",
    ),
    PublicDataset(
        name="food101",
        title="Food-101",
        page="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        files=(
            PublicFile(
                url="http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
                size=4_996_278_331,
                sha256="d97d15e438b7f4498f96086a4f7e2fa42a32f2712e87d3295441b2b6314053a4",
            ),
        ),
        classes=101,
        parts="75,750 images for training, 25,250 for validation (the test images)",
        license="scientific fair use only",
        folder="food-101",
    ),
    PublicDataset(
        name="dtd",
        title="Describable Textures",
        page="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        files=(
            PublicFile(
                url="https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
                size=625_239_812,
                sha256="e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205",
            ),
        ),
        classes=47,
        parts="train and val of partition 1 (3,760) for training, its test images (1,880) for validation",
        license="research purposes only",
        folder="dtd",
    ),
    PublicDataset(
        name="eurosat",
        title="EuroSAT (RGB)",
        page="https://github.com/phelber/EuroSAT",
        files=(
            PublicFile(
                url="https://huggingface.co/datasets/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
                size=94_280_567,
                sha256="8ebea626349354c5328b142b96d0430e647051f26efc2dc974c843f25ecf70bd",
                mirror="https://madm.dfki.de/files/sentinel/EuroSAT.zip",
            ),
        ),
        classes=10,
        parts="27,000 images without an official split: a share of each class is held out",
        license="MIT",
        folder="2750",
    ),
    PublicDataset(
        name="svhn",
        title="SVHN, cropped digits",
        page="http://ufldl.stanford.edu/housenumbers/",
        files=(
            PublicFile(
                url="http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                size=182_040_794,
                sha256="435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            PublicFile(
                url="http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
                size=64_275_384,
                sha256="cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
        classes=10,
        parts="73,257 images for training, 26,032 for validation (the test images)",
        license="non-commercial use only",
    ),
    PublicDataset(
        name="stl10",
        title="STL-10",
        page="https://cs.stanford.edu/~acoates/stl10/",
        files=(
            PublicFile(
                url="http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
                size=2_640_397_119,
                sha256="f31fd99273a1acb8609c8db427cebb1de3f71de77758cdc0e22956e1289b9866",
            ),
        ),
        classes=10,
        parts="all 5,000 labeled images for training, 8,000 for validation (the test images)",
        folder="stl10_binary",
    ),
    PublicDataset(
        name="imagenette",
        title="Imagenette 2, shorter side 320",
        page="https://github.com/fastai/imagenette",
        files=(
            PublicFile(
                url="https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz",
                size=341_663_724,
                sha256="569b4497c98db6dd29f335d1f109cf315fe127053cedf69010d047f0188e158c",
            ),
        ),
        classes=10,
        parts="9,469 images for training, 3,925 for validation, most of which are training images of ImageNet",
        license="terms of ImageNet",
        folder="imagenette2-320",
    ),
    PublicDataset(
        name="tiny-imagenet",
        title="Tiny ImageNet",
        page="http://cs231n.stanford.edu/",
        files=(
            PublicFile(
                url="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                size=248_100_043,
                md5="90528d7ca1a48142e341f4ef8d21d0de",
            ),
        ),
        classes=200,
        parts="100,000 images for training, 10,000 for validation (val; the test images have no labels)",
        license="terms of ImageNet",
        folder="tiny-imagenet-200",
    ),
    PublicDataset(
        name="imagenet-v2",
        title="ImageNet-V2, matched frequency",
        page="https://github.com/modestyachts/ImageNetV2",
        files=(
            PublicFile(
                url="https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/imagenetv2-matched-frequency.tar.gz",
                size=1_264_079_360,
                sha256="f0c37fdf925916b19ea1323cd9a2208cdb6959ba2c32eef2a7fc393835c9ca7c",
                mirror="https://s3-us-west-2.amazonaws.com/imagenetv2public/imagenetv2-matched-frequency.tar.gz",
            ),
        ),
        classes=1000,
        parts="10,000 images for validation only",
        license="terms of ImageNet",
        folder="imagenetv2-matched-frequency-format-val",
    ),
    PublicDataset(
        name="multi30k",
        title="Multi30k, task 1",
        page="https://github.com/multi30k/dataset",
        files=tuple(
            PublicFile(url=f"{MULTI30K}/{name}", size=size, sha256=digest) for name, size, digest in MULTI30K_FILES
        ),
        classes=0,
        parts="29,000 sentences for training, 1,014 for validation, three test sets; de, en, fr",
        license="research and education, non-commercial",
        is_text=True,
    ),
)


def find_public_dataset(name: object) -> PublicDataset | None:
    """The data set of this name; a path such as ./cifar10 is not a name."""
    return next((each for each in PUBLIC_DATASETS if each.name == name), None)


def list_public_names(*, is_text: bool) -> Sequence[str]:
    return [each.name for each in PUBLIC_DATASETS if each.is_text == is_text]


def find_dataset_folder(dataset: PublicDataset) -> Path:
    return get_cache_folder() / "data" / dataset.name


def is_downloaded(dataset: PublicDataset) -> bool:
    return find_dataset_folder(dataset).is_dir()
