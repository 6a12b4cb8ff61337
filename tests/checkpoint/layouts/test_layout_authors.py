"""Files of the authors' own code: wrappers, preprocessing and errors; each model has a test of its logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.noisy_weights import add_weight_noise
from torch import Tensor

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write

TOY: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "classes": 5}


def make_file(path: Path, **changes: Tensor | None) -> Path:
    """An SL-ViT under its authors' names."""
    write(add_weight_noise(vitrail.create("SL-ViT", **TOY)), path, "authors")
    tensors = torch.load(path, weights_only=True)["model_state_dict"]
    tensors = {name: each for name, each in {**tensors, **changes}.items() if each is not None}
    torch.save({"net": 1, "model_state_dict": {f"module.{name}": each for name, each in tensors.items()}}, path)
    return path


def test_wrapped_file_is_recognized_with_its_preprocessing(tmp_path: Path) -> None:
    found = read(make_file(tmp_path / "theirs.pth"))
    assert (found.layout, found.description.family) == ("authors", "sl_vit")
    how = found.description.preprocessing
    assert how is not None
    assert (how.crop, how.image_size, how.mean[0]) == (1.0, (32, 32), 0.4914)
    assert found.description.provenance["source"]["layout"] == "authors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra.weight": torch.ones(2)}, r"1 tensors that are not part of a sl_vit of the layout authors"),
        ({"transformer.layers.1.0.fn.scale": None}, r"1 missing \(blocks\.1\.attn\.scale\)"),
        ({"pos_embedding": torch.ones(1, 8, 16)}, r"pos_embed has 8 rows, 1 of them for prefix tokens"),
        ({"to_patch_embedding.merging.2.weight": torch.ones(16)}, r"expected 2 dimensions"),
    ],
)
def test_wrong_tensors_are_refused_in_one_line(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        read(make_file(tmp_path / "bad.pth", **change))
    assert "\n" not in str(error.value)


def test_other_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="authors cannot represent a model of the family 'vit'"):
        write(vitrail.create("ViT-Ti/16", depth=1), tmp_path / "vit.pth", "authors")
    vitrail.save(vitrail.create("ViT-Ti/16", depth=1), tmp_path / "vit.safetensors", to="timm")
    with pytest.raises(CheckpointError, match="not those of a model of the layout authors; expected another `source`"):
        read(tmp_path / "vit.safetensors", source="authors")
