// The list of conversations: search, open, rename, delete, export and import.

import { matches, newConversation, readConversation } from "./conversation.js";
import { announce, button, byId, download, make } from "./dom.js";
import { readSettings } from "./settings.js";
import * as store from "./store.js";

export class Sidebar {
  constructor(chat) {
    this.chat = chat;
    byId("search").addEventListener("input", () => this.draw());
    byId("new-talk").addEventListener("click", () => this.chat.startNew());
    byId("export").addEventListener("click", () => this.export());
    byId("import").addEventListener("click", () => byId("import-input").click());
    byId("import-input").addEventListener("change", (event) => {
      this.import([...event.target.files]);
      event.target.value = "";
    });
  }

  draw() {
    const { chat } = this;
    const words = byId("search").value.trim();
    const shown = chat.talks.filter((talk) => matches(talk, words));
    const items = shown.map((talk) =>
      make(
        "li",
        { class: talk === chat.talk ? "current" : "" },
        button(
          talk.title || "Untitled",
          () => {
            chat.open(talk);
            document.body.dataset.list = "";
          },
          { class: "open", "aria-current": talk === chat.talk ? "true" : undefined },
        ),
        button("Rename", () => this.rename(talk), {
          class: "quiet",
          "aria-label": `Rename ${talk.title || "Untitled"}`,
        }),
        button("×", () => this.remove(talk), {
          class: "quiet",
          "aria-label": `Delete ${talk.title || "Untitled"}`,
        }),
      ),
    );
    const none = make(
      "li",
      { class: "hint" },
      words
        ? "No matching conversations."
        : "No conversations yet. They are stored in this browser only.",
    );
    byId("talks").replaceChildren(...(items.length ? items : [none]));
  }

  async rename(talk) {
    const title = prompt("New name of this conversation", talk.title);
    if (title === null) return;
    talk.title = title.trim().slice(0, 200) || talk.title;
    await store.save(talk);
    this.draw();
  }

  async remove(talk) {
    if (
      !confirm(`Delete “${talk.title || "Untitled"}” from this browser? There is no other copy.`)
    )
      return;
    const { chat } = this;
    if (chat.running?.talk === talk) await chat.stop();
    chat.talks = chat.talks.filter((other) => other !== talk);
    await store.remove(talk.id);
    if (chat.talk === talk) chat.open(chat.talks[0] ?? newConversation());
    this.draw();
  }

  export() {
    const content = {
      format: "penstock-conversations",
      version: 1,
      conversations: this.chat.talks,
    };
    download(
      `penstock-${new Date().toISOString().slice(0, 10)}.json`,
      JSON.stringify(content, null, 1),
    );
  }

  async import(files) {
    let number = 0;
    for (const file of files) {
      try {
        const found = JSON.parse(await file.text());
        for (const one of Array.isArray(found.conversations) ? found.conversations : [found]) {
          const talk = { ...readConversation(one), settings: readSettings(one.settings) };
          await store.save(talk);
          this.chat.talks.unshift(talk);
          number += 1;
        }
      } catch (error) {
        announce(`${file.name} cannot be imported. ${error.message}`);
        alert(`${file.name} cannot be imported. ${error.message}`);
        continue;
      }
    }
    if (number) announce(`${number} conversations imported.`);
    if (number) this.chat.open(this.chat.talks[0]);
  }
}
