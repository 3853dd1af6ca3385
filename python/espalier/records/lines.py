"""The output of a command that the program runs: lines on stdout, then one JSON object on stderr."""

import json
import os
import sys

from .errors import RecordError


def say(message):
    print(json.dumps(message), file=sys.stderr, flush=True)


def print_lines(lines, summary):
    """Writes the lines to stdout, then to stderr the object that summary() returns, or {where, expected, got, remedy} of an error. Returns the
    exit code."""
    try:
        for line in lines:
            sys.stdout.write(line)
        sys.stdout.flush()
    except RecordError as error:
        say({"where": error.where, "expected": error.expected, "got": error.got, "remedy": error.remedy})
        return error.exit_code
    except BrokenPipeError:  # the reader stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    say(summary())
    return 0
