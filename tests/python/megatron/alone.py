"""Checks that need one process: alone.py FOLDER RANK WORLD. Writes refusals and properties of programs to FOLDER/RANK.json."""

import json
import sys
from pathlib import Path

import cpu  # noqa: F401  before megatron
import recurrent_kernels  # noqa: F401
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from torch.utils._python_dispatch import TorchDispatchMode

import espalier.megatron
from espalier.errors import Error
from espalier.megatron.split import dealt_runs, parts_of
from models import chunks_of, configuration
from steps import loss_of_wave, rollouts

FOLDER = Path(sys.argv[1])
EXPERTS = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=.1)
FIELDS = dict(
    fp8="e4m3", fp4="e2m1", enable_cuda_graph=True, external_cuda_graph=True, cuda_graph_impl="local", tp_comm_overlap=True,
    overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True, defer_embedding_wgrad_compute=True, hybrid_context_parallel=True,
    dynamic_context_parallel=True, num_microbatches_with_partial_activation_checkpoints=1, mtp_num_layers=1, fine_grained_activation_offloading=True,
    moe_paged_stash=True, cpu_offloading=True, qk_clip=True, log_max_attention_logit=True, experimental_attention_variant="dsa",
    moe_expert_capacity_factor=1.0, moe_expert_rank_capacity_factor=1.0, moe_token_dropping=True, moe_input_jitter_eps=.1,
    moe_router_force_load_balancing=True, moe_router_force_biased=.5, moe_enable_routing_replay=True, moe_ncclep_static_shape=True, hidden_dropout=.1,
    attention_dropout=.1, window_size=(3, 3))
ROUTERS = dict(moe_router_load_balancing_type=["sinkhorn", "quantile_balancing", "seq_aux_loss", "global_aux_loss", ["seq_aux_loss", "aux_loss"]],
               moe_layer_recompute=[True])


def refused(chunks):
    try:
        espalier.megatron.check(chunks)
    except Error as error:
        return dict(kind=error.kind, where=error.where, remedy=error.remedy, exit_code=error.exit_code)
    return None


def with_field(chunks, name, value):
    config = chunks[0].config
    had = vars(config).get(name)
    setattr(config, name, value)
    try:
        return refused(chunks)
    finally:
        setattr(config, name, had)


def modules(chunks):
    """Layers that no rule of ours knows."""
    attention = chunks[0].decoder.layers[0].self_attention
    out = {}
    for name, owner, value in (("core_attention", attention, torch.nn.Identity()), ("attn_mask_type", attention, AttnMaskType.no_mask),
                               ("self_attention", chunks[0].decoder.layers[0], torch.nn.Linear(1, 1))):
        had = getattr(owner, name)
        setattr(owner, name, value)
        out[name] = refused(chunks)
        setattr(owner, name, had)
    had, chunks[0].position_embedding_type = chunks[0].position_embedding_type, "relative"
    out["position_embedding_type"], chunks[0].position_embedding_type = refused(chunks), had
    for name in ("mtp", "vision_model", "encoder"):
        setattr(chunks[0], name, torch.nn.Identity())
        out[name] = refused(chunks)
        delattr(chunks[0], name)
    wrapper = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
    wrapper.module = chunks[0]
    out["FullyShardedDataParallel"] = refused([wrapper])
    out["a linear layer"] = refused([torch.nn.Linear(1, 1)])
    return out


def arguments(chunks):
    out = {}
    for name, call in dict(
            no_rollouts=lambda: espalier.megatron.phased_step(chunks, [], loss_of_wave),
            no_prompt=lambda: espalier.megatron.phased_step(chunks, [dict(prompt_ids=[], response_ids=[1])], loss_of_wave),
            large_id=lambda: espalier.megatron.score(chunks, [dict(prompt_ids=[96], response_ids=[1])]),
            images=lambda: espalier.megatron.score(chunks, [dict(prompt_ids=[1], response_ids=[1], images=dict(pixel_values=torch.zeros(1)))]),
            no_experts=lambda: espalier.megatron.score(chunks, [dict(prompt_ids=[1], response_ids=[1], routed_experts=[[[0]], [[1]]])]),
            no_loss=lambda: espalier.megatron.phased_step(chunks, rollouts("flat"), None),
            no_rows=lambda: espalier.megatron.score(chunks, rollouts("flat"), wave_tokens=0),
            no_scalar=lambda: espalier.megatron.phased_step(chunks, rollouts("flat"), lambda wave: wave.logprobs)).items():
        try:
            call()
            out[name] = None
        except Error as error:
            out[name] = error.exit_code
    return out


class Waits(TorchDispatchMode):
    """Counts operations for whose result the host waits on a GPU."""
    NAMES = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select"}

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name().partition(".")[0] in self.NAMES
        return function(*args, **(kwargs or {}))


def waits(chunks):
    """[waits, waves] of a step in one wave, of the same step in many waves, and of one whose loss waits."""
    plain, waiting = lambda wave: wave.logprobs.sum(), lambda wave: wave.logprobs.sum() * float(wave.logprobs.detach().sum() < 1)
    out = []
    for rows, loss in ((4096, plain), (6, plain), (6, waiting)):
        with Waits() as counted:
            waves = espalier.megatron.phased_step(chunks, rollouts("flat"), loss, wave_tokens=rows).waves
        out.append((counted.count, waves))
    return out


def splits():
    """Rows of every item lie on one rank each, dealt where subtrees are about equal, else cut."""
    runs = [(0, 4, 4), (4, 2, 9), (6, 3, 9), (9, 5, 14)]
    for ranks in (2, 3):
        for trunk in (False, True):
            parts, gathered = parts_of(runs, 14, ranks, trunk)
            assert sorted(np.concatenate(parts).tolist()) == list(range(14)) and gathered == (trunk or False)
    parts, gathered = parts_of([(0, 12, 12), (12, 2, 14)], 14, 2, False)
    assert gathered and [len(part) for part in parts] == [7, 7] or [len(part) for part in parts] == [8, 6]
    assert dealt_runs(runs, np.array([4, 5, 6, 7, 8])) == [(0, 2, 5), (2, 3, 5)]
    return True


def main():
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    chunks, experts = chunks_of(configuration()), chunks_of(configuration(**EXPERTS))
    found = dict(fields={name: with_field(chunks, name, value) for name, value in FIELDS.items()}, usual=[refused(chunks), refused(experts)],
                 routers=[with_field(experts, name, value) for name, values in ROUTERS.items() for value in values], modules=modules(chunks),
                 arguments=arguments(chunks), splits=splits(),
                 waits=[waits(chunks), waits(chunks_of(configuration(gdn=True)))])
    for chunk in chunks:
        chunk.eval()
    found["evaluated"] = with_field(chunks, "hidden_dropout", .1)
    (FOLDER / "0.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
