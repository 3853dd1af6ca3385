"""The parallel layout of the ranks, as Megatron's parallel state has it, and numbers that all ranks of a step must agree on."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from espalier.errors import Error


@dataclass(frozen=True)
class Layout:
    """Sizes of the tensor, context, pipeline and expert parallel groups, and the groups. `multiple`: rows of a call are padded to a multiple of it.
    `microbatches`: their number is a multiple of it. `together`: the group of ranks whose layers exchange rows of experts, or None."""
    tp: int
    cp: int
    pp: int
    cp_rank: int
    multiple: int
    microbatches: int
    tp_group: object
    cp_group: object
    pp_group: object
    together: object

    def padded(self, rows):
        """So many rows, or a few more, at least one."""
        return max(1, -(-rows // self.multiple)) * self.multiple


def layout_of(config):
    state = parallel_state
    tp, cp, pp = (state.get_tensor_model_parallel_world_size(), state.get_context_parallel_world_size(), state.get_pipeline_model_parallel_world_size())
    vpp = state.get_virtual_pipeline_model_parallel_world_size()
    multiple = (tp if config.sequence_parallel else 1) * (2 if cp > 1 and config.multi_latent_attention else 1)
    chunked = vpp is not None and vpp > 1
    return Layout(tp, cp, pp, state.get_context_parallel_rank(), multiple,
                  (getattr(config, "microbatch_group_size_per_vp_stage", None) or pp) if chunked else 1,
                  state.get_tensor_model_parallel_group(), state.get_context_parallel_group(), state.get_pipeline_model_parallel_group(),
                  _together(config, tp * cp))


def _together(config, replica):
    """The group over which programs are aligned. Expert groups are whole model replicas, or parts of one, whose ranks have one program already; any
    other layout aligns all ranks of a pipeline stage."""
    if not config.num_moe_experts:
        return None
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    size = dist.get_world_size(group)
    if replica % size == 0:
        return None
    return group if size % replica == 0 else parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def device_of(model):
    return next(model.parameters()).device


def agree(number, device, groups):
    """Raises `Error` unless all ranks of these groups, one after the other, have the same number: ranks of one model replica run one program."""
    both = torch.tensor([number, -number], dtype=torch.int64, device=device)
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(both, dist.ReduceOp.MAX, group)
    largest, smallest = both.tolist()
    if largest != -smallest:
        raise Error("input", "rollouts", "the same rollouts on all ranks of a model replica", "different ones",
                    "Give every tensor, context and pipeline parallel rank of a data parallel rank the same list", 3)
