"""Ranks as forks of one process, since the imports of Megatron-Core take four seconds of a processor: forks.py MODULE...

Imports the modules, then reads one request a line: {"program", "ranks": the arguments of each rank, "outputs": files, "limit": seconds of all,
"patience": seconds that ranks have to end behind one that failed}. Answers with [exit status, processor seconds] of each rank; the status of one that was
killed, with all that it had started, is null. The end of whoever sends the requests kills all ranks.
"""

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import sys
import time


def run(program, words, output):
    """In a fork: python PROGRAM WORDS."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [program, *words]
    status = 1
    try:
        runpy.run_path(program, run_name="__main__")
        status = 0
    finally:
        sys.stdout.flush()
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


def ends_of(program, ranks, outputs, limit, patience):
    running = {}
    for words, output in zip(ranks, outputs):
        child = os.fork()
        if child == 0:
            run(program, words, output)
        running[child] = len(running)
    ends, end, children = [[None, 0.] for _ in ranks], time.monotonic() + limit, list(running)
    try:
        while running and time.monotonic() < end:
            child, status, used = os.wait4(-1, os.WNOHANG)
            if child == 0:
                if select.select([sys.stdin], [], [], .02)[0]:  # nobody reads the answer
                    break
                continue
            ends[running.pop(child)] = [os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]
            if status:
                end = min(end, time.monotonic() + patience)
    finally:
        for child in children:
            try:
                os.killpg(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for child in running:
            os.waitpid(child, 0)
    return ends


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(ends_of(**json.loads(line))), flush=True)
