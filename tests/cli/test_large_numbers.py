"""Numbers that no option expects: one line that names the option, before anything is opened."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
from cyclopts import CycloptsError

from vitrail.base.errors import ConfigError
from vitrail.cli import COMMANDS, build_app
from vitrail.cli.options.values import MAX_NUMBER, MAXIMA
from vitrail.cli.usage_errors import describe_usage_error, find_arguments


@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in ("runs", "models", "env")])
def test_every_whole_number_has_a_limit(command: str) -> None:
    app = build_app([command])
    with pytest.raises(CycloptsError) as unknown:
        app([*command.split(), "--unknown-option"], print_error=False, exit_on_error=False)
    arguments = list(find_arguments(unknown.value))
    words = [*command.split(), *["vit_fashion" for each in arguments if each.required]]
    words += ["--to", "timm"] if command == "convert" else []
    options = [each.name for each in arguments if int in (each.hint, *get_args(each.hint))]
    for number, option in enumerate(options):
        limit = MAXIMA.get(option.removeprefix("--"), MAX_NUMBER)
        values = ((limit + 1, f"at most {limit:,}"), (10**30, f"at most {limit:,}"), (-(10**12), "at least 0"))
        for value, expected in values[: 3 if number == 0 else 1]:  # all checks are one function
            with pytest.raises((CycloptsError, ConfigError)) as raised:
                app([*words, option, str(value)], print_error=False, exit_on_error=False)
            error = raised.value
            message = describe_usage_error(error) if isinstance(error, CycloptsError) else str(error)
            assert message == f"{option} {value}; expected {expected}"


@pytest.mark.parametrize(
    "words",
    [
        ("look", "vit_fashion", "--images", 10**15),
        ("predict", "vit_fashion", "example:cat", "--batch", 10**12),
        ("bench", "vit_fashion", "--threads", 999999),
    ],
)
def test_message_and_exit_code(vitrail_: Callable[..., Any], words: tuple[object, ...]) -> None:
    done = vitrail_(*words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"vitrail: {words[-2]} {words[-1]}; expected at most ")


def test_a_model_that_does_not_fit_into_memory(vitrail_: Callable[..., Any]) -> None:
    """Its table of positions would have 281 TB."""
    sizes = ("--set", "patch_size=1", "--set", "width=1048576", "--set", "heads=1", "--image-size", 8192)
    done = vitrail_("train", "--model", "ViT-Ti/16", *sizes, "--dry-run")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert done.err.startswith("vitrail: there is not enough memory: ")
    assert done.err.endswith("; use a smaller model, image size or batch\n")
