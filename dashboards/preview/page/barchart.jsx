/** Bars over the values of a field: axes, scales, legend and plot are Grafana's, which publishes no bar chart. */
import {
  formattedValueToString,
  getFieldColorModeForField,
  getFieldDisplayName,
  getFieldSeriesColor,
} from '@grafana/data';
import { AxisPlacement, GraphGradientMode, ScaleDirection, ScaleDistribution, ScaleOrientation } from '@grafana/schema';
import { PlotLegend, UPlotChart, UPlotConfigBuilder, VizLayout } from '@grafana/ui';
import { useMemo } from 'react';
import uPlot from 'uplot';

import { indexRange, labelled, places } from './bars.js';

const finite = (value) => (Number.isFinite(value) ? value : null);
const text = (field, value, decimals) => formattedValueToString(field.display(value, decimals));

/** The frame with the field of the x axis first, then those of the bars, each with the colour of its place. */
function ordered([frame], xField) {
  const x = frame.fields.find((field) => getFieldDisplayName(field, frame) === xField) ?? frame.fields[0];
  const bars = frame.fields.filter((field) => field !== x && field.type === 'number');
  const colored = bars.map((field, seriesIndex) => ({
    ...field,
    values: field.values.map(finite),
    state: { ...field.state, seriesIndex },
  }));
  return { ...frame, fields: [x, ...colored] };
}

function configured(frame, { theme, timeZone, options }) {
  const [x, ...bars] = frame.fields;
  const builder = new UPlotConfigBuilder(timeZone);
  const laid = places(frame.length, bars.length);
  const pathBuilder = uPlot.paths.bars({
    disp: {
      x0: { unit: 2, values: (plot, series) => laid[series - 1].begins },
      size: { unit: 2, values: (plot, series) => laid[series - 1].sizes },
    },
  });
  builder.addScale({
    scaleKey: 'x',
    isTime: false,
    distribution: ScaleDistribution.Ordinal,
    orientation: ScaleOrientation.Horizontal,
    direction: ScaleDirection.Right,
    range: () => indexRange(frame.length, bars.length),
  });
  builder.addAxis({
    scaleKey: 'x',
    isTime: false,
    placement: AxisPlacement.Bottom,
    label: x.config.custom?.axisLabel,
    splits: (plot) => labelled(frame.length, plot.bbox.width / uPlot.pxRatio, options.xTickLabelSpacing),
    values: (plot, splits) => splits.map((value) => text(x, value)),
    grid: { show: false },
    ticks: { show: false },
    gap: 15,
    theme,
  });
  bars.forEach((field, index) => {
    const scaleKey = field.config.unit ?? '__fixed';
    const { lineWidth = 1, fillOpacity = 80, axisPlacement = AxisPlacement.Left } = field.config.custom ?? {};
    builder.addSeries({
      scaleKey,
      theme,
      lineWidth,
      fillOpacity,
      pathBuilder,
      pxAlign: true,
      lineColor: getFieldSeriesColor(field, theme).color,
      colorMode: getFieldColorModeForField(field),
      gradientMode: GraphGradientMode.None,
      dataFrameFieldIndex: { fieldIndex: index + 1, frameIndex: 0 },
    });
    const { min, max } = field.config;
    const upwards = { orientation: ScaleOrientation.Vertical, direction: ScaleDirection.Up };
    builder.addScale({ scaleKey, min, max, softMin: min ?? 0, ...upwards });
    const formatValue = (value, decimals) => text(field, value, decimals);
    builder.addAxis({ scaleKey, theme, placement: axisPlacement, formatValue });
  });
  return builder;
}

export function BarChart({ panel, data, theme, timeZone, width, height }) {
  const { options = {} } = panel;
  const frame = useMemo(() => ordered(data, options.xField), [data]);
  const config = useMemo(() => configured(frame, { theme, timeZone, options }), [frame]);
  const legend = { showLegend: true, displayMode: 'list', placement: 'bottom', calcs: [], ...options.legend };
  return (
    <VizLayout
      width={width}
      height={height}
      legend={legend.showLegend ? <PlotLegend data={[frame]} config={config} {...legend} /> : null}
    >
      {(width, height) => (
        <UPlotChart data={frame.fields.map((field) => field.values)} {...{ config, width, height }} />
      )}
    </VizLayout>
  );
}
