"""Every overlay, rendered like ``kubectl apply -k``, is valid by the schemas and by the rules for clusters."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from k8s import cluster_rules, operator_rules
from k8s.kustomize import K8S, OVERLAYS, overlay
from k8s.pods import pods, ray_clusters
from k8s.schema import problems
from raystow.cli.app import build

_ROOT = Path(__file__).parents[2]
each_overlay = pytest.mark.parametrize("name", OVERLAYS)


def test_the_overlays_are_these_three() -> None:
    assert OVERLAYS == ["gcs-ft", "minio-dev", "s3-irsa"]


@each_overlay
def test_every_object_matches_its_schema(name: str) -> None:
    assert [problem for thing in overlay(name) for problem in problems(thing)] == []


@each_overlay
def test_every_pod_matches_the_schema_of_kubernetes(name: str) -> None:
    for pod in pods(overlay(name)):
        metadata = {"name": "pod", "labels": pod.labels}
        assert problems({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod.spec}) == [], pod.name


@each_overlay
@pytest.mark.parametrize("rule", [*operator_rules.RULES, *cluster_rules.RULES], ids=lambda rule: rule.__name__)
def test_every_rule_accepts_the_overlay(name: str, rule: operator_rules.Rule) -> None:
    assert list(rule(overlay(name))) == []


@each_overlay
def test_the_overlay_has_its_objects_and_features(name: str) -> None:
    kinds = {thing["kind"] for thing in overlay(name)}
    assert {"RayJob", "PodDisruptionBudget", "CronJob", "PodMonitor", "NetworkPolicy", "ServiceAccount"} <= kinds
    (cluster,) = ray_clusters(overlay(name))
    assert ("RayCluster" in kinds) == (name == "gcs-ft")
    assert ("gcsFaultToleranceOptions" in cluster.spec) == (name == "gcs-ft")
    assert cluster.autoscaled == (name != "s3-irsa")
    assert any("nvidia.com/gpu" in group.ray["resources"]["limits"] for group in cluster.groups)


@each_overlay
def test_the_ray_versions_of_image_and_objects_are_equal(name: str) -> None:
    (version,) = set(re.findall(r"^FROM rayproject/ray:([\d.]+)-", (K8S / "Dockerfile").read_text(), re.MULTILINE))
    assert {cluster.spec["rayVersion"] for cluster in ray_clusters(overlay(name))} == {version}
    for constraints in (_ROOT / "constraints.txt", K8S / "constraints.txt"):
        assert f"ray=={version}\n" in constraints.read_text()


@each_overlay
def test_the_job_runs_an_example_of_the_image(name: str) -> None:
    (job,) = (thing for thing in overlay(name) if thing["kind"] == "RayJob")
    python, script, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert python == "python"
    assert "examples /opt/raystow/examples" in (K8S / "Dockerfile").read_text()
    assert (_ROOT / "examples" / Path(script).relative_to("/opt/raystow/examples")).is_file()
    (environment,) = (thing["data"] for thing in overlay(name) if thing["kind"] == "ConfigMap")
    assert {argument[1:] for argument in arguments if argument.startswith("$")} == {"RAYSTOW_URI", "RAYSTOW_WORKERS"}
    assert {"RAYSTOW_URI", "RAYSTOW_WORKERS"} <= {*environment}


@each_overlay
def test_the_numbers_of_gpus_and_workers_are_equal(name: str) -> None:
    (environment,) = (thing["data"] for thing in overlay(name) if thing["kind"] == "ConfigMap")
    (cluster,) = ray_clusters(overlay(name))
    gpus = [group.most * int(group.ray["resources"]["limits"].get("nvidia.com/gpu", 0)) for group in cluster.groups]
    assert sum(gpus) == int(environment["RAYSTOW_WORKERS"])


@each_overlay
def test_commands_of_the_pods_are_valid(name: str) -> None:
    """The command line parses them, but does not run them."""
    lines = [shlex.join(container.get("args", [])) for pod in pods(overlay(name)) for container in pod.containers]
    hooks = [container.get("lifecycle", {}) for pod in pods(overlay(name)) for container in pod.containers]
    lines += [hook["preStop"]["exec"]["command"][-1] for hook in hooks if hook]
    commands = {found for line in lines for found in re.findall(r"raystow (\w+ [^;|>&]*)", line)}
    assert {command.split()[0] for command in commands} == {"drain", "gc", "prune", "verify"}
    app: Any = typer.main.get_command(build())
    for command in commands:
        verb, *arguments = shlex.split(command)
        app.commands[verb].make_context(verb, arguments)
