"""Learning-rate schedules are transformers', and a run that was interrupted goes on along its curve."""

import random

import pytest
import torch
import transformers

from make_model import VOCABULARY, write_records

STEPS = 8


def of_transformers(kind, warmup, total):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    made = {"constant": lambda: transformers.get_constant_schedule_with_warmup(optimizer, warmup),
            "linear": lambda: transformers.get_linear_schedule_with_warmup(optimizer, warmup, total),
            "cosine": lambda: transformers.get_cosine_schedule_with_warmup(optimizer, warmup, total)}[kind]()
    out = []
    for _ in range(STEPS):
        out.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    return out


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    draw = random.Random(5)
    ids = lambda count: [draw.randrange(VOCABULARY) for _ in range(count)]
    records = [{"prompt_ids": ids(4), "response_ids": ids(3), "advantage": draw.gauss(0, 1)} for _ in range(STEPS)]
    return write_records(records, tmp_path_factory.mktemp("lr") / "rollouts.jsonl")


def train(espalier, model, rollouts, *options, **settings):
    done = espalier("train", "--model", model, "--rollouts", rollouts, "--mini-batch-size", 1, "--lr", 1e-3, "--json", "--dtype", "float64",
                    "--rollout-metrics", rollouts.with_name("metrics.jsonl"), *options, **settings)
    return [step["lr"] for step in done.json["steps"]]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup, total", [(0, STEPS), (3, STEPS), (3, 6), (STEPS, STEPS)])
def test_rates_are_those_of_transformers(kind, warmup, total, espalier, model_of, rollouts):
    options = ["--lr-scheduler-type", kind, "--warmup-steps", warmup] + (["--lr-total-steps", total] if total != STEPS else [])
    rates, wanted = train(espalier, model_of("qwen3_tied"), rollouts, *options), of_transformers(kind, warmup, total)
    ends = total + 1 if kind == "cosine" else STEPS  # behind its last step transformers' cosine rises again; here the last rate stays
    assert rates[:ends] == pytest.approx(wanted[:ends], rel=1e-14, abs=1e-18)
    assert all(rate == rates[total] for rate in rates[total:])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_least_rate_is_where_the_curve_ends(kind, espalier, model_of, rollouts):
    rates = train(espalier, model_of("qwen3_tied"), rollouts, "--lr-scheduler-type", kind, "--lr-min-ratio", 0.25, "--lr-total-steps", STEPS - 1)
    whole = of_transformers(kind, 0, STEPS - 1)
    assert rates == pytest.approx([0.25 * 1e-3 + 0.75 * rate for rate in whole], rel=1e-14)
    assert rates[-1] == pytest.approx(0.25e-3, rel=1e-14)


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(espalier, model_of, rollouts, tmp_path):
    options = ["--lr-scheduler-type", "cosine", "--warmup-steps", 2, "--lr-total-steps", STEPS]
    whole = train(espalier, model_of("qwen3_tied"), rollouts, *options, "--out", tmp_path / "whole")
    first = train(espalier, model_of("qwen3_tied"), rollouts, *options, "--steps", 3, "--out", tmp_path / "first")
    done = espalier("train", "--resume", tmp_path / "first", "--rollouts", rollouts, "--steps", STEPS, "--json", "--out", tmp_path / "second")
    assert first + [step["lr"] for step in done.json["steps"]] == whole
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "second/model.safetensors").read_bytes()


def test_a_trace_is_replayed_along_its_curve(espalier, model_of, rollouts, tmp_path):
    train(espalier, model_of("qwen3_tied"), rollouts, "--lr-scheduler-type", "linear", "--record", tmp_path / "trace", "--record-every", 4)
    done = espalier("replay", tmp_path / "trace", "--json")
    assert all(checkpoint["max_abs"] == 0 for checkpoint in done.json["checkpoints"])
