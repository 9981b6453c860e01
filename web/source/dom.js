// DOM helpers: the only way elements are created. No text is ever parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** `fields` are properties, except `class`, `on` (event listeners), `data` (dataset) and attributes. */
export function make(tag, fields = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "on")
      for (const [kind, act] of Object.entries(value)) element.addEventListener(kind, act);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.includes("-") || name === "role" || !(name in element))
      element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(
    ...children.filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

export const button = (label, act, fields = {}) =>
  make("button", { type: "button", ...fields, on: { click: act } }, label);

let numFields = 0;

/** A form field: label, `control`, and a hint below it. */
export function labelled(text, control, hint) {
  control.id ||= `field-${++numFields}`;
  const note = hint ? make("small", { id: `${control.id}-hint` }, hint) : null;
  if (note) control.setAttribute("aria-describedby", note.id);
  return make(
    "div",
    { class: "field" },
    make("label", { htmlFor: control.id }, text),
    control,
    note,
  );
}

/** Announces a text to screen readers. */
export function announce(text) {
  byId("announcer").textContent = text;
}

export async function copyText(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // browsers disable the clipboard API for plain HTTP, except on localhost
    const area = make("textarea", { value: text, class: "off-screen" });
    (from?.closest("dialog") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied.");
  if (!from) return;
  const label = from.textContent;
  from.textContent = "Copied";
  setTimeout(() => (from.textContent = label), 1200);
}

export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export const count = (number) => Math.round(number).toLocaleString("en");

export function seconds(value) {
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 60
    ? `${value.toFixed(1)} s`
    : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}
