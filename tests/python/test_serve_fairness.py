"""Clients of `espalier serve` beside one whose call takes long: nobody waits longer than an item of its plan, and everybody has the bits of a run alone."""

import re
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
from serve_client import NAME, ByHand, group_data  # noqa: E402
from serve_process import Server, without_proxies  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import serve_clients  # noqa: E402

GROUPS = 120  # of the long call: hundreds of items, where each small call has one
SMALL = [([5, 9, 2, 40], {"target_tokens": [9, 2, 40, 3]}), ([5, 9, 7, 41, 6], {"target_tokens": [9, 7, 41, 6, 8]})]
RANKS = (2, 3, 5)


@pytest.fixture
def start(program, model_of, tmp_path):
    without_proxies()
    made = []

    def begin(name, *options):
        made.append(Server(program, {NAME: model_of("qwen3_tied")}, "--state", tmp_path / name, "--token-budget", 64, *options))
        return made[-1]

    yield begin
    for server in made:
        server.kill()


def weights(model, state, number):
    """The adapter's file as a checkpoint has it."""
    path = model.server.result(model.save(number, "end")[1]["request_id"])[1]["path"].removeprefix("tinker://")
    return (state / "runs" / path / "adapter_model.safetensors").read_bytes()


def long_call(model, data):
    return model.forward_backward(1, data, loss="importance_sampling")[1]["request_id"]


def finish_long(model, state, future):
    metrics = model.metrics(future)
    model.metrics(model.optim_step(2, learning_rate=1e-2)[1]["request_id"])
    return metrics, weights(model, state, 3)


def small_client(model, state, said=lambda what: None):
    """Two steps, a forward pass and samples: what they give, and the weights."""
    sent = []
    for step in range(2):
        sent += [model.forward_backward(2 * step + 1, SMALL), model.optim_step(2 * step + 2, learning_rate=1e-2)]
    sent.append(model.forward_backward(5, SMALL, forward_only=True))
    results = [model.metrics(answer["request_id"]) for _, answer in sent]
    said("trained")
    results.append(model.sample(6))
    said("sampled")
    return results, weights(model, state, 7)


@pytest.mark.parametrize("options", [(), ("--memory-budget", "24MiB")], ids=["plenty", "short of memory"])
def test_nobody_waits_for_the_end_of_a_long_call(start, tmp_path, options):
    data = group_data(np.random.default_rng(3), GROUPS, 6, 40, 24)
    server, events, results = start("together", *options), [], {}
    models = {rank: ByHand(server, rank=rank) for rank in (1, *RANKS)}

    def client(rank):
        try:
            results[rank] = small_client(models[rank], tmp_path / "together", lambda what: events.append((rank, what)))
        except BaseException as error:
            results[rank] = error

    future = long_call(models[1], data)
    threads = [threading.Thread(target=client, args=(rank,)) for rank in RANKS]
    for thread in threads:
        thread.start()
    results[1] = models[1].metrics(future)
    events.append((1, "long"))
    for thread in threads:
        thread.join()
    assert events[-1] == (1, "long") and len(events) == 2 * len(RANKS) + 1
    results[1] = finish_long(models[1], tmp_path / "together", future)
    alone = start("alone")
    for rank in (1, *RANKS):
        model = ByHand(alone, rank=rank)
        expected = finish_long(model, tmp_path / "alone", long_call(model, data)) if rank == 1 else small_client(model, tmp_path / "alone")
        assert results[rank] == expected, rank


def test_long_calls_of_two_clients_run_in_turns(start, tmp_path):
    """The second one has a quarter of the first one's items, and ends before it."""
    data = group_data(np.random.default_rng(4), GROUPS, 6, 40, 24)
    server = start("together")
    first, second = ByHand(server, rank=2), ByHand(server, rank=3)
    futures = [long_call(first, data), long_call(second, data[:len(data) // 4])]
    events = []

    def wait(name, model, future):
        model.metrics(future)
        events.append(name)

    threads = [threading.Thread(target=wait, args=each) for each in (("first", first, futures[0]), ("second", second, futures[1]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events == ["second", "first"]


def test_a_call_that_takes_most_of_the_memory_gives_others_their_turn(start, tmp_path):
    """With a budget that is just enough for it: nobody waits for its end, and everybody has the bits of a run alone."""
    data = group_data(np.random.default_rng(6), 30, 2, 250, 30)
    model = ByHand(start("small", "--memory-budget", "5MiB"), rank=1)
    error = model.server.result(long_call(model, data))[1]["error"]
    missing = float(re.search(r"larger by ([\d.]+) MiB", error)[1])
    budget = ("--memory-budget", f"{6 + missing:.2f}MiB")  # measured memory is not the same to the last page in another process
    events, results = [], []
    for name in ("together", "alone"):
        server = start(name, *budget)
        large, small = ByHand(server, rank=1), ByHand(server, rank=1)
        future = long_call(large, data)
        waiter = threading.Thread(target=lambda large=large, future=future: (large.metrics(future), events.append("large")))
        waiter.start()
        if name == "alone":
            waiter.join()
        calls = [small.forward_backward(1, SMALL), small.optim_step(2, learning_rate=1e-2), small.forward_backward(3, SMALL, forward_only=True)]
        found = [small.metrics(answer["request_id"]) for _, answer in calls]
        events.append("small")
        waiter.join()
        results.append((found, finish_long(large, tmp_path / name, future)))
    assert events == ["small", "large", "large", "small"]
    assert results[0] == results[1]


def test_a_server_ends_in_the_middle_of_a_long_call_and_does_it_again(start, tmp_path):
    data = group_data(np.random.default_rng(5), GROUPS, 6, 40, 24)
    server = start("state")
    model, other = ByHand(server, rank=2), ByHand(server, rank=3)
    future = long_call(model, data)
    other.metrics(other.forward_backward(1, SMALL)[1]["request_id"])  # the long call has begun
    server.end()
    server.start()
    found = finish_long(model, tmp_path / "state", future)
    alone = ByHand(start("alone"), rank=2)
    assert found == finish_long(alone, tmp_path / "alone", long_call(alone, data))


def run_clients(monkeypatch, program, clients, seconds):
    monkeypatch.setattr(sys, "argv", ["serve_clients.py", "--program", str(program), "--clients", str(clients), "--seconds", str(seconds)])
    with pytest.raises(SystemExit) as end:
        serve_clients.main()
    assert end.value.code == 0


def test_random_requests_beside_each_other_have_the_bits_of_runs_alone(program, monkeypatch):
    run_clients(monkeypatch, program, 2, 0)


@pytest.mark.product
def test_random_requests_of_sixteen_clients_have_the_bits_of_runs_alone(program, monkeypatch):
    run_clients(monkeypatch, program, 16, 60)
