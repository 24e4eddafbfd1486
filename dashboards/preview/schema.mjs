/** Check boards against the types of Grafana's published schema: names and values of fields, also of overrides. */
import ts from 'typescript';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

import { everyPanel } from './queries.mjs';

const HERE = dirname(fileURLToPath(import.meta.url));
const RAW = '@grafana/schema/dist/esm/raw';

/** Where the schema has a panel's options and field settings; a stat has no field settings of its own. */
const PLUGINS = {
  barchart: 'barchart/panelcfg/x/BarChartPanelCfg_types.gen',
  heatmap: 'heatmap/panelcfg/x/HeatmapPanelCfg_types.gen',
  stat: 'stat/panelcfg/x/StatPanelCfg_types.gen',
  'state-timeline': 'statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen',
  table: 'table/panelcfg/x/TablePanelCfg_types.gen',
  timeseries: 'timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen',
};
const WITHOUT_FIELDS = new Set(['stat']);
/** Kinds whose options Grafana does not publish: a board may have none. */
const UNPUBLISHED = new Set(['traces']);
const MORE_OPTIONS = { table: ' & Footer' };

/**
 * What the schema lacks: `auto*`, which the SDK writes for all variables; `definition`, a variable's query as text; an
 * annotation's query, which is its data source's; a table's `footer`, which Grafana 12 has moved to the fields.
 */
const PRELUDE = `
import type * as classic from '${RAW}/dashboard/x/Dashboard_types.gen';
${Object.entries(PLUGINS)
  .map(([name, path]) => `import type * as ${identifier(name)} from '${RAW}/composable/${path}';`)
  .join('\n')}

/** A type as it is in JSON: enums are their values, and what is left out has Grafana's default. */
type Json<T> = unknown extends T ? any
  : T extends string ? \`\${T}\`
  : T extends number ? (\`\${T}\` extends \`\${infer N extends number}\` ? N : T)
  : T extends boolean | null | undefined ? T
  : T extends readonly (infer E)[] ? Json<E>[]
  : T extends object ? { [K in keyof T]?: Json<T[K]> }
  : T;
type At<T, Path extends string> = Path extends \`\${infer Head}.\${infer Rest}\`
  ? Head extends keyof T ? At<NonNullable<T[Head]>, Rest> : never
  : Path extends keyof T ? T[Path] : never;
type Nothing = Record<never, never>;
type Fields<Custom> = Omit<Json<classic.FieldConfig>, 'custom'> & { custom?: Json<Custom> };
type Panel = Omit<Json<classic.Panel>, 'options' | 'fieldConfig' | 'targets'> & { targets?: any[] };
type Row = Omit<Json<classic.RowPanel>, 'panels'>;
type Variable = Json<classic.VariableModel> & {
  auto?: boolean; auto_min?: string; auto_count?: number; definition?: string;
};
type Annotation = Omit<Json<classic.AnnotationQuery>, 'target'> & {
  expr?: string; titleFormat?: string; textFormat?: string; target?: any;
};
type Footer = { footer?: { show?: boolean; countRows?: boolean; reducer?: string[] } };
type Dashboard = Omit<Json<classic.Dashboard>, 'panels' | 'templating' | 'annotations'>;
`;

function identifier(name) {
  return name.replace(/\W/g, '_');
}

/** The statements that TypeScript is to check, each with where it comes from in the board. */
function* statements({ panels, templating, annotations, ...rest }) {
  yield ['the board', 'Dashboard', rest];
  for (const variable of templating.list) yield [`variable ${variable.name}`, 'Variable', variable];
  for (const annotation of annotations.list) yield [`annotation ${annotation.name}`, 'Annotation', annotation];
  for (const panel of everyPanel({ panels })) {
    const { panels: inside, options, fieldConfig, ...own } = panel;
    yield [panel.title, panel.type === 'row' ? 'Row' : 'Panel', own];
    if (panel.type !== 'row') yield* ofPlugin(panel.title, panel.type, options, fieldConfig);
  }
}

/** A panel's options, its field settings, and each override by the path of the field that it changes. */
function* ofPlugin(title, type, options, fieldConfig) {
  if (UNPUBLISHED.has(type)) {
    yield [`${title}: options`, 'Record<string, never>', options];
    yield [`${title}: fields`, 'Fields<Nothing>', fieldConfig.defaults];
    return;
  }
  if (!(type in PLUGINS)) throw new Error(`${title}: no schema is known for panels of type ${type}`);
  const custom = WITHOUT_FIELDS.has(type) ? 'Nothing' : `${identifier(type)}.FieldConfig`;
  yield [`${title}: options`, `Json<${identifier(type)}.Options>${MORE_OPTIONS[type] ?? ''}`, options];
  yield [`${title}: fields`, `Fields<${custom}>`, fieldConfig.defaults];
  for (const { properties } of fieldConfig.overrides) {
    for (const { id, value } of properties) {
      const [of, path] = id.startsWith('custom.') ? [custom, id.slice('custom.'.length)] : ['classic.FieldConfig', id];
      yield [`${title}: override ${id}`, `Json<At<${of}, ${JSON.stringify(path)}>>`, value];
    }
  }
}

/** What the schema does not allow on these boards, given by their names: a line for each finding. */
export function offSchema(boards) {
  const lines = [PRELUDE];
  const places = [];
  for (const [name, board] of Object.entries(boards)) {
    for (const [where, type, value] of statements(board)) {
      places.push(`${name}: ${where}`);
      lines.push(`export const _${places.length - 1}: ${type} = ${JSON.stringify(value)};`);
    }
  }
  const before = PRELUDE.split('\n').length;
  return diagnostics(lines.join('\n')).map(({ line, message }) => {
    const place = places[line - before];
    return place === undefined ? `the check itself, line ${line + 1}: ${message}` : `${place}: ${message}`;
  });
}

/** What TypeScript says about a text that lies beside this file. */
function diagnostics(text) {
  const name = join(HERE, 'boards.ts');
  const options = {
    lib: ['lib.esnext.d.ts'],
    module: ts.ModuleKind.ESNext,
    moduleResolution: ts.ModuleResolutionKind.Bundler,
    noEmit: true,
    skipLibCheck: true,
    strict: true,
    target: ts.ScriptTarget.ESNext,
    types: [],
  };
  const host = ts.createCompilerHost(options);
  const { fileExists, getSourceFile, readFile } = host;
  host.fileExists = (path) => path === name || fileExists.call(host, path);
  host.readFile = (path) => (path === name ? text : readFile.call(host, path));
  host.getSourceFile = (path, ...rest) =>
    path === name ? ts.createSourceFile(path, text, options.target) : getSourceFile.call(host, path, ...rest);
  const program = ts.createProgram([name], options, host);
  return ts.getPreEmitDiagnostics(program).map(({ file, start, messageText }) => ({
    line: file?.getLineAndCharacterOfPosition(start).line ?? 0,
    message: ts.flattenDiagnosticMessageText(messageText, ': ').split('\n')[0],
  }));
}
