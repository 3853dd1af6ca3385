"""The program's verbs as functions: `espalier.train(model="m", rollouts="r.jsonl", out="o")` runs `espalier train --model m ...`.

Keyword arguments are the program's options with `_` for `-`, and the TRL names that the verb accepts. Names, types and help come from the
option table. `rollouts`, `prompts` and `val_prompts` may be lists of dicts; `reward` may be a Python function (docs/rewards.md).

A verb runs the program as a child process with `--json`. Progress goes to stderr, the JSON object is returned as a dict, and errors are
raised as `espalier.Error`. The first Ctrl-C lets `train` and `grpo` finish the step and save; the second stops at once.
"""

import difflib
import inspect as signatures
import json
import os
import signal
import subprocess

from espalier.errors import Error
from espalier.given import Given
from espalier.launch import environment, program
from espalier.option_help import PROGRAM_OPTIONS, arguments_text, main_options_of, names_of_trl, options_of

POSITIONAL = {"inspect": "rollouts", "replay": "trace", "report": "run_folder", "doctor": "dump"}  # verbs that take files as positional arguments
_DEGREES = ("tp", "cp", "pp", "dp")
# Variables in which launchers give the number of processes. A verb without degrees runs in one process and does not see them.
_LAUNCHER_SIZES = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}
NAMES = ("inspect", "plan", "train", "score", "verify", "replay", "bench", "generate", "grpo", "report", "doctor")


def _arguments(verb, given):
    known, trl, out = options_of(verb), names_of_trl(verb), []
    for name, value in given.items():
        if value is None:
            continue
        if name in PROGRAM_OPTIONS and name not in known:
            row = {"name": name.replace("_", "-"), "type": "text" if name == "config" else "flag"}
        elif name in known:
            row = known[name]
        elif name in trl:
            row = {"name": name.replace("_", "-"), "type": "text"}
        else:
            near = difflib.get_close_matches(name, [*known, *trl], 1)
            raise Error("option", f"espalier.{verb}", "an option that it takes", repr(name), f"Did you mean {near[0]}?" if near else
                        f"help(espalier.{verb}) lists them", 2)
        flag = "--" + row["name"]
        if row["type"] == "flag":
            out += [flag] if value else []
        elif isinstance(value, (list, tuple)) and row["type"] != "list":
            out += [part for one in value for part in (flag, str(one))]
        else:
            out += [flag, ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]
    return out


def run(verb, *files, **options):
    """Runs a verb and returns its JSON object. Raises `espalier.Error` with the program's fields and exit code."""
    with Given(verb, files, options) as given:
        command = [str(program()), verb, *map(os.fspath, given.files), *_arguments(verb, given.options), "--json"]
        return _ran(verb, command, given)


def _ran(verb, command, given):
    options = given.options
    alone = not any(options.get(degree) for degree in _DEGREES)
    variables = {name: value for name, value in environment().items() if not (alone and name in _LAUNCHER_SIZES)}
    variables |= {"ESPALIER_ERRORS": "object", **given.variables}  # the program puts errors into its JSON object only
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=variables)
    interrupted = False
    while True:
        try:
            output, _ = child.communicate()
            break
        except KeyboardInterrupt:
            interrupted = True
            child.send_signal(signal.SIGINT)
        except BaseException:
            child.kill()
            child.wait()
            raise
    if interrupted:
        raise KeyboardInterrupt
    try:
        return _result(verb, child.returncode, output)
    except Error as error:
        raise given.placed(error) from given.raised


def _result(verb, status, output):
    try:
        result = json.loads(output)
    except ValueError:
        raise Error("internal", f"espalier {verb}", "a JSON object", f"exit status {status} and {output[-200:]!r}", "", status or 70) from None
    if "error" in result:
        raise Error.of(result["error"], status)
    if status != 0 and not (verb == "doctor" and status == 6):  # findings are its result
        kind = {5: "memory", 6: "verification"}.get(status, "internal")
        error = Error(kind, f"espalier {verb}", "exit status 0", f"{status}: {result.get('verdict', '')}", "", status)
        error.result = result
        raise error
    return result


def _verb(function):
    """Adds all options of a verb to its docstring and the most used ones to its signature.

    Without the core library there is no option table: the verb stays as it is, and a call raises the error.
    """
    try:
        text, main = arguments_text(function.__name__), main_options_of(function.__name__)
    except Error:
        return function
    function.__doc__ = signatures.cleandoc(function.__doc__) + "\n\n" + text
    *before, options = signatures.signature(function).parameters.values()
    named = [signatures.Parameter(name, signatures.Parameter.KEYWORD_ONLY, default=None) for name in main]
    function.__signature__ = signatures.Signature([*before, *named, options], return_annotation=dict)
    function.__module__ = "espalier"
    return function


@_verb
def inspect(*rollouts, **options):
    """Reports the sizes of recorded rollouts, the rows that sharing could save, and every anomaly. Returns a dict.

        espalier.inspect("a.jsonl", "b.jsonl")["tokens"]
    """
    return run("inspect", *rollouts, **options)


@_verb
def plan(**options):
    """Plans the schedule of an update and predicts its seconds and bytes. Needs no weights. Returns a dict.

        espalier.plan(model="config.json", rollouts="step12.jsonl", machine="h100", dtype="bfloat16")["predicted"]
    """
    return run("plan", **options)


@_verb
def train(**options):
    """Updates a model from recorded rollouts. Returns a dict; its "steps" has one entry per step.

        espalier.train(model="Qwen3-0.6B", rollouts="step12.jsonl", out="TRAINED", lr=1e-6)
    """
    return run("train", **options)


@_verb
def score(**options):
    """Writes log-probs of recorded rollouts under a model, forward only. Returns a dict.

        espalier.score(model="Qwen3-0.6B", rollouts="step12.jsonl", out="scored.jsonl", as_="ref_logprobs")
    """
    return run("score", **options)


@_verb
def verify(**options):
    """Compares the shared step with the dense step on your model and rollouts. Returns a dict.

    Raises espalier.Error with exit code 6 if they differ.

        espalier.verify(model="Qwen3-0.6B", rollouts="step12.jsonl")["verdict"]
    """
    return run("verify", **options)


@_verb
def replay(*trace, **options):
    """Runs recorded updates again and compares them with the record. Returns a dict.

        espalier.replay("TRACE")
    """
    return run("replay", *trace, **options)


@_verb
def bench(**options):
    """Times dense, packed, phased and auto against each other. Returns a dict.

        espalier.bench(model="Qwen3-0.6B", n=8, splits="1024/256")
    """
    return run("bench", **options)


@_verb
def generate(**options):
    """Samples responses to prompts and scores them if a reward is given. Each prompt is computed once. Returns a dict.

        espalier.generate(model="Qwen3-0.6B", prompts="prompts.jsonl", reward=my_reward, n=8, out="rollouts.jsonl")
    """
    return run("generate", **options)


@_verb
def grpo(**options):
    """Runs the closed loop: samples, rewards, updates, evaluates, saves. Returns a dict.

        espalier.grpo(model="Qwen3-0.6B", prompts="prompts.jsonl", reward=my_reward, out="RUN", steps=100)
    """
    return run("grpo", **options)


@_verb
def report(*run_folder, **options):
    """Writes a run as one HTML file: curves, time, memory, schedule, samples. Returns a dict.

        espalier.report("RUN")
    """
    return run("report", *run_folder, **options)


@_verb
def doctor(*dump, **options):
    """Names the known faults that a dump of rollouts shows, with the rows that prove each. Returns a dict.

        espalier.doctor("dump.jsonl", model="Qwen3-0.6B")["findings"]
    """
    return run("doctor", *dump, **options)
