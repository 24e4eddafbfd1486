/** Prometheus's answers as Grafana's data frames, with the panel's field options and transformations applied. */
import {
  FieldConfigOptionsRegistry,
  FieldType,
  applyFieldOverrides,
  booleanOverrideProcessor,
  cacheFieldDisplayNames,
  displayNameOverrideProcessor,
  formatLabels,
  getDisplayProcessor,
  identityOverrideProcessor,
  numberOverrideProcessor,
  standardTransformers,
  standardTransformersRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  transformDataFrame,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from '@grafana/data';
import { firstValueFrom } from 'rxjs';

const PROCESSORS = {
  color: identityOverrideProcessor,
  decimals: numberOverrideProcessor,
  description: stringOverrideProcessor,
  displayName: displayNameOverrideProcessor,
  fieldMinMax: booleanOverrideProcessor,
  mappings: valueMappingsOverrideProcessor,
  max: numberOverrideProcessor,
  min: numberOverrideProcessor,
  noValue: stringOverrideProcessor,
  thresholds: thresholdsOverrideProcessor,
  unit: unitOverrideProcessor,
};

// Grafana keeps its registry of field options in its server's front end, which is not published.
function registryFor(fieldConfig) {
  const properties = fieldConfig.overrides.flatMap((override) => override.properties.map((property) => property.id));
  const custom = [...Object.keys(fieldConfig.defaults.custom ?? {}).map((key) => `custom.${key}`), ...properties]
    .filter((id) => id.startsWith('custom.'))
    .map((id) => ({ id, path: id.slice('custom.'.length), isCustom: true, process: identityOverrideProcessor }));
  const standard = Object.entries(PROCESSORS).map(([id, process]) => ({ id, path: id, process }));
  const unique = new Map(
    [...standard, ...custom].map((item) => [item.id, { shouldApply: () => true, name: item.id, ...item }]),
  );
  return new FieldConfigOptionsRegistry(() => [...unique.values()]);
}

standardTransformersRegistry.setInit(() =>
  Object.values(standardTransformers)
    .filter((transformation, index, all) => all.indexOf(transformation) === index)
    .map((transformation) => ({
      id: transformation.id,
      name: transformation.name,
      transformation: () => transformation,
    })),
);

function legend({ legendFormat }, labels) {
  if (legendFormat === '__auto') return undefined;
  if (!legendFormat) {
    const { __name__: name = '', ...others } = labels;
    return `${name}${formatLabels(others)}` || undefined;
  }
  return legendFormat.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');
}

const asNumber = (text) => (text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text));

/** The points of one series or of one instant. */
function points(series) {
  return series.values ?? [series.value];
}

function timeField(series, step) {
  return {
    name: 'Time',
    type: FieldType.time,
    config: { interval: step * 1000 },
    values: points(series).map(([time]) => time * 1000),
  };
}

function framePerSeries(target, answer) {
  const result = answer.resultType === 'scalar' ? [{ metric: {}, value: answer.result }] : answer.result;
  return result.map((series) => {
    const values = points(series).map(([, value]) => asNumber(value));
    const displayNameFromDS = legend(target, series.metric);
    const value = {
      name: 'Value',
      type: FieldType.number,
      labels: series.metric,
      config: { displayNameFromDS },
      values,
    };
    return { refId: target.refId, length: values.length, fields: [timeField(series, target.step), value] };
  });
}

function table(target, answer, tables) {
  const labels = [...new Set(answer.result.flatMap((series) => Object.keys(series.metric)))].sort();
  const rows = answer.result.flatMap((series) =>
    points(series).map(([time, value]) => ({ time, value, metric: series.metric })),
  );
  const fields = [
    { name: 'Time', type: FieldType.time, config: {}, values: rows.map((row) => row.time * 1000) },
    ...labels.map((label) => ({
      name: label,
      type: FieldType.string,
      config: { filterable: true },
      values: rows.map((row) => row.metric[label] ?? ''),
    })),
    {
      name: tables > 1 ? `Value #${target.refId}` : 'Value',
      type: FieldType.number,
      config: {},
      values: rows.map((row) => asNumber(row.value)),
    },
  ];
  return rows.length === 0 ? [] : [{ refId: target.refId, length: rows.length, fields }];
}

/** Cumulative buckets as one frame with a field per bucket, each without what the bucket below it holds. */
function heatmap(target, answer) {
  const bound = (series) => asNumber(series.metric.le);
  const buckets = answer.result.filter((series) => series.metric.le).sort((left, right) => bound(left) - bound(right));
  if (buckets.length === 0) return [];
  const times = [...new Set(buckets.flatMap((series) => points(series).map(([time]) => time)))].sort((a, b) => a - b);
  const cumulative = buckets.map((series) => new Map(points(series).map(([time, value]) => [time, asNumber(value)])));
  const fields = buckets.map((series, index) => ({
    name: series.metric.le,
    type: FieldType.number,
    config: {},
    values: times.map((time) =>
      Math.max(0, (cumulative[index].get(time) ?? 0) - (cumulative[index - 1]?.get(time) ?? 0)),
    ),
  }));
  const time = {
    name: 'Time',
    type: FieldType.time,
    config: { interval: target.step * 1000 },
    values: times.map((one) => one * 1000),
  };
  return [{ refId: target.refId, length: times.length, fields: [time, ...fields] }];
}

/** The frames of a panel as its data source gives them. */
export function rawFrames(answers) {
  const tables = answers.filter((target) => target.format === 'table').length;
  const makers = { table, heatmap };
  return answers.flatMap((target) =>
    target.answers.flatMap((answer) => (makers[target.format] ?? framePerSeries)(target, answer, tables)),
  );
}

// What Grafana takes where a panel says nothing; colours by threshold in all kinds of panel but these.
const BY_PALETTE = ['barchart', 'timeseries'];
function defaultsOf(type) {
  const steps = [
    { value: null, color: 'green' },
    { value: 80, color: 'red' },
  ];
  return {
    color: { mode: BY_PALETTE.includes(type) ? 'palette-classic' : 'thresholds' },
    thresholds: { mode: 'absolute', steps },
  };
}

/** The field options of a panel, its links left out: nobody can follow one in a picture. */
function fieldOptions({ type, fieldConfig }) {
  const { links, ...own } = fieldConfig?.defaults ?? {};
  const defaults = { ...defaultsOf(type), ...own };
  const overrides = (fieldConfig?.overrides ?? []).map((override) => ({
    ...override,
    properties: override.properties.filter((property) => property.id !== 'links'),
  }));
  return { defaults, overrides };
}

/** The frames of a panel as it draws them, and its field options. */
export async function panelFrames(panel, answers, { theme, timeZone, replace }) {
  const transformations = (panel.transformations ?? []).filter((one) => !one.disabled);
  const unknown = transformations.find((one) => !standardTransformersRegistry.getIfExists(one.id));
  if (unknown) throw new Error(`transformation ${unknown.id} is not among the published ones`);
  const frames = rawFrames(answers);
  const transformed = await firstValueFrom(transformDataFrame(transformations, frames, { interpolate: replace }));
  const fieldConfig = fieldOptions(panel);
  const data = applyFieldOverrides({
    data: transformed,
    fieldConfig,
    fieldConfigRegistry: registryFor(fieldConfig),
    replaceVariables: replace,
    theme,
    timeZone,
  });
  for (const frame of data) {
    for (const field of frame.fields) field.display ??= getDisplayProcessor({ field, theme, timeZone });
  }
  cacheFieldDisplayNames(data);
  return { data, fieldConfig };
}
