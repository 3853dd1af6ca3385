"""Recorded experts (espalier.rows.routes) in a transformers model.

A router's forward stays the model's own. In its one call `topk(scores [R, E], k)` the recorded indices replace the chosen ones, and the values
are the scores at these indices; normalisation and scaling follow as without a record. A call's record is the keyword argument
`espalier_routes` of its layers, so a checkpointed layer also has it when it runs again in the backward.
"""

import collections
import contextlib
import functools
import threading

import torch
from torch.overrides import TorchFunctionMode

from espalier.errors import Unsupported
from espalier.hf.checkpoints import Place
from espalier.hf.model_parts import base_model, decoder_config, decoder_layers
from espalier.rows.routes import FIELD, Routes, recorded
from espalier.rows.transfer import queued

KEYWORD = "espalier_routes"

_lock = threading.Lock()
_replaced: dict = {}  # by id of a model: number of running steps, functions that restore its layers' forwards


def of(model, prepared):
    """The Routes of these Rollouts, or None if no rollout has a record."""
    if not recorded(prepared):
        return None
    config = decoder_config(model)
    size = lambda *names: next((int(n) for name in names if isinstance(n := getattr(config, name, None), int) and n), 0)
    experts = size("num_experts", "num_local_experts", "n_routed_experts")
    layers = [index for index, layer in enumerate(decoder_layers(base_model(model))) if _chooses(layer)] if experts else []
    return Routes(prepared, experts, size("num_experts_per_tok", "top_k_experts", "moe_topk"), layers, config.num_hidden_layers)


def of_call(routes, parts, device):
    """The CallRoutes of a call whose rows are `parts` end to end: (rollout, begin, end), or (None, begin, end) for padding."""
    return CallRoutes(queued(torch.from_numpy(routes.rows(parts)), device), routes.layers, routes.experts)


class CallRoutes:
    """The records of a call's rows, [R, layers with experts, k], -1 where nothing was recorded."""

    def __init__(self, chosen, layers, experts):
        self.chosen, self.experts, self.column = chosen, experts, {layer: column for column, layer in enumerate(layers)}
        self.seen, self.place, self.problem = collections.Counter(), None, None

    def choose(self, layer, scores, free, told):
        """topk's (values, indices) with the recorded indices. Returns `free`, topk's own result, unchanged if `scores` are not a router's. `told`: the Place
        where the layer got this record."""
        rows, _, chosen = self.chosen.shape
        if scores.shape != (rows, self.experts) or free.indices.shape[1] != chosen or layer not in self.column:
            return free
        self.seen[layer] += 1
        if self.place is not None:
            self._check_place(layer, told)
        recorded = self.chosen[:, self.column[layer]].long()
        indices = torch.where(recorded >= 0, recorded, free.indices)
        return torch.return_types.topk((scores.gather(1, indices), indices))

    @contextlib.contextmanager
    def forward(self):
        """Context manager for a call of the model. Raises `Unsupported` unless every layer with experts chooses exactly once."""
        self.seen.clear()
        self.place, self.problem = Place(), None
        try:
            yield
        finally:
            self.place = None
        if self.problem is not None:
            raise self.problem
        for layer in self.column:
            if self.seen[layer] != 1:
                raise Unsupported(FIELD, f"one choice of {self.chosen.shape[2]} of {self.experts} experts in layer {layer}", str(self.seen[layer]),
                                  "Leave the field out; the layer chooses experts in another way, or drops keyword arguments")


    def _check_place(self, layer, told):
        """Keeps the first `Unsupported` for the end of the call: other ranks wait for its later layers if FSDP shards the model."""
        where = f"layer {layer} with recorded experts"
        try:
            self.place.check_graph(where)
            told.check_encloses(where)
        except Unsupported as reason:
            self.problem = self.problem or reason


class _Choosing(TorchFunctionMode):
    def __init__(self, routes, layer, given):
        super().__init__()
        self.routes, self.layer, self.given = routes, layer, given

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if self.routes is not None and function in (torch.topk, torch.Tensor.topk):
            return self.routes.choose(self.layer, args[0] if args else kwargs["input"], out, self.given.place)
        return out


@contextlib.contextmanager
def installed(model, on=True):
    """Context manager in which the model's layers take `espalier_routes`. Steps of several threads may overlap. Does nothing if not `on`."""
    if not on:
        yield
        return
    base = base_model(model)
    with _lock:
        held = _replaced.setdefault(id(base), [0, ()])
        if held[0] == 0:
            held[1] = [_replace_forward(index, getattr(layer, "_checkpoint_wrapped_module", layer)) for index, layer in enumerate(decoder_layers(base))]
        held[0] += 1
    try:
        yield
    finally:
        with _lock:
            held[0] -= 1
            if held[0] == 0:
                del _replaced[id(base)]
                for undo in held[1]:
                    undo()


def _replace_forward(index, layer):
    """Makes a layer's forward use the record in `espalier_routes`. Returns a function that undoes it. Some versions of transformers checkpoint
    inside this forward, others around it."""
    held, plain, checkpoint = dict(vars(layer)), layer.forward, vars(layer).get("_gradient_checkpointing_func")
    given = threading.local()

    def under(routes, function, *args, **kwargs):
        before = getattr(given, "routes", None), getattr(given, "place", None)
        given.routes, given.place = routes, Place()
        try:
            with _Choosing(routes, index, given) if routes is not before[0] else contextlib.nullcontext():
                return function(*args, **kwargs)
        finally:
            given.routes, given.place = before

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        return under(kwargs.pop(KEYWORD, None), plain, *args, **kwargs)

    layer.forward = torch.compiler.disable(forward)
    replaced = ["forward"]
    if checkpoint is not None:
        layer._gradient_checkpointing_func = lambda function, *args, **kwargs: checkpoint(
            functools.partial(under, getattr(given, "routes", None), function), *args, **kwargs)
        replaced.append("_gradient_checkpointing_func")

    def undo():
        for name in replaced:
            delattr(layer, name)
            if name in held:
                setattr(layer, name, held[name])

    return undo


def _chooses(layer):
    return any(isinstance(getattr(module, name, None), int) for module in layer.modules() for name in ("top_k", "moe_top_k"))
