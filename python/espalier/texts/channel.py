"""The service's end of the program's PythonProcess. A request is one line of JSON; its answer is one or several lines of JSON.

At the start the service sends a line without a request: {"ready": {...}}, or {"error": {...}} if it cannot start. No other code can use the
descriptor: standard input is empty, standard output goes to standard error, and a fork of this process loses it.
"""

import json
import os
import sys


class ServiceError(Exception):
    """An error that the program reports. `kind` is one that the program knows, `message` is Python's; `fields` depend on the kind."""

    def __init__(self, kind, message, **fields):
        super().__init__(message)
        self.fields = {"kind": kind, "message": message, **fields}


def _whole(value):
    """Replaces lone surrogates in all strings of `value`, because UTF-8 cannot encode them."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_whole(key): _whole(member) for key, member in value.items()}
    return [_whole(member) for member in value] if isinstance(value, (list, tuple)) else value


class Channel:
    def __init__(self):
        self._process = os.getpid()
        self._requests = os.fdopen(os.dup(0), "rb")
        self._answers = os.fdopen(os.dup(0), "wb")
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)
        if sys.stdout is not None:
            sys.stdout.reconfigure(line_buffering=True)
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self):
        nothing = os.open(os.devnull, os.O_RDWR)
        for end in (self._requests, self._answers):
            os.dup2(nothing, end.fileno())
        os.close(nothing)

    def requests(self):
        """Yields requests until the program closes its end."""
        for line in self._requests:
            yield json.loads(line)

    def answer(self, **fields):
        if os.getpid() != self._process:  # a fork that returned from the user's code: only the original process answers
            os._exit(0)
        self._answers.write(json.dumps(_whole(fields), allow_nan=False).encode("ascii") + b"\n")
        self._answers.flush()

    def fail(self, error):
        self.answer(error=error.fields)
