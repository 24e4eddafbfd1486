/** One line of coloured spans a series, drawn here: Grafana keeps its state timeline out of the published components. */
import { formattedValueToString, getFieldDisplayName } from '@grafana/data';

import { timeTicks } from './marks.js';

const AXIS = 24;

/** Runs of samples that read the same; a gap of more than one step ends a run. */
function spans(times, field) {
  const step = field.interval;
  const runs = [];
  times.forEach((time, index) => {
    const raw = field.values[index];
    if (raw == null) return;
    const shown = field.display(raw);
    const text = formattedValueToString(shown);
    const last = runs.at(-1);
    if (last && last.text === text && time - last.to <= step * 1.5) last.to = time + step;
    else {
      if (last && time < last.to) last.to = time;
      runs.push({ from: time, to: time + step, text, color: shown.color });
    }
  });
  return runs;
}

export function StateTimeline({ panel, data, range, theme, timeZone, width, height }) {
  const lines = data.flatMap((frame) => {
    const [time, ...others] = frame.fields;
    const fields = others.filter((field) => field.type !== 'time');
    return fields.map((field) => ({
      name: getFieldDisplayName(field, frame, data),
      runs: spans(time.values, { ...field, interval: time.config.interval }),
    }));
  });
  const { rowHeight = 0.9, showValue = 'auto' } = panel.options ?? {};
  const labelWidth = Math.min(width / 3, 14 + 6.5 * Math.max(...lines.map((line) => line.name.length)));
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  const across = (time) =>
    labelWidth + ((Math.min(Math.max(time, from), to) - from) / (to - from)) * (width - labelWidth);
  const lineHeight = (height - AXIS) / lines.length;
  const thick = lineHeight * rowHeight;
  const text = { fontSize: 12, fill: theme.colors.text.primary, dominantBaseline: 'middle' };
  return (
    <svg width={width} height={height}>
      {lines.map((line, row) => (
        <g key={row} transform={`translate(0 ${row * lineHeight})`}>
          <text x={labelWidth - 8} y={lineHeight / 2} textAnchor="end" {...text}>
            {line.name}
          </text>
          {line.runs.map((run) => {
            const wide = across(run.to) - across(run.from);
            const fits = showValue !== 'never' && wide > 8 + 7 * run.text.length;
            return (
              <g key={run.from}>
                <rect x={across(run.from)} y={(lineHeight - thick) / 2} width={wide} height={thick} fill={run.color} />
                {fits && (
                  <text
                    x={across(run.from) + 6}
                    y={lineHeight / 2}
                    {...text}
                    fill={theme.colors.getContrastText(run.color)}
                  >
                    {run.text}
                  </text>
                )}
              </g>
            );
          })}
        </g>
      ))}
      {timeTicks(range, width - labelWidth, timeZone).map((tick) => (
        <text key={tick.time} x={across(tick.time)} y={height - AXIS / 2} textAnchor="middle" {...text}>
          {tick.text}
        </text>
      ))}
    </svg>
  );
}
