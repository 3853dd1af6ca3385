"""`espalier serve --device`: training, samples and snapshots on the emulated GPU, whose kernels' sources run on a processor."""

import pytest
import torch

tinker = pytest.importorskip("tinker", reason="the SDK is not installed (tools/requirements-tests.txt)")
pytest.importorskip("peft")
import numpy as np  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from serve_client import NAME, ByHand, group_data  # noqa: E402
from serve_process import Server, without_proxies  # noqa: E402

EXACT = 1e-10  # relative: float64 on both sides, some thousand operations


def run(program, model, folder, device):
    """What a client gets from a server on the device: metrics, samples, the file of the trained adapter."""
    without_proxies()
    server = Server(program, {NAME: model}, "--state", folder / device, "--dtype", "float64", "--device", device, "--token-budget", 24)
    try:
        client, other = ByHand(server), ByHand(server, rank=2)
        data, generator = group_data(np.random.default_rng(2), 2, 3, 12, 5), np.random.default_rng(3)
        results = []
        for step in range(2):
            calls = [one.forward_backward(2 * step + 1, data, loss="importance_sampling")[1]["request_id"] for one in (client, other)]  # in turns
            results += [one.metrics(call) for one, call in zip((client, other), calls)]
            results += [one.metrics(one.optim_step(2 * step + 2, learning_rate=1e-2)[1]["request_id"]) for one in (client, other)]
        results.append(client.metrics(client.forward_backward(5, group_data(generator, 1, 2, 9, 4), loss="importance_sampling", forward_only=True)[1]["request_id"]))
        tokens = client.sample(6, temperature=0.0)[0][0]
        path = server.result(client.save(7, "end")[1]["request_id"])[1]["path"].removeprefix("tinker://")
        return results, tokens, load_file(folder / device / "runs" / path / "adapter_model.safetensors")
    finally:
        server.kill()


def test_a_server_on_a_device_gives_what_one_on_processors_gives(program, model_of, tmp_path):
    if not (program.parent / "libespalier_emulated.so").exists():
        pytest.skip("libespalier_emulated.so is not beside the program: the C++ tests are not built")
    (wanted, tokens, weights), (found, tokens_found, weights_found) = (run(program, model_of("qwen3_tied"), tmp_path, device) for device in ("cpu", "emulate"))
    assert [set(one) for one in found] == [set(one) for one in wanted]
    for one, other in zip(found, wanted):
        assert one == pytest.approx(other, rel=1e-9)
    assert tokens_found == tokens
    assert weights_found.keys() == weights.keys()
    for name, values in weights.items():
        assert torch.linalg.norm(weights_found[name].double() - values.double()) <= EXACT * torch.linalg.norm(values.double()) + 1e-12, name
