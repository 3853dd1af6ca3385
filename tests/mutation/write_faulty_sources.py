"""Copies of the engine's files with the deliberate faults of faults.py in them, each behind a switch, and their list.

    write_faulty_sources.py ENGINE OUT     writes OUT/<file> for every file with faults, and OUT/fault_list.inc
    write_faulty_sources.py ENGINE --list  prints those files
    write_faulty_sources.py ENGINE         checks the table and counts

ENGINE is the folder espalier/; `--table FILE` before it names another table than faults.py. Exit 1, with one line per entry, where a text is not found exactly once: then the table
has to follow the engine.
"""

import importlib.util
import re
import sys
from pathlib import Path


SWITCH = '::espalier::mutation::active("{name}")'
PROLOGUE = """#include <algorithm>
#include <utility>
namespace espalier::mutation {{ bool active(const char* name); }}
#line 1 "espalier/{file}"
"""


class TableError(Exception):
    """An entry that does not fit the engine."""


def replacement(fault):
    words = {"ON": SWITCH.format(name=fault.name), "TEXT": fault.text}
    return re.sub(r"\b(ON|TEXT)\b", lambda word: words[word[0]], fault.instead)


def with_faults(source, faults):
    """The source with every fault's line replaced. Errors: TableError for a text that is not there exactly once, or that
    another fault replaces too."""
    places = []
    for fault in faults:
        found = source.count(fault.text)
        if found != 1:
            raise TableError(f"{fault.name}: {fault.file} has {found} times {fault.text!r}, expected once")
        places.append((source.index(fault.text), fault))
    places.sort(key=lambda place: place[0], reverse=True)
    for (begin, fault), (later, other) in zip(places[1:], places):
        if begin + len(fault.text) > later:
            raise TableError(f"{fault.name}: {fault.file} has its text inside that of {other.name}")
    for begin, fault in places:
        source = source[:begin] + replacement(fault) + source[begin + len(fault.text):]
    return source


def by_file(faults):
    files = {}
    for fault in faults:
        if fault.file:
            files.setdefault(fault.file, []).append(fault)
    return files


def quoted(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def fault_list(faults):
    """The elements of a std::vector<Fault> of faults.h."""
    return "".join(f"{{{quoted(f.name)}, {quoted(f.meaning)}, {str(f.seen_by_verify).lower()}, {str(f.once).lower()}, "
                   f"{quoted(f.together_with)}, {str(f.alone).lower()}}},\n" for f in faults)


def write_if_other(path, text):
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def table_of(file):
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    table = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = table
    spec.loader.exec_module(table)
    return table.FAULTS


def main(engine, out=None, table=Path(__file__).with_name("faults.py")):
    faults_of_table = table_of(table)
    files = by_file(faults_of_table)
    if out == "--list":
        print(";".join(files), end="")
        return 0
    errors, copies = [], {}
    for file, faults in files.items():
        try:
            source = (Path(engine) / file).read_text(encoding="utf-8")
            copies[file] = PROLOGUE.format(file=file) + with_faults(source, faults)
        except (OSError, TableError) as error:
            errors.append(f"{Path(table).name}: {error}")
    if errors or not out:
        print("\n".join(errors + [f"{len(faults_of_table)} deliberate faults, {len(errors)} that do not fit the engine"]))
        return 1 if errors else 0
    for file, text in {**copies, "fault_list.inc": fault_list(faults_of_table)}.items():
        write_if_other(Path(out) / file, text)
    return 0


if __name__ == "__main__":
    words = sys.argv[1:]
    named = {"table": words[1]} if words[0] == "--table" else {}
    sys.exit(main(*words[2 * len(named):], **named))
