// Series in the format of uPlot: one x for all, a value or a gap for each. No value is interpolated.

const MAX_CELLS = 300000;

/** Smooth exponentially, without a bias to zero at the start. Gaps remain gaps. */
export function smoothed(ys, weight) {
  if (!weight) return ys;
  let sum = 0;
  let scale = 0;
  return ys.map((y) => {
    if (y === null || y === undefined) return y;
    sum = sum * weight + y * (1 - weight);
    scale = scale * weight + (1 - weight);
    return sum / scale;
  });
}

/** Insert a gap if a series has no value for 8 times the median step. A lost learner must not look like a line. */
export function withGaps(xs, ys) {
  if (xs.length < 8) return [xs, ys];
  const steps = [];
  for (let i = 1; i < xs.length; i += 1) steps.push(xs[i] - xs[i - 1]);
  const median = steps.toSorted((a, b) => a - b)[steps.length >> 1];
  const outX = [xs[0]];
  const outY = [ys[0]];
  for (let i = 1; i < xs.length; i += 1) {
    if (median > 0 && steps[i - 1] > median * 8) {
      outX.push((xs[i] + xs[i - 1]) / 2);
      outY.push(null);
    }
    outX.push(xs[i]);
    outY.push(ys[i]);
  }
  return [outX, outY];
}

const same = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);

/** Return [x, y1, y2, ...]; `join` is uPlot.join. */
export function table(series, { weight = 0, log = false, gaps = false, points = 600 }, join) {
  const parts = series.map(({ x, y }) => {
    const values = smoothed(y, weight).map((v) =>
      v === null || v === undefined || !Number.isFinite(v) || (log && v <= 0) ? null : v,
    );
    return gaps ? withGaps(x, values) : [x, values];
  });
  if (!parts.length) return [[]];
  if (parts.every(([x]) => same(x, parts[0][0]))) return [parts[0][0], ...parts.map(([, y]) => y)];
  const cells = parts.reduce((sum, [x]) => sum + x.length, 0) * parts.length;
  if (cells <= MAX_CELLS) {
    const [x, ...columns] = join(
      parts,
      parts.map(() => [1, 1]),
    );
    for (const column of columns) widenGaps(column);
    return [x, ...columns];
  }
  return onGrid(parts, points);
}

/** Extend gaps of a joined column over the points that only other series have. Otherwise a line would cross the gap. */
function widenGaps(column) {
  for (const step of [1, -1]) {
    let gap = false;
    for (let i = step > 0 ? 0 : column.length - 1; i >= 0 && i < column.length; i += step) {
      if (column[i] !== undefined) gap = column[i] === null;
      else if (gap) column[i] = null;
    }
  }
}

/** Resample many series to a common grid: at each point the newest value that is not older than one grid step. */
function onGrid(parts, points) {
  let low = Infinity;
  let high = -Infinity;
  for (const [x] of parts) {
    if (!x.length) continue;
    low = Math.min(low, x[0]);
    high = Math.max(high, x.at(-1));
  }
  if (!(high > low)) return [[], ...parts.map(() => [])];
  const grid = Array.from({ length: points }, (_, i) => low + ((high - low) * i) / (points - 1));
  const columns = parts.map(([x, y]) => {
    let index = -1;
    return grid.map((at, i) => {
      const before = i ? grid[i - 1] : -Infinity;
      while (index + 1 < x.length && x[index + 1] <= at) index += 1;
      return index >= 0 && x[index] > before ? y[index] : undefined;
    });
  });
  return [grid, ...columns];
}
