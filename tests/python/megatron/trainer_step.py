"""A trainer's step in the manner of slime: packed micro-batches of whole sequences, a closure over its model, a loss function of three values or two."""

import functools

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from models import VOCABULARY
from steps import logprobs, loss_of

TEMPERATURE = .9


class Batches:
    """slime's iterator: `get_next(keys)`."""

    def __init__(self, batches):
        self.batches, self.offset = batches, 0

    def get_next(self, keys):
        self.offset += 1
        return {key: self.batches[self.offset - 1][key] for key in keys}


def rollouts(groups=3, n=4, seed=1, apart=False):
    """(prompt, response, mask of the response). Groups have a beginning in common, as by a system prompt; a tool's tokens are masked."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda k: torch.randint(0, VOCABULARY, (k,), generator=generator)
    system, found = draw(9), []
    for group in range(1 if apart else groups):
        prompt = torch.cat([system, draw(11 + 2 * group)])
        for _ in range(n):
            response = draw(int(torch.randint(2, 8, (1,), generator=generator)))
            mask = torch.ones(len(response), dtype=torch.long)
            mask[1:2] = 0
            found.append((draw(9) if apart else prompt, response, mask))
    return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]


def batches(found, size, pad):
    """Packed micro-batches of `size` rollouts, each sequence padded to a multiple of `pad`."""
    out, int32 = [], lambda x: torch.tensor(x, dtype=torch.int32)
    for begin in range(0, len(found), size):
        ids, mask, ends, padded = [], [], [0], [0]
        for prompt, response, trained in found[begin:begin + size]:
            n = len(prompt) + len(response)
            more = -n % pad
            ids += [*prompt.tolist(), *response.tolist(), *[0] * more]
            mask += [0] * (len(prompt) - 1) + trained.tolist() + [0] * (more + 1)
            ends.append(ends[-1] + n)
            padded.append(padded[-1] + n + more)
        longest = max(b - a for a, b in zip(padded, padded[1:]))
        out.append(dict(ids=torch.tensor([ids]), mask=torch.tensor([mask]), rollouts=list(enumerate(found[begin:begin + size], begin)), starts=padded,
                        packed=PackedSeqParams(qkv_format="thd", cu_seqlens_q=int32(ends), cu_seqlens_kv=int32(ends), cu_seqlens_q_padded=int32(padded),
                                               cu_seqlens_kv_padded=int32(padded), max_seqlen_q=longest, max_seqlen_kv=longest)))
    return out


def loss_function(batch, count, per_token, values, logits):
    """On logits [1, T, V], as slime's. Masked tokens are read and do not count."""
    total, found = 0, []
    for (number, (prompt, response, mask)), start in zip(batch["rollouts"], batch["starts"]):
        rows = slice(start + len(prompt) - 1, start + len(prompt) + len(response) - 1)
        lp, entropy = logprobs(logits[0][rows] / TEMPERATURE, response)
        kept = mask.bool()
        total = total + loss_of(lp[kept], entropy[kept], number, torch.arange(len(response))[kept])
        found.append(lp.detach()[kept])
    report = dict(loss=float(total.detach()), lp=torch.cat(found).tolist())
    tokens = torch.tensor(sum(int(mask.sum()) for _, (_, _, mask) in batch["rollouts"]), dtype=torch.int)
    if per_token:
        return total, tokens, report
    return (total * count, torch.tensor(1), report) if values == 3 else (total * count, report)


def train(function, chunks, found, values=3, forward_only=False):
    per_token = chunks[0].config.calculate_per_token_loss

    def forward_step(iterator, model):
        batch = iterator.get_next(["ids", "mask", "packed", "rollouts", "starts"])
        batch["made"] = True  # trainers add to what they take
        output = model(input_ids=batch["ids"], position_ids=None, attention_mask=None, labels=None, packed_seq_params=batch["packed"],
                       loss_mask=batch["mask"])
        return output, functools.partial(loss_function, batch, len(found), per_token, values)

    return function(forward_step_func=forward_step, data_iterator=[Batches(found) for _ in chunks], model=chunks, num_microbatches=len(found),
                    seq_length=1, micro_batch_size=1, forward_only=forward_only)


def train_padded(function, chunks, found, size):
    """In the manner of NeMo-RL: rows of equal length, positions given, no loss_mask, logits divided in place."""
    batches = []
    for begin in range(0, len(found), size):
        some = found[begin:begin + size]
        longest = max(len(prompt) + len(response) for prompt, response, _ in some)
        ids = torch.zeros(len(some), longest, dtype=torch.long)
        for row, (prompt, response, _) in zip(ids, some):
            row[:len(prompt) + len(response)] = torch.cat([prompt, response])
        batches.append(dict(ids=ids, rollouts=list(enumerate(some, begin)), firsts=[len(prompt) - 1 for prompt, _, _ in some],
                            token_mask=[torch.tensor([0] * len(prompt) + [1] * len(response)) for prompt, response, _ in some]))

    def loss(batch, logits):
        total = 0
        for row, (number, (prompt, response, _)) in zip(logits, batch["rollouts"]):
            lp, entropy = logprobs(row[len(prompt) - 1:len(prompt) + len(response) - 1], response)
            total = total + loss_of(lp, entropy, number, torch.arange(len(response)))
        return total * len(batches), dict(loss=float(total.detach()))

    def forward_step(iterator, model):
        batch = next(iterator)
        positions = torch.arange(batch["ids"].shape[1]).expand_as(batch["ids"])
        logits = model(batch["ids"], positions, None)
        logits.div_(TEMPERATURE)
        return logits, functools.partial(loss, batch)

    return function(forward_step_func=forward_step, data_iterator=iter(batches), model=chunks[0], num_microbatches=len(batches), seq_length=1, micro_batch_size=1)


def two_calls(function, chunks, found):
    """A forward step that cannot be shared: it reads the logits itself."""
    def forward_step(iterator, model):
        batch = iterator.get_next(["ids", "mask", "packed", "rollouts", "starts"])
        output = model(input_ids=batch["ids"], position_ids=None, attention_mask=None, packed_seq_params=batch["packed"], loss_mask=batch["mask"])
        return output.contiguous(), functools.partial(loss_function, batch, len(found), False, 2)

    return function(forward_step_func=forward_step, data_iterator=[Batches(found) for _ in chunks], model=chunks, num_microbatches=len(found),
                    seq_length=1, micro_batch_size=1)


def pad_of(config):
    return parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
