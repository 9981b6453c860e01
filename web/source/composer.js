// The message box: draft, attached files, token count of the prompt, and send or stop.

import { announce, button, byId, count, make } from "./dom.js";
import { json } from "./server.js";
import { chatBody } from "./settings.js";

const MAX_FILE_BYTES = 4 * 1024 * 1024;
const COUNT_AFTER_MS = 350;
const DRAFT = "penstock-draft";
/** On a touch screen Enter starts a new line: its keyboard has no Shift+Enter. */
const hasNoShift = () => matchMedia("(hover: none) and (pointer: coarse)").matches;

export class Composer {
  constructor(chat) {
    Object.assign(this, { chat, files: [], counting: 0 });
    this.form = byId("composer");
    this.draft = byId("draft");
    this.note = byId("draft-note");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.draft.addEventListener("keydown", (event) => this.onKey(event));
    this.draft.addEventListener("input", () => this.changed());
    this.draft.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.addFiles([...event.clipboardData.files]);
    });
    byId("attach").addEventListener("click", () => byId("file-input").click());
    byId("file-input").addEventListener("change", (event) => {
      this.addFiles([...event.target.files]);
      event.target.value = "";
    });
    this.acceptDrops();
    this.draft.value = sessionStorage.getItem(DRAFT) ?? "";
  }

  focus() {
    this.draft.focus();
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !hasNoShift()) {
      event.preventDefault();
      if (this.chat.isBusy()) this.note.textContent = byId("announcer").textContent;
      else this.submit();
    } else if (event.key === "ArrowUp" && !this.draft.value) {
      const mine = [...document.querySelectorAll(".message.user")].at(-1);
      const message = mine && this.chat.talk.messages[mine.dataset.id];
      if (message && !this.chat.running) this.chat.edit(message);
    }
  }

  submit() {
    if (this.chat.running) return this.chat.stop();
    const text = this.draft.value.trim();
    if (!text && !this.files.length) return undefined;
    const files = this.files;
    this.draft.value = "";
    this.files = [];
    this.changed();
    return this.chat.send(text, files);
  }

  changed() {
    sessionStorage.setItem(DRAFT, this.draft.value); // survives a reload
    const isRunning = Boolean(this.chat.running);
    byId("send").textContent = isRunning ? "Stop" : "Send";
    byId("send").classList.toggle("stop", isRunning);
    this.draft.style.height = "auto";
    this.draft.style.height = `${Math.min(this.draft.scrollHeight + 2, innerHeight * 0.4)}px`;
    byId("files").replaceChildren(
      ...this.files.map((file, place) =>
        make(
          "li",
          {},
          file.name,
          " ",
          button(
            "×",
            () => {
              this.files.splice(place, 1);
              this.changed();
            },
            { "aria-label": `Remove ${file.name}`, class: "quiet" },
          ),
        ),
      ),
    );
    clearTimeout(this.counting);
    this.counting = setTimeout(() => this.countTokens(), COUNT_AFTER_MS);
  }

  /** Counts the whole prompt, not the draft alone: it has to fit into the context, and is partly cached. */
  async countTokens() {
    const { chat } = this;
    if (chat.running || !chat.model.contextLength) return;
    const draft = [...this.files.map((file) => file.text), this.draft.value].join("\n\n").trim();
    if (!draft && !chat.talk.leaf) {
      this.note.textContent = "";
      return;
    }
    try {
      const asked = chatBody(chat.talk, chat.talk.leaf, "");
      const messages = [...asked.messages, ...(draft ? [{ role: "user", content: draft }] : [])];
      const { tools, chat_template_kwargs } = asked;
      const body = { messages, tools, chat_template_kwargs, count_cached: true };
      const { count: total, cached_tokens: cached } = await json("tokenize", { body });
      const share = total / chat.model.contextLength;
      const more = share >= 1 ? ": too long for the model" : cached ? `, ${count(cached)} cached` : "";
      this.note.textContent = `${count(total)} of ${count(chat.model.contextLength)} tokens${more}`;
      this.note.classList.toggle("over", share >= 1);
    } catch {
      this.note.textContent = ""; // errors of the server or a schema are shown elsewhere
    }
  }

  /** Accepts drops anywhere: by default, the browser would open the file in place of the page. */
  acceptDrops() {
    const { classList } = document.body;
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      classList.add("dropping");
    });
    addEventListener("dragleave", () => classList.remove("dropping"));
    addEventListener("drop", (event) => {
      classList.remove("dropping");
      if (!hasFiles(event)) return;
      event.preventDefault();
      location.hash = "chat";
      this.addFiles([...event.dataTransfer.files]);
    });
  }

  async addFiles(files) {
    for (const file of files) {
      const text = file.size <= MAX_FILE_BYTES ? await file.text() : null;
      if (text === null) announce(`${file.name} is larger than 4 MB, the limit for attached files.`);
      else if (text.includes("\0")) announce(`${file.name} is not a text file.`);
      else this.files.push({ name: file.name, text });
    }
    this.note.textContent = byId("announcer").textContent;
    this.changed();
    this.focus();
  }
}
