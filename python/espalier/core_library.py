"""Loads the torch-free C++ core (espalier/binding/core_interface.h) with ctypes. Needs neither NumPy nor torch."""

import ctypes
import functools
import os
from pathlib import Path

from espalier.errors import Error

_PACKAGE = Path(__file__).resolve().parent
_NAME = "libespalier_core.so"


@functools.cache
def library() -> ctypes.CDLL:
    """The core library, loaded once: ESPALIER_CORE_LIBRARY if set, else from the installed package, else from the source tree's build
    folder.

    Errors: `Error` (exit code 8) if no library is found or the system cannot load it.
    """
    named = os.environ.get("ESPALIER_CORE_LIBRARY")
    places = [Path(named)] if named else [_PACKAGE / "bin" / _NAME, _PACKAGE.parents[1] / "build" / _NAME]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise Error("device", "espalier's core library", _NAME, " and ".join(map(str, places)) + " do not exist",
                    "Run `make` in the source tree, or install the wheel", 8)
    try:
        core = ctypes.CDLL(str(path))
    except OSError as error:
        raise Error("device", str(path), "a library that this system can load", str(error),
                    "Install the missing library (libgomp1 on Debian and Ubuntu), or import torch first, which contains one", 8) from None
    for name in ("espalier_last_error", "espalier_options", "espalier_plan_json", "espalier_plan_text"):
        getattr(core, name).restype = ctypes.c_char_p
    core.espalier_plan_new.restype = ctypes.c_void_p
    for name in ("espalier_plan_items", "espalier_plan_table", "espalier_plan_program", "espalier_causal_runs"):
        getattr(core, name).restype = ctypes.c_int64
    for name in ("espalier_plan_delete", "espalier_plan_items", "espalier_plan_json", "espalier_plan_text"):
        getattr(core, name).argtypes = [ctypes.c_void_p]
    core.espalier_plan_table.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p,
                                         ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)), ctypes.POINTER(ctypes.c_int64)]
    core.espalier_plan_program.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))]
    return core
