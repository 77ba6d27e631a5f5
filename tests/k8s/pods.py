"""The pods and Ray clusters in rendered objects, at every place where an object can contain them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Thing = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod template. ``name``: for messages. ``labels``: including those that KubeRay adds, for selectors."""

    name: str
    template: Thing
    labels: dict[str, str]

    @property
    def spec(self) -> Thing:
        return dict(self.template["spec"])

    @property
    def containers(self) -> list[Thing]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


@dataclass(frozen=True)
class Group:
    """The head or a worker group of a Ray cluster. ``most``: the maximum number of pods."""

    name: str
    spec: Thing
    most: int
    kind: str

    @property
    def ray(self) -> Thing:
        """The container that runs Ray: for KubeRay the first."""
        return dict(self.spec["template"]["spec"]["containers"][0])


@dataclass(frozen=True)
class RayCluster:
    """The specification of a cluster in a RayCluster or a RayJob."""

    owner: Thing
    spec: Thing

    @property
    def autoscaled(self) -> bool:
        return bool(self.spec.get("enableInTreeAutoscaling"))

    @property
    def groups(self) -> list[Group]:
        head = Group("headgroup", self.spec["headGroupSpec"], 1, "head")
        workers = [Group(group["groupName"], group, group["maxReplicas"], "worker") for group in self.spec["workerGroupSpecs"]]
        return [head, *workers]


def ray_clusters(things: Sequence[Thing]) -> list[RayCluster]:
    """Return the Ray clusters of all objects."""
    direct = [RayCluster(thing, thing["spec"]) for thing in things if thing["kind"] == "RayCluster"]
    jobs = [thing for thing in things if thing["kind"] == "RayJob" and "rayClusterSpec" in thing["spec"]]
    return direct + [RayCluster(job, job["spec"]["rayClusterSpec"]) for job in jobs]


def pods(things: Sequence[Thing]) -> Iterator[Pod]:
    """Yield the pods of all objects."""
    for cluster in ray_clusters(things):
        for group in cluster.groups:
            added = {"ray.io/is-ray-node": "yes", "ray.io/node-type": group.kind, "ray.io/group": group.name}
            yield _pod(f"{cluster.owner['metadata']['name']} {group.name}", group.spec["template"], added)
    for thing in things:
        name, spec = f"{thing['kind']} {thing['metadata']['name']}", thing.get("spec", {})
        if thing["kind"] in ("Job", "StatefulSet", "Deployment"):
            yield _pod(name, spec["template"])
        elif thing["kind"] == "CronJob":
            yield _pod(name, spec["jobTemplate"]["spec"]["template"])
        elif thing["kind"] == "RayJob" and "submitterPodTemplate" in spec:
            yield _pod(f"{name} submitter", spec["submitterPodTemplate"])


def _pod(name: str, template: Thing, added: dict[str, str] | None = None) -> Pod:
    return Pod(name, template, {**template.get("metadata", {}).get("labels", {}), **(added or {})})


def variables(container: Thing) -> dict[str, Thing]:
    """Return the entries of a container's ``env`` by name."""
    return {entry["name"]: entry for entry in container.get("env", [])}
