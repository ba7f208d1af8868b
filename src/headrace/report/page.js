"use strict";
// Draws every figure once plotly is unpacked; again when the colours change. A figure in a closed section waits until it is opened.
(() => {
  const root = document.documentElement;
  const plots = [...document.querySelectorAll(".plot")];
  const colorKeys = new Set(["color", "fillcolor", "colorscale", "bgcolor", "bordercolor"]);
  const coarse = matchMedia("(pointer: coarse)").matches;

  function themed(value, variable, isColor) {
    if (typeof value === "string") return isColor && value.startsWith("$") ? variable(value.slice(1)) : value;
    if (Array.isArray(value)) return isColor ? value.map((item) => themed(item, variable, true)) : value.map((item) => themed(item, variable, false));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, variable, colorKeys.has(key))]));
  }

  function laidOut(layout, variable, width) {
    const font = { family: getComputedStyle(document.body).fontFamily, size: width < 480 ? 11 : 12, color: variable("ink") };
    const axis = { gridcolor: variable("grid"), zerolinecolor: variable("line"), linecolor: variable("line"), automargin: true, tickfont: { color: variable("muted") } };
    const base = {
      font, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 44, r: 10, t: 10, b: 40 }, autosize: true,
      dragmode: coarse ? false : "zoom", hovermode: "closest", hoverlabel: { font: { family: font.family, size: 12 }, align: "left" },
      xaxis: {}, yaxis: {},
    };
    const whole = { ...base, ...layout };
    for (const key of Object.keys(whole)) if (/^[xy]axis\d*$/.test(key)) whole[key] = { ...axis, ...whole[key] };
    for (const key of Object.keys(whole)) {
      if (/^[xy]axis\d*$/.test(key) && whole[key].title) whole[key].title = { ...whole[key].title, font: { size: font.size, color: variable("muted") }, standoff: 6 };
    }
    return whole;
  }

  async function draw(plot) {
    const styles = getComputedStyle(root);
    const variable = (name) => styles.getPropertyValue("--" + name).trim() || name;
    const spec = JSON.parse(plot.nextElementSibling.textContent);
    const layout = laidOut(themed(spec.layout, variable, false), variable, plot.clientWidth);
    await Plotly.react(plot, themed(spec.data, variable, false), layout, { responsive: true, displaylogo: false, displayModeBar: false });
    plot.dataset.drawn = "";
  }

  const visible = (plot) => plot.closest("details:not([open])") === null;

  async function drawAll(again) {
    for (const plot of plots) if (visible(plot) && (again || !("drawn" in plot.dataset))) await draw(plot);
    root.dataset.ready = String(plots.filter((plot) => "drawn" in plot.dataset).length);
  }

  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  function unavailable(error) {
    for (const plot of plots) {
      plot.style.height = "auto";
      plot.textContent = "This browser cannot draw the figure (" + error.message + "). A browser of 2023 or later can.";
      plot.classList.add("unavailable");
    }
    root.dataset.ready = "0";
  }

  function printing(light) {
    if (light) root.dataset.theme = "light";
    else delete root.dataset.theme;
    drawAll(true);
  }

  unpack().then(async () => {
    await drawAll(false);
    document.addEventListener("toggle", () => drawAll(false), true);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(true));
    addEventListener("beforeprint", () => printing(true));
    addEventListener("afterprint", () => printing(false));
  }).catch(unavailable);
})();
