"""Ranks that train a small GPT with Megatron-Core: processes of a gloo group that are also drivers of the tests' Ray cluster."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from integration.gloo import Ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from megatron_on_cpu import replace_cuda

PATIENCE = 300.0  # seconds
BATCH = 2


@dataclass(frozen=True)
class Layout:
    """A model and how it is divided. ``chunks``: virtual pipeline stages of each rank. ``experts``: of each layer; 0 for a dense
    model. ``sharded``: whether DistributedOptimizer partitions the optimizer's state."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    chunks: int = 1
    experts: int = 0
    sharded: bool = True
    frozen: bool = False
    dtype: torch.dtype = torch.bfloat16
    layers: int = 4
    hidden: int = 32
    length: int = 16
    vocabulary: int = 60

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        return f"{self.tp}{self.pp}{self.dp}{self.ep}{self.chunks}{self.experts}{self.sharded:d}"


class Training:
    """A GPT of four layers, its optimizer, and the data, which depend on the step only."""

    def __init__(self, layout: Layout, seed: int) -> None:
        replace_cuda()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import Float16Module

        self.layout, self.step_number, self.groups = layout, 0, parallel_state
        virtual = layout.chunks if layout.chunks > 1 else None
        parallel_state.initialize_model_parallel(
            layout.tp, layout.pp, virtual_pipeline_model_parallel_size=virtual, expert_model_parallel_size=layout.ep
        )
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        half = layout.dtype == torch.bfloat16
        experts = {
            "num_moe_experts": layout.experts,
            "expert_model_parallel_size": layout.ep,
            "moe_router_load_balancing_type": "none",
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_token_dispatcher_type": "allgather",
        }
        config = TransformerConfig(
            num_layers=layout.layers,
            hidden_size=layout.hidden,
            num_attention_heads=4 if layout.hidden < 1024 else layout.hidden // 128,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            persist_layer_norm=False,
            bf16=half,
            params_dtype=layout.dtype,
            pipeline_dtype=layout.dtype,
            tensor_model_parallel_size=layout.tp,
            sequence_parallel=bool(layout.experts) and layout.tp > 1,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=virtual,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            gradient_accumulation_fusion=False,
            use_cpu_initialization=not torch.cuda.is_available(),
            deterministic_mode=True,
            **(experts if layout.experts else {}),
        )
        config.finalize_model_grads_func = finalize_model_grads
        self.model = []
        for chunk in range(layout.chunks):
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
            gpt = GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(num_experts=layout.experts or None),
                vocab_size=layout.vocabulary,
                max_sequence_length=layout.length,
                pre_process=first,
                post_process=last,
                share_embeddings_and_output_weights=True,
                vp_stage=chunk if virtual else None,
            )
            if layout.frozen:
                for name, parameter in gpt.named_parameters():
                    parameter.requires_grad_("layernorm" not in name)
            ddp = DistributedDataParallelConfig(
                use_distributed_optimizer=layout.sharded, grad_reduce_in_fp32=True, overlap_grad_reduce=False
            )
            gpt = gpt.cuda()
            whole = Float16Module(config, gpt) if half else gpt
            self.model.append(DistributedDataParallel(config, ddp, whole, disable_bucketing=chunk > 0))
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=half,
            params_dtype=layout.dtype,
            use_distributed_optimizer=layout.sharded,
        )
        self.optimizer = get_megatron_optimizer(settings, self.model)

    def train(self, steps: int, before: Callable[[], None] = lambda: None) -> list[str]:
        """Train, and return the losses of this rank as hexadecimal floats. ``before``: is called before the optimizer's step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        losses = []
        for _ in range(steps):
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * self.step_number + self.groups.get_data_parallel_rank())
            shape = BATCH, self.layout.length + 1
            batches = [torch.randint(self.layout.vocabulary, shape, generator=generator).cuda() for _ in range(2)]
            done = get_forward_backward_func()(
                forward_step_func=_forward,
                data_iterator=[iter(batches) for _ in self.model],
                model=self.model,
                num_microbatches=len(batches),
                seq_length=self.layout.length,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            before()
            self.optimizer.step()
            self.step_number += 1
            losses += [one["loss"].item().hex() for one in done]
        return losses

    def state(self, *, is_loading: bool = False, rng: bool = True, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """The sharded state of model, optimizer and step. ``metadata``: of the optimizer's state. ``rng``: also the random
        generators, which depend on the layout, as Megatron's training loop saves them."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from megatron.core.utils import unwrap_model

        chunks = [unwrap_model(chunk) for chunk in self.model]
        names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        common = {"dp_cp_group": self.groups.get_data_parallel_group(with_context_parallel=True), **(metadata or {})}
        model = {name: chunk.sharded_state_dict(metadata=common) for name, chunk in zip(names, chunks, strict=True)}
        of_optimizer = {"chained_optim_avoid_prefix": True, **common}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=of_optimizer)
        state = {**model, "optimizer": optimizer, "step": self.step_number}
        if rng:
            groups = self.groups
            at = groups.get_pipeline_model_parallel_rank(), groups.get_tensor_model_parallel_rank()
            own, shape = self.random_generators(), (self.layout.pp, self.layout.tp)
            state["rng_state"] = ShardedObject("rng_state", own, shape, at, replica_id=groups.get_data_parallel_rank())
        return state

    def random_generators(self) -> dict[str, Any]:
        """The states of the random generators."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        states = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state()}
        return states | {"numpy": np.random.get_state(), "tracker": get_cuda_rng_tracker().get_states()}

    def take(self, loaded: dict[str, Any]) -> None:
        """Take what ``raystow.megatron.load`` has returned."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker
        from megatron.core.utils import unwrap_model

        for number, chunk in enumerate(self.model):
            unwrap_model(chunk).load_state_dict(loaded["model" if len(self.model) == 1 else f"model{number}"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.step_number = loaded["step"]
        if "rng_state" in loaded:
            torch.set_rng_state(loaded["rng_state"]["torch"])
            torch.cuda.set_rng_state(loaded["rng_state"]["cuda"])
            np.random.set_state(loaded["rng_state"]["numpy"])
            get_cuda_rng_tracker().set_states(loaded["rng_state"]["tracker"])

    def parts(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
        """This rank's parts of all tensors, as Megatron itself describes and gathers them: name, shape of the whole, offset,
        elements. And the optimizer's groups, which have the step."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor
        from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

        sharded, _ = save_preprocess(self.state(metadata={"distrib_optim_sharding_type": "fully_reshardable"}), False)
        found = []
        for one in nested_values(sharded):
            if isinstance(one, ShardedTensor):
                local = one.data.detach()[(None,) * one.prepend_axis_num].contiguous()
                raw = local.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]).cpu().numpy().copy()
                found.append((f"{one.key} {local.dtype}", tuple(one.global_shape), tuple(one.global_offset), raw))
        steps = [float(state["step"]) for inner in inner_optimizers(self.optimizer) for state in inner.state.values()]
        assert len(set(steps)) == 1
        distinct = {id(state["step"]) for inner in inner_optimizers(self.optimizer) for state in inner.state.values()}
        assert len(distinct) == len(steps), "parameters share a step, which then counts once for each of them"
        return [*found, ("step", (1,), (0,), np.array(steps[:1]))]


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of torch below one of Megatron."""
    return [inner for one in getattr(optimizer, "chained_optimizers", [optimizer]) if (inner := one.optimizer) is not None]


def _forward(data: Iterator[torch.Tensor], model: Any) -> Any:
    batch = next(data)
    ids, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    length = ids.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None].cuda()
    output = model(ids, torch.arange(length).expand(BATCH, -1).cuda(), mask, labels=labels)

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach()}

    return output, loss


def whole(parts: list[list[Any]]) -> dict[str, str]:
    """Assemble the parts of all ranks, of which replicas must be equal, and return a digest of each tensor."""
    arrays: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = defaultdict()
    for name, shape, offset, raw in [part for of_rank in parts for part in of_rank]:
        array = arrays.setdefault(name, np.zeros(shape, raw.dtype))
        there = filled.setdefault(name, np.zeros(shape, bool))
        box = tuple(slice(low, low + size) for low, size in zip(offset, raw.shape, strict=True))
        assert (array[box] == raw)[there[box]].all(), f"replicas of {name} differ"
        array[box], there[box] = raw, True
    assert all(there.all() for there in filled.values())
    return {name: hashlib.sha256(array.tobytes()).hexdigest()[:16] for name, array in sorted(arrays.items())}


def called(rank: int, n: int, address: str, layout: Layout, seed: int, what: Callable[..., Any], *args: Any) -> Any:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    result = what(Training(layout, seed), *args)
    ray.shutdown()
    return result


@contextlib.contextmanager
def new_ranks(folder: Path) -> Iterator[Ranks]:
    """Yield ranks in new processes, because Megatron keeps its process groups."""
    folder.mkdir()
    ranks = Ranks(folder)
    try:
        yield ranks
    finally:
        ranks.close()


def run(folder: Path, address: str, layout: Layout, what: Callable[..., Any], *args: Any, seed: int = 1) -> list[Any]:
    """Call ``what(training, *args)`` on new ranks of a layout, and return their results."""
    with new_ranks(folder) as ranks:
        return ranks.call(layout.ranks, called, address, layout, seed, what, *args, timeout=PATIENCE)
