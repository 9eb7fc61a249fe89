// Positions of the graph's ops. An op's layer, from left to right, is the longest path to it; its position in the layer is
// the mean position of its operands. Most models are long and thin, so layers are broken into lines like words of a text.
// The cost is linear in ops and edges, except for sorting the ops of each layer.

const BOX = { width: 150, height: 38, across: 190, down: 56, line: 40 };
const NEAR = 3;

function layoutOf(report, place, aspect) {
  const { first, count: size } = report.functions[place];
  const makers = Array.from({ length: size }, (_, at) =>
    [...report.ops.reads[first + at], report.ops.inside[first + at]]
      .filter((maker) => maker >= first && maker < first + at)
      .map((maker) => maker - first),
  );
  const layer = layersOf(report, first, makers);
  const layers = [];
  for (let at = 0; at < size; at++) (layers[layer[at]] ??= []).push(at);
  for (let depth = 0; depth < layers.length; depth++) layers[depth] ??= [];
  const y = lanes(layers, makers);
  const { columns, lines } = linesOf(layers, y, aspect);
  const line = (at) => Math.floor(layer[at] / columns);
  const bottom = lines.length ? lines[lines.length - 1].top + lines[lines.length - 1].height : 1;
  return {
    ...{ first, size, layer, layers, y, columns, lines, line },
    ...edgesOf(makers, layer, line, lines.length),
    width: Math.max(1, Math.min(columns, layers.length) * BOX.across - (BOX.across - BOX.width)),
    height: bottom,
  };
}

/** Puts each op one layer after its last operand; an op without operands is in the layer before its first user. */
function layersOf(report, first, makers) {
  const layer = new Int32Array(makers.length);
  makers.forEach((from, at) => from.forEach((maker) => (layer[at] = Math.max(layer[at], layer[maker] + 1))));
  makers.forEach((from, at) => {
    const readers = report.readers[first + at];
    if (from.length || !readers.length) return;
    const nearest = readers.reduce((least, row) => Math.min(least, layer[row - first]), Infinity);
    layer[at] = Math.max(0, nearest - 1);
  });
  return layer;
}

function lanes(layers, makers) {
  const y = new Float64Array(makers.length);
  for (const members of layers) {
    const wish = new Map(
      members.map((at) => [
        at,
        makers[at].length ? makers[at].reduce((sum, maker) => sum + y[maker], 0) / makers[at].length : 0,
      ]),
    );
    members.sort((a, b) => wish.get(a) - wish.get(b) || a - b);
    let floor = -Infinity;
    let drift = 0;
    for (const at of members) {
      y[at] = Math.max(wish.get(at), floor);
      floor = y[at] + BOX.down;
      drift += y[at] - wish.get(at);
    }
    for (const at of members) y[at] -= drift / members.length;
  }
  return y;
}

/** Breaks the layers into lines, so that the graph has about the given aspect ratio; adds the lines' positions to `y`. */
function linesOf(layers, y, aspect) {
  const extents = layers.map((members) =>
    members.reduce(([low, high], at) => [Math.min(low, y[at]), Math.max(high, y[at])], [Infinity, -Infinity]),
  );
  const broken = (columns) => {
    const lines = [];
    let top = 0;
    for (let from = 0; from < layers.length; from += columns) {
      const part = extents.slice(from, from + columns);
      const low = part.reduce((least, [one]) => Math.min(least, one), Infinity);
      const high = part.reduce((most, [, one]) => Math.max(most, one), -Infinity);
      lines.push({ from, to: Math.min(from + columns, layers.length), top, low, height: high - low + BOX.height });
      top += high - low + BOX.height + BOX.line;
    }
    return { columns, lines, shape: (Math.min(columns, layers.length) * BOX.across) / Math.max(1, top) };
  };
  let best = broken(Math.max(1, layers.length));
  while (best.shape > aspect && best.columns > 4) best = broken(Math.floor(best.columns * 0.85));
  for (const { from, to, top, low } of best.lines) {
    for (const members of layers.slice(from, to)) for (const at of members) y[at] += top - low;
  }
  return best;
}

/** Returns the edges within a line: short ones by their last op, long ones by line; edges between lines are only marked. */
function edgesOf(makers, layer, line, count) {
  const short = makers.map(() => []);
  const long = Array.from({ length: count }, () => []);
  const comes = new Uint8Array(makers.length);
  const goes = new Uint8Array(makers.length);
  makers.forEach((from, at) => {
    for (const maker of from) {
      if (line(maker) !== line(at)) comes[at] = goes[maker] = 1;
      else if (layer[at] - layer[maker] > NEAR) long[line(at)].push([maker, at]);
      else short[at].push(maker);
    }
  });
  return { short, long, comes, goes };
}
