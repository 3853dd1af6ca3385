"""Gemma 4 in the program: the sizes of the published models, against transformers' own model in float64. What Gemma 4 shares with other families stands
in the tests of all families; here is what it has alone: layers that read the keys and values of earlier ones, inputs of layers, factors of layers."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import objective
import oracle
from comparison import Trained, assert_equal_gradients, assert_equal_series
from make_model import FAMILIES, make_model, make_rollouts, write_records
from test_train_parity import LOGPROB_FLOAT64

SEED = 46
ROPE = FAMILIES["gemma4"]["config"]["rope_parameters"]
SLIDING, FULL = "sliding_attention", "full_attention"
# The members of the published files that say how layers differ, with sizes of a test: heads and layers are fewer in proportion.
PUBLISHED = {
    "31B": ("gemma4", dict(num_hidden_layers=6, layer_types=[SLIDING] * 5 + [FULL], num_key_value_heads=2, num_global_key_value_heads=1)),
    "12B": ("gemma4", dict(num_hidden_layers=4, layer_types=[SLIDING] * 3 + [FULL], num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1)),
    "26B-A4B": ("gemma4_moe", dict(num_hidden_layers=6, layer_types=[SLIDING] * 5 + [FULL], num_experts=16, top_k_experts=4)),
    "E4B": ("gemma4_reads", dict(num_hidden_layers=6, layer_types=[SLIDING, SLIDING, FULL] * 2, num_kv_shared_layers=3, use_double_wide_mlp=False)),
    "E2B": ("gemma4_reads", dict(num_hidden_layers=7, layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL], num_kv_shared_layers=4,
                                 num_key_value_heads=1)),
    "inputs of layers alone": ("gemma4_reads", dict(num_kv_shared_layers=0, attention_k_eq_v=True, num_global_key_value_heads=1, pad_token_id=5)),
    "without rotation in part, without a window that hides": ("gemma4", dict(sliding_window=200, rope_parameters=dict(
        ROPE, full_attention=dict(rope_type="default", rope_theta=1e4)))),
}
PLANS = {"shared": dict(schedule="phased", token_budget=40), "offloaded": dict(schedule="phased", token_budget=40, path_state="offload", trunk_state="recompute"),
         "dense": dict(schedule="dense")}


@pytest.fixture(scope="module")
def exact():
    """{model: (directory, records, gradients, log-probs)} of transformers' model, made once."""
    made = {}

    def of(name, folder):
        if name not in made:
            family, changes = PUBLISHED[name]
            model = make_model(family, folder / "model", seed=SEED, **changes)
            records = [r for r in make_rollouts(SEED) if r["response_ids"]]
            resolved = objective.resolve({})
            own = oracle.load_model(model, torch.float64, transformers.Gemma4ForCausalLM)
            _, _, gradients, logprobs, _ = oracle.gradients(own, records, objective.advantages(records, resolved), resolved)
            made[name] = model, records, gradients, logprobs
        return made[name]

    return of


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_gradients_are_those_of_transformers(name, plan, exact, espalier, tmp_path, tmp_path_factory):
    model, records, gradients, logprobs = exact(name, tmp_path_factory.mktemp("gemma4"))
    run = Trained(espalier, model, write_records(records, tmp_path / "rollouts.jsonl"), tmp_path / "run", **PLANS[plan])
    assert_equal_gradients(run.gradients, gradients, SEED)
    assert_equal_series(run.logprobs, "logprobs", logprobs, LOGPROB_FLOAT64)


@pytest.mark.parametrize("train, names", [(r"model\.layers\.[34]\..*", ("layers.3.", "layers.4.")), ("per_layer_projection_norm", ("per_layer_projection_norm",)),
                                          ("embeddings", ("embed_tokens",)), ("k_proj,v_proj", ("k_proj", "v_proj"))])
def test_parts_of_a_model_whose_layers_read_others_train_alone(train, names, espalier, tmp_path):
    """Readers without their source, the inputs of layers alone, sources alone."""
    model = make_model("gemma4_reads", tmp_path / "model", seed=SEED)
    file = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    every = Trained(espalier, model, file, tmp_path / "every", **PLANS["shared"]).gradients
    some = Trained(espalier, model, file, tmp_path / "some", train=train, **PLANS["shared"]).gradients
    assert set(some) == {name for name in every if any(part in name for part in names)}
    assert_equal_gradients(some, {name: every[name] for name in some}, SEED)


def test_factors_of_layers_stay_and_count(espalier, tmp_path):
    """layer_scalar is part of the function, never trains, and a saved model has it."""
    model = make_model("gemma4", tmp_path / "model", seed=SEED)
    file = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    run = Trained(espalier, model, file, tmp_path / "run", lr=1e-2)
    before, after = load_file(model / "model.safetensors"), load_file(run.out / "model.safetensors")
    assert set(after) == set(before) and not any("layer_scalar" in name for name in run.gradients)
    scalars = [name for name in before if name.endswith("layer_scalar")]
    assert len(scalars) == 3 and all(torch.equal(before[name], after[name]) for name in scalars)
    (tmp_path / "ones").mkdir()
    (tmp_path / "ones/config.json").symlink_to(model / "config.json")
    save_file({name: torch.ones_like(t) if name in scalars else t for name, t in before.items()}, tmp_path / "ones/model.safetensors", {"format": "pt"})
    other = Trained(espalier, tmp_path / "ones", file, tmp_path / "other")
    name = "model.layers.0.mlp.down_proj.weight"
    assert (other.gradients[name] - run.gradients[name]).norm() > 0.01 * run.gradients[name].norm()
    damaged = dict(before) | {scalars[1]: torch.tensor([float("nan")])}
    save_file(damaged, tmp_path / "ones/model.safetensors", {"format": "pt"})
    assert "layer_scalar" in espalier("plan", "--model", tmp_path / "ones", "--rollouts", file, expect=3).stderr


def test_keys_that_no_layer_reads_stay_as_they_are(espalier, tmp_path):
    """The published files of E2B and E4B hold keys and values of the layers that read those of others."""
    model = make_model("gemma4_reads", tmp_path / "model", seed=SEED)
    tensors = load_file(model / "model.safetensors")
    more = {f"model.layers.{layer}.self_attn.{name}.weight": torch.randn(shape) for layer, of in ((2, 12), (3, 12), (4, 16))
            for name, shape in (("k_proj", (2 * of, 48)), ("v_proj", (2 * of, 48)), ("k_norm", (of,)))}
    assert not set(more) & set(tensors)
    save_file(tensors | more, model / "model.safetensors", {"format": "pt"})
    file = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    run = Trained(espalier, model, file, tmp_path / "run", lr=1e-2)
    after = load_file(run.out / "model.safetensors")
    assert set(after) == set(tensors) | set(more) and all(torch.equal(after[name], tensor) for name, tensor in more.items())
    assert not set(more) & set(run.gradients)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_reads", "gemma4_moe"])
def test_verify_passes(family, espalier, tmp_path):
    model = make_model(family, tmp_path / "model", seed=SEED)
    file = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    assert espalier("verify", "--model", model, "--rollouts", file, "--json").json["verdict"] == "pass"


@pytest.mark.parametrize("changes, word", [
    (dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=8, hidden_size_per_layer_input=8), "hidden_size_per_layer_input"),
    (dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=8, num_kv_shared_layers=1, use_double_wide_mlp=True),
     "use_double_wide_mlp"),
    (dict(use_bidirectional_attention="all"), "use_bidirectional_attention")])
def test_what_cannot_be_had_is_refused_by_name(changes, word, espalier, tmp_path):
    model = make_model("gemma4", tmp_path / "model", seed=SEED)
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    file = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    assert word in espalier("plan", "--model", model, "--rollouts", file, expect=4).stderr


@pytest.mark.parametrize("option", ["--cp", "--pp"])
def test_layouts_of_models_whose_layers_read_others_are_refused(option, espalier, tmp_path):
    model = make_model("gemma4_reads", tmp_path / "model", seed=SEED)
    file = write_records(make_rollouts(SEED), tmp_path / "rollouts.jsonl")
    told = espalier("plan", "--model", model, "--rollouts", file, option, 2, expect=2).stderr
    assert option in told and "because" in told
