"""Imported by every Python that `make record` starts: which files of this tree the process enters a function of. Functions of files
below this tree begin with a call, which is put in when they are imported. Each file is written to python_files of
$ESPALIER_RECORDING once between two notes (tests/recording/entered_functions.cpp), at once, so that a killed process leaves
it, too."""

import ast
import builtins
import importlib.machinery
import os
import sys

FOLDER = os.environ.get("ESPALIER_RECORDING")
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE)) + os.sep
ELSEWHERE = (ROOT + "build" + os.sep, ROOT + ".venv", HERE)  # .venv-megatron, too
NOTE = "__entered__"
entered = set()


def note(file):
    if file not in entered:
        entered.add(file)
        with open(os.path.join(FOLDER, "python_files"), "a", encoding="utf-8") as files:
            files.write(file + "\n")


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):  # never what a cache has of it
        return self.source_to_code(self.get_data(self.path), self.path)

    def source_to_code(self, data, path, *, _optimize=-1):
        tree, file = ast.parse(data, path), os.path.abspath(path).removeprefix(ROOT)
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = function.body[0]
                has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
                function.body.insert(int(has_docstring), ast.parse(f"{NOTE}({file!r})").body[0])
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize)


def hook(folder):
    whole = os.path.abspath(folder) + os.sep
    if not os.path.isdir(folder) or not whole.startswith(ROOT) or whole.startswith(ELSEWHERE):
        raise ImportError("not of this tree")
    return importlib.machinery.FileFinder(folder, (Loader, [".py"]))


if FOLDER:
    setattr(builtins, NOTE, note)
    os.register_at_fork(after_in_child=entered.clear)
    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()
    for word in sys.orig_argv[1:2]:  # a script is no import
        if os.path.abspath(word).startswith(ROOT) and not os.path.abspath(word).startswith(ELSEWHERE):
            note(os.path.abspath(word).removeprefix(ROOT))
