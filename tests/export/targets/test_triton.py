"""The model repository for Triton, as Triton's own messages read it."""

from pathlib import Path

import numpy as np
import pytest
from support.target_folders import WriteTarget
from support.toy_exports import LABELS, SIZE, random_pixels

from vitrail.base.errors import CheckpointError
from vitrail.export.exported_model import ExportedModel
from vitrail.export.targets.deployment import Deployment
from vitrail.export.targets.triton import check_config

pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="needs tritonclient[grpc]")


@pytest.mark.parametrize(("source", "batch"), [("onnx", 8), ("int8", 1)])
def test_the_repository(write_target: WriteTarget, source: str, batch: int) -> None:
    """int8 measures its range over a batch, so it runs image by image."""
    folder, _ = write_target("triton", source)
    files = sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file())
    assert files == ["toy-2/1/config.json", "toy-2/1/model.onnx", "toy-2/config.pbtxt", "toy-2/labels.txt"]
    notes = list[str]()
    made = Deployment(
        name="toy-2",
        folder=folder,
        model=folder / "toy-2" / "1",
        about=ExportedModel(folder / "toy-2" / "1").description,
        note=notes.append,
    )
    config = check_config((folder / "toy-2" / "config.pbtxt").read_text(), made)
    assert not notes
    assert (config.name, config.backend, config.max_batch_size) == ("toy-2", "onnxruntime", batch)
    assert config.HasField("dynamic_batching") == (batch > 1)
    assert (config.input[0].name, list(config.input[0].dims)) == ("pixels", [*SIZE, 3])
    assert (config.output[0].name, list(config.output[0].dims)) == ("logits", [len(LABELS)])
    assert config.output[0].label_filename == "labels.txt"
    assert (folder / "toy-2" / "labels.txt").read_text().split() == list(LABELS)
    assert list(config.model_warmup[0].inputs["pixels"].dims) == [*SIZE, 3]
    assert ExportedModel(folder / "toy-2" / "1").run(random_pixels(2)).shape == (2, len(LABELS))


def test_any_size_and_features(write_target: WriteTarget) -> None:
    folder, _ = write_target("triton", "any size", "sizes")
    assert "dims: [-1, -1, 3] }" in (folder / "sizes" / "config.pbtxt").read_text()
    folder, _ = write_target("triton", "tokens", "tokens")
    text = (folder / "tokens" / "config.pbtxt").read_text()
    shape = list(ExportedModel(folder / "tokens" / "1").run(np.zeros((1, *SIZE, 3), np.uint8)).shape[1:])
    assert f'name: "tokens"\n    data_type: TYPE_FP32\n    dims: {shape}' in text


def test_a_typo_is_refused(write_target: WriteTarget, tmp_path: Path) -> None:
    made = Deployment(name="toy", folder=tmp_path, model=tmp_path, about=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match=r"config\.pbtxt is not a configuration of Triton: .*max_batches"):
        check_config("max_batches: 8", made)
