// Shows the values that are nearest to the pointer.
for (const figure of document.querySelectorAll("figure")) {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg");
  if (!chart) continue;
  const box = document.createElement("div");
  box.className = "values";
  box.hidden = true;
  figure.append(box);
  const pointer = document.createElementNS(svg.namespaceURI, "path");
  pointer.setAttribute("class", "pointer");
  svg.append(pointer);

  const nearest = (places, x) => {
    let best = 0;
    places.forEach((place, i) => { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = i; });
    return best;
  };
  svg.addEventListener("pointermove", (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    box.replaceChildren();
    let at = null;
    for (const series of chart.series) {
      if (series.at.length === 0) continue;
      const i = nearest(series.at, x);
      if (at === null) {
        at = series.at[i];
        box.append(`${chart.x}: ${series.values[i][0]}`);
      }
      const line = document.createElement("div");
      const swatch = document.createElement("b");
      swatch.style.background = `var(--s${series.color})`;
      line.append(swatch, `${series.name}: ${series.values[i][1]}`);
      box.append(line);
    }
    if (at === null) return;
    const { height } = svg.viewBox.baseVal;
    pointer.setAttribute("d", `M${at} ${height - 302}V${height - 42}`);
    box.hidden = false;
    const left = event.clientX - figure.getBoundingClientRect().left;
    const room = figure.clientWidth - box.offsetWidth - 4;
    box.style.left = `${Math.max(4, left + 14 > room ? left - box.offsetWidth - 14 : left + 14)}px`;
    box.style.top = `${event.clientY - figure.getBoundingClientRect().top + 14}px`;
  });
  svg.addEventListener("pointerleave", () => { box.hidden = true; pointer.removeAttribute("d"); });
}
