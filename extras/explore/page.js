"use strict";
// The page of `tessera explore`. It is a classic script that reads its data from other scripts, because a page that is
// opened from a file may neither use modules nor fetch().

const DATA = window.EXPLORE;
const SETS = ["training", "validation"];
const PALETTE = [
  "#3b6fb6", "#e08a1e", "#3a9a5b", "#c0504d", "#8a63b8", "#8c6d4f", "#d178b0", "#7a8288", "#b5a72c", "#2aa5b0",
  "#7fa6e0", "#f2bf7a", "#8fd0a0", "#eba09d", "#c3a9e2", "#c4ab92", "#f0b7d8", "#b4babf", "#dcd37a", "#88d3da",
];
const SCALE = ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];
const PAGE = { selection: 60, copies: 30 };  // entries of a list that are shown at once
const MOST_LABELS = 40;
const KEPT_PACKS = 64;  // packs of thumbnails that stay in memory

const $ = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const number = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : Number.isFinite(value) ? String(+value.toPrecision(4)) : String(value));
const count = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;

function decode(text, Type) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return new Type(bytes.buffer);
}

const keys = DATA.keys;
const N = keys.length;
const x = decode(DATA.x, Float32Array);
const y = decode(DATA.y, Float32Array);
const slots = decode(DATA.slots, Uint32Array);
const sets = decode(DATA.sets, Uint8Array);
const scores = Object.fromEntries(Object.entries(DATA.scores).map(([name, text]) => [name, decode(text, Float32Array)]));
const pairs = { i: decode(DATA.pairs.i, Uint32Array), j: decode(DATA.pairs.j, Uint32Array), kind: decode(DATA.pairs.kind, Uint8Array), similarity: decode(DATA.pairs.similarity, Float32Array), margin: decode(DATA.pairs.margin, Float32Array) };
const flags = Object.fromEntries(Object.entries(DATA.flags).map(([name, text]) => {
  const has = new Uint8Array(N);
  for (const i of decode(text, Uint32Array)) has[i] = 1;
  return [name, has];
}));
const flagged = new Uint8Array(N);
for (const has of Object.values(flags)) for (let i = 0; i < N; i++) flagged[i] |= has[i];

// Colourings: groups of images with names, or a score.

function grouping(of, names, missing) {
  const groups = Int32Array.from(of, (group) => (group < 0 ? names.length : group));
  const counts = new Uint32Array(names.length + 1);
  for (const group of groups) counts[group]++;
  return { groups, counts, names: [...names, missing] };
}
const colourings = {};
if (DATA.class_names.length) colourings.class = grouping(decode(DATA.labels, Int32Array), DATA.class_names, "no class");
if (DATA.medoids.length) colourings.cluster = { ...grouping(decode(DATA.cluster, Int32Array), DATA.medoids.map((_, c) => `cluster ${c}`), "no cluster"), medoids: DATA.medoids };
colourings.set = grouping(sets, SETS, "");
for (const [name, values] of Object.entries(scores)) {
  const finite = Float32Array.from(values).filter(Number.isFinite).sort();
  const at = (share) => finite[Math.round(share * (finite.length - 1))] ?? 0;
  // The ends are quantiles, so that a few extreme images do not take all colours.
  colourings[name] = { values, low: at(0.01), high: at(0.99), missing: N - finite.length };
}
const state = { colour: Object.keys(colourings)[0], only: new Set(), shown: Array.from(keys.keys()), selected: new Set(), image: -1, pages: { selection: 0, copies: 0 } };

// Thumbnails come in packs. A pack is a script that hands its pictures to `thumbnails_loaded`.

const packs = new Map();
window.thumbnails_loaded = (pack, pictures) => packs.get(pack).done(pictures);
function thumbnail(i, image) {
  const pack = Math.floor(slots[i] / DATA.pack);
  image.dataset.image = i;
  let entry = packs.get(pack);
  if (!entry) {
    entry = {};
    entry.pictures = new Promise((resolve) => { entry.done = resolve; });
    const script = make("script", { src: `page/thumbnails/${pack}.js`, onload: () => script.remove(), onerror: () => { script.remove(); entry.done([]); } });
    document.head.append(script);
  }
  packs.delete(pack);  // the order of the map is the order of use
  packs.set(pack, entry);
  if (packs.size > KEPT_PACKS) packs.delete(packs.keys().next().value);
  entry.pictures.then((pictures) => {
    if (+image.dataset.image !== i) return;  // the element shows another image by now
    const picture = pictures[slots[i] % DATA.pack];
    if (picture) image.src = `data:image/jpeg;base64,${picture}`;
    else image.removeAttribute("src");
  });
  return image;
}

function facts(i) {
  const found = [["key", keys[i]], ["set", SETS[sets[i]]]];
  for (const name of ["class", "cluster"]) if (colourings[name]) found.push([name, colourings[name].names[colourings[name].groups[i]]]);
  const has = Object.keys(flags).filter((name) => flags[name][i]);
  if (has.length) found.push(["flags", has.map(words).join(", ")]);
  for (const [name, values] of Object.entries(scores)) found.push([words(name), number(values[i])]);
  return found;
}
const words = (name) => name.replaceAll("_", " ");
const list = (entries) => entries.flatMap(([name, text]) => [make("dt", { textContent: name }), make("dd", { textContent: text })]);

function look(i) {
  state.image = i;
  thumbnail(i, $("image").querySelector("img")).alt = keys[i];
  $("image-facts").replaceChildren(...list(facts(i)));
}

function tile(i) {
  const button = make("button", { className: "thumbnail", title: `${keys[i]}\nClick to select it or take it out.` }, thumbnail(i, make("img", { alt: keys[i] })));
  button.dataset.of = i;
  button.setAttribute("aria-pressed", state.selected.has(i));
  button.onclick = () => toggle(i);
  button.onfocus = button.onmouseenter = () => { look(i); plot?.hover(i); };
  return button;
}

// The drawing of the map.

const dark = matchMedia("(prefers-color-scheme: dark)");
const canvas = $("canvas");
let view = null;
let fitted = false;
let plot = null;
const size = N < 3000 ? 7 : N < 30000 ? 5 : 3;

function start() {
  // Without a canvas of ours the library would size its renderer by the window, which has no size in a hidden frame.
  let renderer;
  try {
    renderer = reglScatterplot.createRenderer({ canvas: make("canvas", {}) });
    plot = reglScatterplot.default({
      renderer, canvas, colorBy: "valueA", sizeBy: "valueB", pointSize: [size, 1.8 * size], opacity: N < 30000 ? 0.8 : 0.6, pointSizeSelected: 2,
      pointOutlineWidth: 2, deselectOnDblClick: false, deselectOnEscape: false, actionKeyMap: { lasso: "shift" },
      backgroundColor: background(), lassoColor: "#3b6fb6",
    });
    if (!plot.isSupported) throw new Error("float textures are missing");
  } catch {
    plot = null;
    $("no-webgl").hidden = false;
    return;
  }
  plot.subscribe("pointover", (i) => { look(i); tip(i); });
  plot.subscribe("pointout", () => tip(-1));
  plot.subscribe("draw", (event) => {
    if (view && event.view.every((value, k) => value === view[k])) return;
    view = Float32Array.from(event.view);
    label();
  });
  plot.subscribe("lassoEnd", ({ coordinates }) => pick(inside(coordinates)));
  let down = null;
  canvas.addEventListener("pointerdown", (event) => { down = [event.clientX, event.clientY]; });
  // The library replaces its own selection at a click. The selection of the page is put in its place.
  canvas.addEventListener("click", (event) => {
    if (Math.hypot(event.clientX - down[0], event.clientY - down[1]) < 3 && !$("tip").hidden) toggle(state.image);
    else mark();
  });
  dark.addEventListener("change", () => { plot.set({ backgroundColor: background() }); draw(); });
  const resize = () => {
    // A hidden map has no size. Drawing it needs some pixels, also where the browser zooms out.
    const width = Math.max(10, $("map").clientWidth), height = Math.max(10, $("map").clientHeight);
    renderer.resize(width, height);
    plot.set({ width, height });
    if (!fitted) fit();
    label();
  };
  new ResizeObserver(resize).observe($("map"));
  resize();
}
const background = () => (dark.matches ? "#17181a" : "#ffffff");

// Calls of the library wait for each other, because it refuses a drawing during another one.
let drawing = Promise.resolve();
function then(action) {
  if (plot) drawing = drawing.then(action);
}
function draw() {
  const { groups, names, values, low, high } = colourings[state.colour];
  const colours = groups ? names.map((_, group) => paint(group)) : SCALE;
  const z = groups ?? values.map((value) => Math.min(1, Math.max(0, (value - low) / (high - low || 1))) || 0);
  const ink = dark.matches ? "#ffffff" : "#000000";
  then(async () => {
    plot.set({ pointColor: colours, pointColorActive: ink, pointColorHover: ink });
    await plot.draw({ x, y, z, w: flagged }, { zDataType: groups ? "categorical" : "continuous", wDataType: "categorical", spatialIndex: plot.get("spatialIndex") ?? undefined });
  });
  hide();
}
function hide() {
  then(() => (state.shown.length < N ? plot.filter(state.shown, { preventEvent: true }) : plot.unfilter({ preventEvent: true })));
  mark();
}
function mark() {
  then(() => plot.select(state.shown.filter((i) => state.selected.has(i)), { preventEvent: true }));
}
const paint = (group) => (group === colourings[state.colour].names.length - 1 && state.colour !== "set" ? "#9a9da1" : PALETTE[group % PALETTE.length]);

const aspect = () => canvas.clientWidth / canvas.clientHeight;
function screen(a, b) {
  const right = (view[0] * a + view[4] * b + view[12]) / aspect();
  const up = view[1] * a + view[5] * b + view[13];
  return [((right + 1) / 2) * canvas.clientWidth, ((1 - up) / 2) * canvas.clientHeight];
}
function look_at(scale, right, up) {
  plot?.set({ cameraView: new Float32Array([scale, 0, 0, 0, 0, scale, 0, 0, 0, 0, 1, 0, right, up, 0, 1]) });
}
function fit() {
  fitted = $("map").clientWidth > 0 && $("map").clientHeight > 0; // a hidden map is fitted when it is shown
  if (fitted) look_at(0.92 * Math.min(1, aspect()), 0, 0);
}
// `view` is that of the last frame. Two keys can come within one frame, so the camera itself is moved.
function zoom(by) {
  const camera = plot?.get("cameraView");
  if (camera) look_at(camera[0] * by, camera[12] * by, camera[13] * by);
}
function move(right, up) {
  const camera = plot?.get("cameraView");
  if (camera) look_at(camera[0], camera[12] + right, camera[13] + up);
}
function in_view() {
  if (!view) return [];
  return state.shown.filter((i) => {
    const [left, top] = screen(x[i], y[i]);
    return left >= 0 && left <= canvas.clientWidth && top >= 0 && top <= canvas.clientHeight;
  });
}

function inside(polygon) {
  return state.shown.filter((i) => {
    let odd = false;
    for (let a = 0, b = polygon.length - 1; a < polygon.length; b = a++) {
      const [ax, ay] = polygon[a];
      const [bx, by] = polygon[b];
      if (ay > y[i] !== by > y[i] && x[i] < ((bx - ax) * (y[i] - ay)) / (by - ay) + ax) odd = !odd;
    }
    return odd;
  });
}

function tip(i) {
  const box = $("tip");
  box.hidden = i < 0;
  if (i < 0 || !view) return;
  thumbnail(i, box.querySelector("img"));
  box.lastElementChild.replaceChildren(...facts(i).slice(0, 5).flatMap(([name, text]) => [name === "key" ? text : `${name}: ${text}`, make("br")]));
  const [left, top] = screen(x[i], y[i]);
  box.style.left = `${left > canvas.clientWidth / 2 ? left - box.offsetWidth - 14 : left + 14}px`;
  box.style.top = `${Math.min(Math.max(0, top - 40), Math.max(0, canvas.clientHeight - box.offsetHeight))}px`;
}

// Names of groups stand on the map where a group is densest. A name that would cover a larger group's is left out.

let anchors = [];
function anchor() {
  const { groups, names } = colourings[state.colour];
  anchors = [];
  if (!groups) return;
  const cells = new Map();
  const counts = new Uint32Array(names.length);
  for (const i of state.shown) {
    counts[groups[i]]++;
    const cell = groups[i] * 1024 + Math.min(31, Math.floor((x[i] + 1) * 16)) * 32 + Math.min(31, Math.floor((y[i] + 1) * 16));
    const sums = cells.get(cell) ?? [0, 0, 0];
    cells.set(cell, [sums[0] + 1, sums[1] + x[i], sums[2] + y[i]]);
  }
  const best = new Map();
  for (const [cell, sums] of cells) {
    const group = cell >> 10;
    if (sums[0] > (best.get(group)?.[0] ?? 0)) best.set(group, sums);
  }
  anchors = [...best].map(([group, [n, sx, sy]]) => ({ name: names[group], count: counts[group], x: sx / n, y: sy / n }));
  anchors.sort((a, b) => b.count - a.count);
  anchors.length = Math.min(anchors.length, MOST_LABELS);
}
function label() {
  if (!view) return;
  const taken = [];
  $("labels").replaceChildren(...anchors.flatMap(({ name, x: a, y: b }) => {
    const [left, top] = screen(a, b);
    const half = name.length * 3.6 + 5;
    if (taken.some(([l, t, h]) => Math.abs(l - left) < h + half && Math.abs(t - top) < 18)) return [];
    taken.push([left, top, half]);
    const element = make("div", { textContent: name });
    element.style.left = `${left}px`;
    element.style.top = `${top}px`;
    return [element];
  }));
}

// Filters.

function filter() {
  choose();
  hide();
}
function choose() {
  const { groups, values } = colourings[state.colour];
  const wanted = checked("flags").map((name) => flags[name]);
  const allowed = checked("sets").map(Number);
  const text = $("search").value.toLowerCase();
  const low = $("low").value === "" ? -Infinity : +$("low").value;
  const high = $("high").value === "" ? Infinity : +$("high").value;
  state.shown = [];
  for (let i = 0; i < N; i++) {
    if (!allowed.includes(sets[i])) continue;
    if (wanted.length && !wanted.some((has) => has[i])) continue;
    if (groups && state.only.size && !state.only.has(groups[i])) continue;
    if (values && !(values[i] >= low && values[i] <= high) && (low > -Infinity || high < Infinity)) continue;
    if (text && !keys[i].toLowerCase().includes(text)) continue;
    if ($("only-selected").checked && !state.selected.has(i)) continue;
    state.shown.push(i);
  }
  $("shown").textContent = `${number(state.shown.length)} of ${count(N, "image")} shown`;
  anchor();
  label();
}
const checked = (id) => [...$(id).querySelectorAll("input:checked")].map((box) => box.value);

function recolour() {
  state.colour = $("colour").value;
  state.only.clear();
  const { groups, counts, names, medoids, values, low, high, missing } = colourings[state.colour];
  $("range").hidden = Boolean(groups);
  $("low").value = $("high").value = "";
  if (groups) {
    $("legend").replaceChildren(...names.flatMap((name, group) => {
      if (!counts[group]) return [];
      const button = make("button", { title: `Show only ${name}` }, Object.assign(make("i"), { style: `background: ${paint(group)}` }));
      if (medoids && group < medoids.length) button.append(thumbnail(medoids[group], make("img", { alt: "" })));
      button.append(make("span", { textContent: name }), make("b", { textContent: number(counts[group]) }));
      button.setAttribute("aria-pressed", "false");
      button.onclick = () => {
        if (!state.only.delete(group)) state.only.add(group);
        button.setAttribute("aria-pressed", state.only.has(group));
        filter();
      };
      return [button];
    }));
  } else {
    $("legend").replaceChildren(
      Object.assign(make("div", { className: "bar" }), { style: `background: linear-gradient(to right, ${SCALE.join()})` }),
      make("div", { className: "ends" }, make("span", { textContent: `≤ ${number(low)}` }), make("span", { textContent: `≥ ${number(high)}`, style: "text-align: right" })),
      ...(missing ? [make("p", { textContent: `${count(missing, "image")} without a value, in the first colour` })] : []),
    );
  }
  choose();
  draw();
}

// The selection.

function pick(images) {
  const mode = $("mode").value;
  if (mode === "new") state.selected = new Set(images);
  else for (const i of images) mode === "add" ? state.selected.add(i) : state.selected.delete(i);
  selection();
}
function toggle(i) {
  if (!state.selected.delete(i)) state.selected.add(i);
  selection();
}
function selection() {
  const chosen = [...state.selected].sort((a, b) => slots[a] - slots[b]);  // neighbours on the map stand together
  const of = SETS.map((_, set) => chosen.reduce((sum, i) => sum + (sets[i] === set), 0));
  $("selected").textContent = `${count(chosen.length, "image")} selected: ${number(of[0])} of training, ${number(of[1])} of validation`;
  ["write-data", "write-val"].forEach((id, set) => { $(id).disabled = !of[set]; });
  $("clear").disabled = !chosen.length;
  paged("selection", chosen.length, (from, to) => $("selection").replaceChildren(...chosen.slice(from, to).map(tile)), selection);
  for (const button of $("copies").querySelectorAll(".thumbnail")) button.setAttribute("aria-pressed", state.selected.has(+button.dataset.of));
  if ($("only-selected").checked) filter();
  else mark();
}

function paged(name, total, show, again) {
  const last = Math.max(0, Math.ceil(total / PAGE[name]) - 1);
  state.pages[name] = Math.min(state.pages[name], last);
  const from = state.pages[name] * PAGE[name];
  const focused = document.activeElement?.dataset?.step;
  show(from, Math.min(total, from + PAGE[name]));
  const turn = (step, text) => {
    const button = make("button", { textContent: text, disabled: state.pages[name] + step < 0 || state.pages[name] + step > last, onclick: () => { state.pages[name] += step; again(); } });
    button.dataset.step = name + step;
    return button;
  };
  $(`${name}-pages`).replaceChildren(...(last ? [turn(-1, "Previous"), `${number(from + 1)} to ${number(Math.min(total, from + PAGE[name]))} of ${number(total)}`, turn(1, "Next")] : []));
  if (focused) document.querySelector(`[data-step="${focused}"]`)?.focus();
}

function csv(images) {
  const quoted = (key) => (/[",\r\n]/.test(key) ? `"${key.replaceAll('"', '""')}"` : key);
  return ["key", ...images.map((i) => quoted(keys[i]))].join("\n") + "\n";
}
function write(set) {
  const images = [...state.selected].filter((i) => sets[i] === set).sort((a, b) => a - b);
  const url = URL.createObjectURL(new Blob([csv(images)], { type: "text/csv" }));
  make("a", { href: url, download: `exclude-${SETS[set]}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// Copies.

function listed() {
  const kind = $("kind").value;
  const least = $("margin").value === "" ? -Infinity : +$("margin").value;
  const found = [];
  for (let p = 0; p < pairs.i.length; p++) if ((kind === "all" || pairs.kind[p] === +kind) && pairs.margin[p] >= least) found.push(p);
  return found;  // the file has the pair of the largest margin first
}
function copies() {
  const found = listed();
  $("copies-count").textContent = `${count(found.length, "pair")}, the largest margin first`;
  $("select-copies").disabled = !found.length;
  paged("copies", found.length, (from, to) => $("copies").replaceChildren(...found.slice(from, to).map((p) => make("li", {},
    make("p", { textContent: `margin ${pairs.margin[p].toFixed(3)} · similarity ${pairs.similarity[p].toFixed(3)}` }),
    ...[pairs.i[p], pairs.j[p]].map((i) => make("figure", {}, tile(i), make("figcaption", { textContent: [SETS[sets[i]], colourings.class?.names[colourings.class.groups[i]], keys[i]].filter(Boolean).join(" · ") })))))), copies);
}
function copies_but_one() {
  const parent = new Map();
  const root = (i) => { while (parent.get(i) !== i) { parent.set(i, parent.get(parent.get(i))); i = parent.get(i); } return i; };
  const first = (a, b) => sets[a] - sets[b] || b - a;  // > 0: a stays rather than b
  for (const p of listed()) {
    for (const i of [pairs.i[p], pairs.j[p]]) if (!parent.has(i)) parent.set(i, i);
    const [a, b] = [root(pairs.i[p]), root(pairs.j[p])];
    if (a !== b) first(a, b) > 0 ? parent.set(b, a) : parent.set(a, b);
  }
  for (const i of parent.keys()) if (root(i) !== i) state.selected.add(i);
  selection();
}

// The parts of the page, and the keys.

function switch_lasso() {
  const on = $("lasso").getAttribute("aria-pressed") !== "true";
  $("lasso").setAttribute("aria-pressed", on);
  plot?.set({ mouseMode: on ? "lasso" : "panZoom" });
}
function step(by) {
  const near = in_view();
  if (!near.length) return;
  near.sort((a, b) => slots[a] - slots[b]);
  const at = near.indexOf(state.image);
  const next = near[(at < 0 ? (by > 0 ? 0 : near.length - 1) : at + by + near.length) % near.length];
  plot.hover(next, { preventEvent: true });
  look(next);
  tip(next);
}
const KEYS = {
  ArrowLeft: () => move(0.1, 0), ArrowRight: () => move(-0.1, 0), ArrowUp: () => move(0, -0.1), ArrowDown: () => move(0, 0.1),
  "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), 0: fit, n: () => step(1), p: () => step(-1), l: switch_lasso,
  v: () => pick(in_view()), Enter: () => state.image >= 0 && toggle(state.image), Escape: () => { state.selected.clear(); selection(); },
};

function build() {
  document.title = $("summary").previousElementSibling.textContent = DATA.title;
  const validation = sets.reduce((sum, set) => sum + set, 0);
  $("summary").textContent = `${count(N - validation, "image")} of training, ${number(validation)} of validation, ${count(pairs.i.length, "pair")} of copies`;
  $("notes").hidden = !DATA.notes.length;
  $("notes").querySelector("dl").append(...list(DATA.notes.map(([name, value]) => [name, typeof value === "number" ? number(value) : String(value)])));
  $("colour").append(...Object.keys(colourings).map((name) => make("option", { value: name, textContent: words(name) })));
  for (const [name, has] of Object.entries(flags)) $("flags").append(box(name, `${words(name)} (${number(has.reduce((sum, one) => sum + one, 0))})`, false));
  SETS.forEach((name, set) => $("sets").append(box(set, `${name} (${number([N - validation, validation][set])})`, true)));
  $("sets").hidden = !validation;
  $("write-val").hidden = !validation;
  $("kind").append(...[["all", "all copies"], [0, "within training"], [1, "training and validation"], [2, "within validation"]].map(([value, textContent]) => make("option", { value, textContent })));
  $("colour").onchange = recolour;
  for (const id of ["search", "low", "high", "only-selected"]) $(id).oninput = filter;
  $("reset").onclick = () => {
    for (const input of $("flags").querySelectorAll("input")) input.checked = false;
    for (const input of $("sets").querySelectorAll("input")) input.checked = true;
    $("only-selected").checked = false;
    $("search").value = "";
    recolour();
  };
  $("kind").onchange = $("margin").oninput = () => { state.pages.copies = 0; copies(); };
  $("select-copies").onclick = copies_but_one;
  $("write-data").onclick = () => write(0);
  $("write-val").onclick = () => write(1);
  $("select-shown").onclick = () => pick(state.shown);
  $("clear").onclick = KEYS.Escape;
  $("lasso").onclick = switch_lasso;
  $("in").onclick = KEYS["+"];
  $("out").onclick = KEYS["-"];
  $("all").onclick = fit;
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  canvas.addEventListener("blur", () => tip(-1));
  start();
  recolour();
  selection();
  copies();
  if (N) look(state.shown[0]);
}
function box(value, text, on) {
  return make("label", {}, make("input", { type: "checkbox", value, checked: on, oninput: filter }), ` ${text}`);
}
build();
