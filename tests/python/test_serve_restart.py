"""A server of `espalier serve` that is killed at any moment and started again: the same bits, the same futures, an unmodified SDK that does not notice."""

import os
import random
import shutil
import threading
import time

import pytest

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
from serve_client import NAME, RANK, ByHand, draw_group, ready  # noqa: E402
from serve_process import Server, without_proxies  # noqa: E402

DATA = [([5, 9, 2, 40], {"target_tokens": [9, 2, 40, 3]}), ([5, 9, 2, 41, 6], {"target_tokens": [9, 2, 41, 6, 8]})]


@pytest.fixture
def start(program, model_of, tmp_path):
    without_proxies()
    os.environ["TINKER_API_KEY"] = "tml-local"
    made = []

    def begin(name, *options):
        made.append(Server(program, {NAME: model_of("qwen3_tied")}, "--state", tmp_path / name, *options))
        return made[-1]

    begin.program = program
    yield begin
    for server in made:
        server.kill() if server.process.poll() is None else None


def requests_of(model, steps):
    """(number, send) of a loop: two gradients and a step each."""
    for step in range(steps):
        yield 3 * step + 1, lambda n: model.forward_backward(n, DATA[:1], loss="cross_entropy")
        yield 3 * step + 2, lambda n: model.forward_backward(n, DATA[1:])
        yield 3 * step + 3, lambda n: model.optim_step(n, learning_rate=1e-2)


def final_metrics(model, number):
    return model.metrics(model.forward_backward(number, DATA, forward_only=True)[1]["request_id"])


def test_kills_change_no_bit(start):
    steps = 6
    # Which calls wait beside each other is a matter of time, so they run apart here.
    whole, killed = start("whole", "--join-calls", "off"), start("killed", "--join-calls", "off", "--save-freq", 2)
    plain = ByHand(whole)
    results = [plain.metrics(send(number)[1]["request_id"]) for number, send in requests_of(plain, steps)]
    end = final_metrics(plain, 3 * steps + 1)
    model = ByHand(killed)
    draw = random.Random(4)
    futures = []
    for number, send in requests_of(model, steps):
        futures.append(send(number)[1]["request_id"])
        if draw.random() < 0.5:
            time.sleep(draw.choice([0, 0.01, 0.1, 0.3]))
            killed.kill()
            killed.start()
            assert send(number)[1]["request_id"] == futures[-1]  # a retry after the kill is the same request
    assert [model.metrics(future) for future in futures] == results
    killed.kill()
    killed.start()
    assert final_metrics(model, 3 * steps + 1) == end
    assert [model.metrics(future) for future in futures] == results  # old futures are still there


MOST_REQUESTS = 24


@pytest.fixture(scope="module")
def unkilled(program, model_of, tmp_path_factory):
    """What the requests of test_many_kills give on a server that lives."""
    server = Server(program, {NAME: model_of("qwen3_tied")}, "--state", tmp_path_factory.mktemp("unkilled") / "state", "--join-calls", "off")
    model = ByHand(server)
    results = {}
    for number, send in requests_with_saves(model):
        results[number] = server.result(send()[1]["request_id"])
    yield results, final_metrics(model, MOST_REQUESTS + 1)
    server.kill()


def requests_with_saves(model):
    """(number, send) of a loop that saves now and then, half of it under names."""
    kinds = [lambda n: model.forward_backward(n, DATA[:1]), lambda n: model.forward_backward(n, DATA[1:]), lambda n: model.optim_step(n, learning_rate=1e-2),
             lambda n: model.forward_backward(n, DATA, forward_only=True), lambda n: model.save(n, f"at{n}"), lambda n: model.save_for_sampler(n, n)]
    for number in range(1, MOST_REQUESTS + 1):
        yield number, lambda number=number: kinds[(number - 1) % len(kinds)](number)


@pytest.mark.product
@pytest.mark.parametrize("seed", range(42))
def test_many_kills_change_no_bit(start, unkilled, seed):
    draw = random.Random(seed)
    server = start("state", "--join-calls", "off", "--save-freq", draw.choice([1, 2, 50]))
    model = ByHand(server)
    whole, end = unkilled

    def kill():
        time.sleep(draw.choice([0, 0, 0.001, 0.003, 0.01, 0.03, 0.1]))
        server.kill()
        server.start()

    futures, kills = {}, 0
    for number, send in requests_with_saves(model):
        futures[number] = send()[1]["request_id"]
        if draw.random() < 0.4:
            kill()
            kills += 1
            if draw.random() < 0.2:  # again, while the first restart is at work
                kill()
                kills += 1
            if draw.random() < 0.5:
                assert send()[1]["request_id"] == futures[number]
    while kills < 12:
        kill()
        kills += 1

    for number, future in futures.items():
        status, answer = server.result(future)
        wanted = whole[number][1]
        if isinstance(wanted, dict) and "metrics" not in wanted:  # names of checkpoints and samplers
            assert status == 200 and "error" not in answer and set(answer) == set(wanted)
        else:
            assert (status, answer) == whole[number]
    assert final_metrics(model, MOST_REQUESTS + 1) == end


def test_calls_that_ran_as_one_do_so_again_after_a_kill(start):
    server = start("state")
    model = ByHand(server)
    futures = []
    for step in range(3):  # two gradients arrive before the one that they wait for
        first = 4 * step + 1
        futures += [model.forward_backward(n, [DATA[n % 2]])[1]["request_id"] for n in (first + 1, first + 2, first)]
        futures.append(model.optim_step(first + 3, learning_rate=1e-2)[1]["request_id"])
    results = [model.metrics(future) for future in futures]
    assert sum(result.get("tokens_shared:sum", 0) for result in results) >= 3 * 2 * 3  # they ran as one
    end = final_metrics(model, 13)
    server.kill()
    server.start()  # no state was saved: all of it runs again
    assert [model.metrics(future) for future in futures] == results
    assert final_metrics(model, 14) == end


def test_requests_that_came_early_wait_over_a_kill(start):
    server = start("state")
    model = ByHand(server)
    future = model.optim_step(2, learning_rate=1e-2)[1]["request_id"]
    server.kill()
    server.start()
    model.metrics(model.forward_backward(1, DATA)[1]["request_id"])
    model.metrics(future)


def test_the_journal_of_forward_passes_does_not_grow(start, tmp_path):
    server = start("state", "--save-freq", 2)
    model = ByHand(server)
    folder = tmp_path / "state/runs" / model.model

    def passes(numbers):
        futures = [model.forward_backward(number, DATA, forward_only=True)[1]["request_id"] for number in numbers]
        return futures, [model.metrics(future) for future in futures]

    futures, results = passes(range(1, 9))
    sampler = server.post("/api/v1/create_sampling_session", {"session_id": model.session, "sampling_session_seq_id": 0, "base_model": NAME})[1]["sampling_session_id"]
    server.post("/api/v1/retrieve_futures", {"target": {"sampling_session_id": sampler}, "timeout": 0, "retrieved_request_ids": futures})  # they may be forgotten
    passes([9, 10])
    assert [one.name for one in (folder / "resume").iterdir()] == ["10"]
    assert len(list((folder / "journal").iterdir())) <= 2
    # A state has no gradient, so none is written while one waits for its step.
    model.metrics(model.forward_backward(11, DATA)[1]["request_id"])
    passes([12, 13, 14])
    assert [one.name for one in (folder / "resume").iterdir()] == ["10"]
    server.kill()
    server.start()
    assert passes([15])[1] == results[:1]
    after = model.metrics(model.optim_step(16, learning_rate=1e-2)[1]["request_id"])
    alone = ByHand(start("alone"))
    alone.metrics(alone.forward_backward(1, DATA)[1]["request_id"])
    assert after == alone.metrics(alone.optim_step(2, learning_rate=1e-2)[1]["request_id"])


def test_an_unmodified_client_does_not_notice(start):
    server = start("state", "--dtype", "float64")
    service = tinker.ServiceClient(base_url=server.url)
    training = ready(service.create_lora_training_client(base_model=NAME, rank=RANK, seed=4))
    data = draw_group(1, "cross_entropy")
    state = None
    snapshot, before = None, None
    text = tinker.ModelInput.from_ints([1, 2, 3, 4])

    def kill_soon():
        time.sleep(0.05)
        server.kill()
        time.sleep(0.5)
        server.start()

    for step in range(3):
        killer = threading.Thread(target=kill_soon)
        killer.start()
        futures = [training.forward_backward(data, "cross_entropy"), training.optim_step(tinker.AdamParams(learning_rate=1e-2))]
        for future in futures:
            future.result(timeout=120)
        killer.join()
        if step == 0:
            snapshot = ready(training.save_weights_and_get_sampling_client())
            state = training.save_state("one").result(timeout=120).path
            before = snapshot.compute_logprobs(text).result(timeout=120)
    # Snapshots without a name, and checkpoints, outlive the kills.
    assert snapshot.compute_logprobs(text).result(timeout=120) == before
    assert ready(training.save_weights_and_get_sampling_client()).compute_logprobs(text).result(timeout=120) != before
    resumed = ready(service.create_training_client_from_state_with_optimizer(state))
    for _ in range(2):
        resumed.forward_backward(data, "cross_entropy").result(timeout=120)
        resumed.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(timeout=120)
    ends = [client.forward(data, "cross_entropy").result(timeout=120).metrics["loss:sum"] for client in (training, resumed)]
    assert ends[0] == ends[1]


def test_a_restarted_server_plans_with_the_same_memory(start, tmp_path):
    """Measured memory differs a little from start to start, and with it a plan could: the folder keeps the number, for the same budget."""
    server, file = start("state", "--memory-budget", "64MiB"), tmp_path / "state/memory"
    budget, first = file.read_text().split()
    assert budget == "64MiB" and 0 < int(first) < 64 << 20
    server.kill()
    file.write_text(f"{budget} {int(first) - 4096}\n")
    server.start()
    assert file.read_text().split() == [budget, str(int(first) - 4096)]
    server.kill()
    file.write_text(f"{budget} {1 << 30}\n")  # more than there is
    server.start()
    assert int(file.read_text().split()[1]) < 64 << 20
    server.kill()
    assert start("state", "--memory-budget", "48MiB") and file.read_text().split()[0] == "48MiB"


def test_another_model_of_the_same_name_is_refused(start, model_of, tmp_path, espalier):
    start("state").kill()
    same = tmp_path / "moved"
    shutil.copytree(model_of("qwen3_tied"), same)
    other = espalier("serve", "--model", f"{NAME}={model_of('llama_untied')}", "--port", 0, "--state", tmp_path / "state", expect=2).stderr
    assert NAME in other and "--state" in other
    weights = same / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2] + b"\x3f\x3f")  # one number is another
    assert NAME in espalier("serve", "--model", f"{NAME}={same}", "--port", 0, "--state", tmp_path / "state", expect=2).stderr
    shutil.copy(model_of("qwen3_tied") / "model.safetensors", same)
    Server(start.program, {NAME: same}, "--state", tmp_path / "state").kill()


def test_two_servers_do_not_share_a_folder(start, program, model_of, tmp_path, espalier):
    start("state")
    refused = espalier("serve", "--model", f"x={model_of('qwen3_tied')}", "--port", 0, "--state", tmp_path / "state", expect=2)
    assert "another one" in refused.stderr


def test_a_finished_session_leaves_its_checkpoints_alone(start, tmp_path):
    server = start("state")
    service = tinker.ServiceClient(base_url=server.url)
    training = ready(service.create_lora_training_client(base_model=NAME, rank=RANK))
    path = training.save_state("kept").result().path
    ready(training.save_weights_and_get_sampling_client())
    early = {"model_id": path.removeprefix("tinker://").split("/")[0], "seq_id": 90, "adam_params": {}}
    assert server.post("/api/v1/optim_step", early)[0] == 200
    if hasattr(service, "close"):
        service.close("success").result()
    else:  # an SDK that leaves without a word
        session = path.removeprefix("tinker://").split(":")[0]
        assert server.post(f"/api/v1/sessions/{session}/finish", {"reason": {"type": "success"}})[0] == 200
    run = path.removeprefix("tinker://").split("/")[0]
    assert server.result(run + "#90")[1]["error"] == "the session has ended"  # it waited for requests that will not come
    late = {"session_id": run.split(":")[0], "model_seq_id": 5, "base_model": NAME, "lora_config": {"rank": 1}}
    assert server.post("/api/v1/create_model", late)[0] == 410
    folder = tmp_path / "state"
    end = time.monotonic() + 20
    while any((folder / "samplers").iterdir()) or list(folder.glob("runs/*/journal")):
        assert time.monotonic() < end
        time.sleep(0.05)
    server.kill()
    server.start()
    again = tinker.ServiceClient(base_url=server.url)
    assert ready(again.create_training_client_from_state(path)).get_info().lora_rank == RANK
