"use strict";
// One sample: what a click shows.

const TOKENS_AT_ONCE = 4000;
const ORIGINS = {
  observed: "added by the environment",
  unrecorded: "generated while recording was off",
  inherited: "from an older life of the sample",
};

class SamplePane {
  constructor(overview, details, { step, close }) {
    this.overview = overview;
    this.details = details;
    this.step = step;
    this.onclose = close;
    this.element = document.getElementById("sample");
    this.colour = "probability";
    this.shown = 0;
  }

  /** Show a sample; `focus` takes the keyboard there. */
  async open(lane, focus) {
    const turn = ++this.shown;
    const [detail, prompt] = await Promise.all([lane.detail, lane.prompt].map(
      (line) => (line === null ? null : unpack(this.details[line]))));
    if (turn !== this.shown) return;
    this.lane = lane;
    this.redraw = [];
    this.element.replaceChildren(...this.parts(lane, detail, prompt));
    this.element.hidden = false;
    this.element.scrollTop = 0;
    document.body.classList.add("open");
    this.draw();
    if (focus) document.getElementById("sample-name").focus({ preventScroll: true });
  }

  close() {
    this.shown += 1;
    this.lane = null;
    this.element.hidden = true;
    this.element.replaceChildren();
    document.body.classList.remove("open");
    this.onclose();
  }

  draw() {
    for (const redraw of this.redraw ?? []) redraw();
  }

  parts(lane, detail, prompt) {
    const button = (text, label, onclick) => make("button", { type: "button", "aria-label": label, onclick }, text);
    const status = statusOf(lane, this.overview);
    return [
      make("div", { className: "pane-head" },
        make("h2", { id: "sample-name", tabIndex: -1 }, lane.name),
        button("↑", "Previous sample", () => this.step(-1)),
        button("↓", "Next sample", () => this.step(1)),
        button("✕", "Close", () => this.close())),
      make("p", { className: "badges" }, make("span", { className: `badge ${STATUSES[status]}` }, status),
        lane.trainer_status && lane.trainer_status !== lane.status ? make("span", { className: "dim" }, `the trainer says ${lane.trainer_status}`) : null),
      this.facts(lane),
      this.problems(lane),
      this.requests(lane),
      ...(lane.unreadable ? [make("p", { className: "notice" }, `This sample cannot be read: ${lane.unreadable}`)] : []),
      prompt && prompt.words.length ? this.words(prompt) : null,
      ...(detail ? detail.choices.flatMap((choice) => this.choice(lane, choice, detail.choices.length > 1)) : []),
      lane.detail === null && !lane.unreadable
        ? make("p", { className: "notice" }, "The tokens of this sample are not in this page, which had no room for them. Write the report with a larger --max-mb, or use `rollout-log show`.") : null,
      prompt && prompt.ids.length ? this.prompt(prompt) : null,
      detail && detail.metadata !== "{}" ? make("details", {}, make("summary", {}, "Metadata"), make("div", { className: "tokens" }, detail.metadata)) : null,
    ].filter((part) => part !== null);
  }

  facts(lane) {
    const { origin, step } = this.overview;
    const wentOn = status => status === "went on" ? `${lane.status} in step ${lane.step}` : null;
    const facts = {
      "became": wentOn(statusOf(lane, this.overview)),
      "run": lane.run,
      "life": lane.life || null,
      "parent": lane.parent,
      "step": lane.step === null ? null : `${lane.step}${lane.evaluation ? " (evaluation)" : ""}`,
      "resumed from": lane.resumed_from === null ? null : `step ${lane.resumed_from}`,
      "group": lane.group,
      "index": lane.index,
      "reward": lane.reward,
      "began": clock(origin + lane.began),
      "tokens": count(lane.tokens) + (lane.prompt_tokens ? ` after a prompt of ${count(lane.prompt_tokens)}` : ""),
      "thrown away": lane.discarded ? plural(lane.discarded, "token") : null,
      "mean log-prob": lane.mean === null ? null : lane.mean.toFixed(3),
    };
    const list = make("dl", {});
    for (const [name, value] of Object.entries(facts)) {
      if (value !== null && value !== "") list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    }
    return list;
  }

  problems(lane) {
    if (!lane.problems.length) return null;
    const order = ["error", "warning", "info"];
    const known = lane.problems.map(([code, request, position, message]) => {
      const [severity, meaning] = this.overview.problems[code];
      const where = [request === null ? null : `request ${request}`, position === null ? null : `token ${count(position)}`];
      return { code, message, severity, meaning, where: where.filter(Boolean).join(", ") };
    }).sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity));
    return make("section", {}, make("h3", {}, "Problems"), make("ul", { className: "problems" }, ...known.map((found) =>
      make("li", { className: found.severity },
        make("div", {}, make("strong", {}, found.code), " ", make("span", { className: "dim" }, [found.severity, found.where].filter(Boolean).join(", "))),
        make("div", {}, found.message),
        make("div", { className: "dim" }, found.meaning)))));
  }

  requests(lane) {
    if (!lane.bars.length) return null;
    const head = ["", "cause", "from token", "ended", "tokens", "first token", "took", "step", "weights", "HTTP"];
    const numbers = new Set([0, 2, 4, 5, 6, 7, 9]);
    const WEIGHTS = 8; // any text
    const cell = (kind) => (value, i) => make(kind, { className: numbers.has(i) ? "number" : i === WEIGHTS ? "wrap" : "" }, value ?? "");
    const rows = lane.bars.flatMap((bar) => [
      make("tr", {}, ...[
        bar.number, bar.cause, count(bar.base),
        make("span", { className: `ended ${KINDS[bar.ended]}` }, bar.ended),
        count(bar.tokens), bar.first === null ? "" : duration(bar.first - bar.sent), duration(bar.end - bar.sent),
        bar.step, bar.version, bar.status,
      ].map(cell("td"))),
      bar.detail ? make("tr", { className: "detail" }, make("td", {}), make("td", { colspan: head.length - 1 }, bar.detail.slice(0, 2000))) : null,
    ]);
    return make("section", {}, make("h3", {}, "Requests"), make("div", { className: "wide", tabIndex: 0, role: "region", "aria-label": "Requests" },
      make("table", {}, make("thead", {}, make("tr", {}, ...head.map(cell("th")))), make("tbody", {}, ...rows))));
  }

  choice(lane, choice, several) {
    const name = several ? `Choice ${choice.index}` : "Response";
    const note = [plural(choice.ids.length, "token"), several ? choice.status : null, choice.finish ? `finish reason ${choice.finish}` : null];
    const parts = [make("h3", {}, name, " ", make("span", { className: "dim" }, note.filter(Boolean).join(", ")))];
    if (choice.text !== null) {
      parts.push(make("p", { className: "dim" }, "The engine sent text and no token ids."), make("div", { className: "tokens" }, textNode(choice.text)));
    }
    if (!choice.ids.length) return parts;
    const cuts = choice.runs.slice(1).map(([, , start]) => start);
    const chart = make("canvas", { className: "plot", role: "img", "aria-label": describeLogprobs(choice) });
    const speed = make("canvas", { className: "plot", role: "img", "aria-label": `Tokens per second of ${name.toLowerCase()}` });
    this.redraw.push(() => drawLogprobs(chart, choice, cuts), () => drawSpeed(speed, choice.times));
    const plots = [make("figure", {}, make("figcaption", {}, "log-prob by token"), chart)];
    if (choice.times.filter((time) => time !== null).length > 1) {
      plots.push(make("figure", {}, make("figcaption", {}, "tokens per second"), speed));
    }
    parts.push(make("div", { className: "plots" }, ...plots));
    parts.push(new TokenView(this, lane, choice).element);
    return parts;
  }

  /** What was asked in words. */
  words({ words }) {
    const chat = words.some(([by]) => by !== null);
    const said = words.map(([by, text]) => make("div", { className: "said" }, by === null ? null : make("div", { className: "by" }, by), textNode(text)));
    return make("details", { open: true }, make("summary", {}, chat ? `Prompt, ${plural(words.length, "message")}` : "Prompt, as text"),
      make("div", { className: "tokens words", tabIndex: 0, role: "region", "aria-label": "Prompt" }, ...said));
  }

  prompt(prompt) {
    const box = make("details", {}, make("summary", {}, `Prompt, ${plural(prompt.ids.length, "token")}`));
    box.addEventListener("toggle", () => {
      if (box.open && box.children.length === 1) {
        const text = prompt.ids.slice(0, 50000).map((_, i) => this.text(prompt, i)).join("");
        box.append(make("div", { className: "tokens" }, textNode(text)));
      }
    });
    return box;
  }

  /** The text of the token at a position, or its id. */
  text({ ids, joined }, position) {
    const { vocabulary } = this.overview;
    if (!vocabulary) return `${ids[position]} `;
    return joined[position] ?? (vocabulary[ids[position]] || `⟨${ids[position]}⟩`);
  }
}

/** The tokens of a choice, coloured, with a line that says all about the one under the pointer or cursor. */
class TokenView {
  constructor(pane, lane, choice) {
    Object.assign(this, { pane, lane, choice, at: 0, end: 0 });
    this.line = make("div", { className: "token-line", role: "status", "aria-live": "polite" });
    this.text = make("div", { className: "tokens", tabIndex: 0, role: "group", "aria-label": "Tokens: left and right move from one to the next" });
    this.legend = make("span", { className: "token-legend" });
    const select = make("select", { "aria-label": "Colour tokens by" },
      ...["probability", "request", "weights", "origin"].map((value) => make("option", { value, selected: value === pane.colour }, value)));
    select.addEventListener("change", () => { pane.colour = select.value; this.paint(); });
    const heading = make("div", { className: "token-tools" }, make("label", { className: "field" }, make("span", {}, "Colour"), select), this.legend);
    this.element = make("div", { className: "token-view" }, heading, this.text, this.line);
    this.more();
    this.tell(0, false);
    this.listen();
  }

  /** Add the next tokens, span by span. */
  more() {
    const { runs, ids } = this.choice;
    const end = Math.min(this.end + TOKENS_AT_ONCE, ids.length);
    const edges = new Map(runs.map((run) => [run[2], run]));
    const fragment = document.createDocumentFragment();
    for (let i = this.end; i < end; i += 1) {
      if (edges.has(i)) fragment.append(...this.edge(edges.get(i), runs));
      fragment.append(this.token(i));
    }
    this.end = end;
    this.button?.remove();
    this.text.append(fragment);
    if (end < ids.length) {
      this.button = make("button", { type: "button", onclick: () => this.more() }, `the next of ${count(ids.length - end)} more tokens`);
      this.text.append(this.button);
    } else {
      this.text.append(...this.ending());
    }
    this.paint();
  }

  token(position) {
    const span = make("span", { className: "t" });
    span.dataset.i = position;
    const text = this.pane.text(this.choice, position);
    span.append(textNode(text));
    return span;
  }

  edge([origin, request, start], runs) {
    const before = runs[runs.findIndex((run) => run[2] === start) - 1];
    const bar = before && this.lane.bars.find((one) => one.number === before[1]);
    const found = [];
    if (bar && bar.ended !== "finished") {
      found.push(make("div", { className: `seam ${KINDS[bar.ended]}` }, `✂ cut at token ${count(start)}: request ${bar.number} ended ${bar.ended}`));
    }
    const version = this.choice.versions.find((span) => span[1] <= start && start < span[2]);
    found.push(make("div", { className: "edge" }, `token ${count(start)}: ${ORIGINS[origin] ?? `request ${request}`}`
      + (version ? `, weights ${version[0]}` : "")));
    return found;
  }

  ending() {
    const bar = this.lane.bars[this.lane.bars.length - 1];
    if (!bar || bar.ended === "finished") return [];
    const what = bar.ended === "open" ? "still open" : `✂ cut here: request ${bar.number} ended ${bar.ended}`;
    return [make("div", { className: `seam ${KINDS[bar.ended]}` }, what)];
  }

  paint() {
    const { choice, pane } = this;
    const classes = { probability: (i) => level(choice.logprobs[i]), request: () => "", weights: () => "", origin: () => "" };
    const numbered = (spans, name) => {
      const names = [...new Set(spans.map(name))];
      return { names, of: (i) => { const span = spans.find((one) => spanStart(one) <= i && i < spanEnd(one)); return span ? `c${names.indexOf(name(span)) % 6}` : ""; } };
    };
    const spanStart = (span) => span[span.length - 2];
    const spanEnd = (span) => span[span.length - 1];
    const kinds = {
      request: () => numbered(choice.runs, (run) => run[1] === null ? ORIGINS[run[0]] ?? run[0] : `request ${run[1]}`),
      weights: () => numbered(choice.versions, (span) => `weights ${span[0]}`),
      origin: () => numbered(choice.runs, (run) => run[0]),
    };
    let names = [["≥ 0.9", "p90"], ["≥ 0.5", "p50"], ["≥ 0.2", "p20"], ["≥ 0.05", "p05"], ["less", "p00"], ["no log-prob", "none"]];
    let of = classes.probability;
    if (pane.colour in kinds) {
      const found = kinds[pane.colour]();
      of = found.of;
      names = found.names.slice(0, 12).map((name, i) => [name, `c${i % 6}`]);
    }
    const observed = (i) => choice.runs.some((run) => run[0] === "observed" && run[2] <= i && i < run[3]);
    for (const span of this.text.querySelectorAll(".t")) {
      const i = Number(span.dataset.i);
      span.className = `t ${of(i)}${observed(i) && pane.colour === "probability" ? " observed" : ""}`;
    }
    if (choice.runs.some((run) => run[0] === "observed") && pane.colour === "probability") names.push(["observed", "observed"]);
    this.legend.replaceChildren(...names.map(([name, kind]) => make("span", { className: `t ${kind}` }, name)));
  }

  /** Say everything about one token. */
  tell(position, mark = true) {
    const { choice, lane } = this;
    const logprob = choice.logprobs[position];
    const [origin, request] = choice.runs.find((run) => run[2] <= position && position < run[3]);
    const version = choice.versions.find(([, start, end]) => start <= position && position < end);
    const bar = lane.bars.find((one) => one.number === request);
    const time = choice.times[position];
    const parts = [
      `token ${count(position)}`, `id ${choice.ids[position]}`,
      logprob === null ? "no log-prob" : `log-prob ${logprob} (p ${Math.exp(logprob).toPrecision(2)})`,
      ORIGINS[origin] ?? `request ${request}`,
      version ? `weights ${version[0]}` : null,
      time !== null && bar ? `came ${duration(time - bar.sent)} after it was sent` : null,
    ];
    this.line.textContent = visible(parts.filter(Boolean).join(" · "));
    this.text.querySelector(".t.at")?.classList.remove("at");
    if (mark) this.text.querySelector(`.t[data-i="${position}"]`)?.classList.add("at");
    this.at = position;
  }

  listen() {
    const under = (event) => event.target.closest?.(".t[data-i]");
    this.text.addEventListener("pointerover", (event) => { const token = under(event); if (token) this.tell(Number(token.dataset.i)); });
    this.text.addEventListener("click", (event) => { const token = under(event); if (token) this.tell(Number(token.dataset.i)); });
    this.text.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
      if (!(event.key in moves) || event.target !== this.text) return;
      event.preventDefault();
      this.tell(Math.min(Math.max(this.at + moves[event.key], 0), this.end - 1));
      this.text.querySelector(".t.at")?.scrollIntoView({ block: "nearest" });
    });
  }
}

/** Model text: line breaks stay, whatever else hides or moves text is shown as an escape. */
function textNode(text) {
  return document.createTextNode(String(text).split("\n").map(visible).join("\n"));
}

function describeLogprobs({ logprobs }) {
  const known = logprobs.filter((value) => value !== null);
  if (!known.length) return "No log-probs";
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  const lowest = known.reduce((low, value) => Math.min(low, value), 0);
  return `Log-probs of ${plural(known.length, "token")}: mean ${mean.toFixed(2)}, lowest ${lowest.toFixed(2)}`;
}
