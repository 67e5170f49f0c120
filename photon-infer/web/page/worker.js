// Holds the checkpoint, so that the page never stands still. Messages come one at a time: `load`, then any `generate`; `stop`
// may come in between.

import init, { PhotonRunner } from "./photon_web.js";

// How long the worker computes before it looks for messages.
const BREATH_MILLIS = 15;

let runner;
let wantsStop = false;

// Goes on after the messages that wait; unlike a timer, at once.
const messagesSeen = () => new Promise((resolve) => {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = resolve;
  port2.postMessage(null);
});

async function load({ config, tokenizer, weights, device }) {
  await init();
  runner = await PhotonRunner.load(config, new Uint8Array(tokenizer), new Uint8Array(weights), device);
  return {
    device: runner.device(),
    note: runner.note(),
    config: JSON.parse(runner.config()),
    presets: JSON.parse(runner.presets()),
  };
}

async function generate({ request }) {
  wantsStop = false;
  const started = performance.now();
  let first = started;
  let lastBreath = started;
  const outcome = await runner.generate(JSON.stringify(request), async (json) => {
    const now = performance.now();
    const progress = JSON.parse(json);
    if (progress.tokens === 1) first = now;
    const seconds = { prompt: (first - started) / 1000, decode: (now - first) / 1000 };
    postMessage({ kind: "progress", ...progress, seconds });
    if (now - lastBreath > BREATH_MILLIS) {
      await messagesSeen();
      lastBreath = performance.now();
    }
    return !wantsStop;
  });
  return JSON.parse(outcome);
}

onmessage = async ({ data }) => {
  if (data.kind === "stop") {
    wantsStop = true;
    return;
  }
  try {
    const answer = data.kind === "load" ? await load(data) : await generate(data);
    postMessage({ kind: data.kind, ...answer });
  } catch (error) {
    const message = error instanceof WebAssembly.RuntimeError
      ? `the program broke down (${error.message}): open the checkpoint again; the browser's console has the reason`
      : String(error?.message ?? error);
    postMessage({ kind: "error", during: data.kind, message });
  }
};
