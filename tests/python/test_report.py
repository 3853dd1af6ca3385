"""`report`: a well-formed page whose numbers are those of metrics.jsonl, event files that TensorBoard reads, exit codes."""

import json
import random
import re
from html.parser import HTMLParser

import pytest

VOID = {"meta", "br", "link", "img", "input", "hr"}
UNITS = {"": 1, "%": 0.01, "us": 1e-6, "ms": 1e-3, "s": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Page(HTMLParser):
    """Elements must close in the order in which they opened; keeps the texts of table rows and of the tiles."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.tiles, self.titles, self.texts = [], [], {}, [], []
        self.name = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert not (set(dict(attributes)) & {"src", "href", "onload", "onclick"}), "the page stands for itself"
        assert tag != "script"
        if tag in VOID:
            return
        self.open.append((tag, dict(attributes).get("class", "")))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attributes):
        assert tag in ("path", "rect", "circle", "line"), tag

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        self.texts.append(data)
        if "td" in tags or "th" in tags:
            self.rows[-1][-1] += data
        if tags[-1:] == ["title"]:
            self.titles.append(data)
        if tags[-1:] == ["dt"]:
            self.name = data
            self.tiles[data] = ""
        if "dd" in tags and "tile" in [c for _, c in self.open]:
            self.tiles[self.name] += data

    def table(self, first):
        """Rows of the table whose head begins with `first`, as a list of dicts."""
        at = next(i for i, row in enumerate(self.rows) if row and row[0] == first)
        head, out = self.rows[at], []
        for row in self.rows[at + 1:]:
            if len(row) != len(head) or not re.fullmatch(r"\d+", row[0]):
                break
            out.append(dict(zip(head, row)))
        return out


def expect_shows(text, value):
    """`text` is `value` rounded to the digits that it has."""
    match = re.fullmatch(r"(-?[\d,]*\.?\d+)(e[-+]\d+)? ?(%|us|ms|s|B|KiB|MiB|GiB)?", text.strip())
    assert match, text
    digits, exponent, unit = match.group(1).replace(",", ""), match.group(2) or "", match.group(3) or ""
    scale = UNITS[unit] * float("1" + exponent)
    last = 10.0 ** -len(digits.partition(".")[2])
    # %g leaves trailing zeros out and counts significant digits: at most 3 of a time, 4 of a number.
    magnitude = abs(float(digits))
    if magnitude >= 1 and "." not in digits and (exponent or unit in ("us", "ms", "s")):
        last = max(last, 10.0 ** (len(digits.lstrip("-")) - 3))
    assert abs(float(digits) * scale - value) <= 0.5000001 * last * scale, f"{text} for {value}"


def make_run(folder, seed, steps=7):
    random.seed(seed)
    number = lambda low, high: random.uniform(low, high)
    lines = [{"kind": "evaluation", "step": 0, "accuracy": number(0, 0.3), "reward": number(0, 1), "length": number(3, 90)}]
    for step in range(1, steps + 1):
        seconds = {name: number(0.001, 2) for name in
                   ("plan", "counting", "trunk_forward", "waves", "trunk_backward", "optimizer", "generate", "score")}
        seconds["total"] = seconds["update"] = sum(list(seconds.values())[:6]) + number(0, 0.1)
        peaks = {phase: random.randrange(1 << 28, 1 << 30) for phase in "ABC"}
        lines.append({
            "kind": "step", "step": step, "loss": number(-2, 2), "pg_loss": number(-1, 1), "kl_loss": number(0, 1e-3),
            "entropy": number(0, 9), "aux_loss": 0.0, "z_loss": 0.0, "clip_fraction": number(0, 1), "grad_norm": number(0, 30),
            "lr": number(0, 1e-5), "schedule": "phased", "rows": {"logical": random.randrange(2000, 9000),
            "physical": random.randrange(500, 2000), "trunk": 3, "wave": 4}, "trunk_forwards": 2, "seconds": seconds,
            "peak_bytes": peaks, "predicted": {"seconds": 1.0, "peak_bytes": {p: b + 1000 for p, b in peaks.items()}},
            "reward": number(-1, 1), "accuracy": number(0, 1), "length": {"mean": number(2, 400), "max": 512},
            "groups_dropped": 0, "tokens_saved": random.randrange(10000)})
    lines.append({"kind": "evaluation", "step": steps, "accuracy": number(0.5, 1), "reward": number(0, 1), "length": 4.5})
    lines.append({"kind": "sample", "step": 0, "prompt": "<script>alert(1)</script>", "response": "</pre>&amp;",
                  "expected": "\"x\"", "reward": 0.0})
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"espalier": "1", "options": {"lr": 1e-6, "task": "<b>"}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def at(line, path):
    for name in path.split("/"):
        line = line.get(name) if isinstance(line, dict) else None
    return line


COLUMNS = {"reward": "reward", "accuracy": "accuracy", "loss": "loss", "KL": "kl_loss", "entropy": "entropy",
           "clipped": "clip_fraction", "grad norm": "grad_norm", "lr": "lr", "length": "length/mean",
           "computed": "rows/physical", "unshared": "rows/logical", "generate": "seconds/generate",
           "score": "seconds/score", "update": "seconds/total"}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_number_on_the_page_is_that_of_the_metrics(espalier, tmp_path, seed):
    lines = make_run(tmp_path / "run", seed)
    steps = [line for line in lines if line["kind"] == "step"]
    outcome = espalier("report", tmp_path / "run", "--json").json
    assert outcome["page"] == str(tmp_path / "run/report.html")
    page = Page((tmp_path / "run/report.html").read_text())
    rows = page.table("step")
    assert [int(row["step"]) for row in rows] == [step["step"] for step in steps]
    for row, step in zip(rows, steps):
        assert set(row) == {"step", *COLUMNS}
        for name, path in COLUMNS.items():
            expect_shows(row[name], at(step, path))
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    for row, line in zip(page.table("evaluated after step"), evaluations):
        expect_shows(row["accuracy"], line["accuracy"])
        expect_shows(row["reward"], line["reward"])
    expect_tiles(page, steps, evaluations)
    # The last loss in the tooltip of its curve.
    tooltip = next(t for t in page.titles if re.match(rf"step {steps[-1]['step']}: loss ", t))
    expect_shows(re.search(r"loss (\S+?),", tooltip).group(1), steps[-1]["loss"])


def expect_tiles(page, steps, evaluations):
    before, after = re.match(r"(.*%) . (.*%)step", page.tiles["accuracy, held out"]).groups()
    expect_shows(before, evaluations[0]["accuracy"])
    expect_shows(after, evaluations[-1]["accuracy"])
    whole = [at(s, "seconds/generate") + at(s, "seconds/score") + at(s, "seconds/update") for s in steps]
    expect_shows(re.match(r"(.*s)mean of", page.tiles["time of a step"]).group(1), sum(whole) / len(whole))
    logical, physical = (sum(at(s, f"rows/{kind}") for s in steps) for kind in ("logical", "physical"))
    share, run, unshared = re.match(r"(.*%)(.*) computed, (.*) without", page.tiles["tokens saved by sharing"]).groups()
    expect_shows(share, 1 - physical / logical)
    expect_shows(run, physical)
    expect_shows(unshared, logical)
    peak = max(at(s, f"peak_bytes/{phase}") for s in steps for phase in "ABC")
    shown, predicted, ratio = re.match(r"(.*B)predicted (.*B), measured is (.*%)", page.tiles["peak memory"]).groups()
    expect_shows(shown, peak)
    expect_shows(predicted, peak + 1000)
    expect_shows(ratio, peak / (peak + 1000))


def test_hostile_texts_stay_texts(espalier, tmp_path):
    make_run(tmp_path / "run", 4)
    espalier("report", tmp_path / "run")
    texts = Page((tmp_path / "run/report.html").read_text()).texts
    assert "<script>alert(1)</script>" in texts and "</pre>&amp;" in texts and "<b>" in texts


def test_what_train_prints_becomes_a_report(espalier, model_of, tmp_path):
    records = [{"prompt_ids": [1, 2, 3, 4, 5], "response_ids": [6 + i, 7, 8], "reward": float(i % 2)} for i in range(4)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    done = espalier("train", "--model", model_of("llama_untied"), "--rollouts", tmp_path / "rollouts.jsonl", "--epochs", 2,
                    "--gradients", tmp_path / "g.safetensors", "--json", "--quiet")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/train.json").write_text(done.stdout)
    outcome = espalier("report", tmp_path / "run", "--json").json
    rows = Page((tmp_path / "run/report.html").read_text()).table("step")
    assert len(rows) == 2
    for row, step in zip(rows, done.json["steps"]):
        for name in ("loss", "entropy", "reward", "grad norm", "computed", "update"):
            expect_shows(row[name], at(step, COLUMNS[name]))
    assert outcome["events"].startswith(str(tmp_path / "run/events.out.tfevents."))


def test_a_closed_loop_becomes_a_report(espalier, tmp_path):
    run = tmp_path / "run"
    espalier("grpo", "--out", run, "--steps", 2, "--warm-start-steps", 2, "--prompt-length", 64, "--n", 2,
             "--train-batch-size", 2, "--val-size", 2, "--test-freq", 1, "--save-freq", 0, "--quiet")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "events" not in espalier("report", run, "--json").json, "the run has its own event file"
    page = Page((run / "report.html").read_text())
    for row, step in zip(page.table("step"), [line for line in lines if line["kind"] == "step"], strict=True):
        for name in ("reward", "accuracy", "entropy", "length", "computed", "generate", "update"):
            expect_shows(row[name], at(step, COLUMNS[name]))
    picture = [line for line in lines if line["kind"] == "picture"][-1]["plan"]
    assert sum(title.startswith("B, wave: ") for title in page.titles) == sum(e["phase"] == "B" for e in picture["schedule"])
    for heading in ("Learning", "Time", "Memory", "Prefix trees and schedule", "Sample responses"):
        assert heading in page.texts


def test_tensorboard_reads_the_event_file(espalier, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator",
                                      reason="the package tensorboard is not installed")
    lines = make_run(tmp_path / "run", 5)
    assert "events" in espalier("report", tmp_path / "run", "--json").json
    events = accumulator.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    tags = {"actor/pg_loss": "pg_loss", "actor/entropy": "entropy", "actor/kl_loss": "kl_loss", "actor/lr": "lr",
            "actor/grad_norm": "grad_norm", "actor/pg_clipfrac": "clip_fraction", "critic/score/mean": "reward",
            "response_length/mean": "length/mean", "timing_s/gen": "seconds/generate",
            "timing_s/old_log_prob": "seconds/score", "timing_s/update_actor": "seconds/update",
            "perf/peak_bytes/B": "peak_bytes/B"}
    steps = [line for line in lines if line["kind"] == "step"]
    for tag, path in tags.items():
        found = events.Scalars(tag)
        assert [e.step for e in found] == [s["step"] for s in steps]
        for event, step in zip(found, steps):
            assert event.value == pytest.approx(at(step, path), rel=2**-24)  # one rounding to float32
    assert [e.step for e in events.Scalars("val/accuracy")] == [0, len(steps)]


def test_bad_input_has_its_exit_code_and_leaves_no_page(espalier, tmp_path):
    assert "no such folder" in espalier("report", tmp_path / "absent", expect=3).stderr
    espalier("report", expect=2)
    make_run(tmp_path / "run", 6)
    text = (tmp_path / "run/metrics.jsonl").read_text()
    (tmp_path / "run/metrics.jsonl").write_text(text.replace('"kind": "step", "step": 2', '"kind": "step", "step": "2"'))
    error = espalier("report", tmp_path / "run", "--json", expect=3).json["error"]
    assert error["where"].endswith("metrics.jsonl:3") and error["remedy"]
    assert not list((tmp_path / "run").glob("*.html"))
    (tmp_path / "run/metrics.jsonl").write_text(text)
    espalier("report", tmp_path / "run", "--out", tmp_path / "run/run.json/report.html", expect=2)
    espalier("report", tmp_path / "run", "--out", tmp_path / "other.html")
    assert (tmp_path / "other.html").is_file() and not (tmp_path / "run/report.html").exists()


def test_a_run_that_was_killed_while_writing_is_reported_up_to_there(espalier, tmp_path):
    make_run(tmp_path / "run", 7)
    with open(tmp_path / "run/metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "step": 8, "lo')
    espalier("report", tmp_path / "run")
    page = Page((tmp_path / "run/report.html").read_text())
    assert len(page.table("step")) == 7
    assert any("is incomplete" in text for text in page.texts)
