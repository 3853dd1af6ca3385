"""No module of python/espalier is imported, over others, by what it imports itself, at its top or within a function. So are its folders and
the files beside them: each can be read behind those that it imports. Exit 1 with one line per circle.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path

from sass_loops import connected

PYTHON = Path(__file__).resolve().parent.parent / "python"


def modules():
    return {".".join(path.relative_to(PYTHON).with_suffix("").parts).removesuffix(".__init__"): path for path in sorted(PYTHON.rglob("*.py"))}


def imported(tree, known):
    """Modules among `known` that a module's source imports."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [full if (full := f"{node.module}.{alias.name}") in known else node.module for alias in node.names]
        yield from (name for name in names if name in known)


def folder_of(module):
    return ".".join(module.split(".")[:2])


def main():
    known = modules()
    imports = {name: set(imported(ast.parse(path.read_text(encoding="utf-8")), known)) - {name} for name, path in known.items()}
    folders = defaultdict(set)
    for name, others in imports.items():
        folders[folder_of(name)] |= {folder_of(other) for other in others} - {folder_of(name)}
    circles = connected(sorted(imports), imports.__getitem__) + connected(sorted(folders), lambda folder: folders[folder])
    for circle in circles:
        print(f"{', '.join(sorted(circle))}: import each other")
    print(f"{len(known)} modules, {len(circles)} circles")
    return 1 if circles else 0


if __name__ == "__main__":
    sys.exit(main())
