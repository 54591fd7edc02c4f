"use strict";
// The page as a whole: summary, filters, theme, keys.

/** A sample's status in this step; one that a later step took up went on. */
function statusOf(lane, { step }) {
  return step !== null && lane.step !== null && lane.step > step ? "went on" : lane.status;
}

function severityOf(lane, { problems }) {
  const found = new Set(lane.problems.map(([code]) => problems[code][0]));
  if (lane.unreadable) return "error";
  return ["error", "warning", "info"].find((severity) => found.has(severity)) ?? null;
}

function describe(lane, overview) {
  const problems = lane.problems.length ? `, ${plural(lane.problems.length, "problem")}` : "";
  return `${lane.name}: ${statusOf(lane, overview)}, ${plural(lane.bars.length, "request")}, ${plural(lane.tokens, "token")}${problems}`;
}

const total = (values) => values.reduce((sum, value) => sum + value, 0);

/** `reset 3, http_error 1`, of names. */
function tally(names) {
  const found = new Map();
  for (const name of names) found.set(name, (found.get(name) ?? 0) + 1);
  return [...found].sort((a, b) => b[1] - a[1]).map(([name, number]) => `${name} ${count(number)}`).join(", ");
}

function showSummary(overview) {
  const { step, lanes, logprobs, rate, start, end, versions } = overview;
  const here = (bar) => step === null || bar.step === null || bar.step === step;
  const bars = lanes.flatMap((lane) => lane.bars.filter(here));
  const runs = [...new Set(lanes.map((lane) => lane.run))].filter(Boolean);
  document.getElementById("title").textContent = step === null ? "All steps" : `Step ${step}`;
  document.getElementById("subtitle").textContent = visible([
    runs.length ? `run ${runs.join(", ").slice(0, 200)}` : null,
    bars.length ? `${clock(overview.origin + start)}, for ${duration(end - start)}` : null,
  ].filter(Boolean).join(" · "));
  const tile = (name, value, note) => make("div", { className: "tile" }, make("div", { className: "dim" }, name),
    make("div", { className: value.length > 10 ? "value long" : "value" }, value), note ? make("div", { className: "note" }, note) : null);
  const retried = tally(lanes.flatMap((lane) => lane.bars.flatMap((bar, i) =>
    (i && bar.cause === "retry" && here(bar) ? [lane.bars[i - 1].ended] : []))));
  const resumed = bars.filter((bar) => bar.cause === "resume").length;
  const generated = total(bars.map((bar) => bar.tokens));
  const lost = total(lanes.map((lane) => lane.discarded));
  const codes = lanes.flatMap((lane) => lane.problems.map(([code]) => code));
  const came = total(rate.tokens.filter((_, i) => rate.start + i * rate.bin >= start - rate.bin && rate.start + i * rate.bin <= end));
  const chart = make("canvas", { role: "img", "aria-label": "Histogram of the tokens' log-probs" });
  document.getElementById("summary").append(
    tile("samples", count(lanes.length), tally(lanes.map((lane) => statusOf(lane, overview)))),
    tile("requests", count(bars.length), [retried ? `retried after ${retried}` : "no retries", resumed ? `${count(resumed)} resumed` : null].filter(Boolean).join("; ")),
    tile("tokens", count(generated), lost ? `${count(lost)} thrown away` : "none thrown away"),
    tile("tokens per second", came ? count(Math.round((1000 * came) / (end - start))) : "–", "on average"),
    weightsTile(tile, versions.map(([version]) => version)),
    tile("problems", count(codes.length), tally(codes)),
    make("div", { className: "tile plot-tile" }, make("div", { className: "dim" },
      `tokens by log-prob (log scale)${logprobs.missing ? `; ${count(logprobs.missing)} have none` : ""}`), chart));
  return () => drawHistogram(chart, logprobs);
}

function weightsTile(tile, names) {
  if (names.length > 2) return tile("weights", plural(names.length, "version"), `${names[0]} to ${names[names.length - 1]}`.slice(0, 80));
  const [, version, note] = /^(.*?)(?: \((never set)\))?$/s.exec(names.join(", "));
  return tile("weights", version.slice(0, 60) || "–", note ?? null);
}

function showLegend() {
  const swatch = (kind, text) => make("span", { className: "key" }, make("i", { className: `swatch ${kind}` }), text);
  document.getElementById("legend").append(
    swatch("good", "finished"), swatch("abort", "aborted, cancelled"), swatch("cut", "reset, timeout, no end"), swatch("error", "error"),
    swatch("open", "open, superseded"), swatch("wait", "before the first token"),
    ...[["▶", "resumed"], ["↻", "retried"], ["❘", "abort"], ["✕", "failure"], ["◆", "mark"], ["!", "problem"]].map(([sign, text]) =>
      make("span", { className: "key" }, make("b", {}, sign), text)));
}

class Filters {
  constructor(overview, changed) {
    Object.assign(this, { overview, changed, off: new Set() });
    this.search = document.getElementById("search");
    this.problem = document.getElementById("problem");
    this.order = document.getElementById("order");
    this.chips();
    this.problems();
    this.search.addEventListener("input", () => this.apply());
    this.problem.addEventListener("change", () => this.apply());
    this.order.addEventListener("change", () => this.apply());
  }

  chips() {
    const counts = new Map();
    for (const lane of this.overview.lanes) {
      const status = statusOf(lane, this.overview);
      counts.set(status, (counts.get(status) ?? 0) + 1);
    }
    for (const status of Object.keys(STATUSES).filter((one) => counts.has(one))) {
      const chip = make("button", { type: "button", className: `chip ${STATUSES[status]}`, "aria-pressed": "true" },
        make("i", { className: "swatch" }), `${status} `, make("span", { className: "dim" }, count(counts.get(status))));
      chip.dataset.status = status;
      chip.addEventListener("click", () => {
        if (!this.off.delete(status)) this.off.add(status);
        chip.setAttribute("aria-pressed", String(!this.off.has(status)));
        this.apply();
      });
      document.getElementById("statuses").append(chip);
    }
  }

  problems() {
    const counts = new Map();
    for (const lane of this.overview.lanes) for (const code of new Set(lane.problems.map(([one]) => one))) counts.set(code, (counts.get(code) ?? 0) + 1);
    const some = [["", "all samples"], ["any", "with a problem"], ["retried", "retried"], ["resumed", "resumed"]];
    for (const [value, text] of [...some, ...[...counts].map(([code, number]) => [code, `${code} (${count(number)})`])]) {
      this.problem.append(make("option", { value }, text));
    }
  }

  has(lane, wanted) {
    if (!wanted) return true;
    if (wanted === "any") return lane.problems.length > 0 || lane.unreadable !== null;
    if (wanted === "retried") return lane.bars.some((bar) => bar.cause === "retry");
    if (wanted === "resumed") return lane.bars.some((bar) => bar.cause === "resume") || lane.resumed_from !== null;
    return lane.problems.some(([code]) => code === wanted);
  }

  apply() {
    const words = this.search.value.toLowerCase();
    const found = this.overview.lanes.filter((lane) =>
      !this.off.has(statusOf(lane, this.overview))
      && this.has(lane, this.problem.value)
      && (lane.name.toLowerCase().includes(words) || visible(lane.name).toLowerCase().includes(words)));
    const took = (lane) => lane.bars.reduce((total, bar) => total + bar.end - bar.sent, 0);
    const orders = {
      took: (a, b) => took(b) - took(a),
      tokens: (a, b) => b.tokens - a.tokens,
      mean: (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity) || 0,
      name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }),
    };
    if (orders[this.order.value]) found.sort(orders[this.order.value]);
    const all = this.overview.lanes.length;
    document.getElementById("count").textContent = found.length === all ? plural(all, "sample") : `${count(found.length)} of ${plural(all, "sample")}`;
    this.changed(found);
  }
}

async function main() {
  const overview = await unpack(document.getElementById("overview").textContent);
  const details = document.getElementById("details").textContent.split("\n");
  document.getElementById("app").hidden = false;
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
  const drawSummary = showSummary(overview);
  showLegend();
  if (overview.left_out) {
    const notice = document.getElementById("left-out");
    notice.textContent = `${count(overview.left_out)} of ${plural(overview.lanes.length, "sample")} are drawn without their tokens: `
      + `the page has reached its limit of ${count(overview.limit / 1e6)} MB. Write it with a larger --max-mb, or use \`rollout-log show\`.`;
    notice.hidden = false;
  }
  const pane = new SamplePane(overview, details, {
    step: (by) => { timeline.move(timeline.at + by); open(timeline.lanes[timeline.at], false); },
    close: () => { timeline.opened = null; timeline.box.focus({ preventScroll: true }); timeline.draw(); },
  });
  const open = (lane, focus) => {
    timeline.opened = lane;
    timeline.draw();
    pane.open(lane, focus).catch(fail);
  };
  const timeline = new Timeline(overview, open);
  const filters = new Filters(overview, (lanes) => timeline.show(lanes));
  filters.apply();

  const redraw = () => { readPalette(); readLevelColours(); drawSummary(); timeline.draw(); pane.draw(); };
  redraw();
  new ResizeObserver(drawSummary).observe(document.getElementById("summary"));
  window.addEventListener("resize", () => pane.draw());
  document.getElementById("theme").addEventListener("click", () => { setTheme(document.documentElement.dataset.theme !== "dark"); redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => { setTheme(event.matches); redraw(); });
  document.getElementById("zoom-in").addEventListener("click", () => timeline.zoom(1.5));
  document.getElementById("zoom-out").addEventListener("click", () => timeline.zoom(1 / 1.5));
  document.getElementById("zoom-fit").addEventListener("click", () => timeline.fit());
  document.addEventListener("keydown", (event) => {
    const typing = event.target === filters.search;
    if (event.key === "/" && !typing) {
      event.preventDefault();
      filters.search.focus();
    } else if (event.key === "Escape" && typing && filters.search.value) {
      filters.search.value = "";
      filters.apply();
    } else if (event.key === "Escape" && pane.lane) {
      pane.close();
    } else if ((event.key === "Enter" || event.key === "ArrowDown") && typing) {
      event.preventDefault();
      timeline.box.focus();
      timeline.move(timeline.at);
    }
  });
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

function fail(error) {
  const notice = document.getElementById("failure");
  notice.hidden = false;
  notice.textContent = typeof DecompressionStream === "undefined"
    ? "This browser is too old for this page: it needs DecompressionStream (Chrome 103, Firefox 113, Safari 16.4)."
    : `This page is damaged and cannot be shown: ${visible(error)}`;
}

main().catch(fail);
