"""`espalier serve` under load and among strangers: keys, addresses, back-pressure, thousands of polls, the rows that a call computes."""

import asyncio
import re
import resource
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
from make_model import VOCABULARY  # noqa: E402
from serve_client import NAME, ByHand, group_data, ready  # noqa: E402
from serve_process import Server, without_proxies  # noqa: E402

SMALL_BUDGET = "24MiB"  # of which a quarter is for adapters
DATA = [([5, 9, 2, 40], {"target_tokens": [9, 2, 40, 3]})]


@pytest.fixture
def start(program, model_of, tmp_path):
    without_proxies()
    made = []

    def begin(*options, state="state"):
        made.append(Server(program, {NAME: model_of("qwen3_tied")}, "--state", tmp_path / state, *options))
        return made[-1]

    yield begin
    for server in made:
        server.kill()


def test_a_key_opens_all_but_what_is_public(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("tml-first-key\ntml-second-key\n")
    server = start("--api-key-file", keys)
    for key in (None, "", "tml-first-ke", "tml-first-keyx", "tml-third-key"):
        status, answer = server.post("/api/v1/create_session", {"tags": []}, headers={"X-API-Key": key} if key is not None else {})
        assert status == 401 and "X-API-Key" in answer["detail"]
        assert server.get("/api/v1/espalier/status", {"X-API-Key": key} if key is not None else {})[0] == 401
    for key in ("tml-first-key", "tml-second-key"):
        assert server.post("/api/v1/create_session", {"tags": []}, headers={"X-API-Key": key})[0] == 200
    assert server.get("/api/v1/healthz")[0] == 200


@pytest.mark.parametrize("text, words", [(None, "No such file"), ("", "a key that begins with tml-"), ("secret\n", "tml-"), ("tml-\n", "eight characters")])
def test_files_of_keys_are_checked(espalier, model_of, tmp_path, text, words):
    keys = tmp_path / "keys"
    if text is not None:
        keys.write_text(text)
    assert words in espalier("serve", "--model", f"x={model_of('qwen3_tied')}", "--port", 0, "--state", tmp_path / "state", "--api-key-file", keys, expect=3).stderr


def test_other_machines_need_a_key(espalier, model_of, tmp_path):
    refused = espalier("serve", "--model", f"x={model_of('qwen3_tied')}", "--host", "0.0.0.0", "--port", 0, "--state", tmp_path / "state", expect=2)
    assert "--api-key-file" in refused.stderr


def test_a_quick_request_is_quick_beside_two_thousand_polls(server):
    polls = 2000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < polls + 500:
        pytest.skip(f"this process may have {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, polls + 500), hard))
    model = ByHand(server)
    late = model.forward_backward(2, DATA)[1]["request_id"]  # waits for request 1
    host, port = server.url.removeprefix("http://").split(":")
    body = f'{{"request_id": "{late}"}}'
    poll = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    async def run():
        async def wait(opened):
            reader, writer = opened
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            return head.split()[1]

        opened = [await asyncio.open_connection(host, int(port)) for _ in range(polls)]
        for _, writer in opened:
            writer.write(poll)
        waiting = [asyncio.ensure_future(wait(one)) for one in opened]
        await asyncio.sleep(0.2)
        seconds = []
        for _ in range(20):
            begin = time.monotonic()
            status = await asyncio.to_thread(server.get, "/api/v1/healthz")
            seconds.append(time.monotonic() - begin)
            assert status[0] == 200
        assert not any(one.done() for one in waiting)
        model.forward_backward(1, DATA)
        assert set(await asyncio.wait_for(asyncio.gather(*waiting), 60)) == {b"200"}
        return sorted(seconds)

    try:
        seconds = asyncio.run(run())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # The median: a machine that does other things stalls single requests.
    assert seconds[len(seconds) // 2] < 0.05
    assert counts(server)["espalier_unfinished_futures"] == 0


def counts(server):
    """The numbers of /metrics by name and labels."""
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in server.get("/metrics")[1].decode().splitlines() if line[0] != "#")}


def wait_for_429(server, before):
    end = time.monotonic() + 60
    while counts(server).get('espalier_answers_total{status="429"}', 0) <= before:
        assert time.monotonic() < end
        time.sleep(0.02)


def large_wrong_call(model, number):
    """1.2 MB that name an id beyond the vocabulary: the future fails at once, and the request keeps its place, and its bytes, until its turn."""
    tokens = [9] * 500
    return model.message(number, [(tokens, {"target_tokens": [VOCABULARY] * 500})] * 200)


def test_requests_beyond_the_queue_s_memory_are_sent_again(start):
    """A server of 24 MiB holds 3 MiB of requests."""
    server = start("--memory-budget", SMALL_BUDGET)
    blocking, other, small = ByHand(server), ByHand(server), ByHand(server)
    for number in (2, 3):  # both wait for request 1
        assert blocking.post_bytes(large_wrong_call(blocking, number))[0] == 200
    status, answer = blocking.post_bytes(large_wrong_call(blocking, 4))
    assert status == 429 and "2.3" in answer["detail"] and "3.0" in answer["detail"], answer
    request = urllib.request.Request(server.url + "/api/v1/forward_backward", large_wrong_call(other, 1), {"Content-Type": "application/x-protobuf"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 429 and float(refused.value.headers["Retry-After"]) > 0
    # A client whose requests are small has its turn all the same.
    small.metrics(small.forward_backward(1, DATA)[1]["request_id"])
    small.metrics(small.optim_step(2, learning_rate=1e-2)[1]["request_id"])
    before = counts(server)['espalier_answers_total{status="429"}']
    # The SDK sends its call again and again, and does not notice that the server refuses it at first.
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
    training = ready(service.create_lora_training_client(base_model=NAME, rank=2))
    rows = [tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 9] * 250), loss_fn_inputs={"target_tokens": np.array([9, 5] * 250)})] * 200
    future = training.forward_backward(rows, "cross_entropy")
    wait_for_429(server, before)
    # Request 1 lets the others go on, so it is taken although the queue is full.
    large = blocking.message(1, [([9] * 500, {"target_tokens": [7] * 500})] * 200)
    blocking.metrics(blocking.post_bytes(large)[1]["request_id"])
    assert len(future.result().loss_fn_outputs) == 200
    assert "ids" in server.result(blocking.model + "#3")[1]["error"]


def test_samples_beyond_those_that_may_live_are_asked_for_again(start):
    """At most 10,000 sequences at a time."""
    server = start()
    body = {"base_model": NAME, "num_samples": 1024, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 9, 2]}]}, "sampling_params": {"max_tokens": 400, "stop": []}}
    live = [server.post("/api/v1/asample", {**body, "seq_id": number})[1]["request_id"] for number in range(1, 10)]
    status, answer = server.post("/api/v1/asample", {**body, "seq_id": 10})
    assert status == 429 and "10000" in answer["detail"]
    before = counts(server)['espalier_answers_total{status="429"}']
    sampling = ready(tinker.ServiceClient(base_url=server.url, api_key="tml-local").create_sampling_client(base_model=NAME))
    future = sampling.sample(tinker.ModelInput.from_ints([5, 9, 2]), 1024, tinker.SamplingParams(max_tokens=2))
    wait_for_429(server, before)
    for one in live:
        server.post("/api/v1/cancel_future", {"request_id": one})
    assert len(future.result().sequences) == 1024
    assert "cancelled" in server.result(live[0])[1]["error"]


def test_a_call_that_cannot_fit_names_the_budget_that_would(start):
    generator = np.random.default_rng(5)
    tokens = generator.integers(0, VOCABULARY, 500).tolist()
    data = [(tokens[:-1], {"target_tokens": tokens[1:]})]
    model = ByHand(start("--memory-budget", "5MiB", state="small"), rank=1)
    error = model.server.result(model.forward_backward(1, data)[1]["request_id"])[1]["error"]
    missing = re.search(r"larger by ([\d.]+) MiB", error)
    assert missing and "fewer or shorter data" in error, error
    # A budget counts measured memory, which is not the same to the last page in another process.
    model = ByHand(start("--memory-budget", f"{6 + float(missing[1]):.2f}MiB", state="large"), rank=1)
    model.metrics(model.forward_backward(1, data)[1]["request_id"])


def test_idle_models_go_to_disk_where_memory_is_short(start, tmp_path):
    """Eight adapters of rank 64 train in turns where three fit: the bits are those of a server on which all fit."""
    def train(server):
        models = [ByHand(server, rank=64) for _ in range(8)]
        for step in range(2):
            for index, model in enumerate(models):
                model.metrics(model.forward_backward(2 * step + 1, [([5, 9, index], {"target_tokens": [9, index, step]})])[1]["request_id"])
                model.metrics(model.optim_step(2 * step + 2, learning_rate=1e-2)[1]["request_id"])
        return models, [model.metrics(model.forward_backward(5, DATA, forward_only=True)[1]["request_id"]) for model in models]

    large, small = start("--memory-budget", "1GiB", state="large"), start("--memory-budget", SMALL_BUDGET, state="small")
    models, results = train(small)
    parked = {path.name for path in (tmp_path / "small/parked").iterdir()}
    assert len(parked) >= 4 and not (tmp_path / "large/parked").exists()
    assert results == train(large)[1]
    # A gradient keeps its model in memory: with as many as fit, another model is refused, with the budget that would do.
    for model in models:
        answer = small.result(model.forward_backward(6, DATA)[1]["request_id"])[1]
        if isinstance(answer, dict):
            break
    assert "--memory-budget" in answer["error"]
    small.kill()
    small.start()
    assert not (tmp_path / "small/parked").exists() or len(list((tmp_path / "small/parked").iterdir())) < 8


def distinct_prefixes(data):
    nodes = {}
    for tokens, _ in data:
        node = 0
        for token in tokens:
            node = nodes.setdefault((node, token), len(nodes) + 1)
    return len(nodes)


def test_groups_of_sixteen_run_a_quarter_of_their_rows(server):
    # 1,024 and 256 tokens in the small.
    model = ByHand(server)
    data = group_data(np.random.default_rng(1), 3, 16, 256, 64)
    metrics = model.metrics(model.forward_backward(1, data, loss="importance_sampling")[1]["request_id"])
    sent = sum(len(tokens) for tokens, _ in data)
    assert metrics["tokens_computed:sum"] + metrics["tokens_shared:sum"] == sent
    assert metrics["tokens_computed:sum"] == distinct_prefixes(data) <= 3 * (256 + 16 * 63)
    assert sent >= 4 * metrics["tokens_computed:sum"]
