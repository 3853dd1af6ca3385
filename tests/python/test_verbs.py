"""The verbs as functions: options from the table, the JSON object as a dict, errors with the program's fields."""

import ctypes
import inspect
import json
import os
import pydoc
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

import espalier
import text_model

from espalier import option_help, verbs

native = pytest.importorskip("espalier.native")


@pytest.fixture(autouse=True)
def built(program, monkeypatch):
    monkeypatch.setenv("ESPALIER_BINARY", str(program))
    try:
        native.library()
    except espalier.Error as error:
        pytest.skip(str(error))


@pytest.fixture
def rollouts(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    records = [{"prompt_ids": [5, 6, 7], "response_ids": [8, 9 + i], "advantage": 1 - i} for i in range(3)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_inspect_returns_the_object(rollouts):
    result = espalier.inspect(rollouts, quiet=True)
    assert (result["verb"], result["rollouts"], result["groups"], result["tokens"]["logical"]) == ("inspect", 3, 1, 15)


def test_plan_and_train_take_the_table_s_options(rollouts, model_of, tmp_path):
    plan = espalier.plan(model=model_of("qwen3_tied"), rollouts=rollouts, schedule="phased", quiet=True)
    assert plan["options"]["schedule"] == "phased"
    result = espalier.train(model=model_of("qwen3_tied"), rollouts=rollouts, out=tmp_path / "out", lr=1e-3, betas=(.9, .95), quiet=True)
    assert result["options"]["betas"] == [.9, .95] and len(result["steps"]) == 1
    assert (tmp_path / "out/model.safetensors").is_file()


def test_a_verb_without_degrees_runs_in_one_process_whoever_calls_it(rollouts, model_of, tmp_path, monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = espalier.score(model=model_of("qwen3_tied"), rollouts=rollouts, out=tmp_path / "scored.jsonl", quiet=True)
    assert result["rollouts"] == 3


def test_errors_have_the_program_s_fields(tmp_path):
    with pytest.raises(espalier.Error) as caught:
        espalier.inspect(tmp_path / "absent.jsonl")
    assert (caught.value.kind, caught.value.exit_code) == ("input", 3) and "absent.jsonl" in caught.value.where
    with pytest.raises(espalier.Error, match="Did you mean rollouts") as caught:
        espalier.train(rollout="x")
    assert caught.value.exit_code == 2


def test_signatures_are_those_of_the_table():
    for verb in ("inspect", "plan", "train", "score", "verify", "replay", "bench", "generate", "report"):
        function = getattr(espalier, verb)
        assert "CPU threads" in function.__doc__ and inspect.isfunction(function)
        rows = option_help.options_of(verb)
        assert all(re.search(rf"^    {name} ", function.__doc__, re.M) for name in rows), "every option is documented"
        *files, options = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        assert options.kind is options.VAR_KEYWORD
        assert [p.name for p in files] == [name for taker, name in verbs.POSITIONAL.items() if taker == verb]
        named = [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
        assert named == list(option_help.main_options_of(verb)) and set(named) <= set(rows)
    assert "as_" in inspect.signature(espalier.score).parameters
    assert "lr" in inspect.signature(espalier.train).parameters and "lr" not in inspect.signature(espalier.inspect).parameters


def test_names_of_trl_are_keyword_arguments(rollouts, model_of, tmp_path):
    result = espalier.train(model=model_of("qwen3_tied"), rollouts=rollouts, out=tmp_path / "out", loss_type="dr_grpo", beta=0, quiet=True)
    assert result["options"]["loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert re.search(r"^    loss_type +sets loss_agg_mode", espalier.train.__doc__, re.M) and "loss_type" not in espalier.inspect.__doc__


@pytest.mark.parametrize("verb", espalier.__all__[2:])
def test_help_is_plain_text(verb):
    text = pydoc.plain(pydoc.render_doc(getattr(espalier, verb)))
    assert not re.search(r"[{}`]|--[a-z]", text), "option names are keyword arguments, and nothing is markup"
    assert f"function {verb} in module espalier" in text and "threads" in text
    assert all(len(line) <= 120 for line in text.splitlines() if "(" + "*" not in line)
    if verb == "train":
        assert "what is written: a model directory" in " ".join(text.split())


def test_without_a_core_library_a_verb_is_documented_and_names_what_it_misses(tmp_path):
    code = "import espalier\nprint(espalier.train.__doc__)\ntry: espalier.train(model='m')\nexcept espalier.Error as error: print(error.remedy)"
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "python"), ESPALIER_CORE_LIBRARY=str(tmp_path / "absent.so"))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "Updates a model" in done.stdout and "Run `make`" in done.stdout, done.stderr


def test_the_stub_is_the_option_table():
    sys.path.insert(0, str(ROOT / "tools"))
    import verb_stubs
    assert verb_stubs.STUB.read_text() == verb_stubs.stub(), "run make docs"


def test_a_type_checker_knows_the_options(tmp_path):
    pytest.importorskip("mypy")
    file = Path(__file__).with_name("verb_types.py")
    wrong = [number for number, line in enumerate(file.read_text().splitlines(), 1) if "# wrong" in line]
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), "--no-error-summary", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, MYPYPATH=str(ROOT / "python")))
    found = {int(number) for number in re.findall(r"verb_types.py:(\d+): error", done.stdout)}
    assert sorted(found) == wrong, done.stdout + done.stderr


def long_run(rollouts, model, out):
    return dict(model=str(model), rollouts=str(rollouts), out=str(out), epochs=1_000_000, quiet=True)


def test_ctrl_c_lets_train_finish_its_step_and_save(rollouts, model_of, tmp_path):
    """A Python that sits in espalier.train gets SIGINT once: KeyboardInterrupt, and the model is saved complete."""
    out = tmp_path / "out"
    code = f"import espalier\ntry: espalier.train(**{long_run(rollouts, model_of('qwen3_tied'), out)!r}, save_freq=1)\n" \
           "except KeyboardInterrupt: print('interrupted')"
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "python"))
    child = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        waited_for(lambda: (out / "model.safetensors").is_file())
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    assert output == "interrupted\n" and child.returncode == 0
    assert espalier.score(model=out, rollouts=rollouts, out=tmp_path / "scored.jsonl", quiet=True)["rollouts"] == 3


def waited_for(happened, seconds=120):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def test_other_threads_run_during_a_verb_and_during_a_plan(rollouts):
    """The interpreter's lock is free: a thread goes on counting."""
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(time.monotonic())

    def seen_during(call):
        start = time.monotonic()
        call()
        end = time.monotonic()
        return sum(start < t < end for t in ticks), end - start

    shape = dict(layers=2, hidden=64, inner=128, heads=4, kv_heads=2, head_dim=16, vocabulary=97)
    buffers = native._Buffers([[i % 97 for i in range(2000)]] * 3000, [[i % 97, i % 89, i % 83] for i in range(3000)])
    request = native._Request(64, 1, 0.0, 1, *(word.encode() for word in ("auto", "auto", "keep", "float32", "cpu")))

    def plan():
        handle = native.library().espalier_plan_new(ctypes.byref(buffers.struct), ctypes.byref(native._Shape(**shape)), ctypes.byref(request))
        assert handle
        native.library().espalier_plan_delete(handle)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for call in (lambda: espalier.inspect(rollouts, quiet=True), plan):
            count, seconds = seen_during(call)
            assert count >= 2, f"{count} ticks in {seconds:.3f} s"
    finally:
        stop.set()
        thread.join()


# ---- what only Python has -------------------------------------------------------------------------------------------

RECORDS = [{"prompt_ids": [5, 6, 7], "response_ids": [8, 9 + i], "advantage": 1.0 - i} for i in range(3)]
PROMPTS = [{"prompt_ids": [3, 4, 5 + i], "ground_truth": str(i)} for i in range(2)]


def test_records_may_be_lists_of_dicts(rollouts, model_of, tmp_path):
    of_file = espalier.score(model=model_of("qwen3_tied"), rollouts=rollouts, out=tmp_path / "file.jsonl", quiet=True)
    of_list = espalier.score(model=model_of("qwen3_tied"), rollouts=RECORDS, out=tmp_path / "list.jsonl", quiet=True)
    assert of_file["tokens"] == of_list["tokens"]
    assert (tmp_path / "file.jsonl").read_bytes() == (tmp_path / "list.jsonl").read_bytes()
    tensors = [{**record, "response_ids": native.np.array(record["response_ids"])} for record in RECORDS]
    assert espalier.inspect(tensors, quiet=True)["rollouts"] == espalier.inspect(*RECORDS, quiet=True)["rollouts"] == 3


def test_a_wrong_record_of_a_list_is_named_by_its_place(model_of):
    for records, where in (([*RECORDS, {"prompt_ids": [1]}], "rollouts[3]"), ([RECORDS[0], {"prompt_ids": {1}}], "rollouts[1]")):
        with pytest.raises(espalier.Error) as caught:
            espalier.inspect(records, quiet=True)
        assert caught.value.where.startswith(where) and caught.value.exit_code == 3


def scored(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(extra_info["tokens"]), "truth": ground_truth}


def scored_at_once(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(info["tokens"]) for info in extra_infos]


def scored_as_trl_does(prompts, completions, completion_ids):
    return native.np.array([len(ids) for ids in completion_ids], float)


@pytest.mark.parametrize("reward", [scored, scored_at_once, scored_as_trl_does])
def test_a_reward_may_be_a_function_of_this_process(reward, tmp_path):
    model = text_model.make_text_model(tmp_path / "model", text_model.byte_level_tokenizer(["a b c"] * 3, 300))
    done = espalier.generate(model=model, prompts=PROMPTS, reward=reward, n=2, max_response_length=5, out=tmp_path / "out.jsonl", quiet=True)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["reward"] for record in records] == [len(record["response_ids"]) for record in records]
    assert done["rollouts"] == 4
    if reward is scored:
        assert {record["reward_extra_info"]["truth"] for record in records} == {"0", "1"}


def test_an_exception_of_a_reward_function_is_the_cause_of_the_error(tmp_path, capfd):
    model = text_model.make_text_model(tmp_path / "model", text_model.byte_level_tokenizer(["a b c"] * 3, 300))

    def broken(data_source, solution_str, ground_truth, extra_info):
        raise KeyError("nothing here")

    with pytest.raises(espalier.Error, match="nothing here") as caught:
        espalier.generate(model=model, prompts=PROMPTS, reward=broken, n=1, max_response_length=2, out=tmp_path / "out.jsonl", quiet=True)
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.exit_code == 3
    assert "nothing here" not in capfd.readouterr().err, "an error is told once: as the exception"


def test_grpo_continues_with_the_lists_it_was_given(tmp_path):
    model = text_model.make_text_model(tmp_path / "model", text_model.byte_level_tokenizer(["a b c"] * 3, 300))
    how = dict(model=model, prompts=PROMPTS, reward=scored, out=tmp_path / "run", n=2, train_batch_size=2, max_response_length=4, threads=1,
               quiet=True)
    assert espalier.grpo(**how, steps=1)["steps_done"] == 1
    with pytest.raises(espalier.Error, match="resume"):
        espalier.grpo(**how, steps=1)
    assert espalier.grpo(resume=tmp_path / "run", reward=scored, steps=2, threads=1, quiet=True)["steps_done"] == 2
    with pytest.raises(espalier.Error, match="reward=FUNCTION"):
        espalier.grpo(resume=tmp_path / "run", steps=3, threads=1, quiet=True)


def test_a_refused_grpo_leaves_nothing(tmp_path):
    with pytest.raises(espalier.Error):
        espalier.grpo(model=tmp_path / "absent", prompts=PROMPTS, reward=scored, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


# ---- a Python without packages --------------------------------------------------------------------------------------

def bare(code, *packages):
    """Runs code in a Python that has this package, those named, and no other."""
    path = os.pathsep.join([str(ROOT / "python"), *map(str, packages)])
    done = subprocess.run([sys.executable, "-S", "-c", code], env=dict(os.environ, PYTHONPATH=path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_verbs_need_no_package(rollouts, model_of):
    code = f"import espalier; print(espalier.plan(model={str(model_of('qwen3_tied'))!r}, rollouts={str(rollouts)!r}, quiet=True)['verb']); " \
           f"print(espalier.inspect({str(rollouts)!r}, quiet=True)['rollouts'], espalier.train.__doc__)"
    assert bare(code).startswith("plan\n3 Updates a model")


@pytest.mark.parametrize("part, extra", [("hf", "hf"), ("trl", "trl")])
def test_a_part_that_misses_packages_names_them_and_the_command(part, extra, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    code = f"try: import espalier.{part}\nexcept ImportError as error: print(error)"
    told = bare(code, tmp_path)
    assert f"espalier.{part} needs numpy and transformers" in told and f"'espalier[{extra}]'" in told
    assert f"{sys.executable} -m pip install 'numpy" in told and "'torch" not in told


def test_the_extras_are_those_of_the_wheel():
    from espalier import extras
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [extras.NUMPY] == table["dependencies"]
    assert all(list(wanted) == table["optional-dependencies"][name] for name, wanted in extras.EXTRAS.items())
