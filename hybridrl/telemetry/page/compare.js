// The comparison of runs: reads the embedded data and puts the sections in order.
const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const AXES = [["step", "step"], ["tokens", "tokens trained"], ["seconds", "seconds since the start"]];
let axis = 0;

function section(title, lead, ...content) {
  page.append(make("h2", {}, title), lead ? make("p", { class: "lead" }, lead) : "", ...content);
}

const legend = () => make("span", { class: "legend", id: "legend" },
  ...data.groups.map((group, i) => make("span", {}, swatch(i), group.label)));

function grid(header, rows, id) {
  const line = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  return make("section", { class: "card scroll" }, make("table", { id }, make("thead", {}, line("th", header)), make("tbody", {}, ...rows.map((row) => line("td", row)))));
}

// curve: {name, groups: [[{step, tokens, seconds, y, low, high}, ...], ...]}
function curveCard(curve) {
  const box = plot(200, (node, width, height) => {
    const key = AXES[axis][0];
    const all = curve.groups.flat();
    const xs = all.map((p) => p[key]);
    const y = range(all);
    const f = frame(node, width, height, { x: [Math.min(...xs), Math.max(...xs)], y, xName: AXES[axis][1] });
    curve.groups.forEach((points, i) => paintGroup(f, points.map((p) => ({ ...p, x: p[key] })), i));
    hoverGroups(node, f, curve, key);
  });
  boxes.push(box);
  return make("section", { class: "card chart", "data-curve": curve.name }, make("div", { class: "top" }, make("h3", {}, curve.name.replaceAll("_", " "))), box);
}

// Of two seeds an interval is wide: it may take as much room above and below as the means do.
function range(points) {
  const ys = points.map((p) => p.y);
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const room = high - low || Math.abs(high) / 2 || 1;
  const bound = (key, best) => best(...points.map((p) => p[key] ?? p.y));
  return [Math.max(bound("low", Math.min), low - room), Math.min(bound("high", Math.max), high + room)].map((v, i, both) => (both[0] === both[1] ? v + (i ? room : -room) : v));
}

function paintGroup(f, points, index) {
  const style = `stroke:${color(index)}`;
  const banded = points.filter((p) => p.low !== undefined);
  if (banded.length > 1) {
    const inside = (y) => Math.min(f.bottom, Math.max(f.top, f.sy(y)));
    const there = path(banded.map((p) => ({ x: p.x, y: p.high })), f.sx, inside);
    const back = path(banded.map((p) => ({ x: p.x, y: p.low })).reverse(), f.sx, inside);
    f.svg.append(draw("path", { class: "band", style: `fill:${color(index)}`, d: `${there}L${back.slice(1)}Z` }));
  }
  f.svg.append(draw("path", { class: "raw", style, "data-group": index, "data-points": points.length, d: path(points, f.sx, f.sy) }));
  if (points.length < 16) for (const p of points) f.svg.append(draw("circle", { style, cx: f.sx(p.x), cy: f.sy(p.y), r: 2.6 }));
}

function hoverGroups(box, f, curve, key) {
  const tip = tooltip(box);
  box.onpointerleave = tip.hide;
  box.onpointermove = (event) => {
    const at = event.clientX - box.getBoundingClientRect().left;
    const near = curve.groups.map((points) => points.length ? points.reduce((best, p) => (Math.abs(f.sx(p[key]) - at) < Math.abs(f.sx(best[key]) - at) ? p : best)) : null);
    const lines = near.map((p, i) => p && [data.groups[i].label, number(p.y) + (p.low === undefined ? "" : ` (${number(p.low)} to ${number(p.high)})`)]).filter(Boolean);
    const first = near.find(Boolean);
    tip.show(at, event.clientY - box.getBoundingClientRect().top, `step ${first.step}`, lines);
  };
}

const boxes = [];

function axisButtons() {
  const buttons = AXES.map(([, label], i) => make("button", { type: "button", onclick: () => press(i) }, label));
  const press = (i) => {
    axis = i;
    buttons.forEach((button, j) => button.setAttribute("aria-pressed", String(i === j)));
    boxes.forEach((box) => box.repaint());
  };
  press(0);
  return make("span", { class: "choices", id: "axis" }, ...buttons);
}

function samplesBeside() {
  if (!data.samples.length) return;
  const rows = data.samples.map((s) => make("tr", {}, make("td", { class: "text" }, make("pre", {}, s.prompt)),
    ...s.responses.map((r) => make("td", { class: "text" }, make("pre", {}, r.response ?? ""), make("div", { class: "soft" }, `reward ${number(r.reward)}, step ${r.step}`)))));
  const header = make("tr", {}, ...["prompt", ...data.groups.map((group) => group.label)].map((name) => make("th", {}, name)));
  section("Responses to the same prompts", "The last evaluation of each group's first run.", make("section", { class: "card scroll tall" }, make("table", { id: "samples" }, make("thead", {}, header), make("tbody", {}, ...rows))));
}

page.append(make("header", { class: "head" }, make("h1", {}, "Comparison"), make("span", { class: "soft" }, data.made)));
section("Results", "The last value of each metric; of several seeds the mean and its 95 % interval.", grid(data.table[0], data.table.slice(1), "results"));
if (data.settings.length) section("Settings that differ", "", grid(["setting", ...data.groups.map((group) => group.label)], data.settings, "settings"));
section("Curves", "", make("div", { class: "bar" }, axisButtons(), legend()),
  make("div", { class: "grid wide" }, ...data.curves.filter((curve) => curve.shown).map(curveCard)),
  make("details", {}, make("summary", {}, "Other metrics"), make("div", { class: "grid" }, ...data.curves.filter((curve) => !curve.shown).map(curveCard))));
samplesBeside();
section("Runs", "", make("section", { class: "card" }, ...data.groups.flatMap((group, i) => group.runs.map((run) => make("div", { class: "legend" }, make("span", {}, swatch(i), run))))));
page.append(make("footer", {}, `hybridrl compare, made ${data.made}`));
