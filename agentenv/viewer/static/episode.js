// One episode, or two side by side: facts, conversation, diff, tokens, info.

import { ask, compareLink, episodeLink, h, number, outcome, show } from "./dom.js";
import { tokensView } from "./tokens.js";

const FACTS = [
  ["reward", (row) => number(row.reward)],
  ["outcome", outcome],
  ["end", (row) => row.end_reason],
  ["phase", (row) => row.phase],
  ["step", (row) => number(row.step)],
  ["policy version at its start", (row) => number(row.start_version)],
  ["staleness", (row) => number(row.staleness)],
  ["turns", (row) => number(row.turns)],
  ["tokens of prompt", (row) => number(row.prompt_tokens)],
  ["tokens written by the policy", (row) => number(row.action_tokens)],
  ["tokens after the prompt", (row) => number(row.completion_tokens)],
  ["seconds", (row) => number(row.duration_s, 2)],
  ["group", (row) => row.group_id],
  ["seed", (row) => row.seed || ""],
];

export async function episodeView(parameters, isCurrent) {
  const episode = await fetchEpisode([parameters.phase, parameters.step, parameters.episode_id]);
  if (isCurrent()) show(back(), whole(episode));
  return {};
}

export async function compareView(parameters, isCurrent) {
  const keys = [JSON.parse(parameters.one), JSON.parse(parameters.two)];
  const episodes = await Promise.all(keys.map(fetchEpisode));
  if (isCurrent()) show(back(), h("div.pair", {}, episodes.map(whole)));
  return {};
}

function fetchEpisode([phase, step, episode_id]) {
  return ask("api/episode", { phase, step, episode_id });
}

function back() {
  return h("p", {}, h("a", { href: "#/", click: (event) => {
    if (history.length > 1) {
      event.preventDefault();
      history.back();
    }
  } }, "← Episodes"));
}

function whole(episode) {
  const { row } = episode;
  const facts = FACTS.map(([label, value]) => [label, value(row)]).filter(([, value]) => value !== "");
  return h("section.whole", {},
    h("h2", {}, h("a", { href: episodeLink(row.key) }, row.task_id || row.episode_id), h("span.soft", {}, ` ${row.episode_id}`)),
    h("dl.facts", {}, facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))),
    others(episode),
    h("h3", {}, "Conversation"),
    episode.messages.map(message),
    episode.messages_left_out ? h("p.soft", {}, `${episode.messages_left_out} more messages are not shown.`) : "",
    h("h3", {}, "Diff"), diff(episode.patch),
    h("h3", {}, "Tokens"), tokensView(row.key),
    h("details", {}, h("summary", {}, "Info"), h("pre", {}, episode.info)));
}

function others({ row, others: found }) {
  if (!found.length) return h("p.soft", {}, "The only episode of this task so far.");
  const label = (other) => `${other.phase}, step ${other.step}: ${other.outcome}, reward ${number(other.reward)} (${other.episode_id})`;
  const choice = h("select", { "aria-label": "another episode of this task" },
    found.map((other, index) => h("option", { value: index }, label(other))));
  const open = () => (location.hash = compareLink(row.key, found[Number(choice.value)].key));
  return h("p", {}, choice, " ", h("button", { click: open }, "Side by side"));
}

function message(item) {
  const who = item.action ? `policy, turn ${item.turn}` : item.role === "user" ? "environment" : item.role;
  const reward = item.reward === null || item.reward === undefined ? "" : h("span.badge", {}, `reward ${number(item.reward)}`);
  return h(item.action ? "div.message.assistant" : "div.message.other", {}, h("span.role", {}, who, " ", reward), h("pre", {}, item.text));
}

function diff(patch) {
  if (patch === null) return h("p.soft", {}, "None was recorded: it made none, or the environment records none.");
  if (!patch) return h("p.soft", {}, "It is empty: nothing was changed.");
  const kind = (line) => {
    if (/^(\+\+\+|---|diff |index )/.test(line)) return "span.file";
    return { "+": "span.added", "-": "span.removed", "@": "span.hunk" }[line[0]] || "span";
  };
  return h("pre.diff", {}, patch.split("\n").map((line) => h(kind(line), {}, line + "\n")));
}
