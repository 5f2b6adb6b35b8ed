const tip = document.body.appendChild(Object.assign(document.createElement("div"), {id: "tip"}));
const shown = (v, unit) => unit == "percent" ? +(100 * v).toPrecision(4) + " %" : unit == "bytes" && v >= 1e3
  ? +(v / 1000 ** Math.min(3, Math.floor(Math.log10(v) / 3))).toPrecision(4) + " " + ["", "k", "M", "G"][Math.min(3, Math.floor(Math.log10(v) / 3))] + "B"
  : +v.toPrecision(5) + (unit == "bytes" ? " B" : "");
for (const svg of document.querySelectorAll("svg[data-plot]")) {
  const plots = JSON.parse(svg.dataset.plot);
  svg.addEventListener("pointerleave", () => tip.style.display = "none");
  svg.addEventListener("pointermove", event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const plot = plots.find(p => point.x >= p.box[0] && point.x <= p.box[2] && point.y >= p.box[1] && point.y <= p.box[3]);
    tip.style.display = plot ? "block" : "none";
    if (!plot) return;
    const share = (point.x - plot.box[0]) / (plot.box[2] - plot.box[0]), [low, high] = plot.xlim;
    const at = v => plot.log[0] ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
    tip.replaceChildren(plot.x);
    for (const [name, colour, xs, ys] of plot.lines) {
      let near = -1;
      xs.forEach((x, i) => { if (ys[i] !== null && (near < 0 || Math.abs(at(x) - share) < Math.abs(at(xs[near]) - share))) near = i; });
      if (near < 0) continue;
      const dot = Object.assign(document.createElement("b"), {textContent: "\n\u25cf "});
      dot.style.color = colour;
      tip.append(dot, name + ": " + shown(ys[near], plot.unit) + " at " + shown(xs[near], ""));
    }
    const left = event.clientX + 16;
    tip.style.left = (left + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 12 : left) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4)) + "px";
  });
}
