"""Calls a reward function in another process, the one that called `espalier.generate` or `espalier.grpo` (espalier/given.py)."""

import json
import os
import socket

SOCKET = "ESPALIER_REWARD_SOCKET"
_PARAMETERS = {"single": "data_source, solution_str, ground_truth, extra_info",
               "batch": "data_sources, solution_strs, ground_truths, extra_infos",
               "trl": "prompts, completions, **columns"}
_open: list = []


def source_for(form):
    """The source of a reward file. Its function has the parameters of `form` and asks the calling process for the score."""
    arguments = "dict(prompts=prompts, completions=completions, **columns)" if form == "trl" else "locals()"
    return ("# Asks the Python that called espalier for the score: continue the run from there, with reward=FUNCTION.\n"
            "from espalier.texts.caller import asked\n\n\n"
            f"def compute_score({_PARAMETERS[form]}):\n    return asked({arguments})\n")


def asked(arguments):
    if not _open:
        if SOCKET not in os.environ:
            raise RuntimeError("the reward is a function of the Python that started this run: continue it from there, with reward=FUNCTION")
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[SOCKET])
        _open.append(connection.makefile("rwb"))
    _open[0].write(json.dumps(arguments).encode() + b"\n")
    _open[0].flush()
    answer = json.loads(_open[0].readline())
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]
