"""A field of a config that is set has an effect on the model, or is an error: nothing is ignored silently."""

from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from models.base.test_contract import CASES, SIZE
from support.noisy_weights import add_weight_noise
from support.text_models import TEXT_CASES, draw_sentences, read_source
from torch import Tensor, nn

import vitrail
from vitrail.base.errors import ConfigError, VitrailError
from vitrail.models.base.text_contract import TextModel
from vitrail.models.catalog.families import load_built_in_families

FAMILIES = {family.name: family for family in load_built_in_families()}
IMAGE_CASES = {case: (name, {"image_size": SIZE, "classes": 5, **own}) for case, (name, own) in CASES.items()}
NO_TABLE = {"vit, map", "vit, rotary"}  # prefix_positions has nothing to change, but public files state it anyway
PLAIN = (bool, int, float, str, tuple, type(None))


def list_other_values(field: Field[Any], value: Any, hint: Any) -> Iterator[Any]:
    """Some other values of a field; not all of them need be valid."""
    if "rate" in field.metadata or "share" in field.metadata:
        yield 0.5 if value != 0.5 else 0.25
        return
    for kind in get_args(hint) if get_origin(hint) is not Literal else (hint,):
        yield from get_args(kind) if get_origin(kind) is Literal else ()
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value, max(value // 2, 1))
    elif isinstance(value, float):
        yield from (1.5 * value, value / 2, 0.3)
    elif isinstance(value, tuple):
        items: tuple[Any, ...] = value
        yield from (tuple(2 * each for each in items), tuple(1 + each for each in items), (*items, *items[-1:]), (8,))
    elif value is None:
        yield from (1, 2, 3, 0.5, True)


def describe_structure(model: nn.Module) -> Any:
    """Everything of a model but the values of its weights: modules, shapes, and the settings that they keep."""
    kept = {
        name: {key: value for key, value in vars(module).items() if key[0] != "_" and isinstance(value, PLAIN)}
        for name, module in model.named_modules()
    }
    shapes = {name: (each.shape, each.requires_grad) for name, each in model.named_parameters()}
    return repr(model), kept, shapes


def run(model: Any) -> Tensor:
    """The output in training mode, with weights and dropout as the seed draws them."""
    torch.manual_seed(0)
    model = add_weight_noise(model.to_empty(device="cpu"), std=0.3).train()
    if isinstance(model, TextModel):
        source, target = draw_sentences(2, 6), draw_sentences(2, 5, seed=1)
        return model.decode(read_source(model, source), target)
    return model(torch.randn(2, model.config.channels, *SIZE, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("case", {**IMAGE_CASES, **TEXT_CASES})
@torch.no_grad()
def test_every_field_changes_the_model_or_is_an_error(case: str) -> None:
    name, own = {**IMAGE_CASES, **TEXT_CASES}[case]
    family = FAMILIES[name]
    config, hints = family.configure(**own), get_type_hints(family.config)

    def build(**changes: Any) -> Any:
        with torch.device("meta"):
            return family.build(family.configure(config, **changes))

    structure = describe_structure(build())

    def has_effect(field: str, value: Any) -> bool:
        try:
            changed = build(**{field: value})
            return describe_structure(changed) != structure or not torch.equal(run(changed), run(build()))
        except VitrailError:
            return True

    for field in fields(config):
        if case in NO_TABLE and field.name == "prefix_positions":
            continue
        value = vars(config)[field.name]
        others = [each for each in list_other_values(field, value, hints[field.name]) if each != value]
        assert others, field.name
        assert any(has_effect(field.name, each) for each in others), f"{field.name} is not used by {case}"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "lstm_bahdanau_cpu",
            {"luong_score": "dot"},
            r"luong_score is 'dot', which .* not use; expected attention='lu",
        ),
        ("lstm_bahdanau_cpu", {"input_feeding": False}, "input_feeding is False, which .* expected attention='luong'"),
        ("lstm_luong_cpu", {"attention_width": 8}, "attention_width is 8, which .* expected attention='bahdanau', or"),
        ("crossformer_tiny_patch4_group7_224", {"cooling": True, "stages": (1, 1, 3, 2)}, "a stage of more than 3"),
    ],
)
def test_a_field_that_the_model_does_not_use_is_an_error(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vitrail.create(name, **given)
