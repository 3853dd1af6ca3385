"""python -m espalier.records PATH: the records as JSON Lines on stdout.

At the end it writes one JSON object to stderr: {format, notes}, or {where, expected, got, remedy} with exit code 3 (bad input) or 4
(a valid file of an unsupported format).
"""

import sys

from . import Reading, line_of
from .lines import print_lines, say

_USAGE = 2


def main(arguments):
    paths = arguments[1:] if arguments[:1] == ["--"] else arguments
    if len(paths) != 1:
        say({"where": "command line", "expected": "one file or folder", "got": str(len(paths)), "remedy": "python -m espalier.records PATH"})
        return _USAGE
    reading = Reading(paths[0])
    return print_lines(map(line_of, reading.records()), lambda: {"format": reading.format, "notes": reading.notes})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
