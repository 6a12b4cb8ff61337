"""The description of the routes is that of the routes that there are."""

import json
import re
from pathlib import Path
from typing import Any

from support.server_process import Server
from support.toy_served import ServedDigits, save_digits

from vitrail.serve.app import list_routes
from vitrail.serve.model_table import HostedModel, ModelTable
from vitrail.serve.service import Service
from vitrail.serve.settings import ServeSettings


def test_every_route_is_described(tmp_path: Path, server: Server) -> None:
    described = server.get("/openapi.json").json
    served: Any = ServedDigits(str(save_digits(tmp_path / "digits")))
    model = HostedModel("digits", "", served, None, None, None, 0.1, 0)
    service = Service(ModelTable([model]), ServeSettings())
    found = {
        (re.sub(r":\w+}", "}", route.path), method)
        for route in list_routes(service)
        for method in (route.methods or set[str]()) - {"HEAD"}
    }
    written = {(path, method.upper()) for path, methods in described["paths"].items() for method in methods}
    assert found == written


def test_every_reference_resolves_and_every_parameter_is_declared(server: Server) -> None:
    described = server.get("/openapi.json").json
    text = json.dumps(described)
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', text):
        place: Any = described
        for part in reference.split("/"):
            place = place[part]
    for path, methods in described["paths"].items():
        for about in methods.values():
            listed = [
                described["components"]["parameters"][each["$ref"].rpartition("/")[2]]
                for each in about.get("parameters", ())
            ]
            declared = {each["name"] for each in listed if each["in"] == "path"}
            assert declared == set(re.findall(r"{(\w+)}", path))
            assert about["summary"]
            assert {"200", "default"} <= set(about["responses"])
