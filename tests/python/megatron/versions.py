"""The Pythons with Megatron-Core that this machine has, and runs of several ranks in one of them."""

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

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

    def written(self, program, folder, world, arguments, limit=900, patience=10):
        """What the ranks of `program FOLDER RANK WORLD ARGUMENTS...` wrote to FOLDER/RANK.json in at most `limit` seconds."""
        return self.written_by_each(program, [[folder, rank, world, *arguments] for rank in range(world)], limit, patience)

    def written_by_each(self, program, ranks, limit=900, patience=10):
        """The same with arguments of each process."""
        folders = [Path(folder) for folder, *_ in ranks]
        outputs = [folder / f"output_{rank}.txt" for folder, (_, rank, *_) in zip(folders, ranks)]
        request = dict(program=str(HERE / program), ranks=[[str(word) for word in words] for words in ranks], outputs=[*map(str, outputs)],
                       limit=limit, patience=patience)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline() or "null")
        assert codes is not None, f"{program}: the process that forks ranks has ended (its message stands above)"
        named = {None: f"killed: it still ran after {limit} seconds, or long after another rank had failed"}
        assert not any(code != 0 for code in codes), "\n".join(
            f"{program}, rank {words[1]}: {named.get(code, f'exit {code}')}\n{output.read_text(errors='replace')[-4000:] if output.is_file() else ''}"
            for words, code, output in zip(ranks, codes, outputs))
        return [json.loads((folder / f"{words[1]}.json").read_text()) for folder, words in zip(folders, ranks)]

    def end(self):
        self.process.stdin.close()
        self.process.wait()


@functools.cache
def ranks_in(python, *modules):
    """The Ranks of a Python, for the whole run of the tests."""
    ranks = Ranks(python, *modules)
    atexit.register(ranks.end)
    return ranks
