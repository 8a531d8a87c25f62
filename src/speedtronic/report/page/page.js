"use strict";
// Draws the report from its data. All text enters the page as text, never as HTML.
(() => {
  const find = (id) => document.getElementById(id);
  const AXES = {
    step: ["Step", (value) => short(value)],
    tokens: ["Tokens", (value) => short(value)],
    seconds: ["Time", (value) => clock(value)],
  };
  const COLOURS = 8;
  // Pixels left of a wide chart, so that the events lie below the steps of the loss.
  const margin = () => (innerWidth > 600 ? 118 : 54);

  let report = JSON.parse(find("data").textContent);
  const asked = { axis: "step", logX: false, keys: "changed", hidden: new Set(), logY: {}, off: {} };
  let drawn = [];

  // ------------------------------------------------------------------ elements

  function make(tag, properties, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties || {})) {
      if (name in element) element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  const button = (text, pressed, act, className, ...before) =>
    make("button", { type: "button", className: className || "", ariaPressed: String(pressed), onclick: act }, ...before, text);

  function choice(label, options, chosen, choose) {
    const buttons = options.map(([value, text]) => button(text, value === chosen, () => choose(value)));
    return make("span", { className: "choice", role: "group", ariaLabel: label }, ...buttons);
  }

  function table(className, heads, rows) {
    const row = ([first, ...rest]) => make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((cell) => make("td", {}, cell)));
    const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
    const parts = heads.length ? [make("thead", {}, head)] : [];
    return make("div", { className: "scroll" }, make("table", { className }, ...parts, make("tbody", {}, ...rows.map(row))));
  }

  const colour = (number) => getComputedStyle(document.documentElement).getPropertyValue(`--c${(number % COLOURS) + 1}`).trim();
  const shade = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function swatch(number, style) {
    const mark = make("span", { className: `swatch ${style || ""}` });
    mark.style.color = colour(number);
    return mark;
  }

  // ------------------------------------------------------------------ numbers as text

  function short(value) {
    const size = Math.abs(value);
    for (const [limit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= limit) return trimmed(value / limit, 4) + letter;
    }
    return trimmed(value, 4);
  }

  function trimmed(value, digits) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(digits)));
  }

  function clock(seconds) {
    if (Math.abs(seconds) < 120) return `${trimmed(seconds, 3)} s`;
    const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60)];
    if (hours >= 48) return `${trimmed(seconds / 86400, 3)} d`;
    return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : `${trimmed(seconds / 60, 3)} min`;
  }

  const UNITS = {
    number: (value) => trimmed(value, 5),
    rate: (value) => `${short(value)}/s`,
    lr: (value) => trimmed(value, 4),
    percent: (value) => `${trimmed(100 * value, 3)}%`,
    seconds: (value) => (value < 1 ? `${trimmed(1e3 * value, 4)} ms` : `${trimmed(value, 4)} s`),
    bytes(value) {
      for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
        if (Math.abs(value) >= limit) return `${trimmed(value / limit, 4)} ${unit}`;
      }
      return `${trimmed(value, 4)} B`;
    },
  };

  // ------------------------------------------------------------------ data

  function numbers(table, name) {
    const column = table.columns[name];
    if (!column) return null;
    if (!column.values) {
      const bytes = Uint8Array.from(atob(column.data), (character) => character.charCodeAt(0));
      const typed = column.bits === 64 ? new Float64Array(bytes.buffer) : new Float32Array(bytes.buffer);
      column.values = Array.from(typed, (value) => (Number.isFinite(value) ? value : null));
    }
    return column.values;
  }

  // The columns of a table as uPlot wants them: the axis first, ascending, and without rows that have no place on it.
  function aligned(table, axis, columns) {
    const x = numbers(table, axis);
    const rows = [...x.keys()].filter((row) => x[row] !== null && (!asked.logX || x[row] > 0));
    rows.sort((one, other) => x[one] - x[other]);
    return [x, ...columns].map((column) => rows.map((row) => column[row]));
  }

  // What a chart draws: curves with their labels, and the data of all of them on one axis.
  function curves(spec) {
    const runs = report.runs.map((run, place) => ({ run, place })).filter(({ run }) => !asked.hidden.has(run.label));
    const tables = runs.flatMap(({ run }) => spec.series.map((series) => run.tables[series.table]).filter(Boolean));
    const axis = tables.every((table) => table.columns[asked.axis]) ? asked.axis : "seconds";
    const found = [];
    const parts = [];
    for (const { run, place } of runs) {
      const names = [...new Set(spec.series.map((series) => series.table))];
      for (const name of names.filter((name) => run.tables[name] && run.tables[name].columns[axis])) {
        const there = spec.series.map((series, order) => ({ series, order })).filter(
          ({ series }) => series.table === name && run.tables[name].columns[series.column] && !(asked.off[spec.title] || new Set()).has(series.label));
        if (!there.length) continue;
        const values = there.map(({ series }) => numbers(run.tables[name], series.column));
        parts.push(aligned(run.tables[name], axis, asked.logY[spec.title] ? values.map((column) => column.map((value) => (value > 0 ? value : null))) : values));
        for (const { series, order } of there) {
          const many = report.runs.length > 1;
          const label = many ? (spec.series.length > 1 ? `${run.label}: ${series.label}` : run.label) : series.label;
          found.push({ label, style: series.style, colour: many ? place : colourOf(spec, order) });
        }
      }
    }
    return { axis, found, data: parts.length > 1 ? uPlot.join(parts) : parts[0] || [[]] };
  }

  // With one run each curve has a colour; a faint one has that of the curve that it lies behind.
  function colourOf(spec, order) {
    const strong = spec.series.filter((series, place) => place < order && series.style !== "faint").length;
    return spec.series[order].style === "faint" && order > 0 ? order - 1 : strong;
  }

  // ------------------------------------------------------------------ charts

  const widthOf = (element) => Math.max(240, Math.floor(element.clientWidth));

  function options(element, axis, unit, log, wide, found) {
    const font = '12px system-ui, -apple-system, "Segoe UI", Roboto, Inter, sans-serif';
    const lines = { stroke: shade("quiet"), font, grid: { stroke: shade("grid"), width: 1 }, ticks: { show: false } };
    return {
      width: widthOf(element),
      height: wide ? 340 : 240,
      legend: { show: false },
      scales: { x: { time: false, distr: asked.logX ? 3 : 1 }, y: { distr: log ? 3 : 1 } },
      axes: [
        { ...lines, values: (plot, splits) => splits.map((value) => (value === null ? "" : AXES[axis][1](value))), space: 76, size: 28 },
        { ...lines, values: (plot, splits) => splits.map((value) => (value === null ? "" : UNITS[unit](value))), size: wide ? margin() : innerWidth > 600 ? 62 : 54 },
      ],
      series: [{}, ...found.map(seriesOptions)],
      cursor: {
        sync: { key: axis, scales: ["x", null] },
        y: false,
        points: { size: 7 },
        drag: { x: true, y: false },
        dataIdx: nearest,
      },
      hooks: { setCursor: [tip(element, axis, unit, found)], setScale: [shadeZoom] },
    };
  }

  function seriesOptions({ label, style, colour: number }) {
    const stroke = colour(number);
    return {
      label,
      stroke: style === "faint" ? `${stroke}99` : stroke,
      width: style === "faint" ? 1 : 2,
      dash: style === "dashed" ? [7, 4] : undefined,
      points: { show: style === "dots" ? true : undefined, size: 7, fill: stroke },
    };
  }

  // The nearest place that has a value: curves of several tables have their numbers at different places.
  function nearest(plot, series, place) {
    const column = plot.data[series];
    if (series === 0 || (column[place] !== null && column[place] !== undefined)) return place;
    for (let distance = 1; distance < column.length; distance++) {
      for (const other of [place - distance, place + distance]) {
        if (column[other] !== null && column[other] !== undefined) return other;
      }
    }
    return null;
  }

  const zoomed = () => drawn.some(({ plot }) => plot.isZoomed);
  function shadeZoom(plot, key) {
    if (key !== "x" || !plot.data[0].length) return;
    const { min, max } = plot.scales.x;
    plot.isZoomed = min > plot.data[0][0] || max < plot.data[0][plot.data[0].length - 1];
    find("reset").hidden = !zoomed();
  }

  function tip(element, axis, unit, found, words) {
    const box = element.appendChild(make("div", { className: "tip" }));
    return (plot) => {
      const { left, top, idxs } = plot.cursor;
      const rows = [];
      let at = null;
      if (left >= 0 && plot.over.matches(":hover")) {
        found.forEach((curve, order) => {
          const place = idxs[order + 1];
          if (place === null || place === undefined || rows.length >= 16) return;
          const x = plot.data[0][place];
          const value = plot.data[order + 1][place];
          // Marks are shown only where the pointer is on them.
          if (words && (Math.abs(plot.valToPos(x, "x") - left) > 12 || Math.abs(plot.valToPos(value, "y") - top) > 8)) return;
          if (at === null || Math.abs(x - plot.posToVal(left, "x")) < Math.abs(at - plot.posToVal(left, "x"))) at = x;
          const text = words ? curve.words[curve.rows.get(x)] : UNITS[unit](value);
          rows.push(make("div", {}, make("span", {}, swatch(curve.colour, curve.style), curve.label), make("b", {}, text)));
        });
      }
      box.style.visibility = rows.length ? "visible" : "hidden";
      if (!rows.length) return;
      box.replaceChildren(make("small", {}, `${AXES[axis][0]} ${axis === "seconds" ? clock(at) : Math.round(at).toLocaleString("en")}`), ...rows);
      const over = plot.over;
      const x = over.offsetLeft + left + 16;
      const fits = x + box.offsetWidth < element.clientWidth;
      box.style.left = `${fits ? x : Math.max(0, over.offsetLeft + left - box.offsetWidth - 16)}px`;
      box.style.top = `${Math.max(0, Math.min(top - 10, element.clientHeight - box.offsetHeight))}px`;
    };
  }

  function chartCard(spec) {
    const { axis, found, data } = curves(spec);
    if (!data[0].length && !asked.off[spec.title]) return null;
    const plot = make("div", { className: "plot", role: "img", ariaLabel: described(spec, axis) });
    const redraw = (change) => () => { change(); render(); };
    const off = asked.off[spec.title] || new Set();
    const legend = spec.series.length < 2 ? [] : spec.series.filter((series) => report.runs.some((run) => (run.tables[series.table] || { columns: {} }).columns[series.column])).map((series) =>
      button(series.label, !off.has(series.label), redraw(() => {
        asked.off[spec.title] = off;
        if (!off.delete(series.label)) off.add(series.label);
      }), "toggle", swatch(report.runs.length > 1 ? 5 : colourOf(spec, spec.series.indexOf(series)), series.style)));
    const log = Boolean(asked.logY[spec.title]);
    const scale = button("log", log, redraw(() => { asked.logY[spec.title] = !log; }), "scale");
    scale.title = "logarithmic vertical axis";
    const head = make("div", { className: "head" }, make("h3", {}, spec.title), make("small", {}, spec.hint), ...legend, scale);
    const card = make("article", { className: `card chart${spec.wide ? " wide" : ""}` }, head, plot);
    return { card, draw: () => drawn.push({ plot: new uPlot(options(plot, axis, spec.unit, log, spec.wide, found), data, plot), element: plot }) };
  }

  // Two charts side by side; one that is left over takes the whole width.
  function inPairs(cards) {
    const narrow = cards.filter(({ card }) => !card.classList.contains("wide"));
    if (narrow.length % 2) narrow[narrow.length - 1].card.classList.add("wide");
    return cards;
  }

  // For those who hear the page: what each curve came to.
  function described(spec, axis) {
    const ends = report.runs.flatMap((run) => spec.series.map((series) => {
      const values = run.tables[series.table] && numbers(run.tables[series.table], series.column);
      const last = values && values.filter((value) => value !== null).pop();
      return last === null || last === undefined ? "" : `${run.label}, ${series.label}: ${UNITS[spec.unit](last)} at the end`;
    }));
    return `${spec.title} by ${AXES[axis][0].toLowerCase()}. ${ends.filter(Boolean).join("; ")}`;
  }

  // What happened, a line for each kind, on the axis of the charts.
  function timeline() {
    const runs = report.runs.map((run, place) => ({ run, place })).filter(({ run }) => !asked.hidden.has(run.label));
    const marks = runs.flatMap(({ run, place }) => run.marks.map((mark) => ({ ...mark, run, place })));
    const axis = marks.every((mark) => mark.table.columns[asked.axis]) ? asked.axis : "seconds";
    const kinds = [...new Set(marks.map((mark) => mark.kind))];
    if (!kinds.length) return null;
    const counts = kinds.map((kind) => report.runs.reduce((sum, run) => sum + ((run.marks.find((mark) => mark.kind === kind) || {}).count || 0), 0));
    const bad = new Set(["failed save", "skipped update", "not finite", "refused delta", "delta not sent", "interruption", "warning"]);
    const found = marks.map((mark) => {
      const places = numbers(mark.table, axis);
      return {
        label: report.runs.length > 1 ? `${mark.run.label}: ${mark.kind}` : mark.kind,
        words: mark.words,
        rows: new Map(places.map((x, row) => [x, row])),
        colour: report.runs.length > 1 ? mark.place : bad.has(mark.kind) ? 1 : 0,
      };
    });
    // The marks of several runs lie a little above each other.
    const lane = (place) => (report.runs.length > 1 ? 0.5 * (place / (report.runs.length - 1)) - 0.25 : 0);
    const parts = marks.map((mark) => aligned(mark.table, axis, [numbers(mark.table, axis).map(() => kinds.indexOf(mark.kind) + lane(mark.place))]));
    const element = make("div", { className: "plot", role: "img", ariaLabel: `Events: ${kinds.map((kind, row) => `${kind} ${counts[row]}`).join(", ")}` });
    const card = make("article", { className: "card chart wide" },
      make("div", { className: "head" }, make("h3", {}, "Events"), make("small", {}, "point at one to read it")), element);
    const draw = () => {
      const all = options(element, axis, "number", false, true, found);
      const others = drawn.filter(({ plot }) => plot.cursor.sync.key === axis && plot.data[0].length).map(({ plot }) => plot.data[0]);
      const first = Math.min(...others.map((x) => x[0]));
      const last = Math.max(...others.map((x) => x[x.length - 1]));
      all.height = 50 + 26 * kinds.length;
      all.scales.y = { range: [kinds.length - 0.5, -0.5].sort((one, other) => one - other), dir: -1 };
      // As the other charts: whole powers of ten on a logarithmic axis.
      const whole = (value, round) => (asked.logX ? 10 ** round(Math.log10(value)) : value);
      all.scales.x.range = (plot, low, high) =>
        plot.isZoomed ? [low, high] : [whole(Math.min(low, first), Math.floor), whole(Math.max(high, last), Math.ceil)];
      all.axes[1] = { ...all.axes[1], size: 118, splits: () => kinds.map((kind, row) => row), values: () => kinds.map((kind, row) => `${kind} (${counts[row]})`), grid: { stroke: shade("grid"), width: 1 } };
      all.series = [{}, ...found.map((curve) => ({ label: curve.label, stroke: colour(curve.colour), paths: () => null, points: { show: true, size: 9, width: 1, fill: colour(curve.colour), stroke: shade("card") } }))];
      all.cursor.points = { show: false };
      all.hooks.setCursor = [tip(element, axis, "number", found, true)];
      drawn.push({ plot: new uPlot(all, uPlot.join(parts), element), element });
    };
    return { card, draw };
  }

  // ------------------------------------------------------------------ the parts of the page

  function summary() {
    const status = (run) => make("span", { className: `status ${run.status}` }, run.status);
    if (report.runs.length === 1) {
      const [run] = report.runs;
      const tile = (name, value, note) => make("div", {}, make("dt", {}, name), make("dd", {}, value, note ? make("small", {}, note) : null));
      return [make("dl", { className: "card tiles" }, tile("Status", status(run)), ...run.facts.map((fact) => tile(...fact)))];
    }
    const names = [...new Set(report.runs.flatMap((run) => run.facts.map(([name]) => name)))];
    const rows = report.runs.map((run, place) => {
      const facts = new Map(run.facts);
      return [make("span", {}, swatch(place), run.label), status(run), ...names.map((name) => facts.get(name) || "")];
    });
    return [make("div", { className: "card" }, table("runs-table", ["Run", "Status", ...names], rows))];
  }

  function toolbar() {
    const set = (name) => (value) => { asked[name] = value; render(); };
    const parts = [
      make("span", {}, "By", choice("Horizontal axis", Object.entries(AXES).map(([name, [title]]) => [name, title.toLowerCase()]), asked.axis, set("axis"))),
      choice("Scale of the horizontal axis", [[false, "linear"], [true, "log"]], asked.logX, set("logX")),
    ];
    if (report.runs.length > 1) {
      parts.push(make("span", { className: "runs", role: "group", ariaLabel: "Runs" }, ...report.runs.map((run, place) =>
        button(run.label, !asked.hidden.has(run.label), () => {
          if (!asked.hidden.delete(run.label)) asked.hidden.add(run.label);
          render();
        }, "toggle", swatch(place)))));
    }
    const reset = make("button", { type: "button", id: "reset", hidden: true, onclick: render }, "Reset zoom");
    return [...parts, reset, make("small", { className: "quiet" }, "Drag across a chart to zoom, double-click to reset")];
  }

  function download(run, name) {
    const columns = Object.keys(run.tables[name].columns);
    const values = columns.map((column) => numbers(run.tables[name], column));
    const exact = columns.map((column) => run.tables[name].columns[column].bits === 64);
    const cell = (value, order) => (value === null || value === undefined ? "" : exact[order] ? value : Number(value.toPrecision(8)));
    const lines = values[0].map((_, row) => values.map((column, order) => cell(column[row], order)).join(","));
    return URL.createObjectURL(new Blob([[columns.join(","), ...lines, ""].join("\n")], { type: "text/csv" }));
  }

  function csvLinks() {
    const files = report.runs.flatMap((run) => ["steps", "evals"].filter((name) => run.tables[name]).map((name) => {
      const { rows, of } = run.tables[name];
      const what = name === "steps" ? "steps" : "evaluations";
      const text = rows < of ? `${rows.toLocaleString("en")} of ${of.toLocaleString("en")} ${what}` : `${rows.toLocaleString("en")} ${what}`;
      const link = make("a", { className: "link", href: "#", download: `${run.label.replace(/[^\w.-]+/g, "_")}-${name}.csv` }, report.runs.length > 1 ? `${run.label}: ${text}` : text);
      link.addEventListener("click", () => { link.href = download(run, name); });
      return link;
    }));
    const thinned = report.runs.some((run) => run.tables.steps && run.tables.steps.rows < run.tables.steps.of);
    return files.length ? make("article", { className: "card wide" }, make("div", { className: "row" }, make("h3", {}, "Numbers as CSV"), ...files),
      thinned ? make("small", {}, "Of a long run the report holds the steps at which a curve turns, each with its own numbers; all of them are in the run's log.") : null) : null;
  }

  function configuration() {
    const keys = [...new Set([...Object.keys(report.defaults), ...report.runs.flatMap((run) => Object.keys(run.config))])];
    const there = report.runs.filter((run) => Object.keys(run.config).length);
    if (!there.length) return null;
    const values = (key) => report.runs.map((run) => (key in run.config ? run.config[key] : ""));
    const differs = (key) => new Set(there.map((run) => run.config[key])).size > 1;
    const changed = (key) => there.some((run) => key in run.config && run.config[key] !== report.defaults[key]);
    const wanted = { changed, differs, all: () => true }[asked.keys];
    const modes = [["changed", "not default"], ...(report.runs.length > 1 ? [["differs", "different"]] : []), ["all", "all"]];
    const shown = keys.filter((key) => wanted(key) && there.some((run) => key in run.config));
    const rows = table("keys", report.runs.length > 1 ? ["Key", ...report.runs.map((run) => run.label)] : [], shown.map((key) => [key, ...values(key)]));
    rows.querySelectorAll("tbody tr").forEach((row, place) => row.classList.toggle("differs", report.runs.length > 1 && differs(shown[place])));
    return make("article", { className: report.runs.length > 1 ? "card wide" : "card" },
      make("div", { className: "row" }, make("h3", {}, "Configuration"), choice("Keys", modes, asked.keys, (value) => { asked.keys = value; details(); })),
      shown.length ? rows : make("small", {}, "No key."));
  }

  function factTable(title, name) {
    const keys = [...new Set(report.runs.flatMap((run) => run[name].map(([key]) => key)))];
    if (!keys.length) return null;
    const maps = report.runs.map((run) => new Map(run[name]));
    const heads = report.runs.length > 1 ? ["", ...report.runs.map((run) => run.label)] : [];
    return make("article", { className: "card" }, make("div", { className: "row" }, make("h3", {}, title)),
      table("", heads, keys.map((key) => [key, ...maps.map((map) => map.get(key) || "")])));
  }

  function messages() {
    const rows = report.runs.flatMap((run) => run.messages.map(([time, level, text]) => [time, level.toLowerCase(), report.runs.length > 1 ? `${run.label}: ${text}` : text]));
    return rows.length ? make("article", { className: "card wide" }, make("div", { className: "row" }, make("h3", {}, "Warnings")), table("", [], rows)) : null;
  }

  function details() {
    const facts = make("div", { className: `stack${report.runs.length > 1 ? " wide" : ""}` }, factTable("Data", "data"), factTable("Environment", "environment"));
    find("details").replaceChildren(...[configuration(), facts, messages(), csvLinks()].filter(Boolean));
  }

  function nodes() {
    const there = report.runs.filter((run) => run.node);
    if (!there.length) return [];
    const names = Object.keys(there[0].node).filter((name) => there.some((run) => run.node[name]));
    const rows = there.map((run) => [make("span", {}, swatch(report.runs.indexOf(run)), run.label), ...names.map((name) => run.node[name])]);
    const cards = inPairs(report.node_charts.map(chartCard).filter(Boolean));
    const grid = make("div", { className: "grid" }, make("div", { className: "card wide" }, table("runs-table", ["Run", ...names], rows)), ...cards.map(({ card }) => card));
    return [[make("h2", {}, "DumbDiLoCo"), grid], cards];
  }

  function samples() {
    const parts = report.runs.flatMap((run) => run.samples.map((sample) => [
      make("small", {}, `${report.runs.length > 1 ? `${run.label}, ` : ""}step ${sample.step}`),
      make("pre", {}, make("b", {}, sample.prompt), sample.text)]).flat());
    return parts.length ? [make("h2", {}, "Samples"), make("div", { className: "card" }, ...parts)] : [];
  }

  function render() {
    drawn.forEach(({ plot }) => plot.destroy());
    drawn = [];
    find("title").textContent = report.runs.length === 1 ? report.runs[0].label : `${report.runs.length} runs`;
    find("summary").replaceChildren(...summary());
    const focused = document.activeElement && [...document.querySelectorAll("button")].indexOf(document.activeElement);
    find("toolbar").replaceChildren(...toolbar());
    const cards = inPairs(report.charts.map(chartCard).filter(Boolean));
    const [nodeParts, nodeCards] = nodes();
    find("charts").replaceChildren(...cards.map(({ card }) => card));
    find("nodes").replaceChildren(...(nodeParts || []));
    [...cards, ...(nodeCards || [])].forEach(({ draw }) => draw());
    const events = timeline();
    if (events) {
      find("charts").insertBefore(events.card, cards.length ? cards[0].card.nextSibling : null);
      events.draw();
    }
    find("samples").replaceChildren(...samples());
    details();
    // The button that was pressed is made anew: keep the keyboard where it was.
    if (focused >= 0) (document.querySelectorAll("button")[focused] || document.body).focus({ preventScroll: true });
    find("footer").textContent = `Speedtronic ${report.version}. This page is one file and asks no network for anything.`;
  }

  // ------------------------------------------------------------------ the page as a whole

  function setTheme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    find("theme").textContent = dark ? "Light" : "Dark";
    find("theme").setAttribute("aria-label", dark ? "Use light colours" : "Use dark colours");
  }

  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(prefersDark.matches);
  prefersDark.addEventListener("change", () => { setTheme(prefersDark.matches); render(); });
  find("theme").addEventListener("click", () => { setTheme(document.documentElement.dataset.theme !== "dark"); render(); });

  const fit = () => drawn.forEach(({ plot, element }) => plot.setSize({ width: widthOf(element), height: plot.height }));
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(fit); });

  // On paper: light, and as wide as a sheet.
  let before = null;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    document.body.style.width = "700px";
    setTheme(false);
    render();
  });
  addEventListener("afterprint", () => { document.body.style.width = ""; setTheme(before === "dark"); render(); });

  async function follow() {
    const sign = find("live");
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const text = await answer.text();
      sign.className = "on";
      sign.textContent = "live";
      // While somebody looks closely, the charts stay as they are.
      if (text !== follow.last && !zoomed() && !document.querySelector(".plot:hover")) {
        follow.last = text;
        report = JSON.parse(text);
        render();
      }
    } catch {
      sign.className = "";
      sign.textContent = "the server of this page has ended";
    }
    setTimeout(follow, 2000);
  }

  render();
  if (report.live) follow();
})();
