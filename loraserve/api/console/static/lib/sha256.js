// SHA-256 piece by piece. crypto.subtle wants the whole file at once, and no page over plain HTTP has it.
const K = new Uint32Array(64);
const START = new Uint32Array(8);
{
  // The first 32 bits of the fractions of the primes' cube and square roots (FIPS 180-4).
  const fraction = (value) => Math.floor((value - Math.floor(value)) * 2 ** 32);
  let found = 0;
  for (let number = 2; found < 64; number += 1) {
    let isPrime = true;
    for (let divisor = 2; divisor * divisor <= number; divisor += 1) if (number % divisor === 0) isPrime = false;
    if (!isPrime) continue;
    if (found < 8) START[found] = fraction(Math.sqrt(number));
    K[found] = fraction(Math.cbrt(number));
    found += 1;
  }
}

export class Sha256 {
  #state = START.slice();
  #block = new Uint8Array(64);
  #held = 0;
  #total = 0;
  #words = new Uint32Array(64);

  update(bytes) {
    this.#total += bytes.length;
    let at = 0;
    if (this.#held) {
      const taken = Math.min(64 - this.#held, bytes.length);
      this.#block.set(bytes.subarray(0, taken), this.#held);
      this.#held += taken;
      at = taken;
      if (this.#held < 64) return this;
      this.#compress(this.#block, 0);
      this.#held = 0;
    }
    for (; at + 64 <= bytes.length; at += 64) this.#compress(bytes, at);
    this.#block.set(bytes.subarray(at));
    this.#held = bytes.length - at;
    return this;
  }

  hex() {
    const total = this.#total;
    const padding = new Uint8Array((this.#held < 56 ? 64 : 128) - this.#held);
    padding[0] = 0x80;
    const view = new DataView(padding.buffer);
    view.setUint32(padding.length - 8, Math.floor(total / 2 ** 29));
    view.setUint32(padding.length - 4, (total << 3) >>> 0);
    this.update(padding);
    return Array.from(this.#state, (word) => word.toString(16).padStart(8, "0")).join("");
  }

  #compress(bytes, at) {
    const w = this.#words;
    for (let i = 0; i < 16; i += 1) {
      const j = at + 4 * i;
      w[i] = (bytes[j] << 24) | (bytes[j + 1] << 16) | (bytes[j + 2] << 8) | bytes[j + 3];
    }
    for (let i = 16; i < 64; i += 1) {
      const x = w[i - 15];
      const y = w[i - 2];
      const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      w[i] = (w[i - 16] + s0 + w[i - 7] + s1) | 0;
    }
    let [a, b, c, d, e, f, g, h] = this.#state;
    for (let i = 0; i < 64; i += 1) {
      const s1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + K[i] + w[i]) | 0;
      const s0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g;
      g = f;
      f = e;
      e = (d + t1) | 0;
      d = c;
      c = b;
      b = a;
      a = (t1 + t2) | 0;
    }
    const s = this.#state;
    s[0] += a;
    s[1] += b;
    s[2] += c;
    s[3] += d;
    s[4] += e;
    s[5] += f;
    s[6] += g;
    s[7] += h;
  }
}
