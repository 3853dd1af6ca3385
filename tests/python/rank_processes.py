"""Processes of one test that meet each other. They are forks of a process that has imported what most of them need: the imports of
TRL's trainers alone take five seconds of a processor in every process."""

import functools
import json
import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
spent = 0.0  # seconds of processors of ranks that have ended, which are no children of this process
IMPORTED = ["torch", "transformers", "torch.distributed.fsdp", "datasets", "trl.trainer.grpo_trainer"]  # what is not there is passed over


@functools.cache
def forks():
    """The context of the process that forks; its libraries read the number of threads when they are loaded."""
    context, before = multiprocessing.get_context("forkserver"), os.environ.get("OMP_NUM_THREADS")
    context.set_forkserver_preload(IMPORTED)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        first = context.Process(target=time.sleep, args=(0,))  # its end comes behind the imports, which no rank's patience shall pay for
        first.start()
        first.join()
    finally:
        os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)
    return context


def run_program(path, words, environment, output):
    """In a fork: python PATH WORDS. What it prints goes to the file `output`."""
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(path.parent))
    end = os._exit

    def note_seconds_and_end(code):
        times = os.times()
        Path(f"{output}.seconds").write_text(str(times.user + times.system + times.children_user + times.children_system))
        end(code)

    os._exit = note_seconds_and_end  # every way to end comes here, but a signal
    runpy.run_path(str(path), run_name="__main__")


def run_ranks(folder, program, words, patience, environments=None):
    """Runs PROGRAM WORDS, a list of words for each of the ranks that run beside each other, for at most `patience` seconds. All must exit
    with 0."""
    count = len(words)
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(sys.path))
    outputs = [folder / f"output_{rank}.txt" for rank in range(count)]
    ranks = [forks().Process(target=run_program, args=(HERE / program, [str(word) for word in words[rank]],
                                                       environment | (environments[rank] if environments else {}), outputs[rank]))
             for rank in range(count)]
    end = time.monotonic() + patience
    try:
        for rank, output in zip(ranks, outputs):
            output.touch()
            rank.start()
        for rank in ranks:
            rank.join(max(0., end - time.monotonic()))
        codes = [rank.exitcode for rank in ranks]  # None: still running
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()
        global spent
        spent += sum(float(file.read_text()) for file in (Path(f"{output}.seconds") for output in outputs) if file.is_file())
    assert codes == [0] * count, "\n".join(f"rank {rank}, exit {code}:\n{output.read_text(errors='replace')[-6000:]}"
                                           for rank, (code, output) in enumerate(zip(codes, outputs)))


def written_by_ranks(program, folder, count, words, patience, writers=None):
    """What the processes wrote to FOLDER/RANK.json, the first `writers` of them or all: PROGRAM FOLDER RANK WORDS."""
    run_ranks(folder, program, [[folder, rank, *words] for rank in range(count)], patience)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(writers or count)]


def run_under_accelerate(folder, program, *words, patience=600):
    """Runs PROGRAM FOLDER WORDS as both of two ranks, with the variables that torchrun sets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run_ranks(folder, program, [[folder, *words]] * 2, patience, [both | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)])
