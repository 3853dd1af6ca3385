"""The options of espalier.verl: arguments of `register`, whose defaults are environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from espalier.errors import Error
from espalier.rows.arguments import SCHEDULES

_TRUTH = {"": False, "0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True)
class Options:
    """`verify`: compare a model's first update with verl's own. `trunk_state`, `schedule`: as in `espalier.hf.phased_step`."""
    verify: bool = False
    trunk_state: Literal["keep", "recompute"] = "keep"
    schedule: Literal["auto", "shared", "dense"] = "auto"


def resolved(verify: bool | None = None, trunk_state: str | None = None, schedule: str | None = None) -> Options:
    """Makes Options. For an argument None, the value is that of ESPALIER_VERIFY, ESPALIER_TRUNK_STATE or ESPALIER_SCHEDULE, else the default."""
    return Options(_choice("verify", "ESPALIER_VERIFY", verify, _TRUTH, "0"),
                   _choice("trunk_state", "ESPALIER_TRUNK_STATE", trunk_state, {name: name for name in ("keep", "recompute")}, "keep"),
                   _choice("schedule", "ESPALIER_SCHEDULE", schedule, {name: name for name in SCHEDULES}, "auto"))


def _choice(name: str, variable: str, given: Any, among: Mapping[str, Any], default: str) -> Any:
    if given is not None and given in among.values():
        return given
    place, value = (name, given) if given is not None else (variable, os.environ.get(variable) or default)
    known = value.lower() if isinstance(value, str) and among is _TRUTH else value
    if not isinstance(value, str) or given is not None or known not in among:
        raise Error("option", place, ", ".join(among) if among is not _TRUTH else "True or False, in the environment 1 or 0", repr(value), "", 2)
    return among[known]
