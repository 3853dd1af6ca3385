from typing import Any

class Error(Exception):
    kind: str
    where: str
    expected: str
    got: str
    remedy: str
    exit_code: int
    result: dict[str, Any]  # of a verdict that failed: the verb's object

    def __init__(self, kind: str, where: str, expected: str, got: str, remedy: str = "", exit_code: int = 70) -> None: ...
    @classmethod
    def of(cls, fields: dict[str, Any], exit_code: int | None = None) -> Error: ...

class Unsupported(Error):
    def __init__(self, where: str, expected: str, got: str, remedy: str = "") -> None: ...
