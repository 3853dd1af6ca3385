"""The version of the wheel: that of CMakeLists.txt, and behind a `+` the minor version of torch that its program is linked to."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIND_TORCH = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '', end='')"


def torch_version() -> str:
    """Minor version of this Python's torch, or "". An isolated build hides it by PYTHONPATH, which -E ignores. torch is not imported."""
    spec = importlib.util.find_spec("torch")
    folder = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else ""
    if not folder:
        folder = subprocess.run([sys.executable, "-E", "-c", FIND_TORCH], capture_output=True, text=True).stdout
    written = Path(folder) / "version.py"
    found = re.search(r"__version__ = '(\d+\.\d+)\.", written.read_text(encoding="utf-8")) if folder and written.is_file() else None
    return found.group(1) if found else ""


def dynamic_metadata(settings, project):
    """Called by scikit-build-core: the fields of [project] that this module decides."""
    written = re.search(r"project\(espalier VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))
    torch = torch_version()
    return {"version": written.group(1) + (f"+torch{torch}" if torch else "")}
