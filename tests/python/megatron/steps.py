"""A step of the unmodified model, one rollout a micro-batch, and the same step shared."""

import zlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.utils import get_attr_wrapped_model

from models import VOCABULARY, global_name


class Sum(torch.autograd.Function):
    """Sum over tensor parallel ranks, all of which go on with the same numbers."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=parallel_state.get_tensor_model_parallel_group())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def logprobs(logits, targets):
    """logits [n, V / tp] -> log-probs [n], entropies [n]"""
    width, rank = logits.shape[-1], parallel_state.get_tensor_model_parallel_rank()
    top = logits.detach().max(-1).values
    dist.all_reduce(top, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    weights = (logits - top[:, None]).exp()
    total = Sum.apply(weights.sum(-1))
    lse = total.log() + top
    local = targets - rank * width
    inside = (local >= 0) & (local < width)
    chosen = logits.gather(-1, local.clamp(0, width - 1)[:, None])[:, 0] * inside
    return Sum.apply(chosen) - lse, lse - Sum.apply((weights * logits).sum(-1)) / total


def loss_of(lp, entropy, rollout, position):
    """One rollout's loss: clipped by token, and not linear in the sum over its tokens."""
    advantage = [1.0, -.5, 2.0, .7, -1.3, .4, -.2, 1.1, .9, -.8][rollout % 10]
    old = -4.5 + .1 * torch.sin(rollout * 7.0 + position * 3.0).to(lp.dtype)
    ratio = (lp - old).exp()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(.8, 1.2) * advantage).sum()
    return -clipped + .01 * (lp - old).mean().exp() - .05 * entropy.sum()


def loss_of_wave(wave):
    total = 0
    for rollout in wave.rollouts:
        own = wave.rollout == rollout
        total = total + loss_of(wave.logprobs[own], wave.entropies[own], rollout, wave.position[own])
    return total


def rollouts(kind="nested", seed=1, more=0):
    """[{prompt_ids, response_ids}]. "flat": one prompt. "nested": prompts that go on where others end, and responses with a common beginning.
    "stem": responses with so long a common beginning that it is a trunk, and one that ends there. "apart": no two alike. "even": one prompt,
    responses of one length. "groups": three prompts without a common beginning."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()
    root = draw(9)
    if kind == "apart":
        return [dict(prompt_ids=draw(6), response_ids=draw(4)) for _ in range(4 + more)]
    if kind == "groups":
        prompts = [draw(n) for n in (7, 10, 8)]
        return [dict(prompt_ids=prompt, response_ids=draw(2 + i + at)) for at, prompt in enumerate(prompts) for i in range(3)]
    if kind == "even":
        return [dict(prompt_ids=root, response_ids=draw(4)) for _ in range(4 + more)]
    if kind == "flat":
        return [dict(prompt_ids=root, response_ids=draw(n)) for n in [6, 8, 4, 5, 7, 3, 2, 6][:5 + more]]
    middle = root + draw(6)
    if kind == "stem":
        stem = draw(9)
        return [dict(prompt_ids=root, response_ids=stem + draw(n)) for n in (3, 0, 2, 4)] + [dict(prompt_ids=middle, response_ids=draw(3)) for _ in range(2 + more)]
    last, stem = middle + draw(5), draw(3)
    found = [(root, draw(5)), (middle, draw(4)), (root, draw(3)), (middle, stem + draw(3)), (middle, stem + draw(2)), (last, draw(4)), (last, draw(5)),
             (last, draw(2))]
    return [dict(prompt_ids=p, response_ids=r) for p, r in found + [(root, draw(3 + i)) for i in range(more)]]


def with_recorded_experts(records, config):
    """The rollouts with experts that follow from the tokens up to each. The second one differs from its fifth token on, the last has none."""
    def draw(tokens, shift):
        generator = torch.Generator().manual_seed(zlib.crc32(repr(tokens).encode()) + shift)
        return [torch.randperm(config.num_moe_experts, generator=generator)[:config.moe_router_topk].tolist() for _ in range(config.num_layers)]

    out = []
    for number, record in enumerate(records[:-1]):
        tokens = record["prompt_ids"] + record["response_ids"]
        out.append(dict(record, routed_experts=[draw(tokens[:end], number == 1 and end > 4) for end in range(1, len(tokens) + 1)]))
    return [*out, records[-1]]


def replay(chunk, record, multiple):
    """Gives Megatron's own RouterReplay the experts of a rollout, for the next forward of the chunk's layers on this rank."""
    given = record.get("routed_experts")
    for layer in get_attr_wrapped_model(chunk, "decoder").layers:
        if not hasattr(getattr(layer, "mlp", None), "router"):
            continue
        router = layer.mlp.router.router_replay
        router.clear_indices()
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD if given else None)
        if given:
            chosen = [token[layer.layer_number - 1] for token in given]
            router.set_target_indices(torch.tensor(chosen + chosen[-1:] * (-len(chosen) % multiple)))


def schedule(chunks, forward, count, only=False):
    data = [iter(range(count)) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward, data_iterator=data if len(chunks) > 1 else data[0], model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=count, seq_length=1, micro_batch_size=1, forward_only=only)


class Plain:
    """Megatron's own step: plain calls, one rollout a micro-batch. Two micro-batches more than rollouts if the schedule or other ranks need them."""

    def __init__(self, records, count=0, multiple=1, pad=1, padding_mask=False):
        self.records, self.pad, self.padding_mask = records, pad, padding_mask
        self.count = -(-max(count, len(records)) // multiple) * multiple
        self.total, self.found = 0.0, {}

    def run(self, chunks, only=False):
        self.config = get_attr_wrapped_model(chunks[0], "config")
        schedule(chunks, self.step, self.count, only)
        return self

    def step(self, data, chunk):
        index = next(data)
        record = self.records[index] if index < len(self.records) else dict(prompt_ids=[1, 2], response_ids=[3])
        prompt, response = record["prompt_ids"], record["response_ids"]
        n = len(prompt) + len(response)  # trainers run the last token too
        if any("routed_experts" in one for one in self.records):
            replay(chunk, record, self.pad)
        ids = torch.tensor(prompt + response + [0] * (-n % self.pad))
        more = dict(padding_mask=(torch.arange(len(ids)) >= n)[None]) if self.padding_mask and self.pad > 1 else {}
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)[None, None]
        positions = torch.arange(len(ids))[None]
        if get_attr_wrapped_model(chunk, "position_embedding_type") == "mrope":
            positions = positions.expand(3, 1, -1)
        output = chunk(ids[None], positions, mask, **more)

        def loss(output):
            rows = slice(len(prompt) - 1, n - 1)
            lp, entropy = logprobs(output[0][rows], torch.tensor(response))
            value = loss_of(lp, entropy, index, torch.arange(len(response)))
            if index >= len(self.records):
                value = value * 0
            else:
                self.total += float(value)
                self.found[index] = lp.detach(), entropy.detach()
            if self.config.calculate_per_token_loss:
                return value, torch.tensor(len(response) * (index < len(self.records)), dtype=torch.int), {}
            return value * self.count, {}

        return output, loss


def gradients(chunks):
    """{global name: gradient}, cleared. Sums over tensor parallel ranks are those of Megatron's finalize_model_grads."""
    found, group = {}, parallel_state.get_tensor_model_parallel_group()
    for chunk in chunks:
        inner = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        for name, p in inner.named_parameters():
            partial = getattr(p, "sequence_parallel", False) and inner.config.sequence_parallel or "q_layernorm" in name or "k_layernorm" in name
            if p.grad is not None:
                if partial and dist.get_world_size(group) > 1:
                    dist.all_reduce(p.grad, group=group)
                found[global_name(inner, name)] = p.grad.clone()
            p.grad = None
    return found


def worst(wanted, found):
    """The largest relative distance of any tensor. A tensor that one side lacks counts as zeros there."""
    distance = 0.0
    for name in wanted.keys() | found.keys():
        a, b = wanted.get(name), found.get(name)
        a = torch.zeros_like(b) if a is None else a
        b = torch.zeros_like(a) if b is None else b
        distance = max(distance, float((a - b).norm() / a.norm().clamp(min=1e-30)))
    return distance
