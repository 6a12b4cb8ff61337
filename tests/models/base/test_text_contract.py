"""What all models that write text have in common: the cache, padding, beams and the future change no output."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.text_models import (
    PAD,
    TEXT_CASES,
    VOCABULARY,
    build_text_model,
    draw_sentences,
    pad_rows,
    read_source,
)
from torch import Tensor

import vitrail
from vitrail.base.errors import ConfigError
from vitrail.models.base.text_contract import TextModel

LENGTHS = [9, 4, 6, 1]
SOURCE, TARGET = pad_rows(draw_sentences(4, 9), LENGTHS), draw_sentences(4, 7, seed=1)


def run_steps(model: TextModel, state: Any, target: Tensor) -> tuple[Tensor, Any]:
    logits = list[Tensor]()
    for tokens in target.unbind(1):
        output, state = model.step(tokens, state)
        logits.append(output)
    return torch.stack(logits, dim=1), state


def assert_same_tokens(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("case", TEXT_CASES)
@torch.inference_mode()
def test_one_token_at_a_time_is_the_same_as_all_at_once(case: str) -> None:
    model = build_text_model(case)
    memory = read_source(model, SOURCE)
    expected = model.decode(memory, TARGET)
    assert expected.shape == (4, 7, VOCABULARY)
    assert expected.std() > 0.01
    assert_same_tokens(run_steps(model, model.start(memory, 7), TARGET)[0], expected)


@pytest.mark.parametrize("case", TEXT_CASES)
@torch.inference_mode()
def test_a_batch_with_padding_is_the_same_as_each_sentence_alone(case: str) -> None:
    model = build_text_model(case)
    together = model.decode(read_source(model, SOURCE), TARGET)
    for row, length in enumerate(LENGTHS):
        memory = read_source(model, SOURCE[row : row + 1, :length])
        assert_same_tokens(together[row : row + 1], model.decode(memory, TARGET[row : row + 1]))
        alone, _ = run_steps(model, model.start(memory, 7), TARGET[row : row + 1])
        assert_same_tokens(together[row : row + 1], alone)


@pytest.mark.parametrize("case", TEXT_CASES)
@pytest.mark.parametrize("rows", [[1, 0, 3, 2], [0, 0, 2, 2], [2], [3, 1, 1, 0, 2, 2]])
@torch.inference_mode()
def test_reordered_rows_are_the_same_as_computed_again(case: str, rows: list[int]) -> None:
    model, chosen = build_text_model(case), torch.tensor(rows)
    state = run_steps(model, model.start(read_source(model, SOURCE), 7), TARGET[:, :3])[1]
    later = draw_sentences(len(rows), 4, seed=2)
    ours, state = run_steps(model, state.reorder(chosen), later[:, :2])
    again = torch.arange(len(rows)).flip(0)
    rest, _ = run_steps(model, state.reorder(again), later[again, 2:])
    whole = torch.cat([TARGET[chosen, :3], later], dim=1)
    expected = model.decode(read_source(model, SOURCE[chosen]), whole)[:, 3:]
    assert_same_tokens(ours, expected[:, :2])
    assert_same_tokens(rest, expected[again, 2:])


@pytest.mark.parametrize("case", TEXT_CASES)
@torch.inference_mode()
def test_beams_of_one_sentence_share_its_memory(case: str) -> None:
    model, beams = build_text_model(case), torch.tensor([0, 0, 1, 1])
    memory = read_source(model, SOURCE[:2])
    state = model.start(memory, 5).reorder(beams)
    state = run_steps(model, state, TARGET[:, :2])[1].reorder(torch.tensor([1, 0, 2, 2]))
    ours, _ = run_steps(model, state, TARGET[:, 2:5])
    whole = torch.cat([TARGET[[1, 0, 2, 2], :2], TARGET[:, 2:5]], dim=1)
    assert_same_tokens(ours, model.decode(read_source(model, SOURCE[beams]), whole)[:, 2:])


def collect_embeddings(model: TextModel) -> list[Tensor]:
    """The embedded tokens of each following pass, source first; their gradients are kept."""
    embedded = list[Tensor]()

    def keep(_: Any, __: Any, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    for module in (model.target_embed, model.source_embed):
        if module is not None:
            module.register_forward_hook(keep)
    return embedded


@pytest.mark.parametrize("case", TEXT_CASES)
def test_no_logit_depends_on_a_later_token(case: str) -> None:
    model = build_text_model(case)
    embedded = collect_embeddings(model)
    logits = model.decode(read_source(model, SOURCE), TARGET)
    logits[:, 3].square().sum().backward()
    gradient = embedded[-1].grad
    assert gradient is not None
    assert (gradient[:, :4] != 0).any(-1).all()
    assert torch.equal(gradient[:, 4:], torch.zeros_like(gradient[:, 4:]))


@pytest.mark.parametrize("case", TEXT_CASES)
def test_padding_gets_no_gradient(case: str) -> None:
    model = build_text_model(case)
    embedded, target = collect_embeddings(model), pad_rows(TARGET, [7, 3, 5, 2])
    logits = model.decode(read_source(model, SOURCE), target)
    logits[target != PAD].square().sum().backward()
    for tokens, output in zip([SOURCE, target][-len(embedded) :], embedded, strict=True):
        assert output.grad is not None
        assert torch.equal(output.grad[tokens == PAD], torch.zeros_like(output.grad[tokens == PAD]))
        if tokens is SOURCE and model.config.__dict__.get("attention") == "none":
            continue
        assert (output.grad[tokens != PAD] != 0).any(-1).all()


@pytest.mark.parametrize("case", TEXT_CASES)
@torch.inference_mode()
def test_attention_rows_sum_to_one_and_ignore_padding_and_the_future(case: str) -> None:
    model = build_text_model(case)
    maps = model.attention_maps(read_source(model, SOURCE), TARGET, SOURCE)
    kinds = (maps.encoder, maps.decoder, maps.cross)
    assert all(each is None for each in kinds) == bool(model.no_maps_reason)
    for each in kinds:
        if each is not None:
            torch.testing.assert_close(each.sum(-1), torch.ones_like(each.sum(-1)))
    layers, heads = (2, 2) if TEXT_CASES[case][0] == "transformer" else (1, 1)
    if maps.decoder is not None:
        assert maps.decoder.shape == (4, layers, heads, 7, 7)
        assert torch.equal(maps.decoder, maps.decoder.tril())
    if maps.encoder is not None:
        assert maps.encoder.shape == (4, layers, heads, 9, 9)
        assert not maps.encoder.transpose(1, 4)[SOURCE == PAD].any()
    if maps.cross is not None:
        assert maps.cross.shape == (4, layers, heads, 7, 9)
        assert not maps.cross.transpose(1, 4)[SOURCE == PAD].any()


@pytest.mark.parametrize("case", ["pre-norm", "share target", "no encoder", "bahdanau, 2 layers"])
@torch.inference_mode()
def test_a_saved_model_is_loaded_with_the_same_outputs(case: str, tmp_path: Path) -> None:
    model = build_text_model(case)
    vitrail.save(model, tmp_path / "model")
    loaded = vitrail.load(tmp_path / "model", dropout=0.5)
    assert loaded.config.dropout == 0.5
    memory = read_source(model, SOURCE)
    assert torch.equal(loaded.decode(memory, TARGET), model.decode(memory, TARGET))
    assert vitrail.describe(tmp_path / "model").family == TEXT_CASES[case][0]


@pytest.mark.parametrize("case", ["post-norm", "bahdanau"])
def test_a_model_in_double_precision(case: str) -> None:
    model = build_text_model(case).double()
    logits = model(SOURCE, TARGET)
    assert logits.dtype == torch.float64
    steps, _ = run_steps(model, model.start(model.encode(SOURCE), 7), TARGET)
    torch.testing.assert_close(steps, logits)


@pytest.mark.parametrize("case", ["post-norm", "bahdanau"])
@pytest.mark.parametrize("wrong", [torch.zeros(2, 3), torch.zeros(3).long(), torch.zeros(2, 0).long()])
def test_anything_but_rows_of_tokens_is_an_error(case: str, wrong: Tensor) -> None:
    model = build_text_model(case)
    with pytest.raises(
        ConfigError, match=r"^the source is a tensor of .*; expected token ids, .* \(sentences, tokens\)$"
    ):
        model.encode(wrong)
    with pytest.raises(ConfigError, match=r"^the target is a tensor of .*; expected token ids"):
        model(SOURCE, wrong)


def test_training_with_dropout_reaches_every_parameter() -> None:
    for case in TEXT_CASES:
        model = build_text_model(case).train()
        model.decode(read_source(model, SOURCE), TARGET).logsumexp(-1).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (case, name)
