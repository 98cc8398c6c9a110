// Series as uPlot wants them: one x for all, a value or a gap for each. Nothing is invented between two points.

const MOST_CELLS = 300000;

/** Exponential smoothing that starts without a bias to zero; gaps stay gaps. */
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

/** A gap where a series is silent for much longer than usual: an island that was away is not a straight line. */
export function withGaps(xs, ys) {
  if (xs.length < 8) return [xs, ys];
  const steps = [];
  for (let i = 1; i < xs.length; i += 1) steps.push(xs[i] - xs[i - 1]);
  const usual = steps.toSorted((a, b) => a - b)[steps.length >> 1];
  const outX = [xs[0]];
  const outY = [ys[0]];
  for (let i = 1; i < xs.length; i += 1) {
    if (usual > 0 && steps[i - 1] > usual * 8) {
      outX.push((xs[i] + xs[i - 1]) / 2);
      outY.push(null);
    }
    outX.push(xs[i]);
    outY.push(ys[i]);
  }
  return [outX, outY];
}

const same = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);

/** [x, y1, y2, ...]; `join` is uPlot.join. */
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
  if (cells <= MOST_CELLS) {
    const [x, ...columns] = join(
      parts,
      parts.map(() => [1, 1]),
    );
    for (const column of columns) widenGaps(column);
    return [x, ...columns];
  }
  return onGrid(parts, points);
}

/** A joined column has places that belong to other series only. Those beside a gap are in the gap, or a line would cross it. */
function widenGaps(column) {
  for (const step of [1, -1]) {
    let gap = false;
    for (let i = step > 0 ? 0 : column.length - 1; i >= 0 && i < column.length; i += step) {
      if (column[i] !== undefined) gap = column[i] === null;
      else if (gap) column[i] = null;
    }
  }
}

/** With very many series a common grid: at each place the newest value that is not older than one place. */
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
    let place = -1;
    return grid.map((at, i) => {
      const before = i ? grid[i - 1] : -Infinity;
      while (place + 1 < x.length && x[place + 1] <= at) place += 1;
      return place >= 0 && x[place] > before ? y[place] : undefined;
    });
  });
  return [grid, ...columns];
}
