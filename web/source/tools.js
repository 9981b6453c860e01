// Runs the user's JavaScript functions for tool calls: in a worker of a sandboxed frame, without network,
// storage or access to this page, and with a time limit.

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

/** The result of `code`, a function of one argument, for the arguments of a call; as text. Never throws. */
export async function runTool(code, argumentsText) {
  const target = await sandbox();
  const { port1, port2 } = new MessageChannel();
  return new Promise((resolve) => {
    const timer = setTimeout(
      () => resolve(`Error: the function did not finish within ${LIMIT_S} s.`),
      LIMIT_S * 1000 + 500,
    );
    port1.onmessage = ({ data }) => {
      clearTimeout(timer);
      resolve(String(data));
    };
    target.postMessage({ code, argumentsText, limitS: LIMIT_S }, "*", [port2]);
  });
}
