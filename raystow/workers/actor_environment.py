"""The environment of a detached actor. Ray gives it the variables of the job that makes it, and it serves other jobs, too.

So it gets no secrets of that job, and reaches each store with the settings that the store's job sends.
"""

from __future__ import annotations

import os
import re

import ray

from ..storage.log import here
from . import ray_metrics

_OF_STORES = "AWS_", "AZURE_", "GOOGLE_"
_PRIVATE = re.compile(rf"({'|'.join(_OF_STORES)})|(?!RAY_|RAYSTOW_).*(SECRET|TOKEN|KEY|PASS|CREDENTIAL)", re.IGNORECASE)


def for_actor(**variables: str) -> dict[str, dict[str, str]]:
    """Return the runtime environment in which this process makes an actor.

    Ray adds the variables of this process's own one, and none can be left away: those that are private are made empty.
    """
    inherited = ray.get_runtime_context().runtime_env.env_vars()
    return {"env_vars": {**dict.fromkeys(filter(_PRIVATE.match, inherited), ""), **variables}}


def enter(*, settings_sent: bool) -> str:
    """Begin an actor: Ray exports its metrics, and its log names the node, whose id is returned.

    ``settings_sent``: jobs send the settings of their stores, so that the variables of stores are removed. What is removed from a
    process stays in its image: hence ``for_actor``.
    """
    if settings_sent:
        for name, value in list(os.environ.items()):
            if name.startswith(_OF_STORES) or (not value and _PRIVATE.match(name)):
                del os.environ[name]
    node: str = ray.get_runtime_context().get_node_id()
    ray_metrics.export()
    here(node=node)
    return node
