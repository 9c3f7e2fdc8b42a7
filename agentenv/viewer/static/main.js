// Which view is shown, and the head of the page, which follows the run.

import { ask, h, show } from "./dom.js";
import { compareView, episodeView } from "./episode.js";
import { listView } from "./list.js";

const POLL_MS = 1000;
let mark = null; // changes when the list does
let current = null; // the view: {update(state)} or nothing to update
let token = 0; // of the newest navigation: an older one that ends later shows nothing

const VIEWS = { "/": listView, "/episode": episodeView, "/compare": compareView };

async function navigate() {
  const mine = ++token;
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  document.getElementById("inspector").hidden = true;
  try {
    const view = VIEWS[path] || listView;
    const made = await view(Object.fromEntries(new URLSearchParams(query || "")), () => mine === token);
    if (mine !== token) return;
    current = made;
    mark = null;
    await poll();
  } catch (error) {
    if (mine !== token) return;
    current = {};
    show(h("p.warning", { role: "alert" }, error.message));
  }
}

async function poll() {
  try {
    const state = await ask("api/run");
    document.title = `${state.name} · agentenv`;
    const changed = state.mark !== mark;
    mark = state.mark;
    // The list before the curves, which take the server longer.
    if (changed && current && current.update) await current.update(state);
    head(state);
    return state.read_share < 1 ? 50 : POLL_MS;
  } catch (error) {
    mark = null;
    head({ name: "", warnings: [error.message], charts: [], badges: [] });
    return POLL_MS;
  }
}

async function follow() {
  const wait = document.hidden ? POLL_MS : await poll();
  setTimeout(follow, wait);
}

let headText = "";

function head(state) {
  const share = state.read_share === undefined ? 1 : state.read_share;
  const badges = state.badges || [
    state.state + (state.state === "finished" ? "" : progress(state)),
    `${state.episodes.toLocaleString("en")} episodes`,
    share < 1 ? `reading: ${Math.floor(share * 100)} %` : "",
    state.unreadable ? `${state.unreadable} lines are no episodes` : "",
    state.sandbox ? `sandbox: ${state.sandbox}` : "",
  ];
  const inList = !current || current.update !== undefined; // an episode has the page to itself
  const text = JSON.stringify([state.name, badges, state.warnings, state.charts, state.step, inList]);
  if (text === headText) return;
  headText = text;
  const open = localStorage.getItem("charts") !== "closed";
  document.getElementById("run").replaceChildren(
    h("h1", {}, h("a", { href: "#/" }, state.name || "agentenv view")),
    h("p.soft", {}, [state.path, state.started ? `started ${state.started}` : ""].filter(Boolean).join(" · ")),
    h("p", {}, badges.filter(Boolean).map((badge) => h("span.badge", {}, badge))),
    ...state.warnings.map((warning) => h("div.warning", { role: "alert" }, warning)),
    inList && state.charts.length ? charts(state, open) : "",
  );
}

function progress(state) {
  const step = state.step === null ? "" : `, step ${state.step}${state.max_steps ? `/${state.max_steps}` : ""}`;
  const age = state.written_s_ago === null || state.state === "running" ? "" : ", last written " + since(state.written_s_ago);
  return step + age;
}

function since(seconds) {
  if (seconds < 120) return "just now";
  return seconds < 7200 ? `${Math.floor(seconds / 60)} min ago` : `${Math.floor(seconds / 3600)} h ago`;
}

function charts(state, open) {
  const figures = state.charts.map((chart) =>
    h("figure", {}, h("figcaption", {}, h("b", {}, chart.title), h("span", {}, chart.text)),
      h("img.chart", { src: `api/chart/${chart.number}.svg?step=${state.step}`, alt: chart.title, loading: "lazy", width: 560, height: 236 })),
  );
  return h("details.curves", { open, toggle: (event) => localStorage.setItem("charts", event.target.open ? "open" : "closed") },
    h("summary", {}, "Curves"), h("div.strip", {}, figures));
}

addEventListener("hashchange", navigate);
navigate().then(() => setTimeout(follow, POLL_MS));
