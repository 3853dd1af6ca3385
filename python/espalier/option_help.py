"""The program's option table in Python: option names with `_` for `-`, and the text of `help(espalier.train)`."""

import functools
import json
import keyword
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from espalier.core_library import library

TRL_SECTION = "TRL's formulas"

# Options that every verb takes and the table does not list.
PROGRAM_OPTIONS = {
    "config": "options from a TOML file; arguments win",
    "quiet": "no progress and no notes on stderr",
    "dry_run": "check options and input, run nothing",
    "overwrite": "replace an output that exists",
}


@functools.cache
def option_table() -> dict[str, Any]:
    """{"verbs": {name: letter}, "options": [{name, section, type, default, range, unit, verbs, help}], "aliases": {TRL's or peft's name: [options]}}."""
    return json.loads(library().espalier_options())


def options_of(verb: str) -> dict[str, dict[str, Any]]:
    """Rows of the options that a verb takes, by Python name."""
    letter = option_table()["verbs"][verb]
    takes = lambda row: row["verbs"].startswith("*") or letter in row["verbs"] or letter.upper() in row["verbs"]
    return {python_name(row["name"]): row for row in option_table()["options"] if takes(row)}


def main_options_of(verb: str) -> dict[str, dict[str, Any]]:
    """Rows of a verb's most used options, which the program's short help shows. The table marks them with a capital verb letter."""
    letter = option_table()["verbs"][verb].upper()
    return {name: row for name, row in options_of(verb).items() if letter in row["verbs"]}


def names_of_trl(verb: str) -> dict[str, list[str]]:
    """TRL's names that a verb accepts, with the options that they set. If a call gives one, the update follows TRL's formulas."""
    taken = {row["name"] for row in options_of(verb).values()}
    return {name: targets for name, targets in option_table()["aliases"].items() if taken.intersection(targets)}


def python_name(option: str) -> str:
    """The Python name of an option: `_` for `-`, and a trailing `_` if it is a Python keyword (`as_`)."""
    name = option.replace("-", "_")
    return name + "_" if keyword.iskeyword(name) else name


def help_of(row: Mapping[str, Any], verb: str) -> str:
    """A row's help for one verb. In the table, letters mark text for certain verbs: "{tr|the file}{l|each batch}" becomes "the file" for
    train and replay and "each batch" for grpo.
    """
    letter = option_table()["verbs"][verb]
    text = re.sub(r"\{(\w+)\|([^}]*)\}", lambda part: part[2] if letter in part[1] else "", row["help"])
    return re.sub(r"--([a-z][a-z-]*)", lambda option: python_name(option[1]), text)


def _entry(name: str, text: str) -> str:
    head = f"    {name}  ".ljust(28)
    return textwrap.fill(text, 110, initial_indent=head, subsequent_indent=" " * 28, break_long_words=False, break_on_hyphens=False)


def _entries(rows: Mapping[str, Mapping[str, Any]], verb: str) -> list[str]:
    return [_entry(name, help_of(row, verb) + (f" [{row['default']}]" if row["default"] not in ("", "false") else ""))
            for name, row in rows.items()]


def arguments_text(verb: str) -> str:
    """The keyword arguments of a verb as text: the most used ones, the others by section, then TRL's names."""
    main, rows = main_options_of(verb), options_of(verb)
    out = ["Most used arguments (defaults in brackets):", *_entries(main, verb)]
    for section in sorted(dict.fromkeys(row["section"] for row in rows.values()), key=lambda section: section == TRL_SECTION):
        more = {name: row for name, row in rows.items() if row["section"] == section and name not in main}
        if more:
            out += ["", f"{section}:" if not main else f"{section}, more:", *_entries(more, verb)]
    out += ["", "Every verb:", *(_entry(name, text) for name, text in PROGRAM_OPTIONS.items() if name not in rows)]
    trl = names_of_trl(verb)
    if trl:
        out += ["", "TRL's names (the update then follows TRL's formulas and defaults):"]
        out += [_entry(name, "sets " + ", ".join(map(python_name, targets))) for name, targets in trl.items()]
    return "\n".join(out)
