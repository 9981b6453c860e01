// Entry point of the page: views, server state, API key, theme and keyboard shortcuts.

import { Chat } from "./chat.js";
import { announce, byId, count } from "./dom.js";
import { base, health, json, onKeyNeeded } from "./server.js";
import { drawSettings } from "./settings_view.js";
import { Sidebar } from "./sidebar.js";

const VIEWS = ["chat", "playground", "live"];
const CALM_S = 10;
const model = { name: "", contextLength: 0, sampling: {} };
const loaded = {};

let drawnFor = null; // the conversation whose settings are shown
const chat = new Chat(model, () => {
  sidebar.draw();
  if (drawnFor === chat.talk) return;
  drawnFor = chat.talk;
  drawSettings(chat);
});
const sidebar = new Sidebar(chat);

// Views: one at a time, chosen by the URL fragment.

async function showView() {
  const name = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat";
  for (const view of VIEWS) {
    byId(`view-${view}`).hidden = view !== name;
    const link = document.querySelector(`nav a[href="#${view}"]`);
    if (view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (name === "playground" && !loaded.playground) {
    const { Playground } = await import("./playground.js");
    loaded.playground = new Playground(byId("view-playground"), model, () => chat.talk);
  }
  if (name === "live" && !loaded.live) {
    const { LiveView } = await import("./live.js");
    loaded.live = new LiveView(byId("view-live"));
  }
  loaded.live?.setActive(name === "live");
  if (name === "chat") chat.composer.focus();
}
addEventListener("hashchange", showView);

// Server state: ready, starting, failed or unreachable.

function showState(kind, text) {
  byId("state").dataset.kind = kind;
  byId("state").textContent = text;
  byId("notice").hidden = kind === "ok";
  byId("notice-text").textContent =
    {
      starting: chat.running
        ? `The engine stopped and is restarting: ${text}. The answer will continue automatically.`
        : `The model is still loading: ${text}. You can already send messages.`,
      dead: `The engine failed: ${text} See the server's log; the engine may restart automatically.`,
      gone: "The server cannot be reached. Is it still running? This page retries every second.",
    }[kind] ?? "";
}

/** Polls every second while the server is not ready or an answer is streaming, otherwise every CALM_S. */
async function watchServer() {
  for (;;) {
    const found = await health();
    if (!found) showState("gone", "unreachable");
    else if (found.status === "ok") {
      if (byId("state").dataset.kind !== "ok") await learnModel(found).catch(() => null);
      passed = [];
      showState("ok", "ready");
    } else if (found.status === "starting") showState("starting", phaseText(found.phase));
    else showState("dead", found.reason ?? "");
    const isCalm = () => found?.status === "ok" && !chat.running;
    for (let waited = 0; waited < (isCalm() ? CALM_S : 1); waited += 1)
      await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

let passed = []; // start-up phases so far

function phaseText(phase) {
  if (!phase) return "starting";
  if (passed.at(-1) !== phase.name) passed.push(phase.name);
  const share =
    phase.fraction === null || phase.fraction === undefined
      ? ""
      : `, ${Math.round(phase.fraction * 100)} %`;
  const before = passed.length > 1 ? `, after ${passed.slice(0, -1).join(", ")}` : "";
  return `${phase.name}${phase.detail ? ` (${phase.detail})` : ""}${share}${before}`;
}

async function learnModel(found) {
  const [card] = (await json("v1/models")).data;
  const props = await json("props").catch(() => null);
  model.name = card.id;
  model.contextLength = props?.default_generation_settings.n_ctx ?? card.max_model_len ?? 0;
  model.sampling = found.sampling ?? (await health())?.sampling ?? {};
  byId("model").textContent = model.contextLength
    ? `${model.name}, ${count(model.contextLength)} tokens`
    : model.name;
  document.title = `${model.name} · Penstock`;
  drawSettings(chat);
  chat.composer.changed();
}

// API key: asked for once, kept for this tab.

onKeyNeeded(
  (wasRefused) =>
    new Promise((resolve) => {
      const dialog = byId("key-dialog");
      const input = byId("key-input");
      byId("key-text").textContent = wasRefused
        ? "The server did not accept that key. Try another one."
        : "This server requires an API key. The key is kept in this tab only and forgotten when you close it.";
      dialog.returnValue = "";
      input.value = "";
      dialog.addEventListener(
        "close",
        () => resolve(dialog.returnValue === "use" ? input.value.trim() : ""),
        { once: true },
      );
      if (!dialog.open) dialog.showModal();
    }),
);

// Theme: follows the system until the user chooses one.

const THEMES = ["system", "light", "dark"];
function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("penstock-theme", name);
  const label = { system: "Auto", light: "Light", dark: "Dark" }[name];
  byId("theme").textContent = label;
  byId("theme").setAttribute("aria-label", `${label} theme`);
}
setTheme(
  THEMES.includes(localStorage.getItem("penstock-theme"))
    ? localStorage.getItem("penstock-theme")
    : "system",
);
byId("theme").addEventListener("click", () =>
  setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("penstock-theme")) + 1) % THEMES.length]),
);

document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") chat.refresh();
});

// Panels and keyboard shortcuts

function togglePanel(name, isOpen = document.body.dataset[name] !== "open") {
  document.body.dataset[name] = isOpen ? "open" : "";
  byId(`toggle-${name}`).setAttribute("aria-expanded", String(isOpen));
}
for (const name of ["list", "settings"])
  byId(`toggle-${name}`).addEventListener("click", () => togglePanel(name));
byId("help").addEventListener("click", () => byId("help-dialog").showModal());
byId("help-close").addEventListener("click", () => byId("help-dialog").close());
for (const suggestion of document.querySelectorAll("#welcome button"))
  suggestion.addEventListener("click", () => chat.send(suggestion.textContent, []));

const SHORTCUTS = {
  "alt+n": () => {
    location.hash = "chat";
    chat.startNew();
  },
  "alt+s": () => togglePanel("settings"),
  "alt+r": () => {
    const last = chat.talk.messages[chat.talk.leaf];
    if (last?.role === "assistant") chat.again(last);
  },
  "ctrl+k": () => {
    togglePanel("list", true);
    byId("search").focus();
  },
  "alt+1": () => (location.hash = "chat"),
  "alt+2": () => (location.hash = "playground"),
  "alt+3": () => (location.hash = "live"),
};
addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && chat.running) {
    chat.stop();
    announce("Stopped.");
    return;
  }
  const isTyping = event.target.closest?.("input, textarea, select");
  const name = `${event.ctrlKey || event.metaKey ? "ctrl+" : ""}${event.altKey ? "alt+" : ""}${event.code.replace(/^(Key|Digit)/, "").toLowerCase()}`;
  if (SHORTCUTS[name]) SHORTCUTS[name]();
  else if (!isTyping && event.key === "/") chat.composer.focus();
  else if (!isTyping && event.key === "?") byId("help-dialog").showModal();
  else return;
  event.preventDefault();
});

byId("docs-link").href = new URL("docs", base).href;
await chat.load();
watchServer();
showView();
