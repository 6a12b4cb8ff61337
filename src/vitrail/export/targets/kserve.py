"""Resources for KServe: the model repository on its Triton, or our container."""

from typing import Any

from vitrail.export.targets.deployment import CORES, Deployment
from vitrail.export.targets.kubernetes import describe_container, write_resources

HEADER = """# Copy the folder repository to the volume claim "models" as {name}. In a bucket: change storageUri.
# Then: kubectl apply -f inferenceservice.yaml
"""
CONTAINER_HEADER = """# The other way, which takes photos: {tag} is the image of `vitrail export --for container`.
# Once: kubectl create secret generic {name}-token --from-literal=token=$(openssl rand -hex 16)
"""


def write_kserve(made: Deployment) -> list[str]:
    resources = {"cpu": str(CORES), "memory": "2G"}
    model = {
        "modelFormat": {"name": "onnx"},
        "protocolVersion": "v2",  # without it KServe finds no runtime
        "storageUri": f"pvc://models/{made.name}",
        "resources": {"requests": resources, "limits": resources},
    }
    write_resources(made, "inferenceservice.yaml", HEADER, [describe_service(made, {"model": model})])
    container = describe_container(made, "kserve-container")
    predictor = {"containers": [container], "minReplicas": 1}
    write_resources(made, "inferenceservice-container.yaml", CONTAINER_HEADER, [describe_service(made, predictor)])
    return []


def describe_service(made: Deployment, predictor: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": made.name},
        "spec": {"predictor": predictor},
    }
