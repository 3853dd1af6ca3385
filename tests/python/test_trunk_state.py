"""Stored-away trunks through the program: the bits of kept ones in less memory, and nothing lost or left when the disk or a signal stops it."""

import os
import random
import resource
import signal
import subprocess
import time

import pytest

from make_model import write_records

MODEL = "qwen3_tied"
PROMPT, RESPONSE, N = 4000, 40, 4


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    draw = random.Random(7)
    ids = lambda count: [draw.randrange(3, 97) for _ in range(count)]
    prompt = ids(PROMPT)
    records = [{"prompt_ids": prompt, "response_ids": ids(RESPONSE), "reward": float(i)} for i in range(N)]
    return write_records(records, tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


def arguments(model, rollouts, out, state, *more):
    return ["train", "--model", model, "--rollouts", rollouts, "--out", out, "--gradients", f"{out}.safetensors", "--schedule", "phased",
            "--token-budget", 512, "--trunk-state", state, "--wave-state", "keep", "--json", "--quiet", *more]


def gradients(out):
    with open(f"{out}.safetensors", "rb") as file:
        return file.read()


def test_stored_trunks_give_the_bits_of_kept_ones_where_kept_ones_do_not_fit(espalier, model_of, rollouts, tmp_path):
    model, spill = model_of(MODEL), tmp_path / "spill"
    spill.mkdir()
    kept = espalier(*arguments(model, rollouts, tmp_path / "keep", "keep")).json["steps"][0]
    stored = espalier(*arguments(model, rollouts, tmp_path / "store", "offload", "--spill-dir", spill)).json["steps"][0]
    assert gradients(tmp_path / "keep") == gradients(tmp_path / "store")
    assert not list(spill.iterdir())
    for phase in "ABC":
        assert stored["arena_bytes"][phase] < kept["arena_bytes"][phase], phase
    # A budget between the two predictions: kept is refused before it starts, stored runs within it and gives the same bits.
    need = {name: max(step["predicted"]["peak_bytes"].values()) for name, step in (("keep", kept), ("offload", stored))}
    if need["keep"] <= need["offload"]:
        pytest.fail(f"nothing gained: {need}")
    budget = (need["keep"] + need["offload"]) // 2
    refused = espalier(*arguments(model, rollouts, tmp_path / "refused", "keep", "--memory-budget", f"{budget}B"), expect=5)
    assert "--trunk-state" in refused.stderr and not (tmp_path / "refused").exists()
    within = espalier(*arguments(model, rollouts, tmp_path / "within", "offload", "--spill-dir", spill, "--memory-budget", f"{budget}B"))
    assert gradients(tmp_path / "within") == gradients(tmp_path / "keep")
    assert max(within.json["steps"][0]["peak_bytes"].values()) <= budget


def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@pytest.mark.parametrize("how", ["gone", "a file", "full"])
def test_a_place_that_takes_nothing_is_named_and_nothing_is_written(espalier, model_of, rollouts, tmp_path, how):
    spill = tmp_path / "spill"
    if how == "a file":
        spill.write_text("x")
    elif how == "full":
        spill.mkdir()
    settings = {"preexec_fn": limited} if how == "full" else {}
    outcome = espalier(*arguments(model_of(MODEL), rollouts, tmp_path / "out", "offload", "--spill-dir", spill), expect=2, **settings)
    assert str(spill) in outcome.stderr and "--spill-dir" in outcome.stderr, outcome
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.safetensors").exists()
    if how == "full":
        assert not list(spill.iterdir())


def test_a_killed_run_leaves_nothing_behind(program, model_of, rollouts, tmp_path):
    spill = tmp_path / "spill"
    spill.mkdir()
    command = [str(word) for word in (program, *arguments(model_of(MODEL), rollouts, tmp_path / "out", "offload", "--spill-dir", spill,
                                                          "--epochs", 1000))]
    for _ in range(5):
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        links = f"/proc/{run.pid}/fd"
        until = time.monotonic() + 60
        while time.monotonic() < until and run.poll() is None and not any(
                os.path.realpath(os.path.join(links, fd)).startswith(str(spill)) for fd in os.listdir(links)):
            time.sleep(0.005)
        assert run.poll() is None, "the run ended before it stored anything away"
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert not list(spill.iterdir())
