// Buttons, keys and switches of the page. Bokeh draws, and zooms with the mouse; the ranges are its models.
(async function () {
  "use strict";
  const data = document.getElementById("data").textContent;
  if (data) await Bokeh.embed.embed_items(...JSON.parse(data));
  const charts = () => Bokeh.documents.flatMap((document) => document.roots()).filter((root) => root.x_range);
  const ranges = () => [...new Set(charts().map((chart) => chart.x_range))].filter((range) => range.tags.length);
  // Zoom by `factor` about the middle and move by `shift` widths, never beyond the data; factor 0 shows all.
  function move(factor, shift) {
    if (factor === 0) return charts().forEach((chart) => Bokeh.index.get_by_id(chart.id)?.reset()); // both axes
    for (const range of ranges()) {
      const [least, most] = range.tags;
      const width = Math.min(most - least, (range.end - range.start) * factor);
      let start = (range.start + range.end) / 2 - width / 2 + shift * width;
      start = Math.max(least, Math.min(most - width, start));
      range.setv({ start: start, end: start + width });
    }
  }
  const keys = { "+": [0.5, 0], "=": [0.5, 0], "-": [2, 0], ArrowLeft: [1, -0.25], ArrowRight: [1, 0.25], 0: [0, 0] };
  addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    if (event.key.startsWith("Arrow") && event.target.closest(".scroll")) return; // a wide table is scrolled
    move(...keys[event.key]);
    event.preventDefault();
  });
  for (const button of document.querySelectorAll("button[data-key]")) {
    button.addEventListener("click", () => move(...keys[button.dataset.key]));
  }
  for (const box of document.querySelectorAll("input[data-group]")) {
    box.addEventListener("change", () => {
      for (const chart of charts()) {
        for (const drawn of chart.renderers) if (drawn.tags.includes(box.dataset.group)) drawn.visible = box.checked;
      }
    });
  }
  // A finger scrolls the page; on a touch screen the buttons zoom.
  if (matchMedia("(pointer: coarse)").matches) for (const chart of charts()) chart.toolbar.active_drag = null;
  // The colours are CSS variables, read when a chart is painted.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const chart of Bokeh.documents.flatMap((one) => one.roots())) Bokeh.index.get_by_id(chart.id)?.request_repaint();
  });
  // For tests: when everything was painted, in milliseconds.
  while (!Bokeh.documents.every((one) => one.is_idle)) await new Promise(requestAnimationFrame);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
