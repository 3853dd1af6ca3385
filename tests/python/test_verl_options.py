"""Options of espalier.verl: arguments, whose defaults are environment variables. verl itself is not needed."""

import pytest

from espalier.errors import Error

pytest.importorskip("espalier.hf")
from espalier.verl.options import Options, resolved  # noqa: E402

VARIABLES = ("ESPALIER_VERIFY", "ESPALIER_TRUNK_STATE", "ESPALIER_SCHEDULE")


@pytest.fixture(autouse=True)
def without_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_arguments_stand_before_variables_and_variables_before_defaults(monkeypatch):
    assert resolved() == Options(False, "keep", "auto")
    for name, value in zip(VARIABLES, ("1", "recompute", "dense")):
        monkeypatch.setenv(name, value)
    assert resolved() == Options(True, "recompute", "dense")
    assert resolved(verify=False, trunk_state="keep", schedule="shared") == Options(False, "keep", "shared")


@pytest.mark.parametrize("text,value", [("", False), ("0", False), ("False", False), ("1", True), ("true", True)])
def test_truth_in_the_environment(monkeypatch, text, value):
    monkeypatch.setenv("ESPALIER_VERIFY", text)
    assert resolved().verify is value


@pytest.mark.parametrize("name,argument,place", [("verify", "yes", "verify"), ("trunk_state", "drop", "trunk_state"), ("schedule", 3, "schedule")])
def test_wrong_arguments_are_named(name, argument, place):
    with pytest.raises(Error, match=place) as caught:
        resolved(**{name: argument})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("variable", VARIABLES)
def test_wrong_variables_are_named(monkeypatch, variable):
    monkeypatch.setenv(variable, "perhaps")
    with pytest.raises(Error, match=f"{variable}.*perhaps"):
        resolved()
