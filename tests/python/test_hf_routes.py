"""Recorded experts in espalier.hf, in float64: log-probs, loss and every gradient against the unmodified model, one rollout a call, whose routers
are given the same experts by formulas written out here."""

import contextlib

import numpy as np
import pytest
import torch

import espalier
import espalier.hf
from hf_models import COMMON, PlainWave, all_float64, batch, checkpointed, dense_step, gradients, loss_of, make, shared_step, worst

ALLOWED = 1e-10
GLM = dict(COMMON, head_dim=16, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1,
           n_group=2, topk_group=1, experts_implementation="eager")
FAMILIES = {"Qwen3Moe": {}, "Mixtral": {}, "Glm4Moe": GLM,
            "GptOss": dict(COMMON, head_dim=16, num_local_experts=6, num_experts_per_tok=2, sliding_window=8, experts_implementation="eager")}


def build(family, **changes):
    from hf_models import FAMILIES as known
    if family in known:
        return make(family, **changes)
    import transformers
    torch.manual_seed(1)
    config = getattr(transformers, family + "Config")(**{**FAMILIES[family], **changes})
    model = getattr(transformers, family + "ForCausalLM")(config).double().train()
    for name, weight in model.named_parameters():
        if "bias" in name or "sinks" in name:
            torch.nn.init.normal_(weight, std=.1)
    return model


def experts_of(model):
    config = model.config
    return getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or config.n_routed_experts


def layers_of(model):
    return list(range(getattr(model.config, "first_k_dense_replace", 0), model.config.num_hidden_layers))


def recorded(model, rollouts, seed=7, missing=.2, last=True):
    """The rollouts with experts drawn for each token and layer; equal prompts have equal records but for the second rollout's."""
    rng, experts = np.random.default_rng(seed), experts_of(model)
    draw = lambda n: [None if rng.random() < missing else [rng.permutation(experts)[:2].tolist() for _ in layers_of(model)] for _ in range(n)]
    known, out = {}, []
    for i, record in enumerate(rollouts):
        tokens = record["prompt_ids"] + record["response_ids"]
        for end in range(1, len(tokens) + 1):
            if tuple(tokens[:end]) not in known:
                known[tuple(tokens[:end])] = draw(1)[0]
        routes = [known[tuple(tokens[:end])] for end in range(1, len(tokens) + 1)]
        if i == 1:  # another record from the fifth token of the prompt on
            routes = routes[:4] + [[list(reversed(pair)) if layer else [(pair[0] + 1) % experts, (pair[0] + 2) % experts]
                                    for layer, pair in enumerate(token)] if token else token for token in routes[4:]]
        out.append(dict(record, routed_experts=routes if last else routes[:-1]))
    return out


@contextlib.contextmanager
def forced(model, routes):
    """Within, one rollout's tokens go to `routes`; the families' formulas of a router's weights are written out."""
    family, undo = type(model).__name__.removesuffix("ForCausalLM"), []

    def indices(free, column):
        rows = [free[t] if t >= len(routes) or routes[t] is None or routes[t][column][0] < 0 else torch.tensor(routes[t][column]) for t in range(len(free))]
        return torch.stack(rows)

    def replace(gate, column):
        def forward(x):
            x = x.reshape(-1, x.shape[-1])
            logits = torch.nn.functional.linear(x, gate.weight, getattr(gate, "bias", None))
            if family == "Glm4Moe":
                scores = logits.sigmoid()
                biased = scores + gate.e_score_correction_bias
                best = biased.view(len(x), 2, 4).topk(2, -1).values.sum(-1).argmax(-1)  # one of two groups
                biased = biased.masked_fill(torch.arange(8)[None] // 4 != best[:, None], -1)
                chosen = indices(biased.topk(2, -1).indices, column)
                weights = scores.gather(1, chosen)
                return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor, chosen
            chosen = indices(logits.topk(2, -1).indices, column)
            if family == "GptOss":
                return logits, logits.gather(1, chosen).softmax(-1), chosen
            weights = logits.softmax(-1).gather(1, chosen)
            whole = family == "Mixtral" or gate.norm_topk_prob
            return logits, weights / weights.sum(-1, keepdim=True) if whole else weights, chosen

        gate.forward = forward
        undo.append(lambda: delattr(gate, "forward"))

    for column, layer in enumerate(layers_of(model)):
        mlp = model.model.layers[layer].mlp
        replace(mlp.router if family == "GptOss" else mlp.gate, column)
    try:
        yield
    finally:
        for action in undo:
            action()


def plain_step(model, rollouts, loss):
    total = 0.0
    for i, record in enumerate(rollouts):
        prompt, response = record["prompt_ids"], record["response_ids"]
        if not response:
            continue
        with forced(model, record.get("routed_experts") or []):
            logits = model(input_ids=torch.tensor([prompt + response[:-1]]), use_cache=False).logits[0, len(prompt) - 1:]
            logp = logits.log_softmax(-1)
            value = loss(PlainWave([i], torch.full((len(response),), i), torch.arange(len(response)),
                                   logp.gather(1, torch.tensor(response)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
            value.backward()
        total += float(value.detach())
    return total


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    model = build(request.param)
    rollouts = recorded(model, batch())
    loss = loss_of(rollouts)
    with all_float64():
        total = plain_step(model, rollouts, loss)
        wanted = gradients(model)
        dense_step(model, rollouts, loss)
    assert worst(gradients(model), wanted)[0] > 1e-2  # without the records
    return model, rollouts, loss, total, wanted


HOW = {"packed": {}, "waves": dict(wave_tokens=30), "deep": dict(wave_tokens=12), "recomputed": dict(wave_tokens=30, trunk_state="recompute"),
       "dense": dict(schedule="dense"), "dense in batches": dict(schedule="dense", wave_tokens=200)}


@pytest.mark.parametrize("how", HOW)
def test_a_step_is_the_forced_model_s(case, how):
    model, rollouts, loss, total, wanted = case
    with all_float64():
        result = espalier.hf.phased_step(model, rollouts, loss, **{"schedule": "shared", **HOW[how]})
    assert abs(result.loss - total) <= ALLOWED * abs(total)
    assert worst(gradients(model), wanted)[0] <= ALLOWED


def test_scores_are_the_forced_model_s(case):
    model, rollouts, *_ = case
    with all_float64(), torch.no_grad():
        for record, found in zip(rollouts, espalier.hf.logprobs(model, rollouts, wave_tokens=30)):
            prompt, response = record["prompt_ids"], record["response_ids"]
            with forced(model, record["routed_experts"]):
                logp = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
            assert (found - logp.gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0]).abs().max() <= ALLOWED if response else not len(found)


def test_rows_are_shared_where_token_and_record_are_equal():
    model = build("Qwen3Moe")
    rollouts = recorded(model, batch(), missing=0)
    unique = {(tuple(tokens[:t + 1]), str([sorted(pair) for token in r["routed_experts"][:t + 1] for pair in token]))
              for r in rollouts for tokens in [r["prompt_ids"] + r["response_ids"]] for t in range(len(tokens))}
    without = {key for key, _ in unique}
    result = shared_step(model, rollouts, loss_of(rollouts))
    assert len(without) < len(unique) == result.rows < result.rows_without_sharing


FORMS = {"arrays": lambda r, n: np.array(r, np.uint8), "tensors": lambda r, n: torch.tensor(r), "without the last": lambda r, n: r[:-1],
         "other order": lambda r, n: [[pair[::-1] for pair in token] for token in r]}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_record(form):
    """Every form gives the step of plain lists; the last token's row has no loss."""
    model = build("Glm4Moe")
    rollouts = recorded(model, batch(), missing=0)
    loss = loss_of(rollouts)
    with all_float64():
        shared_step(model, rollouts, loss)
        wanted = gradients(model)
        others = [dict(r, routed_experts=FORMS[form](r["routed_experts"], 0)) for r in rollouts]
        shared_step(model, others, loss)
    assert worst(gradients(model), wanted)[0] <= ALLOWED


def test_all_layers_and_zeros():
    """A record of all layers, whose dense ones say nothing; zeros throughout are no record."""
    model = build("Glm4Moe")
    rollouts = recorded(model, batch(), missing=.3)
    loss = loss_of(rollouts)
    with all_float64():
        shared_step(model, rollouts, loss)
        wanted = gradients(model)
        others = [dict(r, routed_experts=np.array([[[0, 0]] + (t or [[0, 0]] * 2) for t in r["routed_experts"]])) for r in rollouts]
        shared_step(model, others, loss)
    assert worst(gradients(model), wanted)[0] <= ALLOWED


@pytest.mark.parametrize("family", ["Qwen3Moe", "Glm4Moe"])
def test_layers_without_a_record_choose_freely(family):
    model = build(family)
    rollouts = recorded(model, batch())
    for record in rollouts:
        record["routed_experts"] = [token and [[-1, -1] if (t + layer) % 3 == 0 or t % 5 == 4 else pair for layer, pair in enumerate(token)]
                                    for t, token in enumerate(record["routed_experts"])]
    loss = loss_of(rollouts)
    with all_float64():
        total = plain_step(model, rollouts, loss)
        wanted = gradients(model)
        for how in ("packed", "waves"):
            result = espalier.hf.phased_step(model, rollouts, loss, schedule="shared", **HOW[how])
            assert abs(result.loss - total) <= ALLOWED * abs(total) and worst(gradients(model), wanted)[0] <= ALLOWED


@pytest.mark.parametrize("trunk_state", ["keep", "recompute"])
def test_checkpointed_layers_have_the_record_again(trunk_state):
    model = build("Qwen3Moe")
    rollouts = recorded(model, batch())
    loss = loss_of(rollouts)
    with all_float64():
        total = plain_step(model, rollouts, loss)
        wanted = gradients(model)
        for schedule in ("shared", "dense"):
            result = espalier.hf.phased_step(checkpointed(model), rollouts, loss, wave_tokens=30, trunk_state=trunk_state, schedule=schedule)
            assert abs(result.loss - total) <= ALLOWED * abs(total) and worst(gradients(model), wanted)[0] <= ALLOWED


def test_verification_runs_the_same_records():
    model = build("Qwen3Moe", dtype=torch.float32)
    rollouts = recorded(model, batch())
    assert shared_step(model, rollouts, loss_of(rollouts), verify=True, wave_tokens=30).verification.verdict == "pass"


def test_the_model_is_left_as_it_was():
    model = build("Qwen3Moe")
    rollouts = recorded(model, batch())
    before = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    shared_step(model, rollouts, loss_of(rollouts))
    assert torch.equal(model(input_ids=torch.tensor([[5, 6, 7]])).logits, before)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_wrong_records_are_named():
    model = build("Qwen3Moe", dtype=torch.float32)
    rollouts = recorded(model, batch(), missing=0)
    loss, right = loss_of(rollouts), rollouts[3]["routed_experts"]
    wrong = {"entries, one per token": right[:-2], "layers per token": [token[:2] for token in right], "experts in": [[[0, 9]] * 3] * len(right),
             "one of them twice": [[[3, 3]] * 3] * len(right), "or -1 for each": [[[-1, 3]] * 3] * len(right), "integers": [[[.5, 1.]] * 3] * len(right), "and 2 experts": [[[1, 2, 3]] * 3] * len(right)}
    for message, record in wrong.items():
        rollouts[3]["routed_experts"] = record
        with pytest.raises(espalier.Error, match=message) as caught:
            shared_step(model, rollouts, loss)
        assert caught.value.exit_code == 3 and "rollouts[3]" in str(caught.value)
    with pytest.raises(espalier.Error, match="one without"):
        shared_step(make("Llama", torch.float32), [dict(r, routed_experts=right) for r in batch()], loss)


def test_a_router_that_chooses_in_another_way_is_refused():
    model = build("Qwen3Moe", dtype=torch.float32)
    gate = model.model.layers[1].mlp.gate

    def sorting(x):
        logits = torch.nn.functional.linear(x, gate.weight)
        values, indices = logits.softmax(-1).sort(-1, descending=True)
        return logits, values[:, :2], indices[:, :2]

    gate.forward = sorting
    rollouts = recorded(model, batch())
    with pytest.raises(espalier.Unsupported, match="layer 1"):
        shared_step(model, rollouts, loss_of(rollouts))
