"""What `train` should do to a drawn case, by torch autograd on one rollout at a time, and how exactly that can be known.

Every gradient comes with its size: the sum over rollouts of the norm of what each adds. Terms of different rollouts may
cancel (equal responses with opposite rewards), so rounding is measured against this size and not against what is left.
"""

import torch

import objective
import oracle


class Router:
    """Logits and choices of every layer with experts, kept during a forward; recorded experts take the place of choices."""

    def __init__(self, model):
        self.kept, self.layers, self.recorded = [], [], None
        for name, module in model.named_modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.forward = self.wrapped(module, module.forward, len(self.layers))
                self.layers.append(int(name.split(".")[2]))

    def wrapped(self, module, choose, layer):
        def forward(hidden):
            logits, weights, chosen = choose(hidden)
            if self.recorded:
                chosen = torch.tensor([own if token is None else token[layer] for own, token in zip(chosen.tolist(), self.recorded)])
                weights = torch.softmax(logits, dim=-1).gather(1, chosen)
                weights = weights / weights.sum(-1, keepdim=True) if module.norm_topk_prob else weights
            self.kept.append((logits, chosen))
            return logits, weights, chosen

        return forward

    def begin(self, record):
        tokens = len(record["prompt_ids"]) + len(record["response_ids"])
        routes = record.get("routed_experts", [])
        self.kept, self.recorded = [], routes and routes + [None] * (tokens - len(routes))


def router_losses(logits, choices, experts, options):
    """(aux loss, z loss, loads by layer) from logits[rollout][layer], [tokens, experts], and choices, [tokens, k]."""
    balance, square, loads = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), []
    count = lambda chosen: torch.bincount(chosen.flatten(), minlength=experts)
    for layer, chosen in zip(zip(*logits, strict=True), zip(*choices, strict=True), strict=True):
        whole = options.get("router-aux-loss-scope") == "minibatch"
        units = [(torch.cat(layer), torch.cat(chosen))] if whole else list(zip(layer, chosen))
        for rows, picked in units:
            share = count(picked).double() / picked.numel()
            balance = balance + experts * (share * torch.softmax(rows, -1).mean(0)).sum() / len(units)
            square = square + torch.logsumexp(rows, -1).square().mean() / len(units)
        loads.append(count(torch.cat(chosen)).tolist())
    return balance, square, loads


def leaves(tensors):
    return [t.detach().requires_grad_() for t in tensors]


class Gradient:
    """Sums of vector-Jacobian products of rollouts, and their sizes."""

    def __init__(self, model):
        self.model = model
        self.names, self.parameters = zip(*model.named_parameters())
        self.sum = {n: torch.zeros_like(p) for n, p in zip(self.names, self.parameters)}
        self.size = {n: 0.0 for n in self.names}

    def add(self, outputs, upstream):
        used = [(o, u) for o, u in zip(outputs, upstream) if u is not None and o.requires_grad]
        if not used:
            return
        found = torch.autograd.grad([o for o, _ in used], self.parameters, [u for _, u in used], allow_unused=True)
        for name, gradient in zip(self.names, found):
            if gradient is not None:
                self.sum[name] += gradient
                self.size[name] += float(gradient.norm())

    def by_file(self):
        """(gradients, sizes) under the names of the files; experts stand stacked in a parameter and share its size."""
        exact = oracle.of_files(self.sum, self.model)
        stacked = oracle.of_files({n: torch.full_like(p, self.size[n]) for n, p in zip(self.names, self.parameters)}, self.model)
        return exact, {name: float(t.flatten()[0]) for name, t in stacked.items()}

    def norm(self):
        return oracle.global_norm(self.sum)


def policy_step(model, router, records, advantages, options, router_options):
    """(metrics, Gradient, log-probs, entropies) of the actor's mini-batch."""
    forwards = []
    for record in records:
        router.begin(record)
        logprob, entropy = oracle.response_logprobs(model, record)
        if not record["response_ids"] and router.layers:  # its prompt chooses experts too
            model(input_ids=torch.tensor([record["prompt_ids"]]), use_cache=False)
        forwards.append((logprob, entropy, router.kept))
    logprobs, entropies = leaves(f[0] for f in forwards), leaves(f[1] for f in forwards)
    loss, parts = objective.loss(records, logprobs, entropies, advantages, options)
    metrics = {"kl_loss": 0.0, **{name: float(value.detach()) for name, value in parts.items()}, "aux_loss": 0.0, "z_loss": 0.0, "loads": {}}
    routed, routers = [leaves(rows for rows, _ in f[2]) for f in forwards], 0.0
    if router.layers:
        balance, square, loads = router_losses(
            routed, [[chosen for _, chosen in f[2]] for f in forwards], model.config.num_experts, router_options)
        metrics["loads"] = dict(zip(router.layers, loads))
        aux, z = router_options.get("router-aux-loss-coef", 0), router_options.get("router-z-loss-coef", 0)
        loss = loss + aux * balance + z * square
        routers = float((aux * balance + z * square).detach())
        metrics.update(aux_loss=float(balance.detach()) if aux else 0.0, z_loss=float(square.detach()) if z else 0.0)
    flat = [*logprobs, *entropies, *(t for layers in routed for t in layers)]
    upstream = iter(torch.autograd.grad(loss, flat, allow_unused=True)) if loss.requires_grad else iter([None] * len(flat))
    of_logprob, of_entropy = [next(upstream) for _ in records], [next(upstream) for _ in records]
    gradient = Gradient(model)
    for (logprob, entropy, kept), u, v in zip(forwards, of_logprob, of_entropy):
        gradient.add([logprob, entropy, *(rows for rows, _ in kept)], [u, v, *(next(upstream) for _ in kept)])
    logprobs, entropies = [x.detach() for x in logprobs], [x.detach() for x in entropies]
    metrics.update(loss=float(loss.detach()), grad_norm=gradient.norm(), loss_tokens=sum(sum(r["loss_mask"]) for r in records),
                   clip_fraction=objective.clip_fraction(records, logprobs, advantages, options))
    terms, slope = reach(records, logprobs, entropies, advantages, options, [*of_logprob, *of_entropy])
    metrics["reach"] = terms + routers, slope
    return metrics, gradient, logprobs, entropies


def reach(records, logprobs, entropies, advantages, options, upstream):
    """(sum of the absolute values of the loss's terms, sum of its absolute derivatives by log-probs and entropies)."""
    policy, penalty = objective.token_losses(records, logprobs, advantages, options)
    masks, lengths = objective.masks_and_lengths(records, torch.float64)
    absolute = lambda series: float(objective.aggregate([x.abs() for x in series], masks, lengths, options))
    terms = absolute(policy) + absolute(entropies) + (absolute(penalty) if penalty else 0.0)
    return terms, sum(float(u.abs().sum()) for u in upstream if u is not None)


def value_step(critic, records, returns, options):
    """(metrics, Gradient) of the critic's mini-batch."""
    forwards = [oracle.response_values(critic, record) for record in records]
    predicted = leaves(forwards)
    loss = objective.value_loss(records, predicted, returns, {**options, "loss-agg-mode": options["value-agg-mode"]})
    upstream = torch.autograd.grad(loss, predicted) if loss.requires_grad else [None] * len(records)
    gradient = Gradient(critic)
    for value, u in zip(forwards, upstream):
        gradient.add([value], [u])
    kept, clipped, clip = [], 0, options["cliprange-value"]
    for own, record, aims in zip(predicted, records, returns):
        for v, m, old, aim in zip(own.tolist(), record["loss_mask"], record["values"], aims):
            if m:
                kept.append(v)
                clipped += (max(min(v, old + clip), old - clip) - aim) ** 2 > (v - aim) ** 2
    metrics = {"loss": float(loss.detach()), "grad_norm": gradient.norm(), "clip_fraction": clipped / len(kept) if kept else 0.0,
               "values_mean": sum(kept) / len(kept) if kept else 0.0}
    return metrics, gradient


def values_and_returns(critic, records, options):
    """Records with values, and what the critic aims at."""
    own = oracle.values(critic, records)
    records = [{**r, "values": r.get("values", v)} for r, v in zip(records, own, strict=True)]
    estimated = [objective.gae([r], options)[1][0] if "reward" in r else None for r in records]
    return records, [r.get("returns", e) for r, e in zip(records, estimated)]


def run(case, model, critic=None):
    """Trains both in place. Returns the metrics of each step and what belongs to the last one."""
    options, training = objective.resolve(case.objective), case.training
    options["value-agg-mode"] = case.objective.get("loss-agg-mode", "token-mean")
    router = Router(model)
    records, returns = case.records, None
    settings = dict(
        betas=tuple(float(beta) for beta in training["betas"].split(",")), eps=training["eps"], weight_decay=training["weight-decay"],
        max_grad_norm=training["max-grad-norm"], warmup_steps=training.get("warmup-steps", 0),
        decay_matrices_only=training.get("decay-matrices-only", False))
    actor_update = oracle.AdamW(model, lr=training["lr"], **settings)
    critic_update = oracle.AdamW(critic, lr=training["critic-lr"], **settings) if critic else None
    batches = oracle.mini_batches(records, training.get("mini-batch-size", 0))
    has_steps = all("step" in r for r in records)
    steps = []
    if critic and not has_steps:
        records, returns = values_and_returns(critic, records, options)
    advantages = None if critic and has_steps else objective.advantages(records, options)
    schedule = [batch for _ in range(training.get("epochs", 1)) for batch in batches]
    for indices in schedule[:training.get("steps") or None]:
        batch = [records[i] for i in indices]
        if critic and has_steps:
            batch, aims = values_and_returns(critic, batch, options)
            own = objective.advantages(batch, options)
        else:
            aims, own = [returns[i] for i in indices] if critic else None, [advantages[i] for i in indices]
        step = {"indices": indices, "batch": batch}
        if critic:
            step["critic"], step["critic_gradient"] = value_step(critic, batch, aims, options)
            step["critic"]["lr"] = critic_update.step(step["critic_gradient"].sum)
        step["metrics"], step["gradient"], step["logprobs"], step["entropies"] = policy_step(
            model, router, batch, own, options, case.router)
        step["metrics"]["lr"] = actor_update.step(step["gradient"].sum)
        steps.append(step)
    return steps
