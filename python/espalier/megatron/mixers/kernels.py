"""The functions that a mixer's own forward takes: those that its module has imported."""

import sys

import torch


def named(mixer, name):
    """A function of the modules that define a mixer's classes, or None."""
    return next((found for own in type(mixer).__mro__ if (found := getattr(sys.modules[own.__module__], name, None)) is not None), None)


def convolution(mixer, activation, deterministic):
    """(x [1, C, T], weight [C, K], bias, activation=) -> [1, C, T], causal and per channel: the kernel of fla or of causal_conv1d that the mixer's own
    forward takes, else torch's."""
    of_fla, of_causal = named(mixer, "causal_conv1d"), named(mixer, "causal_conv1d_fn")

    def by_fla(x, weight, bias=None, activation=None):
        return of_fla(x=x.transpose(1, 2), weight=weight, bias=bias, activation=activation)[0].transpose(1, 2)

    def by_torch(x, weight, bias=None, **_):
        padded = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
        return activation(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=len(weight)))

    if deterministic or of_fla is None and of_causal is None:
        return by_torch
    return by_fla if of_fla is not None else of_causal
