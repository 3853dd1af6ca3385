"""Packages whose kernels transformers calls for recurrent layers, if they are installed. Without them it computes in plain torch."""

import functools
import importlib.util
import logging

_log = logging.getLogger("espalier")

# By the functions of transformers that mixers call.
_MODULES = {"torch_chunk_gated_delta_rule": "fla", "chunk_kimi_delta_attention": "fla", "causal_conv1d_fn": "causal_conv1d"}


def missing(functions, find=importlib.util.find_spec):
    """Modules that the functions could use and that are not installed, in order."""
    return tuple(sorted({_MODULES[name] for name in functions if name in _MODULES and find(_MODULES[name]) is None}))


def note_missing(device, functions):
    """Logs one warning a process for recurrent layers that run on a GPU without these packages."""
    if absent := device == "cuda" and missing(functions):
        _note(absent)


@functools.cache
def _note(modules):
    names = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
    _log.warning("this model has recurrent layers, and %s is not installed: transformers computes them in plain torch, several times slower. "
                 "Run: pip install 'espalier[linear]'", " and ".join(names[module] for module in modules))
