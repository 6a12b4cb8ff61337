"""transformers' own models at toy size: folders in both directions, with class names and preprocessing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.layout_round_trip import check_round_trip, max_output_difference, write_checkpoint
from support.noisy_weights import add_weight_noise
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTModel,
    pipeline,
)
from transformers.utils import logging

import vitrail
from vitrail.base.errors import CheckpointError
from vitrail.checkpoint import read, write
from vitrail.data.images.preprocessing import preprocess_image

logging.disable_progress_bar()
TOY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
WIDE: dict[str, Any] = {**TOY, "intermediate_size": 48}
NUMBERS: dict[str, Any] = {"num_labels": 5}
LABELS: dict[str, Any] = {"id2label": {0: "ant", 1: "bee", 2: "crane", 3: "crane", 4: "æ"}}
KINDS: dict[str, Callable[[], Any]] = {
    "vit": lambda: ViTForImageClassification(ViTConfig(**WIDE, **LABELS)),
    "vit, no labels": lambda: ViTForImageClassification(ViTConfig(**WIDE, **NUMBERS)),
    "vit, no qkv bias, tanh": lambda: ViTForImageClassification(
        ViTConfig(**WIDE, **LABELS, qkv_bias=False, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-5)
    ),
    "vit, no head": lambda: ViTModel(ViTConfig(**WIDE), add_pooling_layer=False),
    "vit, pooler": lambda: ViTModel(ViTConfig(**WIDE)),
    "deit": lambda: DeiTForImageClassification(DeiTConfig(**WIDE, **LABELS)),
    "deit, pooler": lambda: DeiTModel(DeiTConfig(**WIDE)),
    "deit, teacher": lambda: DeiTForImageClassificationWithTeacher(
        DeiTConfig(**{**WIDE, "intermediate_size": 128}, **LABELS)
    ),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**TOY)),
    "dinov2, swiglu": lambda: Dinov2Model(Dinov2Config(**TOY, use_swiglu_ffn=True)),
    "dinov2, registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**TOY, num_register_tokens=3)),
}


def make_forward(theirs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward that returns logits, the pooler's output, or the class token, depending on the model."""

    def forward(images: torch.Tensor) -> torch.Tensor:
        out = theirs(images)
        if hasattr(out, "logits"):
            return out.logits
        pooled = getattr(out, "pooler_output", None)
        return out.last_hidden_state[:, 0] if pooled is None else pooled

    return forward


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_and_outputs(kind: str, tmp_path: Path) -> None:
    theirs = add_weight_noise(KINDS[kind]())
    theirs.save_pretrained(tmp_path / "theirs")
    lost = ("embeddings.mask_token",) if "dinov2" in kind else ()
    checkpoint = check_round_trip(tmp_path / "theirs", tmp_path / "back", to="hf", without=lost)
    assert max_output_difference(checkpoint.model, make_forward(theirs)) <= 1e-5
    auto = AutoModelForImageClassification if "classifier" in str(list(theirs.state_dict())) else AutoModel
    opened, loading = auto.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(opened) is type(theirs)
    assert not loading["unexpected_keys"]
    made = ("embeddings.mask_token", "pooler.")  # AutoModel expects a pooler even if there was none
    assert all(name.startswith(made) for name in loading["missing_keys"])
    if kind != "vit, no head":
        assert max_output_difference(checkpoint.model, make_forward(opened.eval())) <= 1e-5
    if "no labels" in kind or not getattr(theirs.config, "id2label", None):
        assert checkpoint.description.labels is None
    elif checkpoint.model.config.classes:
        assert checkpoint.description.labels == ("ant", "bee", "crane", "crane", "æ")
        assert opened.config.id2label == theirs.config.id2label


@pytest.mark.parametrize("kind", KINDS)
def test_names_in_memory_are_read_from_a_pickle(kind: str, tmp_path: Path) -> None:
    theirs = add_weight_noise(KINDS[kind]())
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    assert max_output_difference(read(tmp_path).model, make_forward(theirs)) <= 1e-5


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    theirs = add_weight_noise(KINDS["vit"]())
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert max_output_difference(read(tmp_path).model, make_forward(theirs)) <= 1e-5
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"is missing or is not a file; expected weights"):
        read(tmp_path)


def test_weights_without_config_report_assumptions(tmp_path: Path) -> None:
    theirs = add_weight_noise(KINDS["vit"]())
    theirs.save_pretrained(tmp_path / "folder")
    (tmp_path / "alone.safetensors").write_bytes((tmp_path / "folder" / "model.safetensors").read_bytes())
    checkpoint = read(tmp_path / "alone.safetensors", heads=4)
    assert max_output_difference(checkpoint.model, make_forward(theirs)) <= 1e-5
    assert checkpoint.model.config.norm_eps == 1e-12
    assumed = {"activation": "gelu", "norm_eps": 1e-12, "preprocessing": "mean 0.5, crop 1, bilinear"}
    assert (checkpoint.report.warnings, checkpoint.report.assumed) == ((), assumed)


def test_the_head_of_a_dinov2_is_ignored_with_a_warning(tmp_path: Path) -> None:
    theirs = add_weight_noise(Dinov2ForImageClassification(Dinov2Config(**TOY, **LABELS)))
    theirs.save_pretrained(tmp_path)
    checkpoint = read(tmp_path)
    assert any("head of a DINOv2" in warning for warning in checkpoint.report.warnings)
    assert "classifier.weight" in checkpoint.report.ignored
    assert checkpoint.model.config.classes == 0


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (
            {"size": {"height": 32, "width": 32}, "resample": 2},
            {"fit": "squash", "crop": 1.0, "interpolation": "bilinear"},
        ),
        ({"size": 32, "feature_extractor_type": "ViTFeatureExtractor"}, {"fit": "squash", "crop": 1.0}),
        (
            {
                "size": {"shortest_edge": 37},
                "do_center_crop": True,
                "crop_size": {"height": 32, "width": 32},
                "resample": 3,
            },
            {"fit": "short_side", "interpolation": "bicubic"},
        ),
        (
            {
                "size": {"height": 37, "width": 37},
                "do_center_crop": True,
                "crop_size": 32,
                "image_mean": [0.1, 0.2, 0.3],
            },
            {"fit": "squash", "mean": (0.1, 0.2, 0.3)},
        ),
        ({"size": 32, "do_normalize": False}, {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}),
    ],
)
def test_preprocessing_equals_its_processor(
    processor: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    KINDS["vit"]().save_pretrained(tmp_path / "theirs")
    text = json.dumps({"image_processor_type": "ViTImageProcessor", **processor})
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(text)
    checkpoint = read(tmp_path / "theirs")
    preprocessing = checkpoint.description.preprocessing
    assert preprocessing is not None
    assert {name: getattr(preprocessing, name) for name in expected} == expected
    assert not checkpoint.report.warnings
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), np.uint8))
    write_checkpoint(checkpoint, tmp_path / "back", "hf")
    for folder in ("theirs", "back"):
        theirs = AutoImageProcessor.from_pretrained(tmp_path / folder, use_fast=False)
        pixels = theirs(image, return_tensors="np")["pixel_values"][0]
        gray = 1 / 255 / min(preprocessing.std)
        assert np.abs(pixels - preprocess_image(image, preprocessing)).max() <= 1.01 * gray


@pytest.mark.parametrize(
    ("processor", "warning"),
    [
        (None, "does not specify preprocessing; assumed preprocessing=mean 0.5"),
        ({"size": 64}, "makes images of 64×64: 32×32 is used"),
        ({"size": 32, "resample": 1}, "has resample=1, not supported"),
        ({"size": 32, "do_rescale": False}, "has do_rescale=False"),
    ],
)
def test_missing_or_unsupported_preprocessing_gives_a_warning(
    processor: dict[str, Any] | None, warning: str, tmp_path: Path
) -> None:
    KINDS["vit"]().save_pretrained(tmp_path)
    if processor is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    assert warning in str(read(tmp_path).report)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "glpn"}, r"has model_type 'glpn' of transformers; expected one of vit, deit"),
        ({"hidden_act": "relu"}, r"hidden_act is 'relu'; expected one of gelu"),
        ({"num_attention_heads": "four"}, r"num_attention_heads is 'four'; expected a whole number"),
        ({"num_attention_heads": 5}, r"width 32 cannot be divided by 5 heads"),
        ({"id2label": {"x": "ant"}}, r"id2label of config\.json has keys that are not numbers"),
        ({"layer_norm_eps": True}, r"layer_norm_eps is True; expected a number"),
    ],
)
def test_wrong_config_fields_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    KINDS["vit"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path)


def test_a_crop_of_no_pixels_is_refused(tmp_path: Path) -> None:
    KINDS["vit"]().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 32, "crop_size": 0}))
    with pytest.raises(CheckpointError, match=r"crop_size .* is 0; expected 1 or more"):
        read(tmp_path)


def test_contradictions_give_a_warning(tmp_path: Path) -> None:
    KINDS["vit"]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_size": 64, "id2label": {"0": "a", "1": "b"}}))
    checkpoint = read(tmp_path)
    assert any("(64, 64), but its positions are for 32×32" in warning for warning in checkpoint.report.warnings)
    assert any("2 labels for 5 classes" in warning for warning in checkpoint.report.warnings)
    assert checkpoint.model.config.image_size == (32, 32)


def test_images_that_are_not_square(tmp_path: Path) -> None:
    theirs = add_weight_noise(ViTForImageClassification(ViTConfig(**{**WIDE, "image_size": (32, 48)}, **LABELS)))
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = check_round_trip(tmp_path / "theirs", tmp_path / "back", to="hf")
    assert checkpoint.model.config.image_size == (32, 48)
    assert max_output_difference(checkpoint.model, make_forward(theirs), (32, 48)) <= 1e-5


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("vit_tiny_r_s16_p8_224", {}, "hf cannot represent a model of the family 'hybrid'"),
        ("ViT-Ti/16", {"pool": "mean"}, "pool is 'mean', which transformers' vit cannot represent"),
        ("ViT-Ti/16", {"registers": 2}, "registers is 2, which transformers' deit cannot represent; expected 0 or 1"),
        ("ViT-Ti/16", {"layer_scale": 0.1}, "classes is 5, which transformers' dinov2 cannot represent; expected 0"),
        ("ViT-Ti/16", {"head": "mlp"}, "classes is 5, which transformers' vit cannot represent; expected 0"),
        ("ViT-Ti/16", {"positions": "relative"}, "positions is 'relative'"),
    ],
)
def test_unsupported_models_are_refused(name: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = vitrail.create(name, image_size=32, width=32, heads=2, depth=1, classes=5, **fields)
    with pytest.raises(CheckpointError, match=message):
        write(model, tmp_path / "folder", "hf")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("weights", "crop"),
    [
        ("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors", 0.9),
        ("weights/deit_tiny_patch16_224.pth", 0.875),
    ],
)
def test_pipeline_of_transformers_gives_the_same_predictions(
    weights: str, crop: float, shared: Callable[[str], Path], tmp_path: Path
) -> None:
    lines = shared("imagenet-classes.txt").read_text("utf-8").splitlines()
    labels = [f"{n} {line}" for n, line in enumerate(lines)]
    checkpoint = read(shared(weights))
    assert checkpoint.description.preprocessing is not None
    assert checkpoint.description.preprocessing.crop == crop
    write(checkpoint.model, tmp_path, "hf", labels=labels, preprocessing=checkpoint.description.preprocessing)
    photos = sorted(shared("imagenet-val-1000").rglob("*.JPEG"))[::100]
    theirs = pipeline("image-classification", model=str(tmp_path), device="cpu")
    ours = vitrail.Predictor(tmp_path)
    for photo in photos:
        predictions, top = theirs(Image.open(photo).convert("RGB"), top_k=5), ours.predict(photo).top
        assert [each["label"] for each in predictions] == [each.label for each in top], photo
        for mine, their in zip(top, predictions, strict=True):
            assert abs(mine.probability - their["score"]) < 0.02


def test_a_folder_of_transformers_is_replaced(tmp_path: Path) -> None:
    theirs = add_weight_noise(KINDS["vit"]())
    theirs.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    checkpoint = read(tmp_path)
    assert not checkpoint.report.warnings
    write_checkpoint(checkpoint, tmp_path, "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    assert load_file(tmp_path / "model.safetensors").keys()
    save_file({"vit.embeddings.cls_token": torch.zeros(1, 1, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError):
        read(tmp_path)


def test_an_unsupported_pooler_is_refused(tmp_path: Path) -> None:
    ViTModel(ViTConfig(**WIDE, pooler_act="relu")).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"pooler_act is 'relu'; expected tanh"):
        read(tmp_path)


def test_old_preprocessing_is_removed(tmp_path: Path) -> None:
    model = add_weight_noise(vitrail.create("ViT-Ti/16", image_size=32, width=32, heads=2, depth=1, classes=5))
    write(model, tmp_path, "hf", preprocessing=vitrail.Preprocessing(image_size=32))
    write(model, tmp_path, "hf")
    assert not (tmp_path / "preprocessor_config.json").exists()


def test_backbone_that_pools_the_mean_is_written_without_its_pool(tmp_path: Path) -> None:
    """As a run of pre-training without labels: transformers and DINO's code return the same tokens."""
    sizes = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 4}
    model = add_weight_noise(vitrail.create("ViT-Ti/16", classes=0, pool="mean", norm_eps=1e-12, **sizes)).eval()
    images = torch.randn(2, 3, 32, 32)
    with pytest.warns(UserWarning, match="hf cannot store pool='mean'.* take the mean of the patch tokens"):
        vitrail.save(model, tmp_path / "hf", to="hf")
    theirs: Any = AutoModel.from_pretrained(tmp_path / "hf", add_pooling_layer=False).eval()
    with torch.inference_mode():
        torch.testing.assert_close(theirs(images).last_hidden_state, model.tokens(images), atol=1e-5, rtol=0)
    model = vitrail.create("ViT-Ti/16", classes=0, pool="mean", **sizes).eval()
    with pytest.warns(UserWarning, match="dino cannot store pool='mean'"):
        vitrail.save(model, tmp_path / "dino.pth", to="dino")
    back = vitrail.load(tmp_path / "dino.pth", source="dino", heads=4)
    with torch.inference_mode():
        torch.testing.assert_close(back.tokens(images), model.tokens(images), atol=0, rtol=0)
    with pytest.raises(CheckpointError, match="pool is 'mean'"):
        vitrail.save(vitrail.create("ViT-Ti/16", classes=2, pool="mean", **sizes), tmp_path / "head", to="hf")
