"""Dumps packed by gzip or zstd, folders of JSON and of Harbor's trials: read by the program as they lie there."""

import gzip
import json

import pytest
import torch

from conftest import ROOT
from dumps import make_samples, trl_batch

TRACES = next((ROOT / "tests/golden/packages").glob("verifiers-*")) / "traces.jsonl"


def zstd(data):
    arrow = pytest.importorskip("pyarrow")
    sink = arrow.BufferOutputStream()
    with arrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACKED = {".gz": gzip.compress, ".zst": zstd}


def converted(espalier, path, folder):
    espalier("convert", path, folder / "out.jsonl", "--overwrite")
    return (folder / "out.jsonl").read_text()


@pytest.mark.parametrize("ending", PACKED)
def test_a_packed_dump_is_that_dump(ending, espalier, tmp_path):
    torch.save(trl_batch(make_samples()), tmp_path / "step_3.pt")
    for plain in (tmp_path / "step_3.pt", TRACES):
        packed = tmp_path / "folder" / (plain.name + ending)
        packed.parent.mkdir(exist_ok=True)
        packed.write_bytes(PACKED[ending](plain.read_bytes()))
        assert converted(espalier, packed, tmp_path) == converted(espalier, plain, tmp_path)
    packed.unlink()
    assert converted(espalier, packed.parent, tmp_path) == converted(espalier, tmp_path / "step_3.pt", tmp_path)


@pytest.mark.parametrize("ending, kind", [(".gz", "gzip"), (".zst", "zstd")])
def test_a_packed_dump_that_was_cut_is_told(ending, kind, espalier, tmp_path):
    torch.save(trl_batch(make_samples()), tmp_path / "a.pt")
    packed = tmp_path / f"a.pt{ending}"
    packed.write_bytes(PACKED[ending]((tmp_path / "a.pt").read_bytes())[:300])
    error = espalier("convert", packed, tmp_path / "out.jsonl", "--json", expect=3).json["error"]
    assert error["where"] == str(packed) and error["expected"] == f"a complete {kind} file"


def trial(name):
    return {"id": name, "task_name": "t", "trial_name": name, "verifier_result": {"rewards": {"reward": 1.0}},
            "agent_result": {"rollout_details": [{"prompt_token_ids": [[1, 2]], "completion_token_ids": [[3, 4]], "logprobs": [[-1, -2]]}]}}


def test_a_job_of_harbor_is_the_folder_of_its_trials(espalier, tmp_path):
    job = tmp_path / "job"
    for name in ("t__1", "t__2", "t__10"):
        (job / name).mkdir(parents=True)
        (job / name / "result.json").write_text(json.dumps(trial(name), indent=2))
        (job / name / "config.json").write_text('{"trial_name": "x"}')
    (job / "result.json").write_text('{"n_total_trials": 3}')
    assert [json.loads(line)["trajectory"] for line in converted(espalier, job, tmp_path).splitlines()] == ["t__1", "t__2", "t__10"]
    assert json.loads(converted(espalier, job / "t__2", tmp_path))["trajectory"] == "t__2"


def test_a_folder_of_other_json_is_told(espalier, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text('{"hidden_size": 1}')
    error = espalier("convert", tmp_path / "folder", tmp_path / "out.jsonl", "--json", expect=4).json["error"]
    assert error["where"].endswith("config.json") and "hidden_size" in error["got"]
