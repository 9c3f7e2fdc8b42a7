// The tokens of an episode: coloured by a quantity, all facts of one under the pointer, and a table.

import { ask, h, number } from "./dom.js";

const QUANTITIES = {
  advantages: ["advantage", "around 0"],
  rollout_logprobs: ["log-prob of the rollout", "up to 0"],
  policy_logprobs: ["log-prob in training", "up to 0"],
  ratios: ["ratio", "around 1"],
  values: ["value", "range"],
  policy_versions: ["policy version", "range"],
  kept: ["mask", "yes or no"],
};
const TABLE_ROWS = 500;

export function tokensView(key) {
  const place = h("div.tokens");
  const button = h("button", {}, "Show tokens");
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      const [phase, step, episode_id] = key;
      const answer = await ask("api/tokens", { phase, step, episode_id });
      place.replaceChildren(...(answer.missing ? [h("p.soft", {}, answer.missing)] : shown(answer.segments)));
    } catch (error) {
      place.replaceChildren(h("p.warning", {}, error.message));
    }
  });
  place.append(button);
  return place;
}

function shown(segments) {
  const present = Object.keys(QUANTITIES).filter((name) => segments.some((segment) => segment[name].some(isKnown)));
  const choice = h("select", { "aria-label": "colour by" }, h("option", { value: "" }, "nothing"),
    present.map((name) => h("option", { value: name }, QUANTITIES[name][0])));
  choice.value = present[0] || "";
  const legend = h("span.legend");
  const texts = segments.map(text);
  const paint = () => colour(segments, texts, choice.value, legend);
  choice.addEventListener("change", paint);
  paint();
  return [h("p", {}, "colour by ", choice, " ", legend),
    ...segments.map((segment, index) => h("div", {},
      segments.length > 1 ? h("h4", {}, `segment ${index + 1} of ${segments.length}`) : "", texts[index], table(segment)))];
}

function isKnown(value) {
  return value !== null && value !== undefined && value !== -1;
}

// The tokens as text, those of one writer together.
function text(segment) {
  const blocks = [];
  let block = null;
  segment.texts.forEach((piece, index) => {
    const action = segment.action_mask[index];
    if (!block || block.action !== action) {
      block = { action, spans: [] };
      blocks.push(block);
    }
    const span = h("span.token", {}, piece.replaceAll("\n", "⏎\n"));
    if (segment.kept[index] === false) span.classList.add("masked");
    span.dataset.index = index;
    block.spans.push(span);
  });
  const inspect = (event) => inspectToken(segment, event.target.dataset.index);
  return h("div.stream", { mouseover: inspect, click: inspect },
    blocks.map(({ action, spans }) => h(action ? "div.message.assistant" : "div.message.other", {}, h("pre", {}, spans))));
}

function inspectToken(segment, index) {
  const panel = document.getElementById("inspector");
  if (index === undefined) return;
  panel.hidden = false;
  panel.replaceChildren(h("b", {}, JSON.stringify(segment.texts[index])),
    ...facts(segment, index).map(([label, value]) => h("span", {}, ` ${label} `, h("b", {}, value))));
}

function facts(segment, index) {
  const found = [["id", String(segment.token_ids[index])], ["written by", segment.action_mask[index] ? "policy" : "environment"]];
  for (const [name, [label]] of Object.entries(QUANTITIES)) {
    const value = segment[name][index];
    if (isKnown(value)) found.push([label, name === "kept" ? (value ? "kept" : "masked") : number(value, 5)]);
  }
  return found;
}

// Classes c-4 ... c4: below and above the middle of the scale.
function colour(segments, texts, name, legend) {
  const values = name ? segments.flatMap((segment) => segment[name].filter(isKnown).map(Number)) : [];
  const scale = values.length ? scaleOf(QUANTITIES[name][1], values) : null;
  segments.forEach((segment, at) => {
    for (const span of texts[at].querySelectorAll(".token")) {
      const value = name ? segment[name][span.dataset.index] : null;
      const level = scale && isKnown(value) ? scale(Number(value)) : null;
      span.className = span.className.replace(/ ?\bc-?\d\b/, "");
      if (level !== null) span.classList.add(`c${level}`);
    }
  });
  legend.replaceChildren();
  if (!values.length) return;
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const ends = name === "kept" ? ["masked", "kept"] : [number(low, 4), number(high, 4)];
  legend.append(h(`span.c${scale(low)}`, {}, ends[0]), " to ", h(`span.c${scale(high)}`, {}, ends[1]));
}

function scaleOf(kind, values) {
  if (kind === "yes or no") return (value) => (value ? 0 : -4);
  if (kind === "around 1") {
    const log = scaleOf("around 0", values.map((value) => Math.log(Math.max(value, 1e-6))));
    return (value) => log(Math.log(Math.max(value, 1e-6)));
  }
  const largest = values.reduce((a, b) => Math.max(a, Math.abs(b)), 0) || 1;
  if (kind === "around 0") return (value) => Math.round((4 * value) / largest);
  if (kind === "up to 0") return (value) => Math.round((4 * value) / largest);
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  return (value) => (high > low ? Math.round((4 * (value - low)) / (high - low)) : 0);
}

function table(segment) {
  const details = h("details", {}, h("summary", {}, `Table of ${segment.texts.length} tokens`));
  const names = Object.keys(QUANTITIES).filter((name) => segment[name].some(isKnown));
  const body = h("tbody");
  const more = h("button", { click: () => add() }, "More");
  let next = 0;
  const cell = (name, value) => (!isKnown(value) ? "" : name === "kept" ? (value ? "kept" : "masked") : number(value, 4));
  function add() {
    const end = Math.min(segment.texts.length, next + TABLE_ROWS);
    for (; next < end; next++) {
      body.append(h("tr", {}, h("td.number", {}, String(next)), h("td.mono", {}, JSON.stringify(segment.texts[next])),
        h("td", {}, segment.action_mask[next] ? "policy" : "environment"),
        names.map((name) => h("td.number", {}, cell(name, segment[name][next])))));
    }
    more.hidden = next >= segment.texts.length;
  }
  details.addEventListener("toggle", () => {
    if (details.open && next === 0) add();
  });
  const heads = names.map((name) => h("th.number", {}, QUANTITIES[name][0]));
  details.append(h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, h("th.number", {}, "#"), h("th", {}, "token"),
    h("th", {}, "by"), heads)), body)), more);
  return details;
}
