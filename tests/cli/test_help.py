"""Every help text: its form, its words, its default, its heading."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from cyclopts import App

from vitrail.cli import COMMAND_GROUPS, COMMANDS, TOP_HELP, build_app, load_command
from vitrail.cli.output.help_text import HIDDEN_DEFAULTS, format_description, format_names
from vitrail.cli.usage_errors import SYNONYMS_FILE, list_names
from vitrail.recipes.recipe import open_recipe

Run = Callable[..., Any]
FORBIDDEN_WORDS = re.compile(
    r"\b(pictures?|plates?|go(es)? on|unless said|anew|is no|beside|answer|sitting|as ever|whole|to the bit|a step)\b",
    re.IGNORECASE,
)
OFF_BY_DEFAULT = {  # without a value, nothing happens that the text does not say
    *(
        "--init",
        "--published",
        "--resume",
        "--set",
        "--preprocessing",
        "--teacher",
        "--teacher-set",
        "--teacher-cache",
        "--trust-code",
    ),
    *("--without", "--with", "--check", "--out", "--real", "--wrong"),
}


@cache
def find_command(name: str) -> App:
    app = build_app([name])
    for word in name.split():
        app = app[word]
    return app


def list_options(name: str) -> Iterator[Any]:
    """The entries of a command's help page."""
    from cyclopts.help.help import create_parameter_help_panel

    arguments = find_command(name).assemble_argument_collection(parse_docstring=True)
    for group in arguments.groups:
        yield from create_parameter_help_panel(group, arguments.filter_by(group=group), "plaintext").entries


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_sentence_and_its_default(name: str) -> None:
    options = list(list_options(name))
    assert options
    for option in options:
        text, _, default = str(option.description.primary_renderable).partition(" [default: ")
        assert re.match(r"[A-Z]", text), f"{format_names(option)}: {text!r} does not start with a capital"
        assert text.endswith("."), f"{format_names(option)}: {text!r} does not end with a period"
        assert default == "" or default.endswith("]"), f"{format_names(option)}: the default comes last: {default!r}"
        assert "default:" not in text
        assert not (found := FORBIDDEN_WORDS.search(re.sub(r"-\w+|`.*?`", "", text))), (format_names(option), found)
        is_flag = not option.metavar
        has_default = default or option.default is not None or option.required or option.positional_label or is_flag
        assert has_default or OFF_BY_DEFAULT & set(option.names), f"{format_names(option)} shows no default"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_summary_and_examples(name: str) -> None:
    text = load_command(name).__doc__ or ""
    summary, *rest = text.split("\n\n")
    assert re.fullmatch(r"[A-Z][^\n]{20,90}\.", summary), summary
    assert rest[0][0].isupper()
    assert rest[0].rstrip().endswith((".", "…"))
    assert not (found := FORBIDDEN_WORDS.search(re.sub(r"`.*?`", "", text.partition("Parameters\n")[0]))), found
    examples = re.findall(r"^    (vitrail .+)$", text, re.MULTILINE)
    assert len(examples) >= 2
    assert all(each.startswith(f"vitrail {name}") for each in examples), examples
    assert max(map(len, examples)) <= 100


@pytest.mark.parametrize("name", ["runs", "probe", "compare", "bench", "ablate", "study cost", "study positions"])
def test_commands_with_a_table_say_how_to_write_it(name: str) -> None:
    (out,) = (entry for entry in list_options(name) if "--out" in entry.names)
    assert "Or a file for the table alone: .txt, .json, .csv, .md, .tex or .html." in format_description(out)


def test_the_first_page_has_three_lines_and_groups(vitrail_: Run) -> None:
    assert len([line for line in TOP_HELP.splitlines() if line]) == 3
    page = vitrail_("--help").out
    headings = [line for line in page.splitlines() if re.match(r"[A-Z]", line)]
    assert headings[-8:] == [*COMMAND_GROUPS, "Options"]
    listed = re.findall(r"^  ([a-z][\w-]*) {2,}[A-Z]", page, re.MULTILINE)
    assert listed == list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    assert vitrail_().out == page


def test_a_page_has_headings_without_boxes(vitrail_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = vitrail_("train", "--help").out
    lines = page.splitlines()
    assert lines[:2] == ["Usage: vitrail train [OPTIONS]", ""]
    assert lines[2] == "Train a model on a folder of images, on sentence pairs, or on images with captions."
    headings = (
        "Common options",
        "Model",
        "Data",
        "Augmentation",
        "Optimizer",
        "Training loop",
        "Devices and speed",
        "Translation",
        "Captions",
    )
    places = [lines.index(heading) for heading in headings]
    assert places == sorted(places)
    assert "Examples:" in lines
    assert "::" not in page
    assert not set("╭│╰") & set(page)
    common = "\n".join(lines[places[0] : places[1]])
    first = ("--data PATH", "--init NAME", "--model NAME", "--recipe NAME", "--epochs FLOAT", "--minutes FLOAT")
    order = [*first, "--lr FLOAT", "--batch INT", "--threads INT", "--seed INT", "-o, --out PATH", "--resume PATH"]
    places = [common.index(f"\n  {option} ") for option in order]
    assert places == sorted(places)


@pytest.mark.parametrize(("command", "own"), [("distill", "Distillation"), ("pretrain mae", "Settings of the task")])
def test_the_settings_of_a_command_follow_the_common_ones(vitrail_: Run, command: str, own: str) -> None:
    lines = vitrail_(*command.split(), "--help").out.splitlines()
    headings = [line for line in lines[lines.index("Common options") :] if line and line[0] != " "]
    known = ("Common options", own, "Model", "Data", "Augmentation", "Optimizer", "Training loop", "Devices and speed")
    assert headings == [each for each in known if each in headings]
    assert own in headings


def test_the_values_of_the_default_recipe_are_shown() -> None:
    shown = {each.names[0]: format_description(each) for each in list_options("train") if each.names}
    recipe = open_recipe("fashion").to_flat_dict()
    assert shown["--epochs"].endswith(f"[recipe: {recipe['epochs']:g}]")
    assert shown["--lr"].endswith(f"[recipe: {recipe['lr']:g}]")
    assert shown["--optimizer"].endswith(f"[choices: adamw, sgd, muon, lars] [recipe: {recipe['optimizer']}]")
    assert shown["--compile"].endswith("[recipe: off]")
    assert shown["--data"].endswith("[default: fashion]")
    assert "[default: False]" not in "".join(shown.values())
    assert "False" in HIDDEN_DEFAULTS


def test_help_fits_a_narrow_terminal(vitrail_: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    page = vitrail_("train", "--help").out
    assert max(len(line) for line in page.splitlines() if "  vitrail train" not in line) <= 60


SUGGESTIONS = {
    "train --learning-rate 1": "--lr",
    "train --learning_rate=1": "--lr",
    "train --lr-rate 1": "--lr",
    "train -lr 1": "--lr",
    "train --batch-size 1": "--batch",
    "train --num-workers 1": "--workers",
    "train --output x": "--out",
    "train --output-dir x": "--out",
    "train --model-name x": "--model",
    "train --pretrained x": "--init",
    "train --epoch 1": "--epochs",
    "train --img-size 1": "--image-size",
    "train --input-size 1": "--image-size",
    "train --drop-path 1": "--stochastic-depth",
    "train --opt sgd": "--optimizer",
    "train --gpu 0": "--device",
    "train --num-classes 3": "--data (its folders are the classes)",
    "train --weight-dcay 1": "--weight-decay",
    "summary ViT-B/16 --num-classes 1": "--classes",
    "predict vit_fashion p.jpg --topk 1": "--top",
    "predict vit_fashion p.jpg --batch-size 1": "--batch",
    "explain vit_fashion p.jpg --target 1": "--class",
    "models --jsn": "--json",
    "train --early-stopping 3": "--patience",
}


@pytest.mark.parametrize("words", SUGGESTIONS)
def test_options_of_other_tools_are_recognized(vitrail_: Run, words: str) -> None:
    done = vitrail_(*words.split())
    given = next(word for word in words.split() if word.startswith("-")).partition("=")[0]
    assert (done.code, done.out) == (2, "")
    assert done.err == f"vitrail: Unknown option {given}. Did you mean {SUGGESTIONS[words]}?\n"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("inspect", "summary"),
        ("fit", "train"),
        ("finetune", "train --init MODEL"),
        ("evaluate", "eval"),
        ("test", "eval"),
        ("validate", "eval"),
        ("infer", "predict"),
        ("classify", "predict"),
        ("list", "models"),
        ("info", "summary"),
        ("visualize", "explain"),
        ("trian", "train"),
        ("sumary", "summary"),
        ("help", "--help"),
        ("deploy", "export"),
    ],
)
def test_commands_of_other_tools_are_recognized(vitrail_: Run, given: str, meant: str) -> None:
    done = vitrail_(given, "--anything", "x")
    assert (done.code, done.err) == (2, f"vitrail: Unknown command '{given}'. Did you mean vitrail {meant}?\n")


def test_an_old_command_names_the_new_one(vitrail_: Run) -> None:
    for words, new in (
        (("inspect-checkpoint", "weights.pth"), "summary"),
        (("lessons", "--svg"), "look --lessons"),
        (("completion", "--help"), "env --completion"),
    ):
        done = vitrail_(*words)
        expected = f"vitrail: {words[0]} is now vitrail {new}. See vitrail --help.\n"
        assert (done.code, done.out, done.err) == (2, "", expected)


def test_an_argument_is_not_an_option(vitrail_: Run) -> None:
    done = vitrail_("predict", "--model", "vit_fashion", "cat.jpg")
    assert done.err == (
        "vitrail: Unknown option --model. MODEL is an argument, without a name: see vitrail predict --help.\n"
    )


def test_suggestions_lead_to_something_that_exists() -> None:
    synonyms = json.loads(SYNONYMS_FILE.read_text("utf-8"))
    options = {
        name for command in COMMANDS for name in list_names(find_command(command).assemble_argument_collection())
    }
    assert {name.split()[0] for name in synonyms["options"]} <= options
    commands = {name.split()[0] for name in COMMANDS}
    assert {name.split()[0] for name in synonyms["commands"]} <= commands | {"--help", "--version"}
    assert not commands & {other for others in synonyms["commands"].values() for other in others.split()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --dry-run --epochs many", "--epochs 'many' is not a number."),
        ("train --dry-run --batch 2.5", "--batch '2.5' is not a whole number."),
        ("train --optimizer adam", "--optimizer 'adam' is not one of adamw, sgd, muon, lars. Did you mean adamw?"),
        ("train --epochs", "--epochs needs a value. See vitrail train --help."),
        ("train --lr 1 --lr 2", "--lr is given more than once. Give it once."),
        ("train --threads many", "--threads 'many' is not a whole number or auto."),
        ("convert vit_fashion out", "convert needs --to. See vitrail convert --help."),
        ("predict vit_fashion", "predict needs IMAGES. See vitrail predict --help."),
        ("train photos", "Unexpected argument 'photos'. Did you mean --data photos?"),
        ("train 'my photos'", "Unexpected argument \"'my\". Did you mean --data ''\"'\"'my'?"),
        ("train vit_fashion", "Unexpected argument 'vit_fashion'. Did you mean --init vit_fashion?"),
        ("pretrain mae photos", "Unexpected argument 'photos'. Did you mean --data photos?"),
        ("eval vit_fashion photos", "Unexpected argument 'photos'. Did you mean --data photos?"),
        ("env all", "Unexpected argument 'all'. See vitrail env --help."),
        ("summary", "summary needs MODEL. See vitrail summary --help."),
        ("export vit_fashion", "export needs OUT. See vitrail export --help."),
        ("study costs", "Unknown command 'costs'. Did you mean vitrail study cost?"),
        ("nothing-like-it", "Unknown command 'nothing-like-it'. See vitrail --help."),
        ("models --zzz", "Unknown option --zzz. See vitrail models --help."),
        ("train --early-frost 3", "Unknown option --early-frost. See vitrail train --help."),
    ],
)
def test_a_wrong_call_is_one_line(vitrail_: Run, words: str, message: str) -> None:
    done = vitrail_(*words.split())
    assert (done.code, done.out, done.err) == (2, "", f"vitrail: {message}\n")


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("explain", "[OPTIONS] MODEL [IMAGES...]"),
        ("models", "[OPTIONS] [PATTERNS...]"),
        ("runs", "[OPTIONS] [FOLDER]"),
        ("predict", "[OPTIONS] MODEL IMAGES..."),
    ],
)
def test_usage_names_the_arguments(vitrail_: Run, command: str, usage: str) -> None:
    assert vitrail_(command, "--help").out.splitlines()[0] == f"Usage: vitrail {command} {usage}"


def test_options_that_take_words_do_not_say_int() -> None:
    shown = [format_names(each) for each in list_options("explain")]
    assert {"--layer LAYER", "--head HEAD"} <= set(shown)
