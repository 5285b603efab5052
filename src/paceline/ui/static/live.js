// What the server sends as it happens. The browser comes back by itself; then it gets only what it lacks.

const badge = document.getElementById("live");

function show(state, text) {
  badge.className = state;
  badge.textContent = text;
}

/** Listen to a stream; returns a function that ends it. */
export function listen(path, take) {
  let source = null, retry = null, is_closed = false;
  const open = () => {
    source = new EventSource(path);
    source.onopen = () => show("on", "live");
    source.onmessage = (event) => {
      show("on", "live");
      take(JSON.parse(event.data));
    };
    source.onerror = () => {
      show("off", "not connected");
      if (source.readyState === EventSource.CLOSED && !is_closed) retry = setTimeout(open, 3000);
    };
  };
  const close = () => { clearTimeout(retry); source?.close(); };
  // A page that nobody looks at costs nothing: it listens again when it is shown.
  const look = () => {
    close();
    if (document.visibilityState === "visible") open();
    else show("idle", "paused");
  };
  document.addEventListener("visibilitychange", look);
  if (document.visibilityState === "visible") open();
  return () => {
    is_closed = true;
    document.removeEventListener("visibilitychange", look);
    close();
    show("", "");
  };
}

/** Ask for JSON; errors have the server's words. */
export async function ask(path, options) {
  const answer = await fetch(path, options);
  const text = await answer.text();
  if (!answer.ok) throw new Error(text || answer.statusText);
  return JSON.parse(text);
}
