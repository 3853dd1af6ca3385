"""The same step dense, by transformers alone: what `verify=True` compares with.

Floor of a parameter: the relative distance of two dense runs, the second of which takes the rollouts one by one in reverse, with
its embeddings moved by one rounding step of the model's type (of float32 in a float64 model, whose norms and rotary tables
transformers keeps in float32); and at least the root mean square of all parameters' floors. Shared may be twice as far from dense
as that.
"""

import contextlib
import weakref
from dataclasses import dataclass, field

import torch

from espalier.errors import Error
from espalier.hf import attention, ranks
from espalier.hf.checks import base_model, unwrapped
from espalier.hf.routers import RouterLoss
from espalier.hf.step import Wave, backward
from espalier.hf.head import TokenStatistics

_verified = weakref.WeakSet()


def is_first(model):
    return unwrapped(model) not in _verified


@dataclass(frozen=True)
class Verification:
    """The fields of `espalier verify`. `str()` is the table."""
    verdict: str
    worst: dict
    parameters: list = field(repr=False)
    loss: dict

    def __str__(self):
        rows = sorted(self.parameters, key=lambda p: -p["ratio"])[:12]
        width = max([len(row["name"]) for row in rows] + [9])
        lines = [f"{'parameter':{width}}  {'error':>9}  {'floor':>9}  {'of allowed':>10}"]
        lines += [f"{r['name']:{width}}  {r['error']:9.2e}  {r['floor']:9.2e}  {r['ratio']:10.2f}" for r in rows]
        return "\n".join(lines + [f"{self.verdict}: {len(self.parameters)} parameters, loss dense {self.loss['dense']:.9g}, "
                                  f"shared {self.loss['shared']:.9g}"])


def begin(model, router=None):
    """Sets the gradients of before aside, so that the step's own can be compared."""
    return _Comparison(model, router)


@contextlib.contextmanager
def _nudged(embedding):
    """Every output of the look-up is one relative rounding step away, up or down by its place."""

    def move(_, __, out):
        signs = torch.arange(out.numel(), device=out.device).remainder_(3).sub_(1).view_as(out)
        step = max(torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps)
        return out * (1 + step * signs).to(out.dtype)

    handle = embedding.register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


class _Comparison:
    def __init__(self, model, router=None):
        self.model, self.router = model, router
        self.named = [(name, p) for name, p in unwrapped(model).named_parameters() if p.requires_grad]
        self.before = self._take()

    def _take(self):
        grads = {name: p.grad for name, p in self.named}
        for _, p in self.named:
            p.grad = None
        return grads

    def put_back(self):
        """The gradients of before, where the step itself failed."""
        for name, p in self.named:
            p.grad = self.before[name]

    def compare(self, shared_loss, dense, again):
        """`dense()` and `again()` run the same step another way and return its loss; embeddings are moved for the second. Returns the
        table; then `.grad` is what it was plus the step's. Raises where shared is too far from dense."""
        shared = self._take()
        dense_loss = dense()
        wanted = self._take()
        with _nudged(base_model(self.model).get_input_embeddings()):
            again()
        other = self._take()
        for name, p in self.named:
            parts = [g for g in (self.before[name], shared[name]) if g is not None]
            p.grad = None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]
        table = _table([(name, shared[name], wanted[name], other[name]) for name, _ in self.named], shared_loss, dense_loss)
        if table.verdict != "pass":
            worst = table.worst
            raise Error("verification", worst["parameter"], f"within {worst['allowed']:.2e} of the dense step's gradient",
                        f"{worst['error']:.2e}\n{table}", "Please report this", 6)
        _verified.add(unwrapped(self.model))
        return table

    def compare_dense(self, rollouts, loss, temperature, shared_loss):
        """With the same rollouts dense: two at a time, then one by one in reverse."""
        order = list(range(len(rollouts)))
        pairs, singles = [order[i:i + 2] for i in range(0, len(order), 2)], [[i] for i in reversed(order)]
        run = lambda batches: lambda: self._dense(rollouts, loss, temperature, batches)
        return self.compare(shared_loss, run(pairs), run(singles))

    def _dense(self, rollouts, loss, temperature, batches):
        router = self.router and RouterLoss(self.model, rollouts, self.router.coef, self.router.scope)
        run = _DenseRun(self.model, rollouts, loss, temperature, router)
        program = [("F", lambda batch=batch: run.count(batch)) for batch in batches if router]
        program += [("", router.settle)] if router else []
        program += [step for batch in batches for step in (("F", lambda batch=batch: run.forward(batch)), ("B", run.backward))]
        inner = ranks.without_replicas(self.model)
        base = base_model(self.model)
        was = base.config._attn_implementation
        if was == attention.NAME:
            base.set_attn_implementation("sdpa")
        try:
            with torch.compiler.set_stance("force_eager"):  # a compiled model would not see the hook that moves its embeddings
                ranks.run(inner, program, run.device)
        finally:
            if was == attention.NAME:
                base.set_attn_implementation(was)
        return run.total


class _DenseRun:
    def __init__(self, model, rollouts, loss, temperature, router=None):
        self.model, self.router = ranks.without_replicas(model), router
        self.rollouts, self.loss, self.temperature = rollouts, loss, temperature
        self.device = ranks.device_of(model)
        self.total, self.pending = 0.0, None

    def _call(self, batch):
        """Padded on the right; a causal model's earlier rows do not see the padding. Also the rows of each rollout."""
        r = self.rollouts
        longest = max(int(r.lengths[i]) for i in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, i in enumerate(batch):
            ids[row, :int(r.lengths[i])] = torch.from_numpy(r.tokens(i, 0, int(r.lengths[i])).astype("int64"))
        result = self.model(input_ids=ids.to(self.device), use_cache=False, **({"output_router_logits": True} if self.router else {}))
        return result, longest, [(row * longest, row * longest + int(r.lengths[i]), [i]) for row, i in enumerate(batch)]

    @torch.no_grad()
    def count(self, batch):
        result, _, runs = self._call(batch)
        self.router.count(RouterLoss.logits_of(result), runs)

    def forward(self, batch):
        r = self.rollouts
        result, longest, runs = self._call(batch)
        logits = result.logits
        place, target, owner, position = [], [], [], []
        for row, i in enumerate(batch):
            prompt, length = len(r.prompts[i]), len(r.responses[i])
            place += [row * longest + prompt - 1 + t for t in range(length)]
            target += r.responses[i].tolist()
            owner += [i] * length
            position += list(range(length))
        place, target, owner, position = (torch.tensor(x, dtype=torch.long, device=self.device) for x in (place, target, owner, position))
        values = TokenStatistics.apply(logits.flatten(0, 1), place, target, float(self.temperature), True)
        loss = self.loss(Wave(list(batch), owner, position, *values))
        self.total += float(loss.detach())
        if self.router:
            loss = loss + self.router.term(RouterLoss.logits_of(result), runs)
        self.pending = loss + logits.sum() * 0 if loss.requires_grad else None

    def backward(self):
        backward(self.pending)
        self.pending = None


def _norm(x):
    if x is None:
        return 0.0
    full = x.full_tensor() if hasattr(x, "full_tensor") else x
    return float(full.double().norm())


def _table(grads, shared_loss, dense_loss):
    rows = []
    for name, shared, dense, other in grads:
        if dense is None and shared is None:
            continue
        zero = torch.zeros_like(dense if dense is not None else shared)
        shared, dense, other = (zero if g is None else g for g in (shared, dense, other))
        size = _norm(dense)
        relative = lambda x: _norm(x - dense) / size if size > 0 else _norm(x)
        rows.append(dict(name=name, error=relative(shared), floor=relative(other)))
    mean = (sum(row["floor"] ** 2 for row in rows) / max(1, len(rows))) ** 0.5
    for row in rows:
        row["floor"] = max(row["floor"], mean)
        row["allowed"] = 2 * row["floor"]
        row["ratio"] = row["error"] / row["allowed"] if row["allowed"] > 0 else float("inf") if row["error"] > 0 else 0.0
    worst = max(rows, key=lambda row: row["ratio"], default=dict(name="", error=0.0, floor=0.0, allowed=0.0, ratio=0.0))
    return Verification("pass" if worst["ratio"] <= 1 else "fail", dict(worst, parameter=worst["name"]), rows,
                        dict(dense=dense_loss, shared=shared_loss))
