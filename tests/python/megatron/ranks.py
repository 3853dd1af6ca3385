"""One rank of the cases: ranks.py FOLDER RANK WORLD NAME... Writes each case's distances from the unmodified model to FOLDER/RANK.json."""

import contextlib
import json
import sys
import time
import types
from pathlib import Path

import cpu  # noqa: F401  before megatron
import recurrent_kernels  # noqa: F401
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

import espalier.megatron.slime
import trainer_step
from espalier.errors import Error
from adapters import adapt
from cases import CASES
from faults import FAULTS
from layouts import Layouts, watched
from models import chunks_of, configuration, global_name, logged_router_losses
from optimizers import moves, wrapped
from steps import Plain, gradients, loss_of_wave, replay, rollouts, with_recorded_experts, worst

FOLDER, RANK, WORLD, NAMES = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
ROOT = Path(__file__).resolve().parents[3]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
LAYOUTS = Layouts(FOLDER, RANK, WORLD)
torch.set_num_threads(1)


def over_context(found, config):
    """Gradients summed over the context parallel ranks as Megatron's DDP sums them."""
    if config.context_parallel_size > 1:
        for grad in found.values():
            dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
            grad /= 1 if config.calculate_per_token_loss else config.context_parallel_size
    return found


def over_tensor(logged):
    """Megatron sums what tensor parallel ranks have logged."""
    group = parallel_state.get_tensor_model_parallel_group()
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, logged, group)
    return [{name: sum(one[at][name] for one in everyone) for name in logged[at]} for at in range(len(logged))]


def layout_of_plain(records, padding_mask=False, tp=1, pp=1, vpp=None, sp=False, ep=1, **_):
    """How the unmodified model's micro-batches must be, so that its schedule and other ranks' experts agree."""
    most = [None] * WORLD
    dist.all_gather_object(most, len(records))
    return dict(count=max(most) if ep > 1 else 0, multiple=pp if vpp else 1, pad=tp if sp else 1, padding_mask=padding_mask)


def loads(chunks):
    """The tokens that each expert got, by which its bias moves; cleared."""
    found = {global_name(chunk, name): x.clone() for chunk in chunks for name, x in chunk.named_buffers() if name.endswith("local_tokens_per_expert")}
    for chunk in chunks:
        for name, x in chunk.named_buffers():
            if name.endswith("local_tokens_per_expert"):
                x.zero_()
    return found


def in_another_order(**case):
    """Rank 1 gives its rollouts in another order than the ranks of its model replica."""
    records = rollouts("flat")
    chunks = chunks_of(configuration(**case))
    try:
        espalier.megatron.phased_step(chunks, records[::-1] if RANK == 1 else records, loss_of_wave)
    except Error as error:
        return dict(error=[error.where, error.exit_code])


def refusal(where, position="rope", **case):
    """What `check` says of a layout."""
    try:
        espalier.megatron.check(chunks_of(configuration(**case), position=position))
    except Error as error:
        return dict(error=[error.where, error.kind, error.exit_code], named=where.rpartition(".")[2] in error.remedy)


def verified(kind="nested", wave=14, ddp=None, tied=False, fault="gradients_of_values_dropped", recorded=False, **case):
    """A first step, the same again, one of another regime; then one of a third regime with a fault on the last rank alone."""
    records = {kind: rollouts(kind, seed=1 + parallel_state.get_data_parallel_rank()) for kind in ("nested", "flat", "stem", "apart")}
    chunks = chunks_of(configuration(dtype=torch.float32, **case), tied=tied)
    if recorded:
        records = {kind: with_recorded_experts(of_kind, chunks[0].config) for kind, of_kind in records.items()}
    wrapper = wrapped(chunks, ddp)[0] if ddp else chunks
    step = lambda kind, wave: espalier.megatron.phased_step(wrapper, records[kind], loss_of_wave, wave_tokens=wave)
    taken = lambda: {name: (p.main_grad if ddp else p.grad).clone() for chunk in chunks for name, p in chunk.named_parameters() if ddp or p.grad is not None}

    def cleared():
        for chunk in wrapper:
            if ddp:
                chunk.zero_grad_buffer()
            for p in chunk.parameters():
                p.grad = None

    def stepped(kind, wave):
        cleared()
        return step(kind, wave)

    stepped("nested", wave)
    unverified = taken()
    espalier.megatron.install(wrapper, verify=True)
    results = [stepped("nested", wave)]
    same = all(torch.equal(x, unverified[name]) for name, x in taken().items())
    results += [stepped("nested", wave), stepped("stem", 6)]
    before, error = taken(), None
    try:
        with FAULTS[fault]() if RANK == WORLD - 1 else contextlib.nullcontext():
            step("flat", 6 // case.get("cp", 1))
    except Error as caught:
        error = [caught.kind, caught.where]
    return dict(tables=[one.verification and one.verification.verdict for one in results], verified=[one.verified for one in results], same=same,
                error=error, restored=all(torch.equal(x, before[name]) for name, x in taken().items()),
                floor=results[0].verification.worst["floor"])


def trained(apart=False, values=3, size=2, ddp=None, verify=False, **case):
    """A trainer's own loop: its function as it is, and with shared prompts."""
    chunks = chunks_of(configuration(**case), packed=True)
    rank, own = parallel_state.get_data_parallel_rank(), get_forward_backward_func()
    found = trainer_step.batches(trainer_step.rollouts(groups=3 + rank, n=4 - rank, seed=1 + rank, apart=apart), size, trainer_step.pad_of(chunks[0].config))
    shared = espalier.megatron.forward_backward(own)
    reports = []
    train = lambda function: lambda chunks: reports.append(trainer_step.train(function, chunks, found, values))
    if ddp:
        wanted = moves(chunks, ddp, [train(own)])
        again = chunks_of(configuration(**case), packed=True)
        espalier.megatron.install(again)
        taken = moves(again, ddp, [train(shared), train(own), train(shared)])
        chunks, wanted, taken = again, wanted[0], taken[2]
    else:
        train(own)(chunks)
        wanted, logged = gradients(chunks), logged_router_losses()
        espalier.megatron.install(chunks, verify=verify)
        train(shared)(chunks)
        taken = gradients(chunks)
        logged = over_tensor([logged, logged_router_losses()])
    out = dict(gradient=worst(wanted, taken), tensors=len(wanted), rows=list(shared.rows.values()), shared=not apart, after=0.0,
               same=all(torch.equal(wanted[name], taken[name]) for name in wanted), reports=[len(one) for one in reports])
    if not ddp:
        out["logged"] = max([0.0, *(abs(logged[0][name] - value) / abs(value) for name, value in logged[1].items())])
    plain, of_shared = reports[0], reports[-1]
    with torch.no_grad():
        scored = trainer_step.train(shared, chunks, found, values, forward_only=True)
    difference = lambda a, b: max((abs(x - y) for x, y in zip(a["lp"], b["lp"])), default=0.0)
    out["loss"] = max((abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(plain, of_shared)), default=0.0)
    out["scores"], out["scored"] = max((difference(a, b) for other in (of_shared, scored) for a, b in zip(plain, other)), default=0.0), len(scored)
    if not ddp:
        trainer_step.two_calls(own, chunks, found)
        wanted = gradients(chunks)
        trainer_step.two_calls(shared, chunks, found)
        out["unshared"] = worst(wanted, gradients(chunks))
    return out


def in_padded_rows(**case):
    chunks = chunks_of(configuration(**case), packed=True)
    own, found = get_forward_backward_func(), trainer_step.rollouts()
    plain = trainer_step.train_padded(own, chunks, found, 3)
    wanted = gradients(chunks)
    espalier.megatron.install(chunks)
    shared = espalier.megatron.forward_backward(own, first_rows=lambda batch: batch["firsts"])
    reports = trainer_step.train_padded(shared, chunks, found, 3)
    return dict(gradient=worst(wanted, gradients(chunks)), loss=max(abs(a["loss"] - b["loss"]) for a, b in zip(plain, reports)), scores=0.0, scored=1,
                tensors=len(wanted), rows=list(shared.rows.values()), shared=True)


@contextlib.contextmanager
def standing_in(name):
    """Context manager with a module that stands in for a trainer's, which does not import without a GPU. It has Megatron's function."""
    parts = [name.rsplit(".", at)[0] for at in range(name.count("."), -1, -1)]
    absent = [part for part in parts if part not in sys.modules]
    sys.modules.update({part: types.ModuleType(part) for part in absent})
    sys.modules[name].get_forward_backward_func = get_forward_backward_func
    try:
        yield sys.modules[name]
    finally:
        for part in absent:
            del sys.modules[part]


def under_slime(package, **case):
    """The hook of slime and miles."""
    chunks = chunks_of(configuration(**case), packed=True)
    found = trainer_step.batches(trainer_step.rollouts(), 2, trainer_step.pad_of(chunks[0].config))
    with standing_in(f"{package}.backends.megatron_utils.model") as model:
        trainer_step.train(model.get_forward_backward_func(), chunks, found)
        wanted = gradients(chunks)
        for _ in range(2):  # every actor of a process calls it
            espalier.megatron.slime.install()
        trainer_step.train(model.get_forward_backward_func(), chunks, found)
        rows = list(model.get_forward_backward_func().rows.values())
    return dict(gradient=worst(wanted, gradients(chunks)), loss=0.0, scores=0.0, scored=1, tensors=len(wanted), rows=rows, shared=True)


def by_recipe(recipe, module, **case):
    """A recipe of docs/megatron.md as it stands there."""
    page = (ROOT / "docs/megatron.md").read_text().partition(f"### {recipe}\n")[2]
    code, hooks, functions = page.partition("```python\n")[2].partition("```")[0], [], []
    chunks, found = chunks_of(configuration(**case), packed=True), trainer_step.rollouts()
    padded = recipe == "NeMo-RL"
    batches = found if padded else trainer_step.batches(found, 2, 1)
    step = trainer_step.train_padded if padded else trainer_step.train
    with standing_in(module) as train:
        step(train.get_forward_backward_func(), chunks, batches, 3)
        wanted = gradients(chunks)
        exec(code, dict(provider=types.SimpleNamespace(register_pre_wrap_hook=hooks.append)))
        for hook in hooks or [espalier.megatron.install]:
            hook(chunks)
        functions.append(train.get_forward_backward_func())
        step(functions[0], chunks, batches, 3)
    return dict(gradient=worst(wanted, gradients(chunks)), loss=0.0, scores=0.0, scored=1, tensors=len(wanted), rows=list(functions[0].rows.values()),
                shared=True)


def run(ddp=None, another_order=False, verify=False, trainer=False, package=None, recipe=None, refused=None, **case):
    LAYOUTS.begin(**case if refused or verify and not trainer else {**case, "cp": 1})
    if refused:
        return refusal(refused, **case)
    if another_order:
        return in_another_order(**case)
    if trainer == "padded rows":
        return in_padded_rows(**case)
    if recipe:
        return by_recipe(recipe, **case)
    if package:
        return under_slime(package, **case)
    if trainer:
        return trained(ddp=ddp, verify=verify, **case)
    if verify:
        return verified(ddp=ddp, **case)
    return with_optimizer(ddp, **case) if ddp else gradients_of(**case)


def with_optimizer(ddp, kind="nested", more=0, wave=14, tied=False, lora=0, **case):
    """Weights after a step of the optimizer: shared, then dense, then shared, through one model."""
    rank = parallel_state.get_data_parallel_rank()
    records = rollouts(kind, seed=1 + rank, more=more * rank)
    how = layout_of_plain(records, **case)
    dense = lambda chunks: Plain(records, **how).run(chunks)
    shared = lambda chunks: results.append(espalier.megatron.phased_step(chunks, records, loss_of_wave, wave_tokens=wave))
    results = []
    make = lambda: adapted(chunks_of(configuration(**case), tied=tied), lora)
    wanted, chunks = moves(make(), ddp, [dense, dense]), make()
    espalier.megatron.install(chunks)
    found = moves(chunks, ddp, [shared, dense, shared])
    return dict(gradient=max(worst(wanted[0], found[0]), worst(wanted[0], found[2])), tensors=len(wanted[0]), after=worst(wanted[1], found[1]), loss=0.0,
                scores=0.0, scored=0, shared=True, rows=[results[0].rows, results[0].rows_without_sharing])


def adapted(chunks, rank):
    if rank:
        adapt(chunks, rank)
    return chunks


def gradients_of(kind="nested", more=0, wave=14, dtype="float64", tied=False, position="rope", cp=1, lora=0, fault=None,
                 padding_mask=False, tolerance=0.0, recorded=False, **case):
    """Megatron's local attention has no context parallelism: with cp > 1 the unmodified model runs whole on every rank."""
    rank = parallel_state.get_data_parallel_rank() // cp
    records = rollouts(kind, seed=1 + rank, more=more * rank)
    make = lambda cp=1, dtype=DTYPES[dtype]: adapted(chunks_of(configuration(dtype=dtype, cp=cp, **case), tied=tied, position=position), lora)
    how, chunks = layout_of_plain(records, padding_mask, **case), make()
    if recorded:
        records = with_recorded_experts(records, chunks[0].config)
    plain = Plain(records, **how).run(chunks)
    wanted, logged, loaded = gradients(chunks), [logged_router_losses()], loads(chunks)
    if cp > 1:
        LAYOUTS.begin(cp=cp, **case)
        chunks = make(cp)
    names = [list(chunk.state_dict()) for chunk in chunks]
    if recorded:
        chunks[0].config.moe_enable_routing_replay = False
        replay(chunks[0], {}, 1)
    espalier.megatron.install(chunks)
    assert names == [list(chunk.state_dict()) for chunk in chunks], "install changes the names of a state dict"
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        result = espalier.megatron.phased_step(chunks, records, loss_of_wave, wave_tokens=wave)
    found = over_context(gradients(chunks), chunks[0].config)
    logged = over_tensor([*logged, logged_router_losses()])
    out = dict(gradient=worst(wanted, found), tolerance=tolerance, tensors=len(wanted), schedule=result.schedule, shared=kind != "apart",
               loss=abs(result.loss - from_last(plain.total)) / abs(result.loss), rows=[result.rows, result.rows_without_sharing])
    assert logged[0].keys() == logged[1].keys()
    out["loads"] = cp > 1 or all(torch.equal(x, loaded[name]) for name, x in loads(chunks).items())
    if cp == 1:
        out["logged"] = max([0.0, *(abs(logged[0][name] - value) / abs(value) for name, value in logged[1].items())])  # kept in float32
        assert Plain(records, **how).run(chunks).total == plain.total
        out["after"] = worst(wanted, gradients(chunks))
    scores = espalier.megatron.score(chunks, records, wave_tokens=wave, entropies=True)
    pairs = [(a, b) for which, of in enumerate((scores.logprobs, scores.entropies)) for a, b in zip(of, [plain.found[i][which] for i in sorted(plain.found)])]
    out["scores"], out["scored"] = max((float((a - b).abs().max()) for a, b in pairs), default=0.0), len(pairs)
    if dtype == "float32":
        wide = make(dtype=torch.float64)
        Plain(records, **how).run(wide)
        exact = gradients(wide)
        out["floors"] = [worst(exact, {name: x.double() for name, x in of.items()}) for of in (found, wanted)]
    return out


def from_last(total):
    told = torch.tensor([total], dtype=torch.float64)
    dist.all_reduce(told, group=parallel_state.get_pipeline_model_parallel_group())
    return float(told)


def main():
    results, written = {}, FOLDER / f"{RANK}.json"
    for name in NAMES:
        start = time.process_time()
        with watched(name, RANK):
            results[name] = run(**CASES[WORLD][name])
            logged_router_losses()
        results[name]["seconds"] = time.process_time() - start
        written.with_suffix(".new").write_text(json.dumps(results))  # a later case may end this process
        written.with_suffix(".new").replace(written)
    LAYOUTS.end()


if __name__ == "__main__":
    main()
