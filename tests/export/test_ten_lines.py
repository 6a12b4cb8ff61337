"""The ten lines that run an export without vitrail, as docs/prediction.md shows them, predict as vitrail does."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from support.noisy_weights import add_weight_noise

import vitrail
from vitrail.data.photos import list_example_photos

TEN_LINES = """
import json
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession("shipped/model.onnx")
about = json.loads(Path("shipped/config.json").read_text())
size, crop = session.get_inputs()[0].shape[1], about["preprocessing"]["crop"]
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
short = int(size / crop)  # the short side becomes floor(size / crop), the long side follows
photo = photo.resize([short * side // min(photo.size) for side in photo.size], Image.Resampling.BICUBIC)
left, top = (round((side - size) / 2) for side in photo.size)  # then the centre is cropped
pixels = np.asarray(photo.crop((left, top, left + size, top + size)))
logits = session.run(None, {"pixels": pixels[None]})[0][0]
probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
print(about["labels"][probabilities.argmax()], probabilities.max())
"""


def test_ten_lines_of_your_own_predict_as_vitrail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fields: dict[str, Any] = {"image_size": 32, "classes": 3, "depth": 1, "width": 16, "heads": 2}
    model = add_weight_noise(vitrail.create("vit_tiny_patch16_224", **fields), std=0.3)
    how, labels = vitrail.Preprocessing(image_size=32, crop=0.9), ("ants", "bees", "cats")
    vitrail.export_model(model, "shipped", preprocessing=how, labels=labels)
    predictor = vitrail.Predictor("shipped", threads=1)
    for photo in list_example_photos():
        Path("photo.jpg").write_bytes(photo.read_bytes())
        with redirect_stdout(io.StringIO()) as said:
            exec(compile(TEN_LINES, "ten lines", "exec"), {})
        label, probability = said.getvalue().split()
        expected = predictor.predict(photo).top[0]
        assert label == expected.label
        assert float(probability) == pytest.approx(expected.probability, abs=1e-6)
