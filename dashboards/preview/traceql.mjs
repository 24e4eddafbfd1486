/** Parse the TraceQL of boards with the grammar of Grafana's own editor. */
import { parser } from '@grafana/lezer-traceql';

import { everyPanel, sourceOf } from './queries.mjs';

/** Where the grammar finds an error in a query, or undefined. */
export function traceqlError(query) {
  let at;
  parser.parse(query).iterate({
    enter(node) {
      if (node.type.isError) at ??= node.from;
    },
  });
  return at;
}

/** A variable alone stands for a trace's id, which is no TraceQL. */
const ID = /^\$\{\w+\}$/;

/** Each TraceQL query of a board, classic or dynamic, with its panel's title. */
export function traceqlQueries(board) {
  return tempoQueries(board).filter(([, query]) => !ID.test(query));
}

function tempoQueries(board) {
  if (board.spec?.elements) {
    return Object.values(board.spec.elements).flatMap(({ spec }) =>
      spec.data.spec.queries
        .map(({ spec: { query } }) => query)
        .filter(({ group }) => group === 'tempo')
        .map(({ spec: query }) => [spec.title, query.query]),
    );
  }
  return everyPanel(board).flatMap((panel) =>
    (panel.targets ?? [])
      .filter((target) => sourceOf(panel, target) === 'tempo')
      .map((target) => [panel.title, target.query]),
  );
}

/** What the grammar does not take on these boards, given by their names: a line for each finding. */
export function offGrammar(boards) {
  return Object.entries(boards).flatMap(([name, board]) =>
    traceqlQueries(board).flatMap(([title, query]) => {
      const at = traceqlError(query);
      return at === undefined ? [] : [`${name}: ${title}: no TraceQL from "${query.slice(at, at + 20)}" on: ${query}`];
    }),
  );
}
