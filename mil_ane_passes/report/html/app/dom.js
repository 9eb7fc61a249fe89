// Functions that build elements. Texts of the model become text nodes and attributes, never markup.

const byId = (id) => document.getElementById(id);

/** Makes an element with attributes, listeners (`onclick`) and children; a string child becomes text. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const fill = (host, ...children) => host.replaceChildren(...children.filter((child) => child));

const named = (text) => el("span", { class: "name" }, text);

/** Announces `text` to screen readers, without moving the focus. */
function say(text) {
  byId("said").textContent = text;
}

/** Requests that `what` draws itself in the next frame; several requests before it are one. */
function drawSoon(what) {
  if (what.waiting) return;
  what.waiting = true;
  requestAnimationFrame(() => {
    what.waiting = false;
    what.draw();
  });
}

const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

/** Formats a percentage, rounded down: 100 % appears only for all. */
const percent = (share) =>
  share === null || share === undefined
    ? "–"
    : `${(Math.floor(share * 10 + 1e-6) / 10).toFixed(share === 100 || share === 0 ? 0 : 1)} %`;

/** Formats a number with three significant digits. */
function digits(value) {
  if (!value) return "0";
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return value.toFixed(Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(value)))));
}

/** Formats milliseconds as ms or µs. */
function time(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "–";
  if (milliseconds === 0) return "0 ms";
  return milliseconds >= 1 ? `${digits(milliseconds)} ms` : `${digits(milliseconds * 1000)} µs`;
}

function bytes(value) {
  if (value < 1024) return `${value} B`;
  const power = Math.min(4, Math.floor(Math.log(value) / Math.log(1024)));
  const scaled = value / 1024 ** power;
  return `${scaled.toFixed(scaled < 10 ? 2 : scaled < 100 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** Builds a list that shows `step` items at first and more with a button. `build` makes one list item. */
function stepped(items, step, build) {
  const list = el("ul", { class: "list" });
  const more = el("button", { type: "button", class: "quiet more", onclick: () => grow() });
  let shown = 0;
  function grow() {
    const next = items.slice(shown, shown + step);
    list.append(...next.map((item) => el("li", {}, build(item))));
    shown += next.length;
    more.hidden = shown >= items.length;
    more.textContent = `Show ${Math.min(step, items.length - shown)} more of ${count(items.length - shown, "other")}`;
  }
  grow();
  const box = el("div", {}, list, more);
  box.grow = () => (shown < items.length ? (grow(), true) : false);
  return box;
}

/** Lets Up, Down, Home and End move through the buttons of `host`; one of them is the Tab stop. */
function roving(host, selector, { grow = () => false } = {}) {
  const items = () => [...host.querySelectorAll(selector)];
  const settle = (chosen) =>
    items().forEach((item) => {
      item.tabIndex = item === chosen ? 0 : -1;
    });
  settle(items()[0]);
  host.addEventListener("focusin", (event) => event.target.matches(selector) && settle(event.target));
  host.addEventListener("keydown", (event) => {
    if (!event.target.matches(selector)) return;
    let all = items();
    const here = all.indexOf(event.target);
    if (["ArrowDown", "ArrowRight"].includes(event.key) && here === all.length - 1 && grow()) all = items();
    const there = {
      ArrowDown: here + 1,
      ArrowRight: here + 1,
      ArrowUp: here - 1,
      ArrowLeft: here - 1,
      Home: 0,
      End: all.length - 1,
    }[event.key];
    if (there === undefined) return;
    event.preventDefault();
    all[Math.max(0, Math.min(all.length - 1, there))].focus();
  });
}

/** Builds a command with a button that copies it; if the clipboard is not available, the command is selected. */
function commandBox(words) {
  const shown = el("code", { class: "command", tabindex: 0 }, words);
  const copy = el("button", { type: "button", class: "copy", onclick: () => put() }, "Copy");
  function tellDone(done) {
    copy.textContent = done ? "Copied" : "Selected: press Ctrl or ⌘ and C";
    say(done ? "The command is copied." : "The command is selected.");
    setTimeout(() => (copy.textContent = "Copy"), 4000);
  }
  function select() {
    getSelection().selectAllChildren(shown);
    let done = false;
    try {
      done = document.execCommand("copy"); // some browsers allow only this for a page opened from a file
    } catch {
      /* the command stays selected */
    }
    tellDone(done);
  }
  function put() {
    if (navigator.clipboard?.writeText) navigator.clipboard.writeText(words).then(() => tellDone(true), select);
    else select();
  }
  return el("div", { class: "command-box" }, shown, copy);
}
