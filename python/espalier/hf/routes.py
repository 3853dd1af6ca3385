"""Recorded experts: a token with a record goes to the experts that the inference engine chose for it.

A rollout's `routed_experts` [tokens][layers][k] follow docs/rollout_format.md. They cover all layers, or only those with experts. The last token
may be missing. None in a token's place, and -1 (or 0 if k > 1) throughout a layer, mean that nothing was recorded there; the router chooses
freely. Two rows are shared only if both token and record are equal.

A router's forward stays the model's own. In its one call `topk(scores [R, E], k)` the recorded indices replace the chosen ones, and the values
are the scores at these indices; normalisation and scaling follow as without a record. A call's record is the keyword argument
`espalier_routes` of its layers, so a checkpointed layer also has it when it runs again in the backward.
"""

import collections
import contextlib
import functools
import threading

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from espalier.errors import Error, Unsupported
from espalier.hf.checkpoints import Place
from espalier.hf.model_parts import base_model, decoder_config, decoder_layers
from espalier.rows.transfer import queued

FIELD = "routed_experts"
KEYWORD = "espalier_routes"

_lock = threading.Lock()
_replaced: dict = {}  # by id of a model: number of running steps, functions that restore its layers' forwards


def of(model, prepared):
    """The Routes of these Rollouts, or None if no rollout has a record."""
    return Routes(model, prepared) if any(record.get(FIELD) is not None for record in prepared.records) else None


class Routes:
    """`of_rollout`: each rollout's record, int16 [tokens, layers with experts, k], ascending along k, -1 in layers where nothing was recorded. `keys`,
    `response_keys`: the tokens' ids for the planner, int32, one id for each different (token, record)."""

    def __init__(self, model, prepared):
        config = decoder_config(model)
        size = lambda *names: next((int(n) for name in names if isinstance(n := getattr(config, name, None), int) and n), 0)
        self.experts, self.hidden_layers = size("num_experts", "num_local_experts", "n_routed_experts"), config.num_hidden_layers
        self.layers = [index for index, layer in enumerate(decoder_layers(base_model(model))) if _chooses(layer)] if self.experts else []
        self.chosen = size("num_experts_per_tok", "top_k_experts", "moe_topk")
        self.of_rollout = [self._array(record, f"rollouts[{i}][{FIELD!r}]", int(length))
                           for i, (record, length) in enumerate(zip(prepared.records, prepared.lengths))]
        self._name(prepared)

    def _array(self, record, where, tokens):
        given = record.get(FIELD)
        if given is None or isinstance(given, (list, tuple)) and all(token is None for token in given):
            return np.full((tokens, len(self.layers), self.chosen), -1, np.int16)
        if not self.layers or not self.chosen:
            raise Error("input", where, "a model with experts", "one without", "Leave the field out", 3)
        array, missing = _integers(given, where)
        if len(array) not in (tokens, tokens - 1):
            raise Error("input", where, f"{tokens} or {tokens - 1} entries, one per token of prompt and response", str(len(array)),
                        "Record the whole sequence; the last token may be left out", 3)
        if array.ndim == 3 and array.shape[1] == self.hidden_layers:
            array = array[:, self.layers]
        if array.shape[1:] != (len(self.layers), self.chosen):
            raise Error("input", where, f"{self.hidden_layers} layers per token, or the {len(self.layers)} with experts, and {self.chosen} experts in each",
                        f"shape {array.shape}", "Leave the field out, or use the model with which it was recorded", 3)
        recorded = ~(missing[:, None] | (array == -1).all(2) | ((array == 0).all(2) & (self.chosen > 1)))  # [tokens, layers]
        live = np.sort(array[recorded], -1)
        if live.size and live.min() < 0:
            raise Error("input", where, "experts, or -1 for each of them in a layer that was not recorded", str(live.min()), "", 3)
        if live.size and live.max() >= self.experts:
            raise Error("input", where, f"experts in [0, {self.experts})", f"{live.min()} to {live.max()}", "Use the model with which it was recorded", 3)
        if (np.diff(live, axis=-1) == 0).any():
            raise Error("input", where, "distinct experts per token and layer", "one of them twice", "", 3)
        out = np.full((tokens, len(self.layers), self.chosen), -1, np.int16)
        out[:len(array)][recorded] = live
        return out

    def _name(self, prepared):
        """Ids from `first` on represent pairs (token, record); a token without a record keeps its own id. `prepared.keys` and `response_keys` may hold ids of images."""
        tokens = [np.concatenate([key, response]) for key, response in zip(prepared.keys, prepared.response_keys)]
        every, records = np.concatenate(tokens), np.concatenate(self.of_rollout).reshape(sum(map(len, tokens)), -1)
        recorded = (records >= 0).any(1)
        self.first = int(every.max()) + 1
        pairs = np.ascontiguousarray(np.concatenate([every[recorded, None], records[recorded].astype(np.int32)], 1))
        _, at, ids = np.unique(pairs.view(np.dtype((np.void, pairs.shape[1] * pairs.itemsize)))[:, 0], return_index=True, return_inverse=True)
        self.tokens = pairs[at, 0]
        every = every.copy()
        every[recorded] = self.first + ids
        ends = np.cumsum([len(t) for t in tokens])
        named = np.split(every.astype(np.int32), ends[:-1])
        self.keys = [ids[:len(key)] for ids, key in zip(named, prepared.keys)]
        self.response_keys = [ids[len(key):] for ids, key in zip(named, prepared.keys)]

    def targets(self, ids):
        """The tokens that the planner's ids represent."""
        out = ids.copy()
        out[ids >= self.first] = self.tokens[ids[ids >= self.first] - self.first]
        return out

    def rows(self, parts, device):
        """The CallRoutes of a call whose rows are `parts` end to end: (rollout, begin, end), or (None, begin, end) for padding."""
        nothing = lambda n: np.full((n, len(self.layers), self.chosen), -1, np.int16)
        found = [nothing(end - begin) if rollout is None else self.of_rollout[rollout][begin:end] for rollout, begin, end in parts]
        return CallRoutes(queued(torch.from_numpy(np.concatenate(found)), device), self.layers, self.experts)


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


def _integers(given, where):
    """(the record as an array, True for each token whose record is None)."""
    array = given.detach().cpu().numpy() if torch.is_tensor(given) else given
    missing = np.zeros(len(array), bool)
    if not isinstance(array, np.ndarray):
        missing = np.array([token is None for token in array], bool)
        like = next((token for token in array if token is not None), None)
        try:
            array = np.asarray([like if token is None else token for token in array])
        except ValueError:  # lists of different lengths
            array = np.asarray(None)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise Error("input", where, "integers [tokens][layers][k]", f"{array.dtype} of shape {array.shape}", "", 3)
    return array, missing
