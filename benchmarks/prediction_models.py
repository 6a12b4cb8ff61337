"""The models that `prediction.py` measures, in every layout, and the photos."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from PIL import Image

from vitrail.checkpoint import read, write
from vitrail.predict.predictor import EngineName
from vitrail.study.bench_engines import ModelFiles

SHARED = Path(__file__).parents[2] / "shared" / "data"
PHOTOS, LABELS = SHARED / "imagenet-val-1000", SHARED / "imagenet-classes.txt"
WEIGHTS = {
    "ViT-Ti/16": ("vit_tiny_patch16_224", SHARED / "weights" / "vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors"),
    "DeiT-Ti/16": ("deit_tiny_patch16_224", SHARED / "weights" / "deit_tiny_patch16_224.pth"),
    "ViT-B/16": ("vit_base_patch16_224", SHARED / "weights" / "none"),
}
DEFAULT_ROUNDS = {"engines": 15, "cold": 5, "folder": 3, "variants": 5}  # default number of rounds


class SectionSkippedError(Exception):
    """Raised with the reason if a section cannot be measured on this machine."""


@dataclass(frozen=True)
class PredictionBench:
    """Shared by all sections: models in every layout, made at the first use."""

    place: Path
    rounds: int | None
    threads: int
    seed: int
    stocks: dict[str, ModelFiles]
    images: int  # photos of a section, at most
    compiled: bool = False  # also measure torch.compile

    def stock(self, name: str) -> ModelFiles:
        if name not in self.stocks:
            folder = self.place / name.replace("/", "-")
            preset, weights = WEIGHTS[name]
            checkpoint = folder / "checkpoint"
            if weights.exists():  # the preprocessing of the published accuracy: 224 of 256 pixels
                found = read(weights)
                assert found.description.preprocessing is not None
                how = replace(found.description.preprocessing, crop=0.875)
                write(found.model, checkpoint, preprocessing=how, labels=read_class_names())
                self.stocks[name] = ModelFiles(str(checkpoint), None, folder, self.seed)
            else:
                self.stocks[name] = ModelFiles(preset, None, folder, self.seed)
        return self.stocks[name]

    def engines(self, names: tuple[EngineName, ...]) -> tuple[EngineName, ...]:
        """The engines, after the first one also `compiled` if it is wanted."""
        return (names[0], "compiled", *names[1:]) if self.compiled else names

    def rounds_of(self, section: str) -> int:
        return self.rounds or DEFAULT_ROUNDS[section]

    @cached_property
    def photos(self) -> Path:
        """A folder of photos: all, or as many as asked, evenly spaced over the classes."""
        require_path(PHOTOS)
        files = sorted(PHOTOS.rglob("*.JPEG"))
        if self.images >= len(files):
            return PHOTOS
        for path in files[:: -(-len(files) // self.images)]:
            copy = self.place / "photos" / path.relative_to(PHOTOS)
            copy.parent.mkdir(parents=True)
            copy.write_bytes(path.read_bytes())
        return self.place / "photos"

    @cached_property
    def photo(self) -> Path:
        """A photo, or if there is none a generated image of a common size."""
        if PHOTOS.exists():
            return min(PHOTOS.rglob("*.JPEG"))
        drawn = self.place / "photo.jpg"
        Image.radial_gradient("L").resize((500, 375)).convert("RGB").save(drawn)
        return drawn


def read_class_names() -> list[str] | None:
    return LABELS.read_text("utf-8").splitlines() if LABELS.exists() else None


def describe_weights(*names: str) -> str:
    descriptions = (f"{name} has {'public' if WEIGHTS[name][1].exists() else 'random'} weights" for name in names)
    return "; ".join(descriptions)


def require_path(path: Path) -> None:
    if not path.exists():
        raise SectionSkippedError(f"needs ../shared/data/{path.relative_to(SHARED)}")
