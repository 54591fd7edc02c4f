"use strict";
// The lanes: one canvas that draws the rows in sight, in a box that scrolls over all of them.

const ROW = 22;
const BAR = 12;
/** How many times what is usual the plot of tokens per second reaches; a burst beyond is cut off. */
const BURST = 3;

class Timeline {
  /** `open(lane)` is called for a sample that was chosen. */
  constructor(overview, open) {
    this.overview = overview;
    this.open = open;
    this.lanes = overview.lanes;
    this.steps = overview.step === null ? stepsOf(overview.lanes) : [];
    this.at = 0;
    this.opened = null;
    this.hovered = null;
    this.box = document.getElementById("lanes");
    this.space = document.getElementById("space");
    this.bars = document.getElementById("bars");
    this.ruler = document.getElementById("ruler");
    this.current = document.getElementById("current");
    this.tip = document.getElementById("tip");
    // Of all lanes and not of those that a filter leaves: the page stays as it is while somebody types.
    this.box.style.setProperty("--lanes", `${overview.lanes.length * ROW + 1}px`);
    this.fit();
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  show(lanes) {
    const lane = this.lanes[this.at];
    this.lanes = lanes;
    this.at = Math.max(0, lanes.indexOf(lane));
    this.space.style.height = `${lanes.length * ROW}px`;
    this.name();
    this.draw();
    this.move(this.at);
  }

  get gutter() { return this.box.clientWidth < 520 ? 84 : 168; }
  get width() { return Math.max(this.box.clientWidth - this.gutter, 1); }
  x(time) { return this.gutter + ((time - this.start) / (this.end - this.start)) * this.width; }
  time(x) { return this.start + ((x - this.gutter) / this.width) * (this.end - this.start); }

  fit() {
    const { start, end } = this.overview;
    const margin = Math.max((end - start) * 0.01, 0.5);
    [this.start, this.end] = [start - margin, end + margin];
    this.draw();
  }

  /** Zoom by a factor about a time, by default the middle. */
  zoom(factor, about = (this.start + this.end) / 2) {
    const whole = this.overview.end - this.overview.start;
    const span = this.end - this.start;
    factor = Math.min(Math.max(span / factor, 1), Math.max(whole * 20, 1000)) / span;
    this.start = about - (about - this.start) * factor;
    this.end = about + (this.end - about) * factor;
    this.draw();
  }

  pan(pixels) {
    const by = (pixels / this.width) * (this.end - this.start);
    this.start += by;
    this.end += by;
    this.draw();
  }

  move(to) {
    if (!this.lanes.length) return;
    this.at = Math.min(Math.max(to, 0), this.lanes.length - 1);
    const top = this.at * ROW;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    const bottom = top + ROW - this.box.clientHeight;
    if (bottom > this.box.scrollTop) this.box.scrollTop = bottom;
    this.name();
    this.draw();
  }

  /** Say the current lane to who cannot see it. */
  name() {
    const lane = this.lanes[this.at];
    if (!lane) {
      this.box.removeAttribute("aria-activedescendant");
      this.current.textContent = "";
      return;
    }
    this.box.setAttribute("aria-activedescendant", "current");
    this.current.setAttribute("aria-setsize", this.lanes.length);
    this.current.setAttribute("aria-posinset", this.at + 1);
    this.current.textContent = visible(describe(lane, this.overview));
  }

  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      if (!this.box.clientWidth) return;
      this.drawRuler();
      this.drawBars();
    });
  }

  drawBars() {
    const width = this.box.clientWidth;
    const height = this.box.clientHeight;
    const top = this.box.scrollTop;
    const pen = context(this.bars, width, height);
    const first = Math.floor(top / ROW);
    const last = Math.min(this.lanes.length, Math.ceil((top + height) / ROW));
    const focused = document.activeElement === this.box;
    for (let i = first; i < last; i += 1) {
      const y = i * ROW - top;
      const shade = this.lanes[i] === this.opened ? palette.selected : i === this.hovered ? palette.hover : null;
      if (shade) {
        pen.fillStyle = shade;
        pen.fillRect(0, y, width, ROW);
      }
    }
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, width - this.gutter, height);
    pen.clip();
    this.drawGrid(pen, height);
    for (let i = first; i < last; i += 1) this.drawLane(pen, this.lanes[i], i * ROW - top);
    pen.restore();
    for (let i = first; i < last; i += 1) this.drawName(pen, this.lanes[i], i * ROW - top);
    pen.fillStyle = palette.line;
    pen.fillRect(this.gutter - 1, 0, 1, height);
    if (focused && this.lanes.length) {
      pen.strokeStyle = palette.accent;
      pen.lineWidth = 2;
      pen.strokeRect(1, this.at * ROW - top + 1, width - 2, ROW - 2);
    }
    if (!this.lanes.length) {
      pen.fillStyle = palette.dim;
      pen.textAlign = "center";
      pen.fillText("no sample is like that", width / 2, height / 2);
    }
  }

  drawName(pen, lane, y) {
    pen.fillStyle = palette[STATUSES[statusOf(lane, this.overview)]];
    pen.beginPath();
    pen.arc(9, y + ROW / 2, 4, 0, 7);
    pen.fill();
    const worst = severityOf(lane, this.overview);
    pen.fillStyle = palette.text;
    pen.textAlign = "left";
    const room = this.gutter - 24 - (worst ? 14 : 0);
    pen.fillText(shorten(pen, visible(lane.name.slice(0, 200)), room), 20, y + ROW / 2 + 0.5);
    if (worst) {
      pen.fillStyle = palette[{ error: "error", warning: "cut", info: "dim" }[worst]];
      pen.textAlign = "center";
      pen.fillText(worst === "info" ? "·" : "!", this.gutter - 10, y + ROW / 2 + 0.5);
    }
  }

  drawLane(pen, lane, y) {
    const top = y + (ROW - BAR) / 2;
    const { step } = this.overview;
    for (const bar of lane.bars) {
      const left = this.x(bar.sent);
      const right = Math.max(this.x(bar.end), left + 2);
      if (right < this.gutter || left > this.gutter + this.width) continue;
      const colour = palette[KINDS[bar.ended]];
      pen.globalAlpha = step !== null && bar.step !== null && bar.step !== step ? 0.35 : 1;
      const tokens = bar.first === null ? right : Math.min(this.x(bar.first), right);
      pen.fillStyle = colour;
      const alpha = pen.globalAlpha;
      pen.globalAlpha = alpha * 0.3;
      pen.fillRect(left, top, tokens - left, BAR);
      pen.globalAlpha = alpha;
      pen.fillRect(tokens, top, right - tokens, BAR);
      drawCause(pen, bar.cause, left, y + ROW / 2);
      drawEnd(pen, KINDS[bar.ended], right, top);
      pen.globalAlpha = 1;
    }
    pen.fillStyle = palette.text;
    for (const mark of lane.marks) {
      const x = this.x(mark.time);
      pen.beginPath();
      pen.moveTo(x, y + ROW / 2 - 4);
      pen.lineTo(x + 4, y + ROW / 2);
      pen.lineTo(x, y + ROW / 2 + 4);
      pen.lineTo(x - 4, y + ROW / 2);
      pen.fill();
    }
  }

  drawGrid(pen, height) {
    pen.fillStyle = palette.line;
    for (const time of this.ticks()) pen.fillRect(Math.round(this.x(time)), 0, 1, height);
    pen.fillStyle = palette.weights;
    for (const [, time] of this.overview.versions) pen.fillRect(Math.round(this.x(time)) - 1, 0, 1.5, height);
    pen.fillStyle = palette.dim;
    for (const [, time] of this.steps) pen.fillRect(Math.round(this.x(time)) - 1, 0, 1.5, height);
  }

  ticks() {
    const step = roundUp(((this.end - this.start) / this.width) * 90, [1, 2, 5, 10]);
    const found = [];
    const { start } = this.overview;
    for (let i = Math.ceil((this.start - start) / step); start + i * step <= this.end; i += 1) found.push(start + i * step);
    return found;
  }

  /** Tokens per second over the same stretch of time, the time, and the weight versions. */
  drawRuler() {
    const width = this.box.clientWidth;
    const height = 84;
    const floor = height - 20;
    const pen = context(this.ruler, width, height);
    const { rate, versions, start } = this.overview;
    const columns = new Array(Math.ceil(this.width / 3)).fill(0);
    const span = (this.end - this.start) / columns.length;
    rate.tokens.forEach((tokens, i) => {
      const from = (rate.start + i * rate.bin - this.start) / span;
      const to = from + rate.bin / span;
      for (let c = Math.max(0, Math.floor(from)); c < Math.min(columns.length, to); c += 1) {
        columns[c] += tokens * ((Math.min(c + 1, to) - Math.max(c, from)) / (to - from));
      }
    });
    const values = columns.map((tokens) => (tokens * 1000) / span);
    const peak = Math.max(...values, 0);
    const most = peak ? roundUp(Math.min(peak, usual(values) * BURST)) : 1;
    pen.textAlign = "right";
    pen.fillStyle = palette.dim;
    pen.fillText("tokens/s", this.gutter - 8, 8);
    if (peak) pen.fillText(count(most), this.gutter - 8, 24);
    if (peak > most) pen.fillText(`peak ${count(Math.round(peak))}`, this.gutter - 8, 40);
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, this.width, height);
    pen.clip();
    pen.fillStyle = palette.accent;
    pen.beginPath();
    pen.moveTo(this.gutter, floor);
    values.forEach((value, i) => {
      const y = floor - Math.min(value / most, 1) * (floor - 20);
      pen.lineTo(this.gutter + i * 3, y);
      pen.lineTo(this.gutter + (i + 1) * 3, y);
    });
    pen.lineTo(this.gutter + this.width, floor);
    pen.globalAlpha = 0.55;
    pen.fill();
    pen.globalAlpha = 1;
    pen.fillStyle = palette.cut; // cut off
    values.forEach((value, i) => value > most && pen.fillRect(this.gutter + i * 3, 18, 3, 2));
    pen.fillStyle = palette.dim;
    pen.textAlign = "left";
    for (const time of this.ticks()) {
      const x = Math.round(this.x(time));
      pen.fillRect(x, floor, 1, 5);
      const label = duration(time - start);
      if (x + 4 + pen.measureText(label).width <= width) pen.fillText(label, x + 4, height - 8);
    }
    this.drawLabels(pen, palette.weights, 8, floor, versions.map(([version, time]) => [`weights ${visible(version.slice(0, 60))}`, time]));
    this.drawLabels(pen, palette.text, 28, floor, this.steps.map(([step, time]) => [`step ${step}`, time]));
    pen.restore();
    pen.fillStyle = palette.line;
    pen.fillRect(this.gutter, floor, this.width, 1);
  }

  /** Lines where something begins, each with its label as far as there is room before the next one. */
  drawLabels(pen, colour, y, height, labels) {
    const edge = this.gutter + this.width;
    const shown = labels.map(([label, time]) => [label, this.x(time)]).filter(([, x]) => x >= this.gutter - 1 && x <= edge);
    pen.fillStyle = colour;
    shown.forEach(([label, x], i) => {
      pen.fillRect(Math.round(x) - 1, 0, 1.5, height);
      const room = (shown[i + 1]?.[1] ?? edge) - x - 10;
      if (room > 20) pen.fillText(shorten(pen, label, room), x + 4, y);
    });
  }

  listen() {
    const { box } = this;
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    box.addEventListener("focus", () => this.draw());
    box.addEventListener("blur", () => this.draw());
    box.addEventListener("keydown", (event) => this.key(event));
    for (const element of [box, this.ruler]) {
      element.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    }
    this.drag();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves) this.move(this.at + moves[event.key]);
    else if (event.key === "ArrowLeft") this.pan(-this.width / 8);
    else if (event.key === "ArrowRight") this.pan(this.width / 8);
    else if (event.key === "+" || event.key === "=") this.zoom(1.5);
    else if (event.key === "-") this.zoom(1 / 1.5);
    else if (event.key === "0") this.fit();
    else if (event.key === "Enter" && this.lanes[this.at]) this.open(this.lanes[this.at], true);
    else return;
    event.preventDefault();
  }

  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      this.zoom(Math.exp(-event.deltaY / 300), this.time(this.place(event).x));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan(event.deltaX || event.deltaY);
    } else return;
    event.preventDefault();
  }

  place(event) {
    const frame = this.box.getBoundingClientRect();
    return { x: event.clientX - frame.left, y: event.clientY - frame.top };
  }

  laneAt(event) {
    const index = Math.floor((this.place(event).y + this.box.scrollTop) / ROW);
    return index >= 0 && index < this.lanes.length ? index : null;
  }

  /** One pointer pans or clicks, two zoom. */
  drag() {
    const down = new Map();
    let moved = 0;
    this.box.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      down.set(event.pointerId, event);
      moved = 0;
    });
    this.box.addEventListener("pointermove", (event) => {
      const before = down.get(event.pointerId);
      if (!before) {
        this.hover(event);
        return;
      }
      this.hover(null);
      moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
      if (moved > 4 && !this.box.hasPointerCapture(event.pointerId)) this.box.setPointerCapture(event.pointerId);
      const other = [...down.values()].find((one) => one.pointerId !== event.pointerId);
      if (other) {
        const was = Math.abs(before.clientX - other.clientX);
        const is = Math.abs(event.clientX - other.clientX);
        if (was > 10 && is > 10) this.zoom(is / was, this.time(this.place(other).x));
      } else if (moved > 4) {
        this.pan(before.clientX - event.clientX);
      }
      down.set(event.pointerId, event);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      this.box.addEventListener(end, (event) => {
        const clicked = end === "pointerup" && down.has(event.pointerId) && moved <= 4;
        down.delete(event.pointerId);
        const index = clicked ? this.laneAt(event) : null;
        if (index !== null) {
          this.move(index);
          this.open(this.lanes[index], false);
        }
      });
    }
    this.box.addEventListener("pointerleave", () => this.hover(null));
  }

  hover(event) {
    const index = event && event.pointerType === "mouse" ? this.laneAt(event) : null;
    if (index !== this.hovered) {
      this.hovered = index;
      this.draw();
    }
    this.tip.hidden = index === null;
    if (index === null) return;
    const lane = this.lanes[index];
    const time = this.time(this.place(event).x);
    const bar = lane.bars.find((one) => one.sent <= time && time <= Math.max(one.end, one.sent + 1));
    const lines = [make("strong", {}, lane.name.slice(0, 200)), make("div", {}, statusOf(lane, this.overview) + `, ${plural(lane.tokens, "token")}`)];
    if (bar) {
      lines.push(make("div", {}, `request ${bar.number}: ${bar.cause}, ${bar.ended}, ${plural(bar.tokens, "token")} in ${duration(bar.end - bar.sent)}`));
      if (bar.detail) lines.push(make("div", { className: "dim" }, bar.detail.slice(0, 300)));
    }
    for (const mark of lane.marks.filter((one) => Math.abs(this.x(one.time) - this.place(event).x) < 6)) {
      lines.push(make("div", {}, `◆ ${mark.name}`));
    }
    this.tip.replaceChildren(...lines);
    const left = Math.min(event.clientX + 14, window.innerWidth - this.tip.offsetWidth - 8);
    const below = event.clientY + 18;
    const fits = below + this.tip.offsetHeight < window.innerHeight;
    this.tip.style.left = `${Math.max(left, 4)}px`;
    this.tip.style.top = `${fits ? below : event.clientY - this.tip.offsetHeight - 10}px`;
  }
}

/** Each step and when its first request was sent, in order; nothing where there is one alone. */
function stepsOf(lanes) {
  const found = new Map();
  for (const bar of lanes.flatMap((lane) => lane.bars)) {
    if (bar.step !== null) found.set(bar.step, Math.min(found.get(bar.step) ?? Infinity, bar.sent));
  }
  return found.size > 1 ? [...found].sort((a, b) => a[1] - b[1]) : [];
}

/** What most of these come up to, leaving out nothing and the highest tenth. */
function usual(values) {
  const found = values.filter((value) => value > 0).sort((a, b) => a - b);
  return found.length ? found[Math.floor((found.length - 1) * 0.9)] : 0;
}

function shorten(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (pen.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return `${text.slice(0, low)}…`;
}

/** A retry and a resumption are marked where they begin. */
function drawCause(pen, cause, x, y) {
  if (cause !== "retry" && cause !== "resume") return;
  pen.fillStyle = palette.text;
  pen.beginPath();
  if (cause === "resume") {
    pen.moveTo(x - 8, y - 6);
    pen.lineTo(x, y);
    pen.lineTo(x - 8, y + 6);
    pen.closePath();
    pen.fill();
  } else {
    pen.lineWidth = 1.75;
    pen.strokeStyle = palette.text;
    pen.arc(x - 7, y, 4, 0.2, 4.9);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x - 7, y - 7.5);
    pen.lineTo(x - 2, y - 4);
    pen.lineTo(x - 7, y - 0.5);
    pen.fill();
  }
}

/** An end that is no finish is marked by shape as well as by colour. */
function drawEnd(pen, kind, x, top) {
  if (kind === "good" || kind === "open") return;
  pen.fillStyle = palette.text;
  if (kind === "abort") {
    pen.fillRect(x - 1, top - 3, 2, BAR + 6);
  } else {
    pen.strokeStyle = palette.text;
    pen.lineWidth = 1.75;
    pen.beginPath();
    const y = top + BAR / 2;
    pen.moveTo(x - 3.5, y - 3.5);
    pen.lineTo(x + 3.5, y + 3.5);
    pen.moveTo(x - 3.5, y + 3.5);
    pen.lineTo(x + 3.5, y - 3.5);
    pen.stroke();
  }
}
