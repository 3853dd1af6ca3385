"""The program's verbs as functions: `espalier.train(model="m", rollouts="r.jsonl", out="o")` is `espalier train --model m ...`.

Keyword arguments are the program's options with `_` for `-`, and the names of TRL that it takes; names, types and help come from its
option table (the core library prints it). `rollouts`, `prompts` and `val_prompts` may be lists of dicts, `reward` may be a function of
this process (docs/rewards.md has its forms). The program runs beside Python with `--json`: its progress goes to stderr, the JSON object comes back as a dict, an error
as `espalier.Error`. The first Ctrl-C lets `train` and `grpo` finish the step and save, the second stops at once.
"""

import difflib
import functools
import inspect as signatures
import json
import keyword
import os
import re
import signal
import subprocess

from espalier.core_library import library
from espalier.errors import Error
from espalier.given import Given
from espalier.launch import environment, program

_POSITIONAL = {"inspect": "rollouts", "replay": "trace", "report": "run"}  # verbs whose files come without an option's name
_DEGREES = ("tp", "cp", "pp", "dp")
# Where a launcher says of how many processes this one is: a verb without degrees runs in one, whoever calls it.
_LAUNCHER_SIZES = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}
NAMES = ("inspect", "plan", "train", "score", "verify", "replay", "bench", "generate", "grpo", "report")


@functools.cache
def option_table():
    """{"verbs": {name: letter}, "options": [{name, type, default, range, unit, verbs, help}], "aliases": {TRL's name: [options]}}."""
    return json.loads(library().espalier_options())


def options_of(verb):
    """The rows of the table that a verb takes, by Python name."""
    letter = option_table()["verbs"][verb]
    takes = lambda row: row["verbs"].startswith("*") or letter in row["verbs"] or letter.upper() in row["verbs"]
    return {_python_name(row["name"]): row for row in option_table()["options"] if takes(row)}


def help_of(row, verb):
    """A row's help for one verb: "{tr|the file}{l|each batch}" stands for what differs from verb to verb."""
    letter = option_table()["verbs"][verb]
    text = re.sub(r"\{(\w+)\|([^}]*)\}", lambda part: part[2] if letter in part[1] else "", row["help"])
    return re.sub(r"--([a-z][a-z-]*)", lambda option: _python_name(option[1]), text)


def names_of_trl(verb):
    """TRL's names that a verb takes: those that set one of its options. Where one is given the update is TRL's."""
    taken = {row["name"] for row in options_of(verb).values()}
    return {name: targets for name, targets in option_table()["aliases"].items() if taken.intersection(targets)}


def _python_name(option):
    """`_` for `-`, and one more after a word that is Python's own: `as_`."""
    name = option.replace("-", "_")
    return name + "_" if keyword.iskeyword(name) else name


def _arguments(verb, given):
    known, trl, out = options_of(verb), names_of_trl(verb), []
    for name, value in given.items():
        if value is None:
            continue
        if name in ("config", "quiet", "dry_run", "overwrite") and name not in known:
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
    """Runs a verb. Returns its JSON object; raises `espalier.Error` with the program's fields and exit code."""
    with Given(verb, files, options) as given:
        command = [str(program()), verb, *map(os.fspath, given.files), *_arguments(verb, given.options), "--json"]
        return _ran(verb, command, given)


def _ran(verb, command, given):
    options = given.options
    alone = not any(options.get(degree) for degree in _DEGREES)
    variables = {name: value for name, value in environment().items() if not (alone and name in _LAUNCHER_SIZES)}
    variables |= {"ESPALIER_ERRORS": "object", **given.variables}  # an error is told once, as the exception
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
    if status != 0:
        kind = {5: "memory", 6: "verification"}.get(status, "internal")
        error = Error(kind, f"espalier {verb}", "exit status 0", f"{status}: {result.get('verdict', '')}", "", status)
        error.result = result
        raise error
    return result


def _function(verb):
    positional = _POSITIONAL.get(verb)
    if positional:
        def call(*files, **options):
            return run(verb, *files, **options)
    else:
        def call(**options):
            return run(verb, **options)
    call.__name__ = call.__qualname__ = verb
    call.__module__ = "espalier"
    return call


class _Described:
    """A verb's function whose signature and help are read from the option table when somebody asks."""

    def __init__(self, verb):
        self._verb, self._call = verb, _function(verb)
        self.__name__ = self.__qualname__ = verb
        self.__module__ = "espalier"

    def __call__(self, *files, **options):
        return self._call(*files, **options)

    def __repr__(self):
        return f"<function espalier.{self._verb}>"

    @property
    def __signature__(self):
        files = _POSITIONAL.get(self._verb)
        parameters = [signatures.Parameter(files, signatures.Parameter.VAR_POSITIONAL)] if files else []
        names = [name for name in (*options_of(self._verb), *names_of_trl(self._verb)) if name != files]
        parameters += [signatures.Parameter(name, signatures.Parameter.KEYWORD_ONLY, default=None) for name in names]
        return signatures.Signature(parameters, return_annotation=dict)

    @property
    def __doc__(self):
        rows = [f"    {name}: {help_of(row, self._verb)}" + (f" [{row['default']}]" if row["default"] else "")
                for name, row in options_of(self._verb).items()]
        rows += [f"    {name}: TRL's, read as {', '.join(targets)}" for name, targets in names_of_trl(self._verb).items()]
        return f"The verb {self._verb} of the program. Returns its JSON object.\n\n" + "\n".join(rows)


FUNCTIONS = {verb: _Described(verb) for verb in NAMES}
globals().update(FUNCTIONS)
