"""A model repository for Triton: config.pbtxt, labels.txt, and the model as version 1."""

import json
from importlib import import_module
from typing import Any

from vitrail.base.errors import CheckpointError, describe_error
from vitrail.export.targets.deployment import CORES, Deployment
from vitrail.models.base.checks import pair

MAX_BATCH = 8
QUEUE = 64  # requests; more are rejected


def write_triton(made: Deployment) -> list[str]:
    """Write the files next to the version folder of the model."""
    labels = made.about.labels
    name = made.model.parent.relative_to(made.folder).as_posix()
    config = render_config(made)
    check_config(config, made)
    made.write(f"{name}/config.pbtxt", config)
    if labels is not None:
        made.write(f"{name}/labels.txt", "".join(f"{' '.join(each.split())}\n" for each in labels))
    return []


def render_config(made: Deployment) -> str:
    about, shape = made.about, made.input_shape
    labeled = '\n    label_filename: "labels.txt"' if about.labels is not None else ""
    exact = about.precision == "fp32"  # int8 measures its range over the whole batch, so it runs one by one
    warm = [*pair(about.preprocessing.image_size), shape[2]]
    batching = f"""
dynamic_batching {{
  default_queue_policy {{
    timeout_action: REJECT
    default_timeout_microseconds: 5000000
    allow_timeout_override: true
    max_queue_size: {QUEUE}
  }}
}}"""
    return f"""# The client resizes and crops; pixels are uint8 (rows, columns, channels). The model normalizes them.
name: {json.dumps(made.name)}
backend: "onnxruntime"
max_batch_size: {MAX_BATCH if exact else 1}
input [
  {{ name: "pixels" data_type: TYPE_UINT8 dims: {shape} }}
]
output [
  {{
    name: "{about.output}"
    data_type: TYPE_FP32
    dims: {made.read_output_shape()}{labeled}
  }}
]
# One single-threaded instance per core: set the count to the cores of the machine. On a GPU: KIND_GPU and 1.
instance_group [
  {{ count: {CORES} kind: KIND_CPU }}
]
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}{batching if exact else ""}
model_warmup [
  {{
    name: "noise"
    batch_size: 1
    inputs {{ key: "pixels" value {{ data_type: TYPE_UINT8 dims: {warm} random_data: true }} }}
  }}
]
"""


def check_config(text: str, made: Deployment) -> Any:
    """Parse the configuration as Triton does, if its client is installed."""
    try:
        messages: Any = import_module("tritonclient.grpc.model_config_pb2")
        parser: Any = import_module("google.protobuf.text_format")
    except ImportError:
        made.note("config.pbtxt was not checked, since tritonclient[grpc] is not installed")
        return None
    try:
        return parser.Parse(text, messages.ModelConfig())
    except parser.ParseError as error:
        raise CheckpointError(f"config.pbtxt is not a configuration of Triton: {describe_error(error)}") from error
