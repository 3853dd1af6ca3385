"""Errors of a recorded file. They have the four parts of all Espalier messages, and the program's exit code."""


class RecordError(Exception):
    """The place (`where`, for example "dump.pt: sample 3: tokens"), what was `expected`, what was found (`got`), and a `remedy`."""

    exit_code = 3  # bad input

    def __init__(self, where: str, expected: str, got: str, remedy: str = "") -> None:
        super().__init__(f"{where}: expected {expected}, got {got}" + (f". {remedy}" if remedy else ""))
        self.where, self.expected, self.got, self.remedy = where, expected, got, remedy

    def at(self, where: str) -> "RecordError":
        """Returns the same error with `where` in front of its place, unless the place already begins with it."""
        if self.where.startswith(where):
            return self
        return type(self)(f"{where}: {self.where}", self.expected, self.got, self.remedy)


class UnsupportedRecords(RecordError):
    """A valid file of a format that is not supported."""

    exit_code = 4
