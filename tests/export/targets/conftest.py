from pathlib import Path

import pytest
from support.target_folders import WriteTarget, make_target_writer
from support.toy_exports import ExportFinder


@pytest.fixture
def write_target(exported: ExportFinder, tmp_path: Path) -> WriteTarget:
    return make_target_writer(exported, tmp_path)
