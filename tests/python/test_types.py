"""The functions that users call have types, which their editors and type checkers read (the package is marked py.typed)."""

import inspect

import pytest

import espalier

PUBLIC = ("espalier.hf", "espalier.megatron", "espalier.ops", "espalier.records", "espalier.verl")


def functions_of(module):
    """(name, function) of a module's public functions, and of the public methods of its public classes."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            for member, method in vars(value).items():
                method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
                own = inspect.isfunction(method) and method.__module__ == value.__module__
                made = member.startswith("__") and hasattr(value, "__dataclass_fields__") and member != "__str__"
                if own and not made and (not member.startswith("_") or member in ("__init__", "__str__")):
                    yield f"{name}.{member}", method
        elif inspect.isfunction(value):
            yield name, value
        elif callable(getattr(value, "_init_fn", None)):  # an operation of torch.library
            yield name, value._init_fn


def without_types(function):
    """Names of parameters without a type, and "return"."""
    signature = inspect.signature(function)
    missing = [name for name, one in signature.parameters.items() if one.annotation is one.empty and name != "self" and name != "cls"]
    return missing + (["return"] if signature.return_annotation is signature.empty else [])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_have_types(name):
    module = pytest.importorskip(name)
    found = dict(functions_of(module))
    assert len(found) >= 2, found
    assert {at: without for at, function in found.items() if (without := without_types(function))} == {}


def test_errors_have_types():
    for kind in (espalier.Error, espalier.Unsupported):
        assert without_types(kind.__init__) == []
    assert without_types(espalier.Error.of) == []


def test_a_function_without_types_is_found():
    def half(model, *, rows: int = 1):
        return model, rows

    assert without_types(half) == ["model", "return"]
