"""Writes python/espalier/verbs.pyi, the types of the verbs' keyword arguments, from the option table of the built core library.

    tools/python tools/verb_stubs.py        (make docs runs it)
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "python/espalier/verbs.pyi"
sys.path.insert(0, str(ROOT / "python"))

HEAD = '''# Made from the option table by tools/verb_stubs.py (`make docs`).
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

_Path = str | PathLike[str]
_Numbers = float | str | Sequence[float]
_Records = Sequence[Mapping[str, Any]]

NAMES: tuple[str, ...]
FUNCTIONS: dict[str, Any]

def option_table() -> dict[str, Any]: ...
def options_of(verb: str) -> dict[str, dict[str, str]]: ...
def names_of_trl(verb: str) -> dict[str, list[str]]: ...
def help_of(row: dict[str, str], verb: str) -> str: ...
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


def stub_of(verb, files, options, trl):
    lines = [f"    *{files}: _Path{' | _Records' if files == 'rollouts' else ''},"] if files else ["    *,"]
    lines += [f"    {name}: {type_of(row)} | None = ..., " .rstrip() for name, row in options.items() if name != files]
    lines += [f"    {name}: Any = ...,  # TRL's" for name in trl]
    lines += [f"    {name}: {kind} = ...," for name, kind in (("config", "_Path | None"), ("quiet", "bool"), ("dry_run", "bool"), ("overwrite", "bool"))
              if name not in options]
    return f"def {verb}(\n" + "\n".join(lines) + "\n) -> dict[str, Any]: ...\n"


def stub():
    from espalier import verbs
    parts = [stub_of(verb, verbs._POSITIONAL.get(verb), verbs.options_of(verb), verbs.names_of_trl(verb)) for verb in verbs.NAMES]
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    STUB.write_text(stub())
