"""Recorded experts: a token with a record goes to the experts that the inference engine chose for it.

A rollout's `routed_experts` [tokens][layers][k] follow docs/rollout_format.md. They cover all layers, or only those with experts. The last token
may be missing. None in a token's place, and -1 (or 0 if k > 1) throughout a layer, mean that nothing was recorded there; the router chooses
freely. Two rows are shared only if both token and record are equal.
"""

import numpy as np
import torch

from espalier.errors import Error

FIELD = "routed_experts"


def recorded(prepared):
    """True if any of these Rollouts has a record."""
    return any(record.get(FIELD) is not None for record in prepared.records)


class Routes:
    """The records of a step's rollouts, for a model of `hidden_layers` layers whose `layers` choose `chosen` of `experts`. `of_rollout`: each rollout's
    record, int16 [tokens, layers with experts, k], ascending along k, -1 in layers where nothing was recorded. `keys`, `response_keys`: the
    tokens' ids for the planner, int32, one id for each different (token, record)."""

    def __init__(self, prepared, experts, chosen, layers, hidden_layers):
        self.experts, self.chosen, self.layers, self.hidden_layers = experts, chosen, layers, hidden_layers
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

    def rows(self, parts):
        """The records of rows that are `parts` end to end, (rollout, begin, end), or (None, begin, end) for padding: [R, layers with experts, k], -1 where
        nothing was recorded."""
        nothing = lambda n: np.full((n, len(self.layers), self.chosen), -1, np.int16)
        return np.concatenate([nothing(end - begin) if rollout is None else self.of_rollout[rollout][begin:end] for rollout, begin, end in parts])


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
