// Runs in a frame with a separate origin. Each call gets a new worker, which is terminated after its answer.
"use strict";

const runner = (code) => `"use strict";
self.onmessage = async ({ data }) => {
  try {
    const answer = await (${code}\n)(data);
    self.postMessage(typeof answer === "string" ? answer : JSON.stringify(answer) ?? "null");
  } catch (error) {
    self.postMessage("Error: " + error);
  }
};`;

addEventListener("message", ({ data, ports: [port] }) => {
  const url = URL.createObjectURL(new Blob([runner(data.code)], { type: "text/javascript" }));
  const worker = new Worker(url);
  const end = (answer) => {
    clearTimeout(timer);
    worker.terminate();
    URL.revokeObjectURL(url);
    port.postMessage(answer);
  };
  const timer = setTimeout(
    () => end(`Error: the function did not finish within ${data.limitS} s.`),
    data.limitS * 1000,
  );
  worker.onmessage = (event) => end(event.data);
  worker.onerror = (event) => end(`Error: ${event.message || "the function could not be parsed"}`);
  let given;
  try {
    given = JSON.parse(data.argumentsText || "{}");
  } catch {
    return end("Error: the arguments of the call are not valid JSON.");
  }
  worker.postMessage(given);
});
