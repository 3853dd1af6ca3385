"""phased_step around wrapped models: LoRA, autocast, a frozen base, two processes under DDP and FSDP2 with unequal work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_models import all_float64, batch, dense_step, gradients, loss_of, make, worst

hf = pytest.importorskip("espalier.hf")
ROLLOUTS = batch()
LOSS = loss_of(ROLLOUTS)


def adapted():
    """q, v and up adapted: keys of the first layer have no graph, all others do."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("Qwen3"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0))
    model.double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=.1)
    return model


@pytest.mark.parametrize("trunk_state", ["keep", "recompute"])
def test_lora(trunk_state):
    model = adapted()
    with all_float64():
        dense_step(model, ROLLOUTS, LOSS)
        wanted = gradients(model)
        hf.phased_step(model, ROLLOUTS, LOSS, wave_tokens=30, trunk_state=trunk_state)
        found = gradients(model)
    assert len(wanted) == 2 * 3 * 3 and worst(found, wanted)[0] <= 1e-10


@pytest.mark.parametrize("trunk_state", ["keep", "recompute"])
def test_lora_with_checkpointing(trunk_state):
    model = adapted()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    result = hf.phased_step(model, ROLLOUTS, LOSS, wave_tokens=30, trunk_state=trunk_state, verify=True)
    assert result.verification.verdict == "pass" and result.verification.worst["floor"] < 1e-5


def test_a_compiled_model():
    """The graphs of TorchDynamo and AOTAutograd hold for every wave: two shapes are compiled, the second for all lengths."""
    import torch._dynamo
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    model = make("Qwen3", num_hidden_layers=2)
    hf.phased_step(model, ROLLOUTS, LOSS, wave_tokens=30)
    wanted = gradients(model)
    compiled = torch.compile(model, backend="aot_eager")
    hf.phased_step(compiled, ROLLOUTS, LOSS, wave_tokens=30)
    assert worst(gradients(model), wanted)[0] <= 1e-12  # the same operations, some in another order
    graphs = counters["stats"]["unique_graphs"]
    result = hf.phased_step(compiled, ROLLOUTS, LOSS, wave_tokens=40, verify=True)
    assert graphs > 0 and counters["stats"]["unique_graphs"] == graphs, "another wave is another graph"
    assert result.verification.verdict == "pass" and result.verification.worst["floor"] < 1e-5
    torch._dynamo.reset()


@pytest.mark.parametrize("trunk_state", ["keep", "recompute"])
def test_autocast_to_bfloat16(trunk_state):
    """Float32 weights, bfloat16 products. Against float32, shared may be twice as far as dense under the same autocast."""
    model = make("Qwen3", torch.float32)
    dense_step(model, ROLLOUTS, LOSS)
    exact = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        dense_step(model, ROLLOUTS, LOSS)
        dense = gradients(model)
        hf.phased_step(model, ROLLOUTS, LOSS, wave_tokens=30, trunk_state=trunk_state)
        shared = gradients(model)
    distance = lambda other: (sum((other[n] - exact[n]).square().sum() for n in exact) / sum(g.square().sum() for g in exact.values())).sqrt()
    assert 0 < distance(shared) <= 2 * distance(dense)


def test_a_frozen_base_with_a_trained_head():
    model = make("Llama", tie_word_embeddings=False)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    with all_float64():
        dense_step(model, ROLLOUTS, LOSS)
        wanted = gradients(model)
        hf.phased_step(model, ROLLOUTS, LOSS, wave_tokens=30)
        assert worst(gradients(model), wanted)[0] <= 1e-10


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes(kind, tmp_path):
    """Ranks with different numbers of prompts and waves leave the mean of both dense gradients; no_sync leaves the rank's own."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, str(Path(__file__).with_name("hf_ranks.py")), kind, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
             for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(outputs)


def test_the_common_order_of_ranks_holds_each_rank_s_own():
    import random

    from espalier.hf.ranks import common_order

    def nested(depth=0):
        return "".join(random.choice(["FB", "F" + nested(depth + 1) + random.choice(["B", "FB"]) if depth < 3 else "FB"])
                       for _ in range(random.randint(0 if depth == 0 else 1, 3)))

    for seed in range(300):
        random.seed(seed)
        everyone = [nested() for _ in range(random.randint(1, 4))]
        order = common_order(everyone)
        for rank, own in enumerate(everyone):
            assert "".join(letter for letter, who in order if rank in who) == own, seed
            held = 0
            for letter, who in order:
                held += 0 if rank in who else 1 if letter == "F" else -1
                assert held >= 0, f"seed {seed}: an empty backward without an empty forward"
