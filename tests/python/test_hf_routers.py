"""The load-balancing loss of a mixture of experts: transformers' formula of dense calls, and its gradient, float64 to 1e-10."""

import pytest
import torch

import espalier
from hf_models import all_float64, batch, dense_step, gradients, loss_of, make, shared_step, worst

hf = pytest.importorskip("espalier.hf")
ROLLOUTS = batch()
LOSS = loss_of(ROLLOUTS)
COEF = 30.0  # so large that the router's loss is most of every gradient


def load_balancing(router_logits, chosen, rows):
    """E sum_e f_e P_e over `rows` of all layers; transformers' function, without its roundings to float32."""
    p = torch.cat([layer[rows].softmax(-1) for layer in router_logits])
    taken = torch.zeros_like(p).scatter_(1, p.topk(chosen, -1).indices, 1)
    return p.shape[1] * (taken.mean(0) * p.mean(0)).sum()


def dense_router_loss(model, scope):
    """Of one call with padding, or the mean over calls of one rollout each; and transformers' own aux_loss of the same calls."""
    ids = [torch.tensor(r["prompt_ids"] + r["response_ids"]) for r in ROLLOUTS]
    chosen = model.config.num_experts_per_tok
    if scope == "rollout":
        results = [model(input_ids=x[None], output_router_logits=True, use_cache=False) for x in ids]
        ours = [load_balancing(result.router_logits, chosen, slice(None)) for result in results]
        return sum(ours) / len(ids), sum(float(result.aux_loss) for result in results) / len(ids)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    result = model(input_ids=padded, attention_mask=mask, output_router_logits=True, use_cache=False)
    return load_balancing(result.router_logits, chosen, mask.flatten().bool()), float(result.aux_loss)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
@pytest.mark.parametrize("scope", ["rollout", "minibatch"])
def test_router_loss_and_gradient_are_those_of_dense_calls(family, scope):
    model = make(family)
    with all_float64():
        dense_step(model, ROLLOUTS, LOSS)
        without = gradients(model)
        dense_step(model, ROLLOUTS, LOSS)
        loss, theirs = dense_router_loss(model, scope)
        assert abs(float(loss) - theirs) <= 4 * torch.finfo(torch.float32).eps * theirs  # f, rounded, its quotient, the sum
        loss = COEF * loss
        loss.backward()
        wanted = gradients(model)
        assert worst(without, wanted)[0] > 1e-2
        for wave_tokens, trunk_state in ((16, "keep"), (60, "recompute"), (4096, "keep")):
            result = shared_step(model, ROLLOUTS, LOSS, wave_tokens=wave_tokens, trunk_state=trunk_state, router_aux_loss_coef=COEF,
                                    router_aux_loss_scope=scope)
            assert abs(result.router_loss - float(loss)) <= 1e-10 * float(loss)
            assert worst(gradients(model), wanted)[0] <= 1e-10, (wave_tokens, trunk_state)


@pytest.mark.parametrize("scope", ["rollout", "minibatch"])
def test_verification_has_the_router_s_loss_too(scope):
    model = make("Qwen3Moe")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    result = shared_step(model, ROLLOUTS, LOSS, wave_tokens=30, router_aux_loss_coef=COEF, router_aux_loss_scope=scope, verify=True)
    assert result.verification.verdict == "pass" and result.verification.worst["floor"] < 1e-4


def test_what_is_wanted_must_be_said():
    """config.output_router_logits makes transformers add the router's loss to its own: here nobody would."""
    model = make("Qwen3Moe", torch.float32, output_router_logits=True)
    with pytest.raises(espalier.Unsupported, match="router_aux_loss_coef"):
        shared_step(model, ROLLOUTS, LOSS)
    shared_step(model, ROLLOUTS, LOSS, router_aux_loss_coef=0)


def test_a_family_without_such_a_loss_is_refused():
    """DeepSeek's routers return sigmoid scores; a softmax over them is no loss of transformers'."""
    import hf_every_model as tiny
    with pytest.raises(espalier.Unsupported, match="defines a load-balancing loss"):
        shared_step(tiny.build("deepseek_v3"), tiny.ROLLOUTS, tiny.LOSS, router_aux_loss_coef=.1)


def test_bad_arguments_are_named():
    with pytest.raises(espalier.Error, match="rollout or minibatch") as caught:
        shared_step(make("Qwen3Moe", torch.float32), ROLLOUTS, LOSS, router_aux_loss_coef=.1, router_aux_loss_scope="layer")
    assert caught.value.exit_code == 2
    with pytest.raises(espalier.Unsupported, match="a mixture of experts"):
        shared_step(make("Llama", torch.float32), ROLLOUTS, LOSS, router_aux_loss_coef=.1)
