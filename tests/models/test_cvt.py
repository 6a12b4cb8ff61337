"""CvT: logits of the authors' code, transformers' with exact GELU, weights by name and back, maps at half the grid."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.layout_round_trip import assert_same_tensors, check_round_trip, max_output_difference
from support.noisy_weights import add_weight_noise, randomize_batch_norms
from support.reference_logits import read_reference
from torch import Tensor
from transformers import CvtConfig, CvtForImageClassification

import vitrail
from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.checkpoint import read, write
from vitrail.inspection.attention.capture import capture_attention
from vitrail.models.cvt import CvT, CvTConfig
from vitrail.train.optim import list_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*does not specify")
TOY = CvTConfig(image_size=32, stages=(1, 2), widths=(16, 32), heads=(2, 4), mlp_ratio=2.0, classes=5)
THEIRS: dict[str, Any] = {
    "embed_dim": [16, 24, 32],
    "num_heads": [1, 2, 4],
    "depth": [1, 2, 3],
    "mlp_ratio": [2.0, 2.0, 2.0],
}


def toy(**fields: Any) -> CvT:
    return randomize_batch_norms(add_weight_noise(CvT(replace(TOY, **fields))))


def theirs(**fields: Any) -> Any:
    arguments: dict[str, Any] = {**THEIRS, "num_labels": 5, **fields}
    config = CvtConfig(**arguments)
    return randomize_batch_norms(add_weight_noise(CvtForImageClassification(config)))


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *(size or (32, 32)))


def test_logits_of_the_authors_code(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """Weights are read strictly and written back tensor by tensor."""
    reference = read_reference(shared, "cvt_quick_gelu")
    torch.save(reference.tensors, tmp_path / "cvt.pth")
    heads = tuple(reference.config["NUM_HEADS"])
    checkpoint = read(tmp_path / "cvt.pth", heads=heads)
    assert checkpoint.layout == "authors"
    with torch.no_grad():
        assert (checkpoint.model(reference.images) - reference.logits).abs().max() <= 2e-5
    write(checkpoint.model, tmp_path / "back.pth", "authors")
    written = torch.load(tmp_path / "back.pth")
    assert_same_tensors({name: written[name] for name in reference.tensors}, reference.tensors)
    assert all(name.endswith("num_batches_tracked") for name in written.keys() - reference.tensors.keys())
    with pytest.raises(CheckpointError, match=r"does not specify the heads for widths \(16, 24, 32\); expected heads"):
        read(tmp_path / "cvt.pth")
    with pytest.raises(CheckpointError, match=r"activation is 'gelu', which authors cannot represent"):
        write(toy(activation="gelu"), tmp_path / "other.pth", "authors")


@torch.no_grad()
def test_folders_of_transformers(tmp_path: Path) -> None:
    """Its code has GELU where the published weights were trained with QuickGELU, which is the default here."""
    other, x = theirs(), images(64, 64)
    other.save_pretrained(tmp_path / "theirs")
    checkpoint = check_round_trip(tmp_path / "theirs", tmp_path / "back", to="hf", activation="gelu")
    assert max_output_difference(checkpoint.model, lambda x: other(x).logits, (64, 48)) <= 1e-5
    maps = other(x, output_hidden_states=True).hidden_states
    for mine, its in zip(checkpoint.model.feature_maps(x), maps, strict=True):
        assert (mine - its).abs().max() <= 1e-5
    opened = CvtForImageClassification.from_pretrained(tmp_path / "back")
    assert_same_tensors(opened.state_dict(), other.state_dict())
    as_trained = read(tmp_path / "theirs").model
    assert as_trained.config.activation == "quick_gelu"
    assert max_output_difference(as_trained, lambda x: other(x).logits, (64, 48)) > 1e-3
    with pytest.warns(UserWarning, match="hf cannot store activation='quick_gelu', and its readers use 'gelu'"):
        write(as_trained, tmp_path / "quick", "hf")


def test_processors_of_transformers(tmp_path: Path) -> None:
    """The processor tells the image size, and `crop_pct` applies to short sides of less than 384."""
    theirs().save_pretrained(tmp_path / "theirs")
    expected = {224: (0.875, "short_side"), 384: (1.0, "squash")}
    for size, (crop, fit) in expected.items():
        text = f'{{"size": {{"shortest_edge": {size}}}, "crop_pct": 0.875, "resample": 3}}'
        (tmp_path / "theirs" / "preprocessor_config.json").write_text(text)
        checkpoint = read(tmp_path / "theirs")
        how = checkpoint.description.preprocessing
        assert how is not None
        assert checkpoint.model.config.image_size == (size, size)
        assert (how.crop, how.fit, how.image_size) == (crop, fit, (size, size))


def test_writing_for_transformers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"stage 1 \(from 0\) has 1 blocks, which transformers cannot build"):
        write(toy(stages=(1, 1)), tmp_path / "short", "hf")
    with pytest.raises(CheckpointError, match=r"has a head is False, which transformers' cvt cannot represent"):
        write(toy(classes=0), tmp_path / "headless", "hf")


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model: Any = CvT(replace(TOY, stages=(2, 3), stochastic_depth=0.4))
    rates = [block.drop_path.rate for stage in (model.stage0, model.stage1) for block in stage.blocks]
    assert rates == pytest.approx([0, 0, 0, 0.2, 0.4])  # in the last stage only


@torch.no_grad()
def test_any_size_and_only_the_class_token() -> None:
    """The last block computes only the class token if nothing else is read."""
    model = toy()
    for size in ((32, 32), (30, 45), (3, 3)):
        x = images(*size)
        torch.testing.assert_close(model(x), model.head(model.tokens(x)[:, 0]))
    with pytest.raises(ConfigError, match=r"2×32 pixels; expected at least 3×3: resize it"):
        model(images(2, 32))


def test_other_classes(tmp_path: Path) -> None:
    write(toy(), tmp_path / "ours")
    loaded = read(tmp_path / "ours", image_size=(48, 64), classes=3)
    assert not loaded.report.resized
    assert loaded.report.initialized == ("head.weight", "head.bias")
    assert [level.grid for level in loaded.model.levels] == [(12, 16), (6, 8)]


def test_layer_decay_levels() -> None:
    levels = {weight.name: weight.level for weight in list_weights(toy())}
    assert levels["stage0.patch_embed.proj.weight"] == 0
    assert levels["stage1.patch_embed.proj.weight"] == levels["stage1.cls_token"] == 2
    assert levels["norm.weight"] == levels["head.weight"] == 4


PHOTO = np.random.default_rng(0).random((36, 36, 3))


def test_maps_to_keys_at_half_the_grid() -> None:
    subject = vitrail.Explainer(toy(), preprocessing=vitrail.Preprocessing(image_size=32))
    with torch.no_grad(), capture_attention(subject.model) as captured:
        subject.model(subject.loaded.make_batch([PHOTO]))
    shapes = [(2, 65, 17), (4, 17, 5), (4, 17, 5)]  # layer 0 with a row and a column of zeros for the class token
    assert [tuple(each.shape[1:]) for each in captured.maps] == shapes
    found = subject.explain(PHOTO, "attention", layer=2).map
    row = captured.maps[2][0].mean(0)[0, 1:]
    np.testing.assert_allclose(found, (row / row.sum()).reshape(2, 2), rtol=1e-4)
    found = subject.explain(PHOTO, "attention", layer=0, token="7,1").map
    np.testing.assert_allclose(found, captured.maps[0][0].mean(0)[1 + 7 * 8 + 1, 1:].reshape(4, 4), rtol=1e-4)
    with pytest.raises(ConfigError, match=r"layer 0 comes before the class token joins; expected 1 to 2, or -1, or a"):
        subject.explain(PHOTO, "attention", layer=0)
    changes = "the grid changes from 8×8 to 4×4 between layers 0 and 1"
    with pytest.raises(ConfigError, match=f"^method 'rollout' is undefined for this model: {changes}"):
        subject.explain(PHOTO, "rollout")
    photos = [np.random.default_rng(n).random((36, 36, 3)) for n in range(4)]
    figures = vitrail.look(subject, photos)
    assert {each.name for each in figures.figures} >= {"filters", "attention_distance", "alignment", "occlusion"}
