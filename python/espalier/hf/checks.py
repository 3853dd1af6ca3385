"""Refuses models and wrappers that would give wrong gradients without an error: by name, before anything runs."""

import functools
import inspect
import sys

import torch

from espalier.errors import Unsupported
from espalier.hf import indexed, probe, rotary
from espalier.hf.mixers import mixers
from espalier.hf.model_parts import active_adapters, attention_layers, base_model, decoder_config, unwrapped

_STATELESS = {"mlp", "moe"}  # layers that read no other row
_SCALES_OF_A_CALL = {"Float8Linear", "Float8TrainingLinear"}
_LAYER_KINDS = _STATELESS | {"full_attention", "attention", "sliding_attention", "chunked_attention", "dense", "sparse"}


def check(model: torch.nn.Module, *, longest: int | None = None, by_regime: bool = False, probing: bool = True) -> None:
    """Raises `espalier.Unsupported` with the name of any property of this model that phased_step does not support. Once for each model
    it also runs short sequences, alone and shared, and compares their logits (probe.py).

    `longest`: tokens of the longest rollout; 0: only what needs no call of the model. `by_regime`: the caller runs rollouts with
    different rotary tables apart (rotary.py). `probing`: False inside a trainer's step, where the model was probed before.
    """
    if isinstance(model, torch.nn.DataParallel):
        raise Unsupported("model", "one replica per process", "torch.nn.DataParallel", "Use DistributedDataParallel or FSDP")
    if type(model).__name__ == "DeepSpeedEngine":
        raise Unsupported("model", "a model, DDP or FSDP", "a DeepSpeed engine, which forbids a second backward within a step")
    inner, base = unwrapped(model), base_model(model)
    _check_family(base)
    _check_layers(base)
    _check_scales(base)
    _check_adapters(inner)
    if inner.training:
        _check_dropout(inner, base)
    _check_checkpointing(base)
    indexed.check(base)
    _check_sequence_parallel()
    rotary.check(base, longest, by_regime)
    if longest != 0 and probing:
        probe.check(model)


def _check_family(base):
    name = type(base).__name__
    config = base.config
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(name, "a decoder-only model", "an encoder-decoder")
    can_set = getattr(base, "_can_set_attn_implementation", lambda: getattr(base, "_supports_attention_backend", False))
    if not can_set() or not attention_layers(base):
        raise Unsupported(name, "attention through transformers' AttentionInterface", "a model with its own attention")
    accepted = inspect.signature(type(base).forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()) or "position_ids" not in accepted:
        raise Unsupported(name, "a forward that takes position_ids and passes keyword arguments on", "fixed arguments")


def _check_layers(base):
    config = decoder_config(base)
    attending = attention_layers(base)
    mixing = {module.layer_idx for module in mixers(base).values() if hasattr(module, "layer_idx")}
    passing = attending.keys() | mixing
    for field in ("layer_types", "layers_block_type"):
        for index, kind in enumerate(getattr(config, field, None) or ()):
            if kind == indexed.KIND and index in attending and indexed.serves(attending[index][1]):
                continue
            if kind not in _LAYER_KINDS and index not in mixing:
                raise Unsupported(f"config.{field}", "attention layers, or layers whose state espalier passes on", kind, _why(kind))
            if kind in _STATELESS:
                passing = passing | {index}
    for _, (name, module) in sorted(attending.items()):
        if getattr(module, "is_causal", True) is False:
            raise Unsupported(name, "causal attention", "bidirectional attention")
    missing = sorted(set(range(getattr(config, "num_hidden_layers", 0))) - passing)
    if missing:
        raise Unsupported("model", "attention in every layer, or a state that espalier passes on", f"none found in layers {missing}")


def _check_scales(base):
    """Refuses torchao's FP8 layers for training. FP8Linear and FP8Experts of transformers scale each row of activations by itself."""
    for name, module in base.named_modules():
        if type(module).__name__ in _SCALES_OF_A_CALL:
            raise Unsupported(name, "activations that are rounded row by row", f"{type(module).__name__}, whose scales depend on all rows of the call",
                              "Train without torchao's float8, or from a checkpoint in FP8, whose layers scale rows")


def _why(kind):
    if any(word in kind for word in ("sparse", "indexed", "compressed")):
        return "Such a layer chooses or compresses keys over the whole call"
    return "Such a layer's state does not pass from prompt to response"


def _check_dropout(inner, base):
    for name, module in inner.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0 and module.training:
            raise Unsupported(name, "no dropout: it differs from rollout to rollout", f"p = {module.p}", "model.eval(), or set it to 0")
        for field, rate in vars(module).items():
            if "drop" in field and isinstance(rate, float) and rate > 0 and module.training:
                raise Unsupported(name, "no dropout: it differs from rollout to rollout", f"{field} = {rate}", "model.eval(), or set it to 0")
    if getattr(base.get_input_embeddings(), "neftune_noise_alpha", None):
        raise Unsupported("model.get_input_embeddings()", "no noise: it differs from rollout to rollout", "NEFTune", "neftune_noise_alpha=None")
    config = decoder_config(base)
    for name, value in config.to_dict().items():
        if name.endswith(("jitter_noise", "jitter_eps")) and value:
            raise Unsupported(f"config.{name}", "no noise before the router: it differs from rollout to rollout", str(value), "Set it to 0")


def _check_adapters(inner):
    """Refuses PEFT adapters that add rows to every call or search a call for tokens: a call of a phase is not a whole rollout."""
    for name, adapter in active_adapters(inner).items():
        if getattr(adapter, "is_prompt_learning", False):
            raise Unsupported(f"adapter {name}", "adapters inside of layers, such as LoRA", f"{type(adapter).__name__}: virtual tokens before every call")
        if getattr(adapter, "alora_invocation_tokens", None):
            raise Unsupported(f"adapter {name}", "adapters that work on every token, such as LoRA",
                              "alora_invocation_tokens: where it begins is looked for in every call", "LoraConfig without alora_invocation_tokens")


def _check_checkpointing(base):
    for name, module in base.named_modules():
        if getattr(getattr(module, "checkpoint_impl", None), "name", "") == "REENTRANT":  # torch's CheckpointWrapper
            raise Unsupported(name, "non-reentrant activation checkpointing", "CheckpointImpl.REENTRANT", "checkpoint_impl=CheckpointImpl.NO_REENTRANT")
        if not getattr(module, "gradient_checkpointing", False):
            continue
        how = getattr(module, "_gradient_checkpointing_func", None)
        keywords = how.keywords if isinstance(how, functools.partial) else {}
        if keywords.get("use_reentrant", True):
            raise Unsupported(name or type(base).__name__, "non-reentrant gradient checkpointing", "use_reentrant=True",
                              'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})')


def _check_sequence_parallel():
    """Refuses verl's Ulysses, which divides a sequence over ranks inside its own attention."""
    ulysses = sys.modules.get("verl.utils.ulysses")
    if ulysses is not None and ulysses.get_ulysses_sequence_parallel_world_size() > 1:
        raise Unsupported("verl.utils.ulysses", "sequence parallel size 1", str(ulysses.get_ulysses_sequence_parallel_world_size()),
                          "ulysses_sequence_parallel_size=1")


def check_captured(model, trunk):
    """Raises `Unsupported` unless the trunk holds keys and values of every attention layer and the state of every mixer."""
    missing = [layer for layer in sorted(attention_layers(model)) if layer not in trunk.k]
    if missing:
        raise Unsupported("attention", "keys and values of every layer", f"none from layers {missing}",
                          "The model does not pass keyword arguments to its attention")
    held = {name for name, *_ in trunk.states}
    without = [name for name in mixers(base_model(model)) if name not in held]
    if without:
        raise Unsupported("model", "a state from every layer that passes one on", f"none from {', '.join(without)}")


def check_live(model, trunk):
    """Raises `Unsupported` if no keys, values or states have an autograd graph although something below the head is trained, or if a layer's
    have none behind a layer whose have one."""
    modules = mixers(base_model(model)) if trunk.live_states else {}
    found = [(layer, f"attention layer {layer}", "keys and values", live) for layer, live in trunk.live.items()]
    found += [(modules[key[0]].layer_idx, key[0], "states", (live,)) for key, live in trunk.live_states.items()]
    found.sort(key=lambda one: one[0])
    first = next((layer for layer, _, _, live in found if any(x.requires_grad for x in live)), None)
    trained = [name for name, p in base_model(model).named_parameters() if p.requires_grad and not _is_head(model, p)]
    if first is None:
        if trained and len(found) > 1:
            raise Unsupported("attention", "keys and values with a graph", "none in any layer: the prompt would get no gradient",
                              "Non-reentrant checkpointing, or enable_input_require_grads() of a frozen base")
        return
    for layer, name, what, live in found:
        if layer > first and not all(x.requires_grad for x in live):
            raise Unsupported(name, f"{what} with a graph", "one without", "")


def _is_head(model, parameter):
    head = base_model(model).get_output_embeddings()
    return head is not None and any(parameter is p for p in head.parameters())
