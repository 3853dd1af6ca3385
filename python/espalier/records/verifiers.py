"""traces.jsonl of verifiers 0.4 and prime-rl: an episode a line, whose traces are graphs of messages.

  {"id", "group": {"id"}, "run": {"type", "work": {"type": "train" or "eval", "step"}}, "traces": [{"id", "agent": {"name", "trainable"},
   "rewards": {name: {"score", "weight"}}, "nodes": [{"parent", "token_ids", "mask", "logprobs", ...}, ...], "calls": [...]}, ...]}

A node holds the tokens that its message adds. `mask` is 1 for sampled tokens; logprobs, advantages, reference_logprobs and trainer_logprobs have an entry
for each of them. A path from a root to a leaf is a branch and becomes a record; the branches of a trace belong to one trajectory. Attempts of
compaction from which the agent did not go on, agents that do not train, and episodes of evaluation are left out.

In JSON, verifiers rounds log-probs to four decimals and leaves out recorded experts and sampling masks.
"""

import base64
import binascii

from .errors import UnsupportedRecords
from .json_files import first_of
from .neutral import Place, all_series, number, record
from .tensors import DTYPES, bytes_per_number, numbers_of

NAME = "verifiers traces"
_SERIES = {"rollout_logprobs": "logprobs", "old_logprobs": "trainer_logprobs", "ref_logprobs": "reference_logprobs", "advantage": "advantages"}
_OF_NODE = {*_SERIES.values(), "parent", "message", "sampled", "timestamp", "token_ids", "mask", "is_content", "tools", "semantic_parents", "loss_weights",
            "routed_experts", "sampling_mask"}
_REMEDY = "Token ids are recorded with a client for training (prime-rl, or the renderer's client); an evaluation through an API has none"


def matches(content):
    traces = first_of(content).get("traces")
    return isinstance(traces, list) and ("env" in first_of(content) or bool(traces) and isinstance(traces[0], dict) and "nodes" in traces[0])


def records(contents, notes):
    for path, episodes, step in contents:
        notes.add("verifiers traces: log-probs are rounded to four decimals, recorded experts and sampling masks are not in the file")
        for index, episode in enumerate(episodes):
            yield from _of_episode(Place(path, index), episode, step, notes)


def _of_episode(place, episode, step, notes):
    work = (episode.get("run") or {}).get("work") or {}
    if work.get("type") == "eval":
        return notes.add("episodes of evaluation are left out")
    group = (episode.get("group") or {}).get("id")
    for at, trace in enumerate(episode.get("traces") or ()):
        if not isinstance(trace, dict) or not isinstance(trace.get("nodes"), list):
            raise place.wrong(f"traces[{at}].nodes", "a list of messages", type(trace).__name__)
        if not (trace.get("agent") or {}).get("trainable", True):
            notes.add("traces of agents that do not train are left out")
            continue
        yield from _of_trace(place, trace, group, work.get("step", step), notes)


def _of_trace(place, trace, group, step, notes):
    nodes, reward = trace["nodes"], _reward(place, trace)
    if trace.get("ok") is False and reward is None and not any(node.get("advantages") for node in nodes):
        return notes.add("traces that failed without a reward are left out")
    if not any(node.get("token_ids") for node in nodes if node.get("sampled")):
        raise UnsupportedRecords(f"{place.path}: sample {place.index}", "messages with token_ids", "text only", _REMEDY)
    for node in nodes:
        notes.leave({name: value for name, value in node.items() if name not in _OF_NODE})
        content = (node.get("message") or {}).get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content if isinstance(part, dict)):
            raise UnsupportedRecords(f"{place.path}: sample {place.index}: message", "tokens only", "images or other media")
    paths = _branches(place, nodes, notes)
    agent = (trace.get("agent") or {}).get("name")
    if group is not None and agent is not None:
        group = f"{group}:{agent}"
    temperatures = {call.get("node"): (call.get("sampling") or {}).get("temperature") for call in trace.get("calls") or () if isinstance(call, dict)}
    for branch, path in enumerate(paths):
        yield _of_branch(place, [nodes[at] for at in path], group=group, step=step, trajectory=trace.get("id"), branch=branch if len(paths) > 1 else None,
                         reward=reward, temperature=_temperature(place, {temperatures.get(at) for at in path if nodes[at].get("sampled")} - {None}))


def _branches(place, nodes, notes):
    """The paths of nodes from a root to each leaf that trains."""
    links = [link for node in nodes for link in node.get("semantic_parents") or ()]
    accepted, inner = {link.get("node") for link in links if link.get("type") == "compaction"}, {node.get("parent") for node in nodes}
    out = []
    for leaf in (at for at in range(len(nodes)) if at not in inner):
        if leaf not in accepted and any(link.get("type") == "compaction_attempt" for link in nodes[leaf].get("semantic_parents") or ()):
            notes.add("attempts of compaction from which the agent did not go on are left out")
            continue
        path, at = [], leaf
        while at is not None:
            if type(at) is not int or not 0 <= at < len(nodes) or len(path) > len(nodes):
                raise place.wrong("nodes", "parents that are earlier messages", repr(at)[:40])
            path.insert(0, at)
            at = nodes[at].get("parent")
        if any(any(nodes[at].get("mask") or ()) for at in path):
            out.append(path)
    return out


def _reward(place, trace):
    rewards = [value for value in (trace.get("rewards") or {}).values() if value is not None]
    if not rewards:
        return None
    return sum(number(place, "rewards", value["score"]) * number(place, "rewards", value.get("weight", 1.0)) for value in rewards)


def _temperature(place, found):
    if len(found) > 1:
        raise UnsupportedRecords(f"{place.path}: sample {place.index}: calls", "one temperature in a branch", ", ".join(map(str, found)))
    return next(iter(found), None)


def _of_branch(place, path, **fields):
    ids, mask = [], []
    for node in path:
        tokens, sampled = node.get("token_ids") or [], node.get("mask") or []
        if len(tokens) != len(sampled):
            raise place.wrong("mask", f"{len(tokens)} entries, one per token of the message", str(len(sampled)))
        ids += tokens
        mask += map(int, sampled)
    begin = mask.index(1)
    weights = _weights(place, path, len(ids))
    trained = [int(counts and weight != 0) for counts, weight in zip(mask, weights)]
    parts = all_series(place, _SERIES, lambda field: _spread(place, path, field, mask), trained[begin:])
    if any(weight not in (0, 1) for weight in weights):
        if parts["advantage"] is None:
            raise UnsupportedRecords(f"{place.path}: sample {place.index}: loss_weights.rl", "weights of 0 and 1, or advantages, which take them", "others")
        parts["advantage"] = [advantage * weight for advantage, weight in zip(parts["advantage"], weights[begin:])]
    return record(place, ids[:begin], ids[begin:], trained[begin:], **fields, **parts, routed_experts=_routes(place, path, len(ids)),
                  kept_ids=_kept(place, path, mask, begin))


def _spread(place, path, field, mask):
    """A series of the sampled tokens for each token from the first sampled one on. None without any value; None stands where a message has none."""
    if all(not node.get(field) for node in path):
        return None
    out = []
    for node in path:
        values, sampled = node.get(field) or (), node.get("mask") or []
        if values and len(values) != sum(sampled):
            raise place.wrong(field, f"{sum(sampled)} entries, one per sampled token of the message", str(len(values)))
        numbers = iter(values or [0.0 if field == "advantages" else None] * len(sampled))  # as verifiers spreads them
        out += [next(numbers) if one else 0.0 for one in sampled]
    return out[mask.index(1):]


def _weights(place, path, count):
    """The weights of the policy loss of all tokens, 1 if there are none. Other losses of prime-rl are refused."""
    for node in path:
        for name, values in (node.get("loss_weights") or {}).items():
            if name not in ("rl", "pg") and any(values):
                raise UnsupportedRecords(f"{place.path}: sample {place.index}: loss_weights.{name}", "the policy loss alone (rl)", "weights of another loss",
                                         "Espalier has no mixture of losses; train that part as answers (SFT) or with a reference's KL")
    out = []
    for node in path:
        tokens, given = len(node.get("token_ids") or ()), node.get("loss_weights") or {}
        values = given.get("rl", given.get("pg"))
        if values is not None and len(values) != tokens:
            raise place.wrong("loss_weights.rl", f"{tokens} entries, one per token of the message", str(len(values)))
        out += [number(place, "loss_weights.rl", value) for value in values] if values is not None else [1] * tokens
    return out if len(out) == count else [1] * count


def _routes(place, path, count):
    """`routed_experts` of the path's tokens, None where a message has none."""
    if all(node.get("routed_experts") is None for node in path):
        return None
    out = []
    for node in path:
        tokens = len(node.get("token_ids") or ())
        values = _array(place, "routed_experts", node.get("routed_experts"), 3)
        out += values if values is not None and len(values) == tokens else (values or []) + [None] * (tokens - len(values or ()))
    return out[:count]


def _kept(place, path, mask, begin):
    """`kept_ids` of the tokens from `begin` on, from flat ids and the number of each sampled token's."""
    if all(node.get("sampling_mask") is None for node in path):
        return None
    sets = []
    for node in path:
        sampled, kept = node.get("mask") or [], node.get("sampling_mask")
        ids = _array(place, "sampling_mask.ids", kept["ids"], 1) if kept else []
        counts = _array(place, "sampling_mask.counts", kept["counts"], 1) if kept else [0] * sum(sampled)
        if len(counts) != sum(sampled) or sum(counts) != len(ids):
            raise place.wrong("sampling_mask", f"counts of {sum(sampled)} sampled tokens that add up to {len(ids)}", f"{len(counts)}, {sum(counts)}")
        at, rest = 0, iter(counts)
        for one in sampled:
            size = next(rest) if one else 0
            sets.append(ids[at : at + size] or None)
            at += size
    return sets[begin:]


def _array(place, field, value, dimensions):
    """The nested list of an array as verifiers writes it, {__nd__, dtype, shape, data}, or of lists."""
    if value is None or isinstance(value, list):
        return value
    shape, dtype, data = value.get("shape"), value.get("dtype"), value.get("data")
    if not isinstance(shape, list) or len(shape) != dimensions or dtype not in DTYPES or not isinstance(data, str):
        raise place.wrong(field, f"an array of {dimensions} dimensions", f"dtype {dtype}, shape {shape}"[:60])
    size = bytes_per_number(dtype)
    for part in shape:
        size *= part
    raw = data.encode("utf-8")  # pydantic writes bytes as UTF-8 text, or as base64
    if len(raw) != size:
        try:
            raw = base64.b64decode(data, validate=True)
        except binascii.Error:
            raw = b""
    if len(raw) != size:
        raise place.wrong(field, f"{size} bytes", f"{len(raw)} of another length")
    return _nested(list(numbers_of(raw, dtype)), shape)


def _nested(flat, shape):
    if len(shape) == 1:
        return flat
    step = len(flat) // shape[0] if shape[0] else 0
    return [_nested(flat[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]
