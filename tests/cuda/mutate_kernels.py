"""Changes of the kernels' sources, one at a time, each of which some test has to notice.

    tests/cuda/mutate_kernels.py --build build                     those of mutation_sample.txt, as in `make sweep`
    tests/cuda/mutate_kernels.py --build build --all [--file X]    all of them; goes on where it was stopped
    tests/cuda/mutate_kernels.py --build build --all --again       survivors once more, and what was not tried yet
    tests/cuda/mutate_kernels.py --build build --record --file X   the changes of a file that noticed_mutations.txt lacks, and writes that

What a change is: kernel_changes.py. The kernels are compiled with all of their changes in them; each trial is a process that
chooses one and runs the checks that come by its place, the fastest first, until one is wrong, ends or hangs
(kernel_mutants.cpp). Where the compiler needs the changed value, the file is compiled with the one change. Changes that do not
compile are not counted; those that leave every result as it is stand in harmless_mutations.txt, with the reason. Exit 1 where
another one survives. Results are kept in the build folder, and begin anew when a kernel or a check has changed. The record
of a file stays: it knows a change by its line, so that only lines that were written since are tried (noticed_mutations.py).
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from itertools import accumulate
from pathlib import Path

from kernel_changes import changes_of, with_all, with_change
from noticed_mutations import FOLDER, HARMLESS, INVALID, Record, listed_in, row_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(ROOT / "tools"))
from tiers import Choice  # noqa: E402
# Of checks: those that come by a file. Other headers are met by all.
GROUPS = {"activation.cu": ["Variants"], "attention_merge.cu": ["Merging"], "attention_plain.cu": ["Attention"], "attention_sinks.cu": ["Attention"],
          "attention_tiles.cu": ["Attention", "Formula", "Unseen"], "choice.cu": ["Optimizer"],
          "columns.cu": ["Head", "Products", "Rows"], **{f"hopper/{name}": ["Hopper", "HopperTiles"] for name in (
              "backward.cu", "backward.h", "backward_keys.cu", "backward_queries.cu", "forward.cu", "key_stages.h", "launch.h", "products.h",
              "query_sums.h", "tile_facts.cu", "tile_facts.h")}, "delta_rows.h": ["States"], "delta_rule.cu": ["States"],
           **{name: ["Chunks", "States:bfloat16"] for name in (
               "delta_chunk_channel_gradients.cu", "delta_chunk_channels.cu", "delta_chunk_channels.h", "delta_chunk_value_sums.h",
               "delta_chunk_gradients.cu", "delta_chunk_inverse.cu", "delta_chunk_outputs.cu", "delta_chunk_rows.cu", "delta_chunk_scans.cu", "delta_chunk_tiles.h",
               "delta_chunks.cu", "delta_chunks.h", "split_tiles.h")},
          "delta_rule_backward.cu": ["States"], "expert_scale.cu": ["Experts"], "expert_rows.cu": ["Experts", "Variants"],
          "gates.cu": ["States"], "head.cu": ["Experts", "Head", "Variants"], "latent.cu": ["Variants"],
          "moving.cu": ["Experts", "Moving", "Optimizer", "Variants"], "norm.cu": ["Rows", "Variants"],
          "optimizer.cu": ["Optimizer"], "rotate.cu": ["Rows"], "rotate_part.cu": ["Variants"],
          "router.cu": ["Experts", "Variants"], "short_convolution.cu": ["States"], "swiglu.cu": ["Experts", "Rows"], "wide_attention.cu": ["Attention:264", "Attention:values of 320", "Attention:512"],
          "key_tiles.h": ["Attention", "Formula", "Hopper", "HopperTiles", "Unseen"],
          "visible.h": ["Attention", "Formula", "Hopper", "HopperTiles", "Unseen"]}
FEW, SIZES = "heads of 64", "hopper/attention.h"
HOPPER = "hopper/"  # kernels of this folder see tests/cuda/hopper/twins.h before them
HEADERS = ["delta_chunk_channels.h", "delta_chunk_tiles.h", "delta_chunk_value_sums.h", "delta_chunks.h", "delta_rows.h", "hopper/backward.h", "hopper/key_stages.h", "hopper/launch.h", "hopper/products.h",
           "hopper/query_sums.h", "hopper/tile_facts.h", "kernel.h", "key_tiles.h", "launch.h", "split_tiles.h", "tiles.h", "visible.h"]
# With what is no result: accesses, for races and the ends of arrays (accesses.h), and what C++ leaves undefined.
FLAGS = ["-std=c++20", "-x", "c++", "-fPIC", "-O1", "-g1", "-ffp-contract=off", "-Werror=vla", "-Wno-narrowing", "-fmax-errors=0",
         "-DESPALIER_EMULATED", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0",
         "-fsanitize=bounds,shift,integer-divide-by-zero", "-fsanitize-undefined-trap-on-error"]
MADE_OF = ["tests/cuda/chunk_checks.cpp", "tests/cuda/kernel_checks.cpp", *[f"tests/cuda/hopper/{name}.cpp" for name in ("hopper_checks", "barriers", "copies", "emulated_tensor_map", "products", "warpgroups")], "tests/cuda/accesses.cpp", "tests/cuda/emulation.cpp", "tests/cuda/emulation.h", "espalier/selftest/operation_check.cpp",
           *[f"espalier/selftest/{name}_cases.cpp" for name in ("attention", "head", "row", "state", "variant")], f"{FOLDER}/ptx.h"]


OF_A_FILE, MOST = 1536, 96 * 1024  # numbers of changes: of a file, and those that changes.h has room for


def limit_of(seconds):
    """Of the processor, for a check that takes so many: what takes five times as long hangs."""
    return 5 * seconds + 1


def digest(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


class Library:
    """Kernels with changes in them, compiled in a folder of their own, which stands before the kernels' own."""

    def __init__(self, folder, sources):
        self.folder, self.sources = folder, sources
        self.own = folder / "source" / FOLDER
        (self.own / HOPPER).mkdir(parents=True, exist_ok=True)

    def includes(self, file, header):
        """By itself, or by a header that it includes."""
        text = self.sources[file]
        return f'"{FOLDER}/{header}"' in text or any(f'"{FOLDER}/{other}"' in text and self.includes(other, header) for other in HEADERS if other != file)

    def made_of(self, name):
        """The kernels' files that have what stands in a file."""
        if name.endswith(".cu"):
            return [name]
        return [file for file in self.sources if file.endswith(".cu") and (self.includes(file, name) or name == "kernel.h")]

    def compile(self, source, target, folders):
        """What the compiler says where it fails, else None."""
        before = "hopper/twins.h" if source.parent.name == HOPPER.strip("/") else "emulation.h"
        done = subprocess.run(["g++", *FLAGS, *[f"-I{folder}" for folder in folders], f"-I{ROOT}", "-include", str(HERE / before),
                               "-include", str(HERE / "changes.h"), "-c", str(source), "-o", str(target)],
                              capture_output=True, text=True, check=False)
        return done.stderr if done.returncode != 0 else None

    def object_of(self, file, stamp):
        return self.folder / f"{file.replace('/', '_')}.{stamp}.o"

    def link(self, objects, library):
        subprocess.run(["g++", "-shared", *map(str, objects), "-o", str(library)], check=True)
        return library

    def place_of_error(self, said, numbered):
        """Numbers of the changes on the lines that the compiler complains of."""
        for words in (" error: ", "required from", " note: "):
            places = {(found[1].partition(f"/source/{FOLDER}/")[2], int(found[2])) for line in said.splitlines() if words in line
                      for found in [re.match(r"(\S*/source/\S+?):(\d+):", line)] if found}
            numbers = [n for n, (change, _) in numbered.items() if (change.file, change.line) in places]
            if numbers:
                return numbers
        raise RuntimeError(f"the kernels with their changes do not compile:\n{said[:4000]}")

    def with_all(self, files, numbered):
        """The library with all changes in it, without those that have to be compiled alone: (library, {id: change})."""
        stamps = {}
        while True:
            texts = {file: with_all(source, {n: c for n, c in numbered.items() if c[0].file == file}) for file, source in self.sources.items()}
            for file, text in texts.items():
                if not (self.own / file).exists() or (self.own / file).read_text(encoding="utf-8") != text:
                    (self.own / file).write_text(text, encoding="utf-8")
            for file in files:
                stamp = digest(texts[file], *[texts[h] for h in HEADERS], (HERE / "emulation.h").read_text(), (HERE / "hopper/twins.h").read_text(),
                               (HERE / "changes.h").read_text(), *FLAGS)
                if stamps.get(file) == stamp or self.object_of(file, stamp).exists():
                    stamps[file] = stamp
                    continue
                said = self.compile(self.own / file, self.object_of(file, stamp), [self.folder / "source"])
                if said is None:
                    stamps[file] = stamp
                    continue
                impossible = set(self.place_of_error(said, numbered))
                numbered = {n: c for n, c in numbered.items() if n not in impossible}
                break
            else:
                break
        subprocess.run(["g++", "-std=c++20", "-fPIC", "-O1", f"-I{ROOT}", "-c", str(HERE / "changes.cpp"), "-o", str(self.folder / "changes.o")], check=True)
        objects = [self.object_of(file, stamps[file]) for file in files]
        return self.link([*objects, self.folder / "changes.o"], self.folder / "all.so"), {n: c[0] for n, c in numbered.items()}

    def with_one(self, change, few=False):
        """The library with one change, or None where it does not compile. Few: of Hopper's kernels those for FEW alone, which
        compile in a sixth of the time."""
        alone = self.folder / "alone" / FOLDER
        (alone / HOPPER).mkdir(parents=True, exist_ok=True)
        for old in alone.rglob("*"):
            if old.is_file():
                old.unlink()
        (alone / change.file).write_text(with_change(self.sources[change.file], change), encoding="utf-8")
        if few:
            sizes = (ROOT / FOLDER / SIZES).read_text(encoding="utf-8")
            (alone / SIZES).write_text(re.sub(r"\n    case 96:.*?\n  }", "\n  }", sizes, flags=re.DOTALL), encoding="utf-8")
        objects = []
        for file in self.made_of(change.file):
            source = alone / file if (alone / file).exists() else ROOT / FOLDER / file
            objects.append(self.object_of(file, "alone"))
            if self.compile(source, objects[-1], [self.folder / "alone"]) is not None:
                return None
        return self.link(objects, self.folder / "alone.so")


class Server:
    def __init__(self, program, library):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GTEST_")}
        self.process = subprocess.Popen([program], env={**kept, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def ask(self, order):
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def line(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("kernel_mutants ended")
        return line.rstrip("\n")

    def measure(self, groups=()):
        """[(seconds, name, numbers of the changes that it comes by)]; of these groups of checks, or all"""
        self.ask(" ".join(["measure", *groups]))
        checks = []
        while (line := self.line()) != "measured":
            if line.startswith("problem"):
                raise RuntimeError(f"the kernels with their changes, none of them chosen, fail: {line}")
            _, _, seconds, name = line.split(" ", 3)
            checks.append((float(seconds), name, set(map(int, self.line().split()))))
        return checks

    def attempt(self, number, checks, plan):
        """("noticed" or "survived", the check or -1, what it said)"""
        self.ask(f"try {number} " + " ".join(f"{n}:{limit_of(checks[n][0]):.2f}" for n in plan))
        words = self.line().split(" ", 2)
        return (words[0], int(words[1]), words[2] if len(words) > 2 else "") if words[0] == "noticed" else (words[0], -1, "")


class Results:
    """What was found so far, in a file: a line for each change, with the state of its kernel and of the checks."""

    def __init__(self, path, kernels, checks, again):
        self.path, self.kernels, self.checks, self.found, self.by = path, kernels, checks, {}, {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            name, outcome, kernel, check, said = line.split("\t")
            if kernel == kernels.get(name.split(":")[0]) and (outcome != "survived" if again else check == checks):
                self.found[name], self.by[name] = outcome, said.partition(" | ")[0]

    def note(self, change, outcome, said=""):
        self.found[name_of(change)], self.by[name_of(change)] = outcome, said.partition(" | ")[0]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\t".join([name_of(change), outcome, self.kernels[change.file], self.checks, said]) + "\n")


def name_of(change):
    return f"{change.file}:{change.line}:{change.begin}: {change.text}"


def measured(server, path, version, groups):
    """What the server measures, from the file where nothing has changed since."""
    version = f"{version} {' '.join(groups)}"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else [None, []]
    if kept[0] != version:
        kept = [version, [(seconds, name, sorted(met)) for seconds, name, met in server.measure(groups)]]
        path.write_text(json.dumps(kept), encoding="utf-8")
    return [(seconds, name, set(met)) for seconds, name, met in kept[1]]


def try_all(arguments, library, everything, program, results):
    """everything: {id: (Change, pieces)}. Notes the outcome of each that is asked for and has none yet."""
    asked = {n: change for n, (change, _) in everything.items()
             if arguments.asks_for(change) and name_of(change) not in results.found}
    if not asked:
        return
    changed = {change.file for change in asked.values()}
    files = sorted({file for name in changed for file in library.made_of(name)})
    made, switched = library.with_all(files, {n: c for n, c in everything.items() if c[0].switched and c[0].file in changed})

    def note(change, outcome, check, said):
        if outcome == "survived":
            print(f"survived{', no check comes there' if check == -2 else ''}: {change.file}:{change.line}: {change.text}", flush=True)
        results.note(change, outcome, f"{checks[check][1]} | {said}" if check >= 0 else "")

    with Server(program, made) as server:
        met_by = [GROUPS.get(change.file) for change in asked.values()]
        checks = measured(server, library.folder / "measured.json",
                          digest(made.read_bytes().hex(), program.read_bytes().hex(), results.checks),
                          [] if None in met_by else sorted({group for groups in met_by for group in groups}))
        by_seconds = sorted(range(len(checks)), key=lambda n: checks[n][0])
        first = {}  # the check that noticed the last change of a file is tried first

        def of_time(plan):
            """The first checks of a plan that take so many seconds together (--seconds)."""
            taken = list(accumulate(checks[n][0] for n in plan))
            return [n for n, seconds in zip(plan, taken, strict=True) if seconds <= (arguments.seconds or seconds)] or plan[:1]

        for number, change in asked.items():
            if number not in switched:
                continue
            plan = [n for n in by_seconds if number in checks[n][2]]
            if first.get(change.file) in plan:
                plan = [first[change.file], *[n for n in plan if n != first[change.file]]]
            outcome, check, said = server.attempt(number, checks, of_time(plan))
            first[change.file] = check if outcome == "noticed" else first.get(change.file)
            note(change, outcome, check if plan else -2, said)
    of_file = defaultdict(set)
    for n, (_, _, met) in enumerate(checks):
        for number in met & set(switched):
            of_file[switched[number].file].add(n)
    for number, change in asked.items():
        if number in switched:
            continue
        plan = [n for n in by_seconds if n in of_file[change.file]]
        of_few = [n for n in plan if FEW in checks[n][1]] if change.file.startswith(HOPPER) else []
        if first.get(change.file) in plan:
            plan = [first[change.file], *[n for n in plan if n != first[change.file]]]
        for few in (True, False) if of_few else (False,):
            alone = library.with_one(change, few)
            if alone is None:
                results.note(change, "invalid", INVALID)
                break
            with Server(program, alone) as server:
                outcome, check, said = server.attempt(number, checks, of_time(of_few if few else plan))
            if outcome == "noticed" or not few:
                note(change, outcome, check, said)
                break


def noticed_of(file, everything, results):
    """{key: the check, INVALID, or ""}: of changes with one line, the one that was not noticed counts."""
    found = {}
    for change, _ in everything.values():
        if change.file == file and (outcome := results.found.get(name_of(change))):
            by = results.by[name_of(change)] if outcome != "survived" else ""
            known = found.get(change.key(), by)
            found[change.key()] = by if known == INVALID else known and by and (known if by == INVALID else by)
    return found


def report(arguments, everything, results, seconds):
    """A table; the number of survivors that are not harmless."""
    table, survivors = defaultdict(Counter), []
    for change in everything:
        outcome = "harmless" if change.key() in arguments.harmless else results.found.get(name_of(change), "not tried")
        if outcome == "survived":
            survivors.append(change)
        table[change.file][outcome] += 1
    columns = ["noticed", "harmless", "survived", "invalid", "not tried"]
    print(f"{'file':28}{'changes':>10}" + "".join(f"{column:>11}" for column in columns))
    for file, counts in [*sorted(table.items()), ("all", sum(table.values(), Counter()))]:
        print(f"{file:28}{sum(counts.values()):10}" + "".join(f"{counts[column]:11}" for column in columns))
    for change in survivors:
        print(f"survived: {change.file}:{change.line}: {change.text}")
    print(f"{seconds:.0f} s")
    return len(survivors)


def try_sample(library, everything, program):
    """The changes of mutation_sample.txt that ESPALIER_SWEEPS gives to this run, without what only all of them need: true where each is noticed."""
    sample = set(Choice(os.environ.get("ESPALIER_SWEEPS", "all")).cases("kernel_mutations", sorted(listed_in("mutation_sample.txt"))))
    chosen = {n: c for n, c in everything.items() if c[0].key() in sample}
    missing = sample - {change.key() for change, _ in chosen.values()}
    for line in missing:
        print(f"mutation_sample.txt has a change that there is not: {line}")
    files = sorted({change.file for change, _ in chosen.values()})
    made, switched = library.with_all(files, chosen)
    noticed = 0
    with Server(program, made) as server:
        checks = server.measure({group for file in files for group in GROUPS[file]})
        for number, change in switched.items():
            plan = sorted((n for n in range(len(checks)) if number in checks[n][2]), key=lambda n: checks[n][0])
            outcome, _, said = server.attempt(number, checks, plan)
            noticed += outcome == "noticed"
            print(f"{outcome}: {change.key()}: {said}")
    return not missing and noticed == len(chosen) > 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--again", action="store_true", help="keeps what was noticed, whatever has changed in the checks")
    parser.add_argument("--file", action="append", help="of the kernels, alone")
    parser.add_argument("--record", action="store_true", help="tries what noticed_mutations.txt lacks of these files, and writes it")
    parser.add_argument("--seconds", type=float, default=0, help="of the checks of a change, the shortest first; 0: all that come by it")
    arguments = parser.parse_args()
    build, begun = (ROOT / arguments.build).resolve(), time.monotonic()
    folder, program = build / "kernel_changes", build / "tests/cuda/kernel_mutants"
    folder.mkdir(exist_ok=True)
    kernels = [path for pattern in ("*.cu", f"{HOPPER}*.cu") for path in (ROOT / FOLDER).glob(pattern)]
    names = [*sorted(path.relative_to(ROOT / FOLDER).as_posix() for path in kernels), *HEADERS]
    sources = {name: (ROOT / FOLDER / name).read_text(encoding="utf-8") for name in names}
    # Numbers are of a file, so that one that stays as it is is not compiled again.
    found = [(name, n, change) for name in names for n, change in enumerate(changes_of(name, sources[name]))]
    everything = {OF_A_FILE * names.index(name) + n: change for name, n, change in found}
    assert len(everything) == len(found), "a file has more changes than OF_A_FILE"
    assert OF_A_FILE * len(names) <= MOST, "more files than changes.h has room for"
    arguments.harmless = listed_in(HARMLESS)
    stale = arguments.harmless - {change.key() for change, _ in everything.values()}
    for line in sorted(stale):
        print(f"harmless_mutations.txt has a change that there is not: {line}")
    if stale:
        return 1
    if not arguments.all and not arguments.record:
        return 0 if try_sample(Library(folder / "sample", sources), everything, program) else 1
    record = Record()
    files = arguments.file or (record.files() if arguments.record else names)
    arguments.asks_for = lambda change: (change.file in files and change.key() not in arguments.harmless and
                                         not (arguments.record and record.has(change)))
    headers = [sources[header] for header in HEADERS]
    results = Results(folder / "results.tsv", {name: digest(source, *headers) for name, source in sources.items()},
                      digest(*[(ROOT / file).read_text(encoding="utf-8") for file in MADE_OF]), arguments.again)
    try_all(arguments, Library(folder, sources), everything, program, results)
    if arguments.record:
        record = Record()  # another run may have written since
        for file in files:
            record.note(file, noticed_of(file, everything, results))
        record.write()
        for file in files:
            print(row_of(file, record.counts(file, arguments.harmless)))
        missing = [key for file in files for key in record.missing(file, arguments.harmless)]
        print("\n".join(f"survived: {key}" for key in missing))
        return 1 if missing else 0
    asked = [change for change, _ in everything.values() if change.file in files]
    return 1 if report(arguments, asked, results, time.monotonic() - begun) else 0


if __name__ == "__main__":
    sys.exit(main())
