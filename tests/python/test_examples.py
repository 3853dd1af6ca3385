"""The examples run as they stand, and docs/examples.md shows each."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from text_model import byte_level_tokenizer, make_text_model


def run(name, *arguments, launcher=(sys.executable,), saved=0.5, **variables):
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path), **variables)
    done = subprocess.run([*launcher, str(ROOT / "examples" / name), *arguments], capture_output=True, text=True, timeout=280,
                          env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"(\d+) rows run instead of (\d+)", done.stdout)
    assert rows and all(int(ran) < int(without) * (1 - saved) for ran, without in rows), done.stdout
    return done.stdout


def test_every_example_is_shown_and_run():
    shown = (ROOT / "docs/examples.md").read_text()
    run_here = Path(__file__).read_text() + "".join((ROOT / "tests/python" / name).read_text() for name in ("test_c_package.py", "test_plugins.py"))
    for example in (ROOT / "examples").iterdir():
        if example.name != "__pycache__":
            assert f"`{example.name}" in shown and (example.name in run_here or f"{example.stem}.SharedPrompts" in run_here or example.name == "verl_cpu.py"), example.name


def test_own_data(program, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 2 + 3?", "ground_truth": "5"}\n{"prompt": "What is 2 + 6?", "ground_truth": "8"}\n')
    out = tmp_path / "trained"
    text = run("own_data.py", "--prompts", str(prompts), "--out", str(out), saved=0.3, ESPALIER_BINARY=str(program))
    assert text.count("mean reward") == 2 and (out / "model.safetensors").is_file()


def test_preference_pairs(program, tmp_path):
    text = run("preference_pairs.py", "--out", str(tmp_path / "trained"), saved=0.3, ESPALIER_BINARY=str(program))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert len(losses) == 3 and losses[-1] < losses[0] and (tmp_path / "trained/model.safetensors").is_file()


def test_reward_model(program, tmp_path):
    text = run("reward_model.py", "--out", str(tmp_path / "trained"), saved=0.3, ESPALIER_BINARY=str(program))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    right, wrong = (float(reward) for reward in re.findall(r"reward +(-?[\d.]+)", text))
    assert losses[-1] < losses[0] and right > wrong, text
    assert json.loads((tmp_path / "trained/config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]


def test_an_agent_with_a_tool(program, tmp_path):
    """look_up_tool.py, as docs/agents.md runs it, but shorter."""
    done = subprocess.run([str(program), "grpo", "--task", "retrieval", "--env", str(ROOT / "examples/look_up_tool.py"), "--turns", "2",
                           "--prompt-length", "64", "--max-response-length", "16", "--train-batch-size", "4", "--n", "8", "--lr", "5e-4",
                           "--steps", "2", "--val-size", "8", "--warm-start-steps", "30", "--json", "--out", str(tmp_path / "run")],
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = json.loads(done.stdout)["steps"]
    assert len(steps) == 2 and all(1 <= step["turns"] <= 2 and 0 <= step["reward"] <= 1 for step in steps)


def test_processes():
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    text = run("processes.py", launcher=torchrun)
    found = re.findall(r"rank (\d), step (\d): .*? gradient norm ([\d.]+)", text)
    norms = {(rank, step): norm for rank, step, norm in found}
    assert len(found) == len(norms) == 4, text
    assert all(norms["0", step] == norms["1", step] for step in "01"), "processes step with one gradient"


def test_plan_64_gpus(program):
    text = run("plan_64_gpus.py", "--prompts", "8", "--ranks", "8", saved=0.3, ESPALIER_BINARY=str(program))
    layout = dict(re.findall(r"(tp|cp|pp|dp) (\d+)", text.splitlines()[0]))
    assert math.prod(map(int, layout.values())) == 8, text
    assert "; fits" in text and "of 139.0 GiB" in text


def test_plain_loop():
    assert "pass: " in run("plain_loop.py", "--steps", "2")


def test_plain_loop_reads_the_program_s_own_records(espalier, model_of, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt_ids": {[*range(5, 30), i]}}}\n' for i in range(3)))
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 2\n")
    model = make_text_model(tmp_path / "model", byte_level_tokenizer(["a b c"] * 3, 300))
    espalier("generate", "--model", model, "--prompts", tmp_path / "prompts.jsonl", "--reward", tmp_path / "reward.py", "--n", 4,
             "--max-response-length", 6, "--out", tmp_path / "rollouts.jsonl")
    rewards = {record["reward"] for record in map(json.loads, open(tmp_path / "rollouts.jsonl"))}
    assert all(isinstance(reward, int) for reward in rewards), "whole numbers stand in the file as such"
    assert "step 0: loss" in run("plain_loop.py", str(model), "--records", str(tmp_path / "rollouts.jsonl"), "--steps", "1")


def test_trl_grpo():
    pytest.importorskip("trl")
    run("trl_grpo.py", "--steps", "1")


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward", "sft"])
def test_trl_pairs(kind):
    pytest.importorskip("trl")
    run("trl_pairs.py", "--steps", "1", "--kind", kind)


def test_verl_actor():
    pytest.importorskip("verl", reason="verl is not installed (tools/requirements-verl.txt)")
    text = run("verl_actor.py", "--steps", "1", VERL_ENGINE_VENDOR="espalier", ESPALIER_VERIFY="1")
    assert "step 0: loss" in text


def test_verl_grpo_sets_options_that_verl_has():
    """The command needs GPUs and vLLM; its options are held against the installed trainer's configuration."""
    verl = pytest.importorskip("verl.trainer.config", reason="verl is not installed (tools/requirements-verl.txt)")
    hydra = pytest.importorskip("hydra")
    script = (ROOT / "examples" / "verl_grpo.sh").read_text()
    overrides = re.findall(r"^    (\+?[a-z_.]+[A-Z_a-z.]*=\S+) \\$", script, re.MULTILINE)
    assert len(overrides) == script.count("=", script.index("main_ppo"))
    with hydra.initialize_config_dir(str(Path(verl.__file__).parent), version_base=None):
        config = hydra.compose("ppo_trainer", overrides)
    assert config.actor_rollout_ref.actor.strategy == "fsdp2" and config.actor_rollout_ref.actor.use_prefix_grouper
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR == "espalier"
    assert config.actor_rollout_ref.ref.strategy == "fsdp2"
