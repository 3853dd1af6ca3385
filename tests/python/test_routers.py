"""Routers of Qwen3-MoE through the program: their losses against torch autograd and transformers' own function, their loads,
recorded experts, and what is refused.

transformers' load_balancing_loss_func counts f' = the mean over tokens of the 0/1 choices, which sums to k over the experts;
here f sums to 1, so f' = k f. It takes f' and P over the rows of all layers together, where the loss here is one for each
layer, summed. So for one layer of experts   theirs = E sum_e f'_e P_e = k ours,   and for several it is their function called
on each layer alone. It sums in float32 whatever the dtype of the logits is.
"""

import json
import re

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import objective
import oracle
from comparison import FLOAT64_RELATIVE, Trained, relative_errors
from make_model import make_rollouts, write_records

SEED = 17
EXPERTS, CHOSEN = {"qwen3_moe": 8, "qwen3_moe_sparse": 4}, {"qwen3_moe": 2, "qwen3_moe_sparse": 3}
LAYERS = {"qwen3_moe": [0, 1, 2], "qwen3_moe_sparse": [1]}  # those with experts, of three
# A few float32 roundings on the way of each gradient; one of 2^-24 may be amplified where terms cancel.
FLOAT32_FUNCTION = 16 * 2.0 ** -24


@pytest.fixture(scope="module")
def records():
    return make_rollouts(SEED)


@pytest.fixture(scope="module")
def path(records, tmp_path_factory):
    return write_records(records, tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl")


def router_logits(model, record):
    """One [tokens, experts] for each layer with experts."""
    ids = torch.tensor([record["prompt_ids"] + record["response_ids"]])
    return model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits


def balance64(rows, experts, chosen):
    """E sum_e f_e P_e of the tokens in `rows`, f summing to 1."""
    probability = torch.softmax(rows, dim=-1)
    picked = torch.topk(probability, chosen, dim=-1).indices
    share = torch.bincount(picked.flatten(), minlength=experts).double() / picked.numel()
    return experts * (share * probability.mean(0)).sum()


def theirs(rows, experts, chosen):
    return load_balancing_loss_func((rows,), experts, chosen) / chosen


def aux_loss(logits, scope, layer_loss):
    """`logits`: by rollout, by layer."""
    by_layer = list(zip(*logits, strict=True))
    if scope == "minibatch":
        return sum(layer_loss(torch.cat(rows)) for rows in by_layer)
    return sum(layer_loss(rows) for layer in by_layer for rows in layer) / len(logits)


def z_loss(logits, scope):
    """The mean over tokens, of the mini-batch or of each rollout and then over rollouts; layers summed."""
    squares = [sum(torch.logsumexp(rows, -1).square() for rows in layers) for layers in logits]
    return torch.cat(squares).mean() if scope == "minibatch" else torch.stack([of_tokens.mean() for of_tokens in squares]).mean()


def expected(directory, records, scope, aux, z, layer_loss):
    """(aux loss, z loss, {name: gradient}) of the policy and router losses together."""
    model = oracle.load_model(directory, torch.float64)
    resolved = objective.resolve({})
    _, _, policy, *_ = oracle.gradients(model, records, objective.advantages(records, resolved), resolved)
    model.zero_grad(set_to_none=True)
    logits = [router_logits(model, record) for record in records]
    balance, square = aux_loss(logits, scope, layer_loss), z_loss(logits, scope)
    (aux * balance + z * square).backward()
    routers = oracle.of_files({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}, model)
    return float(balance.detach()), float(square.detach()), {name: policy[name] + routers[name] for name in policy}


def flags(scope, aux, z):
    return {"router-aux-loss-coef": aux, "router-aux-loss-scope": scope, "router-z-loss-coef": z}


@pytest.mark.parametrize("scope", ["rollout", "minibatch"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_sparse"])
@pytest.mark.parametrize("schedule", ["dense", "phased"])
def test_router_losses_have_the_oracles_gradient(family, scope, schedule, espalier, model_of, records, path, tmp_path):
    experts, chosen = EXPERTS[family], CHOSEN[family]
    balance, square, exact = expected(model_of(family), records, scope, 0.3, 0.05, lambda rows: balance64(rows, experts, chosen))
    run = Trained(espalier, model_of(family), path, tmp_path, schedule=schedule, **flags(scope, 0.3, 0.05))
    errors = relative_errors(run.gradients, exact)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= FLOAT64_RELATIVE, f"{worst}: {errors[worst]:.3e}"
    step, = run.json["steps"]
    assert step["aux_loss"] == pytest.approx(balance, rel=1e-10)
    assert step["z_loss"] == pytest.approx(square, rel=1e-10)
    assert step["router"]["counts"] == ("counting pass" if scope == "minibatch" else "update pass")
    tokens = sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in records)
    for layer, load in enumerate(step["router"]["load"]):
        assert (load is not None) == (layer in LAYERS[family])
        assert load is None or sum(load) == chosen * tokens


@pytest.mark.parametrize("scope", ["rollout", "minibatch"])
def test_the_balancing_loss_is_transformers_own(scope, espalier, model_of, records, path, tmp_path):
    """Their function on each layer alone, over k; with one rollout a forward for scope rollout."""
    balance, _, exact = expected(model_of("qwen3_moe"), records, scope, 0.3, 0, lambda rows: theirs(rows, 8, 2))
    run = Trained(espalier, model_of("qwen3_moe"), path, tmp_path, **flags(scope, 0.3, 0))
    errors = relative_errors(run.gradients, exact)
    worst = max(errors, key=errors.get)
    assert errors[worst] <= FLOAT32_FUNCTION, f"{worst}: {errors[worst]:.3e}"
    # Sums of up to 200 float32 terms.
    assert run.json["steps"][0]["aux_loss"] == pytest.approx(balance, rel=200 * 2.0 ** -24)


def test_a_model_with_one_layer_of_experts_reports_their_aux_loss_over_k(espalier, model_of, records, path, tmp_path):
    model = oracle.load_model(model_of("qwen3_moe_sparse"), torch.float64)
    with torch.no_grad():
        losses = [float(model(input_ids=torch.tensor([r["prompt_ids"] + r["response_ids"]]), use_cache=False,
                              output_router_logits=True).aux_loss) for r in records]
    run = Trained(espalier, model_of("qwen3_moe_sparse"), path, tmp_path, **flags("rollout", 1e-3, 0))
    assert run.json["steps"][0]["aux_loss"] * 3 == pytest.approx(sum(losses) / len(losses), rel=200 * 2.0 ** -24)


def test_loads_are_reported_without_a_loss(espalier, model_of, path, tmp_path):
    loads = {}
    for name, settings in {"without": {}, "with": flags("rollout", 1e-3, 0)}.items():
        step, = Trained(espalier, model_of("qwen3_moe"), path, tmp_path / name, **settings).json["steps"]
        loads[name] = step["router"]["load"]
        assert step["router"]["counts"] == "update pass"
    assert loads["without"][:2] == loads["with"][:2]
    assert loads["without"][2] is None and sum(loads["with"][2]) == sum(loads["with"][0])


def test_the_counting_pass_is_a_part_of_the_profile(espalier, model_of, path, tmp_path):
    for scope in ("rollout", "minibatch"):
        step, = Trained(espalier, model_of("qwen3_moe"), path, tmp_path / scope, profile=True, **flags(scope, 0.1, 0)).json["steps"]
        assert ("counting pass" in json.dumps(step["profile"])) == (scope == "minibatch")
        assert (step["seconds"]["counting"] > 0) == (scope == "minibatch") or step["seconds"]["counting"] < 1e-3


@pytest.mark.parametrize("family, options, word", [
    ("qwen3_tied", ["--router-aux-loss-coef", "0.1"], "router-aux-loss-coef"),
    ("qwen3_tied", ["--router-z-loss-coef", "0.1"], "router-z-loss-coef"),
    ("qwen3_moe", ["--router-aux-loss-coef", "-1"], "router-aux-loss-coef"),
    ("qwen3_moe", ["--router-aux-loss-scope", "group"], "router-aux-loss-scope"),
    ("qwen3_moe", ["--router-z-loss-coef", "inf"], "router-z-loss-coef")])
def test_a_wrong_router_option_is_named(family, options, word, espalier, model_of, path, tmp_path):
    outcome = espalier("train", "--model", model_of(family), "--rollouts", path, "--out", tmp_path / "out", *options, expect=2)
    assert word in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_the_closed_loop_takes_the_counts_of_its_score_pass(espalier, tmp_path):
    """Old log-probs are computed at the weights of a batch's first step; those of the later ones are others."""
    espalier("grpo", "--out", tmp_path / "run", "--fresh", "moe", "--prompt-length", 64, "--max-response-length", 4, "--train-batch-size", 3,
             "--n", 3, "--mini-batch-size", 6, "--epochs", 2, "--val-size", 6, "--warm-start-steps", 6, "--steps", 8, "--lr", "1e-3",
             "--router-aux-loss-coef", 0.01, "--router-aux-loss-scope", "minibatch", "--threads", 2)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    first = [i == 0 or line["batch"] != steps[i - 1]["batch"] for i, line in enumerate(steps)]
    assert len(steps) > sum(first) > 1
    assert [line["router"]["counts"] for line in steps] == ["score pass" if is_first else "counting pass" for is_first in first]


# -- recorded experts -------------------------------------------------------------------------------------------------

def with_routes(model, records, layers):
    """Each record with the model's own choices; every second one, as engines have it, without its last token."""
    out = []
    for index, record in enumerate(records):
        with torch.no_grad():
            chosen = [torch.topk(torch.softmax(rows, -1), model.config.num_experts_per_tok).indices.tolist()
                      for rows in router_logits(model, record)]
        tokens = [list(layer) for layer in zip(*chosen, strict=True)]
        if layers == "all":  # dense layers have nothing to say
            blank = [0] * model.config.num_experts_per_tok
            tokens = [[token[0] if l == 1 else blank for l in range(3)] for token in tokens]
        out.append({**record, "routed_experts": tokens[:len(tokens) - index % 2]})
    return out


@pytest.mark.parametrize("family, layers", [("qwen3_moe", "experts"), ("qwen3_moe_sparse", "experts"), ("qwen3_moe_sparse", "all")])
def test_replaying_own_choices_changes_nothing(family, layers, espalier, model_of, records, tmp_path):
    routed = with_routes(oracle.load_model(model_of(family), torch.float64), records, layers)
    free = Trained(espalier, model_of(family), write_records(records, tmp_path / "free.jsonl"), tmp_path / "free")
    again = Trained(espalier, model_of(family), write_records(routed, tmp_path / "routed.jsonl"), tmp_path / "again")
    errors = relative_errors(again.gradients, free.gradients)
    assert max(errors.values()) <= FLOAT64_RELATIVE
    assert again.json["steps"][0]["loss"] == pytest.approx(free.json["steps"][0]["loss"], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("free", [-1, 0])
def test_layers_without_a_record_choose_freely(free, espalier, model_of, records, tmp_path):
    """Own choices with holes in single layers and whole tokens change nothing; the other layers' choices are still followed."""
    routed = with_routes(oracle.load_model(model_of("qwen3_moe"), torch.float64), records, "experts")
    for record in routed:
        for t, token in enumerate(record["routed_experts"]):
            for layer in range(len(token)):
                if (t + layer) % 3 == 0 or t % 4 == 3:
                    token[layer] = [free] * len(token[layer])
    at = next(t for t, token in enumerate(routed[0]["routed_experts"]) if token[0][0] == free and token[1][0] != free)
    whole = Trained(espalier, model_of("qwen3_moe"), write_records(records, tmp_path / "free.jsonl"), tmp_path / "free")
    again = Trained(espalier, model_of("qwen3_moe"), write_records(routed, tmp_path / "routed.jsonl"), tmp_path / "again")
    assert max(relative_errors(again.gradients, whole.gradients).values()) <= FLOAT64_RELATIVE
    experts = routed[0]["routed_experts"][at][1]
    experts[0] = next(e for e in range(8) if e not in experts)
    other = Trained(espalier, model_of("qwen3_moe"), write_records(routed, tmp_path / "other.jsonl"), tmp_path / "other")
    assert max(relative_errors(other.gradients, whole.gradients).values()) > 1e-6


def test_other_choices_are_followed_and_end_the_prefix(espalier, model_of, records, tmp_path):
    """One rollout of a group records another expert for its first token: none of its prompt is shared any more, which is said."""
    routed = with_routes(oracle.load_model(model_of("qwen3_moe"), torch.float64), records, "experts")
    sizes = [sum(r["prompt_ids"] == other["prompt_ids"] for other in routed) for r in routed]
    odd = routed[sizes.index(max(sizes))]
    experts = odd["routed_experts"][0][0]
    experts[0] = next(e for e in range(8) if e not in experts)
    path = write_records(routed, tmp_path / "routed.jsonl")
    run = espalier("train", "--model", model_of("qwen3_moe"), "--rollouts", path, "--out", tmp_path / "out", "--lr", 0, "--json")
    assert f"differ between rollouts on {len(odd['prompt_ids'])} prompt tokens" in run.stderr
    verdict = espalier("verify", "--model", model_of("qwen3_moe"), "--rollouts", path, "--dtype", "float64", "--json").json
    assert verdict["verdict"] == "pass" and "router" not in verdict


@pytest.mark.rounding
def test_verify_reports_the_choices_that_rounding_to_bfloat16_makes(espalier, model_of, records, path):
    """Every token chooses in the first two layers; in the last one, those that predict something."""
    choices = sum(3 * len(r["response_ids"]) + 2 * len(r["prompt_ids"]) for r in records)
    run = espalier("verify", "--model", model_of("qwen3_moe"), "--rollouts", path, "--dtype", "bfloat16", "--json")
    router = run.json["router"]
    assert run.json["verdict"] == "pass" and router["choices"] == choices
    assert 0 < router["differing"] < choices and router["share"] == router["differing"] / choices


@pytest.mark.rounding
def test_no_expert_has_a_floor_far_below_its_layers(espalier, model_of, path):
    """The least floor m of n experts' matrices is at least their root mean square before the low ones were raised to it, so
    n m^2 >= the sum of the squares of those that were not raised."""
    run = espalier("verify", "--model", model_of("qwen3_moe"), "--rollouts", path, "--json")
    kinds = {}
    for parameter in run.json["parameters"]:
        kind, found = re.subn(r"experts\.\d+", "experts", parameter["name"])
        if found and parameter["floor"] > 0:
            kinds.setdefault(kind, []).append(parameter["floor"])
    assert len(kinds) == 9  # three layers of three matrices
    for kind, floors in kinds.items():
        least = min(floors)
        raised_not = sum(floor * floor for floor in floors if floor > least)
        assert len(floors) * least * least >= raised_not * (1 - 1e-12), kind  # but for the rounding of n additions


@pytest.mark.parametrize("change, word", [
    (lambda tokens: tokens[:-2], "entries"), (lambda tokens: [token[:-1] for token in tokens], "layers"),
    (lambda tokens: [[layer[:1] for layer in token] for token in tokens], "2 experts"),
    (lambda tokens: [[[8, 9]] * 3] + tokens[1:], "experts in [0, 8)"), (lambda tokens: [[[1, 1]] * 3] + tokens[1:], "twice"),
    (lambda tokens: [[[1, -1]] * 3] + tokens[1:], "experts"), (lambda tokens: "all of them", "list")])
def test_records_of_another_shape_are_refused_with_their_line(change, word, espalier, model_of, records, tmp_path):
    routed = with_routes(oracle.load_model(model_of("qwen3_moe"), torch.float64), records[:4], "experts")
    routed[2]["routed_experts"] = change(routed[2]["routed_experts"])
    path = write_records(routed, tmp_path / "routed.jsonl")
    outcome = espalier("train", "--model", model_of("qwen3_moe"), "--rollouts", path, "--out", tmp_path / "out", expect=3)
    assert "routed.jsonl:3" in outcome.stderr and "routed_experts" in outcome.stderr and word in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_records_for_a_dense_model_are_refused(espalier, model_of, records, tmp_path):
    path = write_records([{**records[0], "routed_experts": [[[0]]] * len(records[0]["prompt_ids"] + records[0]["response_ids"])}],
                         tmp_path / "routed.jsonl")
    outcome = espalier("train", "--model", model_of("qwen3_tied"), "--rollouts", path, "--out", tmp_path / "out", expect=3)
    assert "no experts" in outcome.stderr


def test_convert_keeps_recorded_experts(espalier, records, tmp_path):
    routed = [{**records[0], "response_ids": [5], "loss_mask": [1], "prompt_ids": [3, 4], "routed_experts": [[[7, 1], [0, 2]], None]}]
    espalier("convert", write_records(routed, tmp_path / "in.jsonl"), tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["routed_experts"] == [[[7, 1], [0, 2]], None]


@pytest.mark.parametrize("family, layers", [("qwen3_moe", "experts"), ("qwen3_moe_sparse", "all")])
def test_score_writes_recorded_experts_back_as_they_came(family, layers, espalier, model_of, records, tmp_path):
    """In the order of their probability, dense layers included; a second scoring gives the same log-probs."""
    routed = with_routes(oracle.load_model(model_of(family), torch.float64), records, layers)
    assert any(sorted(experts) != experts for record in routed for token in record["routed_experts"] for experts in token)
    source = write_records(routed, tmp_path / "0.jsonl")
    for number in (1, 2):
        espalier("score", "--model", model_of(family), "--rollouts", source, "--out", tmp_path / f"{number}.jsonl", "--dtype", "float64")
        source = tmp_path / f"{number}.jsonl"
        scored = [json.loads(line) for line in source.read_text().splitlines()]
        assert [record["routed_experts"] for record in scored] == [record["routed_experts"] for record in routed]
    assert source.read_bytes() == (tmp_path / "1.jsonl").read_bytes()
