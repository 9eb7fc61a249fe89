"""Others' readers on packages that `rewrite` wrote: coremltools' C++ library, Netron, and protobuf in pure Python."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from coremltools import proto
from coremltools.converters.mil.mil import types
from coremltools.libmilstoragepython import _BlobStorageReader
from coremltools.libmodelpackage import ModelPackage
from google.protobuf.message import Message

from mil_ane_passes.package.blobs import DTYPES, WeightFile, count_payload_bytes

from ...package.helpers import MODEL, spec_of

HERE = Path(__file__).parent
NETRON_VERSION = "9.3.3"
_MODEL_FOLDER = MODEL.rpartition("/")[0]
_MIL_DTYPES = {types.builtin_to_string(dtype).replace("fp", "float").upper(): dtype for dtype in DTYPES}
"The dtypes of weights by their names in `MILSpec.DataType`."


def find_missing_for_netron() -> str | None:
    """Why Netron's loader cannot run here, None where it can."""
    if shutil.which("node") is None:
        return "needs node"
    return None if find_spec("netron") else f"needs netron (pip install netron=={NETRON_VERSION})"


def count_package_reads(packages: Sequence[Path]) -> dict[str, Any]:
    """Read manifests with coremltools' C++ `ModelPackage`: how many packages it opens and finds the model in."""
    failed = [package for package in packages if not _has_root_model(package)]
    return _count(len(packages), (f"{package}: its manifest does not lead to the model" for package in failed))


def _has_root_model(package: Path) -> bool:
    if not ModelPackage.isValid(str(package)):
        return False
    root = ModelPackage(str(package)).getRootModel()
    return root is not None and Path(root.path()).resolve() == (package / MODEL).resolve()


def count_weight_reads(packages: Sequence[Path]) -> dict[str, Any]:
    """Read each weight with coremltools' C++ reader: how many, and how many differ from what we read."""
    tries, failures = 0, []
    for package in packages:
        for name, offset, dtype, count in sorted(set(iterate_weights(spec_of(package))), key=str):
            path = package / _MODEL_FOLDER / name.removeprefix("@model_path/")
            tries += 1
            if (problem := _compare_weight(path, name, offset, dtype, count)) is not None:
                failures.append(f"{path}, offset {offset}: {problem}")
    return _count(tries, failures)


def _compare_weight(path: Path, name: str, offset: int, dtype: Any, count: int) -> str | None:
    """Why the C++ reader's values are not ours, None if they are."""
    file = WeightFile(path, name)
    blob = file.blob(offset)
    reads = {"fp32": "float"}.get(types.builtin_to_string(dtype), types.builtin_to_string(dtype))
    try:
        read = np.asarray(getattr(_BlobStorageReader(str(path)), f"read_{reads}_data")(offset))
    except RuntimeError as error:
        return f"the C++ reader says {error}"
    ours = np.asarray(file.make_lazy(blob, dtype, (count,)).read()) if types.is_sub_byte(dtype) else (
        file.view_elements(blob, dtype))
    if len(read) != count or blob.nbytes != count_payload_bytes(dtype, count):
        return f"the C++ reader has {len(read)} elements, the program declares {count}"
    same = np.array_equal(read.astype(np.int64), ours.astype(np.int64)) if types.is_sub_byte(dtype) else (
        read.tobytes() == ours.tobytes())
    return None if same else "other values"


def iterate_weights(spec: Any) -> Iterator[tuple[str, int, Any, int]]:
    """File name, offset, dtype and number of elements of each weight in a file that the model refers to."""
    for program in iterate_programs(spec):
        for function in program.functions.values():
            for block in function.block_specializations.values():
                yield from _iterate_block_weights(block)


def iterate_programs(spec: Any) -> Iterator[Any]:
    """The program of a model, or those of a pipeline's models."""
    kind = spec.WhichOneof("Type")
    if kind == "mlProgram":
        yield spec.mlProgram
    elif kind == "pipeline":
        for model in spec.pipeline.models:
            yield from iterate_programs(model)


def _iterate_block_weights(block: Any) -> Iterator[tuple[str, int, Any, int]]:
    for op in block.operations:
        yield from map(_describe_weight, _iterate_op_weights(op))
        for inner in op.blocks:
            yield from _iterate_block_weights(inner)


def _iterate_op_weights(op: Any) -> Iterator[Any]:
    """The values in weight files among an op's attributes and, from iOS 18 on, its inputs."""
    arguments = [argument for given in op.inputs.values() for argument in given.arguments]
    inline = [argument.value for argument in arguments if argument.WhichOneof("binding") == "value"]
    return (value for value in (*op.attributes.values(), *inline) if _is_in_file(value))


def _is_in_file(value: Any) -> bool:
    return bool(value.WhichOneof("value") == "blobFileValue")


def _describe_weight(value: Any) -> tuple[str, int, Any, int]:
    declared = value.type.tensorType
    dtype = _MIL_DTYPES[proto.MIL_pb2.DataType.Name(declared.dataType)]
    count = int(np.prod([size.constant.size for size in declared.dimensions], dtype=np.int64))
    return value.blobFileValue.fileName, value.blobFileValue.offset, dtype, count


def count_pure_python_parses(packages: Sequence[Path]) -> dict[str, Any]:
    """Parse model files with protobuf's implementation in Python: how many, and how many differ from the one in C."""
    own = [hash_model(package / MODEL) for package in packages]
    environment = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    lines = _run([sys.executable, "-m", __name__], packages, environment)
    assert lines.pop(0) == "python", "protobuf runs in another implementation"
    return _count(len(packages), (f"{package}: read as another model, or with unknown fields"
                                  for package, ours, line in zip(packages, own, lines, strict=True) if line != ours))


def hash_model(path: Path) -> str:
    """Parse a model file: a hash of all that its messages declare, without unknown fields."""
    model = proto.Model_pb2.Model.FromString(path.read_bytes())
    size = model.ByteSize()
    model.DiscardUnknownFields()
    known = model.ByteSize() == size == path.stat().st_size
    return hashlib.sha256(repr(_list_fields(model)).encode()).hexdigest() if known else "unknown fields"


def _list_fields(value: Any) -> Any:
    """The fields of a message by name, and those of messages in it; maps are sorted, as their order is undefined."""
    if isinstance(value, Message):
        return [(field.name, _list_fields(held)) for field, held in value.ListFields()]
    if isinstance(value, MutableMapping):
        return sorted((key, _list_fields(held)) for key, held in value.items())
    return [_list_fields(each) for each in value] if isinstance(value, MutableSequence) else value


def count_netron_loads(packages: Sequence[Path]) -> dict[str, Any]:
    """Open packages in Netron's loader: how many graphs it makes, and how many of these differ from the program.

    {} where Netron cannot run. Ops are compared by type in their order, weights byte for byte. Netron shows nothing
    of blocks inside ops, and opens the weight files that attributes refer to: no others.
    """
    folder = find_spec("netron")
    if find_missing_for_netron() or folder is None or not folder.submodule_search_locations:
        return {}
    command = ["node", str(HERE / "netron.mjs"), folder.submodule_search_locations[0]]
    lines = [json.loads(line) for line in _run(command, packages)]
    tries, failures = 0, []
    for package, found in zip(packages, lines, strict=True):
        expected = describe_graphs(package)
        tries += len(expected)
        if "error" in found:
            failures.append(f"{package}: Netron says {found['error']}")
        elif found["graphs"] != expected:
            failures.append(f"{package}: Netron shows another program")
    return {"version": version("netron"), **_count(tries, failures)}


def describe_graphs(package: Path) -> list[dict[str, Any]]:
    """What Netron is expected to show of a package: op types and hashes of weights, by function."""
    spec = spec_of(package)
    if spec.description.functions:
        described = [(each.name, each, [(spec.mlProgram, each.name)]) for each in spec.description.functions]
    else:
        described = [("", spec.description, [(program, "main") for program in iterate_programs(spec)])]
    return [_describe_graph(package, *each) for each in described]


def _describe_graph(package: Path, name: str, interface: Any, programs: list[tuple[Any, str]]) -> dict[str, Any]:
    ops: list[Any] = []
    for program, function in programs:
        (block,) = program.functions[function].block_specializations.values()
        ops += block.operations
    shown = [op for op in ops if op.type != "const"]
    used = {argument.name for op in shown for given in op.inputs.values() for argument in given.arguments}
    read = [op for op in ops if op.type != "const" or op.outputs[0].name in used]
    held = [value for op in read for value in _iterate_op_weights(op)]
    opened = {value.blobFileValue.fileName for op in ops for value in op.attributes.values() if _is_in_file(value)}
    weights = sorted(_hash_weight(package, value) for value in held if value.blobFileValue.fileName in opened)
    return {"name": name, "ops": [op.type for op in shown], "weights": weights,
            "inputs": [each.name for each in (*interface.input, *interface.state)],
            "outputs": [each.name for each in interface.output]}


def _hash_weight(package: Path, value: Any) -> str:
    name, offset, dtype, _ = _describe_weight(value)
    file = WeightFile(package / _MODEL_FOLDER / name.removeprefix("@model_path/"), name)
    return hashlib.sha256(file.view_elements(file.blob(offset), dtype).tobytes()).hexdigest()


READERS: dict[str, Callable[[Sequence[Path]], dict[str, Any]]] = {
    "read_manifests": count_package_reads, "read_weights": count_weight_reads,
    "read_models": count_pure_python_parses, "read_netron": count_netron_loads}


def _run(command: Sequence[str], packages: Sequence[Path], environment: Mapping[str, str] | None = None) -> list[str]:
    """The lines that a process prints of packages."""
    done = subprocess.run([*command, *map(str, packages)], capture_output=True, text=True, check=False,
                          env=environment, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def _count(tries: int, failures: Iterable[str]) -> dict[str, Any]:
    failed = list(failures)
    for failure in failed:
        print(failure, file=sys.stderr)
    return {"tries": tries, "failures": len(failed)}


if __name__ == "__main__":  # in a process of its own: the implementation is chosen when protobuf is imported
    from google.protobuf.internal import api_implementation

    print(api_implementation.Type())
    for each in sys.argv[1:]:
        print(hash_model(Path(each) / MODEL))
