/** Times and marks that the charts share: ticks, annotations as dashed lines, exemplars as diamonds. */
import { dateTimeFormat } from '@grafana/data';

const NICE_TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
const ROOM_FOR_A_TICK = 90;

/** Round times in a range that leave each other room, with their text. */
export function timeTicks(range, width, timeZone) {
  const [from, to] = [range.from.valueOf() / 1000, range.to.valueOf() / 1000];
  const least = ((to - from) * ROOM_FOR_A_TICK) / width;
  const every = NICE_TICKS.find((nice) => nice >= least) ?? NICE_TICKS.at(-1);
  const format = every < 60 ? 'HH:mm:ss' : 'HH:mm';
  const ticks = [];
  for (let at = Math.ceil((from + least / 2) / every) * every; at < to - least / 3; at += every) {
    ticks.push({ time: at * 1000, text: dateTimeFormat(at * 1000, { format, timeZone }) });
  }
  return ticks;
}

export function diamond(context, x, y, size) {
  context.beginPath();
  context.moveTo(x, y - size);
  context.lineTo(x + size, y);
  context.lineTo(x, y + size);
  context.lineTo(x - size, y);
  context.closePath();
  context.fill();
}

export function dashedLine(context, x, top, height) {
  context.setLineDash([4, 4]);
  context.beginPath();
  context.moveTo(x, top);
  context.lineTo(x, top + height);
  context.stroke();
  context.setLineDash([]);
}

export function markTimes(builder, marks, exemplars, theme) {
  builder.addHook('draw', (plot) => {
    const { ctx: context, bbox } = plot;
    const scale = plot.series[1]?.scale;
    context.save();
    for (const { time, color } of marks) {
      context.strokeStyle = theme.visualization.getColorByName(color);
      dashedLine(context, plot.valToPos(time * 1000, 'x', true), bbox.top, bbox.height);
    }
    context.fillStyle = theme.visualization.getColorByName('light-blue');
    for (const { timestamp, value } of scale ? exemplars : []) {
      const x = plot.valToPos(timestamp * 1000, 'x', true);
      const y = Math.max(bbox.top, plot.valToPos(Number(value), scale, true));
      if (x >= bbox.left && x <= bbox.left + bbox.width) diamond(context, x, y, 4);
    }
    context.restore();
  });
}
