// Where the graph's ops stand: layers from left to right by longest path, lanes by the mean of what an op reads.
// Everything is linear in ops and edges, but for sorting the ops of one layer.

const BOX = { width: 150, height: 38, across: 190, down: 56 };

function layoutOf(report, place) {
  const { first, count: size } = report.functions[place];
  const makers = (row) =>
    [...report.ops.reads[row], report.ops.inside[row]].filter((maker) => maker >= first && maker < row);
  const layer = new Int32Array(size);
  for (let at = 0; at < size; at++) {
    for (const maker of makers(first + at)) layer[at] = Math.max(layer[at], layer[maker - first] + 1);
  }
  for (let at = 0; at < size; at++) {
    const readers = report.readers[first + at].map((row) => layer[row - first]);
    if (readers.length && !makers(first + at).length) layer[at] = Math.max(0, Math.min(...readers.slice(0, 1000)) - 1);
  }
  const layers = [];
  for (let at = 0; at < size; at++) (layers[layer[at]] ??= []).push(at);
  const y = lanes(
    Array.from(layers, (one) => one || []),
    (at) => makers(first + at).map((maker) => maker - first),
    size,
  );
  return {
    first,
    size,
    layer,
    y,
    layers: Array.from(layers, (one) => one || []),
    ...edgesOf(report, first, size, layer, makers),
    ...bounds(y, layers.length),
  };
}

function lanes(layers, makers, size) {
  const y = new Float64Array(size);
  for (const members of layers) {
    const wish = new Map(
      members.map((at) => {
        const from = makers(at);
        return [at, from.length ? from.reduce((sum, maker) => sum + y[maker], 0) / from.length : 0];
      }),
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

/** Edges by the layer they end in; those that span many layers apart, as they may cross a view they neither start nor end in. */
function edgesOf(report, first, size, layer, makers) {
  const short = Array.from({ length: size }, () => []);
  const long = [];
  for (let at = 0; at < size; at++) {
    for (const maker of makers(first + at)) {
      if (layer[at] - layer[maker - first] > 3) long.push([maker - first, at]);
      else short[at].push(maker - first);
    }
  }
  return { short, long };
}

function bounds(y, depth) {
  let top = 0;
  let bottom = 0;
  for (const one of y) {
    top = Math.min(top, one);
    bottom = Math.max(bottom, one);
  }
  return {
    left: 0,
    top,
    width: Math.max(1, depth) * BOX.across - (BOX.across - BOX.width),
    height: bottom - top + BOX.height,
  };
}
