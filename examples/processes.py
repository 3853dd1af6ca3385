"""A policy update on several processes: every process runs its own groups with shared prompts, DDP averages the gradients.

    torchrun --nproc-per-node 2 examples/processes.py [--steps 2]

A small random model and random rollouts, so that it runs anywhere in seconds; on GPUs it takes one GPU a process. Every process
loads the same model and takes whole groups, so that no prompt is computed twice.
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from plain_loop import advantages_of, random_records, small_model
from torch.nn.parallel import DistributedDataParallel

import espalier.hf


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()

    model = DistributedDataParallel(small_model().to(device))
    random.seed(0)
    n = 8
    records = random_records(groups=2 * processes, responses=n)
    mine = [record for i, record in enumerate(records) if i // n % processes == rank]  # whole groups
    advantages = advantages_of(mine).to(device)
    tokens = sum(len(record["response_ids"]) for record in records)  # of all processes

    def loss(wave):  # DDP takes the mean over processes; the factor makes it the sum
        ratio = (wave.logprobs - wave.logprobs.detach()).exp()
        return -(ratio * advantages[wave.rollout]).sum() / tokens * processes

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(arguments.steps):
        result = espalier.hf.phased_step(model, mine, loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # equal on every process
        optimizer.step()
        optimizer.zero_grad()
        line = f"rank {rank}, step {step}: {result.rows} rows run instead of {result.rows_without_sharing}, gradient norm {norm:.6f}\n"
        print(line, end="", flush=True)  # one write, so that lines of two processes stay whole
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
