"""Activation checkpointing by whoever wraps a forward: exact in float64, or refused by name before a gradient exists."""

import contextlib
import functools
import logging

import pytest
import torch
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import espalier
import espalier.hf
import hf_layers
from hf_models import Wide, all_float64, batch, dense_step, gradients, loss_of, make, shared_step, worst

ROLLOUTS = batch(groups=((14, (7, 5)), (9, (3, 4))), stem=0)
LOSS = loss_of(ROLLOUTS)
BOUND = 1e-10
wide_again = lambda: (contextlib.nullcontext(), Wide())
again = functools.partial(checkpoint, use_reentrant=False, context_fn=wide_again)
PLANS = [dict(wave_tokens=4096), dict(wave_tokens=12), dict(wave_tokens=12, trunk_state="recompute")]


def reentrant(forward, *args, **kwargs):
    return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=True)


def by_transformers(**how):
    return lambda model, _: model.activation_checkpointing_enable(dict(use_reentrant=False, context_fn=wide_again), **how)


def by_instance(function, which=slice(None), part=lambda layer: layer):
    """Replaces the forward of layers, or of a part of them."""
    def wrap(model, _):
        for module in map(part, model.model.layers[which]):
            module.forward = functools.partial(function, module.forward)

    return wrap


def by_class(model, monkeypatch):
    for kind in {type(layer) for layer in model.model.layers}:
        plain = kind.forward
        monkeypatch.setattr(kind, "forward", functools.wraps(plain)(lambda self, *args, _plain=plain, **more: again(functools.partial(_plain, self), *args, **more)))


def by_wrapper(how):
    def wrap(model, _):
        more = {} if how is CheckpointImpl.REENTRANT else dict(context_fn=wide_again)
        layers = set(model.model.layers)
        apply_activation_checkpointing(model, functools.partial(checkpoint_wrapper, checkpoint_impl=how, **more), lambda module: module in layers)

    return wrap


def by_hooks(model, _):
    for layer in model.model.layers:
        composable(layer, context_fn=wide_again)


def around_the_model(model, _):
    model.model.forward = functools.partial(again, model.model.forward)


EXACT = {"every layer": by_transformers(), "every second layer": by_transformers(every_n_layers=2), "inputs in host memory": by_transformers(offload=True),
         "torch's wrapper": by_wrapper(CheckpointImpl.NO_REENTRANT), "hooks": by_hooks, "MLPs": by_instance(again, part=lambda layer: layer.mlp)}
BY_FORWARD = {"instances": by_instance(again), "the class": by_class}  # exact where the layers' attention is all that needs the phase
REENTRANT = {"reentrant wrapper": by_wrapper(CheckpointImpl.REENTRANT), "reentrant": by_instance(reentrant), "reentrant first layer": by_instance(reentrant, slice(1)),
             "reentrant later layers": by_instance(reentrant, slice(1, None)), "reentrant attention": by_instance(reentrant, part=lambda layer: next(layer.children()))}
MAKERS = {"Qwen3": lambda: make("Qwen3"), "Qwen3.5": lambda: hf_layers.make("Qwen3.5")}


def plain_name(name):
    return name.replace("_checkpoint_wrapped_module.", "")


@pytest.mark.parametrize("family, way", [(family, way) for family in MAKERS for way in (*EXACT, *BY_FORWARD) if family == "Qwen3" or way in EXACT])
def test_exact(family, way, monkeypatch):
    model = MAKERS[family]()
    with all_float64():
        dense_step(model, ROLLOUTS, LOSS)
        wanted = gradients(model)
        {**EXACT, **BY_FORWARD}[way](model, monkeypatch)
        for plan in PLANS:
            shared_step(model, ROLLOUTS, LOSS, **plan)
            assert worst({plain_name(name): g for name, g in gradients(model).items()}, wanted)[0] <= BOUND, plan


@pytest.mark.parametrize("family, way", [*((family, way) for family in MAKERS for way in REENTRANT), *(("Qwen3.5", way) for way in BY_FORWARD),
                                         ("Qwen3", "the model"), ("Qwen3.5", "the model")])
def test_refused(family, way, monkeypatch):
    """Reentrant checkpoints lose the graph of a prompt's keys, values and states; a state's layer would not know its rows in its second run."""
    model = MAKERS[family]()
    {**REENTRANT, **BY_FORWARD, "the model": around_the_model}[way](model, monkeypatch)
    for plan in PLANS:
        with pytest.raises(espalier.Unsupported, match="REENTRANT|non-reentrant|know their rows"):
            shared_step(model, ROLLOUTS, LOSS, **plan)
        assert all(p.grad is None for p in model.parameters())


def test_a_reentrant_checkpoint_of_what_is_frozen_or_unused_is_no_matter():
    """A part that reads no other row may be checkpointed in any way; frozen layers may run without gradients."""
    model = make("Qwen3")
    plain, mlp = model.model.layers[0].forward, model.model.layers[1].mlp
    mlp.forward = functools.partial(reentrant, mlp.forward)
    for p in (*model.model.layers[0].parameters(), *model.model.embed_tokens.parameters()):
        p.requires_grad_(False)
    model.model.layers[0].forward = torch.no_grad()(plain)
    with all_float64():
        dense_step(model, ROLLOUTS, LOSS)
        wanted = gradients(model)
        shared_step(model, ROLLOUTS, LOSS, wave_tokens=12)
    assert worst(gradients(model), wanted)[0] <= BOUND


@pytest.mark.parametrize("way", [*EXACT, *BY_FORWARD, "reentrant experts"])
def test_recorded_experts_in_checkpointed_layers(way, monkeypatch):
    """A second run with other experts would be a wrong gradient without an error."""
    from test_hf_routes import build, plain_step, recorded
    model = build("Qwen3Moe")
    rollouts = recorded(model, ROLLOUTS)
    with all_float64():
        plain_step(model, rollouts, LOSS)
        wanted = gradients(model)
        {**EXACT, **BY_FORWARD, "reentrant experts": by_instance(reentrant, part=lambda layer: layer.mlp)}[way](model, monkeypatch)
        for plan in PLANS:
            if way in BY_FORWARD or way in ("MLPs", "reentrant experts"):
                with pytest.raises(espalier.Unsupported, match="know their rows|non-reentrant"):
                    shared_step(model, rollouts, LOSS, **plan)
                assert all(p.grad is None for p in model.parameters())
            else:
                shared_step(model, rollouts, LOSS, **plan)
                assert worst({plain_name(name): g for name, g in gradients(model).items()}, wanted)[0] <= BOUND, plan


def test_a_trainer_falls_back_with_the_reason(tmp_path, caplog):
    trl = pytest.importorskip("trl")
    shared = pytest.importorskip("espalier.trl")
    from test_trl_trainer import load_example, run
    example = load_example()
    plain = example.small_model()
    by_instance(reentrant)(plain, None)
    example.small_model = lambda: plain
    with caplog.at_level(logging.WARNING, "espalier"):
        trainer = run(example, shared.GRPOTrainer, trl.GRPOConfig, tmp_path, max_steps=1)
    notes = [record.message for record in caplog.records if "not shared" in record.message]
    assert len(notes) == 1 and "non-reentrant" in notes[0] and trainer.shared_rows["run"] == 0
