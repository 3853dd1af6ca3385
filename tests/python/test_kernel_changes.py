"""The record of deliberate changes of the kernels (tests/cuda/noticed_mutations.txt): of each file in it, it is whole, and docs/cuda.md has
its counts.
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/cuda"))
import kernel_changes  # noqa: E402
import noticed_mutations  # noqa: E402
from noticed_mutations import HARMLESS, INVALID, Record, listed_in  # noqa: E402

TRIED = "tests/cuda/mutate_kernels.py --build build --record"  # tries what is new, and writes the record


def test_changes_of_a_recorded_file_are_noticed_or_harmless():
    record, harmless = Record(), listed_in(HARMLESS)
    for file in record.files():
        missing, stale = record.missing(file, harmless), record.stale(file)
        assert not missing, f"{len(missing)} changes of {file} were not tried, the first is: {missing[0]}; {TRIED}"
        assert not stale, f"the record has {len(stale)} changes that {file} has no more; {TRIED}"


def test_the_page_has_the_counts_of_the_record():
    record, harmless, page = Record(), listed_in(HARMLESS), (ROOT / "docs/cuda.md").read_text()
    for file in record.files():
        row = noticed_mutations.row_of(file, record.counts(file, harmless))
        assert row in page, f"docs/cuda.md lacks the row: {row}"


def test_a_change_that_is_new_is_missing_and_one_that_is_gone_is_stale(tmp_path, monkeypatch):
    keys = Counter({"a.cu: x < 1;": 2, "a.cu: y == 0;": 1, "a.cu: z + 1;": 1})
    monkeypatch.setattr(noticed_mutations, "keys_of", lambda file: keys)
    record = Record(tmp_path / "record.txt")
    record.note("a.cu", {"a.cu: x < 1;": "attention, 5 rows", "a.cu: y == 0;": "", "a.cu: z + 1;": INVALID, "a.cu: gone": "attention, 5 rows"})
    record.write()
    again = Record(tmp_path / "record.txt")
    assert again.files() == ["a.cu"] and not again.stale("a.cu") and again.missing("a.cu", set()) == ["a.cu: y == 0;"]
    assert again.counts("a.cu", {"a.cu: y == 0;"}) == (4, 2, 1, 1)
    del keys["a.cu: x < 1;"]
    assert len(again.stale("a.cu")) == 1


def test_a_line_s_changes_are_operators_numbers_and_calls_that_are_left_out():
    found = {change.text for change, _ in kernel_changes.changes_of("a.cu", "void f() {\n  if (a < 3) return;\n}\n")}
    assert found == {"if (a <= 3) return;", "if (a < 4) return;", "if (a < 3) ;"}
