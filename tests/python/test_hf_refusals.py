"""What would be silently wrong is refused by name before anything runs, and bad input with its place."""

import pytest
import torch
import transformers

import espalier
from hf_models import batch, loss_of, make, shared_step

hf = pytest.importorskip("espalier.hf")
ROLLOUTS = batch()
LOSS = loss_of(ROLLOUTS)


def refused(model, *words):
    with pytest.raises(espalier.Unsupported) as caught:
        shared_step(model, ROLLOUTS, LOSS)
    assert caught.value.exit_code == 4 and caught.value.kind == "unsupported"
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert all(p.grad is None for p in model.parameters())


def test_attention_dropout_in_training():
    model = make("Qwen3", torch.float32, attention_dropout=.1)
    refused(model, "attention_dropout = 0.1")
    hf.check(model.eval())


def test_a_dropout_module():
    model = make("Phi3", torch.float32, resid_pdrop=.2)
    refused(model, "p = 0.2")


def test_dropout_of_an_adapter():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("Qwen3", torch.float32), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=.1))
    refused(model.train(), "lora_dropout", "p = 0.1")


@pytest.mark.parametrize("name,how", [("LoraConfig", dict(r=2, target_modules=["q_proj"], alora_invocation_tokens=[5, 6])),
                                      ("PromptTuningConfig", dict(num_virtual_tokens=3)), ("PrefixTuningConfig", dict(num_virtual_tokens=3))])
def test_adapters_that_need_the_whole_rollout_in_one_call(name, how):
    """Activated LoRA looks for its tokens in every call; prompt learning puts virtual tokens before every call. Also after a probe."""
    peft = pytest.importorskip("peft")
    plain = make("Llama", torch.float32)
    hf.check(plain)
    model = peft.get_peft_model(plain, getattr(peft, name)(task_type="CAUSAL_LM", **how))
    refused(model, "adapter default", "alora_invocation_tokens" if name == "LoraConfig" else name)


def test_noise_on_the_embeddings():
    """NEFTune, as transformers' Trainer switches it on."""
    model = make("Qwen3", torch.float32)
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    refused(model, "NEFTune")
    hf.check(model.eval())


def test_noise_before_a_router():
    refused(make("Mixtral", torch.float32, router_jitter_noise=.1), "router_jitter_noise")


def test_reentrant_checkpointing():
    model = make("Qwen3", torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    refused(model, "use_reentrant=True")


def test_layers_whose_state_does_not_pass(monkeypatch):
    """Recurrent layers that look back by a function of their own."""
    from espalier.hf import mixers
    from hf_layers import make
    monkeypatch.setattr(mixers, "_NEEDED", set())
    refused(make("Qwen3-Next", torch.float32), "config.layer_types", "linear_attention")


def test_a_state_that_is_not_captured(monkeypatch):
    from espalier.rows.trunk import Trunk
    from hf_layers import make
    model, take = make("Qwen3-Next", torch.float32), Trunk.take_state
    hf.check(model)
    monkeypatch.setattr(Trunk, "take_state", lambda self, key, state: take(self, key, state) if key[0] != "model.layers.2.linear_attn" else None)
    with pytest.raises(espalier.Unsupported, match="none from model.layers.2.linear_attn"):
        hf.logprobs(model, ROLLOUTS, wave_tokens=30)


def test_a_state_without_a_graph(monkeypatch):
    from espalier.rows.trunk import Trunk
    from hf_layers import make
    take = Trunk.take_state
    monkeypatch.setattr(Trunk, "take_state", lambda self, key, state: take(self, key, state.detach()))
    with pytest.raises(espalier.Unsupported, match="states with a graph"):
        shared_step(make("LFM2", torch.float32), ROLLOUTS, LOSS, wave_tokens=30)


def test_bidirectional_attention():
    model = make("Llama", torch.float32)
    model.model.layers[1].self_attn.is_causal = False
    refused(model, "layers.1", "causal attention")


def test_attention_of_a_model_s_own():
    """Biases by distance (ALiBi), built inside the model."""
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)
    refused(transformers.BloomForCausalLM(config), "AttentionInterface")


def test_a_layer_without_attention():
    model = make("Llama", torch.float32)
    model.model.layers[1].self_attn = torch.nn.Identity()
    refused(model, "attention in every layer", "[1]")


def test_an_engine_of_deepspeed():
    engine = type("DeepSpeedEngine", (torch.nn.Module,), {})()
    with pytest.raises(espalier.Unsupported, match="DeepSpeed"):
        hf.check(engine)


def test_an_encoder_decoder():
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    with pytest.raises(espalier.Unsupported, match="encoder-decoder"):
        hf.check(transformers.T5ForConditionalGeneration(config))


def test_one_process_with_many_replicas():
    with pytest.raises(espalier.Unsupported, match="DataParallel"):
        hf.check(torch.nn.DataParallel(make("Llama", torch.float32)))


def test_sequence_parallelism_of_verl(monkeypatch):
    import sys
    import types
    monkeypatch.setitem(sys.modules, "verl.utils.ulysses", types.SimpleNamespace(get_ulysses_sequence_parallel_world_size=lambda: 2))
    refused(make("Llama", torch.float32), "ulysses_sequence_parallel_size=1")


def test_keys_and_values_without_a_graph(monkeypatch):
    """Whatever detaches them: the prompt's gradient would be zero."""
    from espalier.rows.trunk import Trunk
    take = Trunk.take
    monkeypatch.setattr(Trunk, "take", lambda self, layer, k, v: take(self, layer, k.detach(), v.detach()))
    model = make("Llama", torch.float32)
    with pytest.raises(espalier.Unsupported, match="would get no gradient"):
        shared_step(model, ROLLOUTS, LOSS, wave_tokens=30)


def test_a_layer_that_is_not_captured(monkeypatch):
    from espalier.rows.trunk import Trunk
    model = make("Llama", torch.float32)
    hf.check(model)
    take = Trunk.take
    monkeypatch.setattr(Trunk, "take", lambda self, layer, k, v: take(self, layer, k, v) if layer != 1 else None)
    with pytest.raises(espalier.Unsupported, match=r"none from layers \[1\]"):
        hf.logprobs(model, ROLLOUTS, wave_tokens=30)


@pytest.mark.parametrize("rollouts,where", [
    ([], "rollouts"), ([{"prompt_ids": [1]}], "rollouts[0]"), ([{"prompt_ids": [], "response_ids": [1]}], "rollouts[0]['prompt_ids']"),
    ([{"prompt_ids": [1, 97], "response_ids": [1]}], "rollouts[0]['prompt_ids']"),
    ([{"prompt_ids": [1], "response_ids": [-1]}], "rollouts[0]['response_ids']"),
    ([{"prompt_ids": [1], "response_ids": [1.5]}], "rollouts[0]['response_ids']")])
def test_bad_rollouts_are_named(rollouts, where):
    with pytest.raises(espalier.Error) as caught:
        shared_step(make("Llama", torch.float32), rollouts, LOSS)
    assert (caught.value.kind, caught.value.where, caught.value.exit_code) == ("input", where, 3)


@pytest.mark.parametrize("how,where", [(dict(wave_tokens=0), "wave_tokens"), (dict(trunk_state="offload"), "trunk_state")])
def test_bad_arguments_are_named(how, where):
    with pytest.raises(espalier.Error) as caught:
        shared_step(make("Llama", torch.float32), ROLLOUTS, LOSS, **how)
    assert (caught.value.kind, caught.value.where, caught.value.exit_code) == ("option", where, 2)


def test_a_loss_that_is_no_scalar():
    with pytest.raises(espalier.Error, match="a scalar tensor"):
        shared_step(make("Llama", torch.float32), ROLLOUTS, lambda wave: wave.logprobs)


def test_errors_keep_their_fields_when_pickled():
    import pickle
    error = pickle.loads(pickle.dumps(espalier.Unsupported("here", "this", "that", "do")))
    assert isinstance(error, espalier.Unsupported) and (error.where, error.remedy, error.exit_code) == ("here", "do", 4)
