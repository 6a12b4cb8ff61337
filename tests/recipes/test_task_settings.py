"""Settings of tasks without labels that cannot work are refused."""

from typing import Any

import pytest

from vitrail.base.errors import ConfigError
from vitrail.recipes.schedule import Schedule
from vitrail.recipes.task_settings import ByolSettings, CheckedSettings, DinoSettings


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (ByolSettings, {"teacher_momentum": Schedule(start=2)}, "`teacher_momentum` has the value 2; .* 0 to 1"),
        (ByolSettings, {"teacher_momentum": Schedule(start=0.9, end=-1)}, "the value -1"),
        (DinoSettings, {"teacher_temperature": Schedule(start=0)}, "temperature` has the value 0; .* at least 0.001"),
        (DinoSettings, {"teacher_temperature": Schedule(start=0.07, warmup=3)}, "start of a warm-up"),
        (DinoSettings, {"prototypes": 1}, "`prototypes` is 1; expected 2 or more"),
    ],
)
def test_values_that_cannot_work_are_refused(kind: type[CheckedSettings], values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**values)
