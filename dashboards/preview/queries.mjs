/** Ask Prometheus what a board's panels ask, with the board's variables filled in as Grafana fills them. */

const DURATION_SECONDS = { ms: 0.001, s: 1, m: 60, h: 3600, d: 86400, w: 604800 };
const NICE_STEPS = [
  1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
];
const PIXELS_A_COLUMN = 64;

/** Read a duration such as 15s or 1h30m, in seconds. */
export function seconds(text) {
  const parts = [...String(text).matchAll(/(\d+(?:\.\d+)?)(ms|[smhdw])/g)];
  if (parts.length === 0 || parts.map((part) => part[0]).join('') !== String(text)) {
    throw new Error(`"${text}" is no duration: write for instance 15s, 5m or 1h30m`);
  }
  return parts.reduce((sum, [, number, unit]) => sum + Number(number) * DURATION_SECONDS[unit], 0);
}

/** Every panel of a board, those inside collapsed rows too. */
export function everyPanel(board) {
  return board.panels.flatMap((panel) => [panel, ...(panel.panels ?? [])]);
}

/** Escape a value for a regular expression in a PromQL string, where a backslash is doubled. */
function escaped(value) {
  return value.replace(/[\\^$*+?.()|[\]{}]/g, '\\\\$&');
}

/** Put values in for $name, ${name}, ${name:format} and [[name]]; several become (a|b). A name without a value stays. */
export function interpolate(text, values) {
  return String(text).replace(/\$(\w+)|\$\{(\w+)(?::\w+)?\}|\[\[(\w+)\]\]/g, (whole, plain, braced, square) => {
    const value = values[plain ?? braced ?? square];
    if (value === undefined) return whole;
    if (!Array.isArray(value)) return value;
    return value.length === 1 ? escaped(value[0]) : `(${value.map(escaped).join('|')})`;
  });
}

export class Prometheus {
  constructor(url) {
    this.url = url.replace(/\/$/, '');
  }

  async ask(path, parameters) {
    const url = `${this.url}/api/v1/${path}`;
    let answer;
    try {
      answer = await fetch(url, { method: 'POST', body: new URLSearchParams(parameters) });
    } catch (error) {
      throw new Error(`No Prometheus answers at ${url}: ${error.cause?.message ?? error.message}`);
    }
    const body = await answer.json().catch(() => {
      throw new Error(`What answers at ${url} is no Prometheus: HTTP ${answer.status}`);
    });
    if (body.status !== 'success') throw new Error(body.error ?? `HTTP ${answer.status}`);
    return body.data;
  }

  /** The values of a variable's label_values(label) or label_values(metric, label). */
  async labelValues(query, range) {
    const call = /^\s*label_values\(\s*(?:(.*),)?\s*(\w+)\s*\)\s*$/s.exec(query);
    if (!call) throw new Error(`Only label_values(...) is known here, found ${query}`);
    const parameters = { start: range.from, end: range.to, 'match[]': call[1]?.trim() || '{__name__=~".+"}' };
    const series = await this.ask('series', parameters);
    return [...new Set(series.map((labels) => labels[call[2]]).filter(Boolean))].sort();
  }
}

/** The board's variables: what is chosen on the command line, else the board's default, else all or the first. */
export async function variables(board, prometheus, range, chosen) {
  const values = {};
  const names = (board.templating?.list ?? []).map((variable) => variable.name);
  const wrong = Object.keys(chosen).find((name) => !names.includes(name));
  if (wrong !== undefined) throw new Error(`Board ${board.uid} has no variable "${wrong}"; it has ${names.join(', ')}`);
  for (const variable of board.templating?.list ?? []) {
    const { name, type } = variable;
    if (type === 'adhoc') continue;
    const current = [variable.current?.value ?? []].flat().filter((value) => value !== '');
    if (chosen[name] !== undefined) values[name] = variable.multi ? chosen[name].split(',') : chosen[name];
    else if (type === 'datasource') values[name] = `${variable.query} of this preview`;
    else if (variable.includeAll && (current.length === 0 || current[0] === '$__all')) {
      values[name] = variable.allValue || '.+';
    } else if (current.length > 0) values[name] = variable.multi ? current : current[0];
    else if (type === 'query') {
      const query = interpolate(variable.query?.query ?? variable.query, values);
      values[name] = (await prometheus.labelValues(query, range))[0] ?? '';
    } else values[name] = [variable.query ?? ''].flat()[0].split(',')[0].trim();
  }
  return values;
}

/** Grafana's own variables: the panel's interval by its width, the step and $__rate_interval by the target's own too. */
function builtIn(panel, target, range, scrapeSeconds) {
  const length = range.to - range.from;
  const points = panel.maxDataPoints ?? (panel.gridPos?.w ?? 12) * PIXELS_A_COLUMN;
  const least = panel.interval ? seconds(panel.interval) : scrapeSeconds;
  const interval = length / points <= least ? least : (NICE_STEPS.find((nice) => nice >= length / points) ?? 86400);
  const asked = target.interval ? seconds(target.interval) : scrapeSeconds;
  const step = Math.max(interval, asked);
  const rate = Math.max(interval + asked, 4 * asked);
  return {
    step,
    values: {
      __interval: `${step}s`,
      __interval_ms: `${step * 1000}`,
      __rate_interval: `${rate}s`,
      __range: `${length}s`,
      __range_s: `${length}`,
      __range_ms: `${length * 1000}`,
    },
  };
}

/** The exemplars that Grafana shows: of each step the highest, and those more than two deviations below the one before. */
function sampled(exemplars, step, range) {
  const points = exemplars
    .map(({ timestamp, value }) => ({ timestamp, value: Number(value) }))
    .filter(({ timestamp }) => timestamp >= range.from && timestamp <= range.to);
  const mean = points.reduce((sum, { value }) => sum + value, 0) / points.length;
  const deviation = Math.sqrt(points.reduce((sum, { value }) => sum + (value - mean) ** 2, 0) / points.length);
  const kept = new Map();
  for (const point of points.sort((left, right) => right.value - left.value || left.timestamp - right.timestamp)) {
    const bucket = Math.floor(point.timestamp / step);
    const before = kept.get(bucket)?.at(-1);
    if (!before) kept.set(bucket, [point]);
    else if (before.value - point.value > 2 * deviation) kept.get(bucket).push(point);
  }
  return [...kept.values()].flat();
}

/** Ask one target of a panel; an error is part of the answer, as it is part of a panel. */
async function answer(panel, target, values, prometheus, range, scrapeSeconds) {
  const { step, values: own } = builtIn(panel, target, range, scrapeSeconds);
  const expr = interpolate(target.expr, { ...values, ...own });
  const { refId, format = 'time_series', legendFormat = '' } = target;
  const results = { refId, format, legendFormat, expr, step, answers: [], exemplars: [] };
  // Grafana begins and ends at multiples of the step.
  const aligned = { start: Math.floor(range.from / step) * step, end: Math.floor(range.to / step) * step, step };
  try {
    if (target.instant) results.answers.push(await prometheus.ask('query', { query: expr, time: range.to }));
    if (target.range || !target.instant)
      results.answers.push(await prometheus.ask('query_range', { query: expr, ...aligned }));
    if (target.exemplar) {
      const found = await prometheus.ask('query_exemplars', { query: expr, start: range.from, end: range.to });
      const all = found.flatMap((series) => series.exemplars);
      results.exemplars = sampled(all, step, range);
    }
  } catch (error) {
    results.error = error.message;
  }
  return results;
}

/** Which kind of data source a target asks: its own, else its panel's. */
export function sourceOf(panel, target) {
  return target?.datasource?.type ?? panel.datasource?.type ?? 'prometheus';
}

/** The answers to all targets of all panels, by panel id. */
export async function panelAnswers(board, values, prometheus, range, scrapeSeconds) {
  const answers = {};
  for (const panel of everyPanel(board)) {
    const targets = (panel.targets ?? []).filter((target) => !target.hide && sourceOf(panel, target) === 'prometheus');
    answers[panel.id] = await Promise.all(
      targets.map((target) => answer(panel, target, values, prometheus, range, scrapeSeconds)),
    );
  }
  return answers;
}

/** When each annotation of the board begins, in seconds, with its colour. */
export async function annotationMarks(board, values, prometheus, range, scrapeSeconds) {
  const asked = (board.annotations?.list ?? []).filter(
    (one) => one.enable && one.expr && one.datasource?.type === 'prometheus',
  );
  const marks = [];
  for (const { expr, iconColor, name } of asked) {
    const target = { expr, refId: name, range: true };
    const { answers, step, error } = await answer({}, target, values, prometheus, range, scrapeSeconds);
    if (error) console.error(`Annotation "${name}": ${error}`);
    for (const series of answers[0]?.result ?? []) {
      let last = -Infinity;
      for (const [time] of series.values) {
        if (time - last > step * 1.5 && time > range.from) marks.push({ time, color: iconColor, name });
        last = time;
      }
    }
  }
  return marks;
}
