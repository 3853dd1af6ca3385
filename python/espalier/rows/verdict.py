"""The verdict on a shared step beside two dense runs of the same step.

The floor of a parameter with n of the N trained elements and gradient g_p is the distance of both dense gradients, but at least d |g_p| / |g| and at
least d sqrt(n / N), where d is the distance over all parameters: rounding that cancels in a nearly zero gradient is as large as elsewhere. Shared
may differ from dense by twice the floor. Two dense runs may be closer to each other than most pairs, for example if no token's experts differ.
So if shared is too far, up to MORE_DRAWS further dense runs, with embeddings moved in other patterns, raise the floor.
"""

import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from espalier.errors import Error

MORE_DRAWS = 6


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


def compared(draw, shared_loss, dense_loss, everywhere=None, agreed=bool):
    """Returns the table. `draw(number)` returns [(name, shared, dense, second dense run)], with another second run for every number.
    `agreed(passed)`: whether all ranks that draw together have passed."""
    squares = None
    for number in range(1 + MORE_DRAWS):
        grads = draw(number)
        found = _squares(grads, everywhere)
        if squares is not None:
            found[:, 1] = torch.maximum(found[:, 1], squares[:, 1])
        squares, table = found, _table([name for name, *_ in grads], found, shared_loss, dense_loss)
        if agreed(table.verdict == "pass"):
            break
    return table


def judged(draw, shared_loss, dense_loss, everywhere=None):
    """`compared`, which raises `Error` if a parameter is too far from dense."""
    table = compared(draw, shared_loss, dense_loss, everywhere)
    demand(table)
    return table


def demand(table):
    """Raises `Error` unless the table passes."""
    if table.verdict != "pass":
        worst = table.worst
        raise Error("verification", worst["parameter"], f"within {worst['allowed']:.2e} of the dense step's gradient",
                    f"{worst['error']:.2e}\n{table}", "Please report this", 6)


def failed_elsewhere():
    """The `Error` of a rank whose own step did not fail, if a step failed on another rank with the same model."""
    return Error("verification", "another rank", "gradients within rounding of the dense step's on every rank", "a difference on that rank",
                 "See its error", 6)


def _local(x):
    return x.to_local() if hasattr(x, "to_local") else x


def _squares(grads, everywhere):
    """float64 [P, 5]: the sum of squares of shared - dense, of other - dense, and of dense; the number of elements; 1 if there is a gradient. If
    parameters are sharded (`everywhere`), these are summed over the ranks."""
    out = torch.zeros(len(grads), 5, dtype=torch.float64)
    for row, (_, *three) in zip(out, grads):
        held = [_local(g).double() for g in three if g is not None]
        if held:
            shared, dense, other = (torch.zeros_like(held[0]) if g is None else _local(g).double() for g in three)
            row.copy_(torch.stack([(shared - dense).square().sum(), (other - dense).square().sum(), dense.square().sum(),
                                   dense.new_tensor(dense.numel()), dense.new_ones(())]))
    if everywhere is not None:
        device, group = everywhere
        out = out.to(device)
        dist.all_reduce(out, group=group)
    return out.cpu()


def _table(names, squares, shared_loss, dense_loss):
    _, apart, whole, elements, _ = squares.sum(0).tolist()
    rows = []
    for name, (error, floor, size, count, held) in zip(names, squares.tolist()):
        if held:
            floor = max(floor, apart * size / whole if whole else 0.0, apart * count / elements if elements else 0.0)
            relative = lambda x: (x / size if size > 0 else x) ** 0.5
            rows.append(dict(name=name, error=relative(error), floor=relative(floor)))
    for row in rows:
        row["allowed"] = 2 * row["floor"]
        row["ratio"] = row["error"] / row["allowed"] if row["allowed"] > 0 else float("inf") if row["error"] > 0 else 0.0
        if not row["error"] < float("inf"):  # NaN passes no comparison
            row["ratio"] = float("inf")
    worst = max(rows, key=lambda row: row["ratio"], default=dict(name="", error=0.0, floor=0.0, allowed=0.0, ratio=0.0))
    return Verification("pass" if worst["ratio"] <= 1 else "fail", dict(worst, parameter=worst["name"]), rows,
                        dict(dense=dense_loss, shared=shared_loss))


@contextlib.contextmanager
def nudged(embedding, pattern=0):
    """Context manager: outputs of the embedding are moved up or down by one relative rounding step, or left, by their index and `pattern`. The
    step is that of the coarsest type among the model's, autocast's and float32: in a float64 model transformers keeps norms and rotary tables
    in float32."""

    def move(_, __, out):
        signs = torch.arange(out.numel(), device=out.device).remainder_(3 + 2 * pattern).remainder_(3).sub_(1).view_as(out)
        kinds = [out.dtype, torch.float32]
        if torch.is_autocast_enabled(out.device.type):
            kinds.append(torch.get_autocast_dtype(out.device.type))
        step = max(torch.finfo(kind).eps for kind in kinds)
        return out * (1 + step * signs).to(out.dtype)

    handle = embedding.register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()
