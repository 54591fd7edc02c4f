"use strict";
// Small plots on canvas. Each has the numbers in its label too, for those who do not see it.

/** Columns from the bottom: `values[i]`; the labels stand below the first and the last. */
function drawHistogram(canvas, { bin, tokens, less }) {
  let last = tokens.length - 1;
  while (last > 15 && !tokens[last]) last -= 1;
  const values = [...tokens.slice(0, last + 1), less];
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const pen = context(canvas, width, height);
  const floor = height - 16;
  const most = Math.log10(Math.max(...values, 1) + 1);
  const step = width / values.length;
  values.forEach((value, i) => {
    if (!value) return;
    const tall = Math.max(2, (Math.log10(value + 1) / most) * (floor - 2));
    pen.fillStyle = i === values.length - 1 ? palette.error : probabilityColour(-(i + 0.5) * bin);
    pen.fillRect(width - (i + 1) * step, floor - tall, Math.max(step - 1, 1), tall);
  });
  pen.fillStyle = palette.line;
  pen.fillRect(0, floor, width, 1);
  pen.fillStyle = palette.dim;
  pen.textAlign = "right";
  pen.fillText("0", width, height - 6);
  pen.textAlign = "center";
  const middle = Math.round((values.length - 1) / 2);
  pen.fillText(`−${middle * bin}`, width - middle * step, height - 6);
  pen.textAlign = "left";
  pen.fillText(less ? `< −${(last + 1) * bin}` : `−${(last + 1) * bin}`, 0, height - 6);
}

/** Points over token positions; the lowest value is at the bottom. Missing ones are marked on top. */
function drawLogprobs(canvas, choice, cuts) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const pen = context(canvas, width, height);
  const left = 34;
  const floor = height - 16;
  const known = choice.logprobs.filter((value) => value !== null && value > -9999);
  const lowest = roundUp(Math.max(1, -known.reduce((low, value) => Math.min(low, value), 0)));
  const length = Math.max(choice.ids.length, 1);
  const x = (position) => left + ((position + 0.5) / length) * (width - left - 2);
  const y = (value) => 4 + (Math.min(-value, lowest) / lowest) * (floor - 6);
  pen.fillStyle = palette.dim;
  pen.textAlign = "right";
  for (const part of [0, 0.5, 1]) {
    pen.fillStyle = palette.line;
    pen.fillRect(left, Math.round(y(-part * lowest)), width - left, 1);
    pen.fillStyle = palette.dim;
    pen.fillText(part ? `−${part * lowest}` : "0", left - 6, Math.max(6, y(-part * lowest)));
  }
  for (const cut of cuts) {
    pen.fillStyle = palette.abort;
    pen.fillRect(x(cut - 0.5), 0, 1.5, floor);
  }
  const size = Math.max(1.5, Math.min(4, (width / length) * 0.8));
  choice.logprobs.forEach((value, position) => {
    pen.fillStyle = value === null ? palette.weights : probabilityColour(value);
    pen.fillRect(x(position) - size / 2, (value === null ? 2 : y(value)) - size / 2, size, size);
  });
  pen.fillStyle = palette.dim;
  pen.textAlign = "left";
  pen.fillText("token 0", left, height - 6);
  pen.textAlign = "right";
  pen.fillText(count(choice.ids.length), width, height - 6);
}

/** Tokens per second of one sample, over the time in which its tokens came. */
function drawSpeed(canvas, times) {
  const came = times.filter((time) => time !== null).sort((a, b) => a - b);
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const pen = context(canvas, width, height);
  if (came.length < 2) return 0;
  const left = 34;
  const floor = height - 16;
  const [start, end] = [came[0], came[came.length - 1]];
  const bins = Math.max(8, Math.min(80, Math.floor(came.length / 3), Math.floor((width - left) / 4)));
  const bin = Math.max((end - start) / bins, 0.1);
  const values = new Array(bins).fill(0);
  for (const time of came) values[Math.min(bins - 1, Math.floor((time - start) / bin))] += 1000 / bin;
  const most = roundUp(Math.max(...values));
  const step = (width - left) / bins;
  pen.fillStyle = palette.line;
  pen.fillRect(left, 4, width - left, 1);
  pen.fillRect(left, floor, width - left, 1);
  pen.fillStyle = palette.accent;
  values.forEach((value, i) => {
    const tall = (value / most) * (floor - 4);
    pen.fillRect(left + i * step, floor - tall, Math.max(step - 1, 1), tall);
  });
  pen.fillStyle = palette.dim;
  pen.textAlign = "right";
  pen.fillText(count(most), left - 6, 8);
  pen.fillText("0", left - 6, floor);
  pen.textAlign = "left";
  pen.fillText("0 s", left, height - 6);
  pen.textAlign = "right";
  pen.fillText(duration(end - start), width, height - 6);
  return most;
}

// Probability of a token: its class, its colour. As `show` has them in a terminal.
const LEVELS = [[0.9, "p90"], [0.5, "p50"], [0.2, "p20"], [0.05, "p05"], [0, "p00"]];

function level(logprob) {
  if (logprob === null) return "none";
  const probability = Math.exp(logprob);
  return LEVELS.find(([least]) => probability >= least)[1];
}

function probabilityColour(logprob) {
  return levelColours[level(logprob)];
}

let levelColours = {};

function readLevelColours() {
  const style = getComputedStyle(document.documentElement);
  levelColours = Object.fromEntries(
    [...LEVELS.map(([, name]) => name), "none"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
