// Which page is shown: the part of the address behind # names it.

import { h, put } from "./dom.js";
import { ask } from "./live.js";
import { compare } from "./compare.js";
import { overview } from "./overview.js";
import { pool } from "./pool.js";
import { run } from "./run.js";
import { sweep } from "./sweep.js";

const page = document.getElementById("page"), where = document.getElementById("where");
let close = () => {}, about = null;

function route() {
  close();
  page.replaceChildren();
  const [, kind, ...rest] = location.hash.split("/");
  const name = rest.map(decodeURIComponent).join("/");
  document.title = "Paceline";
  window.scrollTo(0, 0);
  const named = { run, pool, sweep }[kind];
  if (named) {
    put(where, h("a", { href: "#/" }, "Runs"), h("span", { class: "sep" }, "/"), h("span", { class: "name" }, name));
    close = named(page, name, about);
  } else if (kind === "compare") {
    put(where, h("a", { href: "#/" }, "Runs"), h("span", { class: "sep" }, "/"), "Compare");
    close = compare(page, rest.map(decodeURIComponent));
  } else {
    put(where, h("span", { class: "root", title: about.root }, about.root));
    close = overview(page, about);
  }
}

try {
  about = await ask("api/about");
  window.addEventListener("hashchange", route);
  route();
} catch (error) {
  put(page, h("p", { class: "empty bad" }, String(error.message)));
}
