// The exported model in the browser: ONNX Runtime on one thread, and the rollout of its attention.

import * as ort from "./ort/ort.wasm.min.mjs";
import { Attention } from "./maths.js";

ort.env.wasm.numThreads = 1; // more need headers that static hosts do not send
ort.env.wasm.wasmPaths = new URL("./ort/", import.meta.url).href;

/** Download a file; `progress` receives the bytes so far. */
async function download(address, progress) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address}: status ${answer.status}`);
  const parts = [], reader = answer.body.getReader();
  for (let total = 0; ;) {
    const { done, value } = await reader.read();
    if (done) return new Uint8Array(await new Blob(parts).arrayBuffer());
    parts.push(value);
    progress((total += value.length));
  }
}

/** @returns {Promise<Model>} */
export async function openModel(progress = () => {}) {
  const about = await (await fetch("page.json")).json();
  const bytes = await download("model/model.onnx", (read) => progress(read / 1e6, about.megabytes));
  return new Model(about, await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] }));
}

class Model {
  constructor(about, session) {
    Object.assign(this, { about, session });
  }

  /** Logits, and the weights of the patches in what the classifier reads, or null without maps. */
  async run(pixels) {
    const { size, channels, maps } = this.about;
    const found = await this.session.run({ pixels: new ort.Tensor("uint8", pixels, [1, ...size, channels]) });
    return { logits: found.logits.data, relevance: maps.length ? this.rollOut(maps.map((name) => found[name])) : null };
  }

  rollOut(maps) {
    const { grid: [h, w], prefix, reads } = this.about, tokens = prefix.length + h * w;
    const readout = new Float32Array(tokens);
    if (reads.length) for (const name of reads) readout[prefix.indexOf(name)] = 1 / reads.length;
    else readout.fill(1 / (h * w), prefix.length);
    const attention = new Attention(maps.map(({ dims }) => dims[1]), tokens, h * w, readout);
    attention.means = maps.map(meanOfHeads);
    return attention.toPatches(attention.rollout(maps.length - 1, null)).values;
  }
}

/** The mean of the heads, (1, H, Nq, N) → (N, N); the last layer computes only the tokens that the classifier reads. */
function meanOfHeads({ data, dims: [, heads, queries, tokens] }) {
  const found = new Float32Array(tokens * tokens), step = queries * tokens;
  for (let i = 0; i < step; i++) for (let head = 0; head < heads; head++) found[i] += data[head * step + i] / heads;
  for (let token = queries; token < tokens; token++) found[token * tokens + token] = 1;
  return found;
}
