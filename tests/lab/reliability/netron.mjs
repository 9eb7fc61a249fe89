// Open Core ML packages with Netron's own loader and report, as one JSON object a line, what it found or its error.
//
//     node netron.mjs NETRON_FOLDER PACKAGE.mlpackage ...
//
// NETRON_FOLDER is the folder of the Python package `netron`, which holds Netron's JavaScript. The context below is what
// Netron's window otherwise is to its loader: the file that is open, the files beside it, and its modules.

import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [folder, ...packages] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(join(folder, name)));
const { BinaryStream } = await load('base.js');
const { ModelFactoryService } = await load('view.js');

class Context {
    constructor(path) {
        this.folder = dirname(path);
        this.identifier = 'model.mlmodel';
        this.stream = new BinaryStream(readFileSync(path));
        this.entries = new Map();
    }

    async fetch(file) {
        return new BinaryStream(readFileSync(join(this.folder, file)));
    }

    async asset(file) {
        return readFileSync(join(folder, file), 'utf-8');
    }

    require(id) {
        return load(`${id}.js`);
    }

    error(error) {
        throw error;
    }

    exception(error) {
        throw error;
    }
}

const hash = ({ values }) => {
    const bytes = Buffer.from(values.buffer, values.byteOffset, values.byteLength);
    return createHash('sha256').update(bytes).digest('hex');
};

const describe = (graph) => {
    const tensors = new Set();  // several ops may read one
    for (const node of graph.nodes) {
        for (const { value } of node.attributes) {
            tensors.add(value);
        }
        for (const value of node.inputs.flatMap((argument) => argument.value)) {
            tensors.add(value.initializer);
        }
    }
    const weights = [...tensors].filter((tensor) => tensor?.category === 'Blob' && tensor.values).map(hash).sort();
    const names = (values) => values.map((argument) => argument.name);
    const ops = graph.nodes.map((node) => node.type.name).filter((type) => type !== 'const');
    return { name: graph.name, ops, weights, inputs: names(graph.inputs), outputs: names(graph.outputs) };
};

const service = new ModelFactoryService(new Context(join(packages[0], 'Data/com.apple.CoreML/model.mlmodel')));
for (const each of packages) {
    let found;
    try {
        const model = await service.open(new Context(join(each, 'Data/com.apple.CoreML/model.mlmodel')));
        found = { format: model.format, graphs: [...model.modules, ...model.functions].map(describe) };
    } catch (error) {
        found = { error: `${error.message}` };
    }
    console.log(JSON.stringify(found));
}
