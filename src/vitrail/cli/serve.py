"""vitrail serve: models over HTTP, and a page that explores them."""

from typing import Annotated

from cyclopts import Parameter

from vitrail.base.errors import missing_package_error
from vitrail.cli.options import model_flags as flags

SERVED_HELP = "Models, each as NAME=MODEL or MODEL. [default: a small model of the package]"


def serve(
    *models: Annotated[str, Parameter(name="MODEL", required=False, help=SERVED_HELP)],
    host: str = "127.0.0.1",
    port: int = 8000,
    device: flags.Device = "auto",
) -> None:
    """Serve models over HTTP, with a page at / that shows what they attend to.

    Examples::

        vitrail serve
        vitrail serve vit_fashion cct_cifar10
    """
    try:
        from vitrail.serve.server import serve_models
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vitrail"):
            raise
        raise missing_package_error("`serve`", error.name, "serve") from None
    from vitrail.serve.settings import ServeSettings

    settings = ServeSettings(host=host, port=port, options={"device": None if device == "auto" else device})
    serve_models(models, settings, lambda address, _: print(address, flush=True))
