"""What processes hold against what their plan says: within 5 %, of one process and of ranks that divide the weights."""

import json
import sys

import pytest

from conftest import ROOT
from test_parallel import Ranks

sys.path.insert(0, str(ROOT / "bench"))
import memory_sweep

MEBI = 2**20


def files(folder, vocabulary, rollouts, **shape):
    memory_sweep.write_model(folder / "model", {**memory_sweep.SHAPE, **shape, "vocab_size": vocabulary})
    memory_sweep.write_rollouts(folder / "rollouts.jsonl", vocabulary, **rollouts)
    return ["train", "--model", folder / "model", "--rollouts", folder / "rollouts.jsonl", "--json", "--quiet"]


def of_process(found):
    """(bytes of the process at its most, bytes that its last step was planned to hold)."""
    return found["peak_bytes"], max(found["steps"][-1]["predicted"]["peak_bytes"].values())


def test_ranks_that_divide_the_weights_hold_what_they_planned_saving_included(program, tmp_path):
    """Embedding and head are most of the model: whole ones that a library copied or a file waited for would be seen."""
    words = files(tmp_path, 24576, dict(prompt=96, response=16, n=4, groups=2), num_hidden_layers=2)
    budget = 620
    run = Ranks(program, 2, [*words, "--dp", 2, "--shard", "full", "--memory-budget", f"{budget}MiB", "--out", tmp_path / "out", "--epochs", 2])
    assert run.end() == [0, 0], run.stderr
    process, planned = of_process(json.loads(run.stdout[0]))
    assert planned <= budget * MEBI and 0.95 * planned < process < 1.05 * planned, (process / MEBI, planned / MEBI)


@pytest.mark.parametrize("n, output", [(4, "--logprobs"), (32, "--logprobs"), (4, "--gradients")])
def test_small_waves_in_bfloat16_hold_what_they_planned(n, output, program, tmp_path):
    words = files(tmp_path, 40000, dict(prompt=30, response=90, n=n), hidden_size=192, num_hidden_layers=1, num_attention_heads=3,
                  num_key_value_heads=1, intermediate_size=512)
    # In a process of its own, whose peak is its own.
    found = Ranks(program, 1, [*words, "--dtype", "bfloat16", "--schedule", "dense", "--token-budget", 64, output, tmp_path / "output"],
                  OMP_NUM_THREADS="2")
    assert found.end() == [0], found.stderr
    process, planned = of_process(json.loads(found.stdout[0]))
    assert 0.95 * planned < process < 1.05 * planned, (process / MEBI, planned / MEBI)


def test_a_path_below_windows_holds_their_last_rows(program, tmp_path):
    """Layers with a window of 64 rows and with one that no rollout is longer than: measured and planned alike, and lower by the
    keys, the values and the sums of their gradients of all other rows of the prompt."""
    found, prompt, layers, keys = {}, 6144, 6, 2 * 64
    for window in (64, 16384):
        folder = tmp_path / str(window)
        folder.mkdir()
        words = files(folder, 512, dict(prompt=prompt, response=32, n=4), use_sliding_window=True, max_window_layers=0,
                      sliding_window=window, num_hidden_layers=layers, hidden_size=128, intermediate_size=256, num_attention_heads=2,
                      num_key_value_heads=2, head_dim=64)
        run = Ranks(program, 1, [*words, "--schedule", "phased", "--trunk-state", "recompute", "--token-budget", 512, "--logprobs",
                                 tmp_path / "output"], OMP_NUM_THREADS="2")
        assert run.end() == [0], run.stderr
        found[window] = of_process(json.loads(run.stdout[0]))
        process, planned = found[window]
        assert 0.95 * planned < process < 1.05 * planned, (window, process / MEBI, planned / MEBI)
    bytes_of_row = layers * 2 * keys * (4 + 4)  # keys and values, and the sums, in float32
    saved = (prompt - 512) * bytes_of_row
    assert found[16384][1] - found[64][1] > 0.9 * saved and found[16384][0] - found[64][0] > 0.9 * saved, (found, saved / MEBI)


def test_a_path_of_latents_holds_them_alone(program, tmp_path):
    """Latent attention with 4 heads of keys and values, 40 numbers of latents a row: measured and planned alike, lower by what keys and
    values of all layers but one take, with the same log-probs."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    prompt, layers, heads, latent, rotary = 6144, 6, 4, 32, 8
    config = DeepseekV3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=layers, first_k_dense_replace=layers, num_attention_heads=heads,
        num_key_value_heads=heads, q_lora_rank=None, kv_lora_rank=latent, qk_nope_head_dim=32, qk_rope_head_dim=rotary, v_head_dim=32,
        max_position_embeddings=16384, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32)
    DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "model")
    memory_sweep.write_rollouts(tmp_path / "rollouts.jsonl", 512, prompt=prompt, response=32, n=4)
    found = {}

    def measure(state, ranks=1):
        run = Ranks(program, ranks, ["train", "--model", tmp_path / "model", "--rollouts", tmp_path / "rollouts.jsonl", "--json", "--quiet",
                                     "--schedule", "phased", "--trunk-state", "keep", "--token-budget", 512, "--path-state", state,
                                     "--logprobs", tmp_path / state, "--overwrite", "--cp", ranks], OMP_NUM_THREADS=str(2 // ranks))
        assert run.end() == [0] * ranks, run.stderr
        found[state, ranks] = of_process(json.loads(run.stdout[0]))
        process, planned = found[state, ranks]
        assert 0.95 * planned < process < 1.05 * planned, (state, ranks, process / MEBI, planned / MEBI)

    for state in ("keep", "latents", "latents-offload"):
        measure(state)
        assert (tmp_path / state).read_bytes() == (tmp_path / "keep").read_bytes()
    keys_values = heads * (32 + rotary + 32)
    saved = prompt * (4 + 4) * ((layers - 1) * keys_values - layers * (latent + rotary))  # and the sums, in float32
    for process_or_plan in (0, 1):
        assert found["keep", 1][process_or_plan] - found["latents", 1][process_or_plan] > 0.9 * saved, (found, saved / MEBI)
    for state in ("keep", "latents", "latents-divide"):
        measure(state, ranks=2)
    for process_or_plan in (0, 1):
        assert found["keep", 2][process_or_plan] - found["latents", 2][process_or_plan] > 0.9 * saved, (found, saved / MEBI)
