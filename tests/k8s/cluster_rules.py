"""Rules for manifests that are valid by their schemas but would fail or be unsafe in a cluster. Each rule yields problems."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from k8s.pods import Thing, pods, ray_clusters, variables

_ROOT = Path(__file__).parents[2]
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD", re.IGNORECASE)
_WITHIN = re.compile(r"raystow drain --within (\d+)s")
_AROUND = 60  # seconds of a preStop hook besides its wait: start of Python, `ray stop`, and a reserve


def nbytes(quantity: str) -> int:
    """Return the bytes of a quantity in binary units, such as ``4Gi``."""
    found = re.fullmatch(r"(\d+)(\w*)", quantity)
    assert found is not None, quantity
    return int(found[1]) * _UNITS[found[2]]


def restricted(things: Sequence[Thing]) -> Iterator[str]:
    """Pods meet Pod Security's profile "restricted", which the namespace enforces, and have a read-only root file system."""
    for pod in pods(things):
        common = pod.spec.get("securityContext", {})
        if not common.get("runAsNonRoot") or common.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.name}: runs as root, or without a seccomp profile"
        for container in pod.containers:
            yield from _hardened(f"{pod.name}, {container['name']}", container.get("securityContext", {}))
    for cluster in ray_clusters(things):
        if cluster.autoscaled:
            yield from _hardened("the autoscaler", cluster.spec.get("autoscalerOptions", {}).get("securityContext", {}))


def _hardened(name: str, context: Thing) -> Iterator[str]:
    if context.get("allowPrivilegeEscalation") is not False or context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{name}: may gain privileges"
    if not context.get("readOnlyRootFilesystem"):
        yield f"{name}: writes to its root file system"


def images(things: Sequence[Thing]) -> Iterator[str]:
    """An image that the user builds has a tag; one that others publish, who could move its tag, has a digest."""
    for pod in pods(things):
        for container in pod.containers:
            name, _, tag = container["image"].rpartition("/")[2].partition(":")
            if tag in ("", "latest") or (name != "raystow" and not _DIGEST.search(tag)):
                yield f"{pod.name}: image {container['image']} is not pinned"


def secrets(things: Sequence[Thing]) -> Iterator[str]:
    """Objects contain no secrets; pods get the name of a secret, and docs/kuberay.md says how it is made."""
    page = (_ROOT / "docs" / "kuberay.md").read_text()
    for thing in things:
        if thing["kind"] == "Secret":
            yield f"Secret {thing['metadata']['name']}: secrets do not belong into files"
        if thing["kind"] == "RayJob" and _SECRET.search(thing["spec"].get("runtimeEnvYAML", "")):
            yield "runtimeEnvYAML holds a secret, which the dashboard would show"
        for name, value in thing.get("data", {}).items() if thing["kind"] == "ConfigMap" else ():
            if _SECRET.search(name):
                yield f"ConfigMap {thing['metadata']['name']}: {name}={value} is a secret"
    for pod in pods(things):
        for container in pod.containers:
            for name, entry in variables(container).items():
                if _SECRET.search(name) and "value" in entry:
                    yield f"{pod.name}: the secret {name} stands in the object"
    for name in _references(things, "secretRef", "secretKeyRef"):
        if f"create secret generic {name} " not in page:
            yield f"secret {name}: docs/kuberay.md does not say how it is made"


def references(things: Sequence[Thing]) -> Iterator[str]:
    """Every config map, service account and volume that a pod names exists."""
    there = {(thing["kind"], thing["metadata"]["name"]) for thing in things}
    for name in _references(things, "configMapRef", "configMapKeyRef"):
        if ("ConfigMap", name) not in there:
            yield f"no config map {name}"
    for pod in pods(things):
        account = pod.spec.get("serviceAccountName")
        if account is not None and ("ServiceAccount", account) not in there:
            yield f"{pod.name}: no service account {account}"
        owners = [thing for thing in things if pod.name == f"StatefulSet {thing['metadata']['name']}"]
        claimed = [claim["metadata"]["name"] for owner in owners for claim in owner["spec"].get("volumeClaimTemplates", [])]
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])} | {*claimed}
        for container in pod.containers:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{pod.name}: no volume {mount['name']}"


def _references(value: object, *fields: str) -> Iterator[str]:
    if isinstance(value, dict):
        for name, part in value.items():
            if name in fields:
                yield part["name"]
            else:
                yield from _references(part, *fields)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part, *fields)


def memory(things: Sequence[Thing]) -> Iterator[str]:
    """Data in memory fits into the container's limit, and Ray's object store into /dev/shm."""
    for cluster in ray_clusters(things):
        for group in cluster.groups:
            volumes = {volume["name"]: volume.get("emptyDir", {}) for volume in group.spec["template"]["spec"]["volumes"]}
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in group.ray["volumeMounts"]}
            limit = nbytes(group.ray["resources"]["limits"]["memory"])
            shared, store = mounts.get("/dev/shm", {}), int(group.spec["rayStartParams"]["object-store-memory"])
            if shared.get("medium") != "Memory" or nbytes(shared["sizeLimit"]) <= store:
                yield f"{group.name}: /dev/shm has no room for an object store of {store} bytes"
            elif group.kind == "worker" and nbytes(shared["sizeLimit"]) > limit // 4:
                yield f"{group.name}: /dev/shm may take more than a quarter of the memory, which the newest versions need"
            disk = group.ray["resources"]["limits"].get("ephemeral-storage")
            if disk is not None and nbytes(mounts["/tmp"]["sizeLimit"]) > nbytes(disk):
                yield f"{group.name}: /tmp is larger than the disk that the pod may use"


def grace(things: Sequence[Thing]) -> Iterator[str]:
    """Workers with GPUs save before they stop, and Kubernetes gives them the time."""
    for cluster in ray_clusters(things):
        for group in cluster.groups:
            if "nvidia.com/gpu" not in group.ray["resources"]["limits"]:
                continue
            hook = " ".join(group.ray.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []))
            within = _WITHIN.search(hook)
            allowed = group.spec["template"]["spec"].get("terminationGracePeriodSeconds", 30)
            if within is None:
                yield f"{group.name}: no preStop hook waits for a save"
            elif allowed < int(within[1]) + _AROUND:
                yield f"{group.name}: {allowed} s until the pod is killed are too few for a hook that waits {within[1]} s"


def disruption(things: Sequence[Thing]) -> Iterator[str]:
    """A disruption budget counts the pods of one group.

    Kubernetes compares KubeRay's pods only with a number; a number that is not below that of the pods prevents any drain.
    """
    groups = {group.name: group for cluster in ray_clusters(things) for group in cluster.groups}
    for thing in things:
        if thing["kind"] != "PodDisruptionBudget":
            continue
        name, spec = thing["metadata"]["name"], thing["spec"]
        found = [pod for pod in pods(things) if _matches(spec["selector"], pod.labels)]
        chosen = {pod.labels.get("ray.io/group", "") for pod in found}
        if not isinstance(spec.get("minAvailable"), int) or "maxUnavailable" in spec:
            yield f"{name}: pods of custom resources take a number for minAvailable, and nothing else"
        elif len(chosen) != 1 or not chosen <= {*groups}:
            yield f"{name}: counts {sorted(chosen)} together, and not one group of a Ray cluster"
        elif (group := groups[chosen.pop()]).kind == "worker" and spec["minAvailable"] != group.most - 1:
            yield f"{name}: minAvailable is not one less than the {group.most} pods of {group.name}"


def selectors(things: Sequence[Thing]) -> Iterator[str]:
    """Policies, services and monitors select pods; the network policy and the monitor cover every pod of Ray."""
    for thing in things:
        if thing["kind"] not in ("NetworkPolicy", "PodMonitor", "Service"):
            continue
        name, spec = f"{thing['kind']} {thing['metadata']['name']}", thing["spec"]
        selector = (
            {"matchLabels": spec["selector"]} if thing["kind"] == "Service" else spec.get("podSelector", spec.get("selector"))
        )
        found = [pod for pod in pods(things) if _matches(selector, pod.labels)]
        if not found:
            yield f"{name}: selects no pod"
        if thing["kind"] != "Service":
            missed = [pod.name for pod in pods(things) if "ray.io/group" in pod.labels and pod not in found]
            yield from (f"{name}: does not select {pod}" for pod in missed)
        if thing["kind"] == "PodMonitor":
            ports = {port["name"] for pod in found for container in pod.containers for port in container.get("ports", [])}
            asked = {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
            yield from (f"{name}: no pod has a port {port}" for port in sorted(asked - ports))


def _matches(selector: Thing, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, selector
    return selector.get("matchLabels", {}).items() <= labels.items()


RULES = (restricted, images, secrets, references, memory, grace, disruption, selectors)
