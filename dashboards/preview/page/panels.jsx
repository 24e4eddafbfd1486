/** The kinds of panel, each as Grafana's component for it or as near to it as a picture needs. */
import {
  VizOrientation,
  getDisplayValueAlignmentFactors,
  getFieldColorModeForField,
  getFieldDisplayValues,
  getFieldSeriesColor,
  renderTextPanelMarkdown,
} from '@grafana/data';
import { BarGauge, BigValue, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { useMemo, useRef } from 'react';

import { BarChart } from './barchart.jsx';
import { Gauge } from './gauge.jsx';
import { Heatmap } from './heatmap.jsx';
import { markTimes } from './marks.js';
import { StateTimeline } from './statetimeline.jsx';

function reduced({ panel, data, fieldConfig, theme, replace, timeZone, range }, sparkline) {
  const reduceOptions = { values: false, calcs: ['lastNotNull'], fields: '', ...panel.options?.reduceOptions };
  const values = getFieldDisplayValues({
    fieldConfig,
    reduceOptions,
    replaceVariables: replace,
    theme,
    data,
    sparkline,
    timeZone,
  });
  for (const value of values) if (value.sparkline) value.sparkline.timeRange = range;
  return values;
}

function Repeated({ values, children, ...props }) {
  return (
    <VizRepeater
      getValues={() => values}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={children}
      source={values}
      renderCounter={0}
      {...props}
    />
  );
}

function Stat(props) {
  const { panel, fieldConfig, theme, width, height } = props;
  const options = {
    colorMode: 'value',
    graphMode: 'area',
    justifyMode: 'auto',
    textMode: 'auto',
    wideLayout: true,
    ...panel.options,
  };
  const named = options.textMode === 'auto' && fieldConfig.defaults.displayName;
  const values = reduced(props, options.graphMode !== 'none');
  return (
    <Repeated
      values={values}
      width={width}
      height={height}
      itemSpacing={3}
      autoGrid
      orientation={options.orientation ?? VizOrientation.Auto}
    >
      {({ value, width, height, count, orientation, alignmentFactors }) => (
        <BigValue
          value={value.display}
          sparkline={value.sparkline}
          colorMode={options.colorMode}
          graphMode={options.graphMode}
          justifyMode={options.justifyMode}
          textMode={named ? 'value_and_name' : options.textMode}
          wideLayout={options.wideLayout}
          text={options.text}
          percentChangeColorMode={options.percentChangeColorMode}
          {...{ alignmentFactors, count, width, height, theme, parentOrientation: orientation }}
        />
      )}
    </Repeated>
  );
}

function Bars(props) {
  const { panel, theme, width, height } = props;
  const options = {
    displayMode: 'gradient',
    showUnfilled: true,
    minVizWidth: 8,
    minVizHeight: 16,
    maxVizHeight: 300,
    ...panel.options,
  };
  const values = reduced(props, false);
  return (
    <Repeated
      values={values}
      width={width}
      height={height}
      itemSpacing={options.displayMode === 'lcd' ? 2 : 10}
      orientation={options.orientation ?? VizOrientation.Auto}
      minVizWidth={options.minVizWidth}
      minVizHeight={options.minVizHeight}
      maxVizHeight={options.maxVizHeight}
    >
      {({ value, width, height, orientation, alignmentFactors }) => (
        <BarGauge
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          displayMode={options.displayMode}
          showUnfilled={options.showUnfilled}
          valueDisplayMode={options.valueMode}
          namePlacement={options.namePlacement}
          text={options.text}
          {...{ orientation, alignmentFactors, width, height, theme }}
        />
      )}
    </Repeated>
  );
}

function Gauges(props) {
  const { panel, theme, width, height } = props;
  return (
    <Repeated
      values={reduced(props, false)}
      width={width}
      height={height}
      itemSpacing={8}
      orientation={panel.options?.orientation ?? VizOrientation.Auto}
    >
      {({ value, width, height }) => <Gauge {...{ value, theme, width, height }} />}
    </Repeated>
  );
}

/** The frame as Grafana's panel hands it to the chart: what is not finite is a gap. */
function drawable(frame, theme) {
  const finite = (value) => (Number.isFinite(value) ? value : null);
  const fields = frame.fields.map((field) => {
    if (field.type !== 'number') return field;
    // The chart joins the series and loses their names, so a colour that follows from the name is fixed before.
    const fixed = { mode: 'fixed', fixedColor: getFieldSeriesColor(field, theme).color };
    const color = getFieldColorModeForField(field).isByValue ? field.config.color : fixed;
    return { ...field, config: { ...field.config, color }, values: field.values.map(finite) };
  });
  return { ...frame, fields };
}

function Lines({ panel, data, range, timeZone, theme, width, height, answers, marks, replace }) {
  const hooked = useRef(null);
  const frames = useMemo(() => data.map((frame) => drawable(frame, theme)), [data]);
  const hook = (builder) => {
    if (hooked.current !== builder) {
      markTimes(
        builder,
        marks,
        answers.flatMap((target) => target.exemplars),
        theme,
      );
      hooked.current = builder;
    }
    return null;
  };
  const legend = { showLegend: true, displayMode: 'list', placement: 'bottom', calcs: [], ...panel.options?.legend };
  return (
    <TimeSeries
      frames={frames}
      timeRange={range}
      options={panel.options}
      replaceVariables={replace}
      {...{ legend, timeZone, width, height }}
    >
      {hook}
    </TimeSeries>
  );
}

function Grid({ panel, data, fieldConfig, range, width, height }) {
  const { options = {} } = panel;
  return (
    <TableNG
      data={data[0]}
      fieldConfig={fieldConfig}
      timeRange={range}
      noHeader={options.showHeader === false}
      sortBy={options.sortBy}
      cellHeight={options.cellHeight}
      frozenColumns={options.frozenColumns?.left}
      enableVirtualization={false}
      getActions={() => []}
      {...{ width, height }}
    />
  );
}

function Text({ panel, replace }) {
  const { mode, content } = panel.options;
  const html = mode === 'html' ? replace(content) : renderTextPanelMarkdown(replace(content));
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: html }} />;
}

export const KINDS = {
  barchart: BarChart,
  bargauge: Bars,
  gauge: Gauges,
  heatmap: Heatmap,
  stat: Stat,
  'state-timeline': StateTimeline,
  table: Grid,
  text: Text,
  timeseries: Lines,
};

/** Kinds that say themselves that they have no data. */
export const SAY_NO_DATA = new Set(['stat', 'gauge', 'bargauge', 'text']);

/** Whether the frames hold any value at all. */
export function hasData(data) {
  return data.some((frame) =>
    frame.fields.some(
      (field) => field.type !== 'time' && field.values.some((value) => value != null && !Number.isNaN(value)),
    ),
  );
}
