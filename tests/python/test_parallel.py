"""Runs of several processes: what they compute, who talks, and what happens when one of them is gone.

Most start the ranks themselves, as srun and mpirun do (rank 0 serves the meeting place); torchrun takes seconds to begin.
"""

import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time

import numpy
import pytest
from safetensors.numpy import load_file

from make_model import groups_of_four, make_rollouts, write_records

SEED = 61
MODEL = "qwen3_tied"
LOOP = ["--prompt-length", 64, "--max-response-length", 4, "--train-batch-size", 3, "--n", 3, "--mini-batch-size", 6, "--val-size", 6,
        "--test-freq", 2, "--save-freq", 1, "--warm-start-steps", 6, "--steps", 4, "--lr", "1e-3", "--kl-loss-coef", 0.01]
PATIENCE = 120  # seconds: far above what a run takes, far below what a hanging one would


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """The same command once for each rank; `where` gives a rank another working folder."""

    def __init__(self, program, count, words, where=None, **variables):
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1",
                  **variables}
        self.processes = [
            subprocess.Popen([str(program), *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             cwd=(where or {}).get(rank), env={**os.environ, **shared, "RANK": str(rank)})
            for rank in range(count)]

    def end(self, patience=PATIENCE):
        """Exit statuses and what was printed, by rank."""
        until = time.monotonic() + patience
        try:
            told = [process.communicate(timeout=max(0.1, until - time.monotonic())) for process in self.processes]
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
        self.stdout, self.stderr = [out for out, _ in told], [err for _, err in told]
        return [process.returncode for process in self.processes]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    return write_records(make_rollouts(SEED), tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Twelve groups of four: six steps an epoch with --mini-batch-size 8."""
    return write_records(groups_of_four(12), tmp_path_factory.mktemp("groups") / "groups.jsonl")


@pytest.fixture
def training(model_of, groups, tmp_path):
    """Words of a training run into tmp_path/out."""
    return ["train", "--model", model_of(MODEL), "--rollouts", groups, "--mini-batch-size", 8, "--lr", 1e-3, "--dtype", "float64",
            "--save-dtype", "float64", "--out", tmp_path / "out"]


def torchrun(count, words, *more):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(count),
            *more, "--no-python", *map(str, words)]


def near(ours, theirs, tolerance=1e-10):
    ours, theirs = load_file(ours), load_file(theirs)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert numpy.linalg.norm(ours[name] - expected) <= tolerance * max(numpy.linalg.norm(expected), 1e-30), name


# -- what they compute ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ranks, family, more", [
    (2, MODEL, ["--dp", 2, "--shard", "full"]), (4, "llama_untied", ["--pp", 2, "--dp", 2, "--shard", "full", "--schedule", "phased"]),
    (4, "qwen3_moe", ["--cp", 2, "--dp", 2, "--shard", "full", "--router-aux-loss-coef", 0.1]),
    (2, MODEL, ["--dp", 2]), (4, MODEL, ["--dp", 4, "--schedule", "phased"]), (4, MODEL, ["--dp", 4, "--shard", "optimizer"]),
    (2, MODEL, ["--tp", 2]), (4, "llama_untied", ["--tp", 4]), (4, "qwen2_untied", ["--tp", 2, "--dp", 2, "--shard", "optimizer"]),
    (2, MODEL, ["--cp", 2]), (4, MODEL, ["--cp", 2, "--dp", 2, "--schedule", "phased"]), (2, MODEL, ["--pp", 2]),
    (4, MODEL, ["--cp", 4, "--schedule", "phased", "--token-budget", 40, "--path-state", "divide"]),
    (4, "qwen3_moe", ["--cp", 2, "--dp", 2, "--ep", 2, "--schedule", "phased", "--path-state", "divide", "--router-aux-loss-coef", 0.1]),
    (4, "llama_untied", ["--cp", 2, "--pp", 2]), (4, "qwen3_moe", ["--tp", 2, "--cp", 2, "--router-aux-loss-coef", 0.1]),
    (2, "qwen3_moe", ["--cp", 2, "--ep", 2]), (4, "qwen3_moe", ["--pp", 2, "--dp", 2, "--ep", 2]),
    (2, "gemma2", ["--tp", 2]), (2, "phi3", ["--tp", 2]), (2, "glm4", ["--tp", 2]), (2, "granite", ["--pp", 2]), (2, "smollm3", ["--pp", 2]),
    (2, "starcoder2", ["--dp", 2, "--shard", "full"]), (2, "olmo3", ["--cp", 2]), (2, "gemma3", ["--tp", 2]),
    (2, "qwen2_moe", ["--tp", 2]), (2, "qwen2_moe", ["--cp", 2]), (2, "qwen2_moe", ["--dp", 2, "--ep", 2]), (2, "glm4_moe", ["--tp", 2]),
    (2, "glm4_moe", ["--pp", 2]), (2, "glm4_moe", ["--dp", 2, "--shard", "full"]), (4, "glm4_moe", ["--tp", 2, "--dp", 2, "--ep", 4]),
    (2, "gpt_oss_moe", ["--tp", 2]), (2, "gpt_oss_moe", ["--cp", 2]), (2, "gpt_oss_moe", ["--pp", 2]), (2, "gpt_oss_moe", ["--dp", 2, "--ep", 2]),
    (2, "gpt_oss_moe", ["--dp", 2, "--shard", "full"]), (4, "gpt_oss_moe", ["--tp", 2, "--dp", 2, "--ep", 2]),
    (2, "minimax_m2_moe", ["--dp", 2, "--ep", 2]), (2, "qwen3_next_moe", ["--dp", 2, "--ep", 2]),
    (2, "qwen3_next_moe", ["--tp", 2]), (2, "qwen3_5", ["--tp", 2]), (2, "qwen3_next", ["--pp", 2]), (4, "qwen3_5", ["--tp", 2, "--pp", 2]),
    (2, "nemotron_h", ["--tp", 2]), (2, "nemotron_h_moe", ["--pp", 2]), (2, "nemotron_h_moe", ["--dp", 2, "--ep", 2]),
    (2, "granite_hybrid", ["--dp", 2, "--shard", "full"]), (2, "granite_hybrid", ["--tp", 2]), (2, "phi3_long", ["--cp", 2]),
    (2, "qwen3_moe", ["--dp", 2, "--ep", 2]), (4, "qwen3_moe", ["--tp", 2, "--dp", 2, "--ep", 4, "--router-aux-loss-coef", 0.1])])
def test_processes_write_what_one_writes(ranks, family, more, espalier, program, model_of, rollouts, tmp_path):
    words = ["train", "--model", model_of(family), "--rollouts", rollouts, "--dtype", "float64", "--save-dtype", "float64", "--lr", 1e-3]
    outputs = lambda name: ["--out", tmp_path / name, "--gradients", tmp_path / f"{name}.safetensors",
                            "--logprobs", tmp_path / f"{name}.jsonl"]
    degrees = ("--tp", "--cp", "--pp", "--dp", "--ep", "--shard")
    alone = [word for i, word in enumerate(more) if word not in degrees and (i == 0 or more[i - 1] not in degrees)]
    espalier(*words, *alone, *outputs("alone"))
    run = Ranks(program, ranks, [*words, *outputs("ranks"), *more, "--json"])
    assert run.end() == [0] * ranks, run.stderr
    steps = json.loads(run.stdout[0])["steps"]
    assert len(steps) == 1 and not any(run.stdout[1:]) and not any(run.stderr[1:])
    near(tmp_path / "ranks.safetensors", tmp_path / "alone.safetensors")
    near(tmp_path / "ranks/model.safetensors", tmp_path / "alone/model.safetensors")
    for ours, theirs in zip((tmp_path / "ranks.jsonl").open(), (tmp_path / "alone.jsonl").open(), strict=True):
        assert numpy.allclose(json.loads(ours)["logprobs"], json.loads(theirs)["logprobs"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("more", [[], ["--shard", "full"]])
def test_the_profile_shows_what_travels_beside_the_backward(more, program, model_of, rollouts, tmp_path):
    run = Ranks(program, 2, ["train", "--model", model_of(MODEL), "--rollouts", rollouts, "--dp", 2, "--profile", "--json", "--out", tmp_path / "out",
                             *more])
    assert run.end() == [0, 0], run.stderr
    collectives = json.loads(run.stdout[0])["steps"][0]["profile"]["collectives"]
    ahead, last = collectives["ahead"], collectives["last_backward"]
    assert collectives["by_axis"]["dp"]["bytes"] >= sum(event["bytes"] for event in ahead) > 0
    gradients = [event for event in ahead if event["of"].startswith("gradient of layer")]
    layers = [int(event["of"].split()[-1]) for event in gradients]
    if more:
        begun = [(event["started"], event["wanted"]) for event in ahead if event["call"] == "gather" and event["of"].startswith("layer")]
        assert any(started < wanted for started, wanted in begun)
    else:
        assert layers == sorted(layers, reverse=True) and len(layers) > 1
        assert last["began"] < gradients[0]["started"] < last["ended"] <= gradients[0]["wanted"]
    assert all(event["started"] <= event["ended"] and 0 <= event["hidden_seconds"] <= event["ended"] - event["started"] for event in ahead)


@pytest.mark.parametrize("axis, more", [("--dp", []), ("--dp", ["--shard", "full"]), ("--tp", []), ("--cp", []), ("--cp", ["--path-state", "divide"]),
                                         ("--pp", [])])
def test_scores_and_verdicts_of_processes(axis, more, espalier, program, model_of, rollouts, tmp_path):
    words = ["--model", model_of(MODEL), "--rollouts", rollouts, "--dtype", "float64"]
    espalier("score", *words, "--out", tmp_path / "alone.jsonl")
    run = Ranks(program, 2, ["score", *words, "--out", tmp_path / "ranks.jsonl", axis, 2, *more])
    assert run.end() == [0, 0], run.stderr
    for ours, theirs in zip((tmp_path / "ranks.jsonl").open(), (tmp_path / "alone.jsonl").open(), strict=True):
        assert numpy.allclose(json.loads(ours)["logprobs"], json.loads(theirs)["logprobs"], rtol=0, atol=1e-10)
    run = Ranks(program, 2, ["verify", *words, axis, 2, *more, "--json"])
    assert run.end() == [0, 0], run.stderr
    assert json.loads(run.stdout[0])["verdict"] == "pass"
    words = ["bench", "--splits", "24/8", "--n", 4, "--repetitions", 1, "--dtype", "float64", *words[:2]]
    (alone,) = espalier(*words, "--json").json["cells"]
    run = Ranks(program, 2, [*words, axis, 2, *more, "--json"])
    assert run.end() == [0, 0], run.stderr
    (cell,) = json.loads(run.stdout[0])["cells"]
    groups = 2 if axis == "--dp" else 1  # one for each rank
    assert cell["gradient_error"] <= 1e-10
    for name in ("dense", "packed", "phased"):
        # Waves that are dealt to ranks of cp each repeat the prompt's last token.
        more = cell["schedules"]["rows"][name] - groups * alone["schedules"]["rows"][name]
        assert more == 0 or (axis == "--cp" and 0 < more < 4)
        # Of all ranks together; a share of rows may be a row more than a half.
        assert cell["schedules"]["flops"][name] == pytest.approx(groups * alone["schedules"]["flops"][name], rel=0.05)
        assert cell["schedules"]["predicted_seconds"][name] > 0
    assert cell["ceiling"] == pytest.approx(alone["ceiling"], rel=1e-3)


def test_layout_auto_takes_degrees_for_the_processes(espalier, program, model_of, rollouts, tmp_path):
    words = ["train", "--model", model_of(MODEL), "--rollouts", rollouts, "--dtype", "float64", "--save-dtype", "float64", "--lr", 1e-3]
    espalier(*words, "--out", tmp_path / "alone")
    run = Ranks(program, 2, [*words, "--out", tmp_path / "ranks", "--layout", "auto"])
    assert run.end() == [0, 0], run.stderr
    assert re.search(r"note: .*(tp|dp) 2 takes .* of 2 processes", run.stderr[0]) and not run.stderr[1]
    near(tmp_path / "ranks/model.safetensors", tmp_path / "alone/model.safetensors")


def test_a_plan_finds_the_layout_of_many_processes(espalier, model_of, rollouts):
    words = ["plan", "--model", model_of("qwen3_moe"), "--rollouts", rollouts, "--machine", "h100", "--dtype", "bfloat16", "--json"]
    layout = espalier(*words, "--layout", "auto", "--ranks", 16).json["layout"]
    assert layout["processes"] == 16 and layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"] == 16
    assert layout["fits"] and layout["reason"] and layout["tried"][0]["seconds"] <= layout["tried"][1]["seconds"]
    given = espalier(*words, "--tp", 2, "--dp", 4, "--ep", 8).json["layout"]
    assert set(given["ranks"]["bytes"]) == {"tp", "dp", "ep"} and len(given["by_rank"]) == 4


def test_generated_records_of_processes(espalier, program, model_of, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in ([1, 2, 3], [5, 6], [1, 2, 3], [7, 8, 9, 10])))
    words = ["generate", "--model", model_of(MODEL), "--prompts", prompts, "--n", 3, "--max-response-length", 9, "--seed", 4,
             "--dtype", "float64"]
    espalier(*words, "--out", tmp_path / "alone.jsonl")
    records = lambda name: [json.loads(line) for line in (tmp_path / name).open()]
    for layout in (["--dp", 2], ["--tp", 2]):
        run = Ranks(program, 2, [*words, "--out", tmp_path / "ranks.jsonl", "--overwrite", *layout])
        assert run.end() == [0, 0], run.stderr
        for ours, theirs in zip(records("ranks.jsonl"), records("alone.jsonl"), strict=True):
            assert ours["response_ids"] == theirs["response_ids"] and ours["finish_reason"] == theirs["finish_reason"]
            assert numpy.allclose(ours["rollout_logprobs"], theirs["rollout_logprobs"], rtol=0, atol=1e-10)


def test_the_closed_loop_on_processes(espalier, program, tmp_path):
    words = ["grpo", "--dtype", "float64", "--save-dtype", "float64", "--schedule", "phased", *LOOP]
    espalier(*words, "--out", tmp_path / "alone")
    for number, layout in enumerate((["--dp", 2], ["--tp", 2])):
        out = tmp_path / f"ranks{number}"
        run = Ranks(program, 2, [*words, "--out", out, *layout])
        assert run.end() == [0, 0], run.stderr
        assert not run.stdout[1] and not run.stderr[1]
        near(out / "model/model.safetensors", tmp_path / "alone/model/model.safetensors", 1e-8)  # dozens of AdamW steps
    more = Ranks(program, 2, ["grpo", "--resume", tmp_path / "ranks0", "--steps", 6, "--tp", 2])
    assert more.end() == [0, 0], more.stderr
    assert json.loads((tmp_path / "ranks0/model/config.json").read_text())


# -- launch -----------------------------------------------------------------------------------------------------------

def test_without_a_launcher_the_command_to_type_is_given_and_works(espalier, training, tmp_path):
    outcome = espalier(*training, "--dp", 2, expect=2)
    command = re.search(r"start it with: (.*)", outcome.stderr).group(1)
    words = shlex.split(command)
    assert words[:2] == ["torchrun", "--nproc-per-node"]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", *words[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 6 of 6") == 1 and (tmp_path / "out/model.safetensors").is_file()


def test_degrees_and_processes_must_agree(program, training, tmp_path):
    run = Ranks(program, 3, [*training, "--dp", 2])
    assert run.end() == [2, 2, 2]
    told = "".join(run.stderr)
    assert told.count("option error") == 1 and "2 processes for dp 2" in told and "3 from torchrun" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", [["--dp", 2, "--ep", 2, "--shard", "optimizer"]])
def test_layouts_that_do_not_run_are_refused_by_name(layout, program, training):
    run = Ranks(program, 2, [*training, *layout])
    assert run.end() == [4, 4]
    assert "".join(run.stderr).count("unsupported error") == 1


# -- faults -----------------------------------------------------------------------------------------------------------

def test_bad_input_is_said_once(program, training, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt_ids": [1], "response_ids": [2], "reward": 1}\n{"prompt_ids": [1], "response_ids": [-5], "reward": 1}\n')
    run = Ranks(program, 3, [*training[:3], "--rollouts", bad, "--out", tmp_path / "out", "--dp", 3])
    statuses = run.end()
    assert 3 in statuses and set(statuses) <= {3, 7}
    told = "".join(run.stderr)
    assert told.count(" error at ") == 1 and "bad.jsonl:2" in told and not (tmp_path / "out").exists()


def test_ranks_with_other_files_end_with_7(program, training, groups, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "groups.jsonl").write_text(groups.read_text().replace('"reward": 2.0', f'"reward": {2 + rank}.0'))
    words = ["groups.jsonl" if word == groups else word for word in training]
    run = Ranks(program, 2, [*words, "--dp", 2], where={rank: tmp_path / str(rank) for rank in range(2)})
    assert run.end() == [7, 7]
    told = "".join(run.stderr)
    assert told.count("communication error") == 1 and "rank 1" in told and not (tmp_path / "out").exists()


def test_a_full_disk_on_rank_0_ends_all(program, training, tmp_path):
    run = Ranks(program, 2, [*training, "--logprobs", "/dev/full", "--dp", 2])
    statuses = run.end()
    assert statuses[0] == 2 and statuses[1] == 7
    assert "".join(run.stderr).count(" error") == 1 and not (tmp_path / "out").exists()


def wait_for(condition, patience=PATIENCE):
    until = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.01)


def saved_step(folder):
    try:
        return json.loads((folder / "espalier/state.json").read_text())["step"]
    except (FileNotFoundError, json.JSONDecodeError):
        return 0


def endless(training):
    return [*training, "--epochs", 100000, "--save-freq", 1, "--dp", 3]


@pytest.mark.parametrize("victim, more", [(0, []), (1, []), (1, ["--shard", "full"])])
def test_a_killed_rank_ends_all_and_leaves_a_whole_checkpoint(victim, more, espalier, program, training, tmp_path):
    run = Ranks(program, 3, [*endless(training), "--comm-timeout", 20, *more])
    wait_for(lambda: (tmp_path / "out/model.safetensors").is_file())
    run.processes[victim].kill()
    statuses = run.end()
    assert statuses[victim] == -signal.SIGKILL
    assert [status for rank, status in enumerate(statuses) if rank != victim] == [7, 7]
    if victim != 0:  # else the meeting place is gone with it
        assert f"no word from rank {victim}" in "".join(run.stderr)
    done = json.loads((tmp_path / "out/espalier/state.json").read_text())["step"]
    on = espalier("train", "--resume", tmp_path / "out", "--rollouts", training[4], "--steps", done + 1, "--out", tmp_path / "on",
                  "--json").json
    assert [step["step"] for step in on["steps"]] == [done + 1]


def test_killed_at_any_moment_a_run_leaves_a_whole_checkpoint(program, espalier, training, tmp_path):
    chance, step = random.Random(SEED), 0
    words = endless(training)
    for kill in range(4):
        began = [*words, "--comm-timeout", 20] + (["--resume", tmp_path / "out"] if kill else [])
        run = Ranks(program, 3, began)
        wait_for(lambda: saved_step(tmp_path / "out") > step)
        time.sleep(chance.uniform(0, 0.2))
        chance.choice(run.processes).kill()
        assert sorted(run.end()) == [-signal.SIGKILL, 7, 7], run.stderr
        assert saved_step(tmp_path / "out") > step
        step = saved_step(tmp_path / "out")
        assert numpy.isfinite(load_file(tmp_path / "out/model.safetensors")["model.norm.weight"]).all()


@pytest.mark.parametrize("more", [[], ["--shard", "full"]])
def test_a_silent_rank_is_given_up(more, program, training, tmp_path):
    run = Ranks(program, 3, [*endless(training), "--comm-timeout", 3, *more])
    wait_for(lambda: (tmp_path / "out/model.safetensors").is_file())
    run.processes[2].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    wait_for(lambda: all(process.poll() is not None for process in run.processes[:2]))
    assert time.monotonic() - began < 3 + 20
    run.processes[2].kill()
    assert run.end()[:2] == [7, 7]
    assert "no word from rank 2" in "".join(run.stderr)


@pytest.mark.parametrize("overwrite", [False, True])
def test_after_a_rank_was_killed_the_command_that_continues_is_told(overwrite, program, espalier, training, tmp_path):
    words = [*training, "--epochs", 100_000, "--dp", 2, "--comm-timeout", 2]
    if overwrite:  # a model that another run left is nothing to continue from
        espalier(*training)
        words += ["--overwrite"]
    else:
        words += ["--save-freq", 1]
    run = Ranks(program, 2, words)
    if overwrite:
        assert run.processes[0].stdout.readline().startswith("step 1 ")
    else:
        wait_for(lambda: (tmp_path / "out/espalier/state.json").is_file())
    run.processes[1].kill()
    assert run.end()[0] == 7
    said = "".join(run.stderr)
    assert ("continue with: espalier train --resume" in said) == (not overwrite), said


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_dies_before_they_meet_is_given_up(missing, program, training):
    run = Ranks(program, 2, [*training, "--dp", 2, "--comm-timeout", 3])
    run.processes[missing].kill()
    began = time.monotonic()
    assert run.end()[1 - missing] == 7
    assert time.monotonic() - began < 2 * 10 + 20  # waited for ranks that start; torch's store tries again for as long
    assert run.stderr[1 - missing].count("communication error") == 1


def test_a_run_with_a_divided_path_is_continued_under_another_layout(espalier, program, training, tmp_path):
    """Under torchrun: two steps with the path divided, then two without; the weights of one process that does all four."""
    steps = lambda count, out: [*training[:-1], tmp_path / out, "--steps", count, "--schedule", "phased", "--token-budget", 40]
    espalier(*steps(4, "alone"))
    first = subprocess.run(torchrun(2, [program, *steps(2, "first"), "--cp", 2, "--path-state", "divide"]), capture_output=True, text=True,
                           timeout=PATIENCE)
    assert first.returncode == 0, first.stderr
    for name, layout in {"pp": ["--pp", 2], "again": ["--cp", 2, "--path-state", "divide"], "keep": ["--cp", 2, "--path-state", "keep"]}.items():
        run = Ranks(program, 2, [*steps(4, name), "--resume", tmp_path / "first", *layout])
        assert run.end() == [0, 0], run.stderr
        near(tmp_path / name / "model.safetensors", tmp_path / "alone/model.safetensors", 1e-12)


def test_torchrun_starts_again_from_the_last_checkpoint(espalier, program, training, tmp_path):
    words = [*training, "--epochs", 20, "--save-freq", 1, "--dp", 2]
    whole = [tmp_path / "whole" if word == tmp_path / "out" else word for word in words]
    alone = Ranks(program, 2, whole)
    assert alone.end() == [0, 0], alone.stderr
    agent = subprocess.Popen(torchrun(2, [program, *words], "--max-restarts", "1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True)
    wait_for(lambda: (tmp_path / "out/model.safetensors").is_file())
    children = subprocess.run(["ps", "--ppid", str(agent.pid), "-o", "pid="], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, err = agent.communicate(timeout=PATIENCE)
    assert agent.returncode == 0, err
    assert "started again by the launcher" in err
    for file in ("model.safetensors", "espalier/state.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
