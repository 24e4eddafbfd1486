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

/** Each TraceQL query of a board, with its panel's title. */
export function traceqlQueries(board) {
  return everyPanel(board).flatMap((panel) =>
    (panel.targets ?? [])
      .filter((target) => sourceOf(panel, target) === 'tempo' && !ID.test(target.query))
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
