"""The style sheet of a report's page, for light and dark and paper, and the few lines of script for its pointer."""

from __future__ import annotations

__all__ = ["COLOURS", "SCRIPT", "STYLE"]

# account -> its colour, in light and dark alike: useful work is green, waiting is warm or violet, what was lost is red.
COLOURS: dict[str, str] = {
    "compute": "#1f9d6b",
    "optimizer": "#55bd8f",
    "other": "var(--own)",
    "program": "#2fa87a",
    "data": "#e3a72f",
    "communication": "#8a74d6",
    "evaluation": "#3f87cf",
    "checkpoint": "#63b7d8",
    "start_up": "var(--start)",
    "recovery": "#d6453d",
    "repeated": "#9a2f5f",
    "undone": "#c2628f",
    "vacant": "#f0937f",
    "idle": "var(--idle)",
    "down": "var(--down)",
}

STYLE = (
    """\
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1a1f27; --soft: #667080; --line: #e4e7ec;
  --own: #a5d6bd; --start: #9aa7b9; --idle: #cfd5dd; --down: #7b8696; --loss: #2f6fde; --speed: #1f9d6b;
  --workers: #6a5acd; --bad: #cf3a32; }
@media (prefers-color-scheme: dark) { :root { --page: #101318; --card: #181c23; --ink: #e7eaf0; --soft: #95a0b1;
  --line: #2a303a; --own: #86bfa2; --start: #64748b; --idle: #3a4350; --down: #596475; --loss: #6ea1ff;
  --speed: #46c490; --workers: #a093f5; --bad: #ff6b61; } }
@media print { :root { --page: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #ccc;
  --own: #a5d6bd; --start: #9aa7b9; --idle: #cfd5dd;
  --down: #7b8696; --loss: #2f6fde; --speed: #1f9d6b; --workers: #6a5acd; --bad: #cf3a32; color-scheme: light; }
  .card { break-inside: avoid; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  "Helvetica Neue", "Noto Sans", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 24px; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 2px; }
p.about { color: var(--soft); font-size: 13px; margin: 0 0 12px; }
header p { margin: 4px 0 0; color: var(--soft); overflow-wrap: anywhere; }
.state { font-size: 12px; font-weight: 600; padding: 2px 9px; border-radius: 99px; border: 1px solid currentColor;
  vertical-align: 4px; margin-left: 8px; color: var(--soft); }
.state.finished { color: var(--speed); } .state.failed, .state.lost { color: var(--bad); }
.state.running { color: var(--loss); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 12px; margin: 20px 0 12px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; } .tile b { display: block; font-size: 21px; font-weight: 600; line-height: 1.25;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile span { color: var(--soft); font-size: 13px; } .tile.good b { color: var(--speed); }
.tile.bad b { color: var(--bad); }
.card { padding: 16px 18px; margin-top: 12px; }
svg { display: block; width: 100%; overflow: visible; } svg.plot { height: auto; }
svg.bar { border-radius: 5px; overflow: hidden; }
svg.pair .predicted { fill: var(--idle); } svg.pair .measured { fill: var(--loss); }
p.measure { font-size: 13px; margin: 14px 0 2px; overflow-wrap: anywhere; }
p.after { color: var(--soft); font-size: 13px; margin: 8px 0 0; overflow-wrap: anywhere; }
svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--line); } .axis, .notch { stroke: var(--soft); opacity: .6; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .band { opacity: .22; } .area { opacity: .14; }
.line.loss { stroke: var(--loss); } .band.loss, .dot.loss { fill: var(--loss); }
.line.speed { stroke: var(--speed); } .band.speed, .dot.speed { fill: var(--speed); }
.line.workers { stroke: var(--workers); } .area.workers { fill: var(--workers); }
.mark line { stroke: var(--bad); stroke-dasharray: 3 3; opacity: .65; } .mark circle { fill: var(--bad); }
.mark text { fill: #fff; font-size: 10px; font-weight: 600; text-anchor: middle; }
.mark.attempt line { stroke: var(--ink); stroke-dasharray: none; opacity: .5; }
.mark.brief line { stroke-dasharray: none; }
.mark.attempt text { fill: var(--ink); text-anchor: start; font-weight: 400; font-size: 11px; }
.cursor { stroke: var(--ink); opacity: .55; visibility: hidden; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 12.5px; }
td, th { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .n { text-align: right; white-space: nowrap; } td.wide { width: 46%; }
tr.total td { font-weight: 600; } td.soft { color: var(--soft); } .scroll { overflow-x: auto; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; vertical-align: -1px; }
.number { display: inline-block; min-width: 19px; height: 19px; line-height: 19px; padding: 0 5px; border-radius: 10px;
  background: var(--bad); color: #fff; font-size: 11px; font-weight: 600; text-align: center; }
#tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--card); font-size: 12.5px;
  padding: 4px 9px; border-radius: 6px; max-width: 340px; visibility: hidden; z-index: 9; }
.date { white-space: nowrap; }
@media screen and (max-width: 700px) { main { padding: 16px 10px 32px; } .card { padding: 14px 12px; overflow-x: auto; }
  svg.plot { min-width: 760px; } td.soft, th.soft { display: none; } td.wide { min-width: 150px; } }
footer { color: var(--soft); font-size: 12.5px; margin-top: 20px; }
"""
    + "".join(f".{account} {{ --fill: {colour}; }}\n" for account, colour in COLOURS.items())
    + (".fill { fill: var(--fill); shape-rendering: crispEdges; } .key { background: var(--fill); }\n")
)

SCRIPT = """\
const tip = document.getElementById("tip");
for (const plot of document.querySelectorAll("svg.plot")) {
  const rows = JSON.parse(plot.dataset.hover), cursor = plot.querySelector(".cursor");
  if (!rows.length) continue;
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), x = (event.clientX - box.left) * 960 / box.width;
    let low = 0, high = rows.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (rows[middle][0] <= x) low = middle; else high = middle;
    }
    const row = x - rows[low][0] > rows[high][0] - x ? rows[high] : rows[low];
    cursor.setAttribute("x1", row[0]); cursor.setAttribute("x2", row[0]); cursor.style.visibility = "visible";
    tip.textContent = row[1]; tip.style.visibility = "visible";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 16 + "px";
  });
  plot.addEventListener("pointerleave", () => { tip.style.visibility = cursor.style.visibility = "hidden"; });
}
"""
