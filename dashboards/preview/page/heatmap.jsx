/** Buckets over time, drawn here: Grafana keeps its heatmap out of the published components. */
import { formattedValueToString, getValueFormat } from '@grafana/data';
import * as schemes from 'd3-scale-chromatic';
import { useLayoutEffect, useRef } from 'react';

import { dashedLine, diamond, timeTicks } from './marks.js';

const AXIS = 24;

function colors({ scheme = 'Oranges', steps = 64, reverse = false, exponent = 0.5 } = {}) {
  const interpolate = schemes[`interpolate${scheme}`] ?? schemes.interpolateOranges;
  // Grafana draws a scheme of one colour from dark to light on a dark page.
  const flip = Boolean(schemes[`scheme${scheme}`]) && !reverse;
  return (share) => {
    const stepped = Math.round(share ** exponent * (steps - 1)) / (steps - 1);
    return interpolate(flip ? 1 - stepped : stepped);
  };
}

export function Heatmap({ panel, data, range, theme, timeZone, width, height, answers, marks }) {
  const canvas = useRef(null);
  const { options = {} } = panel;
  useLayoutEffect(() => {
    const [time, ...buckets] = data[0].fields;
    const ratio = window.devicePixelRatio;
    const context = canvas.current.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `12px ${theme.typography.fontFamily}`;
    const format = getValueFormat(options.yAxis?.unit ?? 'short');
    const labels = buckets.map((bucket) =>
      bucket.name === '+Inf' ? '+Inf' : formattedValueToString(format(Number(bucket.name), options.yAxis?.decimals)),
    );
    const left = 12 + Math.max(...labels.map((label) => context.measureText(label).width));
    const bottom = height - AXIS;
    const [from, to] = [range.from.valueOf(), range.to.valueOf()];
    const across = (one) => left + ((one - from) / (to - from)) * (width - left);
    const row = bottom / buckets.length;
    const most = Math.max(...buckets.flatMap((bucket) => bucket.values));
    const color = colors(options.color);
    const least = options.filterValues?.le ?? 1e-9;
    const { interval } = time.config;

    context.fillStyle = theme.colors.text.primary;
    context.textBaseline = 'middle';
    context.textAlign = 'right';
    const skip = Math.ceil(16 / row);
    labels.forEach((label, index) => {
      if (index % skip === 0 && bottom - row * (index + 1) > 6)
        context.fillText(label, left - 8, bottom - row * (index + 1));
    });
    context.textAlign = 'center';
    for (const { time: at, text } of timeTicks(range, width - left, timeZone))
      context.fillText(text, across(at), height - AXIS / 2);
    buckets.forEach((bucket, index) => {
      bucket.values.forEach((value, sample) => {
        if (!(value > least)) return;
        const end = Math.round(Math.min(width, across(time.values[sample])));
        const begin = Math.round(Math.max(left, across(time.values[sample] - interval)));
        context.fillStyle = color(value / most);
        context.fillRect(begin, bottom - row * (index + 1), Math.max(1, end - begin - 1), Math.max(1, row - 1));
      });
    });
    for (const mark of marks) {
      context.strokeStyle = theme.visualization.getColorByName(mark.color);
      dashedLine(context, across(mark.time * 1000), 0, bottom);
    }
    context.fillStyle = theme.visualization.getColorByName(options.exemplars?.color ?? 'light-blue');
    const bounds = buckets.map((bucket) => (bucket.name === '+Inf' ? Infinity : Number(bucket.name)));
    for (const { timestamp, value } of answers.flatMap((target) => target.exemplars)) {
      const index = bounds.findIndex((bound) => Number(value) <= bound);
      const at = across(timestamp * 1000);
      if (index >= 0 && at >= left && at <= width) diamond(context, at, bottom - row * (index + 0.5), 4);
    }
  }, [panel, data, width, height]);
  const ratio = window.devicePixelRatio;
  return <canvas ref={canvas} width={width * ratio} height={height * ratio} style={{ width, height }} />;
}
