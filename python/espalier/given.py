"""Passes Python objects to the program: records as lists of dicts, a reward as a function of this process.

Lists are written as JSON Lines to a temporary folder that is deleted after the run. A `grpo` run can be resumed, so it keeps the folder as
OUT/.given. A reward function runs in this process: the program's reward process imports a generated file, which calls the function over a
Unix socket.
"""

import asyncio
import inspect
import json
import os
import shutil
import socket
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

from espalier.errors import Error
from espalier.texts.caller import SOCKET, source_for
from espalier.texts.reward import form_of

_RECORDS = ("rollouts", "prompts", "val_prompts")


def _is_records(value):
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(one, Mapping) for one in value)


def _plain(value):
    """Converts tensors and arrays to lists, and their scalars to numbers, for `json.dumps`. Raises TypeError for other types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


def _written(records, path, name):
    with open(path, "w", encoding="ascii") as file:
        for i, record in enumerate(records):
            try:
                file.write(json.dumps(dict(record), default=_plain) + "\n")
            except (TypeError, ValueError) as error:
                raise Error("input", f"{name}[{i}]", "values that JSON has, tensors and arrays", str(error), "", 3) from error
    return path


class Given:
    """Context manager that converts a verb's `files` and `options` to the form that the program reads.

    `variables`: environment variables for the program. `raised`: the exception that the reward function raised, or None.
    """

    def __init__(self, verb, files, options):
        self.files, self.options, self.variables, self.raised = list(files), dict(options), {}, None
        self._verb, self._names, self._folder, self._made, self._calls = verb, {}, None, False, None

    def __enter__(self):
        try:
            if _is_records(self.files):
                self.files = [self._records("rollouts", self.files)]
            self.files = [self._records("rollouts", one) if _is_records(one) else one for one in self.files]
            for name in _RECORDS:
                if _is_records(self.options.get(name)):
                    self.options[name] = self._records(name, self.options[name])
            if callable(self.options.get("reward")):
                self._call_here(self.options["reward"])
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        if self._calls:
            self._calls.close()
        out = self._kept_in()
        if self._folder and not (out and (out / "run.json").is_file()):
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._made:
                try:
                    out.rmdir()  # the program refused to start and left the folder empty
                except OSError:
                    pass

    def placed(self, error):
        """The error with its place in the caller's list: `rollouts[2]` instead of line 3 of a generated file."""
        for path, name in self._names.items():
            if error.where.startswith(f"{path}:"):
                line, *rest = error.where[len(path) + 1:].split(":", 1)
                where = f"{name}[{int(line) - 1}]" + "".join(f":{part}" for part in rest) if line.isdigit() else name
            elif error.where.startswith(path):
                where = name + error.where[len(path):]
            else:
                continue
            fields = {field: getattr(error, field) for field in ("kind", "expected", "got", "remedy", "exit_code")}
            return Error.of({**fields, "where": where})
        return error

    def _kept_in(self):
        """The run folder of `grpo`, None for other verbs. --resume reads the prompts and the reward from it again."""
        out = self.options.get("out") if self._verb == "grpo" else None
        return Path(out) if out is not None else None

    def _place(self):
        if self._folder is None:
            out = self._kept_in()
            if out is None:
                self._folder = Path(tempfile.mkdtemp(prefix="espalier-"))
            else:
                if (out / "run.json").is_file() and not self.options.get("overwrite"):
                    raise Error("option", "out", "a folder without a run", f"{out}, which has one",
                                "Use resume to continue it, or overwrite=True to replace it", 2)
                self._made = not out.exists()
                self._folder = out.absolute() / ".given"
                self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def _records(self, name, records):
        path = str(_written(records, self._place() / f"{name}.jsonl", name))
        self._names[path] = name
        return path

    def _call_here(self, function):
        parameters = inspect.signature(function).parameters
        form = form_of(parameters)
        names = None if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) else set(parameters)
        self._calls = _Calls(function, names if form == "trl" else None, self)
        self.variables[SOCKET] = self._calls.address
        if self.options.get("resume"):
            del self.options["reward"]  # the run has its reward.py, which calls the process that resumes the run
            return
        path = self._place() / "reward.py"
        path.write_text(source_for(form))
        self.options["reward"] = str(path)


class _Calls:
    """Serves score requests on a Unix socket, in threads: calls the function and sends back its value or its error.

    `names`: the arguments that the function takes; None: all.
    """

    def __init__(self, function, names, given):
        self._function, self._names, self._given = function, names, given
        self._folder = tempfile.mkdtemp(prefix="espalier-")  # a socket's path must be short
        self.address = os.path.join(self._folder, "reward")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self):
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection, connection.makefile("rwb") as lines:
            for line in lines:
                lines.write(json.dumps(self._value(json.loads(line))).encode() + b"\n")
                lines.flush()

    def _value(self, arguments):
        try:
            value = self._function(**{name: one for name, one in arguments.items() if self._names is None or name in self._names})
            value = asyncio.run(value) if inspect.iscoroutine(value) else value
            return {"value": json.loads(json.dumps(value, default=_plain))}
        except BaseException as error:
            self._given.raised = error
            own = traceback.extract_tb(error.__traceback__)
            place = f" ({own[-1].filename}:{own[-1].lineno})" if len(own) > 1 else ""
            return {"error": f"{type(error).__name__}: {error}{place}"}
