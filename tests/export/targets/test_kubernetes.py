"""Resources for Kubernetes and KServe, read back as YAML."""

from pathlib import Path
from typing import Any

import yaml
from support.target_folders import WriteTarget

from vitrail.export.targets.kubernetes import GRACE_SECONDS
from vitrail.serve.settings import ServeSettings


def read_resources(file: Path) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(file.read_text())}


def test_a_deployment_a_service_and_an_autoscaler(write_target: WriteTarget) -> None:
    folder, _ = write_target("kubernetes")
    assert (folder / "Dockerfile").exists()
    found = read_resources(folder / "kubernetes.yaml")
    assert list(found) == ["Deployment", "Service", "HorizontalPodAutoscaler"]
    assert {each["metadata"]["name"] for each in found.values()} == {"toy-2"}
    spec = found["Deployment"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"]
    assert found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "toy-2"
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == GRACE_SECONDS
    assert ServeSettings().drain + ServeSettings().timeout < GRACE_SECONDS
    (container,) = pod["containers"]
    assert container["image"].startswith("toy-2:")
    assert container["securityContext"]["runAsNonRoot"]
    assert container["resources"]["limits"]["cpu"].isdigit(), "whole cores"
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes == {
        "startup": "/v2/health/ready",
        "readiness": "/v2/health/ready",
        "liveness": "/v2/health/live",
    }
    ports = {each["name"] for each in container["ports"]}
    assert {found["Service"]["spec"]["ports"][0]["targetPort"]} == ports


def test_kserve_has_a_model_repository_and_a_container(write_target: WriteTarget) -> None:
    folder, _ = write_target("kserve")
    assert (folder / "repository" / "toy-2" / "config.pbtxt").exists()
    assert (folder / "repository" / "toy-2" / "1" / "model.onnx").exists()
    predictor = read_resources(folder / "inferenceservice.yaml")["InferenceService"]["spec"]["predictor"]
    assert (predictor["model"]["modelFormat"], predictor["model"]["protocolVersion"]) == ({"name": "onnx"}, "v2")
    other = read_resources(folder / "inferenceservice-container.yaml")["InferenceService"]["spec"]["predictor"]
    assert other["containers"][0]["name"] == "kserve-container"
