"""`espalier serve` under load and among strangers: keys, addresses, back-pressure, thousands of polls, the rows that a call computes."""

import asyncio
import resource
import time

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
from make_model import VOCABULARY  # noqa: E402
from serve_client import NAME, ByHand  # noqa: E402
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


@pytest.mark.parametrize("text, words", [("", "a key that begins with tml-"), ("secret\n", "tml-"), ("tml-\n", "eight characters")])
def test_files_of_keys_are_checked(espalier, model_of, tmp_path, text, words):
    keys = tmp_path / "keys"
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
    assert float(dict(line.rsplit(" ", 1) for line in server.get("/metrics")[1].decode().splitlines() if line[0] != "#")["espalier_unfinished_futures"]) == 0


def group_data(generator, groups, n, prompt, response):
    out = []
    for _ in range(groups):
        shared = generator.integers(0, VOCABULARY, prompt).tolist()
        for _ in range(n):
            tokens = shared + generator.integers(0, VOCABULARY, response).tolist()
            targets = [0] * (prompt - 1) + tokens[prompt:]
            zeros = [0.0] * (prompt - 1)
            out.append((tokens[:-1], {"target_tokens": targets, "logprobs": zeros + [-4.5] * response, "advantages": zeros + generator.normal(size=response).tolist()}))
    return out


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
