"""The versions of transformers that espalier.hf was tested with, and the names that differ between them."""

import inspect
import logging

import torch
import transformers
from packaging.version import Version

TESTED = "5.23.0", "5.24.0"  # the oldest and the newest release whose causal language models all went through tests/python/test_hf_sweep.py
_CACHE = "cache", "past_key_values"  # from 5.24 on, and before

_log = logging.getLogger("espalier")


def note_if_newer(installed: str = transformers.__version__) -> None:
    """Logs a warning if this transformers is newer than the newest tested one. Patch releases of a tested minor count as tested."""
    if Version(installed).release[:2] > Version(TESTED[1]).release[:2]:
        _log.warning("espalier.hf was tested with transformers %s to %s, and this is %s: run verify=True once", *TESTED, installed)


def cache_argument(module: torch.nn.Module) -> str | None:
    """The name of the argument of a module's forward that takes transformers' cache, or None."""
    accepted = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE if name in accepted), None)
