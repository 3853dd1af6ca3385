"""The record of the kernels' changes that checks have noticed, noticed_mutations.txt, and the list of those that alter no result.

The record has a change by the digest of its file and its line, as harmless_mutations.txt has it by the line itself. A line that is
written anew has changes that the record lacks: tests/python/test_kernel_changes.py names them, and `mutate_kernels.py --record`
tries them alone.
"""

import hashlib
import textwrap
from collections import Counter, defaultdict
from pathlib import Path

from kernel_changes import changes_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FOLDER = "espalier/ops/cuda"
HARMLESS, NOTICED = "harmless_mutations.txt", HERE / "noticed_mutations.txt"
INVALID = "does not compile"
HEADING = """# Changes of the kernels that a check notices: "= file: the first check that did", and below it the changes by the digest
# of their lines. `tests/cuda/mutate_kernels.py --record` writes this file.
"""


def listed_in(name):
    """{"file: changed line"}"""
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith(("#", "="))}


def digest_of(key):
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def keys_of(file):
    return Counter(change.key() for change, _ in changes_of(file, (ROOT / FOLDER / file).read_text(encoding="utf-8")))


def row_of(file, counts):
    """Of the table in docs/cuda.md."""
    return f"| `{file}` | " + " | ".join(f"{count:,}" for count in counts) + " |"


class Record:
    """{file: {digest: check}}"""

    def __init__(self, path=NOTICED):
        self.path, self.of = path, defaultdict(dict)
        section = ("", "")
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            if line.startswith("= "):
                file, _, check = line[2:].partition(": ")
                section = (file, check)
            elif line and not line.startswith("#"):
                self.of[section[0]].update(dict.fromkeys(line.split(), section[1]))

    def note(self, file, outcomes):
        """outcomes: {key: check, or INVALID, or "" where it was not noticed}, of all changes that were tried"""
        for key, check in outcomes.items():
            if check:
                self.of[file][digest_of(key)] = check

    def has(self, change):
        return digest_of(change.key()) in self.of[change.file]

    def write(self):
        sections = defaultdict(list)
        for file, found in self.of.items():
            now = {digest_of(key) for key in keys_of(file)}
            for digest, check in found.items():
                if digest in now:
                    sections[file, check].append(digest)
        text = HEADING
        for (file, check), digests in sorted(sections.items()):
            text += f"\n= {file}: {check}\n" + "\n".join(textwrap.wrap(" ".join(sorted(digests)), 116)) + "\n"
        self.path.write_text(text, encoding="utf-8")

    def files(self):
        return sorted(file for file, found in self.of.items() if found)

    def missing(self, file, harmless):
        """Keys that are neither noticed nor harmless."""
        return sorted(key for key in keys_of(file) if key not in harmless and digest_of(key) not in self.of[file])

    def stale(self, file):
        return sorted(set(self.of[file]) - {digest_of(key) for key in keys_of(file)})

    def counts(self, file, harmless):
        """Changes: all, noticed, harmless, not compiling."""
        keys = keys_of(file)
        of = lambda test: sum(count for key, count in keys.items() if test(key))
        invalid = of(lambda key: key not in harmless and self.of[file].get(digest_of(key)) == INVALID)
        silent = of(lambda key: key in harmless)
        return keys.total(), keys.total() - invalid - silent, silent, invalid
