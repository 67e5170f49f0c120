// What a visitor does, and what the worker answers. With `?model=URL` the checkpoint comes from a folder that is served.

const FILES = { config: "config.toml", tokenizer: "tokenizer.json", weights: "model.safetensors" };

const at = (id) => document.getElementById(id);
const decimals = (value, digits) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

let worker;
// What gives the files of the checkpoint, to load them anew on another device.
let source;
let presets = [];

function fail(message) {
  at("error").textContent = message;
  at("error").hidden = !message;
}

function setState(state) {
  document.body.dataset.state = state;
  at("generate").disabled = state !== "ready";
  at("stop").disabled = state !== "generating";
}

function ofFolder(files) {
  const named = (name) => {
    // The folder's own files, not those of folders in it.
    const file = files.find((file) => file.name === name && file.webkitRelativePath.split("/").length <= 2);
    if (!file) throw new Error(`this folder is no photon checkpoint: it has no ${name}`);
    return file;
  };
  const [config, tokenizer, weights] = Object.values(FILES).map(named);
  const name = config.webkitRelativePath.split("/")[0];
  const read = async () => ({
    config: await config.text(),
    tokenizer: await tokenizer.arrayBuffer(),
    weights: await weights.arrayBuffer(),
  });
  return { name, read };
}

function ofUrl(url) {
  const get = async (name) => {
    const answer = await fetch(new URL(name, new URL(url.replace(/\/*$/, "/"), location.href)));
    if (!answer.ok) throw new Error(`cannot read ${answer.url}: ${answer.status} ${answer.statusText}`);
    return answer;
  };
  const read = async () => {
    const [config, tokenizer, weights] = await Promise.all(Object.values(FILES).map(get));
    return {
      config: await config.text(),
      tokenizer: await tokenizer.arrayBuffer(),
      weights: await weights.arrayBuffer(),
    };
  };
  return { name: url, read };
}

async function load() {
  if (!source) return;
  fail("");
  setState("loading");
  at("model").textContent = `Loading ${source.name} …`;
  at("runs-on").textContent = "";
  // A device is opened once in a worker, and memory goes back with it.
  worker?.terminate();
  worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = ({ data }) => answered[data.kind](data);
  worker.onerror = (event) => answered.error({ during: "load", message: `the program cannot start: ${event.message}` });
  try {
    const files = await source.read();
    worker.postMessage({ kind: "load", ...files, device: at("device").value }, [files.tokenizer, files.weights]);
  } catch (error) {
    answered.error({ during: "load", message: error.message });
  }
}

const answered = {
  load({ device, note, config, presets: found }) {
    const levels = config.levels ? `${config.levels.length} levels, chunks of ${config.levels.map((level) => level.chunk_len).join(", ")}` : "flat";
    at("model").textContent = `${source.name}: ${levels}, vocabulary of ${config.vocab_size}`;
    at("runs-on").textContent = `Runs on ${device.startsWith("wgpu") ? "WebGPU" + device.slice(4) : "the CPU"}. ${note ?? ""}`;
    at("runs-on").dataset.device = device.split(" ")[0];
    presets = found;
    const chosen = at("preset").value;
    at("preset").replaceChildren(...presets.map(({ name, refused }) => {
      const option = new Option(refused ? `${name} (not here)` : name, name);
      option.disabled = Boolean(refused);
      option.title = refused ?? "";
      return option;
    }));
    if (presets.some(({ name, refused }) => name === chosen && !refused)) at("preset").value = chosen;
    summarise();
    setState("ready");
  },

  progress({ text, tokens, prompt_tokens, seconds, caches }) {
    at("text").append(text);
    const decode = tokens > 1 ? `${decimals((tokens - 1) / seconds.decode, 1)} tokens/s, ` : "";
    at("speed").textContent = `${tokens} tokens, ${decode}prompt ${decimals(seconds.prompt, 2)} s`;
    showCaches(caches, prompt_tokens + tokens);
  },

  generate({ tokens, finish_reason, refusal }) {
    const reasons = { length: "", eos: "; the document ends here", memory: "; out of memory", stop: "" };
    at("speed").textContent += finish_reason ? reasons[finish_reason] : "; stopped";
    at("text").dataset.tokens = tokens;
    if (refusal) fail(refusal);
    setState("ready");
  },

  error({ during, message }) {
    fail(message);
    setState(during === "load" ? "empty" : "ready");
  },
};

function showCaches(caches, nTokens) {
  const total = caches.reduce((sum, stage) => sum + stage.allocated_bytes, 0);
  const row = (name, entries, bytes, isSum) => {
    const tr = document.createElement("tr");
    tr.classList.toggle("all", isSum);
    for (const text of [name, entries, decimals(bytes, 0), decimals(bytes / nTokens, 1)]) tr.insertCell().textContent = text;
    const bar = document.createElement("div");
    bar.className = "bar";
    bar.style.width = `${isSum || !total ? 0 : 100 * bytes / total}%`;
    tr.insertCell().append(bar);
    return tr;
  };
  const rows = caches.map(({ stage, entries, allocated_bytes: bytes }) => row(stage, decimals(entries, 0), bytes, false));
  at("caches").replaceChildren(...rows, row("all", "", total, true));
  at("memory").hidden = false;
}

function summarise() {
  at("summary").textContent = presets.find(({ name }) => name === at("preset").value)?.summary ?? "";
}

at("folder").addEventListener("change", (event) => {
  try {
    source = ofFolder([...event.target.files]);
  } catch (error) {
    fail(error.message);
    return;
  }
  load();
});
at("device").addEventListener("change", load);
at("preset").addEventListener("change", summarise);
at("stop").addEventListener("click", () => worker.postMessage({ kind: "stop" }));
at("request").addEventListener("submit", (event) => {
  event.preventDefault();
  fail("");
  const prompt = document.createElement("span");
  prompt.className = "prompt";
  prompt.textContent = at("prompt").value;
  at("text").replaceChildren(prompt);
  at("speed").textContent = "";
  setState("generating");
  const sampling = { temperature: Number(at("temperature").value), seed: Number(at("seed").value) };
  if (at("top-p").value) sampling.top_p = Number(at("top-p").value);
  const request = { prompt: at("prompt").value, preset: at("preset").value, max_tokens: Number(at("max-tokens").value), sampling };
  worker.postMessage({ kind: "generate", request });
});

setState("empty");
const url = new URLSearchParams(location.search).get("model");
if (url) {
  source = ofUrl(url);
  load();
}
