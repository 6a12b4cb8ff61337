"""Resources for Kubernetes: a Deployment, a Service and an autoscaler for the image of the container target."""

import json
from collections.abc import Sequence
from math import ceil
from typing import Any

import yaml

from vitrail.base.errors import CheckpointError
from vitrail.export.targets.container import PORT, USER_ID
from vitrail.export.targets.deployment import CORES, Deployment

GRACE_SECONDS = 15  # more than --drain and --timeout of `vitrail serve` together
BUFFERED_MEGABYTES, STREAM_MEGABYTES, BASE_MEGABYTES = 128, 350, 150  # as docs/serving.md bounds the memory
HEADER = """# {tag} is the image that the Dockerfile in this folder builds; push it, and write its address here.
# Once: kubectl create secret generic {name}-token --from-literal=token=$(openssl rand -hex 16)
# Then: kubectl apply -f kubernetes.yaml
"""


def write_kubernetes(made: Deployment) -> list[str]:
    labels = {"app.kubernetes.io/name": made.name}
    metadata = {"name": made.name, "labels": labels}
    pod = {
        "metadata": {
            "labels": labels,
            "annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": str(PORT)},
        },
        "spec": {
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "automountServiceAccountToken": False,
            "containers": [describe_container(made, "vitrail")],
        },
    }
    workload = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {  # the autoscaler sets the replicas
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": pod,
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    }
    by_cpu = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
    }
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata,
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": made.name},
            "minReplicas": 2,
            "maxReplicas": 10,
            "metrics": [by_cpu],
        },
    }
    write_resources(made, "kubernetes.yaml", HEADER, [workload, service, scaler])
    return []


def describe_container(made: Deployment, name: str) -> dict[str, Any]:
    """The container of a pod, with whole cores: a fraction of one would be throttled in the middle of a photo."""
    memory = BASE_MEGABYTES + BUFFERED_MEGABYTES + STREAM_MEGABYTES * CORES + 2 * ceil(made.megabytes)
    resources = {"cpu": str(CORES), "memory": f"{memory}M"}
    ready, live = ({"httpGet": {"path": f"/v2/health/{each}", "port": "http"}} for each in ("ready", "live"))
    return {
        "name": name,
        "image": made.tag,
        "args": ["--streams", str(CORES)],
        "env": [
            {"name": "VITRAIL_TOKEN", "valueFrom": {"secretKeyRef": {"name": f"{made.name}-token", "key": "token"}}}
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {**ready, "periodSeconds": 1, "failureThreshold": 60},
        "readinessProbe": {**ready, "periodSeconds": 2, "failureThreshold": 1},
        "livenessProbe": {**live, "periodSeconds": 10, "timeoutSeconds": 5},
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def write_resources(made: Deployment, file: str, header: str, resources: Sequence[dict[str, Any]]) -> None:
    """Write YAML documents, and read them back."""
    plain: list[Any] = json.loads(json.dumps(list(resources)))  # no anchors for parts that appear twice
    text = header.format(tag=made.tag, name=made.name) + yaml.safe_dump_all(plain, sort_keys=False)
    if list(yaml.safe_load_all(text)) != plain:
        raise CheckpointError(f"{file} does not read back as it was written; this is a bug, so nothing is written")
    made.write(file, text)
