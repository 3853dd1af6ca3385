"""The verbs as functions: options from the table, the JSON object as a dict, errors with the program's fields."""

import inspect
import json

import pytest

import espalier

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
        assert "threads" in inspect.signature(function).parameters and "CPU threads" in function.__doc__
    assert "as_" in inspect.signature(espalier.score).parameters
    assert "lr" in inspect.signature(espalier.train).parameters and "lr" not in inspect.signature(espalier.inspect).parameters
