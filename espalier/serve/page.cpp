#include "espalier/serve/page.h"

namespace espalier::serve {

const std::string& page_text() {
  static const std::string text = R"page(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>espalier serve</title>
<style>
:root { color-scheme: light dark; --line: #8884; --strong: #2a7de1; --quiet: #666; }
@media (prefers-color-scheme: dark) { :root { --quiet: #9a9a9a; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 1.8rem 0 .4rem; }
p { margin: 0; color: var(--quiet); }
dl { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1.2rem 0; }
dt { color: var(--quiet); font-size: .85rem; } dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
td:first-child { white-space: nowrap; }
th { color: var(--quiet); font-weight: normal; white-space: nowrap; font-size: .85rem; } td.n, th.n { text-align: right; padding-right: 1.5rem; }
svg { display: block; } polyline { fill: none; stroke: var(--strong); stroke-width: 1.5; }
#key { display: none; margin: 1rem 0; }
@media (max-width: 68rem) {
  dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .6rem 1rem; }
  table { display: block; }
  tr { display: flex; flex-wrap: wrap; gap: .1rem 1.4rem; padding: .6rem 0; border-bottom: 1px solid var(--line); }
  tr.heads { display: none; }
  td, td.n { border: 0; padding: 0; text-align: left; }
  td { overflow-wrap: anywhere; }
  td:first-child, td.picture { flex-basis: 100%; }
  td:not(:first-child)::before { content: attr(data-head) " "; color: var(--quiet); font-size: .85rem; }
}
</style></head><body>
<h1>espalier serve</h1><p id="about">...</p>
<form id="key"><label>Key of this server: <input type="password" autocomplete="off"></label> <button>Show</button></form>
<dl id="facts"></dl>
<h2>Models in training</h2><table id="runs"></table>
<h2 id="shown">Samplers</h2><table id="samplers"></table>
<script>
const cell = (text, kind) => { const e = document.createElement(kind || "td"); e.textContent = text; return e; };
const count = n => Math.round(n).toLocaleString("en");
const bytes = n => n >= 1e9 ? (n / 1e9).toFixed(1) + " GB" : (n / 1e6).toFixed(0) + " MB";
const age = s => s < 90 ? Math.round(s) + " s" : s < 5400 ? Math.round(s / 60) + " min" : (s / 3600).toFixed(1) + " h";
function table(id, heads, rows) {
  const out = document.getElementById(id), head = document.createElement("tr");
  head.className = "heads";
  out.replaceChildren(head);
  for (const [name, numeric] of heads) { const e = cell(name, "th"); if (numeric) e.className = "n"; head.append(e); }
  for (const row of rows) {
    const line = document.createElement("tr");
    row.forEach((value, i) => {
      const e = value instanceof Element ? document.createElement("td") : cell(value);
      if (value instanceof Element) { e.append(value); e.className = "picture"; }
      if (heads[i][1]) e.className = "n";
      e.dataset.head = heads[i][0];
      line.append(e);
    });
    out.append(line);
  }
  if (!rows.length) { const e = cell("none"); e.colSpan = heads.length; const line = document.createElement("tr"); line.append(e); out.append(line); }
}
function curve(values) {
  const w = 180, h = 32, space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg"), line = document.createElementNS(space, "polyline");
  svg.setAttribute("width", w); svg.setAttribute("height", h);
  const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  line.setAttribute("points", values.map((v, i) => `${i * w / Math.max(1, values.length - 1)},${h - 2 - (v - low) / span * (h - 4)}`).join(" "));
  const title = document.createElementNS(space, "title");
  title.textContent = values.length ? `${values[0]} ... ${values[values.length - 1]}` : "";
  svg.append(title, line);
  return svg;
}
let key = "";
async function show() {
  try {
    const answer = await fetch("/api/v1/espalier/status", { headers: key ? { "X-API-Key": key } : {} });
    document.getElementById("key").style.display = answer.status === 401 ? "block" : "none";
    if (!answer.ok) throw new Error(answer.status === 401 ? "this server wants a key" : "status " + answer.status);
    const s = await answer.json(), rows = s.rows_computed + s.rows_shared;
    document.getElementById("about").textContent = `${s.version}, up ${age(s.uptime)}: ${s.models.join(", ")}`;
    const facts = [["tokens in training", count(rows)], ["of these saved", rows ? `${count(s.rows_shared)} (${(100 * s.rows_shared / rows).toFixed(1)} %)` : "-"],
      ["sampled tokens", count(s.sampled_tokens)], ["prompt tokens from the cache", s.prompt_tokens ? (100 * s.cached_tokens / s.prompt_tokens).toFixed(1) + " %" : "-"],
      ["waiting requests", count(s.waiting)], ["live samples", count(s.live_samples)], ["memory of the process", bytes(s.resident_bytes)]];
    document.getElementById("facts").replaceChildren(...facts.map(([name, value]) => { const e = document.createElement("div"); e.append(cell(name, "dt"), cell(value, "dd")); return e; }));
    table("runs", [["model"], ["base"], ["rank", 1], ["steps", 1], ["tokens", 1], ["shared", 1], ["last request"], ["last loss:sum", 1], ["loss:sum of calls"]], s.runs.sort((a, b) => a.ended - b.ended).map(r => [r.id, r.base, r.rank, count(r.steps),
      count(r.rows_computed + r.rows_shared), r.rows_shared ? (100 * r.rows_shared / (r.rows_computed + r.rows_shared)).toFixed(0) + " %" : "-", r.ended ? "ended" : age(r.idle) + " ago",
      r.loss.length ? r.loss[r.loss.length - 1].toPrecision(4) : "-", curve(r.loss)]));
    const shown = s.samplers.sort((a, b) => b.live - a.live || a.idle - b.idle).slice(0, 12);
    document.getElementById("shown").textContent = s.samplers.length > shown.length ? `Samplers: ${s.samplers.length}, of which these were used last` : "Samplers";
    table("samplers", [["sampler"], ["base"], ["checkpoint"], ["live requests", 1], ["last request"]], shown.map(r => [r.id, r.base, r.path || "-", r.live, age(r.idle) + " ago"]));
  } catch (error) { document.getElementById("about").textContent = String(error.message || error); }
  setTimeout(show, 2000);
}
document.getElementById("key").addEventListener("submit", event => { event.preventDefault(); key = event.target.querySelector("input").value; });
show();
</script></body></html>
)page";
  return text;
}

}  // namespace espalier::serve
