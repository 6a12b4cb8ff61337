"""The contents of config.json next to the weights: all that loading and prediction need."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from vitrail.base.errors import CheckpointError, ConfigError, unknown_name_error
from vitrail.base.json_yaml import add_checksum, parse_json, verify_and_remove_checksum
from vitrail.checkpoint.resample import ResamplingPolicy
from vitrail.data.images.preprocessing import Preprocessing
from vitrail.models.catalog.external_families import is_external_family_name

FORMAT_VERSION = 2  # increased only if an older vitrail can no longer read the folder
RARE_FIELDS = ("languages", "tokenizer", "code")  # left out where they do not apply
TYPE_NAMES: dict[type[Any], str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


@dataclass(frozen=True, kw_only=True)
class Description:
    """Family and config define the model; the other fields say how to use it and where it comes from."""

    family: str
    config: Mapping[str, Any]
    preprocessing: Preprocessing | None = None
    labels: tuple[str, ...] | None = None  # one per class, in order
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])  # free-form notes of whoever saved it
    resampling: ResamplingPolicy = "timm"  # default policy when positions are resampled to another image size
    languages: tuple[str, str] | None = None  # source and target, of a model that translates
    tokenizer: str | None = None  # checksum of tokenizer.json, of a text model
    code: str | None = None  # FILE.py:NAME or MODULE:NAME of a family from outside the package; shown, never imported
    kind: str = ""  # image, text or caption
    save: str = ""  # the same in both files of a folder, unless a save was interrupted between them

    def to_json(self, *, signed: bool = False) -> str:
        """Format as JSON, with a checksum of all entries if `signed`."""
        data = {"format": FORMAT_VERSION, **asdict(self)}
        for name in RARE_FIELDS:
            if data[name] is None:
                del data[name]
        return json.dumps(add_checksum(data) if signed else data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> "Description":
        """Parse the result of `to_json`; fields that are missing in older versions take their defaults."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise CheckpointError(f"{where} is not JSON: {error}; expected a file written by vitrail.save") from None
        return cls.from_dict(data, where)

    @classmethod
    def from_dict(cls, data: Any, where: str) -> "Description":
        if not isinstance(data, dict) or type(data.get("format")) is not int:
            raise CheckpointError(f"{where} has no format version; expected a file written by vitrail.save")
        if data["format"] > FORMAT_VERSION:
            raise CheckpointError(
                f"{where} has format {data['format']} of a newer vitrail; expected {FORMAT_VERSION}: update vitrail"
            )
        try:
            return cls(**parse_description_fields(verify_and_remove_checksum(data), cls))
        except (ConfigError, ValueError) as error:
            raise CheckpointError(f"{where}: {error}") from None


def parse_description_fields(data: dict[str, Any], kind: type[Description]) -> dict[str, Any]:
    """Check the types of the fields; a ConfigError names the field that is wrong."""
    known = [each.name for each in fields(kind)]
    data = {name: value for name, value in data.items() if name != "format"}
    for name in data:
        if name not in known:
            raise unknown_name_error("field", name, known)
    data = {"provenance": {}, "save": "", "kind": "", **data}
    for name, expected in (("family", str), ("config", dict), ("provenance", dict), ("kind", str), ("save", str)):
        if not isinstance(data.get(name), expected):
            raise ConfigError(f"{name} is {repr(data.get(name))[:40]}; expected {TYPE_NAMES[expected]}")
    if data.get("resampling", "timm") not in get_args(ResamplingPolicy):
        raise unknown_name_error("resampling", data["resampling"], get_args(ResamplingPolicy))
    labels, preprocessing = data.get("labels"), data.get("preprocessing")
    if labels is not None:
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ConfigError(f"labels is {repr(labels)[:40]}; expected a list of strings")
        data["labels"] = tuple(labels)
    languages, tokenizer = data.get("languages"), data.get("tokenizer")
    if languages is not None:
        if (
            not isinstance(languages, list)
            or len(languages) != 2
            or not all(isinstance(each, str) for each in languages)
        ):
            raise ConfigError(f"languages is {repr(languages)[:40]}; expected two names, source and target")
        data["languages"] = tuple(languages)
    if not isinstance(tokenizer, str | None):
        raise ConfigError(f"tokenizer is {repr(tokenizer)[:40]}; expected the checksum of tokenizer.json")
    code = data.get("code")
    if code is not None and not (is_external_family_name(code) and code.isprintable()):
        raise ConfigError(f"code is {repr(code)[:40]}; expected FILE.py:NAME or MODULE:NAME")
    if preprocessing is not None:
        names = [each.name for each in fields(Preprocessing)]
        if not isinstance(preprocessing, dict):
            raise ConfigError(f"preprocessing is {repr(preprocessing)[:40]}; expected an object")
        for name in preprocessing:
            if name not in names:
                raise unknown_name_error("preprocessing field", name, names)
        data["preprocessing"] = Preprocessing(**preprocessing)
    return data
