"use strict";
// Every text comes from outside: it is only ever set as textContent.
const CAUSES = {/*causes*/};
const LANES = {/*lanes*/};
const COMPUTING = {/*computing*/};
const COLUMNS = 120;
const STORED = "headrace-key";
const get = id => document.getElementById(id);

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function rows(id, every) {
  get(id).replaceChildren(...every.map(cells => {
    const row = element("tr");
    cells.forEach((cell, place) => row.append(cell instanceof Node ? cell : element("td", cell, place ? "n" : "")));
    return row;
  }));
}

function filled(cell, child) {
  cell.append(child);
  return cell;
}

function coloured(cause, size, along) {
  const part = element("i");
  part.style.background = `var(--${cause})`;
  part.style[along] = `${100 * size}%`;
  part.title = `${CAUSES[cause]} ${percent(size)}`;
  return part;
}

const number = value => value >= 100 || Number.isInteger(value)
  ? Math.round(value).toLocaleString("en") : value.toLocaleString("en", {maximumSignificantDigits: 3});
const percent = value => `${(100 * value).toFixed(1)} %`;

function duration(seconds) {
  const whole = Math.round(seconds), pad = value => String(value).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

function headline(frame) {
  const causes = frame.causes;
  const busy = COMPUTING.reduce((sum, cause) => sum + (causes[cause] || 0), 0);
  const figures = ["requests", "records", "tokens"].filter(name => name in frame.rates)
    .map(name => [number(frame.rates[name]), `${name}/s`]);
  figures.push([percent(busy), "device busy"]);
  if (frame.fraction !== null) figures.push([percent(frame.fraction), "of the input done"]);
  if (frame.eta_s !== null) figures.push([duration(frame.eta_s), "to go"]);
  const inside = frame.queue.accepted ?? Object.values(frame.queue).reduce((sum, value) => sum + value, 0);
  figures.push([number(inside), "records in progress"]);
  get("headline").replaceChildren(...figures.map(([value, label]) => {
    const box = element("div");
    box.append(element("b", value), element("span", label));
    return box;
  }));
}

function devices(frame) {
  const known = Object.keys(CAUSES).filter(cause => frame.causes[cause] || frame.causes_of_all[cause]);
  get("stack").replaceChildren(...known.map(cause => coloured(cause, frame.causes[cause] || 0, "width")));
  get("window").textContent = `last ${Math.round(frame.window_s)} s`;
  rows("causes", known.map(cause => {
    const label = element("td"), mark = element("i");
    mark.style.background = `var(--${cause})`;
    label.append(mark, CAUSES[cause]);
    return [label, percent(frame.causes[cause] || 0), percent(frame.causes_of_all[cause] || 0)];
  }));
  const column = element("div");
  column.append(...known.map(cause => coloured(cause, frame.causes[cause] || 0, "height")));
  const history = get("history");
  history.append(column);
  while (history.childElementCount > COLUMNS) history.firstElementChild.remove();
}

function tables(frame) {
  const most = Math.max(1, ...Object.values(frame.lanes));
  rows("lanes", Object.entries(frame.lanes).filter(([lane]) => lane in LANES).map(([lane, busy]) => {
    const bar = element("div", undefined, "bar");
    bar.style.background = `var(--${LANES[lane]})`;
    bar.style.width = `${100 * busy / most}%`;
    return [lane, filled(element("td"), bar), busy.toFixed(2)];
  }));
  const listed = found => Object.entries(found).map(([name, value]) => [name, number(value)]);
  rows("queue", listed(frame.queue));
  rows("errors", listed(frame.errors));
  rows("counts", listed(frame.counts));
  get("no-errors").hidden = Object.keys(frame.errors).length > 0;
  get("replica-title").textContent = frame.kind === "server" ? "Models" : "Workers";
  rows("replicas", frame.replicas.map(one => [
    one.name, element("td", one.state), number(one.records), one.busy === null ? "-" : percent(one.busy),
    one.lost ? number(one.lost) : "",
  ]));
}

function show(frame) {
  document.title = `${frame.name} - headrace`;
  get("name").textContent = frame.name;
  get("about").textContent = `${frame.kind}, up ${duration(frame.up_s)}`;
  said(frame.state, false);
  get("asked").hidden = true;
  document.querySelectorAll(".shown").forEach(part => { part.hidden = false; });
  get("advised").hidden = !frame.advice;
  get("advice").textContent = frame.advice;
  get("replica-section").hidden = !frame.replicas.length;
  get("report").hidden = frame.kind !== "server";
  headline(frame);
  devices(frame);
  tables(frame);
  document.body.dataset.frames = Number(document.body.dataset.frames || 0) + 1;
}

function said(text, bad) {
  get("state").textContent = text;
  get("state").classList.toggle("bad", bad);
}

function headers() {
  const key = sessionStorage.getItem(STORED);
  return key ? {Authorization: `Bearer ${key}`} : {};
}

function ask(refused) {
  sessionStorage.removeItem(STORED);
  document.querySelectorAll(".shown").forEach(part => { part.hidden = true; });
  get("asked").hidden = false;
  get("refused").textContent = refused;
  said("API key needed", true);
  get("key").focus();
}

async function why(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answers ${answer.status}`;
  }
}

async function follow() {
  const answer = await fetch("dashboard/events", {headers: headers(), cache: "no-store"});
  if (answer.status === 401 || answer.status === 403) {
    ask(sessionStorage.getItem(STORED) ? await why(answer) : "");
    return false;
  }
  if (!answer.ok) throw new Error(await why(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the server has stopped");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) show(JSON.parse(event.slice(6)));
  }
}

async function run() {
  for (let wait = 1; ; wait = Math.min(2 * wait, 15)) {
    const before = document.body.dataset.frames;
    try {
      if (!await follow()) return;
    } catch (error) {
      said(`no connection: ${error.message}`, true);
    }
    if (document.body.dataset.frames !== before) wait = 1;
    await new Promise(resolve => setTimeout(resolve, 1000 * wait));
  }
}

async function download() {
  get("report-said").textContent = "drawing ...";
  try {
    const answer = await fetch("report", {headers: headers(), cache: "no-store"});
    if (!answer.ok) throw new Error(await why(answer));
    const link = element("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = "headrace-report.html";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    get("report-said").textContent = "";
  } catch (error) {
    get("report-said").textContent = error.message;
  }
}

get("form").addEventListener("submit", event => {
  event.preventDefault();
  const key = get("key").value.trim();
  get("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) return ask("an API key has no spaces and only ASCII signs");
  sessionStorage.setItem(STORED, key);
  run();
});
get("report").addEventListener("click", download);
run();
