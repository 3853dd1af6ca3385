"""Several processes: one reduction at the end under DDP, the same order of calls on every rank under FSDP."""

import contextlib
import functools
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from espalier.hf.model_parts import base_model, is_fsdp1, unwrapped
from espalier.rows.joint_order import joint_order

_BUCKET = 25 << 20  # bytes of gradients reduced at once, DDP's own size


def replicas(model):
    """The model's DistributedDataParallel wrapper if it would reduce gradients in the next backward, else None (within `no_sync()`)."""
    while hasattr(model, "_orig_mod"):
        model = model._orig_mod
    return model if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync else None


def sharded(model):
    """True if FSDP shards the model's parameters, so that every call of it is a collective."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return alternating(model) or (kind is not None and any(isinstance(module, kind) for module in unwrapped(model).modules()))


def alternating(model):
    """True if every forward with a graph needs its backward before the next forward. So under FSDP1: a forward arms the hooks that gather
    parameters and reduce gradients, and the next backward disarms all of them."""
    return any(is_fsdp1(module) for module in model.modules())


def device_of(model):
    """The device that the model computes on, even if FSDP holds its shards in host memory."""
    if is_fsdp1(model):
        return model.compute_device
    weight = base_model(model).get_input_embeddings().weight
    kind = getattr(getattr(weight, "device_mesh", None), "device_type", weight.device.type)
    return weight.device if kind == weight.device.type else torch.device(kind, getattr(torch, kind).current_device())


def group_of(model):
    """The process group of the ranks that call the model together: of its device mesh under FSDP2, its process group under FSDP1. None: all ranks."""
    mesh = next((p.device_mesh for p in unwrapped(model).parameters() if hasattr(p, "device_mesh")), None)
    if mesh is not None:
        return mesh.get_group() if mesh.ndim == 1 else _group(tuple(sorted(mesh.mesh.flatten().tolist())))
    inner = next((module for module in model.modules() if is_fsdp1(module)), None)
    if inner is not None and getattr(inner, "_inter_node_pg", None) is None:  # hybrid sharding reduces over a second group, too
        return inner.process_group
    return None


@functools.cache
def _group(members):
    """A new process group of these ranks. Only they call this."""
    return None if len(members) == dist.get_world_size() else dist.new_group(list(members), use_local_synchronization=True)


@torch.no_grad()
def reduce_gradients(ddp, failed=False):
    """Replaces gradients with their mean over ranks, bucket by bucket, as DDP's backward does. A parameter without a gradient on every rank gets
    none. If any rank says `failed`, returns True and leaves the gradients as they are."""
    group, world = ddp.process_group, dist.get_world_size(ddp.process_group)
    ignored = getattr(ddp, "parameters_to_ignore", ())
    parameters = [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
    if world == 1 or not parameters:
        return failed
    told = torch.tensor([p.grad is not None for p in parameters] + [failed], dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group)
    *reached, failed = told.tolist()
    if failed:
        return True
    bucket, held = [], 0
    for p, wanted in zip(parameters, reached):
        if not wanted:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if bucket and (held >= _BUCKET or bucket[0].dtype != p.grad.dtype):
            _reduce(bucket, group, world)
            bucket, held = [], 0
        bucket.append(p.grad)
        held += p.grad.numel() * p.grad.element_size()
    if bucket:
        _reduce(bucket, group, world)
    return False


def _reduce(bucket, group, world):
    flat = torch.cat([g.reshape(-1) for g in bucket])
    dist.all_reduce(flat, group=group)
    flat /= world
    for g, part in zip(bucket, flat.split([g.numel() for g in bucket])):
        g.copy_(part.view_as(g))


def told_by_all(model, what):
    """Gathers `what` from all ranks of a sharded model, in rank order."""
    if not dist.is_initialized():
        return [what]
    group = group_of(model)
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, what, group)
    return everyone


def largest(model, *numbers):
    """The largest of each number among the ranks that call a sharded model together, as a list. Only hosts wait, no device."""
    if not dist.is_initialized():
        return [int(number) for number in numbers]
    everyone = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(everyone, dist.ReduceOp.MAX, _of_hosts(group_of(model)))
    return everyone.tolist()


@functools.cache
def _of_hosts(group):
    """A process group of the same ranks that exchanges tensors of the host."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)


def trained(model):
    """[(name, parameter)] of all parameters with gradients, as the optimizer holds them. FSDP2 puts whole parameters in the place of shards, also
    behind a forward without a backward; they would never have a gradient."""
    shards = {id(one._unsharded_param): one.sharded_param for group in _groups(model) for one in group.fsdp_params if hasattr(one, "_unsharded_param")}
    return [(name, shards.get(id(p), p)) for name, p in unwrapped(model).named_parameters() if p.requires_grad]


def _groups(model):
    """FSDP2's groups of parameters."""
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    found = [group for state in states for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]]
    return list({id(group): group for group in found if group is not None}.values())


def gather_head(model):
    """Under FSDP2, gathers an output head that is a unit of its own, until the next backward. All ranks call this together.

    TRL's fused head reads the weight without a call of its module, with which FSDP2 would gather it. It then takes `full_tensor()` of the shard, whose
    gradient is that of the rank's own loss: the head's gradient is not the mean over ranks. accelerate makes the head such a unit where the
    last norm is no child of the base model, as in vision-language models; elsewhere the head is gathered with that norm.
    """
    get = getattr(unwrapped(model), "get_output_embeddings", None)
    head = get() if get is not None else None
    state = head._get_fsdp_state() if hasattr(head, "_get_fsdp_state") else None
    if state is not None and all(len(group.modules) == 1 for group in _groups(head)):
        head.unshard()


@contextlib.contextmanager
def reducing(model):
    """Context manager: backwards of a sharded model reduce gradients over ranks, even within `no_sync()`."""
    switches = [(module, "_sync_gradients") for module in model.modules() if is_fsdp1(module)]
    switches += [(group, name) for group in _groups(model) for name in ("reduce_grads", "all_reduce_grads")]
    before = [getattr(owner, name) for owner, name in switches]
    try:
        for owner, name in switches:
            setattr(owner, name, True)
        yield
    finally:
        for (owner, name), value in zip(switches, before):
            setattr(owner, name, value)


def inside(model, base, function):
    """Calls `function()` in place of the model's forward, so that the hooks of its wrappers fire. `base`: the model without wrappers."""
    had = base.__dict__.get("forward")
    base.forward = lambda *_, **__: function()
    try:
        return model()
    finally:
        if had is None:
            del base.forward
        else:
            base.forward = had


def run(model, program, device):
    """Runs a program of (letter, action). Ranks of a sharded model first agree on one sequence of letters; where a rank has no action of its own it
    makes an empty call."""
    if alternating(model):
        program = in_pairs(program)
    group = group_of(model) if sharded(model) and dist.is_initialized() else None
    if not (sharded(model) and dist.is_initialized() and dist.get_world_size(group) > 1):
        for _, action in program:
            action()
        return
    letters = "".join(letter for letter, _ in program)
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, letters, group)
    at, rank, empty = 0, dist.get_rank(group), []
    program, nothing = list(program), torch.zeros(1, 1, dtype=torch.long, device=device)
    call = lambda: model(input_ids=nothing, use_cache=False).logits.sum() * 0
    for letter, _, who in joint_order(everyone):
        while at < len(program) and program[at][0] == "":
            program[at][1]()
            at += 1
        if rank in who:
            program[at][1]()
            at += 1
        elif letter == "F":
            empty.append(call())
        elif letter == "N":
            with torch.no_grad():
                call()
        else:
            (call() if letter == "P" else empty.pop()).backward()
    for _, action in program[at:]:
        action()


def in_pairs(program):
    """The same program with each forward and its backward as one step, P. A forward without a backward is N."""
    out = []
    for letter, action in program:
        if letter == "B":
            forward = out.pop()[1]
            out.append(("P", lambda forward=forward, action=action: (forward(), action())))
        else:
            out.append(("N" if letter == "F" else letter, action))
    return out


def without_replicas(model):
    """The module inside DistributedDataParallel; any other module unchanged."""
    inner = model
    while hasattr(inner, "_orig_mod"):
        inner = inner._orig_mod
    return inner.module if isinstance(inner, DistributedDataParallel) else model
