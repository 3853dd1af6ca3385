// The style sheet of a report's page. Colours are named once, for light and for dark; print is light. The hues of
// series and phases differ in lightness too, so that they stay apart without colour.
#pragma once

namespace espalier {

inline constexpr const char* kPageStyle = R"css(
:root {
  color-scheme: light dark;
  --page: #fbfbf9; --panel: #ffffff; --text: #1d2327; --soft: #59636b; --rule: #dfe2e0; --grid: #e6e8e6;
  --c1: #12609c; --c2: #b4560f; --c3: #6d7880;
  --generate: #5b8c2a; --score: #a8890b; --plan: #9aa3a9; --counting: #7d6a5c; --phaseA: #12609c; --phaseB: #d98032;
  --phaseC: #138a83; --optimizer: #7c4d9e; --critic: #a33d5f; --other: #c3c8cb; --predicted: #b6bdc2;
  --prompt: #12609c; --shared: #6fa8d4; --response: #d98032; --onfill: #ffffff; --good: #2d7a36; --band: rgba(18,96,156,.12);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181b; --panel: #1c2226; --text: #e7eaec; --soft: #a3adb4; --rule: #333c42; --grid: #2c3439;
    --c1: #6db3ea; --c2: #eda262; --c3: #99a5ad;
    --generate: #93c25c; --score: #d8ba45; --plan: #7d8890; --counting: #b49c8a; --phaseA: #6db3ea; --phaseB: #e39350;
    --phaseC: #4cc3ba; --optimizer: #b68bd6; --critic: #e288a4; --other: #56616a; --predicted: #6a757d;
    --prompt: #6db3ea; --shared: #37729f; --response: #e39350; --onfill: #10151a; --good: #79c983;
    --band: rgba(109,179,234,.16);
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1.25rem 3rem; max-width: 74rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
}
h1 { margin: 0; font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 2.6rem 0 .8rem; padding-top: .7rem; border-top: 1px solid var(--rule); font-size: 1.2rem; }
h3 { margin: 1.6rem 0 .4rem; font-size: 1rem; }
p { margin: .4rem 0; }
.note, .sub { color: var(--soft); font-size: .875rem; }
.sub { margin: .25rem 0 0; }
.warning { margin: 1rem 0 0; padding: .5rem .8rem; border-left: 4px solid var(--c2); background: var(--panel); }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .95rem; line-height: 1.4; margin-bottom: .25rem; }
.last { float: right; font-variant-numeric: tabular-nums; font-weight: 600; }
.chart .note { display: block; min-height: 1.3em; }
.chart br { display: none; }
svg { display: block; overflow: visible; }
.chart svg { width: 100%; height: auto; }

.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .8rem; margin: 1.4rem 0 0; }
.tile { padding: .8rem 1rem; background: var(--panel); border: 1px solid var(--rule); border-radius: .5rem; }
.tile dt { color: var(--soft); font-size: .875rem; }
.tile dd { margin: 0; font-size: 1.65rem; font-weight: 600; line-height: 1.35; font-variant-numeric: tabular-nums; }
.tile dd.note { font-size: .8125rem; font-weight: 400; }
.before { color: var(--soft); font-weight: 400; font-size: 1.25rem; }

.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 1.5rem 1.75rem; }
.split { display: grid; grid-template-columns: minmax(0, 3fr) minmax(17rem, 2fr); gap: 1.5rem 2rem; align-items: start;
  margin-bottom: 1.75rem; }
.grid { stroke: var(--grid); fill: none; stroke-width: 1; }
.axis { fill: var(--soft); font-size: 11px; }
.name { font-size: 12px; font-weight: 600; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.faint { stroke-width: 1; opacity: .35; }
.band { fill: transparent; }
.band:hover { fill: var(--band); }
.line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); } .line.c3 { stroke: var(--c3); }
.line.c4 { stroke: var(--phaseC); } .line.c5 { stroke: var(--optimizer); }
text.c4, circle.c4 { fill: var(--phaseC); } text.c5, circle.c5 { fill: var(--optimizer); }
text.c1, circle.c1 { fill: var(--c1); } text.c2, circle.c2 { fill: var(--c2); } text.c3, circle.c3 { fill: var(--c3); }
.last .c1 { color: var(--c1); } .last .c2 { color: var(--c2); } .last .c3 { color: var(--c3); }
.generate { fill: var(--generate); background: var(--generate); } .score { fill: var(--score); background: var(--score); }
.plan { fill: var(--plan); background: var(--plan); } .counting { fill: var(--counting); background: var(--counting); }
.phaseA { fill: var(--phaseA); background: var(--phaseA); } .phaseB { fill: var(--phaseB); background: var(--phaseB); }
.phaseC { fill: var(--phaseC); background: var(--phaseC); }
.optimizer { fill: var(--optimizer); background: var(--optimizer); }
.values { fill: var(--counting); background: var(--counting); } .critic { fill: var(--critic); background: var(--critic); }
.other { fill: var(--other); background: var(--other); }
.predicted { fill: var(--predicted); background: var(--predicted); }
.prompt { fill: var(--prompt); background: var(--prompt); } .shared { fill: var(--shared); background: var(--shared); }
.response { fill: var(--response); background: var(--response); }
rect.fill:hover { opacity: .75; }
.onfill { fill: var(--onfill); font-size: 12px; font-weight: 600; pointer-events: none; }
.onB { fill: #1d1206; }
.key { white-space: nowrap; margin-right: .9rem; }
.swatch { display: inline-block; width: .75em; height: .75em; margin-right: .45em; border-radius: 2px; }

table { border-collapse: collapse; font-size: .875rem; }
th { font-weight: 400; text-align: left; }
thead th { color: var(--soft); border-bottom: 1px solid var(--rule); vertical-align: bottom; }
th, td { padding: .25rem .7rem .25rem 0; }
tbody tr + tr > * { border-top: 1px solid var(--grid); }
.numbers td, .numbers thead th + th { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.numbers { width: 100%; }
.numbers th + td, .numbers thead th + th { padding-left: .7rem; }
.numbers td:last-child, .numbers thead th:last-child { padding-right: 0; }
.memory caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
.memory td:nth-child(2), .memory thead th:nth-child(2) { width: 60%; text-align: left; }
.bar { display: flex; align-items: center; gap: .6rem; }
.bar span { flex: 1; }
.bar i { display: block; height: .7rem; border-radius: 2px; min-width: 2px; }
.bar b { flex: 0 0 11.5rem; font-weight: 400; }
.scroll { overflow-x: auto; }
.trees { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 1.25rem 1.75rem;
  margin: .8rem 0 1.4rem; }
.timeline { margin: 1rem 0 1.4rem; }

.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: .8rem; }
.card { padding: .5rem .8rem; background: var(--panel); border: 1px solid var(--rule); border-radius: .5rem; min-width: 0; }
.reward { float: right; font-size: .875rem; font-variant-numeric: tabular-nums; color: var(--soft); }
.reward.good { color: var(--good); font-weight: 600; }
pre, code { font: .8125rem/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { margin: .3rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; }
details[open] + .tail { display: none; }
.sample > details > summary, .card summary { color: var(--soft); font-size: .875rem; }
.fold { margin-top: 1.4rem; padding-top: .9rem; border-top: 1px solid var(--rule); }
.fold > summary { font-size: 1.1rem; font-weight: 600; margin-bottom: .8rem; }
.fold table + .scroll { margin-top: 1.2rem; }
.options th { white-space: nowrap; color: var(--soft); vertical-align: top; }
.options td { overflow-wrap: anywhere; }

@media (min-width: 46rem) and (max-width: 64rem) { .tiles { grid-template-columns: repeat(2, 1fr); } }
@media (max-width: 46rem) {
  .numbers td, .numbers th { padding-left: .35rem; padding-right: .35rem; }
  .numbers th:first-child { padding-left: 0; }
  .numbers thead th + th { white-space: normal; }
  body { padding: 1rem 1rem 2rem; }
  .split { grid-template-columns: minmax(0, 1fr); }
  .memory thead { display: none; }
  .memory tr > * { display: block; border: 0 !important; padding: .1rem 0; text-align: left !important; }
  .memory td:nth-child(2) { width: auto; padding-left: 0; }
  .memory td:nth-child(3):not(:empty)::after { content: " of the prediction"; color: var(--soft); }
  .memory td:nth-child(4):not(:empty)::after { content: " activations"; color: var(--soft); }
  .memory tr { display: block; padding: .5rem 0; border-top: 1px solid var(--grid); }
}
@media print {
  :root {
    color-scheme: light;
    --page: #ffffff; --panel: #ffffff; --text: #000000; --soft: #4a5258; --rule: #c8cccf; --grid: #e0e2e2;
    --c1: #12609c; --c2: #b4560f; --c3: #6d7880;
    --generate: #5b8c2a; --score: #a8890b; --plan: #9aa3a9; --counting: #7d6a5c; --phaseA: #12609c; --phaseB: #d98032;
    --phaseC: #138a83; --optimizer: #7c4d9e; --critic: #a33d5f; --other: #c3c8cb; --predicted: #b6bdc2;
    --prompt: #12609c; --shared: #6fa8d4; --response: #d98032; --onfill: #ffffff; --good: #2d7a36;
  }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  .tiles { grid-template-columns: repeat(4, 1fr); }
  .tile dd { font-size: 1.2rem; }
  .before { font-size: 1rem; }
  figure, .tile, .card, tr, .sample > .cards { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .fold, .fold::details-content { content-visibility: visible; height: auto; }
  .scroll { overflow: visible; }
  .fold .numbers { font-size: 6.5pt; }
}
)css";

}  // namespace espalier
