"""Compares a model's own forward with shared calls, for two short sequences with a common beginning. Runs once for each model.

It finds faults that no list of names can: a model that counts positions in its own way, layers that look at neighbouring rows, random
numbers in a forward.

    own      each sequence in a call of its own, without position ids
    nudged   the same with every embedding moved by one rounding step: the effect of rounding alone on the logits
    shared   the beginning as a trunk, then both continuations in one call

The distance of a row is ||logits - own|| / ||own - its mean||, for the rows of both continuations. The embeddings were moved once, but each of
the L layers may round its rows once more in another kernel, so shared may differ by 2 sqrt(L + 1) times nudged. Two distances are compared.
The median over rows leaves out a row whose router tips over. The largest distance that the same row has in both continuations is compared
with nudged's largest: a router tips over in both only by chance, a layer that reads neighbouring rows differs in both always.
"""

import contextlib
import contextvars
import weakref

import numpy as np
import torch

from espalier.errors import Error, Unsupported
from espalier.hf import implementation, ranks
from espalier.hf.attention import Phase
from espalier.hf.calls import call_model
from espalier.rows.trunk import RowSet, Trunk
from espalier.hf.model_parts import base_model, decoder_config
from espalier.rows.verdict import nudged

BEGINNING, CONTINUATIONS = 7, (6, 5)

_passed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # base model: the (training or not, hash of its modules' types) that passed
_running: contextvars.ContextVar = contextvars.ContextVar("espalier_probe", default=False)


def running():
    """True while a probe calls a model. A forward that a trainer has wrapped to share rows then runs without sharing."""
    return _running.get()


def check(model):
    base = base_model(model)
    now = (base.training, hash(tuple(map(type, base.modules()))))  # adapters and wrappers replace modules in place
    if now in _passed.get(base, ()):
        return
    before = _running.set(True)
    try:
        with quiet(model), torch.no_grad():
            _compare(ranks.without_replicas(model), base)
    finally:
        _running.reset(before)
    _passed.setdefault(base, set()).add(now)


@contextlib.contextmanager
def quiet(model):
    """Context manager: random number states are restored, and a compiled model runs eagerly."""
    device = ranks.device_of(model)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        yield


def _compare(model, base):
    device, name = ranks.device_of(model), type(base).__name__
    tokens = sequences(base)
    call = lambda ids, **more: model(input_ids=torch.tensor([ids], device=device), use_cache=False, **more).logits[0, BEGINNING:].float()
    own_of = lambda **more: [call(ids, **more) for ids in tokens]
    state = _random_state(device)
    with named(name, "a forward that takes input_ids and returns logits"):
        own = own_of()
    if base.training and not torch.equal(state, _random_state(device)) and not all(map(torch.equal, own, own_of())):
        raise Unsupported(name, "a forward without random numbers: they differ from rollout to rollout", "dropout or noise",
                          "model.eval(), or set it to 0")
    with nudged(base.get_input_embeddings()):
        rounding = _distances(own_of(), own)
    with named(name, "a model that runs rows of several rollouts in one call"), implementation.in_use(model):
        error = _distances(_shared(model, tokens, device), own)
    allowed = 2 * (getattr(decoder_config(base), "num_hidden_layers", 1) + 1) ** .5
    for measure, of_rounding in ((_median, _median), (_of_both, _largest)):
        found, explained = measure(error), of_rounding(rounding)
        if found <= allowed * explained:
            continue
        counted = torch.arange(len(tokens[0]), device=device)[None]
        if _median(_distances([call(tokens[0], position_ids=counted)], own[:1])) > allowed * _median(rounding):
            raise Unsupported(name, "positions counted from 0, as in position_ids", "a model that counts its own")
        raise Unsupported(name, "rows that read earlier rows only through attention",
                          f"logits of shared rows that differ by {found:.1e} from the model's own; rounding explains {explained:.1e}")


@contextlib.contextmanager
def named(name, wanted):
    """Context manager: turns any exception of the model's call into `Unsupported`, except `Error` and OutOfMemoryError."""
    try:
        yield
    except (Error, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise Unsupported(name, wanted, f"{type(problem).__name__}: {problem}") from problem


def sequences(base, without=()):
    """Token ids spread over the vocabulary, none of them special or among `without`."""
    config = decoder_config(base)
    special = {i for field in ("pad_token_id", "bos_token_id", "eos_token_id") for i in np.atleast_1d(getattr(config, field, None))} | set(without)
    usable = [i for i in range(min(config.vocab_size, 4096)) if i not in special]
    at = lambda i: usable[(11 + 7 * i) % len(usable)]
    beginning = [at(i) for i in range(BEGINNING)]
    return [beginning + [at(BEGINNING + 20 * s + i) for i in range(n)] for s, n in enumerate(CONTINUATIONS)]


def _shared(model, sequences, device):
    as_rows = lambda ids: torch.tensor([ids], device=device)
    trunk = Trunk(BEGINNING)
    phase = Phase([RowSet(0, (), [(0, BEGINNING, BEGINNING)])], BEGINNING, captures=trunk)
    everything = lambda n: torch.arange(n, device=device)
    with phase.forward(model):
        call_model(model, as_rows(sequences[0][:BEGINNING]), everything(BEGINNING)[None], phase, everything(BEGINNING))
    first, second = CONTINUATIONS
    phase = Phase([RowSet(0, (trunk,), [(0, first, first), (first, second, first + second)])], BEGINNING + max(CONTINUATIONS))
    positions = torch.cat([BEGINNING + everything(n) for n in CONTINUATIONS])
    with phase.forward(model):
        rest, _ = call_model(model, as_rows(sum((ids[BEGINNING:] for ids in sequences), [])), positions[None], phase, everything(first + second))
    return [part.float() for part in rest.split(CONTINUATIONS)]


def _distances(found, wanted):
    """The distance of every row, one tensor for each continuation."""
    size = lambda x: (x - x.mean(-1, keepdim=True)).norm(dim=-1)
    return [(a - b).norm(dim=-1) / size(b) for a, b in zip(found, wanted)]


def _median(distances):
    return float(torch.cat(distances).median())


def _largest(distances):
    return float(torch.cat(distances).max())


def _of_both(distances):
    """The largest distance that a row has in both continuations."""
    rows = min(map(len, distances))
    return float(torch.stack([each[:rows] for each in distances]).amin(0).max())


def _random_state(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
