"""Every call of the model is watched: layers that drop keyword arguments, tables of a call's length, other threads, the user's attention."""

import threading
import types

import pytest
import torch
import transformers
from transformers import masking_utils

import espalier
from hf_models import all_float64, batch, checkpointed, dense_step, gradients, loss_of, make, shared_step, worst

hf = pytest.importorskip("espalier.hf")
ROLLOUTS = batch(groups=((14, (7, 12, 9)), (12, (6, 4))), stem=0)
LOSS = loss_of(ROLLOUTS)


def without_keywords(model):
    """Its layers hand nothing on to their attention, as StableLM's."""
    for layer in model.model.layers:
        attention = layer.self_attn
        plain = type(attention).forward
        attention.forward = types.MethodType(lambda self, *args, espalier=None, plain=plain, **kwargs: plain(self, *args, **kwargs), attention)
    return model


@pytest.mark.parametrize("wave_tokens,schedule", [(4096, "packed"), (12, "phased")])
def test_layers_that_drop_keyword_arguments(wave_tokens, schedule):
    model = without_keywords(make("Llama"))
    with all_float64():
        dense_step(model, ROLLOUTS, LOSS)
        wanted = gradients(model)
        result = shared_step(model, ROLLOUTS, LOSS, wave_tokens=wave_tokens)
        assert result.schedule == schedule and worst(gradients(model), wanted)[0] <= 1e-10


def test_checkpointed_layers_that_drop_them_are_refused():
    """Their second forward, within the backward, would see no phase."""
    model = checkpointed(without_keywords(make("Llama", torch.float32)))
    with pytest.raises(espalier.Unsupported, match="checkpoint"):
        shared_step(model, ROLLOUTS, LOSS)


@pytest.mark.parametrize("wave_tokens", [12, 4096])
def test_a_layer_that_sees_no_phase_stops_the_step(wave_tokens):
    """Packed rows without a phase would be one causal sequence."""
    model = make("Llama", torch.float32)
    hf.check(model)
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(espalier.Unsupported, match=r"none in layers \[1\]"):
        shared_step(model, ROLLOUTS, LOSS, wave_tokens=wave_tokens)
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_that_attends_twice_is_refused(monkeypatch):
    model = make("Llama", torch.float32)
    attention = model.model.layers[0].self_attn
    plain = attention.forward
    attention.forward = lambda *args, **kwargs: (plain(*args, **kwargs), plain(*args, **kwargs))[1]
    with pytest.raises(espalier.Unsupported, match="one attention per layer"):
        shared_step(model, ROLLOUTS, LOSS)


def test_neighbouring_rows_are_found_by_the_probe():
    """A module that no list names: it mixes each row with the row before."""
    model = make("Llama", torch.float32)
    plain = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: plain(x + .5 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
    with pytest.raises(espalier.Unsupported, match="only through attention"):
        shared_step(model, ROLLOUTS, LOSS)


class LastShift(torch.nn.Module):
    """The last norm, whose every row but a call's first gets a part of the row before it: no row's neighbours are read further on."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        x = self.norm(x)
        return x + torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0)) / 2


def test_a_neighbour_that_one_row_alone_reads_is_found_by_the_probe():
    """Of each continuation the first row differs, and no other."""
    model = make("Llama", torch.float32)
    model.model.norm = LastShift(model.model.norm)
    with pytest.raises(espalier.Unsupported, match="only through attention"):
        hf.check(model)


def test_modules_that_are_replaced_after_a_probe_are_probed():
    model = make("Llama", torch.float32)
    hf.check(model)
    model.model.norm = torch.nn.Sequential(model.model.norm, CallLength())
    with pytest.raises(espalier.Unsupported, match="only through attention"):
        shared_step(model, ROLLOUTS, LOSS)


def far(window):
    """A mask function of a model's own: a row does not see keys that are so far away."""
    return lambda batch, head, row, key: row - key < window


@pytest.mark.parametrize("wave_tokens", [12, 4096])
def test_a_mask_function_of_the_model_s_own_is_refused(wave_tokens, monkeypatch):
    """Beyond what short sequences of a probe could show."""
    from transformers.models.llama import modeling_llama
    plain = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **more: plain(**more, and_mask_function=far(15)))
    with pytest.raises(espalier.Unsupported, match="or_mask_function or and_mask_function"):
        shared_step(make("Llama", torch.float32), ROLLOUTS, LOSS, wave_tokens=wave_tokens)


@pytest.mark.parametrize("named,masked", [(5, None), (None, 5), (5, 6)])
def test_a_window_that_only_masks_or_only_layers_name_is_refused(named, masked, monkeypatch):
    from transformers.models.mistral import modeling_mistral
    model = make("Mistral", torch.float32, sliding_window=named)
    other = type(model.config)(**{**model.config.to_dict(), "sliding_window": masked})

    def mask(config, **more):
        other._attn_implementation_internal = config._attn_implementation_internal
        make_mask = masking_utils.create_causal_mask if masked is None else masking_utils.create_sliding_window_causal_mask
        return make_mask(config=other, **more)

    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        monkeypatch.setattr(modeling_mistral, name, mask)
    with pytest.raises(espalier.Unsupported, match="window"):
        shared_step(model, ROLLOUTS, LOSS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_rounding_passes_the_probe(family, dtype):
    hf.check(make(family, dtype))


def test_the_probe_draws_no_random_numbers_and_runs_once(monkeypatch):
    from espalier.hf import probe
    model, state = make("Llama", torch.float32), torch.get_rng_state()
    hf.check(model)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(probe, "_compare", None)
    hf.check(model)


def long_rope(family="Llama", original=19):
    model = make(family)
    n = model.model.rotary_emb.inv_freq.numel()
    return make(family, rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * n, long_factor=[2.0] * n, factor=2.0,
                                             original_max_position_embeddings=original), max_position_embeddings=38)


@pytest.mark.parametrize("how", [dict(schedule="dense"), dict(schedule="shared", wave_tokens=4096), dict(schedule="shared", wave_tokens=12),
                                 dict(schedule="shared", wave_tokens=12, trunk_state="recompute"), dict(schedule="auto")])
def test_rotary_tables_of_each_rollout_s_own_length(how):
    model = long_rope()
    with all_float64():
        dense_step(model, ROLLOUTS, LOSS)
        wanted = gradients(model)
        result = hf.phased_step(model, ROLLOUTS, LOSS, verify=True, **how)
        assert worst(gradients(model), wanted)[0] <= 1e-10
        assert result.verification.verdict == "pass" and result.verification.worst["floor"] < 1e-4
    with pytest.raises(espalier.Unsupported, match="changes its rotary table"):
        hf.check(model, longest=20)
    hf.check(model, longest=19)


def test_a_rotary_table_that_is_scaled_by_a_call_s_length():
    """Phi-3.5-MoE scales its table by the longest position, whatever type of table it is."""
    import hf_every_model as tiny
    model = tiny.build("phimoe", rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4, short_mscale=1.0, long_mscale=1.3,
                                                      original_max_position_embeddings=tiny.ORIGINAL))
    errors = tiny.shared_error(model)
    assert max(errors.values()) <= 1e-9, errors  # as in test_hf_sweep.py


def test_waves_name_the_rollouts_of_the_whole_step():
    seen = {}

    def loss(wave):
        seen.update({i: int((wave.rollout == i).sum()) for i in wave.rollouts})
        return LOSS(wave)

    shared_step(long_rope(), ROLLOUTS, loss)
    assert seen == {i: len(r["response_ids"]) for i, r in enumerate(ROLLOUTS)}


def test_padded_calls_of_another_thread_keep_their_mask():
    """While this thread stands within a step's loss."""
    model = make("Llama", torch.float32).eval()
    ids, mask = torch.tensor([[0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    inside, found, done = threading.Event(), [], threading.Event()

    def other():
        inside.wait()
        with torch.no_grad():
            found.append(model(input_ids=ids, attention_mask=mask).logits[mask.bool()])
        done.set()

    hf.check(model)
    layer = model.model.layers[1].self_attn

    def wait_inside(*_):
        if threading.current_thread() is threading.main_thread():
            inside.set()
            done.wait(30)

    handle = layer.register_forward_hook(wait_inside)
    thread = threading.Thread(target=other)
    thread.start()
    shared_step(model, ROLLOUTS, LOSS)
    thread.join()
    handle.remove()
    assert torch.equal(found[0], wanted)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_the_user_s_attention_stays_in_use_outside_of_phases(name):
    """In the loss, which may call the model (a reference), and after the step."""
    model = make("Gemma", torch.float32, attn_implementation=name).eval()
    used = []
    module = transformers.models.gemma.modeling_gemma
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    plain = module.eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watched(*args, **kwargs):
        used.append(name)
        return plain(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if name == "eager":
            patch.setattr(module, "eager_attention_forward", watched)
        else:
            patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", watched)

        def loss(wave):
            used.clear()
            with torch.no_grad():
                model(input_ids=torch.tensor([[5, 6, 7]]))
            assert used == [name] * 3
            return LOSS(wave)

        shared_step(model, ROLLOUTS, loss)
    assert model.config._attn_implementation == name


def test_steps_of_two_threads_overlap():
    model, barrier, errors = make("Llama", torch.float32), threading.Barrier(2, timeout=30), []
    hf.check(model)

    def loss(wave):
        barrier.wait()
        return LOSS(wave)

    def run():
        try:
            shared_step(model, ROLLOUTS, loss)
        except BaseException as problem:
            errors.append(problem)

    threads = [threading.Thread(target=run) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not errors and model.config._attn_implementation == "sdpa"


class CallLength(torch.nn.Module):
    """Adds the length of the call to every row: what no name in a config tells."""

    def forward(self, x):
        return x * (1 + .05 * x.shape[1])


def test_the_tolerance_of_verify_does_not_grow_with_the_fault():
    model = make("Llama", torch.float32)
    hf.check(model)
    model.model.norm.register_forward_hook(lambda _, __, out: CallLength()(out))  # which changes no module's type, and so comes after the probe
    with pytest.raises(espalier.Error) as caught:
        shared_step(model, ROLLOUTS, LOSS, verify=True)
    assert caught.value.kind == "verification"
    floors = [float(line.split()[2]) for line in str(caught.value).splitlines() if line.startswith("model.") and "expected" not in line]
    assert floors and max(floors) < 1e-4


def test_a_gradient_that_is_zero_but_for_rounding_allows_no_other_to_be_wrong():
    """Biases of keys have no gradient (biogpt's): their floor, as large as they are, stays theirs."""
    from espalier.rows import verdict
    one, tiny = torch.ones(100), torch.full((100,), 1e-9)
    draw = lambda weight: lambda number: [("weight", weight, one, one * (1 + 1e-6)), ("bias", -tiny, tiny, 3 * tiny)]
    table = verdict.compared(draw(one * 1.01), 0.0, 0.0)
    assert table.verdict == "fail" and table.worst["parameter"] == "weight"
    assert verdict.compared(draw(one), 0.0, 0.0).verdict == "pass"


def test_a_floor_that_is_small_by_chance_is_drawn_again():
    from espalier.rows import verdict
    one, drawn = torch.ones(100), []

    def draw(number):
        drawn.append(number)
        return [("weight", one * (1 + 3e-6), one, one * (1 + (2e-6 if number == 2 else 1e-6)))]

    assert verdict.compared(draw, 0.0, 0.0).verdict == "pass" and drawn == [0, 1, 2]
    wrong = lambda number: [("weight", one * 1.01, one, one * (1 + 1e-6 * number))]
    assert verdict.compared(wrong, 0.0, 0.0).verdict == "fail"


def test_a_later_step_of_another_regime_is_verified_too():
    model = make("Llama", torch.float32)
    step = lambda rollouts, **how: shared_step(model, rollouts, loss_of(rollouts), **how)
    assert step(ROLLOUTS, verify=True).verification and not step(ROLLOUTS, wave_tokens=12).verified
    again = step(ROLLOUTS, verify=True)
    assert again.verified and again.verification is None
    assert step(ROLLOUTS, wave_tokens=12, verify=True).verification, "trunks"
    assert step(batch(groups=((50, (20, 30)),), stem=0), verify=True).verification, "longer rollouts"
    assert hf.phased_step(model, ROLLOUTS, LOSS, schedule="dense", verify=True).verification, "another schedule"


def test_a_window_is_another_regime():
    """Lengths of one power of two, on both sides of the window."""
    model = make("Mistral", torch.float32, sliding_window=20)
    step = lambda *groups, **how: (lambda rollouts: shared_step(model, rollouts, loss_of(rollouts), **how))(batch(groups=groups, stem=0))
    assert step((12, (6, 4)), verify=True).verification and step((12, (6, 5))).verified
    beyond = step((14, (7, 12)))
    assert not beyond.verified and step((14, (7, 12)), verify=True).verification


def test_autocast_modes_and_adapters_are_other_regimes():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("Llama", torch.float32), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"]))
    verified = lambda: shared_step(model, ROLLOUTS, LOSS).verified
    assert shared_step(model, ROLLOUTS, LOSS, verify=True).verification and verified()
    with torch.autocast("cpu", torch.bfloat16):
        assert not verified()
    assert not (model.eval(), verified())[1]
    assert (model.train(), verified())[1]
    model.set_adapter("other")
    assert not verified()


def test_entropies_that_are_first_read_without_gradients_have_them_later():
    def loss(wave, first):
        with torch.no_grad():
            first(wave)
        return -(wave.logprobs.sum() + .1 * (wave.entropies * (wave.position + 1)).sum())

    model, wanted = make("Llama"), None
    for first in (lambda wave: None, lambda wave: wave.entropies.mean()):
        for wave_tokens in (4096, 12):
            shared_step(model, ROLLOUTS, lambda wave: loss(wave, first), wave_tokens=wave_tokens)
            found = gradients(model)
            wanted = wanted or found
            assert worst(found, wanted)[0] <= 1e-6  # norms and tables are float32 here


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_an_error(mode):
    with mode(), pytest.raises(espalier.Error, match=f"torch.{mode.__name__}") as caught:
        shared_step(make("Llama", torch.float32), ROLLOUTS, LOSS)
    assert caught.value.exit_code == 2 and "score" in caught.value.remedy


@pytest.mark.parametrize("how", [
    dict(temperature=0), dict(temperature=float("nan")), dict(temperature=-1), dict(temperature=float("inf")), dict(temperature="1"),
    dict(temperature=None), dict(wave_tokens=None), dict(wave_tokens=0), dict(wave_tokens=1.5), dict(wave_tokens=True), dict(trunk_state=None),
    dict(trunk_state="offload"), dict(schedule=None), dict(schedule="phased"), dict(router_aux_loss_coef="x"),
    dict(router_aux_loss_coef=float("nan")), dict(router_aux_loss_coef=.1, router_aux_loss_scope=None)])
def test_wrong_arguments_are_named(how):
    with pytest.raises(espalier.Error) as caught:
        hf.phased_step(make("Qwen3Moe", torch.float32, num_hidden_layers=1), ROLLOUTS, LOSS, **how)
    assert (caught.value.kind, caught.value.where, caught.value.exit_code) == ("option", list(how)[-1], 2)
    if set(how) <= {"temperature", "wave_tokens"}:
        with pytest.raises(espalier.Error):
            hf.score(make("Llama", torch.float32), ROLLOUTS, **how)


@pytest.mark.parametrize("rollouts", [
    None, 5, "rollouts", {"prompt_ids": [1], "response_ids": [2]}, [None], ["a"], [[1, 2]], [{"prompt_ids": None, "response_ids": [1]}],
    [{"prompt_ids": [[1], [2, 3]], "response_ids": [1]}], [{"prompt_ids": [1], "response_ids": "ab"}], [{"prompt_ids": [True], "response_ids": [1]}],
    [{"prompt_ids": torch.ones(1, 2, dtype=torch.long), "response_ids": [1]}], iter([])])
def test_wrong_rollouts_are_named(rollouts):
    for run in (lambda model: shared_step(model, rollouts, LOSS), lambda model: hf.logprobs(model, rollouts)):
        with pytest.raises(espalier.Error) as caught:
            run(make("Llama", torch.float32))
        assert caught.value.where.startswith("rollouts") and caught.value.exit_code == 3


def test_rollouts_without_any_response_add_nothing():
    model = make("Llama", torch.float32)
    result = shared_step(model, [dict(prompt_ids=[5, 6, 7], response_ids=[])] * 2, LOSS)
    assert result.loss == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_wrong_models_and_losses_are_named():
    with pytest.raises(espalier.Error, match="transformers causal language model"):
        shared_step(torch.nn.Linear(2, 2), ROLLOUTS, LOSS)
    with pytest.raises(espalier.Error, match="transformers causal language model"):
        shared_step("Qwen/Qwen3-0.6B", ROLLOUTS, LOSS)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(make("Llama").config)
    for run in (lambda: shared_step(empty, ROLLOUTS, LOSS), lambda: hf.logprobs(empty, ROLLOUTS)):
        with pytest.raises(espalier.Error, match="meta device"):
            run()
    with pytest.raises(espalier.Error, match="loss: expected a function"):
        shared_step(make("Llama", torch.float32), ROLLOUTS, None)
    with pytest.raises(espalier.Error, match="requires_grad"):
        shared_step(make("Llama", torch.float32).requires_grad_(False), ROLLOUTS, LOSS)


def test_an_optimizer_in_the_backward_is_refused():
    model = make("Llama", torch.float32)
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(espalier.Unsupported, match="lm_head.weight.*every backward"):
        shared_step(model, ROLLOUTS, LOSS)


@pytest.mark.parametrize("name,fields", [("GPT2", dict(n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
                                         ("GPTNeoX", dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48))])
def test_dropout_fields_that_no_layer_reads(name, fields):
    config = getattr(transformers, name + "Config")(vocab_size=97, **fields)
    assert any("drop" in field and value for field, value in config.to_dict().items())
    hf.check(getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(name, name + "ForCausalLM"))(config).train())


def test_the_step_leaves_the_peak_statistics_alone(monkeypatch):
    from espalier.rows import measure
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: pytest.fail("the trainer's statistics are reset"))
    with measure.Peak() as peak:
        pass
    assert peak.bytes == 7 and "clear_refs" not in open(measure.__file__).read()
