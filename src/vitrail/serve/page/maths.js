// Maps computed in the page. L layers, H heads, N = E + n tokens: E prefix tokens, then n = h·w patches.

/** Sum of an array. */
const total = (values) => values.reduce((sum, value) => sum + value, 0);

/** Values divided by their sum; zeros stay zeros. */
export function normalize(values) {
  const sum = total(values);
  return sum > 0 ? values.map((value) => value / sum) : values;
}

/** Probabilities of logits. */
export function softmax(logits) {
  const top = logits.reduce((most, value) => Math.max(most, value), -Infinity);
  return normalize(Float64Array.from(logits, (value) => Math.exp(value - top)));
}

/** The quantile of values, interpolated linearly as numpy does. */
export function quantile(values, share) {
  const sorted = Float64Array.from(values).sort();
  const place = share * (sorted.length - 1), low = Math.floor(place);
  const high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (place - low) * (sorted[high] - sorted[low]);
}

/** Indices of the largest values, the first of equal ones first. */
export function largest(values, count) {
  return Array.from(values.keys()).sort((a, b) => values[b] - values[a] || a - b).slice(0, count);
}

/** Which values belong to the strongest 5%; none if all are equal. */
export function strongest(values, share = 0.05) {
  const bound = quantile(values, 1 - share), least = Math.min(...values);
  return Array.from(values, (value) => value >= bound && value > least);
}

/** How many of n patches are a share: rounded, and at least one stays. */
export const shareOf = (share, count) => Math.min(Math.floor(share * count + 0.5), count - 1);

/** Start and end of a scale: 0 (or the smallest value) to the 95% quantile, never empty. */
export function limits(values, fromZero = true) {
  const low = fromZero ? 0 : Math.min(...values);
  let high = quantile(values, 0.95);
  if (high <= low) high = Math.max(...values);
  return [low, high > low ? high : low + 1];
}

/**
 * The attention of one photo: rows on demand, from maps that were sent as bytes with a scale per row.
 */
export class Attention {
  /**
   * @param {number[]} heads heads of each layer
   * @param {number} tokens N
   * @param {number} patches n
   * @param {Float32Array} readout weight of each token in what the classifier reads
   */
  constructor(heads, tokens, patches, readout) {
    Object.assign(this, { heads, tokens, patches, readout, layers: [], means: [] });
  }

  /** Add a layer: values 0 to 255, (H, N, N), and the scale of each row, (H, N). */
  addLayer(layer, bytes, scale) {
    this.layers[layer] = { bytes, scale };
    this.means[layer] = undefined;
  }

  has(layer) {
    return this.layers[layer] !== undefined;
  }

  /** A row of a head: (N). */
  headRow(layer, head, token, into = new Float32Array(this.tokens), weight = 1) {
    const { bytes, scale } = this.layers[layer], n = this.tokens;
    const row = head * n + token, start = row * n, factor = weight * scale[row] / 255;
    for (let i = 0; i < n; i++) into[i] += factor * bytes[start + i];
    return into;
  }

  /** What tokens attend to in a layer: a head's row or the mean of all heads, for a token or the classifier's input. */
  row(layer, head, token) {
    const heads = head === "mean" ? Array.from({ length: this.heads[layer] }, (_, n) => n) : [head];
    const into = new Float32Array(this.tokens);
    for (const each of heads) {
      if (token !== null) this.headRow(layer, each, token, into, 1 / heads.length);
      else this.readout.forEach((weight, from) => weight && this.headRow(layer, each, from, into, weight / heads.length));
    }
    return into;
  }

  /** The mean of all heads, rows that sum to 1: (N, N). */
  mean(layer) {
    if (this.means[layer]) return this.means[layer];
    const n = this.tokens, { bytes, scale } = this.layers[layer], found = new Float32Array(n * n);
    for (let head = 0; head < this.heads[layer]; head++) {
      for (let row = 0; row < n; row++) {
        const factor = scale[head * n + row], start = (head * n + row) * n, to = row * n;
        for (let i = 0; i < n; i++) found[to + i] += factor * bytes[start + i];
      }
    }
    for (let row = 0; row < n; row++) {
      const sum = total(found.subarray(row * n, row * n + n));
      if (sum > 0) for (let i = row * n; i < row * n + n; i++) found[i] /= sum;
    }
    this.means[layer] = found;
    return found;
  }

  /** Rollout up to a layer: token · Π (½I + ½A), from this layer to the first: (N). */
  rollout(layer, token) {
    const n = this.tokens;
    let row = new Float64Array(this.readout);
    if (token !== null) row.fill(0)[token] = 1;
    for (let at = layer; at >= 0; at--) {
      const mean = this.mean(at), next = new Float64Array(n);
      for (let from = 0; from < n; from++) {
        const weight = row[from] / 2;
        if (!weight) continue;
        for (let i = 0, start = from * n; i < n; i++) next[i] += weight * mean[start + i];
      }
      row = row.map((value, i) => value / 2 + next[i]);
    }
    return row;
  }

  /** The patches of a row in multiples of the average, (n), and the share that prefix tokens have. */
  toPatches(row) {
    const patches = normalize(row.slice(row.length - this.patches)), before = total(row.slice(0, -this.patches));
    return { values: patches.map((value) => value * this.patches), prefix: before / (total(row) || 1) };
  }
}

/** The weight of each token in the input of the classifier: class and distillation tokens, or the mean of the patches. */
export function defaultReadout(prefix, patches, tokens) {
  const read = prefix.flatMap((name, index) => (/^(class|distill)/.test(name) ? [index] : []));
  const weights = new Float32Array(tokens);
  if (read.length) for (const index of read) weights[index] = 1 / read.length;
  else weights.fill(1 / patches, tokens - patches);
  return weights;
}

/** The patch at a point of the photo (shares of its width and height), as [row, column]; null outside of the box. */
export function patchAt([x, y], { photo: [height, width], box: [top, left, rows, columns], grid: [h, w] }) {
  const row = Math.floor(((y * height - top) / rows) * h), column = Math.floor(((x * width - left) / columns) * w);
  return row >= 0 && row < h && column >= 0 && column < w ? [row, column] : null;
}

/** The middle of a patch as a point of the photo. */
export function centerOf([row, column], { photo: [height, width], box: [top, left, rows, columns], grid: [h, w] }) {
  return [(left + ((column + 0.5) * columns) / w) / width, (top + ((row + 0.5) * rows) / h) / height];
}

/** A seeded order of n patches, for patches that are removed at random. */
export function shuffled(count, seed) {
  const order = Array.from({ length: count }, (_, n) => n);
  let state = seed >>> 0;
  for (let i = count - 1; i > 0; i--) {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    const other = ((mixed ^ (mixed >>> 14)) >>> 0) % (i + 1);
    [order[i], order[other]] = [order[other], order[i]];
  }
  return order;
}
