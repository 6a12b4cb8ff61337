"""The options of `vitrail train`, `distill`, `ablate` and `study positions`, and the request that they make."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.options.model_flags import Device, OptionalOut
from vitrail.cli.options.values import check_minimum, parse_fields, parse_size
from vitrail.cli.output.help_text import reflow_docstring
from vitrail.errors import ConfigError
from vitrail.train.recipe import Recipe, choose_recipe

if TYPE_CHECKING:
    from vitrail.train.request import Request, Runtime

DEFAULT_STUDENT = "deit_tiny_distilled_patch16_224"  # of `distill`, if nothing names another
RATE_FIELDS = ("dropout", "stochastic_depth")  # config fields of the model that have options of their own

TeacherModel = Annotated[
    str | None,
    Parameter(
        help="A trained model to learn from: the folder of a run, anything that `vitrail convert` reads (a convnet "
        "too: `vitrail models 'resnet*'`), or timm:NAME, which timm fetches."
    ),
]
TeacherCache = Annotated[
    Path | None,
    Parameter(
        help="A folder for the teacher's logits, so that each image is predicted once, in this run and in others; for "
        "training without augmentation, where an image looks the same each time."
    ),
]


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """The options that are not settings of a recipe, for every run of a command.

    Parameters
    ----------
    data
        fashion (bundled), or a folder: train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg, of which a part is used
        for validation; CIFAR-10 or -100, MNIST files; ImageNet.
    model
        A name that `vitrail models` lists, or a family of your own: package.module:preset, file.py:preset.
    init
        Start from public weights (ViT-Ti/16; see `vitrail models`), a run or any checkpoint.
    image_size
        Pixels: 384, or rows x columns: 384x256; the positions of --init are resampled.
    fields
        Any field of the model's config, as FIELD=VALUE; may be repeated.
    dropout
        Dropout rate of the model.
    stochastic_depth
        Rate at which the last block is skipped; it grows linearly from 0 at the first block.
    workers
        Processes that load images (default: automatic).
    threads
        CPU threads, or auto: measured at the start, since fewer are faster on a busy machine. A resumed run keeps its
        number.
    cache
        Cache decoded images in memory if they take at most this many gigabytes (default: 1); 0 disables it.
    val_share
        Share of a folder without a validation part that is used for validation (default: 0.2).
    real
        ReaL labels of ImageNet's validation images, a .json file.
    strict
        Stop at an unreadable image; by default it is skipped and named at the end.
    trust_code
        Code that a run or a recipe file may import: FILE.py:NAME or MODULE:NAME for a model of your own, timm:NAME for
        a teacher from timm. Code is imported only if it is named here or by --model; may be repeated.
    """

    data: str | None = None
    model: str | None = None
    init: str | None = None
    image_size: str | None = None
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None
    dropout: float | None = None
    stochastic_depth: float | None = None
    device: Device = "auto"
    workers: int | None = None
    threads: int | Literal["auto"] = "auto"
    cache: float | None = None
    val_share: float | None = None
    real: Path | None = None
    strict: Annotated[bool, Parameter(negative=())] = False
    trust_code: Annotated[list[str] | None, Parameter(negative=())] = None

    @property
    def given_rates(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in RATE_FIELDS if getattr(self, name) is not None}

    def resolve_recipe(self, name: str | None, changes: dict[str, Any], default_model: str | None = None) -> Recipe:
        """The recipe of that name with the given settings; `default_model` is used if nothing names a model."""
        fields = {**parse_fields(self.fields), **self.given_rates}
        if self.image_size is not None:
            fields["image_size"] = parse_size(self.image_size)
        return choose_recipe(
            name, changes, data=self.data, model=self.model, init=self.init, fields=fields, default_model=default_model
        )

    def make_request(self, recipe: Recipe, **teacher: Any) -> "Request":
        """The request for a run of this recipe; `teacher` has what `make_request` takes about one."""
        from vitrail.train.request import make_request

        names = ("data", "init", "val_share", "real", "cache", "trusted_code")
        return make_request(recipe, **{name: getattr(self, name) for name in names}, **teacher)

    @property
    def trusted_code(self) -> list[str]:
        """All external code named on this command line."""
        from vitrail.train.request import list_trusted_code

        return list_trusted_code(self.model, self.trust_code or ())

    def make_runtime(self) -> "Runtime":
        from vitrail.cli.output.progress import progress_bar
        from vitrail.train.request import Runtime

        return Runtime(
            device=self.device,
            workers=self.workers,
            threads=self.threads,
            strict=self.strict,
            report=partial(print, flush=True),
            progress=progress_bar,
        )


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class RunFlags(TrainFlags):
    """The options that are not settings of a recipe, for one run.

    Parameters
    ----------
    recipe
        fashion, cifar10-cpu, cifar10-distill, positions, finetune, probe, vit, deit, scratch, or a .yaml file of your
        own. By default finetune with --init, fashion for that data, else scratch.
    out
        The folder of the run (default: a new one in runs/).
    resume
        The folder of a run to resume, bit-identical to a run that was never stopped.
    dry_run
        Check data, model, memory and speed, estimate the time, and write nothing.
    """

    recipe: str | None = None
    out: OptionalOut = None
    resume: Path | None = None
    dry_run: Annotated[bool, Parameter(negative=())] = False

    def check_resume_alone(self, others: dict[str, Any]) -> None:
        """Refuse options of the run itself together with --resume."""
        names = ("data", "model", "recipe", "init", "out", "val_share", "real", "cache", "image_size")
        told = {**{name: getattr(self, name) for name in names}, "set": self.fields, "dry_run": self.dry_run or None}
        other = [name for name, value in {**told, **self.given_rates, **others}.items() if value is not None]
        if other:
            raise ConfigError(
                f"--resume {self.resume} with --{other[0].replace('_', '-')}; expected it alone: a run keeps its "
                "settings; to change them, start a new run from its weights with --init"
            )


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class StudyFlags(TrainFlags):
    """The options of a study of several runs.

    Parameters
    ----------
    seeds
        Runs of each row, with seeds from 0 (or --seed); the table has their mean ± standard deviation.
    out
        The folder of the study (default: RECIPE-ablation or DATA-positions in runs/).
    dry_run
        Check and print the rows, and write nothing.
    as_json
        Print the table as JSON, and everything else on stderr.
    """

    seeds: int = 1
    out: OptionalOut = None
    dry_run: Annotated[bool, Parameter(negative=())] = False
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False

    def list_seeds(self, recipe: Recipe) -> range:
        check_minimum("--seeds", self.seeds, 1)
        return range(recipe.loop.seed, recipe.loop.seed + self.seeds)
