"""A plugin of pytest for `make record`: after every test, what was entered since the last one is noted under its name."""

import ctypes
import sys

import pytest


spent = 0.0  # seconds of processors of programs and ranks that are no children of this process


def note(name):
    global spent
    before, spent = spent, sum(each.spent for each in (sys.modules.get("rank_processes"), getattr(sys.modules.get("conftest"), "Copies", None)) if each)
    ctypes.CDLL(None).espalier_spent_elsewhere(ctypes.c_double(spent - before))
    ctypes.CDLL(None).espalier_note_entered(name.encode())
    sys.modules["sitecustomize"].entered.clear()


def pytest_collection_finish():
    note("")  # imports are no test's


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    try:
        return (yield)
    finally:
        note(f"{item.path.name}::{getattr(item, 'originalname', item.name)}")
