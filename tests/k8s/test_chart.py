"""The Helm chart, rendered by Helm, has the same objects as Kustomize's base, with its values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from k8s import cluster_rules, operator_rules
from k8s.kustomize import K8S, chart, lint_chart, render
from k8s.schema import problems

URI = ("--set", "uri=s3://bucket/prefix")
OTHERS = (
    "--set",
    "uri=s3://bucket/prefix,env.AWS_REGION=us-east-1,image.repository=registry.example.com/raystow,image.tag=9,"
    "workers.maxReplicas=5,workers.gpus=4,workers.memory=400Gi,prune.enabled=true,prune.policy={--keep-last,7},"
    "serviceAccount.annotations.role=reader,podMonitor=false",
)


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(thing["kind"], thing["metadata"]["name"]): thing for thing in objects}


def test_the_default_chart_equals_the_base() -> None:
    base = {name: thing for name, thing in by_name(render(K8S / "base")).items() if name[0] != "Namespace"}
    made = by_name(chart(*URI, "--set", "image.tag=1"))
    assert made.keys() == base.keys()
    for name, thing in made.items():
        assert json.loads(json.dumps(thing).replace('"raystow:1"', '"raystow"')) == base[name]


def test_values_change_the_objects() -> None:
    made = by_name(chart(*OTHERS))
    cluster, environment = made["RayCluster", "raystow"]["spec"], made["ConfigMap", "raystow"]["data"]
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert (workers["maxReplicas"], container["image"]) == (5, "registry.example.com/raystow:9")
    assert container["resources"]["limits"] == {"memory": "400Gi", "ephemeral-storage": "500Gi", "nvidia.com/gpu": "4"}
    assert environment == {"RAYSTOW_URI": "s3://bucket/prefix", "RAYSTOW_WORKERS": "20", "AWS_REGION": "us-east-1"}
    assert made["PodDisruptionBudget", "raystow-workers"]["spec"]["minAvailable"] == 4
    assert made["ServiceAccount", "raystow"]["metadata"]["annotations"] == {"role": "reader"}
    prune = made["CronJob", "raystow-prune"]["spec"]
    assert prune["suspend"] is False
    (job,) = prune["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert job["args"] == ["raystow", "prune", "$(RAYSTOW_URI)", "--keep-last", "7", "--yes"]
    assert ("PodMonitor", "raystow") not in made


@pytest.mark.parametrize("values", [URI, OTHERS], ids=["defaults", "others"])
def test_helm_and_the_schemas_accept_the_chart(values: tuple[str, ...]) -> None:
    assert "0 chart(s) failed" in lint_chart(*values)
    objects = chart(*values)
    assert [problem for thing in objects for problem in problems(thing)] == []
    assert [found for rule in (*operator_rules.RULES, *cluster_rules.RULES) for found in rule(objects)] == []


def test_a_repository_is_required() -> None:
    with pytest.raises(AssertionError, match="set uri to the repository"):
        chart()
