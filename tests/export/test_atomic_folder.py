"""The folder that an export is written to."""

from pathlib import Path

import pytest

from vitrail.errors import CheckpointError
from vitrail.export.atomic_folder import check_target_folder


def test_name_of_a_file_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"model\.onnx: an export is a folder .* such as model$"):
        check_target_folder(Path("model.onnx"), overwrite=False)
