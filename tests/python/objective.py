"""Advantages and the loss of a mini-batch in plain torch code, one rollout at a time: the meaning of every option, written
from the formulas and independent of the engine. All arithmetic in the dtype of the log-probs that are passed in."""

import json
import math
import statistics

import torch

DEFAULTS = {
    "adv-estimator": "grpo", "policy-loss": "vanilla", "clip-ratio-low": 0.2, "clip-ratio-high": 0.2, "clip-ratio-c": 3.0,
    "loss-agg-mode": None, "loss-scale-factor": 0.0, "kl-loss-coef": 0.0, "kl-loss-type": "low_var_kl",
    "entropy-coeff": 0.0, "rollout-is": "none", "rollout-is-threshold": 2.0, "gamma": 1.0, "lam": 1.0, "cliprange-value": 0.5,
}
SAPO_TAU_POSITIVE, SAPO_TAU_NEGATIVE = 1.0, 1.05


def resolve(options):
    unknown = set(options) - set(DEFAULTS)
    if unknown:
        raise KeyError(f"not an option of the objective: {sorted(unknown)}")
    resolved = {**DEFAULTS, **options}
    if resolved["loss-agg-mode"] is None:
        sequence = resolved["policy-loss"] in ("gspo", "sapo")
        resolved["loss-agg-mode"] = "seq-mean-token-mean" if sequence else "token-mean"
    return resolved


def group_of(record):
    return ("named", json.dumps(record["group"])) if "group" in record else ("prompt", tuple(record["prompt_ids"]))


def whiten(series, masks):
    """(x - mean) / sqrt(variance + 1e-8) over the loss tokens of all series, variance with Bessel's correction. The mean is
    the correctly rounded one, so that equal numbers become 0."""
    values = [x for xs, mask in zip(series, masks) for x, m in zip(xs, mask) if m]
    if not values:
        return series
    mean = statistics.mean(values)
    variance = statistics.variance(values) if len(values) > 1 else 0.0
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in xs] for xs in series]


def gae(records, options):
    """Advantages before whitening and returns, masked tokens carried over as verl does."""
    gamma, lam = options["gamma"], options["lam"]
    advantages, returns = [], []
    for record in records:
        mask, values = record["loss_mask"], record["values"]
        rewards = [0.0] * len(mask)
        if any(mask):
            rewards[max(t for t, m in enumerate(mask) if m)] = record["reward"]
        own, following, last = [0.0] * len(mask), 0.0, 0.0
        for t in reversed(range(len(mask))):
            delta = rewards[t] + gamma * following - values[t]
            estimate = delta + gamma * lam * last
            following = values[t] * mask[t] + (1 - mask[t]) * following
            last = estimate * mask[t] + (1 - mask[t]) * last
            own[t] = last
        advantages.append(own)
        returns.append([a + v for a, v in zip(own, values)])
    return advantages, returns


def advantages(records, options):
    """One advantage per response token: of each `step` alone where all records have one, else over the whole file."""
    if not all("step" in record for record in records):
        return advantages_of_unit(records, options)
    out = [None] * len(records)
    for step in {record["step"] for record in records}:
        indices = [i for i, record in enumerate(records) if record["step"] == step]
        for i, series in zip(indices, advantages_of_unit([records[i] for i in indices], options)):
            out[i] = series
    return out


def advantages_of_unit(records, options):
    """A recorded advantage wins; the rewards beside it count in their group's statistics, not in the whitening."""
    estimator = options["adv-estimator"]
    recorded = {i: r["advantage"] for i, r in enumerate(records) if "advantage" in r}
    free = [i for i, r in enumerate(records) if i not in recorded and r["response_ids"]]
    own = [records[i] for i in free]
    if estimator == "gae":
        series = whiten(gae(own, options)[0], [r["loss_mask"] for r in own])
    elif estimator == "reinforce_plus_plus":
        series = whiten([discounted(r, options["gamma"]) for r in own], [r["loss_mask"] for r in own])
    else:
        scalar = outcome_advantages(records, estimator)
        series = [[scalar[i]] * len(records[i]["response_ids"]) for i in free]
        if estimator == "reinforce_plus_plus_baseline":
            series = whiten(series, [r["loss_mask"] for r in own])
    estimated = dict(zip(free, series, strict=True))
    spread = lambda a, record: list(a) if isinstance(a, list) else [a] * len(record["response_ids"])
    return [spread(recorded[i], r) if i in recorded else estimated.get(i, []) for i, r in enumerate(records)]


def outcome_advantages(records, estimator):
    """One number for each record that has a reward, from the rewards of its group."""
    members = {}
    for index, record in enumerate(records):
        if "reward" in record:
            members.setdefault(group_of(record), []).append(index)
    scalar = [None] * len(records)
    for indices in members.values():
        rewards = [records[i]["reward"] for i in indices]
        n = len(rewards)
        mean = statistics.mean(rewards) if n > 1 else 0.0
        deviation = statistics.stdev(rewards) if n > 1 else 1.0
        for i, reward in zip(indices, rewards):
            if estimator == "grpo":
                scalar[i] = (reward - mean) / (deviation + 1e-6)
            elif estimator in ("dr_grpo", "reinforce_plus_plus_baseline"):
                scalar[i] = reward - mean
            elif estimator == "rloo":
                scalar[i] = n / (n - 1) * (reward - mean) if n > 1 else reward
    return scalar


def discounted(record, gamma):
    """gamma^(loss tokens after t) times the reward, at each loss token."""
    mask = record["loss_mask"]
    return [record["reward"] * gamma ** sum(mask[t + 1:]) if m else 0.0 for t, m in enumerate(mask)]


def policy_loss(logprob, old, advantage, mask, options):
    """Per-token loss to minimise."""
    kind = options["policy-loss"]
    low, high = 1 - options["clip-ratio-low"], 1 + options["clip-ratio-high"]
    ratio = torch.exp(torch.clamp(logprob - old, -20.0, 20.0))
    if kind == "vanilla":
        clipped = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, low, high))
        dual = torch.minimum(clipped, -advantage * options["clip-ratio-c"])
        return torch.where(advantage < 0, dual, clipped)
    if kind == "gspo":
        mean = ((logprob - old) * mask).sum() / mask.sum().clamp(min=1)
        ratio = torch.exp(torch.clamp(logprob - logprob.detach() + mean.detach(), max=10.0))
        return torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, low, high))
    if kind == "cispo":
        return -torch.clamp(ratio, low, high).detach() * advantage * logprob
    if kind == "sapo":
        # Tensors, because torch.where of two numbers rounds them to float32 first.
        positive, negative = (torch.tensor(x, dtype=logprob.dtype) for x in (SAPO_TAU_POSITIVE, SAPO_TAU_NEGATIVE))
        tau = torch.where(advantage > 0, positive, negative)
        return -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    if kind in ("gpg", "reinforce"):
        return -advantage * logprob
    raise ValueError(kind)


def importance_weight(old, rollout, mask, options):
    kind = options["rollout-is"]
    if kind == "none":
        return torch.ones_like(old)
    log_weight = (old - rollout).detach()
    if kind == "sequence":
        log_weight = (log_weight * mask).sum().expand_as(old)
    return torch.exp(torch.clamp(log_weight, -20.0, 20.0)).clamp(max=options["rollout-is-threshold"])


def kl_penalty(logprob, reference, kind):
    x = logprob - reference
    straight_through, kind = kind.endswith("+"), kind.rstrip("+")
    if kind in ("kl", "k1"):
        value = x
    elif kind == "abs":
        value = x.abs()
    elif kind in ("mse", "k2"):
        value = 0.5 * x * x
    elif kind in ("low_var_kl", "k3"):
        negative = torch.clamp(-x, -20.0, 20.0)
        value = torch.clamp(torch.exp(negative) - negative - 1, -10.0, 10.0)
    else:
        raise ValueError(kind)
    if straight_through:
        square = 0.5 * x * x
        value = square - square.detach() + value.detach()
    return value


def aggregate(series, masks, lengths, options):
    mode = options["loss-agg-mode"]
    sums = [(value * mask).sum() for value, mask in zip(series, masks)]
    tokens = sum(float(mask.sum()) for mask in masks)
    total = sum(sums)
    if mode == "token-sum":
        return total
    if mode == "token-mean":
        return total / tokens if tokens else total * 0
    if mode == "seq-mean-token-sum":
        return total / len(series)
    if mode == "seq-mean-token-sum-norm":
        return total / len(series) / (options["loss-scale-factor"] or max(lengths) or 1)
    if mode == "seq-mean-token-mean":
        return sum(s / (mask.sum() + 1e-8) for s, mask in zip(sums, masks)) / len(series)
    raise ValueError(mode)


def token_losses(records, logprobs, advantage_series, options):
    """(policy loss, KL) of every response token, lists of 1-D tensors; without a coefficient there is no KL."""
    policy, penalty = [], []
    for record, logprob, advantage in zip(records, logprobs, advantage_series, strict=True):
        series = lambda name: torch.tensor(record[name], dtype=logprob.dtype)
        mask = series("loss_mask")
        old = series("old_logprobs") if "old_logprobs" in record else logprob.detach()
        token_advantage = torch.tensor(advantage, dtype=logprob.dtype)
        value = policy_loss(logprob, old, token_advantage, mask, options)
        if options["rollout-is"] != "none":
            value = value * importance_weight(old, series("rollout_logprobs"), mask, options)
        policy.append(value)
        if options["kl-loss-coef"]:
            penalty.append(kl_penalty(logprob, series("ref_logprobs"), options["kl-loss-type"]))
    return policy, penalty


def masks_and_lengths(records, dtype):
    return [torch.tensor(r["loss_mask"], dtype=dtype) for r in records], [len(r["response_ids"]) for r in records]


def loss(records, logprobs, entropies, advantage_series, options):
    """The scalar loss of a mini-batch as a function of its log-probs and entropies (lists of 1-D tensors)."""
    policy, penalty = token_losses(records, logprobs, advantage_series, options)
    masks, lengths = masks_and_lengths(records, logprobs[0].dtype)
    parts = {"pg_loss": aggregate(policy, masks, lengths, options), "entropy": aggregate(entropies, masks, lengths, options)}
    total = parts["pg_loss"] - options["entropy-coeff"] * parts["entropy"]
    if options["kl-loss-coef"]:
        parts["kl_loss"] = aggregate(penalty, masks, lengths, options)
        total = total + options["kl-loss-coef"] * parts["kl_loss"]
    return total, parts


def clip_fraction(records, logprobs, advantage_series, options):
    """Share of loss tokens at which the clipped loss is the larger one; cispo: at which the clip changes the ratio."""
    kind, low, high = options["policy-loss"], 1 - options["clip-ratio-low"], 1 + options["clip-ratio-high"]
    clipped, tokens = 0, 0
    for record, logprob, advantage in zip(records, logprobs, advantage_series, strict=True):
        mask = torch.tensor(record["loss_mask"], dtype=logprob.dtype)
        old = torch.tensor(record["old_logprobs"], dtype=logprob.dtype) if "old_logprobs" in record else logprob
        log_ratio, advantage = torch.clamp(logprob - old, -20.0, 20.0), torch.tensor(advantage, dtype=logprob.dtype)
        if kind == "gspo":
            mean = ((logprob - old) * mask).sum() / mask.sum().clamp(min=1)
            log_ratio = torch.clamp(mean.expand_as(logprob), max=10.0)
        ratio = torch.exp(log_ratio)
        bounded = torch.clamp(ratio, low, high)
        if kind in ("vanilla", "gspo"):
            clipped += float(((-advantage * bounded > -advantage * ratio) * mask).sum())
        elif kind == "cispo":
            clipped += float(((bounded != ratio) * mask).sum())
        tokens += float(mask.sum())
    return clipped / tokens if tokens else 0.0


def value_loss(records, predicted, returns, options):
    """verl's compute_value_loss of a mini-batch; `predicted`: 1-D tensors."""
    squares, masks, lengths = [], [], []
    for record, value, target in zip(records, predicted, returns, strict=True):
        series = lambda numbers: torch.tensor(numbers, dtype=value.dtype)
        old, clip = series(record["values"]), options["cliprange-value"]
        clipped = torch.maximum(torch.minimum(value, old + clip), old - clip)
        squares.append(torch.maximum((value - series(target)) ** 2, (clipped - series(target)) ** 2))
        masks.append(series(record["loss_mask"]))
        lengths.append(len(record["response_ids"]))
    return 0.5 * aggregate(squares, masks, lengths, options)
