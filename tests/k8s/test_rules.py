"""Each check of ``test_overlays`` detects an object that is wrong in one field."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from k8s import cluster_rules, operator_rules
from k8s.kustomize import overlay
from k8s.schema import problems

Things = list[dict[str, Any]]


def first(things: Things, kind: str) -> Any:
    return next(thing for thing in things if thing["kind"] == kind)


def spec(things: Things) -> Any:
    """Return the specification of the cluster."""
    return first(things, "RayJob")["spec"].get("rayClusterSpec") or first(things, "RayCluster")["spec"]


def pod(things: Things, group: int = 0) -> Any:
    """Return the specification of a worker group's pod."""
    return spec(things)["workerGroupSpecs"][group]["template"]["spec"]


def put(path: str, value: object) -> Callable[[Any], None]:
    """Return a function that sets one field, given as ``spec.x.0.y``."""
    *way, last = path.split(".")

    def change(thing: Any) -> None:
        for step in way:
            thing = thing[int(step) if step.isdecimal() else step]
        thing[last] = value

    return change


WRONG_FOR_A_SCHEMA = {
    "a field that KubeRay does not know": (lambda t: spec(t), put("gcsFaultTolerance", True), "was unexpected"),
    "a pod's field in the wrong case": (lambda t: pod(t), put("terminationgraceperiodseconds", 5), "was unexpected"),
    "a word that is none of those allowed": (lambda t: spec(t), put("autoscalerOptions.version", "v3"), "is not one of"),
    "a number where text is asked for": (lambda t: spec(t), put("headGroupSpec.rayStartParams.num-cpus", 0), "is not of type"),
    "a quantity that is none": (
        lambda t: pod(t),
        put("containers.0.resources.limits.memory", "768 GiB"),
        "does not match",
    ),
    "a worker group without a name": (lambda t: spec(t)["workerGroupSpecs"][0], lambda g: g.pop("groupName"), "required"),
    "a monitor's endpoint with a field of another kind": (
        lambda t: first(t, "PodMonitor"),
        put("spec.podMetricsEndpoints.0.targetPorts", 8080),
        "was unexpected",
    ),
    "a cron job without a schedule": (lambda t: first(t, "CronJob")["spec"], lambda s: s.pop("schedule"), "required"),
    "a policy with a misspelt field": (lambda t: first(t, "NetworkPolicy"), put("spec.egres", []), "was unexpected"),
    "a budget in text that is a number": (
        lambda t: first(t, "PodDisruptionBudget"),
        put("spec.selector", "all"),
        "is not of type",
    ),
}

WRONG_FOR_KUBERAY = {
    "resources": (
        lambda t: spec(t)["headGroupSpec"],
        put("resources", {"CPU": "1"}),
        "headgroup: resources stand in rayStartParams and in resources",
    ),
    "autoscaler": (lambda t: pod(t), put("restartPolicy", "Always"), "gpu: restartPolicy Always with autoscaler v2"),
    "redis": (
        lambda t: spec(t)["headGroupSpec"],
        put("rayStartParams.redis-password", "hunter2"),
        "redis-password: only gcsFaultToleranceOptions",
    ),
    "authentication": (lambda t: spec(t), put("rayVersion", "2.51.0"), "rayVersion of 2.52"),
    "jobs": (lambda t: first(t, "RayJob"), put("spec.clusterSelector", {"ray.io/cluster": "raystow"}), "either"),
    "names": (lambda t: first(t, "RayJob"), put("metadata.name", "train-" + 43 * "x"), "up to 47 characters"),
    "kueue": (
        lambda t: first(t, "RayJob"),
        put("metadata.labels", {"kueue.x-k8s.io/queue-name": "gpus"}),
        "does not take a RayJob with an autoscaler",
    ),
}

WRONG_IN_A_CLUSTER = {
    "restricted": (lambda t: pod(t)["containers"][0], put("securityContext.readOnlyRootFilesystem", False), "root file system"),
    "images": (lambda t: pod(t)["containers"][0], put("image", "registry.example.com:5000/raystow"), "is not pinned"),
    "images of others": (lambda t: pod(t)["containers"][0], put("image", "redis:7.4.2-alpine"), "is not pinned"),
    "secrets": (
        lambda t: first(t, "RayJob"),
        put("spec.runtimeEnvYAML", "env_vars: {AWS_SECRET_ACCESS_KEY: hunter2}"),
        "runtimeEnvYAML holds a secret",
    ),
    "references": (lambda t: pod(t)["containers"][0], put("envFrom.0.configMapRef.name", "raystow-7f9k2"), "no config map"),
    "memory": (lambda t: pod(t), put("volumes.1.emptyDir.sizeLimit", "1Gi"), "no room for an object store"),
    "grace": (lambda t: pod(t), put("terminationGracePeriodSeconds", 300), "too few for a hook that waits 300 s"),
    "disruption": (
        lambda t: next(thing for thing in t if thing["metadata"]["name"] == "raystow-workers"),
        put("spec.minAvailable", "50%"),
        "take a number for minAvailable",
    ),
    "selectors": (lambda t: first(t, "PodMonitor"), put("spec.podMetricsEndpoints.0.port", "prometheus"), "no pod has a port"),
}


def with_change(where: Callable[[Things], Any], change: Callable[[Any], None]) -> Things:
    things = copy.deepcopy(overlay("minio-dev"))
    change(where(things))
    return things


@pytest.mark.parametrize(("where", "change", "found"), WRONG_FOR_A_SCHEMA.values(), ids=WRONG_FOR_A_SCHEMA)
def test_a_schema_detects_the_error(where: Callable[[Things], Any], change: Callable[[Any], None], found: str) -> None:
    changed = [thing for thing in with_change(where, change) if thing not in overlay("minio-dev")]
    (problem,) = [problem for thing in changed for problem in problems(thing)]
    assert found in problem


@pytest.mark.parametrize("name", [*WRONG_FOR_KUBERAY, *WRONG_IN_A_CLUSTER])
def test_a_rule_detects_the_error(name: str) -> None:
    where, change, found = {**WRONG_FOR_KUBERAY, **WRONG_IN_A_CLUSTER}[name]
    rules = {rule.__name__: rule for rule in (*operator_rules.RULES, *cluster_rules.RULES)}
    assert any(found in problem for problem in rules[name.split()[0]](with_change(where, change)))


def test_every_rule_has_an_error_to_detect() -> None:
    assert {name.split()[0] for name in (*WRONG_FOR_KUBERAY, *WRONG_IN_A_CLUSTER)} == {
        rule.__name__ for rule in (*operator_rules.RULES, *cluster_rules.RULES)
    }
