"""What the documents say exists, exists: paths and `make` targets named in README and docs/, links between documents;
commands name the Python that `make` chose; no glossary word has two entries; README's table of folders names every folder; every page of
docs/ begins with what it is for, and docs/README.md lists every page; and docs/options.md lists the options of the table, with their help. (That the page is exactly what the table generates is a C++ unit
test.) Exit 1 with the faults.
"""

import re
import sys
from pathlib import Path

from check_includes import ROOT, tracked

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
FOLDERS = ("espalier", "cli", "tests", "tools", "docs", "bench", "cmake", "python", "examples", ".ci")
PATH = re.compile(rf"^(?:{'|'.join(re.escape(f) for f in FOLDERS)})/[A-Za-z0-9_./+-]*$")
TABLE, PAGE = "espalier/options/option_table.def", "docs/options.md"
KERNELS = "espalier/options/attention_kernels.h"
VERBS = "espalier/settings/option_help.cpp"
NAKED = re.compile(r"^(?:python3? |bench/\w+\.py )")
CHOSEN = "tools/python"
ROW = re.compile(r'^ESPALIER_OPTION\(\s*\w+\s*,\s*"([^"]+)".*"((?:[^"\\]|\\.)*)"\)', re.M)


def faults_of(name, targets):
    text = (ROOT / name).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for match in CODE.finditer(prose):
        word = match.group(1)
        if PATH.match(word) and not (ROOT / word).exists():
            yield f"{name}: names `{word}`, which does not exist"
        command = re.match(r"make ([a-z][a-z-]*)$", word)
        if command and command.group(1) not in targets:
            yield f"{name}: names `{word}`, which the Makefile does not have"
    blocks = re.findall(r"^```.*?^```", text, flags=re.M | re.S) + re.findall(r"^    .*$", text, flags=re.M)
    for command in CODE.findall(prose) + [line.strip() for block in blocks for line in block.split("\n")]:
        if NAKED.match(command):
            yield f"{name}: `{command}` does not run with the Python that make chose: {CHOSEN} ..."
        unbuilt = re.match(r"(?:build/\S*/)?(\w+_(?:bench|test)) ", command)
        if unbuilt and f"--target {unbuilt.group(1)}" not in text:
            yield f"{name}: `{command}` runs a program that make leaves out: cmake --build build --target {unbuilt.group(1)} before it"
    for match in LINK.finditer(prose):
        link = match.group(1)
        if not re.match(r"[a-z]+:", link) and not ((ROOT / name).parent / link).exists():
            yield f"{name}: links to {link}, which does not exist"


def meaning_for_all(text, verbs):
    """A row's help as the page shows it: of "{tr|the file}{l|each batch}" every part, with the verbs it is for."""
    def part(match):
        names = ", ".join(name for letter, name in verbs if letter in match.group(1))
        return f"{match.group(2)} ({names})"
    return re.sub(r"\{(\w+)\|([^}]*)\}", part, re.sub(r"\}\{(?!\w+\|;)", "}, {", text))


def option_faults():
    if not (ROOT / PAGE).exists():
        return [f"{PAGE}: missing; make docs writes it"]
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| `--([a-z0-9-]+)` \|.*\| ([^|]*) \|$", page, re.M))
    kernels = re.findall(r'^  ROW\(\w+, "([\w-]+)", "([^"]+)"', (ROOT / KERNELS).read_text(encoding="utf-8"), re.M)
    listed = "".join(f"{word} ({what}), " for word, what in kernels)
    table = re.sub(r'" ESPALIER_ATTENTION_KERNELS\(\w+\) "', lambda _: listed, (ROOT / TABLE).read_text(encoding="utf-8"))
    wanted = dict(ROW.findall(table))
    verbs = re.findall(r"\{'(\w)', +\"(\w+)\"\}", (ROOT / VERBS).read_text(encoding="utf-8"))
    wanted = {name: meaning_for_all(meaning, verbs) for name, meaning in wanted.items()}
    faults = [f"{PAGE}: option --{name} is missing or has another meaning; make docs writes the page"
              for name, meaning in wanted.items() if shown.get(name, "").replace("\\", "") != meaning.replace("|", "/")]
    return faults + [f"{PAGE}: option --{name} does not exist" for name in shown if name not in wanted]


def repeated_words():
    """One meaning a word: the glossary has no word twice."""
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.M)
    words = [word.strip() for row in rows if row not in ("word", "---") for word in row.split(",")]
    return [f"docs/glossary.md: {word} has two entries" for word in sorted(set(words)) if words.count(word) > 1]


def folder_faults(readme, names):
    """README's table of folders is complete: every folder of the repository, of espalier/ and of tests/, and no other."""
    table = readme.split("\n## Folders\n")[-1]
    named = [folder for row in re.findall(r"^\| (`.*?) \|.*\|$", table, re.M) for folder in CODE.findall(row)]
    parents = {str(parent) + "/" for name in names for parent in Path(name).parents if str(parent) != "."}
    wanted = {f for f in parents if f.count("/") == 1 or (f.count("/") == 2 and f.startswith(("espalier/", "tests/")))}
    wanted -= {"espalier/", "tests/"} | {f for f in wanted if f.startswith(".")}
    also = set(CODE.findall(table))  # in the words of a row
    return ([f"README.md: no row of the table of folders names `{folder}`" for folder in sorted(wanted - also)]
            + [f"README.md: the table of folders names `{folder}`, which does not exist" for folder in named if folder not in parents]
            + [f"README.md: `{folder}` has two rows in the table of folders" for folder in sorted(set(named)) if named.count(folder) > 1])


def page_faults(pages):
    """`pages`: {name: text} of docs/*.md. "This page ..." opens each, but for the index and the generated list of options."""
    index = "docs/README.md"
    listed = {"docs/" + link for link in LINK.findall(pages[index])}
    faults = [f"{index}: does not list {name}" for name in sorted(set(pages) - listed - {index})]
    for name, text in sorted(pages.items()):
        first = next((line for line in text.split("\n")[1:] if line.strip()), "")
        if name not in (index, PAGE) and not first.startswith("This page "):
            faults.append(f'{name}: begins with "{first[:40]}"; say what the page is for: "This page ..."')
    return faults


PLANTED = {"docs/README.md": "# Index\n\n[a](a.md)\n", "docs/a.md": "# A\n\nThis page is for tests.\n", "docs/b.md": "# B\n\nRows are tokens.\n"}


def main():
    if len(page_faults(PLANTED)) != 2:
        sys.exit(f"check_docs.py is broken: of a page that is not listed and has no purpose it finds {page_faults(PLANTED)}")
    documents = [n for n in tracked(*DOCUMENTS) if n.endswith(".md")]
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    faults = [fault for name in documents for fault in faults_of(name, targets)]
    faults += option_faults() + repeated_words()
    faults += page_faults({name: (ROOT / name).read_text(encoding="utf-8") for name in documents if re.fullmatch(r"docs/[^/]+\.md", name)})
    faults += folder_faults((ROOT / "README.md").read_text(encoding="utf-8"), tracked("."))
    print("\n".join(faults + [f"{len(documents)} documents, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
