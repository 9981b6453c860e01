// Answers to tool calls by a person's own JavaScript: in a worker of a sandboxed frame, which has no network,
// no storage, nothing of this page, and a few seconds.

import { make } from "./dom.js";

const LIMIT_S = 5;
let frame = null;

function sandbox() {
  frame ??= new Promise((resolve) => {
    const element = make("iframe", {
      sandbox: "allow-scripts",
      src: new URL("sandbox.html", import.meta.url).href,
      hidden: true,
      title: "Tool sandbox",
    });
    element.addEventListener("load", () => resolve(element.contentWindow), { once: true });
    document.body.append(element);
  });
  return frame;
}

/** What `code`, a function of one argument, returns for a call's arguments; as text. Never throws. */
export async function runTool(code, argumentsText) {
  const target = await sandbox();
  const { port1, port2 } = new MessageChannel();
  return new Promise((resolve) => {
    const timer = setTimeout(
      () => resolve(`Error: the function did not end within ${LIMIT_S} s.`),
      LIMIT_S * 1000 + 500,
    );
    port1.onmessage = ({ data }) => {
      clearTimeout(timer);
      resolve(String(data));
    };
    target.postMessage({ code, argumentsText, limitS: LIMIT_S }, "*", [port2]);
  });
}
