"use strict";
// Reading what the page has packed, and saying it for people. Text of the log goes through `visible`,
// and into the page through `make` alone, which sets textContent.

const utf8 = new TextDecoder();

async function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.trim()), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return JSON.parse(utf8.decode(await new Response(stream).arrayBuffer()));
}

/** Make an element: `make("td", {className: "right"}, "text", child)`. */
function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [property, value] of Object.entries(properties)) {
    if (property.includes("-") || property === "role" || property === "colspan") {
      element.setAttribute(property, value);
    } else if (value !== undefined) {
      element[property] = value;
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map(child =>
    child instanceof Node ? child : document.createTextNode(visible(child))));
  return element;
}

// Controls, bidi and other format characters (but for joiners), surrogates, line separators.
const HIDDEN = /[\p{Cc}\p{Cs}\p{Zl}\p{Zp}]|(?![\u200c\u200d])\p{Cf}/gu;
const NAMED = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** Show what would move or hide other text as an escape. */
function visible(text) {
  return String(text).replace(HIDDEN, (char) =>
    NAMED[char] ?? `\\u{${char.codePointAt(0).toString(16)}}`);
}

const integers = new Intl.NumberFormat("en");
const count = (number) => integers.format(number);
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function duration(ms) {
  if (ms === null || ms === undefined) return "";
  if (ms === 0) return "0";
  const size = Math.abs(ms);
  if (size < 9.95) return `${ms.toFixed(1)} ms`;
  if (size < 999.5) return `${ms.toFixed(0)} ms`;
  if (size < 59950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  if (size < 3.6e6) return `${Math.floor(seconds / 60)}m${String(seconds % 60).padStart(2, "0")}s`;
  const minutes = Math.round(ms / 60000);
  return `${Math.floor(minutes / 60)}h${String(minutes % 60).padStart(2, "0")}m`;
}

// A fixture has no date: its clock begins here (undated.py).
const EPOCH = 1e12;
const LONGEST = 1e11;

function clock(ms) {
  if (ms >= EPOCH && ms < EPOCH + LONGEST) return `${ms > EPOCH ? duration(ms - EPOCH) : "0 s"} into the fixture`;
  const date = new Date(ms);
  if (!(ms > 0) || Number.isNaN(date.getTime())) return "";
  const two = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} `
    + `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** The least round number, of these factors and a power of ten, that is at least `least`. */
function roundUp(least, factors = [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * (factors.find((factor) => factor * power >= least) ?? 10);
}

// How a request ended, by kind: the kind has the colour.
const KINDS = {
  finished: "good",
  aborted: "abort", cancelled: "abort",
  reset: "cut", timeout: "cut", unreachable: "cut", no_terminal: "cut",
  engine_error: "error", http_error: "error",
  open: "open", superseded: "open",
};
const STATUSES = { completed: "good", truncated: "good", aborted: "abort", failed: "error", pending: "open", "went on": "abort" };

let palette = {};

/** Read the theme's colours for drawing. */
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["good", "abort", "cut", "error", "open", "text", "dim", "line", "panel", "selected", "hover", "accent", "weights", "page"];
  palette = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** Size a canvas to its box, for this screen's pixels; returns what to draw with. */
function context(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  return pen;
}
