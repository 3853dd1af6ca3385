"""python -m espalier.records PATH: the records as JSON Lines on stdout.

On stderr one JSON object at the end: {format, notes}, or {where, expected, got, remedy} with exit code 3 (bad input) or 4
(valid, but not read).
"""

import json
import os
import sys

from . import Reading, RecordError, line_of

_USAGE = 2


def _say(message):
    print(json.dumps(message), file=sys.stderr, flush=True)


def main(arguments):
    paths = arguments[1:] if arguments[:1] == ["--"] else arguments
    if len(paths) != 1:
        _say({"where": "command line", "expected": "one file or folder", "got": str(len(paths)), "remedy": "python -m espalier.records PATH"})
        return _USAGE
    reading = Reading(paths[0])
    try:
        for record in reading.records():
            sys.stdout.write(line_of(record))
        sys.stdout.flush()
    except RecordError as error:
        _say({"where": error.where, "expected": error.expected, "got": error.got, "remedy": error.remedy})
        return error.exit_code
    except BrokenPipeError:  # whoever reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    _say({"format": reading.format, "notes": reading.notes})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
