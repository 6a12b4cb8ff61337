"""Every name of a model opens to the same thing: a model, its preprocessing and its labels."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.noisy_weights import add_weight_noise
from support.saved_models import write_model_folder, write_run_folder
from support.toy_exports import LABELS, PREPROCESSING, ExportFinder, make_toy_model, random_pixels

import vitrail
from vitrail.base.errors import ConfigError, DataError
from vitrail.data.images.decoding.rgb_image import open_image
from vitrail.data.images.preprocessing import Preprocessing, preprocess_image
from vitrail.export.exported_model import ExportedModel
from vitrail.opening import open_model, open_torch_model

SMALL: dict[str, Any] = {"image_size": (64, 32), "classes": 7, "depth": 1, "width": 16, "heads": 2}
EXPLICIT = Preprocessing(crop=0.7)


def toy(**fields: Any) -> Any:
    return add_weight_noise(vitrail.create("vit_tiny_patch16_224", **{**SMALL, **fields}), std=0.3)


def image(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (50, 70, 3), dtype=np.uint8)


def test_the_repr_says_what_it_is_without_the_weights(exported: ExportFinder) -> None:
    line = repr(open_model(toy(classes=0), preprocessing=EXPLICIT))
    for word in ("ViT", " parameters", "64×32 pixels", "no head"):
        assert word in line
    assert "5 classes: ants, bees, cats and 2 more" in repr(open_model(exported("onnx"), threads=1))


def test_the_device_may_be_chosen_by_what_the_machine_has() -> None:
    place = "cuda" if torch.cuda.is_available() else "cpu"
    assert next(open_model("vit_fashion", device="auto").module.parameters()).device.type == place


def test_a_module_stays_on_its_device_by_default() -> None:
    with torch.device("meta"):
        model = toy()
    assert next(open_model(model, preprocessing=EXPLICIT).module.parameters()).is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_transform_gives_the_models_input(dtype: torch.dtype) -> None:
    loaded: Any = open_model(toy().to(dtype), preprocessing=EXPLICIT)
    batch = loaded.make_batch([image(), image(1)])
    assert (batch.dtype, batch.shape) == (dtype, (2, 3, 64, 32))
    expected = preprocess_image(open_image(image(1)), Preprocessing(image_size=(64, 32), crop=0.7))
    assert torch.equal(batch[1], torch.from_numpy(expected).to(dtype))
    assert torch.equal(loaded.transform(image(1)), batch[1])
    assert loaded.model(batch).shape == (2, 7)


def test_an_image_that_cannot_be_transformed_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'.*none\.png' does not exist"):
        open_model(toy(), preprocessing=EXPLICIT).transform(tmp_path / "none.png")


def test_a_model_without_a_head_has_no_labels() -> None:
    loaded: Any = open_model(toy(classes=0), preprocessing=EXPLICIT, labels=["a", "b"])
    assert (loaded.labels, loaded.classes) == (None, 0)
    assert loaded.model(loaded.make_batch([image()])).shape == (1, 16)


def test_weights_read_in_inference_mode_still_have_gradients(tmp_path: Path) -> None:
    vitrail.save(toy(), tmp_path, preprocessing=Preprocessing())
    with torch.inference_mode():
        loaded: Any = open_model(tmp_path)
    loaded.model(loaded.make_batch([image()])).sum().backward()
    assert next(loaded.model.parameters()).grad is not None


def test_a_run_opens_its_model_and_knows_its_data(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", tmp_path / "data")
    loaded = open_model(run)
    assert loaded.run is not None
    assert (loaded.run.data, loaded.run.seed, loaded.run.val_share) == (str(tmp_path / "data"), 3, 0.5)
    assert (loaded.source, loaded.labels, loaded.classes) == (str(run), ("ants", "bees", "cats"), 3)
    assert open_model(run / "model").run is None


def test_an_exported_model_predicts_as_its_module(exported: ExportFinder) -> None:
    loaded: Any = open_model(exported("onnx"), threads=1)
    assert isinstance(loaded.model, ExportedModel)
    assert (loaded.preprocessing, loaded.labels, loaded.classes) == (PREPROCESSING, LABELS, len(LABELS))
    own: Any = open_model(make_toy_model("vit"), preprocessing=PREPROCESSING)
    photos = [image(), image(1)]
    with torch.inference_mode():
        expected = own.model(own.make_batch(photos)).numpy()
    assert loaded.make_batch(photos).shape == (2, 48, 32, 3)
    assert np.abs(loaded.model(loaded.make_batch(photos)) - expected).max() < 1e-4 * np.abs(expected).max()
    alone: Any = open_model(exported("onnx") / "model.onnx", threads=1)
    assert np.array_equal(alone.model(alone.make_batch(photos)), loaded.model(loaded.make_batch(photos)))


def test_the_module_of_an_export_gets_every_pixel_back(exported: ExportFinder) -> None:
    loaded: Any = open_model(exported("onnx"), threads=1)
    pixels = random_pixels(2)
    pixels[0].flat[:256] = np.arange(256)
    mean, std = (np.array(each, np.float32) for each in (PREPROCESSING.mean, PREPROCESSING.std))
    normalized = ((pixels / np.float32(255) - mean) / std).transpose(0, 3, 1, 2)
    found = loaded.module(torch.from_numpy(np.ascontiguousarray(normalized)))
    assert np.array_equal(found.numpy(), loaded.model(pixels))


def test_opening_an_export_does_not_import_torch(exported: ExportFinder) -> None:
    program = (
        "import sys\nfrom vitrail.opening import open_model\n"
        f"loaded = open_model({str(exported('onnx'))!r})\n"
        f"from PIL import Image\nloaded.model(loaded.make_batch([Image.new('RGB', (40, 50))]))\n"
        "print([name for name in ('torch', 'safetensors', 'yaml', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_an_export_takes_the_preprocessing_that_fits_its_file(exported: ExportFinder) -> None:
    assert open_model(exported("onnx"), preprocessing={"crop": 1.0}).preprocessing.crop == 1.0
    assert open_model(exported("onnx"), image_size=(48, 32)).preprocessing.image_size == (48, 32)
    with pytest.raises(ConfigError, match=r"`image_size` 64×64 for .*, which was exported for images of 48×32; export"):
        open_model(exported("onnx"), image_size=64)
    assert open_model(exported("any size"), image_size=64).preprocessing.image_size == (64, 64)
    with pytest.raises(ConfigError, match="another mean or std"):
        open_model(exported("any size"), preprocessing={"mean": (0.5,) * 3})
    with pytest.raises(ConfigError, match="multiples of 16"):
        open_model(exported("any size"), image_size=50)
    with pytest.raises(ConfigError, match=r"heads=… for .*, which is exported and complete"):
        open_model(exported("onnx"), fields={"heads": 2})


def test_another_image_size_resamples_the_positions() -> None:
    loaded = open_model("vit_fashion", image_size=56)
    assert loaded.preprocessing.image_size == (56, 56)
    expected = vitrail.load("vit_fashion", image_size=56).state_dict()
    for name, tensor in loaded.module.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    assert vitrail.Predictor("vit_fashion", image_size=56).features("example:cat", "tokens").shape == (65, 64)


def test_the_image_size_is_not_a_field_of_the_preprocessing() -> None:
    with pytest.raises(ConfigError, match="`preprocessing` image_size=56; expected `image_size`"):
        open_model("vit_fashion", preprocessing={"image_size": 56})
    with pytest.raises(ConfigError, match="expected one of crop, fit, middle, interpolation, mean, std"):
        open_model("vit_fashion", preprocessing={"sizes": 56})
    with pytest.raises(ConfigError, match="`image_size` for vit_fashion, which is already loaded; open a checkpoint"):
        open_model(open_model("vit_fashion"), image_size=56)


def test_1000_classes_without_names_are_those_of_imagenet_in_a_public_layout_only(tmp_path: Path) -> None:
    model = vitrail.create("deit_tiny_patch16_224", image_size=32, width=64, heads=1, depth=1)
    vitrail.save(model, tmp_path / "deit.pth", to="deit")
    vitrail.save(model, tmp_path / "own")
    vitrail.save(model, tmp_path / "header.safetensors", to="timm")
    fewer = vitrail.create("deit_tiny_patch16_224", image_size=32, width=64, heads=1, depth=1, classes=999)
    vitrail.save(fewer, tmp_path / "fewer.pth", to="deit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of heads and preprocessing
        labels = {name: open_model(tmp_path / name).labels for name in ("deit.pth", "own", "header.safetensors")}
        assert open_model(tmp_path / "fewer.pth").labels is None
        named = open_model(tmp_path / "own", labels="imagenet").labels
    assert labels["own"] is labels["header.safetensors"] is None
    assert labels["deit.pth"] == named
    assert named is not None
    assert named[285] == "Egyptian cat"


def test_what_needs_layers_refuses_an_export_and_timm(exported: ExportFinder) -> None:
    for name, message in ((exported("onnx"), "is an exported model"), ("timm:vit_tiny_patch16_224", "timm's code")):
        for opening in (open_torch_model, vitrail.Explainer):
            with pytest.raises(ConfigError, match=message):
                opening(name)


def test_fields_are_config_fields_only(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model")
    for name in ("path", "source", "family", "policy", "dtype"):
        with pytest.raises(ConfigError, match=f"{name}=…; expected a field of the config"):
            open_model(model, fields={name: 1})
    with pytest.raises(ConfigError, match="heads=… for ViT, which is already loaded"):
        open_model(toy(), fields={"heads": 2})


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_missing_preprocessing_is_assumed_for_the_models_channels_with_one_warning(
    channels: int, tmp_path: Path
) -> None:
    vitrail.save(toy(channels=channels), tmp_path / "model")
    for model in (tmp_path / "model", toy(channels=channels)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = open_model(model)
        half = (0.5,) * channels
        assert loaded.preprocessing == Preprocessing(image_size=(64, 32), mean=half, std=half)
        (warning,) = caught
        assert "does not specify preprocessing; assumed preprocessing=mean" in str(warning.message)
        assert "0.5" in str(warning.message)
        assert "crop 0.9, bicubic" in str(warning.message)


def test_given_mean_and_std_need_no_warning(tmp_path: Path) -> None:
    vitrail.save(toy(channels=1), tmp_path / "model")
    given = {"mean": (0.3,), "std": (0.2,), "crop": 1.0}
    assert open_model(tmp_path / "model", preprocessing=given).preprocessing.mean == (0.3,)
    assert open_model(toy(channels=1), preprocessing=given).preprocessing.crop == 1.0
    with pytest.warns(UserWarning, match="does not specify preprocessing; assumed"):
        assert open_model(tmp_path / "model", preprocessing={"crop": 1.0}).preprocessing.mean == (0.5,)
    with pytest.raises(ConfigError, match="has 3 channels; expected 1"):
        open_model(tmp_path / "model", preprocessing=Preprocessing())


def test_the_package_shows_its_public_names_only() -> None:
    assert set(dir(vitrail)) == {*vitrail.__all__, "__version__"}
    assert vitrail.checkpoint.__name__ == "vitrail.checkpoint"
    assert all(getattr(vitrail, name) is not None for name in vitrail.__all__)
