"""Every performance target on a CPU, measured: a ratio between two things that take turns, the median over rounds and their spread.

    python bench/targets.py run [--rounds 5] [--minutes 40] [--only NAME,...] [--quick] [--build build]
    python bench/targets.py report

A target counts as met by its median over at least five rounds; with fewer it is "too few rounds", whatever the figure is.

`run` lets `espalier bench` fit its cost model to this machine, then goes through the targets by importance, as far as --minutes
allow, prints a table and appends a line for each to bench/results/targets-MACHINE-COMMIT.jsonl as it ends. `report` writes
docs/performance.md and the figures in README.md with what was measured last of each target.
--quick runs tiny cells, to see whether everything works; its figures mean nothing and are not kept.
Needs `make` and, for the benchmarks in C++, `ninja -C build benches allocations_test`.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import compare_dense
import grid
from compare_dense import workload

ROOT = grid.ROOT
LEAST_ROUNDS = 5
STOCK_SHARED = ["packed_sdpa", "two_call_sdpa", "phased_autograd"]


class Context:
    """What the measurements share: options, a model for each size, cells of `espalier bench` that several targets read."""

    def __init__(self, options, folder):
        self.options, self.folder, self.rounds = options, folder, options.rounds
        self.build, self.quick = options.build, options.quick
        self.models, self.cells, self.steps, self.printed = {}, {}, {}, {}

    def model(self, hidden=512, layers=4):
        if self.quick:
            hidden, layers = 64, 2
        if (hidden, layers) not in self.models:
            heads = max(2, hidden // 64)
            shape = dict(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=max(1, heads // 4), head_dim=64)
            self.models[hidden, layers] = workload.write_model(self.folder / f"model-{hidden}-{layers}", **shape)
        return self.models[hidden, layers]

    def tokens(self, count):
        return max(4, count // 32) if self.quick else count

    def program(self, *words):
        return compare_dense.run_json([self.build / "espalier", *words, "--json", "--quiet"])

    def benchmark(self, name, *words):
        """The objects that a benchmark in C++ prints; run once whoever asks."""
        if (name, words) in self.printed:
            return self.printed[name, words]
        done = subprocess.run([str(self.build / "bench" / name), *map(str, words)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-500:]}")
        self.printed[name, words] = [json.loads(line) for line in done.stdout.splitlines()]
        return self.printed[name, words]

    def compare(self, prompt, response, n, baselines, schedules, hidden=512, layers=4):
        prompt, response = self.tokens(prompt), self.tokens(response)
        options = argparse.Namespace(rounds=self.rounds, threads=self.options.threads, baselines=baselines, schedules=schedules, seed=0,
                                     program=self.build / "espalier")
        return compare_dense.measure_cell((prompt, response, n), options, self.model(hidden, layers), self.folder)

    def cell(self, prompt, response, n, hidden=512, layers=4, budget=None, lora_rank=None):
        """A cell of `espalier bench`, measured once whoever asks."""
        key = (prompt, response, n, hidden, layers, budget, lora_rank)
        if key not in self.cells:
            words = ["--splits", f"{self.tokens(prompt)}/{self.tokens(response)}", "--n", n, "--repetitions", self.rounds]
            words += ["--token-budget", budget] if budget else []
            words += ["--lora-rank", lora_rank] if lora_rank else []
            self.cells[key] = self.program("bench", "--model", self.model(hidden, layers), *words, "--profile")["cells"][0]
        return self.cells[key]

    def updates(self, prompt, response, n, schedule):
        """Second updates of `espalier train`, one process a round, measured once whoever asks."""
        key = (prompt, response, n, schedule)
        if key not in self.steps:
            rollouts = workload.write_rollouts(self.folder / "updates.jsonl", self.tokens(prompt), self.tokens(response), n)
            self.steps[key] = [compare_dense.espalier_update(schedule, self.model(), rollouts, self.options.threads, self.folder,
                                                             self.build / "espalier") for _ in range(self.rounds)]
        return self.steps[key]

    def fit(self):
        """Lets `espalier bench` hold the cost model to steps of this machine, of other shapes than those measured below."""
        splits = ",".join(f"{self.tokens(p)}/{self.tokens(r)}" for p, r in ((256, 768), (512, 512), (768, 256)))
        self.program("bench", "--model", self.model(), "--splits", splits, "--n", 2, "--repetitions", self.rounds)


class Values(list):
    """A number for each round."""

    def __init__(self, values):
        super().__init__(values)
        self.median, self.low, self.high, self.rounds = statistics.median(self), min(self), max(self), len(self)


class Spread:
    """What a benchmark in C++ says of its own rounds."""

    def __init__(self, spread, rounds):
        self.median, self.low, self.high, self.rounds = spread["median"], spread["min"], spread["max"], rounds


class Counted(Values):
    """What one run settles: a count, or a time far from its bound."""

    def __init__(self, value):
        super().__init__([value])
        self.rounds = LEAST_ROUNDS


def ratios(above, below, unit=1.0):
    """Seconds over seconds, round by round: the two of a round ran one after the other, on the same machine at the same time."""
    return Values(a / b / unit for a, b in zip(above, below, strict=True))


def runs_of_auto(found):
    """Runs of auto in every round; where its plan is another schedule's row for row, runs of the two are runs of one thing."""
    same, runs = found["same_plan"], found["runs"]
    return runs["auto"] if same is None else [(a + b) / 2 for a, b in zip(runs["auto"], runs[same], strict=True)]


def auto_over_best(found):
    """(schedule with the best median, its seconds over auto's): exactly 1 where that schedule's plan is auto's."""
    runs = {schedule: found["runs"][schedule] for schedule in ("dense", "packed", "phased")}
    if found["same_plan"] is not None:
        runs[found["same_plan"]] = runs_of_auto(found)
    best = min(runs, key=lambda schedule: statistics.median(runs[schedule]))
    return best, ratios(runs[best], runs_of_auto(found))


def cell_name(prompt, response, n):
    return f"{prompt}/{response} N={n}"


# Each measurement yields (name of the case, values of its rounds).

def own_dense(context, hidden, prompt=512, response=512, n=4):
    found = context.compare(prompt, response, n, ["transformers_dense"], ["dense"], hidden)
    seconds = found["seconds"]
    yield f"hidden {hidden}, {cell_name(prompt, response, n)}", ratios(seconds["transformers_dense"]["each"], seconds["espalier dense"]["each"])


def auto_against_stock(context, cells):
    for prompt, response, n in cells:
        seconds = context.compare(prompt, response, n, STOCK_SHARED, ["auto"])["seconds"]
        best = min(STOCK_SHARED, key=lambda name: seconds[name]["median"])
        yield f"{cell_name(prompt, response, n)} ({best})", ratios(seconds[best]["each"], seconds["espalier auto"]["each"])


def of_ceiling(context, cells, budget=None):
    for cell in cells:
        found = context.cell(*cell, budget=budget)
        name = cell_name(*cell) + (f", waves of {budget} rows" if budget else "")
        yield name, ratios(found["runs"]["dense"], found["runs"]["phased"], found["ceiling"])


def auto_of_best(context, cells):
    for cell in cells:
        best, shares = auto_over_best(context.cell(*cell))
        yield f"{cell_name(*cell)} ({best})", shares


def regret(context):
    """The worst cell of a grid for each of two small models, where overheads decide."""
    for hidden, layers in ((128, 2), (256, 4)):
        shares = {}
        for prompt, response in ((1024, 256), (341, 683), (64, 192), (900, 20)):
            for n in (1, 2, 8, 32):
                _, shares[cell_name(prompt, response, n)] = auto_over_best(context.cell(prompt, response, n, hidden, layers))
        worst = min(shares, key=lambda name: shares[name].median)
        yield f"hidden {hidden}, {layers} layers: worst of {len(shares)} cells, {worst}", shares[worst]


def phased_of_packed(context, cells):
    for cell in cells:
        found = context.cell(*cell)
        yield cell_name(*cell), ratios(found["runs"]["packed"], found["runs"]["phased"])


def flop_rate(context, cells):
    for cell in cells:
        found = context.cell(*cell)
        for schedule in ("dense", "auto"):
            flops, rates = found["schedules"]["flops"][schedule], found["schedules"]["product_flops_per_second"][schedule]
            yield (f"{cell_name(*cell)} {schedule}",
                   Values(flops / seconds / rate for seconds, rate in zip(found["runs"][schedule], rates, strict=True)))


def everything_else(context, cells):
    for cell in cells:
        for schedule in ("dense", "auto"):
            shares = []
            for step in context.updates(*cell, schedule):
                parts = step["profile"]["seconds"]
                products = sum(seconds for name, seconds in parts.items() if name in ("matrix products", "attention", "head"))
                shares.append(1 - products / sum(parts.values()))
            yield f"{cell_name(*cell)} {schedule}", Values(shares)


def adapters_over_all(context, cells):
    """Two runs of `bench`, one after the other: each round's seconds are held to the rate of products beside it."""
    for cell in cells:
        work = {}
        for rank in (None, 16):
            found = context.cell(*cell, hidden=2048, layers=2, lora_rank=rank)
            rates = found["schedules"]["product_flops_per_second"]["auto"]
            work[rank] = [seconds * rate for seconds, rate in zip(found["runs"]["auto"], rates, strict=True)]
        yield f"hidden 2048, rank 16, {cell_name(*cell)}", ratios(work[16], work[None])


def predicted_seconds(context, cells):
    """A run is held to the rate of matrix products just before and after it, not to that of another day."""
    for cell in cells:
        found = context.cell(*cell)
        for schedule in ("dense", "phased"):
            predicted, rates = (found["schedules"][name][schedule] for name in ("predicted_seconds", "product_flops_per_second"))
            fitted = "" if found["fitted_steps"] else ", cost model not fitted"
            yield (f"{cell_name(*cell)} {schedule}{fitted}",
                   Values(predicted * found["profile_flops_per_second"] / rate / seconds
                          for seconds, rate in zip(found["runs"][schedule], rates, strict=True)))


def predicted_bytes(context, cells):
    for cell in cells:
        for schedule in ("dense", "auto"):
            peaks = [(step["peak_bytes"], step["predicted"]["peak_bytes"]) for step in context.updates(*cell, schedule)]
            yield f"{cell_name(*cell)} {schedule}", Values(max(measured.values()) / max(predicted.values()) for measured, predicted in peaks)


def attention(context, what, beside=None, dtype="float32"):
    """`beside`: another ratio of the same turns, named in the case."""
    rounds = context.rounds + 4
    for row in context.benchmark("attention_bench", rounds, 2 if context.quick else 9, dtype):
        note = f" (ATen's at {row[beside]['median']:.2f} of the multiply-add peak)" if beside else ""
        half = "bfloat16, " if dtype == "bfloat16" else ""
        yield f"{half}{row['case']}, head size {row['head_dim']}{note}", Spread(row[what], rounds)


def fused_head(context):
    sizes = (64, 64, 512) if context.quick else (2048, 512, 32768)
    rounds = context.rounds + 2
    for row in context.benchmark("head_bench", rounds, *sizes):
        yield "{rows} rows, width {width}, vocabulary {vocabulary}".format(**row), Spread(row["materialised_over_fused"], rounds)


def widened_products(context):
    rounds = context.rounds + 2
    for row in context.benchmark("product_bench", rounds):
        yield "{case}: {rows} rows, {inputs} to {outputs}".format(**row), Spread(row["widened_over_float32"], rounds)


def product_rows(context):
    return context.benchmark("own_product_bench", context.rounds, 1, "Float")


def layer_name(row):
    return "{rows} rows, {inputs} to {outputs}".format(**row)


def products_of_peak(context, rows, form="forward"):
    """On one thread."""
    for row in product_rows(context):
        if (row["rows"], row["form"]) == (rows, form):
            yield layer_name(row) + (", weights packed before" if form == "forward_held" else ""), Spread(row["own_over_peak"], context.rounds)


def products_of_library(context):
    """On one thread, from 8 rows on; the slowest layer of each form."""
    slowest = {}
    for row in product_rows(context):
        if row["rows"] >= 8:
            slowest[row["form"]] = min(slowest.get(row["form"], row), row, key=lambda row: row["own_over_library"]["median"])
    for form, row in slowest.items():
        yield f"{form}: {layer_name(row)}", Spread(row["own_over_library"], context.rounds)


def planning(context):
    count = 1000 if context.quick else 100000
    row = context.benchmark("planning_bench", count, 4096, 8, context.rounds)[0]
    yield f"{count} rollouts of 4k tokens", Counted(row["grouping_seconds"] + row["planning_seconds"])


def planning_share(context, cells):
    for cell in cells:
        yield cell_name(*cell), Values(step["seconds"]["plan"] / step["seconds"]["total"] for step in context.updates(*cell, "auto"))


def reading(context, mebibytes=64):
    path, draw = context.folder / "reading.jsonl", random.Random(0)
    ids = lambda count: [draw.randrange(150000) for _ in range(count)]
    target = (2 if context.quick else mebibytes) << 20
    with open(path, "w") as out:
        while out.tell() < target:
            prompt = ids(1024)
            for _ in range(8):
                out.write(json.dumps({"prompt_ids": prompt, "response_ids": ids(2048), "reward": draw.random()}) + "\n")
    rates = [path.stat().st_size / 1e6 / context.program("inspect", path, "--threads", 1)["seconds"] for _ in range(context.rounds)]
    yield f"inspect of {path.stat().st_size >> 20} MiB, one thread, trees and statistics included", Values(rates)
    path.unlink()


def allocations(context):
    done = subprocess.run([str(context.build / "tests/unit/allocations/allocations_test")], capture_output=True, text=True)
    yield "blocks of 64 KiB or more in steps 2 to 4, float32 and float64", Counted(0 if done.returncode == 0 else 1)


SIXTHS = [(256, 1280, 8), (768, 768, 8), (1280, 256, 8), (1280, 256, 2), (768, 768, 2), (256, 1280, 2), (640, 128, 32), (128, 640, 32),
          (320, 64, 128)]
WAVES = [(1280, 256, 8), (256, 1280, 2)]
UPDATES = [(1280, 256, 8)]
STOCK_CELLS = [(1707, 341, 8), (1707, 341, 2), (341, 1707, 4), (4096, 128, 16)]


class Target:
    def __init__(self, name, what, limit, measure, minutes, most=False, both=False):
        """`minutes`: a number, or the name of the target that has measured the same cells before."""
        self.name, self.what, self.limit, self.measure, self.minutes, self.most, self.both = name, what, limit, measure, minutes, most, both

    def expected_minutes(self, done):
        if isinstance(self.minutes, str):
            return 0 if self.minutes in done else next(t for t in TARGETS if t.name == self.minutes).minutes
        return self.minutes

    def bound(self):
        return f"1 +- {self.limit}" if self.both else f"{'<=' if self.most else '>='} {self.limit}"

    def met(self, value):
        if self.both:
            return abs(value - 1) <= self.limit
        return value <= self.limit if self.most else value >= self.limit


# By importance; `minutes` on two quiet cores at five rounds.
TARGETS = [
    Target("dense-512", "speed of own dense over transformers' best dense form, whole updates", 1.6, lambda c: own_dense(c, 512), 2.5),
    Target("ceiling", "speed-up of phased over own dense, as a fraction of the FLOP ceiling", 0.95, lambda c: of_ceiling(c, SIXTHS[:4]), 6.7),
    Target("auto", "speed of auto over the best of dense, packed, phased", 0.98, lambda c: auto_of_best(c, SIXTHS[:4]), "ceiling"),
    Target("packed", "speed of phased over packed", 0.97, lambda c: phased_of_packed(c, SIXTHS[:4]), "ceiling"),
    Target("flops", "FLOP rate of a step over that of a matrix product", 0.9,
           lambda c: flop_rate(c, SIXTHS[:4]), "ceiling"),
    Target("stock", "speed of auto over the best stock shared form (packed 4-D mask, two calls, phased under autograd), whole updates", 1.3,
           lambda c: auto_against_stock(c, STOCK_CELLS), 12.5),
    Target("attention-forward", "speed of shared-prefix attention over ATen's flash kernel, forward", 1.0,
           lambda c: attention(c, "forward_over_aten"), 0.8),
    Target("attention-backward", "speed of shared-prefix attention over ATen's flash kernel, backward", 1.5, lambda c: attention(c, "backward_over_aten", beside="aten_backward_over_peak"),
           "attention-forward"),
    Target("attention-bfloat16", "speed of shared-prefix attention over ATen's flash kernel, forward", 1.0,
           lambda c: attention(c, "forward_over_aten", dtype="bfloat16"), 0.8),
    Target("attention-bfloat16-backward", "speed of shared-prefix attention over ATen's flash kernel, backward", 1.5,
           lambda c: attention(c, "backward_over_aten", dtype="bfloat16"), "attention-bfloat16"),
    Target("attention-rate", "FLOP rate of attention over that of a matrix product, forward", 0.7,
           lambda c: attention(c, "forward_over_product"), "attention-forward"),
    Target("attention-rate-backward", "FLOP rate of attention over that of a matrix product, backward", 0.7, lambda c: attention(c, "backward_over_product"), "attention-forward"),
    Target("bfloat16", "rate of bfloat16 products without bfloat16 instructions over that of float32", 0.8, widened_products, 0.8),
    Target("products-8", "rate of own products over the multiply-add peak", 0.7, lambda c: products_of_peak(c, 8, "forward_held"), 1.6),
    Target("products-64", "rate of own products over the multiply-add peak", 0.9, lambda c: products_of_peak(c, 64), "products-8"),
    Target("products-2048", "rate of own products over the multiply-add peak", 0.95, lambda c: products_of_peak(c, 2048), "products-8"),
    Target("products-library", "rate of own products over the library's", 1.0, products_of_library, "products-8"),
    Target("head", "speed of the fused head over materialised logits", 1.0, fused_head, 0.5),
    Target("rest", "fraction of a step outside products, attention and head", 0.1, lambda c: everything_else(c, UPDATES), 2.5, most=True),
    Target("planning", "seconds of planning one very large step", 2, planning, 1, most=True),
    Target("planning-share", "fraction of a step spent on planning", 0.01, lambda c: planning_share(c, UPDATES), "rest", most=True),
    Target("reading", "MB/s of JSON Lines read by one core", 200, reading, 1),
    Target("memory", "peak memory, measured over predicted", 0.05, lambda c: predicted_bytes(c, UPDATES), "rest", both=True),
    Target("prediction", "predicted over measured seconds of a gradient", 0.1,
           lambda c: predicted_seconds(c, SIXTHS[:4]), "ceiling", both=True),
    Target("allocations", "large heap blocks allocated in steady state", 0, allocations, 0.2, most=True),
    Target("regret", "speed of auto over the best of dense, packed, phased", 0.98, regret, 3.3),
    Target("ceiling-waves", "speed-up of phased over own dense, as a fraction of the FLOP ceiling", 0.95, lambda c: of_ceiling(c, WAVES, budget=512), 3.3),
    Target("ceiling-more", "speed-up of phased over own dense, as a fraction of the FLOP ceiling", 0.95, lambda c: of_ceiling(c, SIXTHS[4:]), 9.2),
    Target("auto-more", "speed of auto over the best of dense, packed, phased", 0.98, lambda c: auto_of_best(c, SIXTHS[4:]), "ceiling-more"),
    Target("lora", "seconds of a gradient of LoRA adapters over one of all weights", 0.72, lambda c: adapters_over_all(c, [(1024, 128, 8)]), 3, most=True),
    Target("dense-256", "speed of own dense over transformers' best dense form, whole updates", 1.0, lambda c: own_dense(c, 256), 1.7),
]


def results_of(target, context):
    """A row for every case: the median over the rounds and their spread."""
    for case, values in target.measure(context):
        yield {"name": target.name, "target": target.what, "bound": target.bound(), "case": case, "measured": values.median,
               "spread": [values.low, values.high], "rounds": values.rounds, "met": target.met(values.median)}


def what_of(row):
    """What a row measures, in today's words."""
    return next((target.what for target in TARGETS if target.name == row["name"]), row["target"])


def counts(row):
    return row["met"] and row["rounds"] >= LEAST_ROUNDS


def line(row):
    low, high = row["spread"]
    verdict = "yes" if counts(row) else "no" if not row["met"] else "too few rounds"
    return f"| {what_of(row)} | {row['case']} | {row['bound']} | {row['measured']:.3g} | {low:.3g} .. {high:.3g} | {verdict} |"


HEAD = ["| target | case | bound | measured | spread | met |", "| --- | --- | ---: | ---: | ---: | --- |"]


def summary(measured):
    """A row for each target: how many of its cases are met, and the range of their medians."""
    out = ["| target | bound | measured | cases met |", "| --- | ---: | ---: | ---: |"]
    by_target = {}
    for row in measured:
        by_target.setdefault(what_of(row), []).append(row)
    for what, rows in by_target.items():
        values = sorted(row["measured"] for row in rows)
        between = f"{values[0]:.3g}" if len(values) == 1 else f"{values[0]:.3g} .. {values[-1]:.3g}"
        few = sum(row["met"] and not counts(row) for row in rows)
        out.append(f"| {what} | {rows[0]['bound']} | {between} | {sum(map(counts, rows))} of {len(rows)}{f', {few} with too few rounds' if few else ''} |")
    return out


def run(options):
    machine = grid.machine()
    names = options.only.split(",") if options.only else [target.name for target in TARGETS]
    unknown = set(names) - {target.name for target in TARGETS}
    if unknown:
        sys.exit(f"no target {', '.join(sorted(unknown))}; there are {', '.join(target.name for target in TARGETS)}")
    file = grid.RESULTS / f"targets-{re.sub('[^A-Za-z0-9]+', '', machine['cpu'])}-{machine['commit']}.jsonl"
    about = {"machine": machine, "threads": options.threads, "date": time.strftime("%Y-%m-%d"), "seconds_since_1970": int(time.time()),
             "command": re.sub(r" --build \S+", "", " ".join(["bench/targets.py", *sys.argv[1:]])), "torch": workload.torch.__version__,
             "transformers": workload.transformers.__version__}
    start, done = time.monotonic(), set()

    def keep(row):
        """At once: what was measured stays if the rest is broken off."""
        if options.quick:
            return
        grid.RESULTS.mkdir(parents=True, exist_ok=True)
        with open(file, "a") as out:
            out.write(json.dumps({**about, **row}) + "\n")

    print(*HEAD, sep="\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="espalier-targets-") as name:
        context = Context(options, Path(name))
        if not options.quick and {"prediction", "auto"} & set(names):
            context.fit()
        for target in TARGETS:
            if target.name not in names:
                continue
            spent = (time.monotonic() - start) / 60
            if spent + target.expected_minutes(done) * options.rounds / LEAST_ROUNDS > options.minutes:
                left_out = f"{spent:.0f} of {options.minutes:g} minutes were spent"
                print(f"| {target.what} | left out: {left_out} | {target.bound()} | | | |", flush=True)
                keep({"name": target.name, "target": target.what, "skipped": left_out})
                continue
            done.add(target.name)
            try:
                for row in results_of(target, context):
                    print(line(row), flush=True)
                    keep(row)
            except (RuntimeError, OSError, KeyError, SystemExit) as error:
                print(f"| {target.what} | failed: {error} | {target.bound()} | | | |", flush=True)
                keep({"name": target.name, "target": target.what, "skipped": f"failed: {error}"})
    print(f"\n{(time.monotonic() - start) / 60:.1f} minutes", "" if options.quick else f"-> {file}", file=sys.stderr)


def newest_rows():
    """Of every target the rows that were measured last, on the machine that measured last, whichever commits those were."""
    rows = [json.loads(text) for path in grid.RESULTS.glob("targets-*.jsonl") for text in path.read_text().splitlines()]
    rows.sort(key=lambda row: row["seconds_since_1970"])
    rows = [row for row in rows if row["machine"]["cpu"] == rows[-1]["machine"]["cpu"]]
    last = {row["name"]: row["seconds_since_1970"] for row in rows}
    order = {target.name: place for place, target in enumerate(TARGETS)}
    rows = [row for row in rows if row["seconds_since_1970"] == last[row["name"]] and row["name"] in order]
    for row in rows:
        if "measured" in row:  # the bound is today's
            target = TARGETS[order[row["name"]]]
            row["bound"], row["met"] = target.bound(), target.met(row["measured"])
    return sorted(rows, key=lambda row: order[row["name"]])


def section():
    rows = newest_rows()
    if not rows:
        return []
    measured = [row for row in rows if "measured" in row]
    left_out = sorted({row["name"] for row in rows} - {row["name"] for row in measured})
    met = sum(counts(row) for row in measured)
    about = (f"{met} of {len(measured)} cases are met, on {rows[-1]['machine']['cpu']} with {rows[-1]['threads']} threads, in float32 unless the case "
             f"says otherwise, with torch {rows[-1]['torch']} and transformers {rows[-1]['transformers']}. The model has hidden size 512, 4 layers, "
             "8/2 heads of 64 and a vocabulary of 8192 unless the case says otherwise. The two sides of a ratio run alternately. A case is met if its "
             f"median over at least {LEAST_ROUNDS} rounds is within the bound. \"Measured\" is the range of these medians over the cases of a target. "
             "Predicted seconds use the rate of matrix products just before and after each run. If the plan of auto equals that of another "
             "schedule, the runs of both count for each of them. The first bound divided by the measured speed is the factor by which a dense step "
             "would have to exceed its present FLOP rate, which is already about that of a matrix product.")
    commands = dict.fromkeys((row["command"], row["machine"]["commit"], row["date"]) for row in rows)
    text = [*textwrap.wrap(about, 140), "", *summary(measured), "", "Commands:", "",
            *(f"- commit {commit}, {date}: `{grid.PYTHON} {command}`" for command, commit, date in commands)]
    if left_out:
        text += ["", f"Not measured: {', '.join(left_out)}."]
    cases = "\"Measured\" is the median of a case over its rounds, \"spread\" the range of single rounds."
    return ["## Targets", "", *text, "", "### Every case", "", cases, "", *HEAD, *map(line, measured), ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--only", default="", help="names of targets: " + ", ".join(target.name for target in TARGETS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--threads", type=int, default=compare_dense.usable_threads())
    options = parser.parse_args()
    run(options) if options.what == "run" else grid.report(section())


if __name__ == "__main__":
    main()
