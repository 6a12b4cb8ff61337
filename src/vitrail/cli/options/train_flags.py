"""What `vitrail train`, `distill` and `ablate` are all asked, and how that becomes a run."""

from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from vitrail.cli.options.values import parse_field, parse_fields, parse_size
from vitrail.cli.output.help_text import reflow_docstring
from vitrail.errors import ConfigError
from vitrail.train.recipe import Recipe, open_recipe

if TYPE_CHECKING:
    from vitrail.train.request import Request

DEFAULT_STUDENT = "deit_tiny_distilled_patch16_224"  # where nothing names one
RATE_FIELDS = ("dropout", "stochastic_depth")  # of the model, but people look for them here


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """What is no setting of a recipe, and the same for every run of a command.

    Parameters
    ----------
    data
        fashion (embedded), or a folder: train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg, of which a part is kept
        for validation; CIFAR-10 or -100, MNIST files; ImageNet.
    model
        A name that `vitrail models` lists, or a family of your own: package.module:preset, file.py:preset.
    init
        A checkpoint to start from: anything that `vitrail convert` reads, or the folder of a run.
    image_size
        Pixels: 384, or rows x columns: 384x256; the positions of --init are resampled.
    fields
        Any field of the model's config, as FIELD=VALUE; may be repeated.
    dropout
        Rate of the model's dropout.
    stochastic_depth
        Rate at which the last block is left out; it grows from 0 at the first.
    device
        auto, cpu, cuda, cuda:1, mps.
    workers
        Processes that prepare pictures; without it as many as help.
    threads
        CPU threads, or auto: measured at the start, since on a busy machine fewer are faster. A resumed run keeps its
        number.
    cache
        Gigabytes up to which decoded pictures are held in memory; 1 unless said, 0: none.
    val_share
        Share of a folder without a validation part that is kept for validation; 0.2 unless said.
    real
        ReaL labels of ImageNet's validation pictures, a .json file.
    strict
        An unreadable picture is an error; else it is skipped and named at the end.
    trust_code
        Code that a run or a recipe file may import: FILE.py:NAME or MODULE:NAME for a model of your own, timm:NAME for
        a teacher from outside timm. Code is imported only if it is named here or by --model; may be repeated.
    """

    data: str | None = None
    model: str | None = None
    init: str | None = None
    image_size: str | None = None
    fields: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None
    dropout: float | None = None
    stochastic_depth: float | None = None
    device: str = "auto"
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
        """The recipe of that name with everything that was asked in it; `model` is for where nothing names one."""
        if "epochs" in changes:
            if "minutes" in changes:
                raise ConfigError("--minutes beside --epochs; expected one of them")
            changes = {**changes, "minutes": None}  # a recipe's budget gives way
        at_model = {**dict(parse_field(item) for item in self.fields or ()), **self.given_rates}
        if self.image_size is not None:
            at_model["image_size"] = parse_size(self.image_size)
        embedded = self.data in (None, "fashion") and self.model is None
        usual = "finetune" if self.init else "fashion" if embedded else "scratch"
        recipe = open_recipe(usual if name is None else name)
        if recipe.model is not None and (self.init or self.model not in (None, recipe.model)):
            # they are for the starting weights of the model that it names
            recipe = replace(recipe, model=None, fields={}, preprocessing={})
            recipe = recipe.with_settings({"whiten": False, "early_size": 0})
        named = self.model or recipe.model or (None if self.init else default_model)
        return recipe.with_settings({**changes, "fields": at_model, "model": named})

    @property
    def trusted_code(self) -> list[str]:
        """All outside code named on this command line."""
        from vitrail.models.catalog import is_external_name

        by_model = [self.model] if self.model is not None and is_external_name(self.model) else []
        return list(dict.fromkeys([*by_model, *(self.trust_code or ())]))

    def make_request(
        self,
        recipe: Recipe,
        teacher: str | None = None,
        teacher_cache: Path | None = None,
        teacher_fields: dict[str, Any] | None = None,
    ) -> "Request":
        """All that a run of this recipe depends on; `kept` is a folder for the teacher's answers."""
        if self.cache is not None and self.cache < 0:
            raise ConfigError(f"--cache {self.cache}; expected gigabytes, or 0 for none")
        from vitrail.train.request import Request

        asked = Request(
            data=resolve_if_path("fashion" if self.data is None else self.data),
            recipe=recipe,
            init=None if self.init is None else resolve_if_path(self.init),
            teacher=None if teacher is None else resolve_if_path(teacher),
            teacher_cache=None if teacher_cache is None else str(teacher_cache.resolve()),
            teacher_fields=teacher_fields,
            val_share=0.2 if self.val_share is None else self.val_share,
            real=None if self.real is None else resolve_if_path(str(self.real)),
            cache=1.0 if self.cache is None else self.cache,
        )
        named = (
            [teacher] if teacher is not None and teacher.startswith("timm:") else []
        )  # named by the user, not by a file
        return asked.with_trusted_code([*self.trusted_code, *named], f"the recipe {recipe.name}")


@reflow_docstring
@dataclass(frozen=True, kw_only=True)
class RunFlags(TrainFlags):
    """All that is no setting of a recipe, for one run.

    Parameters
    ----------
    recipe
        fashion, cifar10-cpu, cifar10-distill, positions, finetune, probe, vit, deit, scratch, or a .yaml file of your
        own. Without it: finetune with --init, fashion for that data, else scratch.
    out
        The folder of the run; else a new one in runs/.
    resume
        The folder of a run to go on with, to the bit as if it had not stopped.
    dry_run
        Check data, model, memory and speed, say how long it will take, and write nothing.
    """

    recipe: str | None = None
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None
    resume: Path | None = None
    dry_run: Annotated[bool, Parameter(negative=())] = False

    def check_resume_alone(self, others: dict[str, Any]) -> None:
        """Beside --resume nothing may be said of the run itself."""
        names = ("data", "model", "recipe", "init", "out", "val_share", "real", "cache", "image_size")
        told = {**{name: getattr(self, name) for name in names}, "set": self.fields, "dry_run": self.dry_run or None}
        other = [name for name, value in {**told, **self.given_rates, **others}.items() if value is not None]
        if other:
            raise ConfigError(
                f"--resume {self.resume} beside --{other[0].replace('_', '-')}; expected it alone: a run goes on as it "
                "began; for another, start a new one, from its weights with --init"
            )


def start_or_resume_run(
    flags: RunFlags,
    changes: dict[str, Any],
    *,
    distilling: bool = False,
    teacher: str | None = None,
    teacher_fields: list[str] | None = None,
    teacher_cache: Path | None = None,
) -> None:
    """Begins a run, or goes on with one."""
    start = monotonic()
    if flags.resume is not None:
        flags.check_resume_alone(
            {**changes, "teacher": teacher, "teacher_set": teacher_fields, "teacher_cache": teacher_cache}
        )
        from vitrail.cli.runner import Runtime, resume_run

        resume_run(
            flags.resume,
            Runtime(device=flags.device, workers=flags.workers, threads=flags.threads, strict=flags.strict),
            flags.trusted_code,
        )
        return
    recipe = flags.resolve_recipe(flags.recipe, changes, DEFAULT_STUDENT if distilling else None)
    if distilling and recipe.distillation.distill == "none":
        teacher = teacher_cache = None
    elif distilling and teacher is None:
        raise ConfigError("no --teacher; expected a trained model: a run's folder, a checkpoint, or timm:NAME")

    from vitrail.cli.runner import Runtime, start_run

    request = flags.make_request(recipe, teacher, teacher_cache, parse_fields(teacher_fields) or None)
    here = Runtime(device=flags.device, workers=flags.workers, threads=flags.threads, strict=flags.strict)
    start_run(request, flags.out, here, start=start, dry_run=flags.dry_run)


def resolve_if_path(path_or_name: str) -> str:
    """A path so that it can be resumed from another folder; a name as it is."""
    return (
        str(Path(path_or_name).resolve())
        if path_or_name not in ("", "fashion") and Path(path_or_name).exists()
        else path_or_name
    )
