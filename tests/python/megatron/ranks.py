"""One rank of the cases: ranks.py FOLDER RANK WORLD NAME... Writes each case's distances from the unmodified model to FOLDER/RANK.json."""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import cpu  # noqa: F401  before megatron
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import espalier.megatron
from cases import CASES
from models import chunks_of, configuration
from steps import Plain, gradients, loss_of_wave, rollouts, worst

FOLDER, RANK, WORLD, NAMES = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
torch.set_num_threads(1)


def begin(tp=1, pp=1, cp=1, ep=1, vpp=None, **_):
    parallel_state.initialize_model_parallel(tp, pp, vpp, context_parallel_size=cp, expert_model_parallel_size=ep,
                                             **(dict(expert_tensor_parallel_size=1) if ep > 1 else {}))


def run(kind="nested", more=0, wave=14, dtype="float64", tied=False, position="rope", **case):
    begin(**case)
    config = configuration(dtype=DTYPES[dtype], **case)
    records = rollouts(kind, more=more)
    chunks = chunks_of(config, tied=tied, position=position)
    how = dict(multiple=case.get("pp", 1) if case.get("vpp") else 1, pad=case.get("tp", 1) if case.get("sp") else 1)
    plain = Plain(records, **how).run(chunks)
    wanted = gradients(chunks)
    names = [list(chunk.state_dict()) for chunk in chunks]
    espalier.megatron.install(chunks)
    assert names == [list(chunk.state_dict()) for chunk in chunks], "install changes the names of a state dict"
    result = espalier.megatron.phased_step(chunks, records, loss_of_wave, wave_tokens=wave)
    found = gradients(chunks)
    again = Plain(records, **how).run(chunks)
    out = dict(gradient=worst(wanted, found), tensors=len(wanted), after=worst(wanted, gradients(chunks)), schedule=result.schedule, shared=kind != "apart",
               loss=abs(result.loss - from_last(plain.total)) / abs(result.loss), rows=[result.rows, result.rows_without_sharing])
    assert again.total == plain.total
    scores = espalier.megatron.score(chunks, records, wave_tokens=wave, entropies=True)
    pairs = [(a, b) for which, of in enumerate((scores.logprobs, scores.entropies)) for a, b in zip(of, [plain.found[i][which] for i in sorted(plain.found)])]
    out["scores"], out["scored"] = max((float((a - b).abs().max()) for a, b in pairs), default=0.0), len(pairs)
    if dtype == "float32":
        wide = chunks_of(configuration(**case), tied=tied, position=position)
        Plain(records, **how).run(wide)
        exact = gradients(wide)
        out["floors"] = [worst(exact, {name: x.double() for name, x in of.items()}) for of in (found, wanted)]
    return out


def from_last(total):
    told = torch.tensor([total], dtype=torch.float64)
    dist.all_reduce(told, group=parallel_state.get_pipeline_model_parallel_group())
    return float(told)


def main():
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=RANK, world_size=WORLD)
    results = {}
    for name in NAMES:
        start = time.time()
        try:
            results[name] = run(**CASES[WORLD][name])
        except BaseException:  # the other ranks wait for this one: end at once
            print(f"rank {RANK}, case {name}\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        results[name]["seconds"] = time.time() - start
        parallel_state.destroy_model_parallel()
    (FOLDER / f"{RANK}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
