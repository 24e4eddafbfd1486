/** Where the bars of a bar chart lie, as shares of its width: as wide as Grafana's, by its defaults. */

/** The begin and the size of parts that fill so much of a whole, with equal gaps between them. */
function spread(count, filled) {
  const size = filled / count;
  const gap = (1 - filled) / (count - 1);
  const begin = (index) => (count > 1 ? index * (size + gap) : (1 - size) / 2);
  return Array.from({ length: count }, (_, index) => ({ begin: begin(index), size }));
}

const groupsOf = (count, series) => spread(count, series > 1 ? 0.7 : 0.97);

/** For each series the begins and sizes of its bars, one in each group. */
export function places(groups, series) {
  const outer = groupsOf(groups, series);
  return spread(series, series > 1 ? 0.97 : 1).map((bar) => ({
    begins: outer.map((group) => group.begin + group.size * bar.begin),
    sizes: outer.map((group) => group.size * bar.size),
  }));
}

/** The range of a scale of the groups' indices on which each index is in the middle of its group. */
export function indexRange(groups, series) {
  const [first] = groupsOf(groups, series);
  const middle = first.begin + first.size / 2;
  const least = groups > 1 ? (-middle * (groups - 1)) / (1 - 2 * middle) : -0.5;
  return [least, groups - 1 - least];
}

/** The indices of the groups whose labels have so much room. */
export function labelled(groups, width, spacing) {
  const every = spacing > 0 ? Math.max(1, Math.ceil(groups / Math.max(1, Math.floor(width / spacing)))) : 1;
  return Array.from({ length: groups }, (_, index) => index).filter((index) => index % every === 0);
}
