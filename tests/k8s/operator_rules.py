"""Rules for manifests that KubeRay's operator (1.7) or Kueue refuses although they are valid. Each rule yields problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from k8s.pods import Thing, ray_clusters, variables

_LONGEST = {"RayCluster": 53, "RayJob": 47}  # characters of a name
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_RESOURCES = {"num-cpus", "num-gpus", "memory", "resources"}
_QUEUE = "kueue.x-k8s.io/queue-name"

Rule = Callable[[Sequence[Thing]], Iterator[str]]


def names(things: Sequence[Thing]) -> Iterator[str]:
    for thing in things:
        longest, name = _LONGEST.get(thing["kind"]), thing["metadata"]["name"]
        if longest is not None and (len(name) > longest or not _DNS_1035.fullmatch(name)):
            yield f"{name}: a name of a {thing['kind']} has up to {longest} characters, as a DNS label from a letter on"


def resources(things: Sequence[Thing]) -> Iterator[str]:
    for cluster in ray_clusters(things):
        for group in cluster.groups:
            if group.spec.get("resources") and _RESOURCES & {*group.spec["rayStartParams"]}:
                yield f"{group.name}: resources stand in rayStartParams and in resources"
            if "labels" in group.spec["rayStartParams"]:
                yield f"{group.name}: labels stand in rayStartParams and not in labels"


def autoscaler(things: Sequence[Thing]) -> Iterator[str]:
    for cluster in ray_clusters(things):
        by_variable = "RAY_enable_autoscaler_v2" in variables(cluster.groups[0].ray)
        version = cluster.spec.get("autoscalerOptions", {}).get("version")
        if by_variable and (version is not None or not cluster.autoscaled):
            yield "RAY_enable_autoscaler_v2: autoscalerOptions.version says it, and only where there is an autoscaler"
        for group in cluster.groups:
            policy = group.spec["template"]["spec"].get("restartPolicy", "Never")
            if cluster.autoscaled and (version == "v2" or by_variable) and policy != "Never":
                yield f"{group.name}: restartPolicy {policy} with autoscaler v2, which takes Never"
            if cluster.autoscaled and group.spec.get("suspend"):
                yield f"{group.name}: a suspended group with an autoscaler"
            replicas = group.spec.get("replicas", 0)
            if group.kind == "worker" and not group.spec["minReplicas"] <= replicas <= group.most:
                yield f"{group.name}: replicas {replicas} are not between minReplicas and maxReplicas"


def redis(things: Sequence[Thing]) -> Iterator[str]:
    for cluster in ray_clusters(things):
        head = cluster.groups[0]
        settings = {"redis-password", "redis-username"} & {*head.spec["rayStartParams"]}
        settings |= {"REDIS_PASSWORD", "REDIS_USERNAME", "RAY_REDIS_ADDRESS"} & {*variables(head.ray)}
        settings |= {"ray.io/ft-enabled", "ray.io/external-storage-namespace"} & {
            *cluster.owner["metadata"].get("annotations", {})
        }
        for name in sorted(settings):
            yield f"{name}: only gcsFaultToleranceOptions says how Redis is reached"


def authentication(things: Sequence[Thing]) -> Iterator[str]:
    for cluster in ray_clusters(things):
        version = tuple(int(number) for number in cluster.spec.get("rayVersion", "0.0").split(".")[:2])
        if cluster.spec.get("authOptions", {}).get("mode") == "token" and version < (2, 52):
            yield "authOptions.mode token takes a rayVersion of 2.52 or newer"


def jobs(things: Sequence[Thing]) -> Iterator[str]:
    clusters = {thing["metadata"]["name"] for thing in things if thing["kind"] == "RayCluster"}
    for job in (thing for thing in things if thing["kind"] == "RayJob"):
        spec, selector = job["spec"], job["spec"].get("clusterSelector", {})
        if ("rayClusterSpec" in spec) == bool(selector):
            yield "a RayJob has either rayClusterSpec or clusterSelector"
        if selector and selector.get("ray.io/cluster") not in clusters:
            yield f"clusterSelector {selector}: no RayCluster here has this name under ray.io/cluster"
        if spec.get("ttlSecondsAfterFinished", 0) and not spec.get("shutdownAfterJobFinishes"):
            yield "ttlSecondsAfterFinished takes shutdownAfterJobFinishes"
        if spec.get("submissionMode") == "SidecarMode" and ("submitterPodTemplate" in spec or selector):
            yield "SidecarMode takes neither submitterPodTemplate nor clusterSelector"
        if spec.get("submissionMode") == "InteractiveMode" and spec.get("backoffLimit"):
            yield "InteractiveMode takes no backoffLimit"


def kueue(things: Sequence[Thing]) -> Iterator[str]:
    for thing in things:
        if _QUEUE not in thing["metadata"].get("labels", {}):
            continue
        if thing["kind"] == "RayJob" and not thing["spec"].get("shutdownAfterJobFinishes"):
            yield "Kueue takes a RayJob only with shutdownAfterJobFinishes"
        if thing["kind"] == "RayJob" and thing["spec"].get("clusterSelector"):
            yield "Kueue does not take a RayJob with clusterSelector: its cluster has the label"
        if any(cluster.owner is thing and cluster.autoscaled for cluster in ray_clusters(things)):
            yield f"Kueue does not take a {thing['kind']} with an autoscaler"


RULES = (names, resources, autoscaler, redis, authentication, jobs, kueue)
