"""Sentences that a reader stumbles over: openings and phrases that stand where a noun and a verb belong.

Openings: the words of OPENING. "Of so many ranks, those that ..." becomes "Ranks that ...". Questions may open with them.
Phrases: PHRASES, each with its remedy; in prose also NOUNS; in messages also VAGUE, which tell a user nothing. They are found across ends of lines.
Checks the documents, the help of options, docstrings of Python, comments of C++ and CUDA, and messages in C++ sources, tests excepted.
Before that it checks itself on texts with planted faults. Exit 1 with one line for each sentence.
"""

import ast
import re
import sys

from check_includes import ROOT, tracked

OPENING = re.compile(r"(?:^|(?<=[.:;|] ))(Of|Those|Whose|Who|What|Whether|That|Which)\b(?! else\b)(?=((?:[^.?|\n]|\n(?=.))*\??))", re.M)
PHRASES = {
    r"\bsaid anew\b": "given again",
    r"\b(?:is|are) on (?:its|their) way\b": "in flight",
    r"\b[Dd]ear(?:er|est)? (?:to|where)\b": "expensive",
    r"\bgives? the bits of\b": "is bitwise identical to",
    r"\bdivided? (?:over|among) (?:the )?(?:ranks|cp|dp|tp)\b|\b[Rr]anks (?:of \w+ )?(?:have )?divided?\b": "sharded over the axis",
    r"\bthe fullest\b": "the maximum over ranks",
    r"\b(?:is|are) given up\b": "is considered dead",
    r"\bunlike much\b": "differ in cost",
    r"\b(?:that|those) of plenty\b": "the one used when memory is ample",
    r"\b[Ww]hoever\b": "the noun",
    r"\bso many (?:ranks|bytes|rows|seconds|processes|chunks)\b": "the number's name",
}
NOUNS = {r"\b(?:[Tt]hose|[Tt]he ones) of\b": "the noun again: the bytes of"}
VAGUE = {
    r"\bsomething else\b": "the finding: another type, another kind of file",
    r"\b(?:an error|a refusal) of the system\b": "what failed: a failed write, a failed allocation",
    r"\bof before\b": "the noun: the former run's",
    r"^(?:others|some of them)$": "the noun: other prompts",
}
NO_MESSAGES = ("tests/", "bench/", "examples/")  # their strings are data and names of cases
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md")
CODE_BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
HELP = re.compile(r'"((?:[^"\\]|\\.)*)"\)\s*$', re.M)
TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
COMMENT = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)'|[^"/]|/(?!/))*?//+(.*)""")


def faults_of_prose(text, phrases):
    """(line number, complaint) for every fault in running text."""
    faults = [(match.start(), "a sentence that opens with {}: put its noun first", "".join(match.groups()))
              for match in OPENING.finditer(text) if not match.group(2).endswith("?")]
    faults += [(match.start(), f"{{}}: write {remedy}", match.group(0))
               for phrase, remedy in phrases.items() for match in re.finditer(phrase.replace(" ", r"\s"), text)]
    for at, complaint, found in sorted(faults):
        yield text.count("\n", 0, at) + 1, complaint.format('"' + " ".join(found.split())[:60] + '"')


def prose_of_document(text):
    text = CODE_BLOCK.sub(lambda block: "\n" * block.group(0).count("\n"), text)
    return "\n".join("" if line.startswith("    ") else line.lstrip("|*-# ") for line in text.split("\n"))


def prose_of_help(text):
    return "\n".join(next(iter(HELP.findall(line)), "") for line in text.split("\n"))


def prose_of_comments(text):
    """Comments of C++, in their lines."""
    return "\n".join(match.group(1).strip() if (match := COMMENT.match(line)) else "" for line in text.split("\n"))


def prose_of_docstrings(text):
    lines = [""] * (text.count("\n") + 1)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            expression = node.body[0]
            for offset, line in enumerate(text.split("\n")[expression.lineno - 1:expression.end_lineno]):
                lines[expression.lineno - 1 + offset] = line.strip().lstrip('"')
    return "\n".join(lines)


def messages_of(text):
    """(line number, text) for the strings of a C++ source."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.lstrip().startswith(("//", "#")):
            yield from ((number, message) for message in TEXT.findall(line.partition("  // ")[0]))


PROSE_OF = {".md": prose_of_document, ".def": prose_of_help, ".py": prose_of_docstrings,
            **dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), prose_of_comments)}


def faults_of(name, text):
    """One line for each fault in the prose of a file."""
    ending = name[name.rindex("."):]
    faults = list(faults_of_prose(PROSE_OF[ending](text), {**PHRASES, **NOUNS}))
    if ending == ".cpp" and not name.startswith(NO_MESSAGES):
        faults += [(number, complaint) for number, message in messages_of(text) for _, complaint in faults_of_prose(message, {**PHRASES, **VAGUE})]
    return [f"{name}:{number}: {complaint}" for number, complaint in sorted(faults, key=lambda fault: fault[0])]


# Texts with their lines at fault: a check that finds nothing must not pass.
PLANTED = {
    "planted.md": ("# What is a rank?\nOf so many ranks one writes.\n\n```\nOf code.\n```\n| a | What a rank writes |\n", [2, 2, 7]),
    "planted.def": ('row(lr, number, 1e-6, "rate", "Learning rate.")\nrow(n, number, 1, "", "Those who sample.")\n', [2]),
    "planted.h": ("// Rows of a set. What the ranks divide over dp.\nint rows = 0;  // whoever holds it: those of plenty\n", [1, 1, 2, 2, 2]),
    "planted.cpp": ('#include "of/before.h"\n// Of ranks: something else.\nthrow Error({file, "prompts", "something else", ""});\n'
                    'note(path, ": the tokens of before");\nif (!given) fail("others");  // "of before"\nfail("What a rank writes");\n', [2, 3, 4, 5, 6]),
    "planted.cu": ("// Whether it reads\n// whole rows.\nint n = 0;  // the ones of dp\n// Its rows are those\n// of the set. That rank writes. Why?\n"
                   "// Which rank\n// writes?\n", [1, 3, 4, 5]),
    "planted.cuh": ("f(\"// Of text\", '\"');  // Those of tp are sharded\n/// Who waits.\n", [1, 1, 2]),
    "tests/planted.cpp": ('fail("What a rank writes");  // Which rank writes.\n', [1]),
    "planted.py": ('"""Of the module."""\nOF = "Of text"\n\n\ndef rows():\n    """Rows, whose bytes are on their way."""\n', [1, 6]),
}


def check_itself():
    for name, (text, lines) in PLANTED.items():
        found = [int(fault.split(":")[1]) for fault in faults_of(name, text)]
        if found != lines:
            sys.exit(f"check_prose.py is broken: in {name} it finds faults in lines {found}, and they are in {lines}")


def main():
    check_itself()
    names = tracked(*DOCUMENTS, "espalier/options/option_table.def", "python/espalier/**.py", "examples/*.py",
                    *(f"*{ending}" for ending in (".h", ".cpp", ".cu", ".cuh")))
    faults = [fault for name in names for fault in faults_of(name, (ROOT / name).read_text(encoding="utf-8"))]
    print("\n".join(faults + [f"{len(names)} texts, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
