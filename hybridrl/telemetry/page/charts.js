"use strict";
// Charts as SVG, drawn at the width that their box has. Every function is given plain data.

const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Children that are text become text nodes, so nothing that a model wrote is ever read as HTML.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return value.toExponential(2);
  if (size < 1) return value.toFixed(3);
  if (size < 100) return value.toFixed(2);
  if (size < 1000) return value.toFixed(1);
  return Math.round(value).toLocaleString("en");
}

// Round numbers that cover [low, high]: steps of 1, 2 or 5 times a power of ten.
function ticks(low, high, count, whole = false) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  let step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= count);
  if (whole) step = Math.max(1, Math.round(step));
  const marks = [];
  for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i++) {
    marks.push(Number((i * step).toPrecision(12)));
  }
  return marks;
}

function tickText(value, marks) {
  const step = marks.length > 1 ? Math.abs(marks[1] - marks[0]) : Math.abs(value) || 1;
  const largest = Math.max(...marks.map(Math.abs));
  if (value === 0) return "0";
  if (largest < 1e-3) return value.toExponential(step < 10 ** Math.floor(Math.log10(largest)) ? 1 : 0);
  if (step >= 1000) return `${Number((value / 1000).toFixed(3))}k`;
  return value.toLocaleString("en", {
    minimumFractionDigits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)),
    maximumFractionDigits: 6,
  });
}

const scale = (from, to) => (value) => to[0] + ((value - from[0]) / (from[1] - from[0] || 1)) * (to[1] - to[0]);

// Draws now, and again whenever the box changes its width.
function plot(height, paint) {
  const box = make("div", { class: "plot", style: height ? `min-height:${height}px` : null });
  let width = 0;
  new ResizeObserver(() => {
    if (!box.clientWidth || box.clientWidth === width) return;
    width = box.clientWidth;
    box.replaceChildren();
    paint(box, width, height);
  }).observe(box);
  box.repaint = () => width && (box.replaceChildren(), paint(box, width, height));
  return box;
}

// Frame with both axes; returns the scales and the SVG to draw into.
function frame(box, width, height, { x, y, xName, yFormat = tickText, right = 10, top = 8, whole = true }) {
  const yMarks = ticks(y[0], y[1], 4);
  const left = 10 + 6.6 * Math.max(...yMarks.map((mark) => yFormat(mark, yMarks).length));
  const bottom = height - 34;
  const sx = scale(x, [left, width - right]);
  const sy = scale([yMarks[0], yMarks[yMarks.length - 1]], [bottom, top]);
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const mark of yMarks) {
    svg.append(
      draw("line", { class: "grid-line", x1: left, x2: width - right, y1: sy(mark), y2: sy(mark) }),
      draw("text", { x: left - 6, y: sy(mark) + 4, "text-anchor": "end" }, yFormat(mark, yMarks)),
    );
  }
  const xMarks = ticks(x[0], x[1], Math.max(2, Math.floor((width - left) / 52)), whole);
  for (const mark of xMarks.filter((m) => m >= x[0] - 1e-9 && m <= x[1] + 1e-9)) {
    svg.append(
      draw("line", { class: "axis", x1: sx(mark), x2: sx(mark), y1: bottom, y2: bottom + 4 }),
      draw("text", { x: sx(mark), y: bottom + 16, "text-anchor": "middle" }, tickText(mark, xMarks)),
    );
  }
  svg.append(
    draw("line", { class: "axis", x1: left, x2: width - right, y1: bottom, y2: bottom }),
    draw("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, xName),
  );
  box.append(svg);
  return { svg, sx, sy, left, bottom, top, right: width - right };
}

// A tooltip of `box`, near (x, y); lines are [label, value] pairs under a title.
function tooltip(box) {
  const tip = make("div", { class: "tip" });
  box.append(tip);
  return {
    hide: () => (tip.style.visibility = "hidden"),
    show: (x, y, title, lines) => {
      tip.replaceChildren(make("b", {}, title));
      for (const [label, value] of lines) tip.append(make("div", {}, `${label} `, make("b", {}, value)));
      const left = Math.max(0, Math.min(x + 14, box.clientWidth - tip.offsetWidth));
      tip.style.transform = `translate(${left}px, ${Math.max(0, y - tip.offsetHeight - 10)}px)`;
      tip.style.visibility = "visible";
    },
  };
}

function runs(points) {
  // Stretches of one phase without a gap; a phase starts where the one before it ended.
  const out = [];
  let last = null;
  for (const point of points) {
    if (point.y === null) {
      last = null;
      continue;
    }
    if (last && last.phase === point.phase) out[out.length - 1].points.push(point);
    else out.push({ phase: point.phase, points: last ? [last, point] : [point], joined: last !== null });
    last = point;
  }
  return out;
}

const path = (points, sx, sy) =>
  points.map((p, i) => `${i ? "L" : "M"}${sx(p.x).toFixed(2)} ${sy(p.y).toFixed(2)}`).join("");

// Mean of the points around each, the same number on both sides: a trailing mean would lag.
function runningMean(points, window) {
  return points.map((point, i) => {
    const reach = Math.min(Math.floor(window / 2), i, points.length - 1 - i);
    const near = points.slice(i - reach, i + reach + 1);
    return { ...point, y: near.reduce((sum, p) => sum + p.y, 0) / near.length };
  });
}

function domain(chart) {
  if (chart.range) return chart.range;
  const values = chart.series.flatMap((s) => s.points.map((p) => p.y));
  const band = (chart.band || []).flatMap((p) => [p.low, p.high]);
  const finite = values.concat(band).filter((v) => v !== null);
  if (!finite.length) return [0, 1];
  let [low, high] = [Math.min(...finite), Math.max(...finite)];
  if (low > 0 && low < 0.6 * high) low = 0;
  if (low === high) [low, high] = low ? [low - Math.abs(low) / 2, low + Math.abs(low) / 2] : [0, 1];
  return [low, high];
}

const color = (index) => `var(--c${index % 8})`;
const swatch = (index) => make("i", { style: `background:${color(index)}` });
const lastOf = (series) => series.points.filter((p) => p.y !== null).at(-1);

// The last value of every series, by its color; a long name of a session is cut.
function valuesBySeries(chart) {
  const named = (s) => make("span", { title: s.label }, swatch(s.color), `${s.label.replace(/^([^:]{6})[^:]{2,}/, "$1…")} `,
    make("b", { "data-key": s.key }, lastOf(s) ? number(lastOf(s).y) : "–"));
  return make("div", { class: "legend" }, ...chart.series.map(named));
}

// With `time`, x are seconds and the points belong to no step. Series of equal standing have a `color`
// each, a number, and a legend; without one the first is the main one.
// chart: {id, title, unit, hero, time, range, series: [{key, label, color, points: [{x, y, phase, step}]}],
//         band: [{x, low, high, phase}], band_label}; phases: [{name, label, first, last}].
function lineChart(chart, phases) {
  const all = chart.series.flatMap((s) => s.points);
  const xs = [...new Set(all.map((p) => p.x))].sort((a, b) => a - b);
  const main = chart.series[0].points;
  const finite = main.filter((p) => p.y !== null);
  const last = finite[finite.length - 1];
  const window = !chart.hero && !chart.time && finite.length >= 24 ? Math.min(25, Math.round(finite.length / 10)) : 1;
  const box = plot(chart.hero ? 290 : 176, (box, width, height) => {
    // The main chart spans the whole run, also where nothing was evaluated yet.
    const ends = chart.hero ? phases.flatMap((p) => [p.first, p.last]) : xs;
    const x = ends.length > 1 ? [Math.min(...ends), Math.max(...ends)] : [xs[0] - 1, xs[0] + 1];
    const room = chart.hero ? { top: 26, right: width < 600 ? 44 : 108 } : {};
    const f = frame(box, width, height, { x, y: domain(chart), xName: chart.time ? "seconds" : "step", ...room });
    for (const phase of chart.time ? [] : phases) paintPhase(f, phase, x, chart.hero && phases.length > 1);
    if (chart.band) paintBand(f, chart.band);
    chart.series.forEach((series, index) => paintSeries(f, series, index, window, chart.hero));
    if (chart.hero) paintEnds(f, chart.series, width >= 600);
    hover(box, f, chart, xs, height);
  });
  const equals = chart.series.length > 1 && chart.series[0].color !== undefined;
  const value = !equals && last && make("span", { class: "last", "data-key": chart.series[0].key, "data-value": last.y },
    "last ", make("b", {}, number(last.y)), chart.unit ? ` ${chart.unit}` : "");
  return make("section", { class: "card chart", "data-chart": chart.id, "data-window": window },
    make("div", { class: "top" }, make("h3", {}, chart.title), value || (equals && chart.unit ? make("span", { class: "last" }, chart.unit) : null)), box,
    equals ? valuesBySeries(chart) : null);
}

function paintPhase(f, phase, x, labelled) {
  const from = Math.max(phase.first, x[0]);
  const to = Math.min(phase.last, x[1]);
  if (to < from || (to === from && x[0] !== x[1])) return;
  if (phase.name === "warm_start") {
    f.svg.append(draw("rect", {
      class: "tint", x: f.sx(from), y: f.top, width: f.sx(to) - f.sx(from), height: f.bottom - f.top,
    }));
  }
  if (labelled) {
    const middle = (f.sx(from) + f.sx(to)) / 2;
    f.svg.append(draw("text", { class: `phase ${phase.name}`, x: middle, y: 12, "text-anchor": "middle" }, phase.label));
  }
}

function paintBand(f, band) {
  for (const run of runs(band.map((p) => ({ ...p, y: p.low })))) {
    const there = path(run.points.map((p) => ({ x: p.x, y: p.high })), f.sx, f.sy);
    const back = path(run.points.map((p) => ({ x: p.x, y: p.low })).reverse(), f.sx, f.sy);
    f.svg.append(draw("path", { class: `band ${run.phase}`, d: `${there}L${back.slice(1)}Z` }));
  }
}

function paintSeries(f, series, index, window, dots) {
  const colored = series.color !== undefined;
  const second = (colored ? series.color >= 8 : index) ? " second" : "";
  const style = colored ? `stroke:${color(series.color)}` : null;
  for (const run of runs(series.points)) {
    const raw = draw("path", { class: `raw ${run.phase}${window > 1 ? " under" : ""}${second}`, style, "data-key": series.key, d: path(run.points, f.sx, f.sy) });
    // Points that belong to the run itself, without the one that joins it to the phase before.
    raw.setAttribute("data-points", run.points.length - (run.joined ? 1 : 0));
    f.svg.append(raw);
    if (window > 1) {
      const own = run.joined ? run.points.slice(1) : run.points;
      f.svg.append(draw("path", { class: `mean ${run.phase}${second}`, style, d: path(runningMean(own, window), f.sx, f.sy) }));
    }
    const alone = run.points.length === 1;
    for (const p of dots || alone ? run.points.slice(run.joined ? 1 : 0) : []) {
      f.svg.append(draw("circle", { class: run.phase, style, cx: f.sx(p.x), cy: f.sy(p.y), r: dots ? 3.2 : 2.2 }));
    }
  }
  for (const p of series.points.filter((p) => p.y === null)) {
    const [x, y] = [f.sx(p.x), f.bottom];
    f.svg.append(draw("path", { class: "missing", d: `M${x - 3.5} ${y}L${x + 3.5} ${y}L${x} ${y - 6}Z` }));
  }
}

// Labels at the right end of each series, pushed apart where they would touch.
function paintEnds(f, series, named) {
  const label = (s, p) => ({ ...p, text: named ? `${number(p.y)} ${s.label}` : number(p.y) });
  const ends = series.map((s) => [s, s.points.filter((p) => p.y !== null).at(-1)]).filter(([, p]) => p).map(([s, p]) => label(s, p));
  let floor = -Infinity;
  for (const p of ends.sort((a, b) => b.y - a.y)) {
    floor = Math.max(f.sy(p.y) + 4, floor + 13);
    f.svg.append(draw("text", { class: "end", x: f.sx(p.x) + 8, y: floor }, p.text));
  }
}

function hover(box, f, chart, xs, height) {
  const cross = draw("line", { class: "cross", y1: f.top, y2: f.bottom });
  f.svg.append(cross);
  const tip = tooltip(box);
  const leave = () => ((cross.style.visibility = "hidden"), tip.hide());
  box.onpointerleave = leave;
  box.onpointermove = (event) => {
    const at = event.clientX - box.getBoundingClientRect().left;
    const x = xs.reduce((best, v) => (Math.abs(f.sx(v) - at) < Math.abs(f.sx(best) - at) ? v : best));
    const shown = chart.series.map((s) => [s, s.points.find((p) => p.x === x)]).filter(([, p]) => p);
    const lines = shown.map(([s, p]) => [s.label, number(p.y)]);
    const band = (chart.band || []).find((p) => p.x === x);
    if (band) lines.push([chart.band_label, `${number(band.low)} to ${number(band.high)}`]);
    cross.setAttribute("x1", f.sx(x));
    cross.setAttribute("x2", f.sx(x));
    cross.style.visibility = "visible";
    const { step, phase } = shown[0][1];
    const title = chart.time ? `after ${number(x)} s` : `${phase.replace("_", " ")} step ${step}`;
    tip.show(f.sx(x), event.clientY - box.getBoundingClientRect().top, title, lines);
  };
}

// lengths: {width, sets: [{label, class, shares: [[from, share], ...]}]}
function histogram(data) {
  return plot(230, (box, width, height) => {
    const bins = data.sets.flatMap((set) => set.shares);
    const x = [Math.min(...bins.map((b) => b[0])), Math.max(...bins.map((b) => b[0])) + data.width];
    const top = Math.max(...bins.map((b) => b[1]));
    const percent = (value) => `${Number((100 * value).toFixed(2))}%`;
    const f = frame(box, width, height, { x, y: [0, top], xName: "response length, tokens", yFormat: percent });
    for (const set of data.sets) {
      let d = `M${f.sx(set.shares[0][0])} ${f.bottom}`;
      for (const [from, share] of set.shares) {
        d += `L${f.sx(from)} ${f.sy(share)}L${f.sx(from + data.width)} ${f.sy(share)}`;
      }
      d += `L${f.sx(set.shares.at(-1)[0] + data.width)} ${f.bottom}`;
      f.svg.append(draw("path", {
        class: "hist", d, stroke: `var(--${set.color})`, fill: `var(--${set.color})`, "fill-opacity": 0.16,
        "data-bins": set.shares.length,
      }));
    }
    const tip = tooltip(box);
    box.onpointerleave = tip.hide;
    box.onpointermove = (event) => {
      const at = event.clientX - box.getBoundingClientRect().left;
      const from = data.sets[0].shares.map((b) => b[0]).find((b) => at >= f.sx(b) && at < f.sx(b + data.width));
      if (from === undefined) return tip.hide();
      const lines = data.sets.map((set) => [set.label, percent(set.shares.find((b) => b[0] === from)[1])]);
      const name = data.width === 1 ? `${from} tokens` : `${from} to ${from + data.width - 1} tokens`;
      tip.show(at, event.clientY - box.getBoundingClientRect().top, name, lines);
    };
  });
}
