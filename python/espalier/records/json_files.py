"""JSON: one object, a list of objects, or one object per line."""

import json

from .errors import RecordError

ENDINGS = (".json", ".jsonl")


def is_json(start, path):
    return path.lower().endswith(ENDINGS) and start.lstrip()[:1] in (b"{", b"[")


def load(file, path):
    """The objects of a file, a list."""
    text = file.read()
    try:
        content = json.loads(text)
    except ValueError:
        content = [_line(path, at, line) for at, line in enumerate(text.splitlines(), 1) if line.strip()]
    return content if isinstance(content, list) else [content]


def _line(path, at, line):
    try:
        return json.loads(line)
    except ValueError as error:
        raise RecordError(f"{path}:{at}", "one JSON object", str(error)) from None


def first_of(content):
    """The first object of loaded JSON, else an empty dict."""
    return content[0] if isinstance(content, list) and content and isinstance(content[0], dict) else {}
