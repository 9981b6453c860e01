// The chat: the current conversation, and the actions send, stop, branch, edit and continue.

import { Composer } from "./composer.js";
import {
  addMessage,
  newConversation,
  noteBrokenOff,
  pathTo,
  placeOfFirstSent,
  removeMessage,
  shorten,
  showBranch,
} from "./conversation.js";
import { showCopyAs } from "./copy_as.js";
import { announce, byId } from "./dom.js";
import { MessageView } from "./message_view.js";
import { streamReply } from "./reply.js";
import { Problem, setApiKey } from "./server.js";
import { chatBody } from "./settings.js";
import * as store from "./store.js";
import { runTool } from "./tools.js";

const KEEP_MS = 1000;
const MAX_ROUNDS = 16; // of tool calls answered by functions, before the user has to act

export class Chat {
  /** `onChange` is called when the list of conversations has to be redrawn. */
  constructor(model, onChange) {
    Object.assign(this, {
      model,
      onChange,
      talks: [],
      talk: newConversation(),
      running: null,
      views: new Map(),
    });
    this.list = byId("messages");
    this.composer = new Composer(this);
    const names = [
      "show",
      "again",
      "continue",
      "edit",
      "remove",
      "answerCall",
      "runCall",
      "shorten",
      "editQuestion",
      "enterKey",
      "copyAs",
    ];
    this.actions = Object.fromEntries(
      names.map((name) => [name, (...given) => this[name](...given)]),
    );
    this.actions.hasFunction = (name) => Boolean(this.toolCalled(name)?.code?.trim());
    this.list.addEventListener("scroll", () => (this.isAtEnd = this.distanceToEnd() < 60), {
      passive: true,
    });
    this.isAtEnd = true;
  }

  async load() {
    this.talks = await store.loadAll();
    this.talks.forEach(noteBrokenOff);
    addEventListener("pagehide", () => this.running && store.save(this.running.talk));
    this.open(
      this.talks.find((talk) => talk.id === sessionStorage.getItem("penstock-talk")) ??
        newConversation(),
    );
  }

  /** Loads what other tabs have stored; of two versions of this conversation, shows the newer one. */
  async refresh() {
    if (this.running) return;
    const found = await store.loadAll();
    const shown = found.find((talk) => talk.id === this.talk.id);
    if (shown && shown.updated > this.talk.updated) {
      this.talks = found;
      this.open(shown);
    } else {
      this.talks = found.map((talk) => (talk === shown ? this.talk : talk));
      this.onChange();
    }
  }

  open(talk) {
    this.talk = talk;
    sessionStorage.setItem("penstock-talk", talk.id);
    this.views.clear();
    this.isAtEnd = true;
    this.draw();
    this.composer.changed();
    this.onChange();
  }

  startNew() {
    this.open(newConversation({ ...this.talk.settings }));
    this.composer.focus();
  }

  /** Saves changed settings: debounced, and only for a conversation with messages. */
  keepSoon() {
    const { talk } = this;
    clearTimeout(this.keeping);
    if (talk.leaf) this.keeping = setTimeout(() => this.keep(talk), 300);
  }

  keep(talk = this.talk) {
    if (!this.talks.includes(talk)) this.talks.unshift(talk);
    this.onChange();
    return store.save(talk);
  }

  draw() {
    const path = pathTo(this.talk);
    const left = placeOfFirstSent(this.talk, path);
    const elements = path.map((message, place) => {
      if (this.running?.message === message) this.views.set(message.id, this.running.view);
      if (!this.views.has(message.id))
        this.views.set(message.id, new MessageView(this.talk, message, this.actions));
      const view = this.views.get(message.id);
      view.element.classList.toggle("left-out", place < left);
      return view.element;
    });
    this.list.replaceChildren(...elements);
    byId("welcome").hidden = path.length > 0;
    this.follow();
  }

  distanceToEnd() {
    return this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight;
  }

  follow() {
    if (this.isAtEnd) this.list.scrollTop = this.list.scrollHeight;
  }

  /** Only one answer is generated at a time; tells the user if one is in progress. */
  isBusy() {
    if (this.running) announce("An answer is still being generated. Press Esc to stop it first.");
    return Boolean(this.running);
  }

  // User actions

  send(text, files) {
    if (this.isBusy()) return undefined;
    const message = addMessage(this.talk, this.talk.leaf, { role: "user", content: text, files });
    this.isAtEnd = true;
    return this.reply(message.id);
  }

  /** Resolves when the partial answer is saved. */
  stop() {
    this.running?.controller.abort();
    return this.running?.ended;
  }

  show(message) {
    showBranch(this.talk, message);
    this.redraw();
  }

  again(message) {
    if (this.isBusy()) return undefined;
    return this.reply(message.role === "assistant" ? message.parent : message.id);
  }

  edit(message) {
    if (this.isBusy()) return;
    this.views.get(message.id).startEdit((text) => {
      const isQuestion = message.role === "user";
      if (text === message.content) {
        if (isQuestion && this.talk.leaf === message.id) this.reply(message.id); // it has no answer yet
        return;
      }
      const { id, created, stats, problem, ...kept } = message;
      addMessage(this.talk, message.parent, { ...kept, content: text });
      this.redraw();
      if (isQuestion) this.reply(this.talk.leaf);
      else this.keep();
    });
  }

  remove(message) {
    if (this.isBusy()) return;
    removeMessage(this.talk, message);
    this.redraw();
    this.keep();
    this.composer.focus();
  }

  redraw() {
    this.views.clear();
    this.draw();
    this.composer.changed();
  }

  async continue(message) {
    if (this.isBusy()) return;
    const body = this.bodyFor(message.id);
    if (body)
      await this.run(message, {
        ...body,
        continue_final_message: true,
        add_generation_prompt: false,
      });
  }

  shorten(message) {
    if (!shorten(this.talk)) {
      const sentence = "No older messages are left to leave out: this message alone is too long.";
      message.problem = { ...message.problem, sentence, way: "edit" };
      announce(sentence);
      this.redraw();
      return this.keep();
    }
    removeMessage(this.talk, message);
    this.redraw();
    return this.reply(this.talk.leaf);
  }

  editQuestion(message) {
    this.edit(this.talk.messages[message.parent]);
  }

  enterKey(message) {
    setApiKey("");
    return this.again(message);
  }

  copyAs(message) {
    const body = this.bodyFor(message.parent);
    if (body) showCopyAs("v1/chat/completions", { ...body, stream: true });
  }

  // Replies

  bodyFor(leaf) {
    try {
      return chatBody(this.talk, leaf, this.model.name);
    } catch (error) {
      announce(error.message);
      byId("settings-problem").textContent = error.message;
      document.body.dataset.settings = "open";
      return null;
    }
  }

  async reply(parent, round = 0) {
    if (this.running) return;
    const body = this.bodyFor(parent);
    if (!body) {
      this.draw();
      return;
    }
    const failed = Object.values(this.talk.messages).find(
      (other) => other.parent === parent && other.problem && !other.content && !other.reasoning,
    );
    if (failed) removeMessage(this.talk, failed); // an answer that never started is not a branch
    const isJson = Boolean(body.response_format); // shown as JSON, not as Markdown
    const message = addMessage(this.talk, parent, { role: "assistant", isJson });
    this.views.clear();
    this.draw();
    const { talk } = this;
    if (!(await this.run(message, body)) || this.talk !== talk) return;
    if (message.calls?.length && round < MAX_ROUNDS) await this.runAll(message, round);
  }

  /** Returns whether the reply is complete. */
  async run(message, body) {
    const { talk } = this;
    const view = this.views.get(message.id);
    const controller = new AbortController();
    const grow = eachFrame(() => {
      view.grow();
      if (this.talk === talk) this.follow();
    });
    const { promise: ended, resolve: end } = Promise.withResolvers();
    this.running = { controller, talk, message, view, ended };
    Object.assign(message, { problem: undefined, wasStopped: undefined, isGrowing: true });
    const keeping = setInterval(() => store.save(talk), KEEP_MS); // the page may be closed at any time
    view.setGrowing(true);
    this.composer.changed();
    await this.keep(talk);
    let isComplete = false;
    try {
      await streamReply(body, message, { signal: controller.signal, onGrow: grow });
      isComplete = true;
      announce("The answer is complete.");
    } catch (error) {
      if (error.name === "AbortError") message.wasStopped = true;
      else if (error instanceof Problem)
        message.problem = { sentence: error.message, way: error.way, detail: error.detail };
      else throw error;
      if (error.way === "wait") this.retryLater(message, error.waitS);
    } finally {
      grow.cancel();
      clearInterval(keeping);
      delete message.isGrowing;
      this.running = null;
      view.setGrowing(false);
      if (this.talk === talk) this.follow();
      talk.updated = Date.now();
      this.composer.changed();
      await this.keep(talk);
      end();
    }
    return isComplete;
  }

  /** Retries after the wait that the server asked for, unless the user did something else. */
  retryLater(message, waitS) {
    setTimeout(() => {
      if (message.problem?.way === "wait" && !this.running && this.talk.leaf === message.id)
        this.again(message);
    }, waitS * 1000);
  }

  // Tools

  toolCalled(name) {
    return (this.talk.settings.tools ?? []).find((tool) => tool.name === name);
  }

  /** Runs the functions of all calls, if each has one; drops the results if the conversation changed. */
  async runAll(message, round) {
    const { talk } = this;
    if (!message.calls.every((call) => this.actions.hasFunction(call.name))) return;
    const ran = message.calls.map((call) =>
      runTool(this.toolCalled(call.name).code, call.arguments),
    );
    const results = await Promise.all(ran);
    if (this.talk !== talk || talk.leaf !== message.id) return;
    message.calls.forEach((call, place) => this.addResult(message, call, results[place]));
    await this.reply(talk.leaf, round + 1);
  }

  async runCall(message, call) {
    const { talk } = this;
    const result = await runTool(this.toolCalled(call.name).code, call.arguments);
    if (this.talk === talk) this.answerCall(message, call, result);
  }

  answerCall(message, call, text) {
    this.addResult(message, call, text);
    const answered = new Set(
      pathTo(this.talk)
        .filter((one) => one.role === "tool")
        .map((one) => one.callId),
    );
    this.redraw();
    if (message.calls.every((one) => answered.has(one.id))) return this.reply(this.talk.leaf);
    return this.keep();
  }

  addResult(message, call, text) {
    addMessage(this.talk, this.talk.leaf, {
      role: "tool",
      callId: call.id,
      name: call.name,
      content: text,
    });
  }
}

/** Calls `act` at most once per frame. */
function eachFrame(act) {
  let asked = 0;
  const ask = () => {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      act();
    });
  };
  ask.cancel = () => cancelAnimationFrame(asked);
  return ask;
}
