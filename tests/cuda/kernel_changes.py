"""Finds what can be changed in a kernel's source, and writes the source with all changes in it, one of them to be chosen
when it runs (changes.h).

A change is an operator for its opposite, a whole number for the next, a barrier, a copy's wait or a jump left out. Code that
only nvcc sees is left as it is. The sources are those that clang-format makes: operators of two operands stand between
spaces, angle brackets of templates behind what they belong to.
"""

import re
from dataclasses import dataclass

OPPOSITES = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+",
             "*": "/", "/": "*", "%": "/", "+=": "-="}
NAMES = {"<": "less", "<=": "less_or_equal", ">": "greater", ">=": "greater_or_equal", "==": "equal", "!=": "unequal",
         "&&": "both", "||": "either", "+": "plus", "-": "minus", "*": "times", "/": "over", "%": "modulo", "+=": "add_to"}
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "%=", "|=", "&=", "^=", "<<=", ">>="}
STRENGTH = {"*": 10, "/": 10, "%": 10, "+": 9, "-": 9, "<<": 8, ">>": 8, "<": 7, "<=": 7, ">": 7, ">=": 7, "==": 6, "!=": 6,
            "&": 5, "^": 4, "|": 3, "&&": 2.5, "||": 2.3, "?": 2, ":": 2, **dict.fromkeys(ASSIGNMENTS, 1)}
LEFT_OUT = re.compile(r"\b(?:__syncthreads\(\);|__syncwarp\(\);|continue;|break;|return;|cp_async_wait<\d>\(\);|cp_async_commit\(\);|async_fence\(\);|barrier_init_fence\(\);"
                      r"|bulk_commit\(\);|bulk_(?:read|done)<\d>\(\);|barrier_arrive\([^;]*\);|turn_(?:wait|pass)\([^;]*\);|wgmma_fence\(\);|wgmma_commit\(\);|wgmma_wait<\d>\(\);|release\([^;]*\);|named_(?:wait|arrive)\([^;]*\);|barrier_wait\([^;]*\);)")
NUMBER = re.compile(r"(?<![\w.<])(?<!\de-)(\d+)(?![\w.>])")
NO_CODE = re.compile(r"^\s*(template|static_assert|ESPALIER_INSTANTIATE|__global__|namespace|using )")
# Before what the compiler has to know: constants, the extents of arrays.
FIXED = re.compile(r"\bconstexpr\b|ESPALIER_SHARED\([\w:<> ]+\[|\(&\w+\)\[[^\]]*$|^\s*(const )?[\w:]+(<[^<>]*>)? \w+(\[[^\[\]]*\])*\[[^\]]*$")
CHOSEN = re.compile(r"if constexpr \((?:[^()]|\([^()]*\))*\)")  # and what stands behind it is none of these
OPEN, CLOSED = "([{<", ")]}>"


@dataclass(frozen=True)
class Change:
    file: str
    line: int  # from 1
    begin: int  # of what is changed, in the file
    end: int
    instead: str
    text: str  # the line with the change
    switched: bool  # whether it can be chosen when the kernel runs

    def key(self):
        return f"{self.file}: {self.text}"


def blank(text):
    return re.sub(r"[^\n]", " ", text)


def without_comments(source):
    """The same places: comments, strings, directives and what only nvcc sees are blank."""
    text = re.sub(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)+\'', lambda found: blank(found[0]), source)
    lines, branches, continued = [], [], False  # branches: [whether it is seen, whether #else turns that over]
    for line in text.split("\n"):
        words = line.split() if line.lstrip().startswith("#") else []
        if words and words[0] in ("#if", "#ifdef", "#ifndef"):
            of_nvcc = words[1:] == ["__CUDACC__"]
            branches.append([not (of_nvcc and words[0] == "#ifdef"), of_nvcc])
        elif words and words[0] == "#else":
            branches[-1][0] ^= branches[-1][1]
        elif words and words[0] == "#endif":
            branches.pop()
        directive = bool(words) or continued
        lines.append(blank(line) if directive or not all(seen for seen, _ in branches) else line)
        continued = directive and line.endswith("\\")
    return "\n".join(lines)


def brackets_of(code):
    """{place of an opening bracket: of its closing one}; "<" is one where it stands behind what it belongs to."""
    pairs, opened = {}, []
    for at, letter in enumerate(code):
        glued = at > 0 and not code[at - 1].isspace()
        if letter in "([{" or (letter == "<" and glued and code[at - 1] != "<" and code[at + 1] not in "<="):
            opened.append(at)
        elif letter in ")]}" or (letter == ">" and opened and code[opened[-1]] == "<" and code[at - 1] != "-"):
            begin = opened.pop()
            if OPEN.index(code[begin]) != CLOSED.index(letter):
                raise ValueError(f"{code[begin]} of {code.count(chr(10), 0, begin) + 1} meets {letter} of {code.count(chr(10), 0, at) + 1}")
            pairs[begin] = at
    return pairs


def words_of(code, begin, end, pairs):
    """[(begin, end)] of what stands between spaces, brackets with all that is in them being one; ends at , and ;"""
    words, at = [], begin
    while at < end:
        if code[at].isspace():
            at += 1
            continue
        first = at
        while at < end and not code[at].isspace():
            at = pairs.get(at, at) + 1
            if code[at - 1] in ",;":
                break
        words.append((first, at))
    return words


def operations_of(code, pairs):
    """(begin of the left operand, begin and end of the operator, end of the right operand)"""
    for begin, end in [(-1, len(code)), *pairs.items()]:
        words = words_of(code, begin + 1, end, pairs)
        texts = [code[first:last] for first, last in words]
        strength = [STRENGTH.get(text) for text in texts]
        ends = [text[-1] in ",;" or text[0] == "{" or text[-1] == ":" and text != ":" for text in texts]
        for n, text in enumerate(texts):
            if text not in OPPOSITES or n == 0 or n + 1 == len(texts) or strength[n - 1] or strength[n + 1] or ends[n - 1] or \
                    "..." in texts:
                continue
            left = n - 1
            while left >= 2 and strength[left - 1] and strength[left - 1] >= strength[n] and not ends[left - 2] and strength[n] > 1:
                left -= 2
            right = n + 1
            while not ends[right] and right + 2 < len(texts) and strength[right + 1] and \
                    (strength[right + 1] > strength[n] or strength[n] == 1):
                right += 2
            last = words[right][1] - (1 if texts[right][-1] in ",;" else 0)
            yield words[left][0], *words[n], last


def changes_of(file, source):
    """All changes of a file, with what switches each: [(Change, [(place, how far it reaches, whether it closes, text)])]; the
    text has {id} where its number goes. Switching is impossible, and the list empty, where the compiler needs the value."""
    code = without_comments(source)
    pairs = brackets_of(code)
    operands = {middle: (left, right) for left, middle, _, right in operations_of(code, pairs)}
    in_angles = [(a, b) for a, b in pairs.items() if code[a] == "<"]
    starts, found = [0], []
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def add(number, begin, end, instead, pieces):
        line = source[starts[number]:starts[number + 1]]
        column = begin - starts[number]
        text = (line[:column] + instead + line[column + end - begin:]).strip()
        if text == ";":  # a statement alone: told by its name and the next line
            text = f"; for {source[begin:end]} {source[starts[number + 1]:].partition(chr(10))[0].strip()}".strip()
        statement = CHOSEN.sub("", re.split(r"[;{}]", code[:begin])[-1])
        fixed = not pieces or FIXED.search(statement) or any(a < begin < b for a, b in in_angles)
        found.append((Change(file, number + 1, begin, end, instead, text, not fixed), [] if fixed else pieces))

    for number in range(len(starts) - 1):
        line = code[starts[number]:starts[number + 1]]
        if NO_CODE.match(line):
            continue
        for match in re.finditer(r"(?<= )(\S+)(?=\s)", line):
            begin, end, operator = starts[number] + match.start(), starts[number] + match.end(), match[1]
            if operator not in OPPOSITES:
                continue
            if begin not in operands:
                add(number, begin, end, OPPOSITES[operator], [])
                continue
            left, right = operands[begin]
            reach = right - left
            lazy = operator in ("&&", "||")
            pieces = [(left, reach, False, f"::espalier::changes::{NAMES[operator]}({{id}}, " + ("static_cast<bool>(" if lazy else "")),
                      (begin, 0, None, "), [&] { return static_cast<bool>(" if lazy else ","),
                      (right, reach, True, "); })" if lazy else ")")]
            add(number, begin, end, OPPOSITES[operator], pieces)
        for match in LEFT_OUT.finditer(line):
            begin, end = starts[number] + match.start(), starts[number] + match.end()
            add(number, begin, end, ";", [(begin, end - begin, False, "{{ if (!::espalier::changes::on({id})) "),
                                          (end, end - begin, True, " }}")])
        for match in NUMBER.finditer(line):
            begin, end = starts[number] + match.start(), starts[number] + match.end()
            add(number, begin, end, str(int(match[1]) + 1), [(begin, end - begin, False, "::espalier::changes::number({id}, "),
                                                             (end, end - begin, True, ")")])
    return found


def with_change(source, change):
    return source[:change.begin] + change.instead + source[change.end:]


def with_all(source, numbered):
    """The source with {id: (Change, pieces)} in it."""
    pieces, replaced = [], {}
    for number, (change, of_change) in numbered.items():
        for place, reach, closes, text in of_change:
            filled = text.replace("{id}", str(number)).replace("{{", "{").replace("}}", "}")
            if closes is None:
                replaced[place] = (change.end - change.begin, filled)
            else:
                pieces.append((place, 0 if closes else 1, reach if closes else -reach, filled))
    # At one place what closes comes first, the inner before the outer; then what opens, the outer before the inner.
    out, at = [], 0
    for place, order, length, text in sorted(pieces + [(place, 2, length, text) for place, (length, text) in replaced.items()]):
        out.append(source[at:place] + text)
        at = place + (length if order == 2 else 0)
    return "".join(out) + source[at:]
