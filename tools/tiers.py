"""Which cases of the tests a run has. ESPALIER_SWEEPS says it, to pytest (tests/python/conftest.py) and to tools/run_tests.py:

  all    every case
  K/N    no product whose pairs are tested (PRODUCTS of espalier_test, @pytest.mark.product); of every other test with several cases those whose name falls to share K of N, and at least one; of a test that takes more than
         LONG seconds a case those that its turn gives to the share, so that it may have none. Turns of long tests begin where shares have
       equal seconds. Shares 1 to N together are all cases.
  fast   the first case of every test that takes at most FAST seconds a case
  one    the first case of every test
  tests:FILE   every case of the tests that FILE names, one a line

Seconds are those of tests/recording/tests.txt; tests/long_tests.txt names long tests that were not recorded yet. As a program it
prints the share of a day, `--day 2026-11-28` or today, which `make test` runs; it refuses an argument that says no choice.
"""

import argparse
import datetime
import os
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from recorded_tests import Record

LONG, FAST = 0.9, 0.85
SHARES = 14
LONG_TESTS = Path(__file__).resolve().parent.parent / "tests/long_tests.txt"


def long_tests():
    """Names of tests/long_tests.txt: Suite.Test of C++, file.py::test of Python, both without parameters."""
    lines = (line.split("#")[0].strip() for line in LONG_TESTS.read_text(encoding="utf-8").splitlines())
    return {line for line in lines if line}


def seconds_of_tests():
    """{test: seconds of a case}, of what was recorded or is known to be long."""
    return dict.fromkeys(long_tests(), LONG + 1) | {test.name: test.seconds for test in Record.read().tests}


def names_of_share(names, share, shares):
    """Those of a test's case names that fall to the share, in order, and at least one."""
    return [name for name in names if zlib.crc32(name.encode()) % shares == share - 1] or names[:1]


def first_shares_of_long_tests(seconds, shares):
    """{test: the share, from 0, of its first case}: the longest test first, each to the share with the least so far."""
    out, spent = {}, [0.0] * shares
    for test in sorted((test for test in seconds if seconds[test] > LONG), key=lambda test: (-seconds[test], test)):
        out[test] = min(range(shares), key=lambda share: spent[share])
        spent[out[test]] += seconds[test]
    return out


@dataclass
class Choice:
    text: str

    def __post_init__(self):
        found = re.fullmatch(r"(\d+)/(\d+)", self.text, re.ASCII)
        self.only = None
        if self.text.startswith("tests:"):
            self.only = set(Path(self.text.removeprefix("tests:")).read_text(encoding="utf-8").splitlines())
        elif self.text not in ("all", "fast", "one") and not (found and 1 <= int(found[1]) <= int(found[2])):
            raise ValueError(f"expected all, fast, one or K/N with 1 <= K <= N, as 1/14, got {self.text!r}")
        self.share, self.shares = (int(found[1]), int(found[2])) if found else (1, 1)
        self.seconds = {} if self.only is not None or self.text in ("all", "one") else seconds_of_tests()
        self.first_shares = first_shares_of_long_tests(self.seconds, self.shares)

    def cases(self, test, names, pairs=False, product=False):
        """Those of the names of a test's cases that run. `pairs`: a share has all of them, as each is needed; `product`: it has none."""
        if self.only is not None:
            return names if test in self.only else []
        if self.text in ("all", "one"):
            return names if self.text == "all" else names[:1]
        if product or pairs and self.text != "fast":
            return names if pairs else []
        seconds = self.seconds.get(test, 0)
        if self.text == "fast":
            return names[:1] if seconds <= FAST else []
        if seconds > LONG:
            first = self.first_shares[test]
            return [name for number, name in enumerate(names) if (first + number) % self.shares == self.share - 1]
        return names if len(names) == 1 else names_of_share(names, self.share, self.shares)


def day_of_run():
    """$ESPALIER_DAY, or today. tests/support/covering.cpp draws its rows by it, too."""
    return datetime.date.fromisoformat(os.environ.get("ESPALIER_DAY") or datetime.datetime.now(datetime.UTC).date().isoformat())


def share_of(day):
    """The share that `make test` runs on a day: within SHARES days all of them."""
    return f"{day.toordinal() % SHARES + 1}/{SHARES}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choice", nargs="?", default="")
    parser.add_argument("--day", type=datetime.date.fromisoformat, default=day_of_run())
    arguments = parser.parse_args()
    try:
        print(Choice(arguments.choice or share_of(arguments.day)).text)
    except ValueError as error:
        sys.exit(f"SWEEPS: {error}")
