// The page itself: its parts, from the embedded data; `render` draws those whose data has changed.
let data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
let box = page; // the part that is being drawn

// What a slice is, by its name: the first pattern that fits gives the color.
const STAGES = [/^generate|^verify|^wide/, /reward|score|cost/, /log_probs|values|top/, /update|early backward/, /switch|^to_/, /eval/, /save|export|fetch/];
const stageColor = (name) => {
  const index = STAGES.findIndex((stage) => stage.test(name));
  return `var(--c${index < 0 ? STAGES.length : index})`;
};

function duration(seconds) {
  if (seconds === null) return "unknown";
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.round(seconds % 60)} s`;
}

function short(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(1)} ms` : `${(seconds * 1e6).toFixed(0)} µs`;
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (Math.abs(count) >= 1000 && power < units.length - 1) [count, power] = [count / 1000, power + 1];
  return `${power ? count.toPrecision(3) : count} ${units[power]}`;
}

function section(title, lead, ...content) {
  box.append(make("h2", {}, title), lead ? make("p", { class: "lead" }, lead) : "", ...content);
}

// Buttons of which one is pressed; `choose` is called with its index, at once with the first.
// `chosen` is called where the reader has pressed it.
function choices(labels, start, choose, chosen = () => {}) {
  const buttons = labels.map((label, i) => make("button", { type: "button", onclick: () => (chosen(i), press(i)) }, label));
  const press = (i) => {
    buttons.forEach((button, j) => button.setAttribute("aria-pressed", String(i === j)));
    choose(i);
  };
  press(start);
  return make("span", { class: "choices" }, ...buttons);
}

function header() {
  const mood = { finished: "good", failed: "bad", killed: "bad", running: data.live ? "live" : "" }[data.state] || "";
  box.append(
    make("header", { class: "head" }, make("h1", {}, data.name), make("span", { class: `pill ${mood}`, id: "state" }, data.state),
      make("span", { class: "soft" }, [data.started, data.reason].filter(Boolean).join(" · "))),
  );
  const tiles = make("div", { class: "tiles" });
  if (data.headline) {
    const { before, after, num_before, num_after } = data.headline;
    tiles.append(make("div", { class: "card tile hero", id: "headline" }, make("div", { class: "label" }, "Held-out accuracy"),
      make("div", { class: "value" }, make("span", { class: "before", "data-value": before }, number(before)), make("span", { class: "arrow" }, "→"),
        make("span", { class: "after", "data-value": after }, number(after))),
      make("div", { class: "note" }, `${num_before} → ${num_after}`)));
  }
  tiles.append(tile("Duration", duration(data.duration), data.phases.map((p) => `${p.short} ${duration(p.seconds)}`).join(", ")));
  for (const t of data.tiles) tiles.append(tile(t.label, t.bytes !== undefined ? bytes(t.bytes) : t.text || number(t.value), t.note));
  box.append(tiles);
}

const tile = (label, value, note) => make("div", { class: "card tile" }, make("div", { class: "label" }, label),
  make("div", { class: "value" }, value), note ? make("div", { class: "note" }, note) : null);

function advice() {
  if (!data.advice.length) return;
  const items = data.advice.map(([text, key]) => make("li", {}, `${text}: `, make("code", {}, key)));
  section("Advice", "What the last steps show, and the setting that changes it.", make("ul", { class: "card", id: "advice" }, ...items));
}

function curves() {
  const [hero, rest, more] = ["hero", "main", "more"].map((group) => data.charts.filter((c) => c.group === group));
  if (!data.charts.length) return section("Curves", "No metrics were recorded.");
  const warm = data.phases.some((p) => p.name === "warm_start");
  section("Curves", `${warm ? "Amber is the supervised warm start, blue the reinforcement learning. " : ""}Thin lines are single steps, thick ones the mean of the steps around. A red mark is a value that was not finite.`);
  for (const chart of hero) box.append(lineChart({ ...chart, hero: true }, data.phases));
  box.append(make("div", { class: "grid wide" }, ...rest.map((chart) => lineChart(chart, data.phases))));
  if (more.length) {
    box.append(make("details", {}, make("summary", {}, `Other metrics (${more.length})`),
      make("div", { class: "grid" }, ...more.map((chart) => lineChart(chart, data.phases)))));
  }
}

let timelineOf = null; // the label of the step that the reader has chosen

function timelines() {
  if (!data.timelines.length) return;
  let step = data.timelines[0];
  const legend = make("span", { class: "legend" });
  const drawing = plot(0, (node, width) => paintTimeline(node, width, step));
  const choose = (i) => {
    step = data.timelines[i];
    legend.replaceChildren(...step.stages.map((name) => make("span", {}, make("i", { style: `background:${stageColor(name)}` }), name.replace("_", " "))));
    drawing.repaint();
  };
  const labels = data.timelines.map((t) => t.label);
  const first = data.live ? 0 : Math.min(1, labels.length - 1);
  const start = labels.indexOf(timelineOf);
  const bar = make("div", { class: "bar" }, choices(labels, start < 0 ? first : start, choose, (i) => (timelineOf = i ? labels[i] : null)), legend);
  section("Timeline of one step", "What each rank does from the start of a step to its end; hatched is idle. The bubble share is the idle part of it. The whole run is in trace.json, which ui.perfetto.dev opens.",
    make("section", { class: "card", id: "timeline" }, bar, drawing));
}

function paintTimeline(box, width, step) {
  const [row, gap, top] = [step.lanes.length > 24 ? 12 : 24, step.lanes.length > 24 ? 3 : 7, 4];
  const left = 12 + 7 * Math.max(...step.lanes.map((lane) => lane.name.length));
  const right = width - (width < 500 ? 44 : 84);
  const bottom = top + step.lanes.length * (row + gap);
  const sx = scale([0, step.seconds], [left, right]);
  const svg = draw("svg", { width, height: bottom + 36, "data-step": step.step, role: "img" },
    draw("defs", {}, draw("pattern", { id: "idle", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      draw("rect", { width: 2, height: 6, fill: "var(--idle)" }))));
  const tip = tooltip(box);
  const marks = ticks(0, step.seconds, Math.max(2, Math.floor((right - left) / 80))).filter((m) => m <= step.seconds * 1.0001);
  for (const mark of marks) {
    svg.append(draw("line", { class: "grid-line", x1: sx(mark), x2: sx(mark), y1: top, y2: bottom + 4 }),
      draw("text", { x: sx(mark), y: bottom + 17, "text-anchor": "middle" }, tickText(mark, marks)));
  }
  svg.append(draw("text", { x: (left + right) / 2, y: bottom + 32, "text-anchor": "middle" }, "seconds since the step began"));
  step.lanes.forEach((lane, i) => {
    const y = top + i * (row + gap);
    svg.append(draw("text", { class: "lane-name", x: left - 8, y: y + row / 2 + 4, "text-anchor": "end" }, lane.name),
      draw("rect", { class: "lane", x: left, y, width: right - left, height: row }));
    if (lane.bubble !== null) {
      const share = `${(100 * lane.bubble).toFixed(1)}%`;
      svg.append(draw("text", { class: "end", "data-lane": lane.name, x: right + 6, y: y + row / 2 + 4 }, width < 500 ? share : `${share} idle`));
    }
    for (const slice of lane.slices) paintSlice(svg, tip, box, slice, lane, sx, y, row);
  });
  svg.onpointerleave = tip.hide;
  box.prepend(svg);
}

function paintSlice(svg, tip, box, slice, lane, sx, y, row) {
  const [x, w] = [sx(slice.start), Math.max(0.8, sx(slice.start + slice.seconds) - sx(slice.start))];
  const show = (event) => {
    const at = box.getBoundingClientRect();
    const lines = [["took", short(slice.seconds)], ["began at", short(slice.start)], ...Object.entries(slice.args)];
    tip.show(event.clientX - at.left, event.clientY - at.top, `${lane.name}: ${slice.name}`, lines);
  };
  svg.append(draw("rect", {
    class: "slice", x, y, width: w, height: row, rx: w > 6 ? 3 : 0, fill: stageColor(slice.name), "data-lane": lane.name,
    "data-name": slice.name, onpointermove: show, onpointerleave: tip.hide,
  }));
  const name = slice.name.replace("_", " ");
  if (row > 14 && w > name.length * 6.6 + 10) {
    svg.append(draw("text", { class: "on", x: x + w / 2, y: y + row / 2 + 4, "text-anchor": "middle" }, name));
  }
}

function predicted() {
  if (!data.predicted) return;
  const { columns, rows } = data.predicted;
  section("Predicted and measured", "Seconds of the last calls of each kind of work: by counted operations on the device's datasheet, and measured. The schedule and the planner multiply the first by the ratio.",
    make("section", { class: "card", id: "predicted" }, make("div", { class: "scroll" }, table(columns, rows))));
}

function memory() {
  if (!data.memory) return;
  const ranks = data.memory.series.length;
  section("Memory per rank", "Before and after every change of phase: what is in use on the rank's device, or of the host's memory by a rank on a CPU. trace.json has it under the slices.",
    lineChart({ ...data.memory, title: ranks > 1 ? `${data.memory.title}, ${ranks} ranks` : data.memory.title }, []));
}

function lengthsAndSwitches() {
  const cards = [];
  if (data.lengths) {
    const legend = data.lengths.sets.map((set) => make("span", {}, make("i", { style: `background:var(--${set.color})` }), `${set.label}: mean ${number(set.mean)}, longest ${set.longest}`));
    cards.push(make("section", { class: "card", id: "lengths" }, make("h3", {}, "Response lengths"), make("div", { class: "legend" }, ...legend), histogram(data.lengths)));
  }
  if (data.switches) {
    const { rows, columns, summary } = data.switches;
    cards.push(make("section", { class: "card", id: "switches" }, make("h3", {}, "Weight switch, training to generation"),
      make("p", { class: "lead" }, `${summary.count} switches, ${bytes(summary.bytes)} in all${summary.theory ? `, ${(summary.bytes / summary.theory).toFixed(3)} of theory` : ""}, median ${short(summary.median_s)}.`),
      make("div", { class: "scroll" }, table(columns, rows))));
  }
  if (cards.length) section(cards.length > 1 ? "Lengths and weight switches" : data.lengths ? "Lengths" : "Weight switches", "", make("div", { class: "two" }, ...cards));
}

function cell(column, value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (column.includes("bytes")) return bytes(value);
  if (column === "seconds" || column.endsWith("_s")) return short(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : number(value);
}

const table = (columns, rows) => make("table", {},
  make("thead", {}, make("tr", {}, ...columns.map((c) => make("th", {}, c.replaceAll("_", " "))))),
  make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((v, i) => make("td", { class: { what: "text", value: "value" }[columns[i]] }, cell(columns[i], v)))))));

// What the model wrote; in a conversation each turn with what it has earned, and replies shaded.
function responseText(sample) {
  const turns = sample.turns || [];
  if (!turns.length) return make("pre", { class: "response" }, sample.response ?? "");
  return make("pre", { class: "response" }, ...turns.flatMap((turn) => [turn.text, turnReward(turn.reward), turn.reply ? make("span", { class: "reply" }, turn.reply) : ""]));
}

const turnReward = (reward) => make("span", { class: `earned ${reward > 0 ? "good" : reward < 0 ? "bad" : ""}`, title: "reward of the turn" }, number(reward));

function sampleCard(sample) {
  const right = typeof sample.reward === "number" && sample.reward > 0;
  const odd = sample.status && !["ok", "done"].includes(sample.status);
  const facts = [
    make("span", { class: `pill ${right ? "good" : "bad"}` }, `reward ${typeof sample.reward === "number" ? number(sample.reward) : sample.reward ?? "none"}`),
    odd ? make("span", { class: "pill bad" }, sample.status) : null,
    ...Object.entries(sample.facts).map(([key, value]) => make("span", {}, `${key} ${typeof value === "number" && !Number.isInteger(value) ? number(value) : value}`)),
  ];
  return make("article", { class: "card sample" }, make("div", { class: "facts" }, ...facts),
    make("h3", {}, "prompt"), make("pre", { class: "prompt" }, sample.prompt), make("h3", {}, "response"), responseText(sample));
}

function samples() {
  if (!data.samples.length) return;
  const list = make("div", { class: "samples", id: "samples" });
  const select = make("select", { "aria-label": "step", onchange: () => show() }, ...data.samples.map((s, i) => make("option", { value: i }, s.label)));
  const keep = [() => true, (s) => s.reward > 0, (s) => !(s.reward > 0)];
  let filter = 0;
  const show = () => {
    const rows = data.samples[Number(select.value)].rows.filter(keep[filter]);
    list.replaceChildren(...(rows.length ? rows.map(sampleCard) : [make("p", { class: "soft" }, "None at this step.")]));
  };
  const move = (by) => {
    select.value = Math.max(0, Math.min(data.samples.length - 1, Number(select.value) + by));
    show();
  };
  select.value = data.samples.length - 1;
  const bar = make("div", { class: "bar" },
    make("button", { type: "button", "aria-label": "earlier step", onclick: () => move(-1) }, "‹"), select,
    make("button", { type: "button", "aria-label": "later step", onclick: () => move(1) }, "›"),
    choices(["all", "rewarded", "not rewarded"], 0, (i) => ((filter = i), show())));
  section("Samples to read", data.samples_note, bar, list);
}

function details() {
  section("Settings and events", "");
  const events = data.events;
  if (events.length) {
    box.append(make("details", { class: "card", id: "events" }, make("summary", {}, `Events (${events.length})`),
      make("div", { class: "scroll" }, table(["at", "phase", "kind", "what"], events))));
  }
  if (data.config) box.append(make("details", { class: "card", id: "config" }, make("summary", {}, "Config"), make("pre", {}, data.config)));
  if (data.environment.length) {
    box.append(make("details", { class: "card", id: "environment" }, make("summary", {}, "Environment"), table(["what", "value"], data.environment)));
  }
}

const footer = () => box.append(make("footer", {}, `hybridrl ${data.live ? "watch" : "report"} of ${data.directory}, ${data.live ? "read" : "made"} ${data.made}`));

// Each part, and the data that it draws.
const PARTS = {
  header: [header, ["name", "state", "reason", "started", "headline", "duration", "phases", "tiles"]],
  advice: [advice, ["advice"]],
  curves: [curves, ["charts", "phases"]],
  timelines: [timelines, ["timelines"]],
  predicted: [predicted, ["predicted"]],
  memory: [memory, ["memory"]],
  lengths: [lengthsAndSwitches, ["lengths", "switches"]],
  samples: [samples, ["samples"]],
  details: [details, ["events", "config", "environment"]],
  footer: [footer, ["made"]],
};
const drawn = {};

function render() {
  for (const [name, [paint, keys]] of Object.entries(PARTS)) {
    const text = JSON.stringify(keys.map((key) => data[key]));
    const before = drawn[name];
    if (before && before.text === text) continue;
    box = make("div", { "data-part": name });
    paint();
    if (before) {
      // What the reader has opened or scrolled stays so.
      const now = [...box.querySelectorAll("details")];
      before.box.querySelectorAll("details").forEach((old, i) => now[i] && (now[i].open = old.open));
      before.box.replaceWith(box);
    } else {
      page.append(box);
    }
    drawn[name] = { text, box };
  }
}
