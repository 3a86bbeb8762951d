(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const by = (id) => document.getElementById(id);

  // ---- columns --------------------------------------------------------------------------------------------------
  const infinite = (column) => column.map((v) => (v === null ? Infinity : v)); // JSON has no ∞
  for (const s of data.series) s.radius = infinite(s.radius);
  for (const a of data.attacks) {
    a.distance = infinite(a.distance);
    a.of = new Map(a.ids.map((id, i) => [id, a.distance[i]]));
  }
  const floor = (v) => { // never shows more than was certified
    if (!Number.isFinite(v)) return "∞";
    let n = Math.floor(v * 1e4);
    if (n / 1e4 > v) n -= 1;
    return (n / 1e4).toFixed(4);
  };
  const ceil = (v) => { // never shows an attack closer than it was
    if (!Number.isFinite(v)) return "none found";
    let n = Math.ceil(v * 1e4);
    if (n / 1e4 < v) n += 1;
    return (n / 1e4).toFixed(4);
  };

  // ---- light and dark ---------------------------------------------------------------------------------------------
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const remembered = () => { try { return localStorage.getItem("equipoise-theme"); } catch (e) { return null; } };
  const remember = (v) => { try { localStorage.setItem("equipoise-theme", v); } catch (e) { /* no storage: not remembered */ } };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const colours = () => {
    const css = getComputedStyle(root), get = (n) => css.getPropertyValue(n).trim();
    return { ink: get("--ink"), soft: get("--soft"), grid: get("--grid"), card: get("--card"), line: get("--line") };
  };
  const themed = () => {
    const c = colours(), axis = (n) => ({ [`${n}.gridcolor`]: c.grid, [`${n}.linecolor`]: c.line, [`${n}.color`]: c.soft });
    return {
      "font.color": c.soft, "font.size": 12, "font.family": getComputedStyle(document.body).fontFamily,
      "legend.font.color": c.ink, "hoverlabel.bgcolor": c.card, "hoverlabel.bordercolor": c.line, "hoverlabel.font.color": c.ink,
      ...axis("xaxis"), ...axis("yaxis"),
    };
  };
  const charts = Object.entries(data.charts);
  const expand = (flat) => {
    const out = {};
    for (const [path, v] of Object.entries(flat)) {
      const keys = path.split("."); let at = out;
      keys.slice(0, -1).forEach((k) => { at = at[k] = at[k] || {}; });
      at[keys[keys.length - 1]] = v;
    }
    return out;
  };
  const merge = (a, b) => {
    for (const [k, v] of Object.entries(b)) {
      a[k] = v && typeof v === "object" && !Array.isArray(v) ? merge(a[k] || {}, v) : v;
    }
    return a;
  };
  const draw = () => {
    if (!window.Plotly) return;
    const axis = () => ({ zeroline: false, automargin: true, fixedrange: true, ticks: "", title: { standoff: 8 } });
    const common = {
      xaxis: axis(), yaxis: axis(), margin: { l: 8, r: 8, t: 8, b: 8 }, hovermode: "closest", dragmode: false, autosize: true,
      legend: { orientation: "h", y: -0.22, yanchor: "top", x: 0, xanchor: "left" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    };
    const style = expand(themed());
    for (const [id, figure] of charts) {
      const layout = merge(merge(structuredClone(common), figure.layout), style);
      window.Plotly.newPlot(by(id), figure.data, layout, { responsive: true, displayModeBar: false });
    }
  };
  const paint = () => { if (window.Plotly) for (const [id] of charts) window.Plotly.relayout(by(id), themed()); };
  const saved = remembered();
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;
  by("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    paint();
  });
  dark.addEventListener("change", paint);
  const attackSwitch = by("show-attacks");
  if (attackSwitch) attackSwitch.addEventListener("change", () => {
    for (const [id, figure] of charts) {
      const at = figure.data.map((t, i) => (t.meta === "attack" ? i : -1)).filter((i) => i >= 0);
      if (at.length) window.Plotly.restyle(by(id), { visible: attackSwitch.checked }, at);
    }
  });
  let before = null;
  window.addEventListener("beforeprint", () => { before = root.dataset.theme || ""; root.dataset.theme = "light"; paint(); });
  window.addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    paint();
  });

  // ---- tables that sort --------------------------------------------------------------------------------------------
  const compare = (a, b) => {
    const x = a === "" ? NaN : Number(a), y = b === "" ? NaN : Number(b);
    if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    if (a === "" || b === "") return (a === "") - (b === "");
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  const key = (cell) => cell.textContent.trim().replace(/ %$/, "").replace("∞", "Infinity");
  const mark = (heads, chosen, up) => heads.forEach((h) => {
    h.setAttribute("aria-sort", h === chosen ? (up ? "ascending" : "descending") : "none");
  });
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      const rows = [...body.rows].sort((r, s) => {
        const a = key(r.cells[column]), b = key(s.cells[column]);
        if ((a === "") !== (b === "")) return (a === "") - (b === ""); // unknown stays last
        return up ? compare(a, b) : compare(b, a);
      });
      body.append(...rows);
      mark(heads, head, up);
    }));
  }

  // ---- the inputs, a page at a time -----------------------------------------------------------------------------------
  const which = by("which"), size = 25;
  let order = [], page = 0, sorted = null;
  const attacksOf = (s) => {
    const kinds = new Map();
    for (const a of data.attacks) if (a.model === s.model && (a.run === s.run || !kinds.has(a.kind))) kinds.set(a.kind, a);
    return [...kinds.values()];
  };
  const columns = (s) => {
    const ids = s.ids;
    return [
      { name: "input", value: (i) => ids[i], text: (i) => ids[i] },
      { name: "label", num: true, value: (i) => s.label[i], text: (i) => String(s.label[i]) },
      { name: "certified answer", num: true, value: (i) => s.prediction[i], text: (i) => (s.prediction[i] < 0 ? "none" : String(s.prediction[i])) },
      { name: "status", value: (i) => s.status[i], text: (i) => s.status[i] },
      { name: "certified radius", num: true, value: (i) => s.radius[i], text: (i) => floor(s.radius[i]) },
      ...attacksOf(s).map((a) => ({
        name: `closest attack, ${a.kind}`, num: true,
        value: (i) => (a.of.has(ids[i]) ? a.of.get(ids[i]) : ""),
        text: (i) => (a.of.has(ids[i]) ? ceil(a.of.get(ids[i])) : "not attacked"),
      })),
    ];
  };
  const show = () => {
    const s = data.series[Number(which.value)], cols = columns(s), table = by("inputs"), total = s.radius.length;
    const pages = Math.ceil(total / size);
    page = Math.max(0, Math.min(page, pages - 1));
    const head = document.createElement("tr");
    cols.forEach((c, k) => {
      const th = document.createElement("th"), b = document.createElement("button");
      b.type = "button"; b.textContent = c.name; if (c.num) th.className = "num";
      th.setAttribute("aria-sort", sorted && sorted.k === k ? (sorted.up ? "ascending" : "descending") : "none");
      b.addEventListener("click", () => {
        sorted = { k, up: !(sorted && sorted.k === k && sorted.up) };
        const keys = Array.from({ length: total }, (_, i) => c.value(i));
        order.sort((i, j) => {
          if ((keys[i] === "") !== (keys[j] === "")) return (keys[i] === "") - (keys[j] === "");
          return (sorted.up ? compare(keys[i], keys[j]) : compare(keys[j], keys[i])) || i - j;
        });
        page = 0; show();
      });
      th.append(b); head.append(th);
    });
    table.tHead.replaceChildren(head);
    table.tBodies[0].replaceChildren(...order.slice(page * size, page * size + size).map((i) => {
      const tr = document.createElement("tr");
      for (const c of cols) {
        const td = document.createElement("td"); td.textContent = c.text(i); if (c.num) td.className = "num"; tr.append(td);
      }
      return tr;
    }));
    by("place").textContent = `${page * size + 1}–${Math.min(total, page * size + size)} of ${total.toLocaleString("en")}`;
    by("back").disabled = page === 0; by("on").disabled = page >= pages - 1;
  };
  const choose = () => {
    order = Array.from({ length: data.series[Number(which.value)].radius.length }, (_, i) => i);
    page = 0; sorted = null; show();
  };
  if (which) {
    which.addEventListener("change", choose);
    by("back").addEventListener("click", () => { page -= 1; show(); });
    by("on").addEventListener("click", () => { page += 1; show(); });
    choose();
  }

  // ---- downloads ------------------------------------------------------------------------------------------------------
  const save = (name, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type })); link.download = name;
    document.body.append(link); link.click(); link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const cell = (v) => {
    if (typeof v === "number") return Number.isFinite(v) ? String(v) : (v > 0 ? "inf" : "");
    let text = v === null || v === undefined ? "" : String(v);
    if (/^[=+\-@\t\r]/.test(text)) text = `'${text}`; // a spreadsheet must not take it for a formula
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const csv = (rows) => rows.map((r) => r.map(cell).join(",")).join("\r\n") + "\r\n";
  const plain = (v) => Array.from(v, (x) => (Number.isFinite(x) ? x : "inf"));
  const everything = () => {
    const { charts: _, ...rest } = data;
    return JSON.stringify({
      ...rest,
      series: data.series.map((s) => ({ ...s, radius: plain(s.radius) })),
      attacks: data.attacks.map(({ of: _of, ...a }) => ({ ...a, distance: plain(a.distance) })),
    }, null, 1);
  };
  const inputsCsv = () => {
    const rows = [["network", "run", "procedure", "sigma", "alpha", "input", "label", "certified answer", "certified radius", "status"]];
    for (const s of data.series) s.ids.forEach((id, i) => {
      rows.push([s.model, s.run, s.procedure, s.sigma, s.alpha, id, s.label[i], s.prediction[i], s.radius[i], s.status[i]]);
    });
    return csv(rows);
  };
  const layersCsv = () => {
    const rows = [["network", "layer", "kind", "shape", "lower", "upper", "share", "method"]];
    for (const a of data.audits) for (const r of a.layers || []) {
      rows.push([a.model, r.name, r.kind, r.shape, r.lower, r.upper, r.share, r.method]);
    }
    return csv(rows);
  };
  // every table as it is shown: with its order, and rounded as on the page
  const shown = (id) => [...by(id).rows].map((row) => [...row.cells].map((c) => c.textContent.trim()));
  const tex = (text) => text.replace(/[\\&%$#_{}~^]/g, (c) => (c === "\\" ? "\\textbackslash{}" : `\\${c}${"~^".includes(c) ? "{}" : ""}`))
    .replace(/ε/g, "$\\varepsilon$").replace(/α/g, "$\\alpha$").replace(/σ/g, "$\\sigma$").replace(/ℓ([12∞])/g, (_, p) => `$\\ell_${p === "∞" ? "\\infty" : p}$`)
    .replace(/→/g, "$\\to$").replace(/×/g, "$\\times$").replace(/∞/g, "$\\infty$").replace(/−/g, "$-$").replace(/·/g, "$\\cdot$");
  const tableCsv = (id) => csv(shown(id));
  const tableLatex = (id) => {
    const [head, ...body] = shown(id);
    const columns = [...by(id).tHead.rows[0].cells].map((c) => (c.classList.contains("num") ? "r" : "l")).join("");
    const line = (row) => row.map(tex).join(" & ") + " \\\\";
    return [`% needs \\usepackage{booktabs}`, `\\begin{tabular}{${columns}}`, "\\toprule", line(head), "\\midrule", ...body.map(line), "\\bottomrule", "\\end{tabular}", ""].join("\n");
  };
  for (const place of document.querySelectorAll(".save")) {
    const id = place.dataset.for, [asCsv, asTex] = place.children;
    asCsv.addEventListener("click", () => save(`${id}.csv`, "text/csv", tableCsv(id)));
    asTex.addEventListener("click", () => save(`${id}.tex`, "application/x-tex", tableLatex(id)));
  }
  by("save-json").addEventListener("click", () => save("report.json", "application/json", everything()));
  by("save-csv").addEventListener("click", () => save("inputs.csv", "text/csv", inputsCsv()));
  by("save-layers").addEventListener("click", () => save("layers.csv", "text/csv", layersCsv()));
  if (!data.series.length) by("save-csv").hidden = true;
  if (!data.audits.length) by("save-layers").hidden = true;
  window.equipoise = { everything, inputsCsv, layersCsv, tableCsv, tableLatex };

  draw();
})();
