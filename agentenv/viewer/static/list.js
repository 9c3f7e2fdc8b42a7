// The list of episodes: filters, order and page stand in the address, so that a link or Back brings them again.

import { ask, compareLink, episodeLink, h, number, outcome, show } from "./dom.js";

const COLUMNS = [
  ["", "phase", (row) => row.phase],
  ["step", "step", (row) => number(row.step), "training step that used it"],
  ["task_id", "task", (row) => row.task_id],
  ["reward", "reward", (row) => number(row.reward)],
  ["outcome", "outcome", outcome],
  ["end_reason", "end", (row) => row.end_reason],
  ["start_version", "version", (row) => number(row.start_version), "version of the weights when it started"],
  ["staleness", "stale", (row) => number(row.staleness), "weight updates between its start and its use"],
  ["turns", "turns", (row) => number(row.turns)],
  ["action_tokens", "tokens", (row) => number(row.action_tokens), "tokens that the policy wrote"],
  ["duration_s", "seconds", (row) => number(row.duration_s, 1)],
];
const NUMBERS = new Set(["step", "reward", "start_version", "staleness", "turns", "action_tokens", "duration_s"]);
const RANGES = [["reward", "reward"], ["step", "step"], ["start_version", "version"], ["staleness", "staleness"]];
const SIZES = ["50", "100", "200"];

export async function listView(parameters) {
  const body = h("tbody");
  const summary = h("p.soft", { role: "status" });
  const pager = h("p.pager");
  const compare = h("button", { disabled: true, click: () => (location.hash = compareLink(...chosen)) }, "Side by side");
  const selects = {};
  let chosen = []; // keys of the rows that are ticked, at most two

  const go = (changes) => {
    const next = Object.entries({ ...parameters, page: "", ...changes }).filter(([, value]) => value !== "");
    location.hash = "#/?" + new URLSearchParams(next);
  };
  const field = (name, properties) =>
    h("input", { name, value: parameters[name] || "", change: (event) => go({ [name]: event.target.value.trim() }), ...properties });
  const select = (name, label) => {
    selects[name] = h("select", { name, "aria-label": label, change: (event) => go({ [name]: event.target.value }) });
    return h("label", {}, h("span", {}, label), selects[name]);
  };

  const filters = h("form.filters", { submit: (event) => event.preventDefault() },
    select("phase", "phase"),
    h("label", {}, h("span", {}, "task"), field("task", { type: "search", placeholder: "part of its id", size: 18 })),
    select("outcome", "outcome"),
    select("end_reason", "end"),
    RANGES.map(([name, label]) =>
      h("label", {}, h("span", {}, label),
        field(`${name}_min`, { type: "number", step: "any", placeholder: "from", "aria-label": `${label} from` }),
        field(`${name}_max`, { type: "number", step: "any", placeholder: "to", "aria-label": `${label} to` }))),
    h("a.button", { href: "#/" }, "Clear"), compare);

  const focused = document.activeElement.name; // a change of one field, such as by Tab, makes them all anew
  const heads = COLUMNS.map(([sort, label, , title]) => heading(sort, label, title, parameters, go));
  show(h("h2", {}, "Episodes"), filters, summary,
    h("div.scroll", {}, h("table.list", {}, h("thead", {}, h("tr", {}, h("th"), heads, h("th", {}, "episode"))), body)), pager);
  if (focused && filters.elements[focused]) filters.elements[focused].focus();

  function tick(event, row) {
    const text = JSON.stringify(row.key);
    chosen = chosen.filter((key) => JSON.stringify(key) !== text);
    if (event.target.checked) chosen = [...chosen, row.key].slice(-2);
    draw.ticks();
    compare.disabled = chosen.length !== 2;
  }

  const draw = {
    rows: (rows) => body.replaceChildren(...rows.map((row) => line(row, tick))),
    ticks: () => {
      const texts = chosen.map((key) => JSON.stringify(key));
      for (const box of body.querySelectorAll("input")) box.checked = texts.includes(box.dataset.key);
    },
  };

  async function update(state) {
    for (const [name, element] of Object.entries(selects)) options(element, state.facets[name], parameters[name] || "");
    const answer = await ask("api/episodes", { size: "100", ...parameters });
    draw.rows(answer.rows);
    draw.ticks();
    const share = answer.matching ? `, ${((100 * answer.solved) / answer.matching).toFixed(1)} % solved` : "";
    summary.textContent = `${answer.matching.toLocaleString("en")} episode${answer.matching === 1 ? "" : "s"}${share}`;
    pager.replaceChildren(...pages(answer, parameters, go));
  }

  return { update };
}

function heading(sort, label, title, parameters, go) {
  const kind = NUMBERS.has(sort) ? "th.number" : "th";
  if (!sort) return h(kind, {}, label);
  const active = parameters.sort === sort;
  const ascending = active && parameters.order === "ascending";
  const click = () => go({ sort, order: active && !ascending ? "ascending" : "" });
  const direction = active ? (ascending ? "ascending" : "descending") : "none";
  return h(kind, { title: title || "", "aria-sort": direction },
    h("button.sort", { click }, label, active ? (ascending ? " ↑" : " ↓") : ""));
}

function line(row, tick) {
  const cells = COLUMNS.map(([name, , cell]) => h(NUMBERS.has(name) ? "td.number" : "td", {}, cell(row)));
  const box = h("input", { type: "checkbox", "aria-label": "compare", change: (event) => tick(event, row) });
  box.dataset.key = JSON.stringify(row.key);
  return h("tr", {}, h("td", {}, box), cells, h("td", {}, h("a", { href: episodeLink(row.key) }, row.episode_id || "(no id)")));
}

function options(element, counts, value) {
  if (element === document.activeElement && element.options.length) return; // it may be open
  const names = Object.keys(counts).filter(Boolean);
  if (value && !names.includes(value)) names.push(value);
  const made = [h("option", { value: "" }, "any"), ...names.map((name) => h("option", { value: name }, `${name} (${counts[name] || 0})`))];
  element.replaceChildren(...made);
  element.value = value;
}

function pages(answer, parameters, go) {
  const button = (label, page) =>
    h("button", { disabled: page < 1 || page > answer.pages || page === answer.page, click: () => go({ page: String(page) }) }, label);
  const size = h("select", { "aria-label": "episodes of a page", change: (event) => go({ size: event.target.value }) },
    SIZES.map((value) => h("option", { value }, `${value} a page`)));
  size.value = parameters.size || "100";
  return [button("First", 1), button("Back", answer.page - 1), ` page ${answer.page} of ${answer.pages} `,
    button("Next", answer.page + 1), button("Last", answer.pages), " ", size];
}
