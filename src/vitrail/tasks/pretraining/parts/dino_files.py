"""Continue DINO and EsViT from files of the authors, which hold student, teacher, heads and centres, or from a run."""

from collections.abc import Mapping

from torch import Tensor

from vitrail.base.errors import CheckpointError, ConfigError

HEADS = {"head": "center", "head_dense": "center_grid"}  # and the names of their centres
SETTINGS_BY_SHAPE = {  # the setting that the number of rows of a tensor of a head depends on
    "head.value": "prototypes",  # of a centre
    "head_dense.value": "prototypes",
    "last_layer.weight_g": "prototypes",
    "mlp.0.weight": "head_width",
    "mlp.4.weight": "bottleneck_width",
}


def rename_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file under the names of a task; empty if the file has no head to continue with."""
    if "heads.head.mlp.0.weight" in tensors:  # a checkpoint of a run
        return dict(tensors)
    renamed = dict[str, Tensor]()
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        rest = rest.removeprefix("module.")
        if part in ("student", "teacher"):
            inner = rest if rest.partition(".")[0] in HEADS else f"backbone.{rest.removeprefix('backbone.')}"
            prefix = "teacher." if part == "teacher" else "" if inner.startswith("backbone.") else "heads."
            renamed[prefix + inner] = tensor
        elif part == "dino_loss":
            renamed |= {f"centres.{head}.value": tensor.flatten() for head, centre in HEADS.items() if rest == centre}
    return renamed if "heads.head.mlp.0.weight" in renamed else {}


def select_fitting_tensors(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a task has too; an error if one has another shape."""
    for name, tensor in given.items():
        if name not in expected:
            if name.startswith(("heads.head.", "teacher.head.")):
                raise CheckpointError(f"the file has {name}; expected a head of linear layers without batch norm")
            continue
        if tensor.shape == expected[name].shape:
            continue
        setting = next((each for end, each in SETTINGS_BY_SHAPE.items() if name.endswith(end)), None)
        if setting is not None and len(tensor) != len(expected[name]):
            raise ConfigError(
                f"`{setting}` is {len(expected[name])}, but the head in the file has {len(tensor)}; use `{setting}` "
                f"{len(tensor)}",
                fields=(setting,),
            )
        raise CheckpointError(
            f"{name} in the file has the shape {tuple(tensor.shape)}; expected {tuple(expected[name].shape)}: use the "
            "model and the image size of the file"
        )
    return {name: tensor for name, tensor in given.items() if name in expected}


def describe_parts(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """What was loaded completely, and what was not: 'student, teacher, head, centre; new: head_dense'."""
    groups = {"student": "backbone.", "teacher": "teacher.backbone."}
    if not any(name.startswith("backbone.") for name in loaded):  # of a run: its model is the teacher's
        del groups["student"]
    for head in HEADS:
        groups |= {
            head: f"heads.{head}.",
            f"{head} of the teacher": f"teacher.{head}.",
            f"centre of {head}": f"centres.{head}.",
        }
    present = {group: prefix for group, prefix in groups.items() if any(name.startswith(prefix) for name in expected)}
    complete = {
        group: all(name in loaded for name in expected if name.startswith(prefix)) for group, prefix in present.items()
    }
    missing = [group for group in complete if not complete[group]]
    found = ", ".join(group for group in complete if complete[group])
    return f"{found}; new: {', '.join(missing)}" if missing else found
