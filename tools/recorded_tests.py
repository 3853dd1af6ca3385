"""What `make record` wrote down: the seconds of every test, and which tests enter which file (tests/recording/tests.txt, files.txt).

tests.txt: `name program seconds` a line, sorted by name; `program` is the GoogleTest binary, or `pytest`. Seconds are those of
one case, of processors. files.txt: `file best reached` a line; `best` are numbers of lines of tests.txt, the most specific
first, which together enter every function of the file that any test enters; `reached` has a bit for every test that enters the
file (base64 of zlib)."""

import base64
import zlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests/recording"
PYTEST = "pytest"


@dataclass(frozen=True, order=True)
class KnownTest:
    name: str  # Suite.KnownTest, or test_file.py::test
    program: str
    seconds: float


class Record:
    def __init__(self, tests, best, reached):
        """`best`, `reached`: {file: tests}, in order of specificity and in any order."""
        self.tests, self.best, self.reached = sorted(tests, key=lambda test: (test.name, test.program)), best, reached

    @staticmethod
    def read(folder=FOLDER):
        rows = [line.rsplit(" ", 2) for line in (folder / "tests.txt").read_text(encoding="utf-8").splitlines()]
        tests = [KnownTest(name, program, float(seconds)) for name, program, seconds in rows]
        best, reached = {}, {}
        for line in (folder / "files.txt").read_text(encoding="utf-8").splitlines():
            file, numbers, packed = line.split(" ")
            best[file] = [tests[int(number)] for number in numbers.split(",")]
            bits = int.from_bytes(zlib.decompress(base64.b64decode(packed)), "little")
            reached[file] = [test for number, test in enumerate(tests) if bits >> number & 1]
        return Record(tests, best, reached)

    def write(self, folder=FOLDER):
        tests, number = self.tests, {test: place for place, test in enumerate(self.tests)}
        (folder / "tests.txt").write_text("".join(f"{t.name} {t.program} {t.seconds:.2f}\n" for t in tests), encoding="utf-8")
        lines = []
        for file in sorted(self.reached):
            bits = sum(1 << number[test] for test in self.reached[file])
            packed = base64.b64encode(zlib.compress(bits.to_bytes(len(tests) // 8 + 1, "little"), 9)).decode()
            lines.append(f"{file} {','.join(str(number[test]) for test in self.best[file])} {packed}\n")
        (folder / "files.txt").write_text("".join(lines), encoding="utf-8")

    def breadth(self):
        """{test: how many files it enters}."""
        counts = dict.fromkeys(self.tests, 0)
        for tests in self.reached.values():
            for test in tests:
                counts[test] += 1
        return counts


def most_specific_first(entered_of, entered_in_all, seconds):
    """Tests of one file, until no further test enters a further function of it. entered_of: {test: its functions of the file};
    entered_in_all: {test: how many functions it enters}. A test that spends itself on this file comes first."""
    left, order = set().union(*entered_of.values()), []
    while left:
        gain = {test: len(functions & left) for test, functions in entered_of.items()}
        best = max(sorted(gain), key=lambda test: gain[test] / (entered_in_all[test] * (0.1 + seconds[test]) ** 0.5))
        order.append(best)
        left -= entered_of[best]
    return order
