// What the workers printed: of one or of all, filtered; read again when something was printed.

import { h, put } from "./dom.js";
import { ask } from "./live.js";
import { card } from "./run_parts.js";

const SOON_MS = 700;

export function logsCard(name) {
  const worker = h("select", { "aria-label": "worker", on: { change: () => load() } }, h("option", { value: "" }, "all workers"));
  const stream = h("select", { "aria-label": "stream", on: { change: () => load() } }, [["", "both streams"], ["stdout", "stdout"], ["stderr", "stderr"]].map(([value, text]) => h("option", { value }, text)));
  const find = h("input", { type: "search", placeholder: "Filter lines", "aria-label": "Filter lines", on: { input: () => later() } });
  const lines = h("div", { class: "lines", tabindex: "0", role: "log", "aria-live": "off" });
  const element = card("logs", "Logs", h("div", { class: "tools" }, worker, stream, find), lines);
  let timer = null, isSeen = false, isStale = true, workers = "", isClosed = false, turn = 0;
  const watcher = new IntersectionObserver((entries) => { isSeen = entries.at(-1).isIntersecting; if (isSeen && isStale) load(); }, { rootMargin: "200px" });
  watcher.observe(element);

  function later() { clearTimeout(timer); timer = setTimeout(load, SOON_MS); }

  async function load() {
    clearTimeout(timer);
    timer = null;
    isStale = false;
    const mine = ++turn, query = new URLSearchParams({ run: name, worker: worker.value, stream: stream.value, find: find.value });
    try {
      const found = await ask(`api/run/logs?${query}`);
      if (!isClosed && mine === turn) draw(found);
    } catch (error) { if (!isClosed) put(lines, h("p", { class: "bad" }, error.message)); }
  }

  function draw(found) {
    const names = found.workers.join(" ");
    if (names !== workers) {
      workers = names;
      const before = worker.value;
      put(worker, h("option", { value: "" }, "all workers"), found.workers.map((one) => h("option", { value: String(one) }, found.names[one] ?? `worker ${one}`)));
      worker.value = before;
    }
    const isAtEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 30;
    const isTagged = found.workers.length > 1 && !worker.value;
    put(lines, found.lines.length ? found.lines.map((line) => h("div", { class: line.stream }, isTagged || (line.stream === "stderr" && !stream.value) ? h("span", { class: "tag" }, isTagged ? `${found.names[line.worker] ?? line.worker}${line.stream === "stderr" ? " err" : ""}` : "err") : null, line.text || "\u00a0"))
      : h("p", { class: "about" }, find.value ? "no line has that text" : "nothing was printed"));
    if (isAtEnd || !find.value) lines.scrollTop = lines.scrollHeight;
  }

  return {
    element,
    changed() { isStale = true; if (isSeen && timer === null) timer = setTimeout(load, SOON_MS); },
    close() { isClosed = true; clearTimeout(timer); watcher.disconnect(); },
  };
}
