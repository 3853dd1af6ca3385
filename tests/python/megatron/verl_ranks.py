"""One rank of verl's real Megatron worker, its own engine beside the shared one: verl_ranks.py FOLDER RANK WORLD NAME...

Writes to FOLDER/RANK.json. Two updates each, with PPO, KL and entropy; old log-probs before each update.
"""

import contextlib
import functools
import io
import json
import logging
import os
import sys
from pathlib import Path

FOLDER, RANK, WORLD, NAMES = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
os.environ.update(RANK=str(RANK), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(RANK), MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ESPALIER_SCHEDULE="auto")

import verl_world  # noqa: E402  before megatron
import torch  # noqa: E402
import verl_actor  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import McoreActorConfig, TrainingWorkerConfig  # noqa: E402
from verl.workers.engine_workers import TrainingWorker  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402
from verl.workers.utils.padding import no_padding_2_padding  # noqa: E402

import espalier.verl  # noqa: E402
from layouts import Layouts, watched  # noqa: E402
from steps import worst  # noqa: E402

torch.set_num_threads(1)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
CASES = {
    1: {"one rank": {}, "full recompute": dict(transformer=FULL), "verify": dict(verify=True), "nothing shared": dict(apart=True),
        "an option of FSDP": dict(trunk_state="recompute")},
    2: {"dp": {}, "tp": dict(tensor_model_parallel_size=2), "pp": dict(pipeline_model_parallel_size=2),
        "vpp": dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
                    transformer=dict(overlap_p2p_comm=True, batch_p2p_comm=False))},
    4: {"tp pp tied": dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, tied=True)},
}


class Notes(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def worker_of(vendor, folder, **settings):
    os.environ.pop("VERL_ENGINE_VENDOR", None)
    if vendor:
        os.environ["VERL_ENGINE_VENDOR"] = vendor
    with contextlib.redirect_stdout(io.StringIO()):
        worker = TrainingWorker(TrainingWorkerConfig(model_type="language_model", **verl_world.configurations(folder, **settings)))
        worker.reset()
    config = McoreActorConfig(rollout_n=4, use_dynamic_bsz=True, entropy_coeff=.01, use_kl_loss=True)
    worker.set_loss_fn(functools.partial(ppo_loss, config=config))
    return worker


def updates(worker, apart):
    """Gradients of two updates, old log-probs, weights, losses."""
    engine = worker.engine
    rows = verl_actor.rollouts(groups=3, n=4, prompt=60, response=10, seed=5 + engine.get_data_parallel_rank())
    if apart:
        rows = [row for at, row in enumerate(verl_actor.rollouts(groups=4, n=1, prompt=40, response=10))]
    named = lambda: [(f"{at} {name}", p) for at, chunk in enumerate(engine.module) for name, p in chunk.named_parameters()]
    grads, scores, losses, own_step = [], [], [], engine.optimizer.step

    def step():
        grads.append({name: p.main_grad.detach().clone() for name, p in named()})
        return own_step()

    engine.optimizer.step = step
    for _ in range(2):
        scored = worker.infer_batch(verl_actor.mini_batch(rows, torch.float64, compute_loss=False, calculate_entropy=True, global_token_num=None))
        data = verl_actor.mini_batch(rows, torch.float64, mini_batch_size=len(rows) * engine.get_data_parallel_size(), epochs=1, seed=1,
                                     dataloader_kwargs={"shuffle": False})
        if scored is not None and "log_probs" in scored.keys():
            old = no_padding_2_padding(scored["log_probs"], data)
            mask = data["response_mask"].to_padded_tensor(0).bool() if data["response_mask"].is_nested else data["response_mask"].bool()
            scores += [old[mask], no_padding_2_padding(scored["entropy"], data)[mask]]
            data["old_log_probs"] = old + .05 * torch.sin(torch.arange(old.numel(), dtype=torch.float64).view_as(old))
        out = worker.train_mini_batch(data)
        if out is not None:
            metrics = tu.get(out, "metrics")
            losses.append({name: metrics[name] for name in metrics if name in ("loss", "espalier/rows_run", "espalier/rows_without_sharing")})
    return grads, scores, {name: p.detach().clone() for name, p in named()}, losses


def run(folder, notes, apart=False, tied=False, verify=False, trunk_state="keep", **settings):
    logging.disable(logging.NOTSET)  # cpu.py
    espalier.verl.register(verify=verify, trunk_state=trunk_state)
    notes.lines.clear()
    plain, shared = ([*updates(worker, apart), worker.engine] for worker in (worker_of(vendor, folder / str(tied), **settings) for vendor in (None, "espalier")))
    distance = lambda a, b: max((float((x - y).abs().max()) for x, y in zip(a, b)), default=0.0)
    return dict(gradients=[worst(a, b) for a, b in zip(plain[0], shared[0])], weights=worst(plain[2], shared[2]), scores=distance(plain[1], shared[1]),
                scored=len(shared[1]), same=all(torch.equal(plain[2][name], x) for name, x in shared[2].items()), rows=shared[4].shared_rows,
                losses=[plain[3], shared[3]], notes=list(notes.lines), engine=type(shared[4]).__name__)


def main():
    notes, layouts = Notes(), Layouts(FOLDER, RANK, WORLD)
    logging.getLogger("espalier").addHandler(notes)
    if RANK == 0:
        for tied in (False, True):
            verl_world.write_model(FOLDER / str(tied), tied)
    results = {}
    for name in NAMES:
        with watched(name, RANK):
            layouts.meet()
            results[name] = run(FOLDER, notes, **CASES[WORLD][name])
            layouts.end()
    (FOLDER / f"{RANK}.json").write_text(json.dumps(results, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x)))


if __name__ == "__main__":
    main()
