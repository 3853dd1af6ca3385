"""The options of espalier.verl: arguments of `register`, whose defaults are environment variables."""

import os
from dataclasses import dataclass

from espalier.errors import Error
from espalier.hf.arguments import SCHEDULES

_TRUTH = {"": False, "0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True)
class Options:
    """`verify`: a model's first update is compared with verl's own. `trunk_state`, `schedule`: as in `espalier.hf.phased_step`."""
    verify: bool = False
    trunk_state: str = "keep"
    schedule: str = "auto"


def resolved(verify=None, trunk_state=None, schedule=None):
    """Options; None takes ESPALIER_VERIFY, ESPALIER_TRUNK_STATE, ESPALIER_SCHEDULE, else the default."""
    return Options(_choice("verify", "ESPALIER_VERIFY", verify, _TRUTH, "0"),
                   _choice("trunk_state", "ESPALIER_TRUNK_STATE", trunk_state, {name: name for name in ("keep", "recompute")}, "keep"),
                   _choice("schedule", "ESPALIER_SCHEDULE", schedule, {name: name for name in SCHEDULES}, "auto"))


def _choice(name, variable, given, among, default):
    if given is not None and given in among.values():
        return given
    place, value = (name, given) if given is not None else (variable, os.environ.get(variable) or default)
    known = value.lower() if isinstance(value, str) and among is _TRUTH else value
    if not isinstance(value, str) or given is not None or known not in among:
        raise Error("option", place, ", ".join(among) if among is not _TRUTH else "True or False, in the environment 1 or 0", repr(value), "", 2)
    return among[known]
