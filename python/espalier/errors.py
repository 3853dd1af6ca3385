"""Errors for users, with the fields and exit codes of the program's own errors."""


class Error(Exception):
    """An error with place (`where`), expectation, finding (`got`) and remedy; `kind` and `exit_code` are the program's."""

    def __init__(self, kind, where, expected, got, remedy="", exit_code=70):
        self.kind, self.where, self.expected, self.got = kind, where, expected, got
        self.remedy, self.exit_code = remedy, exit_code
        text = f"{where}: expected {expected}, got {got}"
        super().__init__(f"{text}. {remedy}" if remedy else text)

    @classmethod
    def of(cls, fields, exit_code=None):
        """From the JSON object of an error; what is valid but not supported is an `Unsupported`."""
        chosen = Unsupported if fields["kind"] == "unsupported" else Error
        made = chosen.__new__(chosen)
        Error.__init__(made, fields["kind"], fields["where"], fields["expected"], fields["got"], fields.get("remedy", ""),
                       fields.get("exit_code", exit_code))
        return made

    def __reduce__(self):
        fields = {name: getattr(self, name) for name in ("kind", "where", "expected", "got", "remedy", "exit_code")}
        return Error.of, (fields,)


class Unsupported(Error):
    """Valid input that is not supported; the message names it."""

    def __init__(self, where, expected, got, remedy=""):
        super().__init__("unsupported", where, expected, got, remedy, exit_code=4)
