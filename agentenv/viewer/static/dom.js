// Elements and requests. Texts from the run reach the page only as text nodes; the content security policy refuses
// every other way.

// An element: h("td.number", {title: "x"}, "text", child, ...). A property that is a function is a listener.
export function h(name, properties = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (key.includes("-")) element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// What the server answers; its error message is thrown.
export async function ask(path, parameters = {}) {
  const query = new URLSearchParams(
    Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined),
  );
  let response;
  try {
    response = await fetch(`${path}?${query}`);
  } catch {
    throw new Error("agentenv view does not answer: is it still running?");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

export function show(...children) {
  document.getElementById("view").replaceChildren(...children.flat());
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "";
  return Number.isInteger(value) ? String(value) : String(Number(value.toFixed(digits)));
}

// The address of an episode's page; its key is [phase, step, episode id].
export function episodeLink(key) {
  return "#/episode?" + new URLSearchParams({ phase: key[0], step: key[1], episode_id: key[2] });
}

export function compareLink(one, two) {
  return "#/compare?" + new URLSearchParams({ one: JSON.stringify(one), two: JSON.stringify(two) });
}

export function outcome(row) {
  const good = { solved: "good", failed: "warn" }[row.outcome] || "bad";
  return h(`span.${good}`, {}, row.outcome);
}
