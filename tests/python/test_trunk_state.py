"""Stored-away trunks and paths through the program: the bits of kept ones in less memory, and nothing lost or left when the disk or a signal stops it."""

import json
import os
import random
import resource
import signal
import subprocess
import time

import pytest

from make_model import make_model, write_records
from memory_limit import memory_limit

MODEL = "qwen3_tied"
PROMPT, RESPONSE, N = 4000, 40, 4


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    draw = random.Random(7)
    ids = lambda count: [draw.randrange(3, 97) for _ in range(count)]
    prompt = ids(PROMPT)
    records = [{"prompt_ids": prompt, "response_ids": ids(RESPONSE), "reward": float(i)} for i in range(N)]
    return write_records(records, tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


STORED = pytest.mark.parametrize("state, path", [("offload", "keep"), ("keep", "offload")], ids=["trunks", "path"])


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


def test_a_path_that_sleeps_gives_the_bits_of_one_that_does_not(espalier, model_of, rollouts, tmp_path):
    model, spill = model_of(MODEL), tmp_path / "spill"
    spill.mkdir()
    run = lambda name, *more: espalier(*arguments(model, rollouts, tmp_path / name, "recompute", "--spill-dir", spill, *more)).json["steps"][0]
    awake, asleep = run("awake", "--path-state", "keep"), run("asleep", "--path-state", "offload")
    assert gradients(tmp_path / "awake") == gradients(tmp_path / "asleep") and not list(spill.iterdir())
    for phase in "ABC":
        assert asleep["arena_bytes"][phase] < awake["arena_bytes"][phase], phase
    scores = [espalier("score", "--model", model, "--rollouts", rollouts, "--out", tmp_path / f"{state}.jsonl", "--schedule", "phased", "--token-budget",
                       512, "--path-state", state, "--spill-dir", spill, "--quiet") and (tmp_path / f"{state}.jsonl").read_bytes()
              for state in ("keep", "offload")]
    assert scores[0] == scores[1] and not list(spill.iterdir())


def test_a_path_larger_than_the_memory_that_the_system_allows(espalier, program, tmp_path):
    """Keys, values and their gradients of 24 layers and 8,192 tokens: 384 MiB. The system allows 300 for everything."""
    limit, prompt = 300 << 20, 8192
    model = make_model(MODEL, tmp_path / "model", hidden_size=64, intermediate_size=64, num_hidden_layers=24, num_attention_heads=4,
                       num_key_value_heads=4, head_dim=32, max_position_embeddings=16384)
    draw = random.Random(4)
    ids = lambda count: [draw.randrange(3, 97) for _ in range(count)]
    records = write_records([{"prompt_ids": ids(prompt), "response_ids": ids(16), "reward": float(i), "group": 0} for i in range(1)],
                            tmp_path / "rollouts.jsonl")
    spill = tmp_path / "spill"
    spill.mkdir()
    kept = espalier(*arguments(model, records, tmp_path / "keep", "recompute", "--path-state", "keep")).json["steps"][0]
    assert kept["arena_bytes"]["B"] > limit, "this path would fit"
    with memory_limit(limit) as (before, settings):
        run = lambda *words: subprocess.run([*before, *map(str, words)], capture_output=True, text=True, **settings)
        refused = run(program, *arguments(model, records, tmp_path / "refused", "recompute", "--path-state", "keep"))
        assert refused.returncode == 5 and "--path-state auto" in refused.stderr and not (tmp_path / "refused").exists(), refused
        done = run(program, *arguments(model, records, tmp_path / "store", "recompute", "--path-state", "offload", "--spill-dir", spill))
        assert done.returncode == 0, done
    assert json.loads(done.stdout)["peak_bytes"] <= limit
    assert gradients(tmp_path / "store") == gradients(tmp_path / "keep") and not list(spill.iterdir())


@pytest.mark.parametrize("verb", ["train", "score", "verify", "replay", "bench"])
def test_a_step_that_cannot_fit_is_refused_before_any_weight_is_read(espalier, model_of, rollouts, tmp_path, verb):
    """The model's weights are none: who reads them first says so, with exit code 3."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # a file without tensors
    (model / "config.json").write_bytes((model_of(MODEL) / "config.json").read_bytes())
    outputs = ["--out", tmp_path / "out"] if verb in ("train", "score") else []
    source = [rollouts] if verb == "replay" else ["--rollouts", rollouts]
    words = [verb, *source, "--model", model, *outputs, "--schedule", "dense", "--token-budget", PROMPT + RESPONSE, "--quiet"]
    refused = espalier(*words, "--memory-budget", "134MiB", expect=5)
    assert "at least" in refused.stderr and "--token-budget 0" in refused.stderr and not (tmp_path / "out").exists(), refused
    espalier(*words, expect=3)


def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@STORED
@pytest.mark.parametrize("how", ["gone", "a file", "full"])
def test_a_place_that_takes_nothing_is_named_and_nothing_is_written(espalier, model_of, rollouts, tmp_path, how, state, path):
    spill = tmp_path / "spill"
    if how == "a file":
        spill.write_text("x")
    elif how == "full":
        spill.mkdir()
    settings = {"preexec_fn": limited} if how == "full" else {}
    outcome = espalier(*arguments(model_of(MODEL), rollouts, tmp_path / "out", state, "--path-state", path, "--spill-dir", spill), expect=2, **settings)
    assert str(spill) in outcome.stderr and "--spill-dir" in outcome.stderr, outcome
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.safetensors").exists()
    if how == "full":
        assert not list(spill.iterdir())


@pytest.fixture
def file_system(tmp_path):
    """file_system(options) -> a folder of a small file system of its own in memory."""
    mounted = []

    def mount(options):
        folder = tmp_path / f"mount{len(mounted)}"
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "espalier-test", folder], capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@STORED
@pytest.mark.parametrize("options", ["size=1m", "ro"])
def test_a_full_or_read_only_file_system_is_named_and_nothing_is_written(espalier, model_of, rollouts, tmp_path, file_system, options, state, path):
    spill = file_system(options)
    outcome = espalier(*arguments(model_of(MODEL), rollouts, tmp_path / "out", state, "--path-state", path, "--spill-dir", spill), expect=2)
    assert str(spill) in outcome.stderr and "--spill-dir" in outcome.stderr, outcome
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.safetensors").exists() and not list(spill.iterdir())


def spill_files(run, spill):
    """Paths below /proc by which the files that a run has open in a folder can be reached."""
    links = f"/proc/{run.pid}/fd"
    try:
        return [path for fd in os.listdir(links) if os.path.realpath(path := os.path.join(links, fd)).startswith(str(spill))]
    except OSError:
        return []


def wait_for_spill(run, spill):
    until = time.monotonic() + 60
    while time.monotonic() < until and run.poll() is None and not spill_files(run, spill):
        time.sleep(0.005)
    assert run.poll() is None, "the run ended before it stored anything away"


@STORED
def test_flipped_bits_in_the_file_end_the_run_with_the_place(program, model_of, rollouts, tmp_path, state, path):
    spill = tmp_path / "spill"
    spill.mkdir()
    command = [str(word) for word in (program, *arguments(model_of(MODEL), rollouts, tmp_path / "out", state, "--path-state", path,
                                                          "--spill-dir", spill, "--epochs", 1000))]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for_spill(run, spill)
    while run.poll() is None:  # sooner or later what lies there waits to be read
        run.send_signal(signal.SIGSTOP)
        for path in spill_files(run, spill):
            with open(path, "r+b") as file:
                for place in range(0, os.fstat(file.fileno()).st_size, 1 << 18):
                    file.seek(place)
                    byte = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte[0] ^ 4]))
        run.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    message = run.stderr.read()
    assert run.returncode == 3 and str(spill) in message and "checksum" in message, (run.returncode, message)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.safetensors").exists() and not list(spill.iterdir())


def test_a_trunk_larger_than_the_memory_that_the_system_allows(espalier, program, tmp_path):
    """Trunks of one wide, shallow model: 400 MB to keep. The system allows 350 MiB for everything."""
    limit, prompt = 350 << 20, 4096
    model = make_model(MODEL, tmp_path / "model", hidden_size=64, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=2,
                       num_key_value_heads=1, head_dim=32, max_position_embeddings=8192)
    draw = random.Random(3)
    ids = lambda count: [draw.randrange(3, 97) for _ in range(count)]
    shared = ids(prompt)
    records = write_records([{"prompt_ids": shared, "response_ids": ids(16), "reward": float(i)} for i in range(2)], tmp_path / "rollouts.jsonl")
    spill = tmp_path / "spill"
    spill.mkdir()
    kept = espalier(*arguments(model, records, tmp_path / "keep", "keep")).json["steps"][0]
    assert kept["arena_bytes"]["A"] > limit, "this trunk would fit"
    with memory_limit(limit) as (before, settings):
        run = lambda *words: subprocess.run([*before, *map(str, words)], capture_output=True, text=True, **settings)
        refused = run(program, *arguments(model, records, tmp_path / "refused", "keep"))
        assert refused.returncode == 5 and not (tmp_path / "refused").exists(), refused
        assert "--trunk-state auto" in refused.stderr
        done = run(program, *arguments(model, records, tmp_path / "store", "offload", "--spill-dir", spill))
        assert done.returncode == 0, done
    assert json.loads(done.stdout)["peak_bytes"] <= limit
    assert gradients(tmp_path / "store") == gradients(tmp_path / "keep")


@STORED
def test_a_killed_run_leaves_nothing_behind(program, model_of, rollouts, tmp_path, state, path):
    spill = tmp_path / "spill"
    spill.mkdir()
    command = [str(word) for word in (program, *arguments(model_of(MODEL), rollouts, tmp_path / "out", state, "--path-state", path,
                                                          "--spill-dir", spill, "--epochs", 1000))]
    for _ in range(5):
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_spill(run, spill)
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert not list(spill.iterdir())
