"""python -m espalier.texts tokenizer DIR | reward FILE | prompts FILE"""

import json
import os
import sys

from espalier.records.errors import RecordError

from .channel import Channel, ServiceError

_USAGE = 2


def _say(message):
    print(json.dumps(message), file=sys.stderr, flush=True)


def _serve(service, path):
    channel = Channel()
    try:
        service(path, channel)
    except ServiceError as error:
        channel.fail(error)
    except (BrokenPipeError, ConnectionResetError):  # the program has ended
        pass
    return 0


def _print_prompts(path):
    from . import prompts
    try:
        for line in prompts.lines(path):
            sys.stdout.write(line)
        sys.stdout.flush()
    except RecordError as error:
        _say({"where": error.where, "expected": error.expected, "got": error.got, "remedy": error.remedy})
        return error.exit_code
    except BrokenPipeError:  # whoever reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    _say({"format": "parquet", "notes": []})
    return 0


def main(arguments):
    if len(arguments) != 2 or arguments[0] not in ("tokenizer", "reward", "prompts"):
        print(__doc__, file=sys.stderr)
        return _USAGE
    kind, path = arguments
    if kind == "prompts":
        return _print_prompts(path)
    if kind == "tokenizer":
        from . import tokenizer
        return _serve(tokenizer.serve, path)
    from . import reward
    return _serve(reward.serve, path)


if __name__ == "__main__":
    # Threads and processes that a reward function left behind do not keep the service.
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
