"""A trainer's micro-batches, taken from its own forward step without running the model."""

import copy
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from megatron.core.utils import get_attr_wrapped_model

from espalier.errors import Unsupported
from espalier.megatron.sequences import Sequence

_ARGUMENTS = {"input_ids", "position_ids", "attention_mask", "packed_seq_params", "loss_mask"}
_PASSED_ON = {"fp32_output", "runtime_gather_output"}  # how wrappers of the model return logits


class Tape:
    """An iterator whose items may be taken again: items from `__next__`, and from methods such as slime's `get_next`."""

    def __init__(self, source):
        self.source, self.taken = source, []

    def __iter__(self):
        return self

    def __next__(self):
        return self._keep(next(self.source))

    def __getattr__(self, name):
        found = getattr(self.source, name)
        return (lambda *args, **more: self._keep(found(*args, **more))) if callable(found) else found

    def _keep(self, item):
        self.taken.append(item)
        return _copied(item)

    def again(self):
        return _Replay(self)


class _Replay:
    """The items of a tape from the first one on; behind them, those that nobody has taken yet."""

    def __init__(self, tape):
        self.tape, self.at = tape, 0

    def __iter__(self):
        return self

    def __next__(self):
        return self._item(lambda: next(self.tape))

    def __getattr__(self, name):
        found = getattr(self.tape, name)
        return (lambda *args, **more: self._item(lambda: found(*args, **more))) if callable(found) else found

    def _item(self, take):
        self.at += 1
        return _copied(self.tape.taken[self.at - 1]) if self.at <= len(self.tape.taken) else take()


def _copied(item):
    """Trainers add to the mappings that they take from an iterator."""
    return copy.copy(item) if isinstance(item, Mapping) else item


class _Logits:
    """Stands in for a micro-batch's logits. Keeps divisions by a temperature, which some trainers do in place, for the logits themselves."""

    def __init__(self):
        self.divisors = []

    def div_(self, divisor):
        self.divisors.append(divisor)
        return self

    __itruediv__ = __truediv__ = div = div_

    def __getattr__(self, name):
        raise Unsupported("forward step", "logits that go to the loss function as they are, or divided by a number", f"logits.{name}")


class _Model:
    """Stands in for a chunk. Everything but the call is the chunk's own."""

    def __init__(self, chunk, calls):
        vars(self).update(_chunk=chunk, _calls=calls)

    def __getattr__(self, name):
        if name == "build_schedule_plan":
            raise Unsupported("forward step", "a call of the model", name, "Set overlap_moe_expert_parallel_comm to False")
        return getattr(self._chunk, name)

    def __call__(self, *args, **arguments):
        names = ("input_ids", "position_ids", "attention_mask")
        self._calls.append({**dict(zip(names, args)), **arguments})
        return _Logits()


class Captured:
    """The micro-batches of one step. `losses`: the trainer's loss functions. `sequences`: of all micro-batches. `shapes`: of the trainer's rows, [batch,
    rows of a batch]. `first_rows(batch)`: the first row of each sequence whose logits the loss reads, for trainers that hand the model no
    loss_mask; `batch` is what the trainer took from its iterator."""

    def __init__(self, forward_step, tapes, chunks, count, first_rows, padding):
        self.losses, self.divisors, self.sequences, self.shapes, self.more = [], [], [], [], None
        for number in range(count):
            for chunk, tape in zip(chunks, tapes):
                calls, taken = [], len(tape.taken)
                logits, loss = forward_step(tape, _Model(chunk, calls))
            if len(calls) != 1 or not isinstance(logits, _Logits):
                raise Unsupported("forward step", "one call of the model, whose logits it returns", f"{len(calls)} calls, {type(logits).__name__}")
            self.losses.append(loss)
            self.divisors.append(logits.divisors)
            self._take(number, calls[0], first_rows and (lambda at=taken: first_rows(tape.taken[at])), padding)

    @property
    def rows(self):
        return sum(len(s.tokens) for s in self.sequences)

    @property
    def longest(self):
        return max(len(s.tokens) for s in self.sequences)

    def fingerprint(self):
        found = zlib.crc32(repr([(s.batch, s.first, s.at) for s in self.sequences]).encode())
        for s in self.sequences:
            found = zlib.crc32(np.ascontiguousarray(s.tokens).tobytes(), found)
        return found

    def _take(self, number, arguments, first_rows, padding):
        more = {name: value for name, value in arguments.items() if name not in _ARGUMENTS and value is not None}
        unknown = sorted(more.keys() - _PASSED_ON)
        if unknown:
            raise Unsupported("forward step", "a call of the model with tokens alone", f"the argument {unknown[0]}")
        if self.more is not None and more != self.more:
            raise Unsupported("forward step", "the same arguments for all micro-batches", f"{more} after {self.more}")
        self.more = more
        ids, mask = arguments.get("input_ids"), arguments.get("loss_mask")
        if ids is None or ids.dim() != 2:
            raise Unsupported("forward step", "input_ids [batch, rows] on every pipeline stage", "none")
        if mask is None and first_rows is None:
            raise Unsupported("forward step", "a loss_mask among the arguments of the model", "none", "Give forward_backward first_rows")
        packed = arguments.get("packed_seq_params")
        tokens = ids.cpu().numpy().reshape(-1)
        reads = None if mask is None else mask.reshape(-1).cpu().numpy() != 0
        spans = _spans(ids, packed, padding)
        firsts = first_rows() if reads is None else [int(np.flatnonzero(reads[at:at + n])[0]) if reads[at:at + n].any() else None for at, n in spans]
        _check_positions(arguments.get("position_ids"), ids, spans)
        for (at, n), first in zip(spans, firsts):
            if first is None and not padding:  # nothing reads its logits
                continue
            self.sequences.append(Sequence(number, tokens[at:at + n], 0 if first is None else int(first), at))
        self.shapes.append(tuple(ids.shape))


def _spans(ids, packed, padding):
    """[(first row, rows)] of the sequences of a micro-batch. `padding`: rows behind a sequence's tokens count as its own."""
    if packed is None:
        return [(row * ids.shape[1], ids.shape[1]) for row in range(len(ids))]
    if packed.qkv_format != "thd" or len(ids) != 1:
        raise Unsupported("packed_seq_params", "thd, one row of packed sequences", f"{packed.qkv_format}, {len(ids)} rows")
    ends = packed.cu_seqlens_q.tolist()
    starts = ends if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded.tolist()
    lengths = np.diff(starts if padding else ends).tolist()
    return [(at, n) for at, n in zip(starts, lengths) if n]


def _check_positions(positions, ids, spans):
    if positions is None:
        return
    found = positions.reshape(-1).cpu().numpy()
    if found.size != ids.numel() or any((found[at:at + n] != np.arange(n)).any() for at, n in spans):
        raise Unsupported("position_ids", "positions that count from 0 in each sequence", "others")


def has_decoder(model):
    try:
        return get_attr_wrapped_model(model, "decoder") is not None
    except RuntimeError:
        return False


def whole(logits, place, shape, divisors):
    """Logits [O, V] at their places among a micro-batch's rows, as the trainer expects them: [batch, rows, V], zeros elsewhere."""
    out = logits.new_zeros(shape[0] * shape[1], logits.shape[-1]).index_copy(0, place, logits)
    for divisor in divisors:
        out = out / (divisor.to(out.device) if torch.is_tensor(divisor) else divisor)
    return out.view(*shape, -1)
