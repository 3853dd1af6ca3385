"""The program as `espalier` on the path: finds the one beside this file, and for it the torch that this Python has.

A wheel's program looks for libtorch in the same site-packages. Where torch lies elsewhere (a .pth file, PYTHONPATH, the user's own
site-packages) its folder goes onto LD_LIBRARY_PATH. torch is never imported for that.
"""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

from espalier.errors import Error

TORCH = "2.11"  # the program links this version's libtorch; the Python package works with 2.6 and newer
_PACKAGE = Path(__file__).resolve().parent
_INSTALLED, _BUILT = _PACKAGE / "bin" / "espalier", _PACKAGE.parents[1] / "build" / "espalier"


def program() -> Path:
    """The program: what ESPALIER_BINARY names, else in the package where a wheel put it, else in the build folder of the source tree."""
    named = os.environ.get("ESPALIER_BINARY")
    places = [Path(named)] if named else [_INSTALLED, _BUILT]
    for place in places:
        if place.is_file():
            return place
    raise Error("device", "espalier's program", "espalier", " and ".join(map(str, places)) + " do not exist",
                "Run `make` in the source tree, or install the wheel", 8)


def environment() -> dict[str, str]:
    """The environment of the program. Errors: `Error` where an installed program has no torch that it can link."""
    out = dict(os.environ)
    if program() != _INSTALLED:
        return out  # built here, linked to the torch that it was built with
    folder = _torch_folder()
    if folder.parent != _PACKAGE.parent:
        out["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(folder / "lib"), out.get("LD_LIBRARY_PATH")]))
    out.setdefault("ESPALIER_PYTHON", sys.executable)  # reads dumps, text and rewards, with this same package
    out.setdefault("ESPALIER_PYTHON_PACKAGE", "")
    return out


def _torch_folder() -> Path:
    remedy = f"pip install 'torch=={TORCH}.*' into this Python; espalier.hf, espalier.trl and espalier.ops work with torch 2.6 and newer"
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise Error("device", "espalier's program", f"torch {TORCH}", f"no torch in {sys.executable}", remedy, 8)
    folder = Path(spec.submodule_search_locations[0])
    written = folder / "version.py"
    version = re.search(r"__version__ = '([^']+)'", written.read_text()) if written.is_file() else None
    found = version.group(1) if version else "unknown"
    if not re.match(rf"{re.escape(TORCH)}(\D|$)", found):
        raise Error("device", "espalier's program", f"torch {TORCH}, whose library it is linked to", f"torch {found} in {folder}", remedy, 8)
    return folder


def main() -> None:
    """Replaces this process by the program. If the program cannot start, prints the reason in the form of the program's errors."""
    try:
        binary, its = program(), environment()
    except Error as error:
        if "--json" in sys.argv:
            fields = {name: getattr(error, name) for name in ("kind", "where", "expected", "got", "remedy")}
            print(json.dumps({"error": fields, "exit_code": error.exit_code}, indent=2))
        print(f"espalier: {error.kind} error at {error.where}\n  expected {error.expected}, got {error.got}\n  {error.remedy}", file=sys.stderr)
        sys.exit(error.exit_code)
    os.execve(binary, [str(binary), *sys.argv[1:]], its)
