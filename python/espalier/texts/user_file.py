"""Imports the user's Python file, and turns its exceptions and wrong results into errors of the program."""

import importlib.util
import math
import os
import sys
import traceback

from .channel import ServiceError


def described(error, path, kind="exception"):
    """The ServiceError for an exception: Python's message, and the last line of the user's file in the traceback."""
    message, line = f"{type(error).__name__}: {error}", None
    if isinstance(error, SyntaxError):
        message = f"{type(error).__name__}: {error.msg}" + (f": {error.text.strip()}" if error.text else "")
        line = error.lineno if error.filename == path else None
    else:
        places = traceback.extract_tb(error.__traceback__)
        own = [place for place in places if place.filename == path]
        line = own[-1].lineno if own else None
        if places and own and places[-1].filename != path:
            message += f" (raised in {os.path.basename(places[-1].filename)}:{places[-1].lineno})"
    missing = error.name.split(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else None
    return ServiceError(kind, message, line=line, **({"package": missing} if missing else {}))


def imported(path, name):
    """Imports the file as the module `name`."""
    try:
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look up a class's module here
        spec.loader.exec_module(module)
        return module
    except SyntaxError as error:
        raise described(error, path, "syntax") from error
    except BaseException as error:
        raise described(error, path, "import") from error


def finite_number(value):
    try:
        if value is None or isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ServiceError("number", f"{type(value).__name__}: {value!r}"[:300]) from error
    if not math.isfinite(number):
        raise ServiceError("number", f"{number}, which is not a finite number")
    return number
