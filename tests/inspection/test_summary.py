"""The summary matches the parameters, outputs and activations of the model."""

from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from vitrail.inspection.summary import ModelSummary


def summary(name: str, depth: int = 9, batch: int = 1, **fields: Any) -> ModelSummary:
    with torch.device("meta"):
        return vitrail.summarize(vitrail.create(name, **fields), depth=depth, batch=batch)


def test_vit_base_has_the_parameters_of_the_paper() -> None:
    found = summary("ViT-B/16")
    assert found.parameters == found.trainable == 86_567_656
    assert found.parameters - found.bare == 86_415_592
    bare = {row.path: row.shape for row in found.rows if row.kind == "parameter"}
    assert bare == {"cls_token": (1, 1, 768), "pos_embed": (1, 197, 768)}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_tiny_r_s16_p8_224"])
def test_rows_add_up(name: str) -> None:
    found = summary(name, depth=1, image_size=64)
    assert sum(row.parameters for row in found.rows) == found.parameters
    whole = summary(name, image_size=64)
    leaves = [row for row in whole.rows if not any(other.path.startswith(row.path + ".") for other in whole.rows)]
    assert sum(row.parameters for row in leaves) == whole.parameters


def test_shapes_and_activations_match_a_real_pass() -> None:
    model = vitrail.create("vit_tiny_patch16_224", image_size=64, depth=2)
    found = vitrail.summarize(model, batch=3, depth=9)
    shapes, kept = dict[str, tuple[int, ...]](), 0

    def note(path: str, leaf: bool) -> Any:
        def hook(_: Any, inputs: Any, output: Tensor) -> None:
            nonlocal kept
            shapes[path] = tuple(output.shape)
            kept += output.numel() * output.element_size() if leaf and output is not inputs[0] else 0

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(note(path, not list(module.children())))
    model.logits(model.tokens(torch.randn(3, 3, 64, 64)))
    assert found.activations == kept
    for row in found.rows:
        if row.kind not in ("parameter", "ModuleList"):
            assert row.shape == shapes[row.path], row.path


def test_estimated_activations_are_near_those_of_autograd() -> None:
    model = vitrail.create("vit_tiny_patch16_224").train()
    weights, kept = {parameter.data_ptr() for parameter in model.parameters()}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    images = torch.randn(2, 3, 224, 224)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model.logits(model.tokens(images))
    assert logits.requires_grad
    estimate = vitrail.summarize(model, batch=2).activations
    assert abs(sum(kept.values()) / estimate - 1) < 0.1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # from torch's compiler
def test_summary_describes_the_model_not_its_config() -> None:
    model = vitrail.create("vit_tiny_patch16_224", image_size=64, depth=1)
    model.head = torch.nn.Linear(192, 5)
    model.blocks.requires_grad_(False)
    found = vitrail.summarize(model)
    assert found.rows[-1].shape == (1, 5)
    assert found.trainable == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert found.trainable < found.parameters
    compiled: Any = torch.compile(model)
    assert vitrail.summarize(compiled) == found


def test_errors() -> None:
    with pytest.raises(vitrail.ConfigError, match=r"Linear has no config; expected a model"):
        vitrail.summarize(torch.nn.Linear(2, 2))
    with pytest.raises(vitrail.ConfigError, match=r"`batch` is 0; expected 1 or more"):
        summary("ViT-Ti/16", depth=1, batch=0)


def test_macs_count_all_tokens_of_the_last_block_and_scale_with_the_batch() -> None:
    model = vitrail.create("vit_tiny_patch16_224", image_size=64, depth=2)
    one, three = vitrail.summarize(model), vitrail.summarize(model, batch=3)
    assert three.macs == 3 * one.macs
    whole, *blocks = [row.macs for row in one.rows if row.path.startswith("blocks")]
    assert len(blocks) == 2
    assert blocks[0] == blocks[1] == whole / 2
    n, d, m = 17, 192, 768
    assert blocks[0] == 4 * d * d * n + 2 * d * m * n + 2 * n * n * d
    assert one.macs == 2 * blocks[0] + 16 * 3 * 16 * 16 * d + d * 1000


def test_frozen_tables_are_not_trainable() -> None:
    found = summary("ViT-Ti/16", positions="sincos")
    assert found.parameters - found.trainable == 197 * 192


def test_model_is_not_changed() -> None:
    model = vitrail.create("vit_tiny_patch16_224", image_size=64, depth=1)
    vitrail.summarize(model)
    assert not any(vars(module)["_forward_hooks"] for module in model.modules())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_text_of_the_table() -> None:
    text = str(summary("vit_tiny_patch16_224", depth=1, image_size=64, classes=10))
    assert text.splitlines()[0] == "ViT, input 1×3×64×64"
    assert "pos_embed    parameter   1×17×192           3,264" in text
    assert "positions=learned" in text
    assert "blocks       ModuleList                 5,338,368   91.6" in text
