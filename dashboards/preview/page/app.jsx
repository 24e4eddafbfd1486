/** A board on one page: its title and choices, then its rows and panels where the board places them. */
import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import '@fontsource/roboto-mono/400.css';
import 'uplot/dist/uPlot.min.css';

import { ThemeContext, createTheme, dateTime, dateTimeFormat } from '@grafana/data';
import { GlobalStyles, PanelChrome } from '@grafana/ui';
import { Component } from 'react';
import { createRoot } from 'react-dom/client';

import { interpolate, sourceOf } from '../queries.mjs';
import { panelFrames } from './frames.js';
import { KINDS, SAY_NO_DATA, hasData } from './panels.jsx';

const COLUMNS = 24;
const CELL = 30;
const GAP = 8;
const MARGIN = 16;
const CAPTION = 'Preview with Grafana’s panel components, not Grafana itself';

const theme = createTheme({ colors: { mode: 'dark' } });
const timeZone = 'utc';
const complaints = [];

/** Fill in variables, and ${__field.labels.x} where Grafana says which field is meant. */
function replacer(values) {
  return (text, scoped) => {
    const field = scoped?.__dataContext?.value?.field;
    const named = String(text).replace(
      /\$\{__field\.labels\.(\w+)\}/g,
      (whole, label) => field?.labels?.[label] ?? whole,
    );
    return interpolate(named, values);
  };
}

class Guard extends Component {
  state = {};
  static getDerivedStateFromError = (error) => ({ error });
  componentDidCatch = (error) => complaints.push(`${this.props.name}: failed: ${error.message}`);
  render() {
    return this.state.error ? <Note text={`Failed: ${this.state.error.message}`} /> : this.props.children;
  }
}

function Note({ text }) {
  const style = {
    display: 'flex',
    height: '100%',
    alignItems: 'center',
    justifyContent: 'center',
    color: theme.colors.text.secondary,
  };
  return <div style={style}>{text}</div>;
}

function body(panel, context) {
  const { data, answers, name } = panel;
  const stray = (panel.targets ?? []).map((target) => sourceOf(panel, target)).find((type) => type !== 'prometheus');
  if (stray || panel.type === 'traces')
    return () => <Note text={`Needs ${stray === 'tempo' || !stray ? 'Tempo' : stray}`} />;
  const Kind = KINDS[panel.type];
  if (!Kind) {
    complaints.push(`${name}: panel type ${panel.type} is not drawn here`);
    return () => <Note text={`No preview of ${panel.type}`} />;
  }
  const failed = answers.find((target) => target.error);
  if (failed) {
    complaints.push(`${name}: ${failed.refId}: ${failed.error}`);
    return () => <Note text={failed.error} />;
  }
  if (panel.type !== 'text' && !hasData(data)) {
    complaints.push(`${name}: no data`);
    if (!SAY_NO_DATA.has(panel.type)) return () => <Note text={panel.fieldConfig?.defaults?.noValue ?? 'No data'} />;
  }
  return (width, height) => (
    <Guard name={name}>
      <Kind panel={panel} {...panel} {...context} width={width} height={height} />
    </Guard>
  );
}

/** Panels and row titles with the places where they come to lie; opening a row moves what is below it. */
function place(panels, openRows) {
  const placed = [];
  let shift = 0;
  for (const panel of panels) {
    const y = panel.gridPos.y + shift;
    placed.push({ panel, ...panel.gridPos, y });
    const inner = panel.panels ?? [];
    if (panel.type !== 'row' || !openRows || inner.length === 0) continue;
    const top = Math.min(...inner.map((one) => one.gridPos.y));
    placed.push(...inner.map((one) => ({ panel: one, ...one.gridPos, y: one.gridPos.y - top + y + 1 })));
    shift += Math.max(...inner.map((one) => one.gridPos.y + one.gridPos.h)) - top;
  }
  return placed;
}

/** A variable's values as Grafana shows them. */
function asText(value) {
  return [value]
    .flat()
    .map((one) => (/^\.[+*]$/.test(one) ? 'All' : one))
    .join(' + ');
}

function RowTitle({ title, panels, open }) {
  const style = { fontSize: 17, fontWeight: 500, color: theme.colors.text.primary, lineHeight: `${CELL}px` };
  const count = panels?.length > 0 && !open ? ` (${panels.length} panel${panels.length > 1 ? 's' : ''})` : '';
  return (
    <div style={style}>
      <span style={{ display: 'inline-block', width: 22 }}>{panels?.length > 0 && !open ? '›' : '⌄'}</span>
      {title}
      <span style={{ color: theme.colors.text.secondary, fontSize: 13 }}>{count}</span>
    </div>
  );
}

function Header({ board, range, values }) {
  const secondary = { color: theme.colors.text.secondary };
  const pill = { background: theme.colors.background.secondary, borderRadius: 2, padding: '4px 8px', marginRight: 8 };
  const when = (time) => dateTimeFormat(time, { format: 'YYYY-MM-DD HH:mm:ss', timeZone });
  const shown = (board.templating?.list ?? []).filter(
    (one) => one.type !== 'adhoc' && one.hide !== 2 && one.hide !== 'hideVariable',
  );
  return (
    <div style={{ margin: `0 ${MARGIN}px`, height: 84 }}>
      <div style={{ display: 'flex', justifyContent: 'space-between', alignItems: 'baseline', padding: '12px 0 10px' }}>
        <span style={{ fontSize: 20 }}>{board.title}</span>
        <span style={secondary}>{CAPTION}</span>
        <span>
          {when(range.from)} to {when(range.to)} UTC
        </span>
      </div>
      <div style={{ fontSize: 12 }}>
        {shown.map(({ name, label }) => (
          <span key={name} style={pill}>
            <span style={secondary}>{label || name}</span> {asText(values[name])}
          </span>
        ))}
      </div>
    </div>
  );
}

function Board({ board, values, range, placed, context, openRows, width }) {
  const shown = Object.fromEntries(Object.entries(values).map(([name, value]) => [name, asText(value)]));
  const title = (panel) => interpolate(panel.title ?? '', shown);
  const column = (width - 2 * MARGIN + GAP) / COLUMNS;
  const bottom = Math.max(...placed.map(({ y, h }) => y + h));
  return (
    <div style={{ width, background: theme.colors.background.canvas }}>
      <Header {...{ board, range, values }} />
      <div style={{ position: 'relative', height: bottom * (CELL + GAP) + GAP }}>
        {placed.map(({ panel, x, y, w, h }) => {
          const size = { width: w * column - GAP, height: h * (CELL + GAP) - GAP };
          const style = { position: 'absolute', left: MARGIN + x * column, top: y * (CELL + GAP), ...size };
          const inside =
            panel.type === 'row' ? (
              <RowTitle {...panel} title={title(panel)} open={!panel.collapsed || openRows} />
            ) : (
              <PanelChrome
                {...size}
                title={title(panel)}
                description={panel.description}
                displayMode={panel.transparent ? 'transparent' : 'default'}
                padding={panel.type === 'table' ? 'none' : 'md'}
              >
                {body(panel, context)}
              </PanelChrome>
            );
          return (
            <div key={panel.id} style={style}>
              {inside}
            </div>
          );
        })}
      </div>
    </div>
  );
}

/** Draw a board, and give back what is wrong with its panels. */
window.draw = async ({ board, values, answers, marks, from, to, openRows, width }) => {
  const range = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: `${from}`, to: `${to}` } };
  const context = { theme, timeZone, range, marks, replace: replacer(values) };
  const placed = place(board.panels, openRows);
  for (const place of placed) {
    const { panel } = place;
    const own = {
      answers: answers[panel.id] ?? [],
      name: `"${panel.title || panel.type}" (id ${panel.id})`,
      data: [],
      fieldConfig: panel.fieldConfig,
    };
    try {
      Object.assign(own, await panelFrames(panel, own.answers, context));
    } catch (error) {
      complaints.push(`${own.name}: failed: ${error.message}`);
    }
    place.panel = { ...panel, ...own };
  }
  // Text on canvases is measured and drawn at once, so its fonts must be there first.
  await Promise.all(
    ['400 12px Inter', '500 12px Inter', '400 12px "Roboto Mono"'].map((font) => document.fonts.load(font)),
  );
  createRoot(document.getElementById('board')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Board {...{ board, values, range: { from: from * 1000, to: to * 1000 }, placed, context, openRows, width }} />
    </ThemeContext.Provider>,
  );
  await new Promise((resolve) => requestIdleCallback(resolve));
};
window.complaints = complaints;
