"""The Pythons with Megatron-Core that this machine has, and runs of several ranks in one of them."""

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import rank_processes
from cases import in_order

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
ABSENT = "Megatron-Core is not installed: tools/setup.sh tests puts 0.16.1 into .venv, and 0.19.2 into .venv-megatron if there is a Python 3.12 or newer"


@functools.cache
def pythons():
    """{version of megatron-core: its Python}, the oldest first. ESPALIER_MEGATRON_PYTHONS lists other Pythons."""
    named = os.environ.get("ESPALIER_MEGATRON_PYTHONS")
    candidates = named.split(os.pathsep) if named else [sys.executable, str(ROOT / ".venv-megatron/bin/python")]
    found = {}
    for python in candidates:
        code = "import importlib.metadata as m; print(m.version('megatron-core'))"
        try:
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment())
        except OSError:
            continue
        if done.returncode == 0:
            found[done.stdout.strip()] = python
    return dict(sorted(found.items()))


@functools.cache
def has(version, package):
    """True if the Python with this version of megatron-core has a package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([pythons()[version], "-c", code], env=environment()).returncode == 0


def environment(**more):
    paths = [str(HERE), str(ROOT / "python"), *([os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [])]
    return dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(paths), **more)


class Ranks:
    """Runs ranks in the Python of one version (forks.py), which imports `modules` once."""

    def __init__(self, python, *modules):
        self.process = subprocess.Popen([python, str(HERE / "forks.py"), *modules], env=environment(), text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)

    def run(self, program, ranks, limit=900, patience=10):
        """Runs `program ARGUMENTS` beside each other for each of `ranks`, which are FOLDER, RANK and more arguments, for at most `limit` seconds.
        Returns the exit statuses, None for one that was killed, a text of each, and the processor seconds of all."""
        outputs = [Path(folder) / f"output_{rank}.txt" for folder, rank, *_ in ranks]
        request = dict(program=str(HERE / program), ranks=[[str(word) for word in words] for words in ranks], outputs=[*map(str, outputs)],
                       limit=limit, patience=patience)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        ends = json.loads(self.process.stdout.readline() or "null")
        assert ends is not None, f"{program}: the process that forks ranks has ended (its message stands above)"
        codes = [code for code, _ in ends]
        killed = f"killed: it still ran after {limit} seconds, or {patience} seconds after another one had failed"
        return codes, [f"{program}, rank {words[1]}: {killed if code is None else f'exit {code}'}\n"
                       + (output.read_text(errors="replace")[-4000:] if output.is_file() else "")
                       for words, code, output in zip(ranks, codes, outputs)], sum(seconds for _, seconds in ends)

    def written(self, program, folder, world, arguments, **how):
        """What the ranks of `program FOLDER RANK WORLD ARGUMENTS...` wrote to FOLDER/RANK.json. All must exit with 0."""
        codes, texts, seconds = self.run(program, [[folder, rank, world, *arguments] for rank in range(world)], **how)
        rank_processes.spent += seconds
        assert codes == [0] * world, "\n".join(texts)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]

    def end(self):
        self.process.stdin.close()
        self.process.wait()


@functools.cache
def ranks_in(python, *modules):
    """The Ranks of a Python, for the whole run of the tests."""
    ranks = Ranks(python, *modules)
    atexit.register(ranks.end)
    return ranks


def of_cases(launches, folder, world, names):
    """{name: numbers of each rank, or the text of its failure}. A case that fails ends its launch; the cases behind it run in another one. Cases of one
    rank run in two processes beside each other."""
    found, names, made = {}, in_order(world, names), 0
    while names:
        parts = [part for part in ([names] if world > 1 else [names[0::2], names[1::2]]) if part]
        folders = [folder / str(made + at) for at in range(len(parts))]
        made += len(parts)
        for place in folders:
            place.mkdir()
        codes, texts, _ = launches.run("ranks.py", [[place, rank, world, *part] for place, part in zip(folders, parts) for rank in range(world)],
                                       limit=120 + 60 * len(names))
        names = []
        for at, (place, part) in enumerate(zip(folders, parts)):
            files, own = [place / f"{rank}.json" for rank in range(world)], slice(at * world, (at + 1) * world)
            written = [json.loads(file.read_text()) if file.is_file() else {} for file in files]
            found |= {name: [of_rank[name] for of_rank in written] for name in part if all(name in of_rank for of_rank in written)}
            left = [name for name in part if name not in found]
            if left and (any(codes[own]) or not any(codes)):  # no part that ended because the other one failed
                found[left.pop(0)] = "\n".join(texts[own])
            names += left
    return found
