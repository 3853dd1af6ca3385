"""Sentences that a reader stumbles over: those that open with "Of", "Those", "Whose" or "Who", and statements that open with "What".

Put the noun first: "Of so many ranks, those that ..." becomes "Ranks that ...". Questions may open with "What" and "Who". Checks the
documents, the help of options, comments of C++ headers, and docstrings of Python. Exit 1 with one line for each sentence.
"""

import ast
import re
import sys

from check_includes import ROOT, tracked

OPENING = re.compile(r"(?:^|(?<=[.:;|] ))(Of|Those|Whose|Who|What)\b(?! else\b)[^.?|\n]*\??")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md")
CODE_BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
HELP = re.compile(r'"((?:[^"\\]|\\.)*)"\)\s*$', re.M)


def sentences_at_fault(text):
    """(line number, beginning of the sentence) for every fault in running text."""
    for number, line in enumerate(text.split("\n"), 1):
        for match in OPENING.finditer(line):
            if not match.group(0).endswith("?"):
                yield number, match.group(0)[:60]


def prose_of_document(text):
    text = CODE_BLOCK.sub(lambda block: "\n" * block.group(0).count("\n"), text)
    return "\n".join("" if line.startswith("    ") else line.lstrip("|*-# ") for line in text.split("\n"))


def prose_of_docstrings(text):
    lines = [""] * (text.count("\n") + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            expression = node.body[0]
            for offset, line in enumerate(text.split("\n")[expression.lineno - 1:expression.end_lineno]):
                lines[expression.lineno - 1 + offset] = line.strip().lstrip('"')
    return "\n".join(lines)


def prose_of_comments(text):
    """Comments of C++, in their lines."""
    return "\n".join(line.partition("//")[2].strip() for line in text.split("\n"))


def faults_of(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        text = prose_of_document(text)
    elif name.endswith(".def"):
        text = "\n".join(next(iter(HELP.findall(line)), "") for line in text.split("\n"))
    elif name.endswith(".h"):
        text = prose_of_comments(text)
    elif name.endswith(".py"):
        text = prose_of_docstrings(text)
    for number, sentence in sentences_at_fault(text):
        yield f"{name}:{number}: a sentence that opens with \"{sentence}\": put its noun first"


def main():
    names = tracked(*DOCUMENTS, "espalier/options/option_table.def", "python/espalier/**.py", "examples/*.py", "cli/*.h")
    faults = [fault for name in names for fault in faults_of(name)]
    print("\n".join(faults + [f"{len(names)} texts, {len(faults)} sentences at fault"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
