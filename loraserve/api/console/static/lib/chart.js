// Lines over the last minutes, drawn by uPlot; the same figures stand in words beside each chart.
import uPlot from "../vendor/uPlot.js";
import { html, useEffect, useRef } from "./html.js";

const HEIGHT = 168;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A label names a minute: two marks in one would read alike.
const WHOLE_MINUTES = [1, 2, 5, 10, 15, 30, 60].map((minutes) => 60 * minutes);

// Labels without those that repeat the one before, as of small numbers rounded.
export function distinct(labels) {
  return labels.map((label, index) => (label === labels[index - 1] ? "" : label));
}

function options(series, width, format, minutes) {
  const axis = {
    stroke: colour("--muted"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    padding: [8, 8, 0, 0],
    scales: {
      x: { time: true, range: (_, __, last) => [last - 60 * minutes, last] },
      y: { range: (_, __, most) => [0, most > 0 ? most * 1.15 : 1] },
    },
    axes: [
      { ...axis, space: 52, size: 26, values: "{HH}:{mm}", incrs: WHOLE_MINUTES },
      { ...axis, size: 62, space: 34, values: (_, values) => distinct(values.map((value) => format(value))) },
    ],
    series: [
      {},
      ...series.map((one) => ({
        label: one.name,
        stroke: colour(one.colour),
        width: 1.75,
        dash: one.dash,
        fill: one.isFilled ? `${colour(one.colour)}22` : undefined,
        points: { show: false },
        spanGaps: false,
      })),
    ],
  };
}

export function Chart({ title, words, samples, series, format, minutes }) {
  const holder = useRef(null);
  const chart = useRef(null);
  const since = (samples.at(-1)?.at ?? 0) - 60 * minutes;
  const shown = samples.filter((sample) => sample.at >= since);
  const data = [
    shown.map((sample) => sample.at),
    ...series.map((one) => shown.map((sample) => sample[one.field] ?? null)),
  ];
  useEffect(() => {
    const draw = () => {
      chart.current?.destroy();
      const width = Math.max(160, holder.current.clientWidth);
      chart.current = new uPlot(options(series, width, format, minutes), data, holder.current);
    };
    draw();
    const watcher = new ResizeObserver(() => {
      const width = Math.max(160, holder.current?.clientWidth ?? 0);
      if (chart.current && chart.current.width !== width) chart.current.setSize({ width, height: HEIGHT });
    });
    watcher.observe(holder.current);
    window.addEventListener("loraserve:theme", draw);
    return () => {
      watcher.disconnect();
      window.removeEventListener("loraserve:theme", draw);
      chart.current?.destroy();
      chart.current = null;
    };
  }, [minutes]);
  useEffect(() => {
    chart.current?.setData(data);
  });
  return html`<figure class="card chart">
    <figcaption>
      <span class="card-title">${title}</span>
      <ul class="legend">
        ${series.map(
          (one) => html`<li>
            <span class=${`swatch line ${one.dash ? "dashed" : ""}`} style=${{ color: `var(${one.colour})` }} aria-hidden="true"></span>
            ${one.name} <span class="num">${format(samples.at(-1)?.[one.field] ?? null)}</span>
          </li>`,
        )}
      </ul>
    </figcaption>
    <div class="plot" ref=${holder} role="img" aria-label=${words}></div>
  </figure>`;
}
