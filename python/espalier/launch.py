"""The `espalier` command: finds the program and this Python's torch, then runs the program.

An installed program looks for libtorch in its own site-packages. If torch is elsewhere (a .pth file, PYTHONPATH, the user's site-packages),
its lib folder is added to LD_LIBRARY_PATH. torch is never imported.
"""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

from espalier.errors import Error

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED, _BUILT = _PACKAGE / "bin" / "espalier", _PACKAGE.parents[1] / "build" / "espalier"


def program() -> Path:
    """Path of the program: ESPALIER_BINARY if set, else in the installed package, else in the source tree's build folder.

    Errors: `Error` (exit code 8) if the file does not exist.
    """
    named = os.environ.get("ESPALIER_BINARY")
    places = [Path(named)] if named else [_INSTALLED, _BUILT]
    for place in places:
        if place.is_file():
            return place
    raise Error("device", "espalier's program", "espalier", " and ".join(map(str, places)) + " do not exist",
                "Run `make` in the source tree, or install the wheel", 8)


def environment() -> dict[str, str]:
    """Environment variables for the program. Errors: `Error` (exit code 8) if an installed program finds no torch of its version."""
    out = dict(os.environ)
    if program() != _INSTALLED:
        return out  # a build of the source tree finds the torch that it was linked to
    folder = _torch_folder()
    if folder.parent != _PACKAGE.parent:
        out["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(folder / "lib"), out.get("LD_LIBRARY_PATH")]))
    out.setdefault("ESPALIER_PYTHON", sys.executable)  # the Python that reads dumps, tokenizes and computes rewards
    out.setdefault("ESPALIER_PYTHON_PACKAGE", "")
    return out


def linked_torch() -> str:
    """Minor version of torch that the installed program is linked to, as "2.11". The build writes it beside the program."""
    return (_INSTALLED.parent / "torch_version").read_text(encoding="utf-8").strip()


def _torch_folder() -> Path:
    wanted = linked_torch()
    remedy = (f"pip install 'torch=={wanted}.*' into this Python, or build the wheel for the torch that it has (`pip install .` in the source "
              "tree); espalier.hf, espalier.trl and espalier.ops work with torch 2.6 and newer")
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise Error("device", "espalier's program", f"torch {wanted}", f"no torch in {sys.executable}", remedy, 8)
    folder = Path(spec.submodule_search_locations[0])
    written = folder / "version.py"
    version = re.search(r"__version__ = '([^']+)'", written.read_text()) if written.is_file() else None
    found = version.group(1) if version else "unknown"
    if not re.match(rf"{re.escape(wanted)}(\D|$)", found):
        raise Error("device", "espalier's program", f"torch {wanted}, whose library it is linked to", f"torch {found} in {folder}", remedy, 8)
    return folder


def main() -> None:
    """Replaces this process with the program. If the program cannot start, prints an error in the program's format and exits with its code."""
    try:
        binary, its = program(), environment()
    except Error as error:
        if "--json" in sys.argv:
            fields = {name: getattr(error, name) for name in ("kind", "where", "expected", "got", "remedy")}
            print(json.dumps({"error": fields, "exit_code": error.exit_code}, indent=2))
        print(f"espalier: {error.kind} error at {error.where}\n  expected {error.expected}, got {error.got}\n  {error.remedy}", file=sys.stderr)
        sys.exit(error.exit_code)
    os.execve(binary, [str(binary), *sys.argv[1:]], its)
