"""A deployment for Ray Serve: a class, and the configuration that starts it."""

import ast
from pathlib import Path
from typing import Any

from vitrail.base.errors import CheckpointError, ConfigError
from vitrail.export.targets.container import copy_vitrail, pin_packages
from vitrail.export.targets.deployment import Deployment
from vitrail.export.targets.kubernetes import write_resources

SERVICE_FILE = Path(__file__).with_name("ray_service.py")
PACKAGES = ("onnxruntime", "numpy", "pillow")
HEADER = """# In this folder, which has vitrail: pip install -r requirements.txt
# Then: PYTHONPATH=$PWD serve run serve_config.yaml
# On a cluster the folder has to be on every machine, at the same path, and in its PYTHONPATH.
"""


def write_ray(made: Deployment) -> list[str]:
    if made.about.output != "logits":
        raise ConfigError("`for_target` ray with `features`; expected classes, or `for_target` container")
    code = SERVICE_FILE.read_text("utf-8")
    classes = {each.name for each in ast.walk(ast.parse(code)) if isinstance(each, ast.ClassDef)}
    deployment: dict[str, Any] = {
        "name": "PhotoClassifier",
        "max_ongoing_requests": 2,  # of a replica: one is computed, one waits
        "max_queued_requests": 64,  # then 503
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 1},
        "ray_actor_options": {"num_cpus": 1},
    }
    if deployment["name"] not in classes:
        raise CheckpointError(f"{SERVICE_FILE.name} has no class {deployment['name']}; install vitrail again")
    application = {
        "name": made.name,
        "route_prefix": "/",
        "import_path": f"{SERVICE_FILE.stem}:app",
        "deployments": [deployment],
    }
    config = {"http_options": {"host": "127.0.0.1", "port": 8000}, "applications": [application]}
    made.write(SERVICE_FILE.name, code)
    write_resources(made, "serve_config.yaml", HEADER, [config])
    pins = pin_packages(PACKAGES)
    made.write("requirements.txt", "".join(f"{name}=={version}\n" for name, version in pins.items()) + "ray[serve]\n")
    copy_vitrail(made.folder / "vitrail")
    return []
