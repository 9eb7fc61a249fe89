"""Generate tokens with the packages of this folder.

    python generate.py --ids 1,2,3 --steps 16 --runtime coreml

Each step runs the lookup of token ids and positions, and the rest, which reads floats alone, in one package or several.
On a Mac, `--runtime coreml` runs them by coremltools; anywhere, `--runtime reference` runs them by mil_ane_passes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1
"The version of manifest.json that this script reads."


def open_table(folder: Path, described: dict[str, Any]) -> dict[str, Any]:
    """Return a table as `read_rows` reads it, with the arrays of its files mapped."""
    return {**described, **{name: np.load(folder / file, mmap_mode="r")
                            for name, file in described.get("files", {}).items()}}


def read_rows(table: dict[str, Any], ids: Any) -> Any:
    """Return rows of a table (n, width), which may be compressed.

    Its integers may be packed, those of a sparse one are the values that its mask has; they may be entries of palettes,
    shifted and scaled by blocks.
    """
    count, width = len(table["starts"]) - 1 if "mask" in table else len(table["data"]), table["width"]

    def spread(parameter: Any) -> Any:
        return np.repeat(parameter[ids // (count // parameter.shape[0])], width // parameter.shape[1], axis=1)

    mask = unpack_bits(table["mask"][ids], width).astype(bool) if "mask" in table else None
    rows = unpack(table, table["data"][ids], width) if mask is None else read_sparse_rows(table, ids, mask)
    if "lut" in table:
        rows = np.take_along_axis(spread(table["lut"]), rows[..., None].astype(np.int64), -1)[..., 0]
    if "scale" in table:
        rows = rows.astype(np.float64)
        rows = (rows - spread(table["offset"]) if "offset" in table else rows) * spread(table["scale"])
    return rows if mask is None else np.where(mask, rows, 0)


def read_sparse_rows(table: dict[str, Any], ids: Any, mask: Any) -> Any:
    """Return rows (n, width) with the values of a sparse table where the mask is true, and 0 elsewhere."""
    rows = []
    for each, held in zip(ids, mask):
        begin, end = (int(place) for place in table["starts"][each:each + 2])
        values = unpack(table, np.asarray(table["data"][begin:end]), int(held.sum()))
        row = np.zeros(held.shape, values.dtype)
        row[held] = values
        rows.append(row)
    return np.stack(rows)


def unpack(table: dict[str, Any], data: Any, count: int) -> Any:
    """Return the integers of rows (..., count) from their bytes, if they are packed."""
    if "bits" not in table:
        return np.asarray(data)
    bits = table["bits"]
    codes = unpack_bits(data, count * bits).reshape(*data.shape[:-1], count, bits) @ (1 << np.arange(bits))
    return codes - (codes >> bits - 1 << bits) if table["signed"] else codes


def unpack_bits(data: Any, count: int) -> Any:
    return np.unpackbits(np.asarray(data), axis=-1, bitorder="little")[..., :count]


def read_manifest(path: Path) -> dict[str, Any]:
    """Return what manifest.json describes. ValueError if it is not what `mil-ane-passes adapt` writes."""
    expected = "expected the file that `mil-ane-passes adapt` wrote beside this script"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"manifest.json is not JSON ({error}); {expected}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else None
        raise ValueError(f"manifest.json has schema {found}; this script reads {SCHEMA}: {expected}")
    missing = [name for name in ("context", "vocabulary", "inputs", "outputs", "fixed", "once", "parts", "embedding",
                                 "cache") if name not in manifest]
    if missing:
        raise ValueError(f"manifest.json lacks {', '.join(map(repr, missing))}; {expected}")
    return manifest


class Decoder:
    """A decoder and its cache.

    `open_model` opens a package, or one function of it, as an object with `predict` and `make_state`. `fixed` are the
    values of inputs that stay the same for all tokens, such as what an encoder returned.
    """

    def __init__(self, folder: Path, open_model: Callable[[Path, str | None], Any],
                 fixed: dict[str, Any] | None = None) -> None:
        self.manifest = read_manifest(folder / "manifest.json")
        self.context: int | None = self.manifest["context"]
        self.position = 0
        self._fixed = read_fixed(self.manifest["fixed"], fixed or {})
        once = self.manifest["once"]
        if once is not None:  # what follows from these alone, such as keys and values of an encoder's output
            given = {name: self._fixed[name] for name in once["inputs"]}
            found = open_model(folder / once["package"], None).predict(given)
            self._fixed |= {name: np.asarray(found[name]).astype(dtype) for name, dtype in once["outputs"].items()}
        self._parts = {part["tokens"]: (
            part, open_model(folder / part["lookup"], part["function"]),
            [open_model(folder / each["package"], part["function"]) for each in part["main"]])
            for part in self.manifest["parts"]}
        cache = self.manifest["cache"]
        self.caches = {each["input"]: np.zeros(each["shape"], each["dtype"]) for each in cache.get("arrays", ())}
        self._table = open_table(folder, self.manifest["embedding"])
        self._state = None if cache["form"] == "io" else next(iter(self._parts.values()))[2][0].make_state()

    def feed(self, ids: Sequence[int]) -> Any:
        """Run tokens through the model, as many at a time as its packages take; returns the logits of the last one."""
        rest, logits = list(ids), None
        if not rest:
            raise ValueError("no ids; expected at least one token")
        if self.context is not None and self.position + len(rest) > self.context:
            raise ValueError(f"{self.position + len(rest)} tokens; the maximum (context) is {self.context}")
        while rest:
            count = max(count for count in self._parts if count <= len(rest))
            logits, rest = self._step(rest[:count]), rest[count:]
        return logits

    def _step(self, ids: Sequence[int]) -> Any:
        part, lookup, models = self._parts[len(ids)]
        names = self.manifest["inputs"]
        embedding = self.manifest["embedding"]
        tokens = {names["ids"]: np.array([ids], np.int32)} if embedding["form"] == "package" else {}
        place = {} if names["position"] is None else {names["position"]: np.array([self.position], np.int32)}
        found = lookup.predict({**tokens, **place})
        feeds = {name: np.asarray(found[name]).astype(dtype) for name, dtype in part["lookups"].items()} | self._fixed
        if embedding["form"] != "package":
            found = read_rows(self._table, np.array(ids)) if embedding["form"] == "npy" else np.eye(
                self.manifest["vocabulary"])[list(ids)]
            feeds[embedding["input"]] = found[None].astype(embedding["dtype"])
        if names["mask"] is not None:
            feeds[names["mask"]] = self._make_mask(part["mask"], len(ids))
        results = self._run(part["main"], models, feeds)
        for each in self.manifest["cache"].get("arrays", ()):
            if each["axis"] is None:  # a state that is replaced at each step
                self.caches[each["input"]] = np.asarray(results[each["output"]]).astype(each["dtype"])
                continue
            rows: list[Any] = [slice(None)] * len(each["shape"])
            rows[each["axis"]] = slice(self.position, self.position + len(ids))
            self.caches[each["input"]][tuple(rows)] = results[each["output"]]
        self.position += len(ids)
        tiles = [select_last_row(results[name], len(ids)) for name in self.manifest["outputs"]["logits"]]
        return np.concatenate(tiles).astype(np.float32)

    def _run(self, parts: Sequence[dict[str, Any]], models: Sequence[Any], feeds: dict[str, Any]) -> dict[str, Any]:
        """Run the parts of the main model, each with what those before it returned and its channels of the cache."""
        known = feeds | self.caches
        for part, model in zip(parts, models):
            read = {name: np.asarray(known[name]).astype(dtype) for name, dtype in part["inputs"].items()}
            read |= {name: np.concatenate([self.caches[name][:, begin:end] for begin, end in ranges], 1)
                     for name, ranges in part["caches"].items()}
            known |= model.predict(read) if self._state is None else model.predict(read, state=self._state)
        return known

    def _make_mask(self, mask: dict[str, Any], count: int) -> Any:
        """Hide the keys after each query."""
        shape = mask["shape"]
        last = np.arange(self.position, self.position + count)[:, None]
        rows = np.where(np.arange(shape[-1])[None] <= last, 0.0, mask["hidden"])
        return np.broadcast_to(rows, shape).astype(mask["dtype"])


def select_last_row(logits: Any, count: int) -> Any:
    """Return the logits of the last of `count` tokens. Some models return no others."""
    array = np.asarray(logits)
    return array.reshape(count if count in array.shape[:-1] else 1, -1)[-1]


def read_fixed(inputs: dict[str, Any], values: Any) -> dict[str, Any]:
    """Return the values of fixed inputs in their type, padded to their shape along flexible axes.

    ValueError for one that is missing or has another shape.
    """
    found = {}
    for name, each in inputs.items():
        if name not in values:
            raise ValueError(f"no values for the input '{name}' ({', '.join(map(str, each['shape']))}); expected them "
                             "among the given values, for example in an .npz file")
        value, shape, axes = np.asarray(values[name]), tuple(each["shape"]), each["length_axes"]
        held = [1 if axis in axes and 0 < size <= shape[axis] else size for axis, size in enumerate(value.shape)]
        if held != [1 if axis in axes else size for axis, size in enumerate(shape)]:
            at_most = f" or shorter along axis {axes[0]}" if axes else ""
            raise ValueError(f"'{name}' is {value.shape}; expected {shape}{at_most}")
        widths = [(0, size - given) for size, given in zip(shape, value.shape)]
        found[name] = np.pad(value, widths, constant_values=each["padding"]).astype(each["dtype"])
    lengths = {np.shape(values[name])[axis] for name, each in inputs.items() for axis in each["length_axes"]}
    if len(lengths) > 1:
        raise ValueError(f"inputs of {' and '.join(map(str, sorted(lengths)))} elements; expected the same for all: "
                         f"{', '.join(name for name, each in inputs.items() if each['length_axes'])}")
    return found


def choose_token(logits: Any, temperature: float, random: Any) -> int:
    """Choose the likeliest token, or sample one if the temperature is above 0."""
    if temperature <= 0:
        return int(np.argmax(logits))
    scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled.astype(np.float64))
    return int(random.choice(weights.size, p=weights / weights.sum()))


def generate(decoder: Decoder, ids: Sequence[int], steps: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """Return the tokens that follow `ids`, as many as `steps` or as fit into the context."""
    random = np.random.default_rng(seed)
    logits = decoder.feed(ids)
    found: list[int] = []
    while len(found) < steps:
        found.append(choose_token(logits, temperature, random))
        if len(found) == steps or decoder.position == decoder.context:
            break
        logits = decoder.feed(found[-1:])
    return found


def read_ids(text: str) -> list[int]:
    """Return the ids of an argument such as `1,2,3`."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"--ids: found {text!r}; expected token ids, which a tokenizer makes of text, separated by "
                         "commas: 1,2,3") from None


def open_by(runtime: str) -> Callable[[Path, str | None], Any]:
    """Return what opens a package: coremltools on a Mac, or the reference runtime of mil_ane_passes."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)  # its notes on what is missing off a Mac
    if runtime == "reference":
        import mil_ane_passes

        return lambda path, function: mil_ane_passes.runtime.predictor(str(path), function=function)
    if sys.platform != "darwin":
        raise OSError("Core ML runs on macOS only; elsewhere, pass --runtime reference, which needs mil_ane_passes")
    import coremltools

    def open_model(path: Path, function: str | None) -> Any:
        unit = coremltools.ComputeUnit.CPU_ONLY if "lookup" in path.name else coremltools.ComputeUnit.CPU_AND_NE
        named = {} if function is None else {"function_name": function}
        return coremltools.models.MLModel(str(path), compute_units=unit, **named)

    return open_model


def read_inputs(path: str) -> dict[str, Any]:
    """Return the arrays of an .npz file by name. ValueError if it is not one, or is incomplete."""
    try:
        found = np.load(path)
        if isinstance(found, np.lib.npyio.NpzFile):
            return dict(found)
        reason = f"found one array of {found.dtype}"
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error)
    raise ValueError(f"--inputs {path}: {reason}; expected an .npz file, as written by np.savez(path, name=array)")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", required=True, help="the prompt's token ids, such as 1,2,3")
    parser.add_argument("--steps", type=int, default=16, help="number of tokens to generate (default: 16)")
    parser.add_argument("--runtime", choices=("coreml", "reference"), default="coreml",
                        help="coreml (default) needs macOS; reference needs mil_ane_passes")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 (default): always the "
                                                                       "most likely token")
    parser.add_argument("--seed", type=int, default=0, help="random seed for sampling")
    parser.add_argument("--inputs", metavar="FILE.npz", help="inputs that are the same for all tokens, such as "
                                                             "encoder outputs")
    parser.add_argument("--json", action="store_true", help='print {"tokens": [...]}')
    arguments = parser.parse_args(argv)
    try:
        ids = read_ids(arguments.ids)
        if not 0 <= arguments.temperature < math.inf:
            raise ValueError(f"--temperature: found {arguments.temperature:g}; expected 0, for the most likely token, "
                             "or a larger number")
        fixed = {} if arguments.inputs is None else read_inputs(arguments.inputs)
        decoder = Decoder(Path(__file__).resolve().parent, open_by(arguments.runtime), fixed)
        vocabulary = decoder.manifest["vocabulary"]
        if arguments.steps < 1 or any(not 0 <= each < vocabulary for each in ids):
            raise ValueError(f"expected ids from 0 to {vocabulary - 1}, and 1 step or more")
        tokens = generate(decoder, ids, arguments.steps, arguments.temperature, arguments.seed)
    except (ValueError, ImportError, OSError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 2
    if len(tokens) < arguments.steps:
        print(f"generate.py: stopped after {len(tokens)} tokens, as the context of {decoder.context} is full",
              file=sys.stderr)
    print(json.dumps({"tokens": tokens}) if arguments.json else " ".join(map(str, tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
