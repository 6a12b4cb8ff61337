"""vitrail serve: models over HTTP, and a page that shows what they attend to."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from vitrail.base.errors import ConfigError, missing_package_error
from vitrail.base.files import read_text
from vitrail.cli.options import model_flags as flags
from vitrail.cli.options.values import MAX_PROCESSES, at_most, parse_fields, parse_size, read_labels
from vitrail.cli.output.help_text import LIMITS, NETWORK, SPEED

if TYPE_CHECKING:
    from vitrail.serve.service import Service

TOKEN_VARIABLE, ADMIN_VARIABLE = "VITRAIL_TOKEN", "VITRAIL_ADMIN_TOKEN"
SERVED_HELP = (
    "Models of any kind, each a name, run folder, checkpoint or exported folder, or NAME=MODEL for another name. "
    "[default: cct_cifar10, which is part of the package]"
)
MEGABYTE = 10**6


def serve(
    *models: Annotated[str, Parameter(name="MODEL", required=False, help=SERVED_HELP)],
    host: Annotated[str, Parameter(group=NETWORK)] = "127.0.0.1",
    port: Annotated[int, Parameter(name=("--port", "-p"))] = 8000,
    token_file: Annotated[Path | None, Parameter(group=NETWORK)] = None,
    admin_token_file: Annotated[Path | None, Parameter(group=NETWORK)] = None,
    allow_anonymous: Annotated[bool, Parameter(negative=(), group=NETWORK)] = False,
    proxy: Annotated[str | None, Parameter(group=NETWORK)] = None,
    max_wait: Annotated[float, Parameter(group=LIMITS)] = 0.5,
    timeout: Annotated[float, Parameter(group=LIMITS)] = 5.0,
    max_body: Annotated[float, Parameter(group=LIMITS)] = 16.0,
    max_buffered: Annotated[float, Parameter(group=LIMITS)] = 128.0,
    max_connections: Annotated[int, Parameter(group=LIMITS)] = 1000,
    drain: Annotated[float, Parameter(group=LIMITS)] = 5.0,
    quiet: Annotated[bool, Parameter(negative=())] = False,
    labels: flags.Labels = None,
    engine: Annotated[
        Literal["auto", "eager", "compiled", "bfloat16", "onnx", "int8"], Parameter(group=SPEED)
    ] = "auto",
    streams: Annotated[int | None, Parameter(validator=at_most(MAX_PROCESSES), group=SPEED)] = None,
    latency: Annotated[bool, Parameter(negative=(), group=SPEED)] = False,
    image_size: flags.ImageSize = None,
    fields: flags.ConfigFields = None,
    preprocessing: flags.PreprocessingFields = None,
    device: flags.Device = "auto",
) -> None:
    """Serve models over HTTP, with a page that shows what they attend to.

    Open the address that is printed: drop a photo on the page, and the attention follows the mouse. Programs send
    photos to the same address; clients of Hugging Face, Triton and KServe work unchanged. A request that would wait
    too long is refused at once with status 429, so that the others stay fast. SIGTERM ends without losing a request;
    SIGHUP opens the models again. Exported models (`vitrail export`) need no torch and are the fastest.

    From a shell: curl --data-binary @photo.jpg http://127.0.0.1:8000/ or, of one of several models and with a limit,
    curl -F image=@photo.jpg http://127.0.0.1:8000/models/NAME?top_k=3. All routes are in /openapi.json.

    Only this machine can connect. For others, write a password into a file: openssl rand -hex 16 > token, then
    --host 0.0.0.0 --token-file token.

    Examples::

        vitrail serve
        vitrail serve runs/photos
        vitrail serve small=vit_fashion large=cct_cifar10 --port 9000

    Parameters
    ----------
    host
        Address to listen on; 0.0.0.0 is every network of this machine.
    port
        Port to listen on; 0 is any free one.
    token_file
        File with the token that requests have to send: Authorization: Bearer TOKEN. [default: the variable
        VITRAIL_TOKEN]
    admin_token_file
        File with the token for reloading models over HTTP. [default: the variable VITRAIL_ADMIN_TOKEN]
    allow_anonymous
        Accept requests of other machines without a token.
    proxy
        Name by which a reverse proxy on this machine is reached: photos.example.org. Its X-Forwarded headers are
        trusted. [default: no proxy]
    max_wait
        Seconds that a request may be expected to wait; else it is refused.
    timeout
        Seconds until a request is answered; after that it is not computed.
    max_body
        Megabytes per request.
    max_buffered
        Megabytes of all requests that wait.
    max_connections
        Open connections.
    drain
        Seconds after SIGTERM in which requests are still accepted, while a load balancer learns of it.
    quiet
        Do not write a line per request on stderr.
    engine
        What runs models that read images; onnx and int8 export them once to a cache. [default: eager for torch, onnx
        for an exported model]
    streams
        Items that are computed at the same time, on one thread each. [default: one per core]
    latency
        Compute one item at a time on all cores: the shortest time per item on a machine that does nothing else.
    """
    try:
        from vitrail.serve.server import serve_models
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vitrail"):
            raise
        raise missing_package_error("vitrail serve", error.name.partition(".")[0], "serve") from None
    from vitrail.serve.settings import ServeSettings

    how = {"labels": read_labels(labels), "streams": streams, "fields": parse_fields(fields) or None}
    how |= {"engine": None if engine == "auto" else engine, "latency": latency or None}
    how |= {"image_size": None if image_size is None else parse_size(image_size)}
    how |= {"preprocessing": parse_fields(preprocessing, "--preprocessing") or None}
    how |= {"device": None if device == "auto" else device}
    settings = ServeSettings(
        host=host,
        port=port,
        token=read_token(token_file, TOKEN_VARIABLE),
        admin_token=read_token(admin_token_file, ADMIN_VARIABLE),
        allow_anonymous=allow_anonymous,
        proxy=proxy,
        max_wait=max_wait,
        timeout=timeout,
        max_body=round(max_body * MEGABYTE),
        max_buffered=round(max_buffered * MEGABYTE),
        max_connections=max_connections,
        drain=drain,
        log=not quiet,
        options={name: value for name, value in how.items() if value is not None},
    )
    serve_models(models, settings, print_address)


def read_token(file: Path | None, variable: str) -> str | None:
    """From a file or the environment, never from the command line, which other users of the machine can read."""
    if file is None:
        return os.environ.get(variable) or None
    if not file.exists():
        raise ConfigError(f"{file} does not exist; write a token into it: openssl rand -hex 16 > {file}")
    return read_text(file).strip()


def print_address(address: str, service: "Service") -> None:
    """On stdout the address alone, so that scripts can read it."""
    names = ", ".join(f"{each.name} ({each.served.facts.get('kind')})" for each in service.models)
    print(f"vitrail: serving {names}; Ctrl-C ends, curl --data-binary @photo.jpg {address}", file=sys.stderr)
    print(address, flush=True)
