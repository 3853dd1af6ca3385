"""Errors for users, with the fields and exit codes of the program's own errors."""

from collections.abc import Callable, Mapping
from typing import Any


class Error(Exception):
    """An error: the place (`where`), what was `expected`, what was found (`got`) and a `remedy`. `kind` and `exit_code` are the program's.

    `result`: the verb's JSON object. It is set only if a verb returned a result and a nonzero exit code, for example a failed verdict.
    """

    result: dict[str, Any]

    def __init__(self, kind: str, where: str, expected: str, got: str, remedy: str = "", exit_code: int = 70) -> None:
        self.kind, self.where, self.expected, self.got = kind, where, expected, got
        self.remedy, self.exit_code = remedy, exit_code
        text = f"{where}: expected {expected}, got {got}"
        super().__init__(f"{text}. {remedy}" if remedy else text)

    @classmethod
    def of(cls, fields: Mapping[str, Any], exit_code: int = 70) -> "Error":
        """Builds an error from its JSON object: an `Unsupported` if its kind is "unsupported". `exit_code` is used if the object has none."""
        chosen: type[Error] = Unsupported if fields["kind"] == "unsupported" else Error
        made = chosen.__new__(chosen)
        Error.__init__(made, fields["kind"], fields["where"], fields["expected"], fields["got"], fields.get("remedy", ""),
                       fields.get("exit_code", exit_code))
        return made

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        fields = {name: getattr(self, name) for name in ("kind", "where", "expected", "got", "remedy", "exit_code")}
        return Error.of, (fields,)


class Unsupported(Error):
    """Valid input that is not supported; the message names it."""

    def __init__(self, where: str, expected: str, got: str, remedy: str = "") -> None:
        super().__init__("unsupported", where, expected, got, remedy, exit_code=4)
