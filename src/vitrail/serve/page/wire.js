// What travels between the page and the server: JSON, photos and texts up, safetensors down.

const KINDS = {
  U8: Uint8Array, I32: Int32Array, F32: Float32Array, F64: Float64Array, I64: BigInt64Array,
};

/**
 * Arrays and metadata of a safetensors file: 8 bytes of length, a JSON header, the values.
 * @param {ArrayBuffer} buffer
 * @returns {{about: any, arrays: Object<string, {data: any, shape: number[]}>}}
 */
export function readSafetensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const { __metadata__: metadata, ...entries } = header, arrays = {};
  for (const [name, { dtype, shape, data_offsets: [start, end] }] of Object.entries(entries)) {
    const Kind = KINDS[dtype];
    if (!Kind) throw new Error(`array ${name} has type ${dtype}, which this page cannot read`);
    arrays[name] = { data: new Kind(buffer.slice(8 + length + start, 8 + length + end)), shape };
  }
  return { about: JSON.parse(metadata?.explanation ?? "{}"), arrays };
}

/** What went wrong, in the words of the server; every failure of a request becomes an Error with one line. */
async function check(response) {
  if (response.ok) return response;
  let reason = `the server answered ${response.status}`;
  try {
    reason = (await response.json()).error ?? reason;
  } catch { /* not JSON: keep the status */ }
  const error = new Error(reason);
  error.retryAfter = Number(response.headers.get("Retry-After")) || 0;
  error.status = response.status;
  throw error;
}

let token = "";

/** The token of a server that asks for one comes with the address, #token=…; it is kept for this window only. */
export function takeToken() {
  const words = new URLSearchParams(location.hash.slice(1)), given = words.get("token");
  try {
    if (given) sessionStorage.setItem("vitrail-token", given);
    token = given ?? sessionStorage.getItem("vitrail-token") ?? "";
  } catch {
    token = given ?? "";
  }
  words.delete("token");
  if (given) history.replaceState(null, "", `#${words}`);
}

async function request(address, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  try {
    return await check(await fetch(address, { ...options, headers }));
  } catch (error) {
    if (error instanceof TypeError) throw new Error("the server does not answer; is `vitrail serve` still running?");
    throw error;
  }
}

/** The models, what each can show, and the photos that come with the server. */
export async function fetchModels() {
  return (await request("explore")).json();
}

export async function fetchExample(name) {
  return (await request(`examples/${encodeURIComponent(name)}`)).blob();
}

/**
 * Ask a model to explain a photo or a text. A busy server is asked again, as often as it suggests, three times.
 * @param {string} model
 * @param {Blob | string} body
 * @param {Object<string, string | number>} query
 * @param {AbortSignal} [signal]
 */
export async function explore(model, body, query, signal) {
  const words = new URLSearchParams(Object.entries(query).map(([name, value]) => [name, String(value)]));
  const address = `models/${model.split("/").map(encodeURIComponent).join("/")}/explore?${words}`;
  for (let attempt = 0; ; attempt++) {
    try {
      return readSafetensors(await (await request(address, { method: "POST", body, signal })).arrayBuffer());
    } catch (error) {
      if (error.status !== 429 || attempt === 3) throw error;
      await new Promise((resolve) => setTimeout(resolve, 1000 * (error.retryAfter || 1)));
    }
  }
}

/** The first 16 hexadecimal digits of the SHA-256 of a file, to name it in a link; empty where it is not available. */
export async function digest(bytes) {
  if (!globalThis.crypto?.subtle) return "";
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(hash.slice(0, 8), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
