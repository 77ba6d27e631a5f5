"""Registers a CPU platform and verl's FSDP engines for it, because verl has none for CPUs. Import this module before verl."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import ray.actor
import torch

# verl declares actors at import. Ray would then seed its generator of ids, and all ranks forked from this process would draw the
# same ids.
ray.actor.ActorClassID = types.SimpleNamespace(from_random=lambda: ray.ActorClassID(os.urandom(ray.ActorClassID.size())))

from verl.plugin.platform.platform_base import PlatformBase  # noqa: E402
from verl.plugin.platform.platform_manager import set_platform  # noqa: E402
from verl.utils import distributed  # noqa: E402


class Cpu(PlatformBase):
    """The device interface of verl, implemented for the CPU."""

    device_name, vendor_name = "cpu", "cpu"
    device_module = types.SimpleNamespace(
        is_available=lambda: False,
        set_device=lambda rank: None,
        current_device=lambda: "cpu",
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), lambda: 0),
        mem_get_info=lambda: (0, 1),
        get_device_name=lambda: "CPU",
        manual_seed_all=torch.manual_seed,
    )

    def is_available(self) -> bool:
        return False

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "NO_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _group(*_: object, **__: object) -> None:
    """Start gloo; verl would start a backend for the CPU and one for the device."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", init_method=os.environ.get("DIST_INIT_METHOD"))


set_platform(Cpu())
distributed.initialize_global_process_group = distributed.initialize_global_process_group_ray = _group

from verl.workers.engine.base import EngineRegistry  # noqa: E402 (it asks for the platform)
from verl.workers.engine.fsdp import transformer_impl as fsdp  # noqa: E402


class Fsdp1(fsdp.FSDP):
    """FSDP1 with a broadcast of the weights on the CPU; its own broadcast needs GPUs."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        if torch.distributed.get_rank():
            module.to_empty(device="cpu")
        for tensor in (*module.parameters(), *module.buffers()):
            torch.distributed.broadcast(tensor.detach(), 0)
        super().__init__(module, **{**options, "param_init_fn": None, "sync_module_states": False})


def _to_device(model: torch.nn.Module) -> None:
    """Do nothing: offloaded parameters are on the CPU, as all others."""


fsdp.FSDP, fsdp.load_fsdp_model_to_gpu = Fsdp1, _to_device
for model_type, engine in (("language_model", fsdp.FSDPEngineWithLMHead), ("value_model", fsdp.FSDPEngineWithValueHead)):
    EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(engine)
