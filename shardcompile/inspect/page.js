"use strict";
// Draws the report that stands in #data. Everything from the report goes into the page as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const isNone = (x) => x === null || x === undefined;

// ------------------------------------------------------------------------------------------------ elements

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (isNone(value) || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((c) => !isNone(c) && c !== ""));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// ------------------------------------------------------------------------------------------------ words

const digits = (x) => String(Number(x.toPrecision(3)));

function seconds(s) {
  if (s >= 1) return `${digits(s)} s`;
  if (s >= 1e-3) return `${digits(s * 1e3)} ms`;
  return s && s < 1e-6 ? `${digits(s * 1e9)} ns` : `${digits(s * 1e6)} µs`;
}

function bytes(n) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (n >= size) return `${digits(n / size)} ${unit}`;
  return `${n} B`;
}

const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "0%");
const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const range = (c) => (c.least === c.most ? bytes(c.most) : `${bytes(c.least)} – ${bytes(c.most)}`);
const distinct = (texts) => [...new Set(texts.filter(Boolean))];

function firstOf(texts) {
  const known = distinct(texts);
  return known.length > 1 ? `${known[0]} and ${known.length - 1} more` : (known[0] ?? "");
}

const FAMILIES = [
  ["gather", "gathers", /^all_gather|^gather_partition/],
  ["scatter", "reduce-scatters", /^reduce_scatter/],
  ["reduce", "all-reduces", /^all_reduce/],
  ["shuffle", "all-to-alls", /^all_to_all/],
];
const family = (kind) => (FAMILIES.find(([, , pattern]) => pattern.test(kind)) ?? ["other"])[0];

// ------------------------------------------------------------------------------------------------ tooltip

const tip = {
  show(title, rows, x, y) {
    const box = $("tip");
    const known = rows.filter(([, value]) => value);
    box.replaceChildren(
      el("strong", {}, title),
      el("dl", {}, known.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    );
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = Math.max(8, Math.min(x + 14, innerWidth - width - 8));
    const top = y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18;
    box.style.left = `${left}px`;
    box.style.top = `${top}px`;
    return `${title}. ${known.map(([name, value]) => `${name} ${[value].flat().join(", ")}`).join(". ")}`;
  },
  hide() {
    $("tip").hidden = true;
  },
};

const few = (texts, most) =>
  texts.length > most ? [...texts.slice(0, most), `and ${texts.length - most} more`] : texts;
/** Such as "3 mm, attention". */
function counted(names) {
  const times = new Map();
  for (const name of names) times.set(name, (times.get(name) ?? 0) + 1);
  return [...times].map(([name, n]) => (n > 1 ? `${n} ${name}` : name)).join(", ");
}

const asLines = (texts) => texts.map((t) => el("span", { class: "line" }, t));

function aboutIssued(graph, c) {
  const members = c.members.map((m) => graph.traced[m]);
  return [
    ["kind", c.kind],
    ["ranks", `${c.ranks} (${c.size})`],
    ["bytes", `${bytes(c.bytes)} together; a rank puts in ${range(c)}`],
    ["dtype", c.dtypes],
    ["takes", `${seconds(c.end - c.start)}, from ${seconds(c.start)} to ${seconds(c.end)}`],
    ["exposed", c.exposed ? `${seconds(c.exposed)} that compute waits` : "nothing"],
    ["beside it", counted(c.overlaps)],
    ["stands for", c.members.length > 1 ? `${c.members.length} traced collectives` : ""],
    ["for", asLines(few(distinct(members.map((m) => m.reason)), 3))],
    ["from", asLines(few(distinct(members.map((m) => m.source)), 3))],
  ].filter(([, value]) => value.length);
}

function aboutTraced(c) {
  return [
    ["kind", c.kind],
    ["ranks", `${c.ranks} (${c.size})`],
    ["bytes", `${bytes(c.bytes)} together; a rank puts in ${range(c)}`],
    ["dtype", c.dtypes],
    ["for", c.reason],
    ["module", c.module],
    ["from", c.source],
    ["became", c.fate || "itself"],
  ];
}

// ------------------------------------------------------------------------------------------------ header

function header() {
  const issued = data.graphs.flatMap((g) => g.issued);
  const facts = [
    ["device", data.device || "nothing compiled"],
    ["times predicted for", data.predictedFor],
    ["torch", data.torch],
    ["graphs", `${data.compilations.length} captured, ${data.graphs.length} compiled`],
    ["graph breaks", String(data.graphBreaks.length)],
    ["recompiles", String(data.recompiles.length)],
    ["collectives", `${issued.length}, ${bytes(issued.reduce((sum, c) => sum + c.bytes, 0))}`],
    ["compiler caches", Object.entries(data.caches).filter(([, n]) => n).map(([name, n]) => `${n} ${name}`).join(", ")],
  ];
  const list = (title, texts) =>
    texts.length ? el("details", {}, el("summary", {}, title), el("ul", {}, texts.map((t) => el("li", {}, t)))) : "";
  return el("header", {},
    el("h1", {}, "Compiled graphs ", el("small", {}, `rank ${data.rank} of ${data.world}`)),
    el("dl", { class: "facts" },
      facts.filter(([, v]) => v).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    data.notes.map((t) => el("p", { class: "note" }, t)),
    data.error ? el("p", { class: "error" }, `Ended by ${data.error}`) : "",
    list(plural(data.graphBreaks.length, "graph break"), data.graphBreaks),
    list(plural(data.recompiles.length, "recompile"), data.recompiles),
    list("Strategies of attention", data.attentionStrategies),
    data.advice.length
      ? el("section", { class: "advice", "aria-labelledby": "todo" },
        el("h2", { id: "todo" }, "What to do"), el("ol", {}, data.advice.map((t) => el("li", {}, t))))
      : "",
  );
}

function share(graph) {
  const bar = el("span", { class: "share", "aria-hidden": true }, el("span"));
  bar.firstChild.style.width = `${graph.total ? (100 * graph.exposed) / graph.total : 0}%`;
  return bar;
}

function overview() {
  const rows = data.compilations.map((compilation, i) => {
    const place = el("span", { class: "quiet" }, compilation.place.split("/").pop());
    place.title = compilation.place;
    const head = el("tr", { class: "compilation" },
      el("th", { colspan: 8, scope: "rowgroup" }, `${i} `, el("code", {}, compilation.function), " ", place));
    const graphs = data.graphs.map((g, j) => [g, j]).filter(([g]) => g.compilation === i);
    if (!graphs.length)
      return [head, el("tr", {}, el("td", { colspan: 8, class: "quiet" },
        "no graphs: out of a compiler cache, not compiled to the end, or a backend without AOTAutograd"))];
    return [head, graphs.map(([g, j]) =>
      el("tr", { id: `row${j}` },
        el("td", {}, el("a", { href: `#g${j}` }, g.side)),
        el("td", { class: "n" }, g.nodes),
        el("td", { class: "n" }, g.traced.length),
        el("td", { class: "n" }, g.issued.length),
        el("td", { class: "n" }, seconds(g.total)),
        el("td", { class: "n" }, `${seconds(g.exposed)} `, el("span", { class: "percent" }, percent(g.exposed, g.total)),
          share(g)),
        el("td", { class: "n" }, seconds(g.bound)),
        el("td", { class: "n" }, bytes(g.peak))))];
  });
  const columns = ["graph", "nodes", "collectives traced", "issued", "predicted", "of it exposed",
    "no order beats", "peak memory"];
  return el("nav", { "aria-label": "Graphs", class: "wide" },
    el("table", { class: "overview" },
      el("thead", {}, el("tr", {}, columns.map((c, i) => el("th", { scope: "col", class: i ? "n" : "" }, c)))),
      el("tbody", {}, rows)));
}

// ------------------------------------------------------------------------------------------------ timeline

const LANE = 24, LABEL = 21, AXIS = 18;

class TimelineView {
  constructor(graph, onShowText) {
    this.graph = graph;
    this.onShowText = onShowText;
    this.width = 1000;
    this.from = 0;
    this.all = graph.total || 1e-6; // a graph of nothing takes no time
    this.to = this.all;
    this.at = -1; // the bar that the keyboard is at
    this.height = AXIS + graph.lanes.length * (LANE + LABEL) + 6;
    this.bars = [];
    this.axis = svg("g", { class: "axis" });
    this.labels = svg("g", { class: "labels" });
    const marks = svg("g");
    const lanes = svg("g", { class: "lanes" });
    graph.lanes.forEach((name, lane) => {
      const y = this.top(lane);
      lanes.append(svg("rect", { x: 0, y, width: "100%", height: LANE }), svg("text", { x: 2, y: y - 5 }, name));
    });
    graph.waiting.forEach(([start, end, issued]) => this.add(marks, start, end, 0, "wait", { issued, waiting: true }));
    const parity = graph.lanes.map(() => 0);
    graph.spans.forEach(([label, lane, start, end, issued]) => {
      const kind = isNone(issued) ? (lane ? "other" : "compute") : family(graph.issued[issued].kind);
      this.add(marks, start, end, lane, `bar ${kind}${parity[lane]++ % 2 ? " odd" : ""}`, { label, lane, issued });
    });
    this.order = this.bars.map((b, i) => i).filter((i) => !this.bars[i].waiting);
    this.root = svg("svg", {
      class: "timeline", height: this.height, tabindex: 0, role: "application",
      "aria-label": `Predicted timeline, ${plural(graph.spans.length, "bar")}. Arrow keys go from bar to bar, ` +
        "plus and minus zoom, 0 shows all, Enter goes to the graph's text.",
    }, svg("defs", {}, svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse",
      patternTransform: "rotate(45)" }, svg("rect", { class: "hatch-back", width: 6, height: 6 }),
    svg("rect", { class: "hatch-line", width: 2.5, height: 6 }))), lanes, this.axis, marks, this.labels);
    this.listen();
    const button = (text, label, action) =>
      el("button", { type: "button", "aria-label": label, title: label, onclick: action }, text);
    this.figure = el("figure", { class: "card" },
      el("div", { class: "tools" },
        button("−", "Zoom out", () => this.zoom(2)), button("+", "Zoom in", () => this.zoom(0.5)),
        button("←", "Earlier", () => this.pan(-0.4)), button("→", "Later", () => this.pan(0.4)),
        button("All", "Show all", () => this.reset()), this.legend()),
      this.root,
      el("figcaption", { class: "quiet" },
        "Predicted, one stream for compute and one for each group. Drag moves, Ctrl and the wheel zoom; a double click " +
        "on a bar goes to its line in the graph."));
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  top(lane) {
    return AXIS + lane * (LANE + LABEL) + LABEL;
  }

  add(parent, start, end, lane, kind, about) {
    const node = svg("rect", { class: kind, y: this.top(lane), height: LANE, x: 0, width: 0, "data-i": this.bars.length });
    parent.append(node);
    this.bars.push({ node, start, end, ...about });
  }

  legend() {
    const used = new Set(this.graph.issued.map((c) => family(c.kind)));
    const entries = [["compute", "compute"], ["wait", "compute waits"],
      ...FAMILIES.filter(([name]) => used.has(name)), ...(used.has("other") ? [["other", "other collectives"]] : [])];
    return el("ul", { class: "legend" }, entries.map(([name, words]) =>
      el("li", {}, svg("svg", { width: 14, height: 10, "aria-hidden": true },
        svg("rect", { class: name, width: 14, height: 10, rx: 2 })), words)));
  }

  x(time) {
    return ((time - this.from) / (this.to - this.from)) * this.width;
  }

  draw() {
    this.pending ??= requestAnimationFrame(() => {
      this.pending = null;
      this.drawNow();
    });
  }

  drawNow() {
    const width = this.width = this.root.clientWidth || 1000; // asked for once: each time may lay out the whole page
    const named = [];
    for (const bar of this.bars) {
      const left = this.x(bar.start), right = this.x(bar.end);
      const visible = right >= 0 && left <= width;
      if (!visible && bar.hidden) continue;
      bar.hidden = !visible;
      const x = Math.max(left, -2), w = Math.min(right, width + 2) - x;
      bar.node.setAttribute("x", visible ? x : -9);
      bar.node.setAttribute("width", visible ? Math.max(w, 0.8) : 0);
      if (visible && w > 24) named.push([bar, x, w]);
    }
    this.labels.replaceChildren(...named.map(([bar, x, w]) => this.label(bar, Math.max(x, 0), w)));
    this.drawAxis(width);
  }

  /** The longest of a bar's names that it has room for; only that of a compute bar may be partition off. */
  label(bar, x, width) {
    const c = isNone(bar.issued) ? null : this.graph.issued[bar.issued];
    const took = seconds(bar.end - bar.start);
    const names = bar.waiting ? [`${c ? "waits" : "idle"} ${took}`, took] : c ? [`${c.kind} ${bytes(c.bytes)}`, bytes(c.bytes)] : [bar.label];
    const room = Math.min(width, this.width - x) - 8;
    let text = names.find((name) => this.measure(name) <= room) ?? "";
    if (!text && names.length === 1) {
      const partition = Math.floor((names[0].length * room) / this.measure(names[0])) - 1;
      if (partition >= 4) text = `${names[0].slice(0, partition)}…`;
    }
    if (!text) return "";
    return svg("text", { class: bar.waiting ? "on-wait" : "", x: x + 4, y: Number(bar.node.getAttribute("y")) + 16 }, text);
  }

  measure(text) {
    if (!this.pen) {
      this.pen = document.createElement("canvas").getContext("2d");
      this.pen.font = `11.5px ${getComputedStyle(this.root).fontFamily}`;
    }
    return this.pen.measureText(text).width;
  }

  drawAxis(width) {
    const rough = ((this.to - this.from) / width) * 110;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
    const ticks = [];
    for (let k = Math.ceil(this.from / step); k * step <= this.to; k++) {
      const x = this.x(k * step);
      ticks.push(svg("line", { x1: x, x2: x, y1: 16, y2: this.height }));
      if (x < width - 30) ticks.push(svg("text", { x: x + 3, y: 12 }, k ? seconds(Number((k * step).toPrecision(9))) : "0"));
    }
    this.axis.replaceChildren(...ticks);
  }

  look(from, to) {
    const span = Math.min(Math.max(to - from, this.all * 1e-5), this.all);
    this.from = Math.min(Math.max(from, 0), this.all - span);
    this.to = this.from + span;
    this.draw();
  }

  reset() {
    this.look(0, this.all);
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.look(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  pan(part) {
    const by = part * (this.to - this.from);
    this.look(this.from + by, this.to + by);
  }

  listen() {
    const time = (event) => {
      const box = this.root.getBoundingClientRect();
      return this.from + ((event.clientX - box.left) / this.width) * (this.to - this.from);
    };
    const bar = (event) => this.bars[event.target.dataset?.i];
    this.root.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY * 0.004), time(event));
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
        this.pan((event.deltaX || event.deltaY) / this.width);
      else return; // the page scrolls
      event.preventDefault();
    }, { passive: false });
    this.root.addEventListener("pointerdown", (event) => {
      if (event.button === 0) this.drag = { x: event.clientX, from: this.from, to: this.to };
    });
    this.root.addEventListener("pointermove", (event) => {
      if (this.drag && event.buttons & 1) {
        const by = ((this.drag.x - event.clientX) / this.width) * (this.drag.to - this.drag.from);
        if (Math.abs(this.drag.x - event.clientX) > 3) this.root.setPointerCapture(event.pointerId);
        this.look(this.drag.from + by, this.drag.to + by);
      }
      this.over(bar(event), event.clientX, event.clientY);
    });
    this.root.addEventListener("pointerup", () => (this.drag = null));
    this.root.addEventListener("pointerleave", () => this.over(undefined));
    this.root.addEventListener("dblclick", (event) => {
      const hit = bar(event);
      if (hit) this.onShowText(hit.waiting ? this.graph.issued[hit.issued]?.name : hit.label);
    });
    this.root.addEventListener("blur", () => this.over(undefined));
    this.root.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const here = this.bars[this.order[this.at]];
    const actions = {
      ArrowRight: () => this.go(1), ArrowLeft: () => this.go(-1),
      ArrowUp: () => this.goLane(-1), ArrowDown: () => this.goLane(1),
      "+": () => this.zoom(0.5, here && (here.start + here.end) / 2),
      "-": () => this.zoom(2, here && (here.start + here.end) / 2),
      0: () => this.reset(), Escape: () => this.over(undefined),
      Enter: () => here && this.onShowText(here.label),
    };
    actions["="] = actions["+"];
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  go(step) {
    const lane = this.bars[this.order[this.at]]?.lane;
    let i = this.at;
    do i += step; while (this.order[i] !== undefined && lane !== undefined && this.bars[this.order[i]].lane !== lane);
    if (this.order[i] !== undefined) this.select(i);
  }

  goLane(step) {
    const here = this.bars[this.order[this.at]];
    if (!here) return this.go(1);
    const other = this.order.map((b, i) => [this.bars[b], i]).filter(([b]) => b.lane === here.lane + step);
    if (!other.length) return undefined;
    const near = ([b]) => Math.abs(b.start + b.end - here.start - here.end);
    return this.select(other.reduce((best, o) => (near(o) < near(best) ? o : best))[1]);
  }

  select(i) {
    this.at = i;
    const bar = this.bars[this.order[i]];
    const middle = (bar.start + bar.end) / 2, half = (this.to - this.from) / 2;
    if (bar.start < this.from || bar.end > this.to) {
      const wide = Math.max(half, (bar.end - bar.start) * 0.6);
      this.look(middle - wide, middle + wide);
    }
    this.drawNow();
    const box = bar.node.getBoundingClientRect();
    $("said").textContent = this.over(bar, box.left + box.width / 2, box.bottom - 10);
  }

  showIssued(issued) {
    const i = this.order.findIndex((b) => this.bars[b].issued === issued);
    if (i < 0) return;
    this.figure.scrollIntoView({ shard: "nearest" });
    this.root.focus();
    requestAnimationFrame(() => this.select(i)); // a scroll hides the tooltip, and is told of before the next frame
  }

  over(bar, x, y) {
    this.lit?.forEach((node) => node.classList.remove("lit"));
    this.lit = [];
    if (!bar) {
      tip.hide();
      return "";
    }
    const issued = bar.issued ?? null;
    this.lit = issued === null ? [bar.node] : this.bars.filter((b) => b.issued === issued).map((b) => b.node);
    this.lit.forEach((node) => node.classList.add("lit"));
    const bottom = this.root.getBoundingClientRect().bottom;
    return tip.show(...this.about(bar), x, bottom - y < 140 ? bottom - 12 : y); // below it, if that is not far
  }

  about(bar) {
    const times = `${seconds(bar.end - bar.start)}, from ${seconds(bar.start)} to ${seconds(bar.end)}`;
    const c = isNone(bar.issued) ? null : this.graph.issued[bar.issued];
    if (bar.waiting && !c) return ["nothing left to compute", [["takes", times]]];
    if (bar.waiting)
      return [`compute waits for ${c.name}`, [["waits", times], ...aboutIssued(this.graph, c).slice(0, 3),
        ["beside it", counted(c.overlaps)],
        ["compute", `${seconds(c.behind[1])} since it started, ${seconds(c.behind[0])} before the passes`]]];
    if (c) return [c.name, aboutIssued(this.graph, c)];
    const [line, source] = codeOf(this.graph, bar.label);
    return [bar.label, [["kind", bar.lane ? "collective" : "compute"], ["takes", times], ["code", line], ["from", source]]];
  }
}

// ------------------------------------------------------------------------------------------------ graph texts

const lineOf = (i) => data.lines[i];

/** Texts whose names are not those of the graph that runs. */
const BESIDE = ["dynamo", "bytecode", "joint", "code"];

/** The pass that hides the nodes it holds in graphs of their own: nothing to start reading with. */
const HELD = "add_control_dependencies";

/** Where each name is assigned in the latest text that has it: [stage, line]. */
function definitions(graph) {
  if (graph.definitions) return graph.definitions;
  graph.definitions = new Map();
  const order = graph.stages.map(([stage], s) => [stage !== HELD, s]).sort(([p, i], [q, j]) => p - q || i - j);
  order.map(([, s]) => [...graph.stages[s], s]).forEach(([stage, lines, s]) => {
    if (BESIDE.includes(stage)) return;
    lines.forEach((line, i) => {
      const name = /^\s+(\w+)(?:: ".*?")? = /.exec(lineOf(line));
      if (name) graph.definitions.set(name[1], [s, i]);
    });
  });
  return graph.definitions;
}

function codeOf(graph, label) {
  const found = definitions(graph).get(label);
  if (!found) return ["", ""];
  const lines = graph.stages[found[0]][1];
  let comment = "";
  for (let i = found[1] - 1; i >= 0 && !comment; i--) {
    const text = lineOf(lines[i]);
    if (/^\s*#/.test(text)) comment = text;
    else if (/^\s*def /.test(text)) break;
  }
  const partition = (t) => (t.length > 300 ? `${t.slice(0, 300)}…` : t);
  const code = lineOf(lines[found[1]]).trim().replace(/;(\s+\w+ =)+ None$/, "");
  return [partition(code), partition(comment.includes("File: ") ? comment.slice(comment.indexOf("File: ") + 6) : "")];
}

/** By line, what it is compared by: a line that only frees other values than before has not changed. */
const keys = { of: new Int32Array(data.lines.length).fill(-1), numbers: new Map() };

function keyOf(line) {
  if (keys.of[line] < 0) {
    const text = lineOf(line).trim().replace(/;(\s+\w+ =)+ None$/, "");
    if (!keys.numbers.has(text)) keys.numbers.set(text, keys.numbers.size);
    keys.of[line] = keys.numbers.get(text);
  }
  return keys.of[line];
}

/** Comments only say where what follows is from, so that they differ wherever the order does. */
const isPlain = (line) => /^\s*(#|$)/.test(lineOf(line));

/** Pairs of equal lines, rising on both sides: between lines that occur once on either side, then by brute force. */
function matches(a, b) {
  const pairs = [];
  const work = [[0, a.length, 0, b.length]];
  while (work.length) {
    let [i, iEnd, j, jEnd] = work.pop();
    while (i < iEnd && j < jEnd && a[i] === b[j]) pairs.push([i++, j++]);
    while (i < iEnd && j < jEnd && a[iEnd - 1] === b[jEnd - 1]) pairs.push([--iEnd, --jEnd]);
    if (i === iEnd || j === jEnd) continue;
    const anchors = commonOnce(a, i, iEnd, b, j, jEnd);
    if (anchors.length) {
      for (const [p, q] of [...anchors, [iEnd, jEnd]]) {
        work.push([i, p, j, q]);
        if (p < iEnd) pairs.push([p, q]);
        [i, j] = [p + 1, q + 1];
      }
    } else if ((iEnd - i) * (jEnd - j) <= 1e6) {
      pairs.push(...longestCommon(a, i, iEnd, b, j, jEnd));
    }
  }
  return pairs.sort((p, q) => p[0] - q[0]);
}

function commonOnce(a, i, iEnd, b, j, jEnd) {
  const seen = new Map(); // key: [times in a, place in a, times in b, place in b]
  for (let k = i; k < iEnd; k++) seen.set(a[k], [(seen.get(a[k])?.[0] ?? 0) + 1, k, 0, 0]);
  for (let k = j; k < jEnd; k++) {
    const entry = seen.get(b[k]);
    if (entry) [entry[2], entry[3]] = [entry[2] + 1, k];
  }
  const once = [...seen.values()].filter(([n, , m]) => n === 1 && m === 1).map(([, p, , q]) => [p, q]);
  once.sort((p, q) => p[0] - q[0]);
  // The longest rising sequence, by patience sorting.
  const tops = [], before = new Map();
  for (const pair of once) {
    let low = 0, high = tops.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tops[middle][1] < pair[1]) low = middle + 1;
      else high = middle;
    }
    before.set(pair, tops[low - 1]);
    tops[low] = pair;
  }
  const rising = [];
  for (let pair = tops.at(-1); pair; pair = before.get(pair)) rising.push(pair);
  return rising.reverse();
}

function longestCommon(a, i, iEnd, b, j, jEnd) {
  const n = iEnd - i, m = jEnd - j, wide = m + 1;
  const best = new Uint16Array((n + 1) * wide);
  for (let p = n - 1; p >= 0; p--)
    for (let q = m - 1; q >= 0; q--)
      best[p * wide + q] = a[i + p] === b[j + q]
        ? best[(p + 1) * wide + q + 1] + 1
        : Math.max(best[(p + 1) * wide + q], best[p * wide + q + 1]);
  const pairs = [];
  for (let p = 0, q = 0; p < n && q < m;) {
    if (a[i + p] === b[j + q]) pairs.push([i + p++, j + q++]);
    else if (best[(p + 1) * wide + q] >= best[p * wide + q + 1]) p++;
    else q++;
  }
  return pairs;
}

/** Rows of a side by side view: [line on the left or -1, line on the right or -1, whether that is a change]. */
function sideBySide(left, right) {
  const a = left.map(keyOf), b = right.map(keyOf);
  const rows = [];
  let i = 0, j = 0;
  const upTo = (p, q) => {
    for (; i < p || j < q; i++, j++)
      rows.push([i < p ? i : -1, j < q ? j : -1, (i < p && !isPlain(left[i])) || (j < q && !isPlain(right[j]))]);
    [i, j] = [p, q];
  };
  for (const [p, q] of matches(a, b)) {
    upTo(p, q);
    rows.push([i++, j++, false]);
  }
  upTo(a.length, b.length);
  const changed = (side) => rows.filter((r) => r[2] && r[side] >= 0 && !isPlain([left, right][side][r[side]]))
    .map((r) => [a, b][side][r[side]]);
  const removed = new Set(changed(0)), added = new Set(changed(1));
  const moved = new Set([...removed].filter((key) => added.has(key)));
  const count = { removed: 0, added: 0, moved: 0 };
  for (const key of changed(0)) count[moved.has(key) ? "moved" : "removed"]++;
  for (const key of changed(1)) if (!moved.has(key)) count.added++;
  return { rows, a, b, moved, count };
}

const CONTEXT = 3, CHUNK = 60;

class TextsView {
  constructor(graph) {
    this.graph = graph;
    const names = graph.stages.map(([name]) => name);
    const passes = names.filter((n) => ![...BESIDE, "aot", HELD].includes(n));
    const select = (label, chosen) => {
      const box = el("select", { onchange: () => this.draw() }, names.map((n, i) => el("option", { value: i }, n)));
      box.value = String(Math.max(0, chosen));
      return [el("label", {}, `${label} `, box), box];
    };
    const first = names.includes("aot") ? names.indexOf("aot") : 0;
    const last = passes.length ? names.lastIndexOf(passes.at(-1)) : names.length - 1;
    const [leftLabel, left] = select("Left", first);
    const [rightLabel, right] = select("Right", last);
    Object.assign(this, { left, right });
    this.only = el("input", { type: "checkbox", onchange: () => this.draw() });
    this.only.checked = true;
    this.counts = el("span", { class: "quiet", "aria-live": "polite" });
    this.body = el("div", { class: "texts", tabindex: 0, role: "region", "aria-label": "Texts of two stages side by side" });
    this.section = el("section", { class: "card", "aria-labelledby": "texts-title" },
      el("h3", { id: "texts-title" }, "Graphs side by side"),
      names.length
        ? [el("div", { class: "tools" }, leftLabel, rightLabel,
          el("label", {}, this.only, " only what changed"), this.counts), this.body]
        : el("p", { class: "quiet" }, "No texts were kept: capture(stages=...) says which are."));
    if (names.length) this.draw();
  }

  draw() {
    const [left, right] = [this.left, this.right].map((box) => this.graph.stages[box.value][1]);
    Object.assign(this, { lines: [left, right] });
    this.found = sideBySide(left, right);
    const { removed, added, moved } = this.found.count;
    this.counts.textContent = left === right || removed + added + moved === 0
      ? `the same, ${plural(left.length, "line")}`
      : [[removed, "removed"], [added, "added"], [moved, "moved"]].filter(([n]) => n)
        .map(([n, word]) => `${n} ${word}`).join(", ") + ` of ${left.length} and ${right.length} lines`;
    const { rows } = this.found;
    const shown = new Uint8Array(rows.length);
    if (!this.only.checked || removed + added + moved === 0) shown.fill(1);
    else rows.forEach((row, i) => {
      if (row[2]) shown.fill(1, Math.max(0, i - CONTEXT), i + CONTEXT + 1);
    });
    const parts = [];
    for (let i = 0; i < rows.length;) {
      let end = i;
      while (end < rows.length && shown[end] === shown[i] && (!shown[i] || end < i + CHUNK)) end++;
      parts.push(shown[i] ? this.shard(i, end) : this.fold(i, end));
      i = end;
    }
    this.body.replaceChildren(...parts);
  }

  fold(from, to) {
    const button = el("button", { type: "button", class: "fold", onclick: () => {
      const shards = [];
      for (let i = from; i < to; i += CHUNK) shards.push(this.shard(i, Math.min(to, i + CHUNK)));
      button.replaceWith(...shards);
    } }, `${plural(to - from, "equal line")}`);
    return button;
  }

  shard(from, to) {
    const shard = el("div", { class: "shard" });
    shard.style.containIntrinsicShardSize = `auto ${18 * (to - from)}px`;
    for (const [i, j, changed] of this.found.rows.slice(from, to)) {
      const pair = changed && i >= 0 && j >= 0 ? [lineOf(this.lines[0][i]), lineOf(this.lines[1][j])] : null;
      shard.append(this.cell(0, i, changed, pair), this.cell(1, j, changed, pair));
    }
    return shard;
  }

  cell(side, i, changed, pair) {
    if (i < 0) return el("div", { class: "cell none" });
    const text = lineOf(this.lines[side][i]);
    const key = this.found[side ? "b" : "a"][i];
    const plain = isPlain(this.lines[side][i]);
    const long = !changed && this.only.checked && text.length > 400 ? "long" : "";
    const kind = plain ? "plain" : !changed ? "" : this.found.moved.has(key) ? "moved" : side ? "added" : "removed";
    return el("div", { class: `cell ${kind} ${long}`, "data-line": i },
      el("span", { class: "number", "aria-hidden": true }, i + 1),
      el("span", { class: "code" }, pair && (kind === "removed" || kind === "added") ? marked(text, pair[1 - side]) : text || " "));
  }

  show(label) {
    const found = definitions(this.graph).get(label);
    if (!found) return;
    this.right.value = String(found[0]);
    this.only.checked = false;
    this.draw();
    const cell = this.body.querySelector(`.cell:nth-child(even)[data-line="${found[1]}"]`);
    this.section.scrollIntoView({ shard: "start" });
    cell.scrollIntoView({ shard: "center" });
    cell.classList.add("found");
    this.body.focus({ preventScroll: true });
  }
}

/** A changed line, with what is not in the other one marked, if the two are alike. */
function marked(text, other) {
  const most = Math.min(text.length, other.length);
  let head = 0, tail = 0;
  while (head < most && text[head] === other[head]) head++;
  while (tail < most - head && text[text.length - 1 - tail] === other[other.length - 1 - tail]) tail++;
  if (2 * (head + tail) < text.length || head + tail === text.length) return text;
  return [text.slice(0, head), el("mark", {}, text.slice(head, text.length - tail)), text.slice(text.length - tail)];
}

// ------------------------------------------------------------------------------------------------ what passes did

function passes(graph) {
  const changed = graph.steps.filter((s) => s.changed), rest = graph.steps.filter((s) => !s.changed);
  const arrow = ([before, after]) => (before === after ? String(after) : `${before} → ${after}`);
  const table = changed.length
    ? el("table", {}, el("thead", {}, el("tr", {}, ["pass", "nodes", "collectives"].map((c, i) =>
      el("th", { scope: "col", class: i ? "n" : "" }, c)))),
    el("tbody", {}, changed.map((s) => el("tr", {}, el("td", {}, el("code", {}, s.name)),
      el("td", { class: "n" }, arrow(s.nodes)), el("td", { class: "n" }, arrow(s.collectives))))))
    : el("p", {}, graph.steps.length ? "No pass changed anything." : "No pass has run.");
  const others = rest.length && changed.length
    ? el("details", {}, el("summary", {}, `${plural(rest.length, "other")} changed nothing`), el("ul", {}, rest.map((s) => el("li", {}, el("code", {}, s.name)))))
    : "";
  return el("section", { class: "card", "aria-labelledby": "passes-title" },
    el("h3", { id: "passes-title" }, "What the passes did"),
    el("div", { class: "columns" }, el("div", {}, table, others), el("div", {}, flow(graph))));
}

/** Traced collectives on the left, what they are issued as on the right. */
function flow(graph) {
  const { traced, issued } = graph;
  if (!traced.length) return el("p", { class: "quiet" }, "No collectives.");
  const holder = new Map(issued.flatMap((c, i) => c.members.map((m) => [m, i])));
  const regrouped = traced.some((c, i) => !holder.has(i)) ||
    issued.some((c) => c.members.length !== 1 || c.kind !== traced[c.members[0]].kind);
  if (!regrouped)
    return el("p", { class: "quiet" }, `Each of the ${plural(traced.length, "traced collective")} is issued as it was traced.`);
  const row = traced.length <= 24 ? 18 : traced.length <= 36 ? 12 : Math.max(2.5, 300 / traced.length), top = 22, width = 700;
  const x = [0, 236, 450, width], height = top + row * traced.length + 4;
  const order = traced.map((c, i) => i).sort((i, j) => (holder.get(i) ?? 1e9) - (holder.get(j) ?? 1e9) || i - j);
  const parts = [
    svg("text", { class: "head", x: 0, y: 12 }, `${traced.length} traced`),
    svg("text", { class: "head", x: x[2], y: 12 }, `${issued.length} issued`),
  ];
  const named = row >= 11;
  const box = (kind, left, y, wide, h, title, rows) => {
    const node = svg("rect", { class: kind, x: left, y: y + 1, width: wide, height: Math.max(h - 2, 1.5), rx: 2 });
    node.addEventListener("pointermove", (e) => tip.show(title, rows, e.clientX, e.clientY));
    node.addEventListener("pointerleave", tip.hide);
    parts.push(node);
  };
  const label = (text, left, y, h) => parts.push(svg("text", { x: left + 6, y: y + h / 2 + 4 }, text));
  let at = 0;
  while (at < order.length) {
    const to = holder.get(order[at]);
    let end = at + 1;
    while (end < order.length && holder.get(order[end]) === to) end++;
    const y = top + at * row, h = (end - at) * row;
    const now = to === undefined ? null : issued[to];
    const target = Math.max(Math.min(h, 30), Math.min(row, 18)), targetY = y + (h - target) / 2;
    for (let k = at; k < end; k++) {
      const c = traced[order[k]], own = top + k * row;
      const [y1, y2] = now
        ? [targetY + ((k - at) / (end - at)) * target, targetY + ((k - at + 1) / (end - at)) * target]
        : [own + 1, own + row - 1];
      const [a, b, m] = [x[1], now ? x[2] : x[1] + 60, (x[1] + x[2]) / 2];
      parts.push(svg("path", { class: `link ${family(c.kind)}${now ? "" : " gone"}`, d:
        `M${a},${own + 1}C${now ? m : a + 30},${own + 1} ${now ? m : a + 30},${y1} ${b},${y1}L${b},${y2}` +
        `C${now ? m : a + 30},${y2} ${now ? m : a + 30},${own + row - 1} ${a},${own + row - 1}Z` }));
      box(family(c.kind), x[0], own, x[1], row, c.name, aboutTraced(c));
      if (named) label(`${c.kind} ${bytes(c.bytes)}`, x[0], own, row);
      if (named && !now) parts.push(svg("text", { class: "said", x: b + 8, y: own + row / 2 + 4 }, c.fate));
    }
    if (now) {
      box(family(now.kind), x[2], targetY, width - x[2], target, now.name, aboutIssued(graph, now));
      if (target >= 11)
        label(`${now.kind} ${bytes(now.bytes)}${now.members.length > 1 ? `, of ${now.members.length}` : ""}`, x[2], targetY, target);
    }
    at = end;
  }
  return svg("svg", { class: "flow", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${traced.length} traced collectives are issued as ${issued.length}; the table below says how` }, parts);
}

// ------------------------------------------------------------------------------------------------ collectives

const text = (title, of) => ({ title, of, sort: of, class: "text" });
const word = (title, of) => ({ title, of, sort: of, class: "word" });
const number = (title, sort, of) => ({ title, sort, of, number: true, class: "n" });

function issuedColumns(graph) {
  const members = (c) => c.members.map((m) => graph.traced[m]);
  return [
    word("kind", (c) => c.kind), word("ranks", (c) => c.ranks), word("dtype", (c) => c.dtypes),
    number("global", (c) => c.bytes, (c) => bytes(c.bytes)),
    number("a rank puts in", (c) => c.most, range),
    number("starts", (c) => c.start, (c) => seconds(c.start)),
    number("takes", (c) => c.end - c.start, (c) => seconds(c.end - c.start)),
    number("exposed", (c) => c.exposed, (c) => (c.exposed ? seconds(c.exposed) : "–")),
    number("compute behind", (c) => c.behind[1], (c) => seconds(c.behind[1])),
    number("stands for", (c) => c.members.length, (c) => String(c.members.length)),
    text("for", (c) => firstOf(members(c).map((m) => m.reason))),
    word("from", (c) => firstOf(members(c).map((m) => m.place))),
  ];
}

const TRACED = [
  word("kind", (c) => c.kind), word("ranks", (c) => c.ranks), word("dim", (c) => c.dim), word("dtype", (c) => c.dtypes),
  number("global", (c) => c.bytes, (c) => bytes(c.bytes)),
  number("a rank puts in", (c) => c.most, range),
  text("for", (c) => c.reason), text("module", (c) => c.module), word("from", (c) => c.place),
  text("became", (c) => c.fate || "itself"),
];

class CollectivesView {
  constructor(graph, onShow) {
    this.graph = graph;
    this.onShow = onShow;
    this.traced = false;
    this.sort = { column: -1, down: false };
    this.filter = el("input", { type: "search", placeholder: "kind, rank, dtype, file…", oninput: () => this.rows() });
    this.count = el("span", { class: "quiet", "aria-live": "polite" });
    this.table = el("table", { class: "collectives" });
    const choice = (name, traced) => {
      const radio = el("input", { type: "radio", name: "which", onchange: () => this.show(traced) });
      radio.checked = traced === this.traced;
      return el("label", {}, radio, ` ${name}`);
    };
    this.section = el("section", { class: "card", "aria-labelledby": "collectives-title" },
      el("h3", { id: "collectives-title" }, "Collectives"),
      el("div", { class: "tools" },
        el("fieldset", {}, el("legend", { class: "unseen" }, "Which"),
          choice(`issued (${graph.issued.length})`, false), choice(`traced (${graph.traced.length})`, true)),
        el("label", {}, "Filter ", this.filter), this.count),
      el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table of collectives" }, this.table));
    this.show(false);
  }

  show(traced) {
    this.traced = traced;
    this.columns = traced ? TRACED : issuedColumns(this.graph);
    this.sort = { column: -1, down: false };
    const all = traced ? this.graph.traced : this.graph.issued;
    this.all = all.map((c, i) => {
      const cells = this.columns.map((column) => column.of(c));
      return { c, i, cells, found: [c.name, ...cells, c.source ?? ""].join("\n").toLowerCase() };
    });
    const head = (title, i, isNumber) =>
      el("th", { scope: "col", class: isNumber ? "n" : "", "aria-sort": "none" },
        el("button", { type: "button", onclick: () => this.sortBy(i) }, title));
    this.body = el("tbody");
    this.table.replaceChildren(
      el("thead", {}, el("tr", {}, head("#", -1, true), this.columns.map((c, i) => head(c.title, i, c.number)))), this.body);
    this.rows();
  }

  sortBy(column) {
    const first = this.columns[column]?.number ?? false; // of numbers the largest first
    this.sort = { column, down: this.sort.column === column ? !this.sort.down : first };
    this.rows();
  }

  rows() {
    const { column, down } = this.sort;
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = this.all.filter((row) => words.every((w) => row.found.includes(w)));
    const key = column < 0 ? (row) => row.i : (row) => this.columns[column].sort(row.c);
    const compare = (p, q) => (typeof p === "string" ? p.localeCompare(q, "en", { numeric: true }) : p - q);
    rows.sort((p, q) => (down ? -1 : 1) * compare(key(p), key(q)) || p.i - q.i);
    this.table.querySelectorAll("th").forEach((th, i) =>
      th.setAttribute("aria-sort", i - 1 === column ? (down ? "descending" : "ascending") : "none"));
    this.count.textContent = rows.length === this.all.length ? "" : `${rows.length} of ${this.all.length}`;
    this.body.replaceChildren(...rows.map((row) => this.row(row)));
    if (!rows.length)
      this.body.append(el("tr", {}, el("td", { colspan: this.columns.length + 1, class: "quiet" }, "none")));
  }

  row({ c, i, cells }) {
    const issued = this.traced ? this.graph.issued.findIndex((now) => now.members.includes(i)) : i;
    const link = issued < 0 ? String(i) : el("button", {
      type: "button", class: "go", title: "Show in the timeline", "aria-label": `${i}: show in the timeline`,
      onclick: () => this.onShow(issued) }, String(i));
    return el("tr", {}, el("td", { class: "n" }, link), cells.map((cell, k) => {
      const td = el("td", { class: this.columns[k].class });
      if (this.columns[k].title === "kind") td.append(el("span", { class: `dot ${family(c.kind)}`, "aria-hidden": true }));
      td.append(cell);
      if (this.columns[k].title === "from") td.title = distinct(this.members(c).map((m) => m.source)).join("\n");
      if (this.members(c).some((m) => m.gatheredFor) && this.columns[k].title === "for") td.classList.add("bad");
      return td;
    }));
  }

  members(c) {
    return this.traced ? [c] : c.members.map((m) => this.graph.traced[m]);
  }
}

// ------------------------------------------------------------------------------------------------ page

function facts(graph) {
  const communication = graph.issued.reduce((sum, c) => sum + c.end - c.start, 0);
  const list = [
    ["predicted", seconds(graph.total)],
    ["compute", seconds(graph.compute)],
    ["communication", seconds(communication)],
    ["exposed", `${seconds(graph.exposed)} (${percent(graph.exposed, graph.total)})`],
    ["no order beats", seconds(graph.bound)],
    ["peak memory", bytes(graph.peak)],
    ["nodes", String(graph.nodes)],
  ];
  return el("dl", { class: "facts" }, list.map(([n, v]) => el("div", {}, el("dt", {}, n), el("dd", {}, v))));
}

function showGraph(i) {
  tip.hide();
  const graph = data.graphs[i];
  data.graphs.forEach((_, j) => {
    $(`row${j}`).classList.toggle("chosen", i === j);
    const link = $(`row${j}`).querySelector("a");
    if (i === j) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  });
  const texts = new TextsView(graph);
  const timeline = new TimelineView(graph, (label) => label && texts.show(label));
  const collectives = new CollectivesView(graph, (issued) => timeline.showIssued(issued));
  const compilation = data.compilations[graph.compilation];
  $("graph").replaceChildren(
    el("h2", {}, el("code", {}, compilation.function), ` ${graph.side}`), facts(graph),
    timeline.figure, passes(graph), collectives.section, texts.section);
  timeline.drawNow();
}

function start() {
  $("app").append(header(), data.compilations.length ? overview() : el("p", {}, "Nothing was compiled."),
    el("section", { id: "graph", tabindex: -1, "aria-label": "Graph" }));
  if (!data.graphs.length) return;
  const chosen = () => {
    const i = /^#g(\d+)$/.exec(location.hash);
    return i && data.graphs[i[1]] ? Number(i[1]) : null;
  };
  addEventListener("hashchange", () => chosen() !== null && showGraph(chosen()));
  addEventListener("scroll", tip.hide, { passive: true });
  showGraph(chosen() ?? 0);
}

start();
