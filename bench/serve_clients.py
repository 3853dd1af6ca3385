"""Do clients of one server get the bits of a run alone, however long they go on beside each other?

    tools/python bench/serve_clients.py [--program build/espalier] [--clients 16] [--seconds 3600] [--seed 1]

Clients with adapters of ranks from 1 to 64 send random calls to one `espalier serve` at the same time: gradients of several losses, some
of them of many items of a plan, steps with settings of their own, forward passes, snapshots and samples, checkpoints, and loads of these.
Each client has a server of its own beside it, which gets the same requests. Every result has to be equal byte for byte, and so has every file of every
checkpoint. Prints what was compared; ends with exit code 1 and the client's request at the first difference.
"""

import argparse
import http.client
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/python"))

from make_model import make_model  # noqa: E402
from serve_client import NAME, ByHand, group_data  # noqa: E402
from serve_process import Server, without_proxies  # noqa: E402

MOST_RANK = 64
PATIENCE = 600  # seconds for a result, on a busy machine
LOSSES = ("importance_sampling", "ppo", "cispo", "dro")
# Calls that run as one share more, which changes their rounding, and which of them wait is a matter of time.
OPTIONS = ("--join-calls", "off", "--token-budget", 256, "--memory-budget", "1GiB")


def ranks_of(clients):
    """From 1 to 64, evenly."""
    return [1 + round((MOST_RANK - 1) * client / max(1, clients - 1)) for client in range(clients)]


def resident(process):
    """Bytes of a process."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PatientServer(Server):
    """A request that fails on its way, or is not answered within a minute, on a machine that does other things, is sent again, as the SDK does.
    It is the same request then, and nothing runs twice."""

    @staticmethod
    def send(request):
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return Server.send(request)
            except (OSError, http.client.HTTPException) as error:  # URLError and TimeoutError are OSErrors
                if time.monotonic() > end:
                    raise AssertionError(f"no answer within {PATIENCE} s: {error!r}") from error
                time.sleep(0.1)


class Watch:
    """Asks a server for its health five times a second, and notes how long the answers take."""

    def __init__(self, server):
        self.server, self.seconds, self.ends = server, [], threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.ends.wait(0.2):
            begin = time.monotonic()
            self.server.get("/api/v1/healthz")
            self.seconds.append(time.monotonic() - begin)

    def end(self):
        self.ends.set()
        self.thread.join()
        ordered = sorted(self.seconds) or [0.0]
        return f"quick requests: median {1e3 * ordered[len(ordered) // 2]:.1f} ms, slowest {1e3 * ordered[-1]:.1f} ms"


class Side:
    """A client's model on one server."""

    def __init__(self, server, state, rank):
        self.model, self.state, self.number = ByHand(server, rank=rank), state, 0

    def send(self, request):
        """The future of the next request."""
        self.number += 1
        status, answer = request(self.model, self.number)
        assert status == 200, answer
        return answer["request_id"]

    def result(self, future):
        status, answer = self.model.server.result(future, PATIENCE)
        assert status == 200, answer
        return answer

    def files(self, path):
        folder = self.state / "runs" / path.removeprefix("tinker://")
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}


class Client:
    """Draws requests, sends each to both servers, and compares what comes back."""

    def __init__(self, both, seed, counts):
        self.both, self.counts = both, counts
        self.draw, self.numbers = random.Random(seed), np.random.default_rng(seed)

    def step(self):
        """Gradients and an optimizer step, and now and then something else."""
        requests = []
        for _ in range(self.draw.randint(1, 3)):
            requests.append(("gradients", self.gradient(16 if self.draw.random() < 0.05 else self.draw.randint(1, 3))))
        adam = dict(learning_rate=self.draw.choice([1e-3, 1e-2]), beta2=self.draw.choice([0.95, 0.999]), weight_decay=self.draw.choice([0.0, 0.1]),
                    grad_clip_norm=self.draw.choice([0.0, 1.0]))
        requests.append(("steps", lambda model, number: model.optim_step(number, **adam)))
        if self.draw.random() < 0.3:
            requests.append(("forward passes", self.gradient(2, forward_only=True)))
        futures = [[side.send(request) for side in self.both] for _, request in requests]
        for (what, _), pair in zip(requests, futures):
            self.compare(what, [side.result(future) for side, future in zip(self.both, pair)])
        if self.draw.random() < 0.2:
            self.sample()
        if self.draw.random() < 0.1:
            self.check_files(load=self.draw.random() < 0.3)

    def gradient(self, groups, forward_only=False):
        loss = self.draw.choice(LOSSES)
        data = group_data(self.numbers, groups, self.draw.randint(2, 6), self.draw.randint(4, 60), self.draw.randint(2, 24))
        return lambda model, number: model.forward_backward(number, data, loss=loss, forward_only=forward_only)

    def sample(self):
        params = dict(temperature=self.draw.choice([0.0, 0.7, 1.0]), seed=self.draw.randrange(1000), max_tokens=self.draw.randint(4, 24))
        results = []
        for side in self.both:
            side.number += 1
            results.append([(list(tokens), list(logprobs)) for tokens, logprobs in side.model.sample(side.number, **params)])
        self.compare("samples", results)

    def check_files(self, load=False):
        """The files of a checkpoint, which the model then takes as its own again if `load` says so."""
        paths = []
        for side in self.both:
            future = side.send(lambda model, number: model.save(number, f"at{number}"))
            paths.append(side.result(future)["path"])
        self.compare("checkpoints", [side.files(path) for side, path in zip(self.both, paths)])
        if load:
            futures = [side.send(lambda model, number, path=path: model.server.post(
                "/api/v1/load_weights", {"model_id": model.model, "seq_id": number, "path": path, "optimizer": True})) for side, path in zip(self.both, paths)]
            self.compare("loads", [{**side.result(future), "path": "", "model_id": ""} for side, future in zip(self.both, futures)])
        for side, path in zip(self.both, paths):
            run, kind, name = path.removeprefix("tinker://").split("/")
            status, answer = side.model.server.post(f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}", {}, method="DELETE")
            assert status == 200, answer

    def compare(self, what, pair):
        together, alone = pair
        assert together and not (isinstance(together, dict) and "error" in together), together
        assert together == alone, f"{what} before request {self.both[0].number + 1}: not what the run alone gives"
        self.counts[what] += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default=str(ROOT / "build/espalier"))
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    without_proxies()
    wrong, counts, servers = [], [Counter() for _ in range(options.clients)], []
    with tempfile.TemporaryDirectory(prefix="espalier-clients-") as name:
        folder = Path(name)
        make_model("qwen3_tied", folder / "model")

        def start(state):
            servers.append(PatientServer(options.program, {NAME: folder / "model"}, "--state", folder / state, *OPTIONS))
            return servers[-1]

        begin = time.monotonic()

        def run(index, rank):
            try:
                both = [Side(server, folder / state, rank) for server, state in ((servers[0], "together"), (start(f"alone{index}"), f"alone{index}"))]
                client = Client(both, options.seed * 1000 + index, counts[index])
                client.step()
                while time.monotonic() - begin < options.seconds and not wrong:
                    client.step()
                client.check_files()
            except Exception as error:
                wrong.append(f"the client of rank {rank}: {error!r}")

        try:
            together = start("together")
            before = resident(together.process)
            threads = [threading.Thread(target=run, args=each) for each in enumerate(ranks_of(options.clients))]
            watch = Watch(together)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            quick = watch.end()
            seconds, after = time.monotonic() - begin, resident(together.process)
        finally:
            for server in servers:
                server.kill()
    for line in wrong:
        print(line)
    fewest = min(count["steps"] for count in counts)
    print(f"{options.clients} clients of ranks 1 to {MOST_RANK}, {seconds:.0f} s, at least {fewest} steps each, {before >> 20} to {after >> 20} MiB of memory; compared: "
          + ", ".join(f"{number} {what}" for what, number in sum(counts, Counter()).most_common()))
    print(quick)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
