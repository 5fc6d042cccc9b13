// The samples of a run to search, and one of them token by token. The server finds them.
const PAGE = 50;
const viewer = { list: null, form: null, lead: null, note: null, more: null, next: null, asked: 0, extended: false, skipped: new Set() };

const field = (label, ...inputs) => make("label", {}, make("span", {}, label), ...inputs);
const bound = (name, label, step) => make("input", { type: "number", name, step, "aria-label": label, placeholder: label.split(" ")[0] });
const option = (value, text) => make("option", { value }, text);

function sampleViewer() {
  let waiting = 0;
  const searchAfter = (ms) => {
    viewer.list.ariaBusy = "true";
    viewer.asked++; // a reply to come is out of date
    clearTimeout(waiting);
    waiting = setTimeout(search, ms);
  };
  viewer.list = make("div", { class: "rows", id: "samples" });
  viewer.lead = make("p", { class: "lead" });
  viewer.note = make("p", { class: "soft", id: "note", role: "status" });
  viewer.more = make("button", { type: "button", id: "more", hidden: "", onclick: () => ((viewer.extended = true), search(viewer.next)) }, "Earlier samples");
  viewer.form = make("form", { class: "filters card", id: "filters", onsubmit: (event) => (event.preventDefault(), search()), onreset: () => searchAfter(0), oninput: () => searchAfter(250) },
    field("Text", make("input", { type: "search", name: "text", placeholder: "in prompt or response" })),
    field("Step", make("input", { type: "number", name: "step", min: 0, placeholder: "all" })),
    field("Reward", bound("min_reward", "least reward", "any"), bound("max_reward", "most reward", "any")),
    field("Tokens", bound("min_tokens", "least tokens", 1), bound("max_tokens", "most tokens", 1)),
    field("Kind", make("select", { name: "kind" }, option("", "all"))),
    field("Phase", make("select", { name: "phase" }, option("", "all"), option("rl", "rl"), option("warm_start", "warm start"), option("evaluation", "evaluation"))),
    field("Status", make("select", { name: "status" }, option("", "all"), option("used", "used"), option("dropped", "dropped"), option("cut", "cut off"))),
    make("button", { type: "reset" }, "Clear"));
  section("Samples", "", viewer.lead, viewer.form, viewer.list, viewer.note, viewer.more);
  refreshSamples();
}

// New data has come: more kinds of samples, and newer ones, which an untouched list takes up.
function refreshSamples() {
  viewer.lead.textContent = data.live.every_sample
    ? "Every sample of every step, newest first. Choose one to see its tokens."
    : "The first samples of each step, and evaluations, newest first. telemetry.samples=all keeps every sample, with its tokens.";
  const kinds = viewer.form.elements.kind;
  const known = new Set([...kinds.options].map((o) => o.value));
  kinds.append(...data.live.mixture.filter((kind) => !known.has(kind)).map((kind) => option(kind, kind.replace("/", " "))));
  kinds.parentElement.hidden = kinds.options.length < 2;
  const untouched = !viewer.extended && !viewer.list.querySelector(".opened");
  if (untouched) search();
}

// Lists `missing` more samples from a position, or anew. The server answers after two seconds of search with what it has.
async function search(from = null, missing = PAGE) {
  const mine = ++viewer.asked;
  viewer.list.ariaBusy = "true";
  const params = new URLSearchParams([...new FormData(viewer.form)].filter(([, value]) => value !== ""));
  if (from) {
    params.set("from_step", from.step);
    params.set("skip", from.skip);
  }
  let answer, text;
  try {
    answer = await fetch(`samples?${params}`);
    text = await answer.text();
  } catch {
    return; // the page says that the server is gone
  }
  if (mine !== viewer.asked) return;
  const { rows, more, skipped } = answer.ok ? JSON.parse(text) : { rows: [], more: null, skipped: [] };
  if (!from) [viewer.extended, viewer.list.textContent, viewer.skipped] = [false, "", new Set()];
  skipped.forEach((name) => viewer.skipped.add(name));
  viewer.list.append(...rows.map(sampleRow));
  viewer.next = more;
  const left = more ? missing - rows.length : 0;
  viewer.more.hidden = !more || left > 0;
  const listed = viewer.list.children.length;
  const note = !answer.ok ? text : left > 0 ? `Searching before step ${more.step + 1} ...` : listed ? "" : "None.";
  viewer.note.textContent = [note, unread()].filter(Boolean).join(" ");
  viewer.list.ariaBusy = String(left > 0);
  if (left > 0) await search(more, left);
}

// The files whose samples are missing from the list.
function unread() {
  const [first, ...others] = viewer.skipped;
  return first ? `Cannot be read: ${first}${others.length ? ` and ${others.length} more` : ""}.` : "";
}

function rewardPill(sample) {
  const reward = sample.reward === null || sample.reward === undefined ? null : Number(sample.reward);
  const text = reward === null ? "no reward" : Number.isFinite(reward) ? number(reward) : String(sample.reward);
  return make("span", { class: `pill ${reward === null ? "" : reward > 0 ? "good" : "bad"}` }, text);
}

function sampleRow(sample) {
  const excerpt = String(sample.response || "").replace(/\s+/g, " ");
  const about = sample.set ? `${sample.phase} ${sample.set}` : sample.phase === "rl" ? "" : sample.phase;
  const marks = [sample.status === "dropped" ? "dropped" : "", sample.finish === "length" ? "cut off" : ""].filter(Boolean);
  const head = make("button", { type: "button", class: "row", "aria-expanded": "false", onclick: () => toggle(article, head, sample) },
    rewardPill(sample),
    make("span", { class: "soft" }, `step ${sample.step}`),
    make("span", { class: "soft" }, `${sample.id}${about ? ` ${about.replace("_", " ")}` : ""}`),
    make("span", { class: "soft" }, sample.response_tokens === null || sample.response_tokens === undefined ? "" : `${sample.response_tokens} tokens`),
    make("span", { class: "excerpt" }, ...marks.map((mark) => make("span", { class: "mark" }, mark)), excerpt));
  const article = make("article", { class: "card", "data-key": sample.key, "data-step": sample.at }, head);
  return article;
}

async function toggle(article, head, sample) {
  const open = article.classList.toggle("opened");
  head.setAttribute("aria-expanded", String(open));
  article.querySelector(".detail")?.remove();
  if (!open) return;
  const answer = await fetch(`sample?${new URLSearchParams({ step: sample.at, key: sample.key })}`);
  if (!article.classList.contains("opened") || article.querySelector(".detail")) return;
  article.append(answer.ok ? sampleDetail(await answer.json()) : make("p", { class: "detail soft" }, await answer.text()));
}

function sampleDetail(sample) {
  const facts = Object.entries({
    source: sample.source, task: sample.task, phase: sample.phase, "prompt tokens": sample.prompt_tokens, "response tokens": sample.response_tokens,
    finish: sample.finish, status: sample.status, dropped: sample.drop_text || sample.drop_reason, advantage: sample.advantage,
    ...Object.fromEntries((sample.scalars || []).map((s) => [s.name, s.text ?? s.value])),
  }).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const shown = (value) => (typeof value === "number" && !Number.isInteger(value) ? number(value) : String(value));
  return make("div", { class: "detail" },
    make("div", { class: "facts" }, ...facts.map(([name, value]) => make("span", {}, `${name.replaceAll("_", " ")} `, make("b", {}, shown(value))))),
    make("h3", {}, "prompt"), make("pre", { class: "prompt" }, sample.prompt ?? ""),
    make("h3", {}, "response"),
    ...(sample.tokens ? tokenView(sample) : [responseText(sample)]));
}

// The least and the largest; no spread, whose arguments a long response has too many of.
const bounds = (values) => values.reduce(([least, most], v) => [Math.min(least, v), Math.max(most, v)], [Infinity, -Infinity]);

// Values of every token by name, and how each of them is colored.
function colorings(sample) {
  const spanOf = sample.tokens.map((_, i) => (sample.spans || []).find((span) => span.start <= i && i < span.stop));
  const numbers = (values) => values.map((value) => (value === null ? null : Number(value)));
  const mix = (color, share) => `color-mix(in srgb, var(--${color}) ${Math.round(100 * share)}%, transparent)`;
  const scaled = (values, least, most, color) => values.map((v) => (v === null ? "" : mix(color, 0.75 * Math.max(0, Math.min(1, (v - least) / (most - least || 1))))));
  const likely = (values) => ({ values, colors: scaled(values.map((v) => (v === null ? null : -v)), 0, 5, "bad"), legend: gradient("0 nats", "−5 or less", mix("bad", 0), mix("bad", 0.75)) });
  const out = {};
  for (const [name, raw] of Object.entries(sample.values)) {
    if (name === "advantages" || name === "trained") continue; // `mask` shows what is trained
    const values = numbers(raw);
    const title = name === "log_probs" ? "log-probability" : name.replaceAll("_", " ");
    if (name.endsWith("log_probs")) {
      out[title] = likely(values);
      continue;
    }
    const [least, most] = bounds(values.filter(Number.isFinite));
    out[title] = { values, colors: scaled(values, least, most, "rl"), legend: gradient(number(least), number(most), mix("rl", 0), mix("rl", 0.75)) };
  }
  const whole = sample.advantage === null || sample.advantage === undefined ? null : Number(sample.advantage);
  const advantages = sample.values.advantages ? numbers(sample.values.advantages) : whole === null ? null : sample.tokens.map(() => whole);
  if (advantages) {
    const top = bounds(advantages.map(Math.abs))[1] || 1;
    const least = sample.values.advantages ? 0 : 0.3; // one advantage for all: its sign is what there is to see
    out.advantage = {
      values: advantages,
      colors: advantages.map((v) => (v ? mix(v > 0 ? "good" : "bad", Math.max(least, 0.7 * Math.abs(v) / top)) : "")),
      legend: gradient(number(-top), number(top), mix("bad", 0.7), "transparent", mix("good", 0.7)),
    };
  }
  const trained = spanOf.map((span) => (span ? span.trained : null));
  out.mask = { values: trained.map((t) => (t === null ? null : t ? "trained" : "not trained")), colors: trained.map((t) => (t === null ? "" : t ? mix("good", 0.3) : "var(--idle)")), legend: swatches([["trained", mix("good", 0.3)], ["not trained", "var(--idle)"]]) };
  const versions = spanOf.map((span) => (span ? span.version : null));
  const distinct = [...new Set(versions.filter((v) => v !== null))].sort((a, b) => a - b);
  const versionName = (v) => (v === null ? null : v < 0 ? "no policy" : `version ${v}`);
  const versionColor = (v) => mix(`c${distinct.indexOf(v) % 8}`, 0.4);
  out["policy version"] = { values: versions.map(versionName), colors: versions.map((v) => (v === null ? "" : versionColor(v))), legend: swatches(distinct.map((v) => [versionName(v), versionColor(v)])) };
  return out;
}

const swatches = (pairs) => make("span", { class: "legend" }, ...pairs.map(([text, color]) => make("span", {}, make("i", { style: `background:${color}` }), text)));
const gradient = (from, to, ...colors) => make("span", { class: "legend" }, from, make("span", { class: "scale", style: `background:linear-gradient(90deg, ${colors.join(", ")})` }), to);

let coloredBy = "log-probability"; // as the reader has last chosen, in any sample

function tokenView(sample) {
  const kinds = colorings(sample);
  const names = Object.keys(kinds);
  const { trained, turn } = sample.values;
  const isReply = (i) => Boolean(turn) && !Number(trained[i]);
  const spans = sample.tokens.map((text, i) => make("span", { "data-token": i, class: isReply(i) ? "reply" : "" }, text));
  const endsTurn = (i) => !isReply(i) && (i + 1 === spans.length || isReply(i + 1) || turn[i + 1] !== turn[i]);
  const earned = (i) => (sample.turn_rewards && turn && endsTurn(i) ? [turnReward(sample.turn_rewards[turn[i]])] : []);
  const text = make("pre", { class: "response tokens" }, ...spans.flatMap((span, i) => [span, ...earned(i)]));
  const legend = make("span");
  const holder = make("div", { class: "plot" }, text);
  const tip = tooltip(holder);
  const choose = (i) => {
    const kind = kinds[names[i]];
    text.dataset.coloring = names[i];
    legend.replaceChildren(kind.legend);
    spans.forEach((span, j) => (span.style.background = kind.colors[j]));
  };
  text.onpointerleave = tip.hide;
  text.onpointermove = (event) => {
    const i = event.target.dataset.token;
    if (i === undefined) return tip.hide();
    const at = holder.getBoundingClientRect();
    const shown = (value) => (typeof value === "number" ? number(value) : value);
    const lines = names.filter((name) => kinds[name].values[i] !== null).map((name) => [name, shown(kinds[name].values[i])]);
    tip.show(event.clientX - at.left, event.clientY - at.top, `${i}: ${JSON.stringify(sample.tokens[i])}`, lines);
  };
  const start = Math.max(0, names.indexOf(coloredBy));
  return [make("div", { class: "bar" }, choices(names, start, choose, (i) => (coloredBy = names[i])), legend), holder];
}
