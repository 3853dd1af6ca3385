"""What a run may not destroy: its inputs, what exists, and its own work when it is interrupted."""

import json
import os
import random
import shlex
import signal
import subprocess
import time

import pytest
from safetensors import safe_open

from make_model import groups_of_four, make_rollouts, write_records

SEED = 53
MODEL = "qwen3_tied"


def content(folder):
    """Every file below a folder with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    return write_records(make_rollouts(SEED), tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Six groups of four: three steps an epoch with --mini-batch-size 8."""
    return write_records(groups_of_four(6), tmp_path_factory.mktemp("groups") / "groups.jsonl")


# -- no output is an input --------------------------------------------------------------------------------------------

def linked(path, how):
    if how == "itself":
        return path
    link = path.with_name(f"{how}-{path.name}")
    link.symlink_to(path) if how == "symbolic" else os.link(path, link)
    return link


@pytest.fixture
def stock(model_of, tmp_path):
    """A folder with a model, rollouts, prompts and options, as a user has it."""
    model = tmp_path / "model"
    model.mkdir()
    for file in model_of(MODEL).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    write_records([{"prompt_ids": [3, 4, 5]}], tmp_path / "prompts.jsonl")
    (tmp_path / "run.toml").write_text("lr = 1e-3\n")
    return tmp_path


@pytest.mark.parametrize("how", ["itself", "symbolic", "hard"])
@pytest.mark.parametrize("words, onto", [
    (["train", "--model", "model", "--rollouts", "rollouts.jsonl", "--logprobs"], "rollouts.jsonl"),
    (["train", "--model", "model", "--rollouts", "rollouts.jsonl", "--gradients"], "rollouts.jsonl"),
    (["train", "--model", "model", "--rollouts", "rollouts.jsonl", "--gradients"], "model/model.safetensors"),
    (["train", "--model", "model", "--rollouts", "rollouts.jsonl", "--config", "run.toml", "--logprobs"], "run.toml"),
    (["score", "--model", "model", "--rollouts", "rollouts.jsonl", "--out"], "rollouts.jsonl"),
    (["score", "--model", "model", "--rollouts", "rollouts.jsonl", "--out"], "model/config.json"),
    (["generate", "--model", "model", "--prompts", "prompts.jsonl", "--n", "1", "--max-response-length", "2", "--out"],
     "prompts.jsonl"),
    (["convert", "rollouts.jsonl"], "rollouts.jsonl")])
def test_no_file_that_is_read_is_replaced(words, onto, how, espalier, stock):
    out = linked(stock / onto, how)
    before = content(stock)
    outcome = espalier(*words, out, cwd=stock, expect=2)
    assert "a file other than" in outcome.stderr and content(stock) == before


def test_standard_input_is_an_input_too(espalier, stock):
    before = content(stock)
    with open(stock / "rollouts.jsonl") as file:
        outcome = espalier("score", "--model", "model", "--rollouts", "-", "--out", "rollouts.jsonl", cwd=stock, stdin=file, expect=2)
    assert "a file other than" in outcome.stderr and content(stock) == before


@pytest.mark.parametrize("option, place", [("--out", "model"), ("--record", "model"), ("--out", "link"), ("--record", "."), ("--out", ".")])
def test_no_folder_that_is_read_is_replaced(option, place, espalier, stock):
    (stock / "link").symlink_to(stock / "model")
    before = content(stock)
    outcome = espalier("train", "--model", "model", "--rollouts", "rollouts.jsonl", "--overwrite", option, place, cwd=stock, expect=2)
    assert option in outcome.stderr and content(stock) == before


def test_rollouts_inside_an_output_folder_are_safe(espalier, stock):
    train = ["train", "--rollouts", "rollouts.jsonl", "--out", "out"]
    espalier(*train, "--model", "model", cwd=stock)
    (stock / "rollouts.jsonl").rename(stock / "out/rollouts.jsonl")
    before = content(stock)
    train[2] = "out/rollouts.jsonl"
    for words in (["--model", "model", "--overwrite"], ["--resume", "out", "--epochs", "2"]):
        assert "--rollouts" in espalier(*train, *words, cwd=stock, expect=2).stderr
        assert content(stock) == before


def test_two_outputs_have_two_places(espalier, stock):
    train = ["train", "--model", "model", "--rollouts", "rollouts.jsonl"]
    for words, said in ((["--logprobs", "a", "--gradients", "a"], "a path other than"), (["--out", "a", "--record", "a"], "a path other than"),
                        (["--out", "a", "--logprobs", "a/l"], "a path outside --out")):
        assert said in espalier(*train, *words, cwd=stock, expect=2).stderr
        assert not (stock / "a").exists()


# -- what exists stays ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("option", ["--out", "--record"])
def test_a_model_or_trace_that_exists_is_replaced_only_when_told(option, espalier, model_of, rollouts, tmp_path):
    words = ["train", "--model", model_of(MODEL), "--rollouts", rollouts, option, tmp_path / "made"]
    espalier(*words)
    before = content(tmp_path)
    assert "--overwrite" in espalier(*words, "--lr", 0.1, expect=2).stderr
    assert content(tmp_path) == before
    espalier(*words, "--lr", 0.1, "--overwrite")
    assert content(tmp_path) != before


def test_a_continued_model_may_be_replaced_in_place(espalier, model_of, groups, tmp_path):
    train = ["train", "--rollouts", groups, "--out", tmp_path / "out", "--epochs", 2, "--mini-batch-size", 8]
    espalier(*train, "--model", model_of(MODEL), "--steps", 2)
    espalier(*train, "--resume", tmp_path / "out", "--steps", 3)
    assert json.loads((tmp_path / "out/espalier/state.json").read_text())["step"] == 3


RECORDS = {"score": ["score", "--model", "model", "--rollouts", "rollouts.jsonl", "--out"],
           "generate": ["generate", "--model", "model", "--prompts", "prompts.jsonl", "--n", "2", "--max-response-length", "2", "--out"],
           "convert": ["convert", "rollouts.jsonl"]}


@pytest.mark.parametrize("how", ["itself", "symbolic"])
@pytest.mark.parametrize("verb", RECORDS)
def test_records_that_exist_are_replaced_only_when_told(verb, how, espalier, stock):
    espalier(*RECORDS[verb], "made.jsonl", cwd=stock)
    written = (stock / "made.jsonl").read_bytes()
    (stock / "made.jsonl").write_text("the work of hours\n")
    out = linked(stock / "made.jsonl", how)
    before = content(stock)
    outcome = espalier(*RECORDS[verb], out, cwd=stock, expect=2)
    assert "--overwrite" in outcome.stderr and content(stock) == before
    assert "tokens" not in outcome.stderr + outcome.stdout, "refused before anything is read"
    espalier(*RECORDS[verb], out, "--overwrite", cwd=stock)
    assert (stock / "made.jsonl").read_bytes() == written


def test_an_empty_file_holds_no_records(espalier, stock):
    (stock / "made.jsonl").touch()
    espalier(*RECORDS["convert"], "made.jsonl", cwd=stock)
    assert (stock / "made.jsonl").stat().st_size > 0


def test_outputs_beside_a_model_are_replaced_unasked(espalier, stock):
    for _ in range(2):
        espalier("train", "--model", "model", "--rollouts", "rollouts.jsonl", "--gradients", "g", "--logprobs", "l", "--rollout-metrics", "m",
                 cwd=stock)


def test_the_second_run_into_a_folder_is_refused(program, espalier, model_of, rollouts, tmp_path):
    os.mkfifo(tmp_path / "slow.jsonl")
    words = ["train", "--model", model_of(MODEL), "--out", tmp_path / "out", "--rollouts"]
    first = subprocess.Popen([str(program), *map(str, words), str(tmp_path / "slow.jsonl")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        feed = os.open(tmp_path / "slow.jsonl", os.O_WRONLY)  # returns once the first run reads, with the folder claimed
        assert "no other process" in espalier(*words, rollouts, expect=2).stderr
        os.write(feed, rollouts.read_bytes())
        os.close(feed)
        assert first.wait(timeout=120) == 0
    finally:
        first.kill()
        first.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "slow.jsonl"]


# -- outputs are checked first ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("option", ["--out", "--record", "--gradients", "--logprobs"])
@pytest.mark.parametrize("place", ["absent/name", "file/name"])
def test_a_bad_place_costs_no_step(option, place, espalier, model_of, rollouts, tmp_path):
    (tmp_path / "file").write_text("x")
    outcome = espalier("train", "--model", model_of(MODEL), "--rollouts", rollouts, "--out", tmp_path / "out",
                       option, tmp_path / place, expect=2) if option != "--out" else espalier(
        "train", "--model", model_of(MODEL), "--rollouts", rollouts, option, tmp_path / place, expect=2)
    assert "step 1" not in outcome.stdout and place.split("/")[0] in outcome.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("option", ["--gradients", "--logprobs"])
def test_a_folder_in_the_place_of_a_file_costs_no_step(option, espalier, model_of, rollouts, tmp_path):
    outcome = espalier("train", "--model", model_of(MODEL), "--rollouts", rollouts, option, tmp_path, expect=2)
    assert "step 1" not in outcome.stdout and "write error" in outcome.stderr


@pytest.fixture
def mounted(tmp_path):
    """mounted(options) -> a small file system of its own; skipped where this user may not mount one."""
    made = []

    def mount(options):
        place = tmp_path / f"disk{len(made)}"
        place.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True).returncode != 0:
            pytest.skip("a small file system cannot be mounted here")
        made.append(place)
        return place

    yield mount
    for place in made:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("option", ["--out", "--record", "--gradients"])
def test_a_disk_without_the_room_costs_no_step(option, espalier, model_of, rollouts, tmp_path, mounted):
    outcome = espalier("train", "--model", model_of(MODEL), "--rollouts", rollouts, option, mounted("size=64k") / "x", expect=2)
    assert "free space" in outcome.stderr and "step 1" not in outcome.stdout


def test_a_disk_that_may_only_be_read_is_named(espalier, model_of, rollouts, mounted):
    disk = mounted("ro")
    train = ["train", "--model", model_of(MODEL), "--rollouts", rollouts]
    for words in ([*train, "--out", disk / "x"], [*train, "--logprobs", disk / "x"], ["grpo", "--out", disk / "x"]):
        assert "Read-only file system" in espalier(*words, expect=2).stderr


# -- interrupts -------------------------------------------------------------------------------------------------------

def started(program, *words, **settings):
    return subprocess.Popen([str(program), *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


def command_in(text):
    line = next(line for line in text.splitlines() if "continue with: " in line)
    return shlex.split(line.split("continue with: ")[1])


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_finishes_the_step_saves_and_says_how_to_continue(number, code, program, espalier, model_of, groups, tmp_path):
    words = ["--rollouts", groups, "--mini-batch-size", 8, "--epochs", 100, "--lr", 1e-3, "--steps", 60, "--threads", 1]
    espalier("train", "--model", model_of(MODEL), *words, "--out", tmp_path / "whole")
    run = started(program, "train", "--model", model_of(MODEL), *words, "--out", tmp_path / "out")
    assert run.stdout.readline().startswith("step 1 ")
    run.send_signal(number)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == code, errors
    step = json.loads((tmp_path / "out/espalier/state.json").read_text())["step"]
    assert 1 <= step < 60 and f"after step {step} of 60" in errors
    command = command_in(errors)
    assert command[0] == "espalier" and "--resume" in command
    espalier(*command[1:])
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_the_json_of_an_interrupted_run_holds_its_steps(program, model_of, groups, tmp_path):
    run = started(program, "train", "--json", "--model", model_of(MODEL), "--rollouts", groups, "--mini-batch-size", 8, "--epochs", 100_000,
                  "--save-freq", 1, "--out", tmp_path / "out")
    while not (tmp_path / "out").exists():
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)
    told = json.loads(run.communicate(timeout=120)[0])
    assert told["exit_code"] == 143 and told["error"]["kind"] == "interrupt" and "continue with" in told["error"]["remedy"]
    assert len(told["steps"]) == json.loads((tmp_path / "out/espalier/state.json").read_text())["step"]


def test_a_second_interrupt_stops_at_once(program, model_of, tmp_path):
    rng = random.Random(SEED)
    records = [{"prompt_ids": [3, i % 90], "response_ids": [rng.randrange(3, 97) for _ in range(500)], "reward": float(i % 2)}
               for i in range(4000)]
    run = started(program, "train", "--model", model_of(MODEL), "--rollouts", write_records(records, tmp_path / "long.jsonl"),
                  "--dtype", "float64", "--threads", 1, "--out", tmp_path / "out", "--schedule", "dense")
    time.sleep(5)  # into the first step, which takes minutes
    assert run.poll() is None
    began = time.monotonic()
    for _ in range(2):
        run.send_signal(signal.SIGINT)
        time.sleep(0.3)
    run.communicate(timeout=60)
    assert run.returncode == 130 and time.monotonic() - began < 30
    assert not (tmp_path / "out").exists()


def saved_step(folder):
    """0 where nothing is saved, or where the folder changes places at this moment."""
    try:
        return json.loads((folder / "espalier/state.json").read_text())["step"]
    except FileNotFoundError:
        return 0


def test_killed_at_any_moment_of_saving_it_leaves_a_whole_checkpoint(program, espalier, model_of, groups, tmp_path):
    words = ["--rollouts", groups, "--mini-batch-size", 8, "--epochs", 100_000, "--lr", 1e-3, "--threads", 1, "--out", tmp_path / "out"]
    moments = random.Random(SEED)
    source, reached = ["--model", model_of(MODEL)], 0
    for _ in range(8):
        run = started(program, "train", *source, *words, "--save-freq", 1, "--quiet")
        while saved_step(tmp_path / "out") <= reached:
            assert run.poll() is None, run.communicate()
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.3))
        run.kill()
        run.communicate()
        state = json.loads((tmp_path / "out/espalier/state.json").read_text())
        with safe_open(tmp_path / "out/espalier/state.safetensors", "np") as file:
            assert file.metadata()["step"] == str(state["step"]), f"seed {SEED}: torn"
        assert state["step"] >= reached, f"seed {SEED}: a saved step was lost"
        source, reached = ["--resume", tmp_path / "out"], state["step"]
    assert reached >= 8
    espalier("train", "--model", model_of(MODEL), *words[:-1], tmp_path / "whole", "--steps", reached)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    espalier("train", *source, *words, "--steps", reached + 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_a_reader_that_leaves_stops_no_run_with_an_output(program, model_of, groups, tmp_path):
    run = started(program, "train", "--model", model_of(MODEL), "--rollouts", groups, "--mini-batch-size", 8, "--epochs", 10,
                  "--out", tmp_path / "out")
    run.stdout.readline()
    run.stdout.close()
    assert run.wait(timeout=120) == 0
    assert json.loads((tmp_path / "out/espalier/state.json").read_text())["step"] == 30


# -- what is told -----------------------------------------------------------------------------------------------------

def test_a_trace_that_was_written_is_named(espalier, model_of, rollouts, tmp_path):
    for option in ("--record", "--gradients", "--logprobs"):
        outcome = espalier("train", "--model", model_of(MODEL), "--rollouts", rollouts, option, tmp_path / option)
        assert f"written: {tmp_path / option}" in outcome.stdout


def test_continuing_says_what_differs_on_the_same_tokens(espalier, model_of, groups, tmp_path):
    words = ["train", "--rollouts", groups, "--out", tmp_path / "out"]
    espalier(*words, "--model", model_of(MODEL))
    words = ["train", "--resume", tmp_path / "out", "--out", tmp_path / "more", "--rollouts"]
    error = espalier(*words, groups, "--json", expect=2).json["error"]
    assert error["where"] == str(groups) and "--epochs" in error["remedy"]
    records = [json.loads(line) for line in groups.read_text().splitlines()]
    for record in records:
        record["reward"] = 1 - record["reward"]
    outcome = espalier(*words, write_records(records, tmp_path / "again.jsonl"))
    assert "again.jsonl" in outcome.stderr and "other reward" in outcome.stderr and "step 2 " in outcome.stdout


# -- no output changes a result ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_output_option_changes_a_bit_of_the_result(dtype, family, espalier, model_of, tmp_path):
    """Masked tokens are in the middle of responses, and their log-probs are asked for by --logprobs alone."""
    records = make_rollouts(SEED) + make_rollouts(SEED + 1)
    path = write_records(records, tmp_path / "masked.jsonl")
    assert any(0 in record["loss_mask"] and 1 in record["loss_mask"] for record in records)

    def run(name, *more):
        out = tmp_path / name
        words = ["train", "--model", model_of(family), "--rollouts", path, "--dtype", dtype, "--save-dtype", "float64",
                 "--out", out, "--mini-batch-size", 16, "--lr", 1e-2]
        espalier(*words, *(str(word).format(out=out) for word in more))
        return content(out)

    def numbers(files):
        return {name: data for name, data in files.items() if name.endswith(".safetensors")}

    plain = numbers(run("plain"))
    assert plain
    for option, *value in (["--logprobs", "{out}.logprobs.jsonl"], ["--gradients", "{out}.gradients.safetensors"],
                           ["--rollout-metrics", "{out}.metrics.jsonl"], ["--record", "{out}.trace"], ["--profile"], ["--save-freq", 1]):
        assert numbers(run(option.strip("-"), option, *value)) == plain, option
    gradients = [tmp_path / f"{name}.safetensors" for name in ("alone", "beside")]
    run("a", "--gradients", gradients[0])
    run("b", "--gradients", gradients[1], "--logprobs", tmp_path / "logprobs.jsonl")
    assert gradients[0].read_bytes() == gradients[1].read_bytes()
