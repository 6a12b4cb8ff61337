"""The options of the commands that train, and the request that they make."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError
from vitrail.cli.options.model_flags import Device, OptionalOut, Preset, RealLabels, StartModel
from vitrail.cli.options.recipe_flags import TASK_SETTINGS, TEXT_FLAGS
from vitrail.cli.options.values import check_data_exists, check_minimum, check_model_exists, parse_fields, parse_size
from vitrail.cli.output.help_text import DATA, DISTILLATION, MODEL, SPEED, TRANSLATION, reflow_docstring
from vitrail.recipes.recipe import Recipe, choose_recipe

if TYPE_CHECKING:
    from vitrail.recipes.request import Request
    from vitrail.train.plan import Runtime

DEFAULT_STUDENT = "deit_tiny_distilled_patch16_224"  # of `distill`, if nothing names another

TeacherModel = Annotated[
    str | None,
    Parameter(
        help="Trained model to learn from: a run folder, anything that `vitrail convert` reads (a convnet, too: "
        "`vitrail models 'resnet*'`), or timm:NAME, which timm downloads.",
        validator=check_model_exists,
    ),
]
TeacherCache = Annotated[
    Path | None,
    Parameter(
        group=DISTILLATION,
        help="Folder for the teacher's logits, so that it predicts each image only once, in this run and in others. "
        "Only for training without augmentation.",
    ),
]


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """The options that are not settings of a recipe, for every run of a command.

    Parameters
    ----------
    data
        Folder with one subfolder per class (train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg), CIFAR-10 or -100,
        MNIST files, ImageNet, a public data set by name (`vitrail data`), or 'fashion', which is bundled.
        [default: fashion]
    model
        Architecture to train from scratch: a name that `vitrail models` lists, or your own family:
        package.module:preset, file.py:preset. [default: the recipe's]
    init
        Start from public weights (ViT-Ti/16; see `vitrail models`), a run or any checkpoint.
    image_size
        Image size: 384, or rows x columns: 384x256. The positions of --init are resampled. [default: the model's]
    fields
        Set a config field of the model: depth=6. May be repeated.
    dropout
        Dropout rate. [default: the model's]
    stochastic_depth
        Rate at which the last block is skipped (drop path), growing from 0 at the first block. [default: the model's]
    workers
        Processes that load images. [default: automatic]
    threads
        CPU threads. A resumed run keeps its number. [default: measured at the start]
    cache
        Maximum gigabytes of decoded images to keep in memory; 0 disables the cache. [default: 1]
    val_share
        Share of the images for validation, if the folder has no validation part. [default: 0.2]
    strict
        Stop at an unreadable image instead of skipping it.
    """

    data: str | None = None
    model: Preset = None
    init: StartModel = None
    image_size: Annotated[str | None, Parameter(group=MODEL)] = None
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=(), group=MODEL)] = None
    dropout: Annotated[float | None, Parameter(group=MODEL)] = None
    stochastic_depth: Annotated[float | None, Parameter(group=MODEL)] = None
    device: Device = "auto"
    workers: Annotated[int | None, Parameter(group=SPEED)] = None
    threads: Annotated[int | Literal["auto"], Parameter(show_choices=False, show_default=False)] = "auto"
    cache: Annotated[float | None, Parameter(group=DATA)] = None
    val_share: Annotated[float | None, Parameter(group=DATA)] = None
    real: RealLabels = None
    strict: Annotated[bool, Parameter(negative=(), group=DATA)] = False

    @property
    def given_rates(self) -> dict[str, float]:
        """Config fields of the model that have options of their own."""
        rates = {"dropout": self.dropout, "stochastic_depth": self.stochastic_depth}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def resolve_recipe(self, name: str | None, changes: dict[str, Any], default_model: str | None = None) -> Recipe:
        """The recipe of that name with the given settings; `default_model` is used if nothing names a model."""
        fields = {**parse_fields(self.fields), **self.given_rates}
        if self.image_size is not None:
            fields["image_size"] = parse_size(self.image_size)
        recipe = choose_recipe(
            name,
            changes,
            data=self.data,
            pair=self.language_pair,
            task=self.task_name,
            model=self.model,
            init=self.init,
            fields=fields,
            default_model=default_model,
        )
        if recipe.task.get("name") not in TEXT_FLAGS:  # they say themselves which files they expect
            check_data_exists(None, self.data)
        return recipe

    @property
    def language_pair(self) -> str | None:
        """Source and target, for the command that also trains on sentence pairs."""
        return None

    @property
    def task_name(self) -> str | None:
        """The task, for the command that trains several."""
        return None

    def make_request(self, recipe: Recipe, **others: Any) -> "Request":
        """The request for a run of this recipe; `others` has what else `make_request` takes."""
        from vitrail.recipes.request import make_request

        given = {name: vars(self)[name] for name in ("data", "init", "val_share", "real", "cache")}
        return make_request(recipe, **given, pair=self.language_pair, trusted_code=self.trusted_code, **others)

    @property
    def trusted_code(self) -> list[str]:
        """All external code named on this command line."""
        from vitrail.models.catalog.external_families import TRUSTED
        from vitrail.recipes.request import list_trusted_code

        return list_trusted_code(self.model, TRUSTED.get())

    def make_runtime(self) -> "Runtime":
        from vitrail.cli.output.messages import print_line
        from vitrail.cli.output.progress import progress_bar
        from vitrail.train.plan import Runtime

        return Runtime(
            device=self.device,
            workers=self.workers,
            threads=self.threads,
            strict=self.strict,
            report=print_line,
            progress=progress_bar,
        )


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class RunFlags(TrainFlags):
    """The options that are not settings of a recipe, for one run.

    Parameters
    ----------
    recipe
        Training settings: fashion, cifar10-cpu, cifar10-distill, positions, finetune, linear-probe, vit, deit, scratch,
        or a .yaml file. [default: finetune with --init, fashion for that data, else scratch]
    out
        Folder of the run. [default: a new folder in runs/]
    resume
        Folder of a run to continue, with bit-identical results. With --epochs or --minutes, a finished run is extended.
    dry_run
        Check data, model, memory and speed, estimate the time, and write nothing.
    """

    recipe: str | None = None
    out: OptionalOut = None
    resume: Path | None = None
    dry_run: Annotated[bool, Parameter(negative=())] = False

    def check_resume_alone(self, others: dict[str, Any]) -> dict[str, Any]:
        """Refuse options of the run itself together with --resume; return the new length of a run to extend."""
        names = ("data", "model", "recipe", "init", "out", "val_share", "real", "cache", "image_size")
        set_flags = {**{name: vars(self)[name] for name in names}, "set": self.fields, "dry_run": self.dry_run or None}
        given = {
            name: value for name, value in {**set_flags, **self.given_rates, **others}.items() if value is not None
        }
        length = {name: given.pop(name) for name in ("epochs", "minutes") if name in given}
        if given:
            other = next(iter(given)).replace("_", "-")
            raise ConfigError(
                f"--resume {self.resume} with --{other}; expected it alone, or with --epochs or --minutes to extend "
                "the run: a run keeps its settings; to change them, start a new run from its weights with --init"
            )
        return length


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class ImageOrTextFlags(RunFlags):
    """The options that are not settings of a recipe, for one run on images, on sentence pairs or on captions.

    Parameters
    ----------
    data
        Images: a folder with one subfolder per class (train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg), CIFAR-10
        or -100, MNIST files, ImageNet, a public data set by name (`vitrail data`), or 'fashion', which is bundled.
        Sentence pairs: a folder with train.de and train.en (any two languages; val.*, test*.*, .gz), a .tsv file,
        'multi30k', or 'tatoeba', which is bundled. Captions: a folder of images with captions.tsv (FILE, a tab,
        CAPTION), Flickr8k, or 'collages', which are generated.
        [default: fashion]
    task
        What is trained: classification, translation, or caption, which describes images. [default: determined by the
        data and the recipe]
    pair
        Languages of sentence pairs, source and target: de-en, or en-de. [default: taken from the file names]
    recipe
        Training settings: fashion, cifar10-cpu, cifar10-distill, positions, finetune, linear-probe, vit, deit, scratch,
        for sentence pairs translate-demo, translate-cpu, lstm-cpu, reversal, for captions caption-cpu, caption, or a
        .yaml file. [default: finetune with --init, fashion for that data, translate-demo for sentence
        pairs, caption-cpu for collages, caption for other captions, else scratch]
    """

    data: str | None = None
    task: Literal["classification", "translation", "caption"] | None = None
    pair: Annotated[str | None, Parameter(group=TRANSLATION)] = None
    recipe: str | None = None

    @property
    def language_pair(self) -> str | None:
        return self.pair

    def check_resume_alone(self, others: dict[str, Any]) -> dict[str, Any]:
        return super().check_resume_alone({**others, "pair": self.pair, "task": self.task})

    @property
    def task_name(self) -> str | None:
        return self.task

    def resolve_recipe(self, name: str | None, changes: dict[str, Any], default_model: str | None = None) -> Recipe:
        recipe = super().resolve_recipe(name, changes, default_model)
        task = recipe.task.get("name", "classification")
        if self.task not in (None, task):
            raise ConfigError(f"--task {self.task}, but the recipe {recipe.name} is for {task}; expected one of them")
        known = TASK_SETTINGS.get(task)
        for given in changes.get("task", ()):
            if known is None or given not in known.__dataclass_fields__:
                option = f"--{given.replace('_', '-')}"
                raise ConfigError(
                    f"{option} is not a setting of {task}, which the recipe {recipe.name} is for; remove it"
                )
        return recipe


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class PretrainFlags(RunFlags):
    """The options that are not settings of a recipe, for one run of a task without labels.

    Parameters
    ----------
    data
        Folder of images, with or without one subfolder per class, CIFAR-10 or -100, MNIST files, ImageNet, a public
        data set by name (`vitrail data`), or 'fashion', which is bundled. [default: fashion]
    recipe
        Training settings: TASK-cpu, for CIFAR-10 on two CPU cores, TASK, as in the paper, or a .yaml file
        for this task. [default: TASK-cpu]
    then
        What follows: probe measures the features with the labels of the data and writes a table and a figure into the
        run, finetune trains a classifier from the model with the recipe finetune. [default: nothing]
    """

    data: str | None = None
    recipe: str | None = None
    then: Literal["probe", "finetune"] | None = None

    def check_resume_alone(self, others: dict[str, Any]) -> dict[str, Any]:
        return super().check_resume_alone({**others, "then": self.then})

    def make_request(self, recipe: Recipe, **others: Any) -> "Request":
        return super().make_request(recipe, **others, then=self.then)


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class StudyFlags(TrainFlags):
    """The options of a study of several runs.

    Parameters
    ----------
    seeds
        Runs per row, with seeds from --seed on; the table shows mean ± standard deviation.
    out
        Folder of the study. Or a file for the table alone: .txt, .json, .csv, .md, .tex or .html.
        [default: RECIPE-ablation or DATA-positions in runs/]
    dry_run
        Check and print the rows, and write nothing.
    as_json
        Print the table as JSON; everything else is printed on stderr.
    """

    seeds: int = 1
    out: OptionalOut = None
    dry_run: Annotated[bool, Parameter(negative=())] = False
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False

    def list_seeds(self, recipe: Recipe) -> range:
        check_minimum("--seeds", self.seeds, 1)
        return range(recipe.loop.seed, recipe.loop.seed + self.seeds)
