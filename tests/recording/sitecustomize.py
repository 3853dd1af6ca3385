"""Imported by every Python that `make record` starts: which files of this tree the process enters a function of. Each is written to
python_files of $ESPALIER_RECORDING once between two notes (tests/recording/entered_functions.cpp), at once, so that a killed
process leaves it, too."""

import os
import sys
import threading

FOLDER = os.environ.get("ESPALIER_RECORDING")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
ELSEWHERE = (ROOT + "build" + os.sep, ROOT + ".venv" + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)
entered = set()


def on_call(frame, event, argument):
    file = frame.f_code.co_filename
    if file not in entered:
        entered.add(file)
        if file.startswith(ROOT) and not file.startswith(ELSEWHERE):
            with open(os.path.join(FOLDER, "python_files"), "a", encoding="utf-8") as files:
                files.write(file.removeprefix(ROOT) + "\n")


if FOLDER:
    os.register_at_fork(after_in_child=entered.clear)
    threading.settrace(on_call)
    sys.settrace(on_call)
