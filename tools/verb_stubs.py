"""Writes python/espalier/verbs.pyi, the types of the verbs' keyword arguments, from the option table of the built core library.

    tools/python tools/verb_stubs.py        (make docs runs it)
"""

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python/espalier/verbs.pyi"
sys.path.insert(0, str(ROOT / "python"))

HEAD = '''# Made from the option table by tools/verb_stubs.py (`make docs`). A class holds the options of one section that the same verbs take.
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict, Unpack

_Path = str | PathLike[str]
_Numbers = float | str | Sequence[float]
_Records = Sequence[Mapping[str, Any]]

NAMES: tuple[str, ...]
POSITIONAL: dict[str, str]

def run(verb: str, *files: _Path | _Records, **options: Any) -> dict[str, Any]: ...
'''


def type_of(row):
    more = {"rollouts": " | _Records", "prompts": " | _Records", "val-prompts": " | _Records", "reward": " | Callable[..., Any]"}
    return _type_of(row) + more.get(row["name"], "")


def _type_of(row):
    words = row["range"].split("|") if row["type"] == "text" and "|" in row["range"] else None
    if words:
        return "Literal[" + ", ".join(f'"{word}"' for word in words) + "]"
    if row["type"] == "text":
        path = row["unit"].startswith(("input", "output"))
        return "_Path" if path else "str | int" if row["unit"] == "bytes" else "str"
    return {"number": "float", "integer": "int", "flag": "bool", "list": "_Numbers", "paths": "_Path | Sequence[_Path]"}[row["type"]]


def class_name(section, verbs, names):
    """`Schedule` for most options of the section (`verbs` None), else with the verbs that take them: `SchedulePlan`."""
    title = "".join(word.title() for word in re.sub(r"[^\w ]", "", section).split())
    if verbs is None:
        return title
    without = [verb for verb in names if verb not in verbs]
    return title + ("".join(map(str.title, verbs)) if len(verbs) <= len(without) else "But" + "".join(map(str.title, without)))


def sections(names):
    """{class: (verbs, {option: type})} in the order of the table; TRL's names and those of the program come last."""
    from espalier import option_help
    table = {}
    for name in dict.fromkeys(name for verb in names for name in option_help.options_of(verb)):
        table[name] = [verb for verb in names if name in option_help.options_of(verb)]
    rows = {name: row for verb in names for name, row in option_help.options_of(verb).items()}
    trl = {name: [verb for verb in names if name in option_help.names_of_trl(verb)] for verb in names for name in option_help.names_of_trl(verb)}
    groups = {}

    def put(section, verbs, name, kind):
        groups.setdefault(section, {}).setdefault(tuple(verbs), {})[name] = kind

    for row in option_help.option_table()["options"]:
        name = option_help.python_name(row["name"])
        if name in table:
            put(row["section"], table[name], name, type_of(rows[name]) + " | None")
    for name, kind in (("config", "_Path | None"), ("quiet", "bool"), ("dry_run", "bool"), ("overwrite", "bool")):
        put("Every verb", [verb for verb in names if name not in option_help.options_of(verb)], name, kind)
    for name, verbs in trl.items():
        put("Names of TRL", verbs, name, "Any")
    out = {}
    for section, by_verbs in groups.items():
        most = max(by_verbs, key=lambda verbs: len(by_verbs[verbs]))
        out |= {class_name(section, None if verbs == most else verbs, names): (verbs, options) for verbs, options in by_verbs.items()}
    return out


def stub():
    from espalier import verbs
    classes = sections(verbs.NAMES)
    parts = [HEAD]
    for name, (_, options) in classes.items():
        parts.append(f"class {name}(TypedDict, total=False):\n" + "".join(f"    {option}: {kind}\n" for option, kind in options.items()))
    for verb in verbs.NAMES:
        bases = ", ".join(name for name, (takers, _) in classes.items() if verb in takers)
        parts.append(textwrap.fill(f"class {verb.title()}Options({bases}): ...", 130, subsequent_indent="    ") + "\n")
    for verb in verbs.NAMES:
        files = verbs.POSITIONAL.get(verb)
        before = f"*{files}: _Path{' | _Records' if files == 'rollouts' else ''}, " if files else ""
        parts.append(f"def {verb}({before}**options: Unpack[{verb.title()}Options]) -> dict[str, Any]: ...\n")
    return "\n".join(parts)


if __name__ == "__main__":
    STUB.write_text(stub())
