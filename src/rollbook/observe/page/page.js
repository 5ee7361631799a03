"use strict";
// The page of one run. Data comes from the run directory through api(), or from EMBEDDED in an exported file.
// Text of a run (tokens, messages) is only ever set as text, never as markup.

const $ = (id) => document.getElementById(id);
const state = { overview: null, first: null, last: null, step: null, hover: null, trajectory: null, picked: [] };
const charts = [];
let table = { steps: [], series: {} };
let meanings = {};
let planWaterfall = [];
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "5 2 1 2 1 2", "1 2", "12 4", "3 5"];
const color = (i) => `var(--c${i % 8})`;

// ---------------------------------------------------------------- data

const embeddedSteps = EMBEDDED ? Object.keys(EMBEDDED.steps).map(Number).sort((a, b) => a - b) : [];
const nearest = (numbers, wanted) =>
  numbers.reduce((best, n) => (Math.abs(n - wanted) < Math.abs(best - wanted) ? n : best), numbers[0]);

async function api(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `${path}: ${answer.status}`);
  return answer.json();
}
const getOverview = async () => (EMBEDDED ? EMBEDDED.overview : api("/api/overview"));
async function getSeries(names) {
  if (EMBEDDED) {
    const all = EMBEDDED.series;
    const keep = all.steps.map((s, i) => i).filter((i) =>
      (state.first === null || all.steps[i] >= state.first) && (state.last === null || all.steps[i] <= state.last));
    const cut = (list) => keep.map((i) => list[i]);
    const series = {};
    for (const name of names) {
      if (all.series[name]) series[name] = Object.fromEntries(Object.entries(all.series[name]).map(([k, v]) => [k, cut(v)]));
    }
    return { steps: cut(all.steps), series };
  }
  const query = new URLSearchParams({ names: names.join(","), buckets: 400 });
  if (state.first !== null) query.set("first", state.first);
  if (state.last !== null) query.set("last", state.last);
  return api(`/api/series?${query}`);
}
const getStep = async (n) => (EMBEDDED ? EMBEDDED.steps[nearest(embeddedSteps, n)] : api(`/api/step/${n}`));
async function getTrajectories(n) {
  if (!EMBEDDED) return api(`/api/trajectories/${n}`);
  const steps = Object.keys(EMBEDDED.trajectories).map(Number);
  return steps.length ? EMBEDDED.trajectories[nearest(steps, n)] : { step: null, num: 0, rows: [] };
}
const getTrajectory = async (n, id) =>
  EMBEDDED ? EMBEDDED.trajectories[n].details[id] : api(`/api/trajectory/${n}/${id}`);

// ---------------------------------------------------------------- numbers and elements

const tokensOf = (n) => (n === 1 ? "1 token" : `${n} tokens`);
function show(value, unit) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (unit === "s") return seconds(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "frac") return `${+(value * 100).toPrecision(3)} %`;
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  for (const [factor, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= factor) return `${(value / (letter === "k" ? 1e3 : factor)).toFixed(1)}${letter}`;
  }
  return Number.isInteger(value) ? String(value) : String(+value.toPrecision(4));
}
function seconds(s) {
  if (s < 0) return `−${seconds(-s)}`;
  if (s === 0) return "0 s";
  if (s < 0.01) return `${(s * 1e3).toFixed(2)} ms`;
  if (s < 1) return `${(s * 1e3).toFixed(0)} ms`;
  if (s < 100) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}
function bytes(b) {
  for (const [factor, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (Math.abs(b) >= factor) return `${(b / factor).toFixed(1)} ${unit}`;
  }
  return `${b} B`;
}
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "class") node.className = value;
    else if (key === "style") node.style.cssText = value;
    else if (key.startsWith("on")) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}
function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(props)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const empty = (text) => el("div", { class: "empty" }, text);
// What stands for a bucket of many steps: a maximum stays a maximum, and versions only grow.
function ofBucket(name) {
  const data = table.series[name];
  const by = { max: "max", min: "min" }[name.endsWith("weight_version") ? "max" : meanings[name]?.reduction];
  return data && by && data[by] ? { mean: data[by] } : data;
}
const last = (list) => { for (let i = list.length - 1; i >= 0; i--) if (list[i] !== null) return list[i]; return null; };

// ---------------------------------------------------------------- charts

class Chart {
  // spec: {title, unit, series: (names) => [{name, label, dash, step}], log, height, stack, zero, missing, after}
  constructor(parent, spec) {
    this.spec = spec;
    this.svg = svg("svg", { role: "img", tabindex: -1 });
    this.legend = el("div", { class: "legend" });
    this.note = el("div");
    this.unitLabel = el("span", { class: "unit" });
    this.card = el("div", { class: spec.bare ? "" : "card chart" },
      el("h3", {}, el("span", {}, spec.title), this.unitLabel), this.note, this.svg, this.legend);
    parent.append(this.card);
    charts.push(this);
    this.svg.addEventListener("pointermove", (e) => this.move(e));
    this.svg.addEventListener("pointerleave", () => { if (!this.dragFrom) setHover(null); });
    this.svg.addEventListener("pointerdown", (e) => { this.dragFrom = this.stepAt(e); });
    this.svg.addEventListener("pointerup", (e) => this.drop(e));
    this.svg.addEventListener("pointercancel", () => { this.dragFrom = null; });
  }
  names(all) { return this.spec.series(all).flatMap((s) => s.needs || [s.name]); }
  stepAt(event) {
    if (!this.x) return null;
    const box = this.svg.getBoundingClientRect();
    const wanted = this.x.invert(event.clientX - box.left);
    return table.steps.length ? nearest(table.steps, wanted) : null;
  }
  move(event) {
    setHover(this.stepAt(event));
    if (this.dragFrom !== null && this.dragFrom !== undefined && event.buttons) this.drawZoom(this.dragFrom, state.hover);
  }
  drop(event) {
    const to = this.stepAt(event);
    if (this.dragFrom === null || this.dragFrom === undefined || to === null) return;
    const [a, b] = [Math.min(this.dragFrom, to), Math.max(this.dragFrom, to)];
    this.dragFrom = null;
    if (b - a >= 2 && table.steps.filter((s) => s >= a && s <= b).length > 2) setRange(a, b);
    else selectStep(to);
  }
  drawZoom(a, b) {
    this.zoomRect?.remove();
    const [x0, x1] = [this.x(Math.min(a, b)), this.x(Math.max(a, b))];
    this.zoomRect = svg("rect", { class: "zoom", x: x0, y: 0, width: Math.max(1, x1 - x0), height: this.height });
    this.svg.append(this.zoomRect);
  }
  draw() {
    const names = state.overview ? state.overview.names : [];
    this.lines = this.spec.series(names)
      .map((s) => ({ ...s, data: s.compute ? s.compute(table) : ofBucket(s.name) }))
      .filter((s) => s.data && last(s.data.mean) !== null);
    if (!this.spec.bare && !this.spec.keep) this.card.hidden = !this.lines.length;
    this.svg.replaceChildren();
    this.legend.replaceChildren();
    this.unitLabel.textContent = this.spec.log ? `${this.spec.unit || ""} (log)` : this.spec.unit || "";
    this.note.replaceChildren(...(this.spec.note ? this.spec.note(names) : []));
    this.svg.style.display = this.lines.length ? "" : "none";
    if (!this.lines.length) {
      this.x = null;
      this.legend.append(empty(this.spec.missing || "not reported by this run"));
      return;
    }
    const width = Math.max(160, this.svg.clientWidth || this.card.clientWidth - 24);
    const height = this.height = this.spec.height || 150;
    const box = { left: 46, right: 8, top: 6, bottom: 18 };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.style.height = `${height}px`;
    const steps = table.steps;
    const [s0, s1] = [steps[0], steps[steps.length - 1]];
    const spanX = Math.max(1, s1 - s0);
    this.x = (s) => box.left + (width - box.left - box.right) * (s1 === s0 ? 0.5 : (s - s0) / spanX);
    this.x.invert = (px) => s0 + spanX * (px - box.left) / (width - box.left - box.right);
    if (this.spec.stack) this.stack();
    const values = this.lines.flatMap((l) => [...(l.top || l.data.max || l.data.mean), ...(l.base || l.data.min || l.data.mean)])
      .filter((v) => v !== null && (!this.spec.log || v > 0));
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (this.spec.zero && !this.spec.log) low = Math.min(0, low);
    const floorSpan = this.spec.minSpan || 0;
    if (high - low < floorSpan) high = low + floorSpan;
    if (high === low) { const pad = Math.abs(high) * 0.1 || 1; high += pad; if (!this.spec.zero) low -= pad; }
    if (!this.spec.log && !this.spec.zero) { const pad = (high - low) * 0.05; low -= pad; high += pad; }
    const inner = height - box.top - box.bottom;
    const scale = this.spec.log
      ? (v) => height - box.bottom - inner * (Math.log(Math.max(v, low)) - Math.log(low)) / (Math.log(high) - Math.log(low) || 1)
      : (v) => height - box.bottom - inner * (v - low) / (high - low);
    for (const tick of this.spec.log ? logTicks(low, high) : linearTicks(low, high)) {
      const y = scale(tick);
      this.svg.append(svg("line", { class: "gridline", x1: box.left, x2: width - box.right, y1: y, y2: y }));
      const label = svg("text", { x: box.left - 5, y: y + 4, "text-anchor": "end" });
      label.textContent = show(tick, this.spec.unit === "steps" ? undefined : this.spec.unit);
      this.svg.append(label);
    }
    const ticks = s1 === s0 ? [s0] : linearTicks(s0, s1, width / 110).filter(Number.isInteger);
    for (const tick of ticks) {
      const label = svg("text", { x: this.x(tick), y: height - 4, "text-anchor": tick === s0 ? "start" : tick === s1 ? "end" : "middle" });
      label.textContent = show(tick);
      this.svg.append(label);
    }
    this.lines.forEach((line, i) => {
      const ink = line.color || color(i);
      line.dash = line.dash ?? (this.spec.stack && !line.over ? "" : DASHES[i % 8]);
      if (this.spec.stack && !line.over) {
        this.svg.append(svg("path", { d: area(steps, line.top, line.base, this.x, scale), fill: ink, opacity: 0.8 }));
        return;
      }
      if (line.data.min) {
        this.svg.append(svg("path", { d: area(steps, line.data.max, line.data.min, this.x, scale), fill: ink, opacity: 0.16 }));
      }
      this.svg.append(svg("path", { d: path(steps, line.data.mean, this.x, scale, line.stairs),
        fill: "none", stroke: ink, "stroke-width": 1.5, "stroke-dasharray": line.dash }));
      if (line.data.mean.filter((v) => v !== null).length < 40) {
        steps.forEach((s, k) => { if (line.data.mean[k] !== null) this.svg.append(svg("circle", { cx: this.x(s), cy: scale(line.data.mean[k]), r: 2, fill: ink })); });
      }
    });
    this.selected = svg("line", { class: "selected", y1: 0, y2: height - box.bottom });
    this.cross = svg("line", { class: "cross", y1: 0, y2: height - box.bottom });
    this.svg.append(this.selected, this.cross);
    this.mark();
  }
  stack() {
    let below = table.steps.map(() => 0);
    for (const line of this.lines) {
      if (line.over) continue;
      line.base = below;
      line.top = below.map((b, i) => b + (line.data.mean[i] || 0));
      below = line.top;
    }
  }
  mark() {
    if (!this.x) return;
    const at = (node, step) => {
      const visible = step !== null && step >= table.steps[0] && step <= table.steps[table.steps.length - 1];
      node.style.display = visible ? "" : "none";
      if (visible) { node.setAttribute("x1", this.x(step)); node.setAttribute("x2", this.x(step)); }
    };
    at(this.selected, currentStep());
    at(this.cross, state.hover);
    if (!this.dragFrom) this.zoomRect?.remove();
    const index = state.hover === null ? -1 : table.steps.indexOf(state.hover);
    this.legend.replaceChildren(...this.lines.map((line, i) => {
      const value = index >= 0 ? line.data.mean[index] : last(line.data.mean);
      const key = this.spec.stack && !line.over
        ? svg("svg", { viewBox: "0 0 22 8" }, svg("rect", { width: 22, height: 8, fill: line.color || color(i) }))
        : svg("svg", { viewBox: "0 0 22 8" }, svg("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: line.color || color(i), "stroke-width": 2, "stroke-dasharray": line.dash }));
      return el("span", {}, key, `${line.label} `, el("b", {}, show(value, this.spec.unit)));
    }));
    const first = this.lines[0];
    this.svg.setAttribute("aria-label", `${this.spec.title}: ${first.label} ${show(last(first.data.mean), this.spec.unit)}`);
  }
}
function path(steps, values, x, y, stairs) {
  let d = "", pen = false, previous = 0;
  values.forEach((v, i) => {
    if (v === null) return;
    if (pen && stairs) d += `H${x(steps[i]).toFixed(1)}V${y(v).toFixed(1)}`;
    else d += `${pen ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(v).toFixed(1)}`;
    pen = true; previous = i;
  });
  return d;
}
function area(steps, top, base, x, y) {
  const keep = steps.map((_, i) => i).filter((i) => top[i] !== null && base[i] !== null);
  const up = keep.map((i) => `${x(steps[i]).toFixed(1)} ${y(top[i]).toFixed(1)}`);
  const down = keep.reverse().map((i) => `${x(steps[i]).toFixed(1)} ${y(base[i]).toFixed(1)}`);
  return up.length ? `M${up.join("L")}L${down.join("L")}Z` : "";
}
function linearTicks(low, high, wanted = 4) {
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const stride = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw;
  const ticks = [];
  for (let t = Math.ceil(low / stride) * stride; t <= high + stride * 1e-9; t += stride) ticks.push(+t.toPrecision(12));
  return ticks;
}
function logTicks(low, high) {
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    for (const m of [1, 3]) { const t = m * 10 ** p; if (t >= low && t <= high) ticks.push(t); }
  }
  return ticks.length > 6 ? ticks.filter((_, i) => i % Math.ceil(ticks.length / 6) === 0) : ticks.length ? ticks : [low, high];
}

// ---------------------------------------------------------------- what each chart shows

const MAX_LINES = 8;
const family = (pattern, label) => (names) => names.map((n) => [n, n.match(pattern)]).filter(([, m]) => m)
  .slice(0, MAX_LINES).map(([name, m]) => ({ name, label: label ? label(m) : m[1] }));
const fixed = (...pairs) => () => pairs.map(([name, label, more]) => ({ name, label, ...more }));
const stageNames = (names) => names.filter((n) => n.startsWith("timing_s/") && n !== "timing_s/step");
const STAGE_ORDER = Object.keys(STAGES);  // metric suffix -> name of the stage, in the order of a step
const stageRank = (n) => { const i = STAGE_ORDER.indexOf(n.replace(/^\w+_s\//, "")); return i < 0 ? 99 : i; };
const stageName = (suffix) => STAGES[suffix] || suffix;
const replicaIds = (names) => names.map((n) => n.match(/^replica\/(\w+)\/weight_version$/)).filter(Boolean).map((m) => m[1]);

function versionsBehind(names) {
  const ids = replicaIds(names);
  const needs = ids.map((id) => `replica/${id}/weight_version`);
  return ids.slice(0, MAX_LINES).map((id) => ({
    label: `replica ${id}`, needs, stairs: true, name: `replica/${id}/weight_version`,
    compute: (t) => {
      const columns = needs.map(ofBucket).filter(Boolean);
      const own = ofBucket(`replica/${id}/weight_version`);
      if (!own) return null;
      return { mean: t.steps.map((_, i) => {
        const newest = Math.max(...columns.map((c) => c.mean[i] ?? -Infinity));
        return own.mean[i] === null || newest === -Infinity ? null : Math.max(0, newest - own.mean[i]);
      }) };
    },
  }));
}
function versionChips(names) {
  const ids = replicaIds(names);
  if (!ids.length) return [];
  const versions = ids.map((id) => last(ofBucket(`replica/${id}/weight_version`)?.mean || []));
  const newest = Math.max(...versions.filter((v) => v !== null));
  return [el("div", { class: "chips" }, ...ids.map((id, i) => {
    const behind = newest - versions[i];
    return el("span", { class: behind >= 0.5 ? "chip bad" : "chip" }, `${id}: v${versions[i]}${behind >= 0.5 ? ` ▼ ${show(behind)} behind` : ""}`);
  }))];
}

function build() {
  const screen = $("screen-grid");
  new Chart(screen, { title: "Reward by source", keep: true, unit: "", height: 190, series: (names) => [
    ...family(/^reward\/(.+)\/mean$/)(names), ...family(/^val\/(.+)\/exact_match$/, (m) => `held-out ${m[1]}`)(names)].slice(0, MAX_LINES),
    missing: "no reward yet" });
  new Chart(screen, { title: "Weight version per replica: versions behind the newest", keep: true, unit: "", height: 150, zero: true, minSpan: 1,
    series: versionsBehind, note: versionChips, missing: "no replica reports its version" });
  new Chart(screen, { title: "Logprob gap, trainer against engine at one version", keep: true, unit: "nats", log: true, height: 190, series: fixed(
    ["training/logprob_gap/mean", "mean"], ["training/logprob_gap/p99", "p99"], ["training/logprob_gap/max", "max"],
    ["training/rollout_probs_diff_mean", "mean of |Δp|"]), missing: "the gap is not reported: proximal logprobs are off" });
  const triple = el("div", { class: "card triple" });
  screen.append(triple);
  new Chart(triple, { bare: true, title: "Staleness", unit: "", zero: true, minSpan: 1, height: 170, series: fixed(
    ["training/off_policy/trajectory_staleness_worst/mean", "mean"], ["training/off_policy/trajectory_staleness_worst/max", "max", { stairs: true }]) });
  new Chart(triple, { bare: true, title: "Response length", unit: "", zero: true, height: 170, series: fixed(
    ["response_length/mean", "mean"], ["response_length/p99", "p99"], ["response_length/max", "max"]) });
  new Chart(triple, { bare: true, title: "Sync", unit: "s", zero: true, height: 170, series: fixed(
    ["timing_s/update_weights", "measured"], ["expected_s/update_weights", "planned", { dash: "6 4" }]) });

  const step = $("step-grid");
  new Chart(step, { title: "Stages of each step, and the plan", unit: "s", stack: true, zero: true, height: 210, series: (names) => [
    ...stageNames(names).sort((a, b) => stageRank(a) - stageRank(b)).map((name) => ({ name, label: stageName(name.slice(9)) })),
    { name: "expected_s/step", label: "planned step", over: true, dash: "6 4", color: "var(--text)" }] });
  new Chart(step, { title: "Throughput", unit: "", zero: true, height: 210, series: (names) => [
    { name: "perf/throughput", label: "trained tokens/s/GPU" },
    ...family(/^perf\/tokens_per_s\/(.+)$/, (m) => `${stageName(m[1])} tokens/s`)(names)].slice(0, MAX_LINES) });

  const engines = $("engines-grid");
  const replica = (title, what, unit, more) => new Chart(engines, { title, unit, zero: true, ...more,
    series: family(new RegExp(`^replica/(\\w+)/${what}$`), (m) => `replica ${m[1]}`) });
  replica("Running sequences", "num_running", "");
  replica("Tokens per second", "tokens_per_s", "");
  replica("KV pool used", "kv_used_frac", "frac");
  replica("Idle", "idle_frac", "frac");
  new Chart(engines, { title: "Idle by side", unit: "frac", zero: true, series: family(/^idle_frac\/(\w+)$/) });
  new Chart(engines, { title: "Tail, preemptions, prefix hits", unit: "", zero: true, series: fixed(
    ["rollout/tail_s", "tail, seconds"], ["rollout/num_preemptions", "preemptions"], ["rollout/prefix_hit_frac", "prefix hits, share"]) });

  const policy = $("policy-grid");
  const one = (title, unit, ...pairs) => new Chart(policy, { title, unit, series: fixed(...pairs) });
  one("Entropy", "nats", ["actor/entropy", "entropy"]);
  one("KL", "nats", ["actor/ppo_kl", "proximal to current (k1)"], ["actor/kl_loss", "reference"]);
  one("Clipped tokens", "frac", ["actor/pg_clipfrac", "clipped"], ["actor/pg_clipfrac_lower", "lower clip"]);
  one("Gradient norm", "", ["actor/grad_norm", "policy"], ["critic/grad_norm", "critic"]);
  one("Loss", "", ["actor/loss", "loss"], ["actor/pg_loss", "policy loss"], ["critic/vf_loss", "value loss"]);
  one("Learning rate", "", ["actor/lr", "policy"], ["critic/lr", "critic"]);
  one("Importance weights", "", ["rollout_corr/rollout_is_mean", "mean"], ["rollout_corr/rollout_is_eff_sample_size", "effective sample size"]);
  new Chart(policy, { title: "Share of zeros by source", unit: "frac", zero: true, series: family(/^reward\/(.+)\/zero_frac$/) });
  one("Groups kept, sequences that teach", "frac", ["filter/kept_frac", "groups kept"], ["batch/effective_frac", "effective"]);

  const memory = $("memory-grid");
  new Chart(memory, { title: "Reserved at each point of a hand-over", unit: "bytes", zero: true, height: 180, series: family(/^memory\/(\w+)\/reserved_bytes$/) });
  new Chart(memory, { title: "Reserved and not allocated", unit: "bytes", zero: true, height: 180, series: family(/^memory\/(\w+)\/fragmented_bytes$/) });
  new Chart(memory, { title: "Host memory of the run's processes", unit: "GiB", zero: true, height: 180, series: fixed(["perf/cpu_memory_used_gb", "resident"]) });

  const buffer = $("buffer-grid");
  new Chart(buffer, { title: "Groups", unit: "", zero: true, series: fixed(["buffer/num_running", "running"],
    ["buffer/num_finished", "finished, waiting"], ["buffer/capacity", "may be admitted", { dash: "6 4" }]) });
  new Chart(buffer, { title: "Since the start", unit: "", zero: true, series: fixed(["buffer/num_trained", "trained"],
    ["buffer/num_evicted", "evicted"], ["buffer/num_failed", "failed"]) });
  new Chart(buffer, { title: "Evictions by reason", unit: "", zero: true, series: family(/^evicted\/(\w+)\/num_groups$/) });

  const sandboxes = $("sandboxes-grid");
  new Chart(sandboxes, { title: "Sandboxes", unit: "", zero: true, series: fixed(["env/num_active", "in use"], ["env/capacity", "alive", { dash: "6 4" }],
    ["env/num_leased", "leased"], ["env/queue_depth", "turns waiting"]) });
  new Chart(sandboxes, { title: "Seconds of a turn", unit: "s", zero: true, series: fixed(["env/turn_s/mean", "mean"], ["env/turn_s/p99", "p99"]) });
  new Chart(sandboxes, { title: "Failed trajectories", unit: "", zero: true, series: (names) => [{ name: "failures/num", label: "all" },
    ...family(/^failures\/(\w+)\/num$/)(names)].slice(0, MAX_LINES) });
}

// ---------------------------------------------------------------- panels of one step

// What the plan of the whole step has beyond its stages; nothing where it has no plan.
function plannedOther(readings) {
  const whole = readings["expected_s/step"];
  if (whole === undefined) return undefined;
  const outside = ["expected_s/step", "expected_s/testing", "expected_s/warmup"];
  const stages = Object.keys(readings).filter((n) => n.startsWith("expected_s/") && !outside.includes(n));
  return Math.max(0, whole - stages.reduce((sum, n) => sum + readings[n], 0));
}
function stageRows(readings) {
  return Object.keys(readings).filter((n) => n.startsWith("timing_s/") && n !== "timing_s/step")
    .sort((a, b) => stageRank(a) - stageRank(b))
    .map((n) => { const stage = n.slice(9); return { stage, measured: readings[n], planned: stage === "other" ? plannedOther(readings) : readings[`expected_s/${stage}`] }; });
}
function drawStages(readings) {
  const rows = stageRows(readings);
  if (!rows.length) return $("stages").replaceChildren(el("h3", {}, "Stages"), empty("this step reports no stage seconds"));
  const scale = Math.max(...rows.flatMap((r) => [r.measured, r.planned || 0])) || 1;
  const total = { stage: "whole step", measured: readings["timing_s/step"], planned: readings["expected_s/step"] };
  const ratio = (r) => (r.planned > 1e-6 ? (r.measured / r.planned).toFixed(2) : "–");
  const row = (r, withBar) => el("tr", {}, el("td", {}, withBar ? stageName(r.stage) : el("b", {}, r.stage)),
    el("td", { class: "barcell" }, withBar ? el("div", { class: "bar" },
      el("i", { class: r.planned && r.measured > 1.25 * r.planned ? "over" : "", style: `width:${(100 * r.measured) / scale}%` }),
      r.planned !== undefined ? el("u", { style: `left:${(100 * r.planned) / scale}%`, title: "planned" }) : null) : null),
    el("td", { class: "num" }, seconds(r.measured)), el("td", { class: "num" }, r.planned === undefined ? "–" : seconds(r.planned)),
    el("td", { class: "num" }, ratio(r)));
  $("stages").replaceChildren(el("h3", {}, "Stages", el("span", { class: "unit" }, "bar: measured, line: planned")),
    el("table", {}, el("tr", {}, el("th", {}, "stage"), el("th"), el("th", { class: "num" }, "measured"), el("th", { class: "num" }, "planned"), el("th", { class: "num" }, "ratio")),
      ...rows.map((r) => row(r, true)), total.measured === undefined ? null : row(total, false)));
}
function drawTimeline(spans) {
  const card = $("timeline");
  const whole = spans.find((s) => s.name === "step");
  if (!whole) return card.replaceChildren(el("h3", {}, "Timeline"), empty("no spans of this step in events.jsonl"));
  const t0 = whole.mono_s, total = Math.max(1e-9, whole.duration_s);
  const shown = spans.filter((s) => s !== whole && s.duration_s >= total / 2000).sort((a, b) => a.mono_s - b.mono_s || b.duration_s - a.duration_s).slice(0, 400);
  const depth = new Map([[whole.span_id, -1]]);
  const byId = new Map(spans.map((s) => [s.span_id, s]));
  const level = (s) => { if (!depth.has(s.span_id)) { const p = byId.get(s.parent_id); depth.set(s.span_id, p ? level(p) + 1 : 0); } return depth.get(s.span_id); };
  const lanes = [];  // one line per (depth, free slot), so that overlapping spans do not cover each other
  for (const s of shown) {
    const wanted = level(s);
    let lane = lanes.find((l) => l.level === wanted && l.end <= s.mono_s + 1e-9);
    if (!lane) { lane = { level: wanted, end: 0, spans: [] }; lanes.push(lane); }
    lane.end = s.mono_s + s.duration_s;
    lane.spans.push(s);
  }
  lanes.sort((a, b) => a.level - b.level);
  const longest = Math.max(total, ...shown.map((s) => s.mono_s - t0 + (s.expected_s || 0)));
  const width = Math.max(240, card.clientWidth - 24), lane = 26, height = lanes.length * lane + 22;
  const x = (s) => (width - 4) * (s / longest);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `timeline of the step, ${seconds(total)}` });
  picture.style.height = `${height}px`;
  for (const tick of linearTicks(0, longest, width / 110)) {
    picture.append(svg("line", { class: "gridline", x1: x(tick), x2: x(tick), y1: 0, y2: height - 18 }));
    const label = svg("text", { x: x(tick), y: height - 4, "text-anchor": tick === 0 ? "start" : "middle" });
    label.textContent = seconds(tick);
    picture.append(label);
  }
  const inks = new Map();
  lanes.forEach((row, i) => row.spans.forEach((s) => {
    if (!inks.has(s.name)) inks.set(s.name, color(inks.size));
    const [left, w, y] = [x(s.mono_s - t0), Math.max(1.5, x(s.duration_s)), i * lane + 2];
    const bar = svg("rect", { x: left, y, width: w, height: 13, rx: 2, fill: s.error ? "var(--bad)" : inks.get(s.name), opacity: 0.85 });
    picture.append(bar);
    if (s.expected_s) picture.append(svg("rect", { x: left, y: y + 15, width: Math.max(1.5, x(s.expected_s)), height: 4, rx: 1, fill: "var(--planned)", opacity: 0.6 }));
    if (w > 44) {
      const label = svg("text", { x: left + 4, y: y + 10.5 });
      label.style.cssText = "fill: var(--bg); font-size: 10px; pointer-events: none";
      label.textContent = s.name.slice(0, Math.floor(w / 6.2));
      picture.append(label);
    }
    bar.addEventListener("pointermove", (e) => tip(e, [`${s.name}  ${seconds(s.duration_s)}`, s.expected_s ? `planned ${seconds(s.expected_s)}` : "", s.track || "",
      s.tokens ? `${show(s.tokens)} tokens` : "", s.bytes ? bytes(s.bytes) : "", s.error || "", ...Object.entries(s.attrs || {}).map(([k, v]) => `${k}: ${v}`)]));
    bar.addEventListener("pointerleave", () => tip(null));
  }));
  card.replaceChildren(el("h3", {}, "Timeline", el("span", { class: "unit" }, "below a bar: planned length")), picture,
    el("div", { class: "legend" }, ...[...inks].map(([name, ink]) => el("span", {}, svg("svg", { viewBox: "0 0 22 8" }, svg("rect", { width: 22, height: 8, fill: ink })), name))));
}
function waterfallTable(card, title, note, rows, unit) {
  const scale = Math.max(...rows.map((r) => Math.max(r.from, r.to))) || 1;
  card.replaceChildren(el("h3", {}, title, el("span", { class: "unit" }, note)), el("table", {}, ...rows.map((r) => el("tr", {},
    el("td", {}, r.total ? el("b", {}, r.label) : r.label),
    el("td", { class: "barcell" }, el("div", { class: "bar" }, el("i", { class: r.total ? "" : r.to > r.from === (unit === "s") ? "loss" : "gain",
      style: `left:${(100 * Math.min(r.from, r.to)) / scale}%;width:${(100 * Math.abs(r.to - r.from)) / scale}%` }))),
    el("td", { class: "num" }, r.total ? show(r.to, unit) : `${r.to >= r.from ? "+" : "−"}${show(Math.abs(r.to - r.from), unit)}`),
    el("td", { class: "optional" }, r.why || "")))));
}
function drawWaterfall(readings) {
  const measured = readings["timing_s/step"], planned = readings["expected_s/step"];
  const rows = stageRows(readings).filter((r) => r.stage !== "testing" && r.stage !== "warmup");
  if (measured === undefined || planned === undefined) {
    $("seconds-waterfall").replaceChildren(el("h3", {}, "From planned to measured seconds"), empty("the plan's expectation is not in this run"));
  } else {
    let at = planned;
    const steps = [{ label: "planned step", from: 0, to: planned, total: true }];
    for (const r of rows) {
      const difference = r.measured - (r.planned || 0);
      if (Math.abs(difference) < 0.002 * Math.max(planned, measured)) continue;
      steps.push({ label: stageName(r.stage), from: at, to: at + difference });
      at += difference;
    }
    if (Math.abs(measured - at) > 0.002 * Math.max(planned, measured)) steps.push({ label: "overlap and the plan's own rest", from: at, to: measured });
    steps.push({ label: "measured step", from: 0, to: measured, total: true });
    waterfallTable($("seconds-waterfall"), "From planned to measured seconds", "what each stage added or saved", steps, "s");
  }
  const losses = Object.entries(readings).filter(([n]) => n.startsWith("waterfall/")).map(([n, v]) => ({ label: n.slice(10), frac: v }));
  const source = losses.length ? "measured" : "plan";
  const list = losses.length ? losses : planWaterfall.map((r) => ({ label: r.loss, frac: r.frac, why: r.why }));
  if (!list.length) return $("mfu-waterfall").replaceChildren(el("h3", {}, "Whole-step MFU"), empty("no waterfall in this run or its plan"));
  let at = 1;
  const steps = [{ label: "peak of all GPUs", from: 0, to: 1, total: true }];
  for (const loss of list.filter((l) => Math.abs(l.frac) > 1e-6)) { steps.push({ label: loss.label, from: at, to: at - loss.frac, why: loss.why }); at -= loss.frac; }
  steps.push({ label: "whole-step MFU", from: 0, to: readings["perf/mfu/step"] ?? at, total: true });
  waterfallTable($("mfu-waterfall"), "Whole-step MFU", `where the rest went (${source})`, steps, "frac");
}
function drawOwners(readings) {
  const owners = Object.keys(readings).map((n) => n.match(/^memory\/owner\/(.+)\/bytes$/)).filter(Boolean)
    .map((m) => ({ owner: m[1], bytes: readings[m[0]], planned: readings[`memory/owner/${m[1]}/expected_bytes`] }))
    .sort((a, b) => b.bytes - a.bytes);
  if (!owners.length) return $("owners").replaceChildren(el("h3", {}, "Who owns the device's memory"), empty("no owner registered bytes in this step"));
  const scale = Math.max(...owners.flatMap((o) => [o.bytes, o.planned || 0])) || 1;
  $("owners").replaceChildren(el("h3", {}, "Who owns the device's memory", el("span", { class: "unit" }, "bar: registered, line: planned")), el("table", {}, ...owners.map((o) => el("tr", {},
    el("td", {}, o.owner), el("td", { class: "barcell" }, el("div", { class: "bar" }, el("i", { style: `width:${(100 * o.bytes) / scale}%` }),
      o.planned === undefined ? null : el("u", { style: `left:${(100 * o.planned) / scale}%` }))),
    el("td", { class: "num" }, bytes(o.bytes)), el("td", { class: "num" }, o.planned === undefined ? "–" : bytes(o.planned))))));
}
function drawStalenessHistogram(readings) {
  const bars = Object.keys(readings).map((n) => n.match(/^training\/off_policy\/staleness_hist\/(\d+)$/)).filter(Boolean)
    .map((m) => [Number(m[1]), readings[m[0]]]).sort((a, b) => a[0] - b[0]);
  const card = $("staleness-histogram");
  if (!bars.length) return card.replaceChildren(el("h3", {}, "Staleness of the trained trajectories"), empty("no histogram in this step"));
  const scale = Math.max(...bars.map((b) => b[1])) || 1;
  card.replaceChildren(el("h3", {}, "Staleness of the trained trajectories", el("span", { class: "unit" }, "versions")), el("table", {}, ...bars.map(([k, v]) =>
    el("tr", {}, el("td", {}, `${k}`), el("td", { class: "barcell" }, el("div", { class: "bar" }, el("i", { style: `width:${(100 * v) / scale}%` }))), el("td", { class: "num" }, show(v))))));
}
let stepReadings = {};
function drawMetricTable() {
  const wanted = $("metric-filter").value.toLowerCase();
  const rows = Object.entries(stepReadings).filter(([n]) => n.toLowerCase().includes(wanted));
  $("metric-table").replaceChildren(rows.length ? el("table", {}, el("tr", {}, el("th", {}, "metric"), el("th", { class: "num" }, "value"), el("th", { class: "optional" }, "unit"), el("th", { class: "optional" }, "meaning")),
    ...rows.map(([n, v]) => el("tr", { class: "pick", tabindex: 0, title: "show as a chart", onclick: () => pick(n), onkeydown: (e) => { if (e.key === "Enter") pick(n); } },
      el("td", {}, n), el("td", { class: "num" }, show(v)), el("td", { class: "optional" }, meanings[n]?.unit || ""), el("td", { class: "optional" }, meanings[n]?.meaning || "not in the catalogue"))))
    : empty(wanted ? "no metric of this step has that in its name" : "no metric in this step"));
}
function pick(name) {
  if (!state.picked.includes(name)) {
    state.picked.push(name);
    new Chart($("metric-charts"), { title: name, unit: meanings[name]?.unit === "s" || meanings[name]?.unit === "bytes" ? meanings[name].unit : "", series: fixed([name, "mean"]) });
    refreshSeries();
  }
  $("metric-charts").scrollIntoView({ block: "nearest" });
}

// ---------------------------------------------------------------- trajectories

let listed = { step: null, num: 0, rows: [] };
async function drawTrajectories(step) {
  listed = await getTrajectories(step);
  $("trajectories-title").textContent = listed.step === null ? "" :
    `of step ${listed.step}${listed.num > listed.rows.length ? `, ${listed.rows.length} of ${listed.num}` : ""}`;
  if (!listed.rows.length) {
    $("trajectory-list").replaceChildren(empty(listed.step === null ? "this run keeps no trajectories" : "no trajectory in this step"));
    $("trajectory").replaceChildren(empty("nothing selected"));
    return;
  }
  const versions = (r) => (r.oldest_version === null ? "–" : r.oldest_version === r.newest_version ? `v${r.oldest_version}` : `v${r.oldest_version}–${r.newest_version}`);
  $("trajectory-list").replaceChildren(el("table", { role: "grid" }, el("tr", {}, ...["id", "source"].map((h) => el("th", {}, h)),
    ...["reward", "tokens"].map((h) => el("th", { class: "num" }, h)), ...["turns", "versions", "end"].map((h) => el("th", {}, h))),
    ...listed.rows.map((r) => el("tr", { class: "pick", "data-id": r.id, "aria-selected": "false", tabindex: 0, onclick: () => openTrajectory(r.id), onkeydown: (e) => { if (e.key === "Enter") openTrajectory(r.id); } },
      el("td", {}, r.id), el("td", {}, r.source), el("td", { class: "num" }, r.failure ? "–" : show(r.reward)), el("td", { class: "num" }, show(r.num_response_tokens)),
      el("td", {}, `${r.num_turns}`), el("td", {}, versions(r)), el("td", {}, r.failure || r.finish_reason || "–")))));
  const held = listed.rows.some((r) => r.id === state.trajectory) ? state.trajectory : listed.rows[0].id;
  await openTrajectory(held);
}
async function openTrajectory(id) {
  state.trajectory = id;
  for (const row of $("trajectory-list").querySelectorAll("tr.pick")) row.setAttribute("aria-selected", String(row.dataset.id === id));
  const t = await getTrajectory(listed.step, id);
  if (!t || state.trajectory !== id) return;
  const distinct = [...new Set(t.versions.filter((v) => v !== null))];
  const ink = new Map(distinct.map((v, i) => [v, color(i)]));
  const card = $("trajectory");
  card.replaceChildren(el("div", { class: "facts" }, el("b", {}, t.id), ` · ${t.source} · prompt ${t.prompt_id} · replica ${t.replica_id} · `,
    t.failure ? el("b", {}, `failed: ${t.failure}`) : el("span", {}, "reward ", el("b", {}, show(t.reward))),
    ...Object.entries(t.reward_terms || {}).map(([k, v]) => ` · ${k} ${show(v)}`)),
  el("div", { class: "legend" }, ...distinct.map((v) => el("span", {}, svg("svg", { viewBox: "0 0 22 8" }, svg("rect", { width: 22, height: 8, fill: ink.get(v) })), `sampled by version ${v}`)),
    t.loss ? el("span", {}, el("s", {}, "struck out"), " = not trained") : null, el("span", {}, "grey = prompt or environment")));
  if (t.failure_message) card.append(el("div", { class: "notice error" }, t.failure_message));
  const stretch = (from, to, kind) => {
    const box = el("div", { class: "tokens" });
    for (let i = from; i < to; i++) {
      const text = t.texts[i];
      const classes = kind || (t.loss && !t.loss[i] ? "v unmasked" : "v");
      const token = el("span", { class: text === null ? `${classes} id` : classes }, text === null ? `${t.ids[i]} ` : text);
      if (t.versions[i] !== null) token.style.setProperty("--v", ink.get(t.versions[i]));
      token.dataset.i = i;
      box.append(token);
    }
    box.addEventListener("pointermove", (e) => {
      const i = e.target.dataset?.i;
      if (i === undefined) return tip(null);
      tip(e, [`token ${i}: ${t.ids[i]} ${JSON.stringify(t.texts[i] ?? "")}`, t.versions[i] === null ? "not sampled" : `version ${t.versions[i]}`,
        t.action[i] ? `ln p ${t.logprobs[i]} (p ${show(Math.exp(t.logprobs[i]))})` : "", t.loss ? (t.loss[i] ? "trained" : "not trained") : ""]);
    });
    box.addEventListener("pointerleave", () => tip(null));
    return box;
  };
  card.append(el("div", { class: "turn-title" }, `prompt, ${tokensOf(t.prompt_end)}`), stretch(0, t.prompt_end, "prompt"));
  t.turns.forEach((turn, i) => {
    card.append(el("div", { class: "turn-title" }, `turn ${i + 1}: response, ${tokensOf(turn.response_end - turn.start)}, ended by ${turn.finish_reason}`), stretch(turn.start, turn.response_end, null));
    if (turn.end > turn.response_end) card.append(el("div", { class: "turn-title" }, `turn ${i + 1}: observation, ${tokensOf(turn.end - turn.response_end)}`), stretch(turn.response_end, turn.end, "observation"));
  });
  const task = Object.entries(t.task || {});
  if (task.length) card.append(el("div", { class: "turn-title" }, "task (the policy never sees it)"), ...task.map(([k, v]) => el("div", { class: "facts" }, el("b", {}, `${k}: `), v)));
}

// ---------------------------------------------------------------- head, notices, events

function drawHead() {
  const o = state.overview;
  document.title = `${o.name} · rollbook`;
  $("run-name").textContent = o.name;
  $("state").textContent = o.state;
  $("state").className = `pill ${o.state}`;
  $("state").title = o.writer ? `written by ${o.writer}` : "nobody writes to this run directory now";
  const parts = [];
  if (o.loaded_frac < 1 && !EMBEDDED) parts.push(`reading ${Math.floor(o.loaded_frac * 100)} %`);
  parts.push(el("b", {}, o.last_step === null ? "no step finished" : `step ${o.last_step}${o.planned_steps ? ` of ${o.planned_steps}` : ""}`));
  if (o.first_at_s !== null) parts.push(seconds(Math.max(0, (o.state === "live" ? o.now_s : o.last_at_s) - o.first_at_s)));
  const inner = o.open_spans.length > 1 ? o.open_spans[o.open_spans.length - 1] : o.open_spans[0];
  if (inner) parts.push(`${o.state === "live" ? "in" : "ended in"} ${inner.name} for ${seconds(inner.open_s)}${inner.expected_s ? ` (planned ${seconds(inner.expected_s)})` : ""}`);
  $("progress").replaceChildren(...parts.flatMap((p, i) => (i ? [" · ", p] : [p])));
  $("live").setAttribute("aria-pressed", String(state.step === null));
  $("reset").setAttribute("aria-pressed", String(state.first === null && state.last === null));
}
function drawEvents() {
  const events = [...state.overview.events].reverse();
  const important = events.filter((e) => ["finding", "fault", "step_failed", "publication_failed", "quarantined"].includes(e.kind)).slice(0, 3);
  $("notices").replaceChildren(...important.map((e) => el("div", { class: `notice ${e.severity === "error" || e.kind === "step_failed" ? "error" : ""}` },
    `${e.kind.replace("_", " ")}${e.step !== undefined ? ` at step ${e.step}` : ""}: ${e.summary || e.error || e.fault || (e.why ? `replica ${e.replica_id}, ${e.why}` : "")}`, e.remedy ? el("small", {}, e.remedy) : null)));
  const detail = (e) => Object.entries(e).filter(([k]) => !["kind", "at_s", "mono_s", "step"].includes(k))
    .map(([k, v]) => `${k}=${typeof v === "object" && v !== null ? JSON.stringify(v) : k.endsWith("_bytes") ? bytes(v) : v}`).join("  ");
  $("event-list").replaceChildren(events.length ? el("table", {}, ...events.map((e) => el("tr", {}, el("td", { class: "num" }, new Date(e.at_s * 1000).toISOString().slice(0, 19).replace("T", " ")),
    el("td", { class: "num" }, e.step === undefined ? "" : `step ${e.step}`), el("td", {}, e.kind), el("td", {}, detail(e))))) : empty("no event but spans"));
}

// ---------------------------------------------------------------- state

const currentStep = () => (state.step === null ? state.overview?.last_step ?? null : state.step);
function setHover(step) { if (state.hover !== step) { state.hover = step; for (const c of charts) c.mark(); } }
function setRange(first, lastStep) { state.first = first; state.last = lastStep; remember(); refreshSeries(); drawHead(); }
let stepShown = null, stepTimer = null;
function selectStep(step) {
  const o = state.overview;
  if (o === null || o.last_step === null) return;
  state.step = step === null ? null : Math.max(0, Math.min(o.last_step, Math.round(step)));
  remember();
  drawHead();
  for (const c of charts) c.mark();
  clearTimeout(stepTimer);
  stepTimer = setTimeout(refreshStep, 30);  // a held key or a dragged slider asks once
}
function remember() {
  const parts = [];
  if (state.step !== null) parts.push(`step=${state.step}`);
  if (state.first !== null) parts.push(`from=${state.first}&to=${state.last}`);
  history.replaceState(null, "", parts.length ? `#?${parts.join("&")}` : location.pathname + location.search);
}
function recall() {
  const found = new URLSearchParams(location.hash.replace(/^#\??/, ""));
  const number = (key) => (Number.isFinite(Number(found.get(key) || NaN)) ? Number(found.get(key)) : null);
  state.step = number("step");
  [state.first, state.last] = [number("from"), number("to")];
}
async function refreshSeries() {
  const known = new Set(state.overview.names);
  const names = [...new Set(charts.flatMap((c) => c.names(state.overview.names)))].filter((n) => known.has(n));
  table = await getSeries(names);
  for (const c of charts) c.draw();
  for (const grid of document.querySelectorAll("section > .grid")) {
    const missing = charts.filter((c) => c.card.hidden && c.card.parentNode === grid).map((c) => c.spec.title);
    let note = grid.nextElementSibling?.classList.contains("missing") ? grid.nextElementSibling : null;
    if (!note) { note = el("div", { class: "missing" }); grid.after(note); }
    note.textContent = missing.length ? `Not reported by this run: ${missing.join(" · ")}` : "";
  }
}
async function refreshStep() {
  const step = currentStep();
  if (step === null) return;
  stepShown = step;
  const found = await getStep(step);
  if (stepShown !== step) return;
  stepReadings = found.readings;
  $("step-title").textContent = `${found.step}${state.step === null ? ", the latest" : ""}`;
  const range = $("step-range");
  range.max = state.overview.last_step; range.value = found.step;
  if (document.activeElement !== $("step-number")) $("step-number").value = found.step;
  drawStages(found.readings);
  drawTimeline(found.spans);
  drawWaterfall(found.readings);
  drawOwners(found.readings);
  drawStalenessHistogram(found.readings);
  drawMetricTable();
  await drawTrajectories(step);
}
let seen = "";
async function poll() {
  let pause = 2000;
  try {
    state.overview = await getOverview();
    const o = state.overview;
    const now = `${o.loaded_frac} ${o.num_steps} ${o.last_step} ${o.names.length}`;
    if (now !== seen) {
      const isNewNames = !seen.endsWith(` ${o.names.length}`);
      seen = now;
      if (isNewNames) meanings = EMBEDDED ? EMBEDDED.meanings : await api("/api/meanings");
      await refreshSeries();
      if (state.step === null || stepShown === null) await refreshStep();
      $("step-range").max = o.last_step ?? 0;
    }
    drawHead();
    drawEvents();
    if (o.loaded_frac < 1) pause = 100;
    document.body.dataset.ready = "yes";
  } catch (error) {
    $("progress").textContent = `the page's server does not answer (${error.message}); trying again`;
  }
  if (!EMBEDDED) setTimeout(poll, document.hidden ? 10000 : pause);
}

// ---------------------------------------------------------------- input

function tip(event, lines) {
  const box = $("tip");
  if (!event) { box.hidden = true; return; }
  box.replaceChildren(...lines.filter(Boolean).map((line) => el("div", {}, line)));
  box.hidden = false;
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.min(event.clientY + 16, innerHeight - box.offsetHeight - 8)}px`;
}
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("rollbook-theme", theme); } catch { /* a page from a file may not keep anything */ }
}
const flipTheme = () => setTheme(document.documentElement.dataset.theme === "light" ? "dark" : "light");
function moveTrajectory(by) {
  const at = listed.rows.findIndex((r) => r.id === state.trajectory);
  const next = listed.rows[Math.max(0, Math.min(listed.rows.length - 1, at + by))];
  if (next) { openTrajectory(next.id); $("trajectory-list").querySelector(`[data-id="${next.id}"]`)?.scrollIntoView({ block: "nearest" }); }
}
function zoom(factor) {
  if (!table.steps.length) return;
  const [a, b] = [table.steps[0], table.steps[table.steps.length - 1]];
  const middle = Math.max(a, Math.min(b, currentStep() ?? b)), half = ((b - a) / 2) * factor;
  if (factor < 1 && half < 2) return;
  const [first, lastStep] = [Math.max(0, Math.round(middle - half)), Math.min(state.overview.last_step, Math.round(middle + half))];
  if (first === 0 && lastStep === state.overview.last_step) setRange(null, null); else setRange(first, lastStep);
}
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|TEXTAREA)$/.test(e.target.tagName)) {
    if (e.key === "Escape") e.target.blur();
    return;
  }
  const step = currentStep() ?? 0;
  const actions = {
    ArrowLeft: () => selectStep(step - (e.shiftKey ? 10 : 1)), ArrowRight: () => selectStep(step + (e.shiftKey ? 10 : 1)),
    Home: () => selectStep(table.steps[0] ?? 0), End: () => selectStep(state.overview.last_step), l: () => selectStep(null),
    j: () => moveTrajectory(1), k: () => moveTrajectory(-1), t: flipTheme, 0: () => setRange(null, null), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
    "/": () => $("metric-filter").focus(), "?": () => $("help").showModal(),
  };
  const section = /^[1-9]$/.test(e.key) ? document.querySelectorAll("main section")[Number(e.key) - 1] : null;
  if (section) section.scrollIntoView();
  else if (actions[e.key]) { e.preventDefault(); actions[e.key](); }
});
$("theme").onclick = flipTheme;
$("help-button").onclick = () => $("help").showModal();
$("live").onclick = () => selectStep(null);
$("reset").onclick = () => setRange(null, null);
$("previous").onclick = () => selectStep((currentStep() ?? 0) - 1);
$("next").onclick = () => selectStep((currentStep() ?? 0) + 1);
$("step-range").oninput = (e) => selectStep(Number(e.target.value));
$("step-number").onchange = (e) => selectStep(Number(e.target.value));
$("metric-filter").oninput = drawMetricTable;
addEventListener("hashchange", () => { if (location.hash.startsWith("#?")) { recall(); selectStep(state.step); refreshSeries(); } });
let resizeTimer = null;
addEventListener("resize", () => { clearTimeout(resizeTimer); resizeTimer = setTimeout(() => { for (const c of charts) c.draw(); if (stepShown !== null) refreshStep(); }, 100); });

let kept = null;
try { kept = localStorage.getItem("rollbook-theme"); } catch { /* see setTheme */ }
document.documentElement.dataset.theme = new URLSearchParams(location.search).get("theme") || kept || (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark");
recall();
build();
(async () => { planWaterfall = EMBEDDED ? EMBEDDED.plan : await api("/api/plan").catch(() => []); await poll(); })();
