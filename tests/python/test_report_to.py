"""`--report-to` and `--logging-freq`. wandb is a stand-in here that writes down its calls: the real one needs no network only offline."""

import json
import os

import pytest

from make_model import VOCABULARY, write_records

STAND_IN = '''
import json, os
LOG = os.environ["WANDB_CALLS"]
def _write(**call):
    with open(LOG, "a") as file:
        file.write(json.dumps(call) + "\\n")
class Run:
    def log(self, scalars, step=None):
        if os.environ.get("WANDB_BREAKS"):
            raise RuntimeError("no space left")
        _write(log=scalars, step=step)
    def finish(self):
        _write(finish=True)
def init(project, name, config):
    if os.environ.get("WANDB_REFUSES"):
        raise RuntimeError("not logged in")
    _write(init=[project, name], lr=config["lr"])
    return Run()
def define_metric(*names, **settings):
    pass
'''


@pytest.fixture
def rollouts(tmp_path):
    records = [{"prompt_ids": [1, 2], "response_ids": [3, 4, index % VOCABULARY], "group": str(index // 2), "reward": index % 3} for index in range(8)]
    return write_records(records, tmp_path / "rollouts.jsonl")


@pytest.fixture
def stand_in(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/wandb.py").write_text(STAND_IN)
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "WANDB_CALLS": str(tmp_path / "calls.jsonl")}


def calls(tmp_path):
    return [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]


def train(espalier, model_of, rollouts, tmp_path, *options, mini_batch=2, **settings):
    return espalier("train", "--model", model_of("qwen3_tied"), "--rollouts", rollouts, "--mini-batch-size", mini_batch, "--out", tmp_path / "out", *options,
                    **settings)


def test_every_step_is_logged_under_verls_names(espalier, model_of, rollouts, tmp_path, stand_in):
    train(espalier, model_of, rollouts, tmp_path, "--report-to", "wandb,tensorboard", "--lr", 1e-4, env=stand_in)
    first, *steps, last = calls(tmp_path)
    assert first == {"init": ["espalier", "out"], "lr": 1e-4} and last == {"finish": True}
    assert [call["step"] for call in steps] == [1, 2, 3, 4]
    assert {"actor/loss", "actor/grad_norm", "actor/lr", "critic/score/mean", "perf/mfu/actor"} <= set(steps[0]["log"])
    assert list((tmp_path / "out/espalier").glob("events.out.tfevents.*"))


def test_none_leaves_metrics_alone(espalier, model_of, rollouts, tmp_path):
    train(espalier, model_of, rollouts, tmp_path, "--report-to", "none")
    assert (tmp_path / "out/espalier/metrics.jsonl").is_file() and not list((tmp_path / "out/espalier").glob("events.out.tfevents.*"))


def test_a_tracker_that_breaks_costs_no_step(espalier, model_of, rollouts, tmp_path, stand_in):
    done = train(espalier, model_of, rollouts, tmp_path, "--report-to", "wandb", env=stand_in | {"WANDB_BREAKS": "1"})
    assert done.stderr.count("continuing without wandb") == 1
    assert len((tmp_path / "out/espalier/metrics.jsonl").read_text().splitlines()) == 4


def test_what_is_missing_or_refused_is_told_before_the_first_step(espalier, model_of, rollouts, tmp_path, stand_in):
    refused = train(espalier, model_of, rollouts, tmp_path, "--report-to", "wandb", env=stand_in | {"WANDB_REFUSES": "1"}, expect=3)
    assert "not logged in" in refused.stderr and "WANDB_MODE=offline" in refused.stderr
    (tmp_path / "site/wandb.py").write_text("raise ImportError('no module')")
    missing = train(espalier, model_of, rollouts, tmp_path, "--report-to", "wandb", env=stand_in, expect=4)
    assert "pip install wandb" in missing.stderr and not (tmp_path / "out").exists()
    assert "tensorboard, wandb" in train(espalier, model_of, rollouts, tmp_path, "--report-to", "mlflow", expect=2).stderr


def test_logging_freq_thins_lines_and_nothing_else(espalier, model_of, rollouts, tmp_path):
    done = train(espalier, model_of, rollouts, tmp_path, "--logging-freq", 3)
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")] == ["1", "3", "4"]
    assert len((tmp_path / "out/espalier/metrics.jsonl").read_text().splitlines()) == 4


def test_metrics_tell_what_rollouts_can_teach(espalier, model_of, rollouts, tmp_path):
    train(espalier, model_of, rollouts, tmp_path, "--steps", 1, mini_batch=8)
    line = json.loads((tmp_path / "out/espalier/metrics.jsonl").read_text())
    assert (line["groups"], line["groups_without_variance"]) == (4, 0)
    # rewards 0 1 | 2 0 | 1 2 | 0 1: deviations with Bessel's correction sqrt(1/2), sqrt(2), sqrt(1/2), sqrt(1/2)
    assert line["reward_spread"] == {"std": pytest.approx((3 * 0.5 ** 0.5 + 2 ** 0.5) / 4), "min": 0, "max": 2}
    assert line["tokens_per_second"] > 0 and 0 < line["mfu"] and "truncated" not in line and "ratio_histogram" not in line


def test_ratios_are_counted_where_old_log_probs_are_recorded(espalier, model_of, tmp_path):
    records = [{"prompt_ids": [1, 2], "response_ids": [3, 4], "advantage": 1.0, "old_logprobs": [-4.0, -5.0], "loss_mask": [1, 0], "finish_reason": reason}
               for reason in ("length", "stop", "stop", "stop")]
    train(espalier, model_of, write_records(records, tmp_path / "old.jsonl"), tmp_path, mini_batch=4)
    line = json.loads((tmp_path / "out/espalier/metrics.jsonl").read_text())
    assert line["truncated"] == 0.25 and sum(line["ratio_histogram"]["counts"]) == 4, "masked tokens have no ratio"
    assert len(line["ratio_histogram"]["counts"]) == len(line["ratio_histogram"]["edges"]) + 1
