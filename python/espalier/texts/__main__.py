"""python -m espalier.texts tokenizer DIR | reward FILE | environment FILE | prompts FILE | retokenize DIR FILE | rows OBJECTIVE DIR COLUMNS FILE | tracker SETTINGS"""

import os
import sys

from espalier.records.lines import print_lines

from .channel import Channel, ServiceError

_USAGE = 2


def _serve(service, path):
    channel = Channel()
    try:
        service(path, channel)
    except ServiceError as error:
        channel.fail(error)
    except (BrokenPipeError, ConnectionResetError):  # the program has ended
        pass
    return 0


def main(arguments):
    if len(arguments) == 3 and arguments[0] == "retokenize":
        from . import retokenize
        notes = []
        return print_lines(retokenize.lines(*arguments[1:], notes), lambda: {"format": retokenize.NAME, "notes": notes})
    if len(arguments) == 5 and arguments[0] == "rows":
        from . import rows
        notes = []
        return print_lines(rows.lines(*arguments[1:], notes), lambda: {"format": rows.NAME, "notes": notes})
    if len(arguments) != 2 or arguments[0] not in ("tokenizer", "reward", "environment", "prompts", "tracker"):
        print(__doc__, file=sys.stderr)
        return _USAGE
    kind, path = arguments
    if kind == "prompts":
        from . import prompts
        return print_lines(prompts.lines(path), lambda: {"format": "parquet", "notes": []})
    if kind == "tokenizer":
        from . import tokenizer
        return _serve(tokenizer.serve, path)
    if kind == "tracker":
        from . import tracker
        return _serve(tracker.serve, path)
    if kind == "environment":
        from . import environment
        return _serve(environment.serve, path)
    from . import reward
    return _serve(reward.serve, path)


if __name__ == "__main__":
    # Exit although a reward function may have left threads or processes running.
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
