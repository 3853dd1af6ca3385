"""Optional dependencies of the package's parts: the extras of pyproject.toml."""

import importlib.util
import sys

NUMPY = "numpy>=1.26"
EXTRAS = {"hf": ("torch>=2.6", "transformers>=5"), "trl": ("torch>=2.6", "transformers>=5", "trl>=1.16"),
          "megatron": ("torch>=2.6", "megatron-core>=0.16.1"), "linear": ("flash-linear-attention>=0.6", "causal-conv1d>=1.7")}
_MODULES = {"megatron-core": "megatron"}  # packages whose module has another name


def require(part: str, extra: str) -> None:
    """Raises ModuleNotFoundError if `part` lacks a package of its extra. The message names all missing packages and the command that
    installs them.
    """
    module = lambda wanted: _MODULES.get(wanted.split(">")[0], wanted.split(">")[0])
    missing = [wanted for wanted in (NUMPY, *EXTRAS[extra]) if importlib.util.find_spec(module(wanted)) is None]
    if not missing:
        return
    names = [wanted.split(">")[0] for wanted in missing]
    command = f"{sys.executable} -m pip install " + " ".join(f"'{wanted}'" for wanted in missing)
    raise ModuleNotFoundError(f"{part} needs {' and '.join(names)}, which {sys.executable} does not have. Run: {command}   "
                              f"(all of the extra {extra}: pip install 'espalier[{extra}]', in the source tree '.[{extra}]')", name=names[0])
