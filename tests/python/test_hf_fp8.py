"""transformers models whose linear layers are in FP8: their scales of activations belong to a row, so shared rows are what they are alone. Layers
whose scales belong to a call are refused by name."""

import pytest
import torch

import espalier
import fp8_reference
from hf_models import all_float64, batch, dense_step, gradients, loss_of, make, shared_step, worst

hf = pytest.importorskip("espalier.hf")
finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
BLOCK = 32
ROLLOUTS = batch()
LOSS = loss_of(ROLLOUTS)


def rounded(x, scale):
    return (x / scale).clamp(-fp8_reference.LARGEST, fp8_reference.LARGEST).to(torch.float8_e4m3fn).to(x.dtype) * scale


def kernel(input, weight, weight_scale_inv, block_size=None, bias=None, activation_scale=None, allow_deepgemm=True):
    """What the kernels of transformers compute: a scale for each BLOCK numbers of a row of activations, or a given one."""
    if activation_scale is not None:
        x = rounded(input, activation_scale.to(input.dtype))
    else:
        parts = input.unflatten(-1, (-1, BLOCK))
        x = rounded(parts, parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / fp8_reference.LARGEST).flatten(-2)
    out = x @ fp8_reference.dequantise(weight, weight_scale_inv, (BLOCK, BLOCK)).to(input.dtype).T
    return out if bias is None else out + bias


def in_fp8(model, scheme):
    """The model with its layers' projections as transformers' FP8Linear."""
    for parent in list(model.model.layers.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not torch.nn.Linear:
                continue
            layer = finegrained.FP8Linear(linear.in_features, linear.out_features, block_size=(BLOCK, BLOCK), activation_scheme=scheme)
            codes, scales = fp8_reference.quantise(linear.weight.detach(), (BLOCK, BLOCK))
            layer.weight = torch.nn.Parameter(codes, requires_grad=False)
            layer.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
            if scheme == "static":
                layer.activation_scale = torch.nn.Parameter(torch.tensor(.02), requires_grad=False)
            setattr(parent, name, layer)
    return model


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_gradients_are_those_of_the_dense_step(scheme, monkeypatch):
    monkeypatch.setattr(finegrained, "fp8_linear", kernel)
    model = in_fp8(make("Qwen3"), scheme)
    with all_float64():
        wanted = dense_step(model, ROLLOUTS, LOSS), gradients(model)
        hf.check(model)
        shared_step(model, ROLLOUTS, LOSS)
        found = gradients(model)
    error, name = worst(found, wanted[1])
    assert error <= 1e-10, (name, error)
    assert any("layers.2" in name for name in found)


class Float8Linear(torch.nn.Linear):
    """The name of torchao's layer for training, whose scales are those of a call's largest number."""


def test_layers_whose_scales_are_those_of_a_call_are_refused():
    model = make("Qwen3", torch.float32)
    up = model.model.layers[1].mlp
    up.up_proj = Float8Linear(up.up_proj.in_features, up.up_proj.out_features, bias=False)
    with pytest.raises(espalier.Unsupported) as caught:
        hf.check(model)
    assert all(word in str(caught.value) for word in ("model.layers.1.mlp.up_proj", "Float8Linear", "rows of the call")), str(caught.value)
