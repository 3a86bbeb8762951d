"""The grammar of a program's description: what `models/*.json` and the lists of weights in a `.pt2` may say, and nothing else.

Each `check` gives back a new document that holds only what it understood. Why each field is looked at:

* names of nodes, inputs, weights and arguments are written into Python code that PyTorch compiles: they are identifiers;
* `target` and `as_operator` are looked up by name under `torch.`: registered aten and prims operations only, and no operator
  as an argument (`_operator.call` of `torch.os.system` would be a command);
* `guards_code` is compiled and run: arithmetic on sizes of the inputs only;
* tree specifications import the classes they name: tuples, lists and dictionaries only;
* `expr_str` is evaluated by sympy: refused; ranges of symbols with it;
* metadata names functions and holds further JSON: only the module and the line of a node are kept, for messages.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from equipoise.checkpoints.guards import checked_guard
from equipoise.checkpoints.plain_values import NAME, Check, Plain
from equipoise.core.errors import InputError, Refused
from equipoise.core.files import parse_json

_FRAME = re.compile(r"^[\w.@<>\[\] -]{0,300}$", re.ASCII)
_TARGET = re.compile(r"^torch\.ops\.(aten|prims)\.(\w+)\.(\w+)$", re.ASCII)
_PATH = re.compile(r"^(weight|tensor)_\d{1,9}$", re.ASCII)
#: arithmetic on plain numbers, and picking an output of several
_OPERATORS = {
    "getitem",
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "neg",
    "pow",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
}
#: operations that reach beyond their arguments (files, storages, devices), or trust numbers that a file can choose
_FORBIDDEN = {
    "from_file", "save", "load", "set_", "set_data", "set", "resize_", "resize", "resize_as_", "data_ptr", "record_stream",
    "pin_memory", "sparse_resize_", "sparse_resize_and_clear_", "backward", "requires_grad_", "empty_quantized", "rename",
}  # fmt: skip
#: operations with a leading underscore are PyTorch's own business, but for those that plain networks are exported to
_INTERNAL = {
    "_to_copy", "_softmax", "_log_softmax", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit",
    "_batch_norm_with_update", "_batch_norm_no_update", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_unsafe_view",
    "_unsafe_index", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention", "_safe_softmax", "_weight_norm",
    "_weight_norm_interface", "_trilinear", "_assert_tensor_metadata", "_assert_scalar", "_convolution", "_conj",
    "_prelu_kernel", "_cdist_forward", "_linalg_svd", "_linalg_eigh", "_fft_r2c", "_fft_c2c", "_fft_c2r",
    "_upsample_bilinear2d_aa", "_pdist_forward", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__",
}  # fmt: skip
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_VERIFIERS = ("", "ATEN", "EDGE", "TRAINING")


class _Reader(Plain):
    """The checks of the description of one program."""

    # ---- tensors --------------------------------------------------------------------------------------------------

    def size(self, value: Any) -> dict[str, Any]:
        return self.one_of(value, {"as_int": self.integer}, "a size")

    def device(self, value: Any) -> dict[str, Any]:
        document = self.mapping(value, "device")
        index = document.get("index")
        if document.get("type") not in _DEVICES or not (index is None or (type(index) is int and 0 <= index < 1024)):
            raise self.wrong("an unknown device", document)
        return {"type": document["type"], "index": index}

    def tensor_meta(self, value: Any) -> dict[str, Any]:
        document = self.mapping(value, "description of a tensor")
        known = ("dtype", "sizes", "requires_grad", "device", "strides", "storage_offset", "layout")
        self.only(document, known, "description of a tensor")
        try:
            return {
                "dtype": self.integer(document["dtype"]),
                "sizes": [self.size(s) for s in self.items(document["sizes"], "sizes")],
                "requires_grad": self.boolean(document["requires_grad"]),
                "device": self.device(document["device"]),
                "strides": [self.size(s) for s in self.items(document["strides"], "strides")],
                "storage_offset": self.size(document["storage_offset"]),
                "layout": self.integer(document["layout"]),
            }
        except KeyError as error:
            raise self.wrong("an incomplete description of a tensor", error) from error

    def tensor(self, value: Any) -> dict[str, Any]:
        document = self.mapping(value, "tensor argument")
        self.only(document, ("name",), "tensor argument")
        return {"name": self.identifier(document.get("name"))}

    def argument(self, value: Any) -> dict[str, Any]:
        symbol: Check = lambda v: self.one_of(v, {"as_int": self.integer}, "a symbol")  # noqa: E731
        optional: Check = lambda v: self.one_of(v, {"as_none": self.boolean, "as_tensor": self.tensor}, "a tensor")  # noqa: E731
        checks: dict[str, Check] = {
            "as_none": self.boolean, "as_tensor": self.tensor, "as_tensors": self.many(self.tensor),
            "as_int": self.integer, "as_ints": self.many(self.integer), "as_float": self.number,
            "as_floats": self.many(self.number), "as_string": self.text, "as_strings": self.many(self.text),
            "as_sym_int": symbol, "as_sym_ints": self.many(symbol), "as_scalar_type": self.integer,
            "as_memory_format": self.integer, "as_layout": self.integer, "as_device": self.device,
            "as_bool": self.boolean, "as_bools": self.many(self.boolean), "as_optional_tensor": optional,
            "as_optional_tensors": self.many(optional), "as_nested_tensors": self.many(self.many(self.tensor)),
            "as_complex": lambda v: {k: self.number(self.mapping(v, "number").get(k)) for k in ("real", "imag")},
        }  # fmt: skip
        return self.one_of(value, checks, "an argument")

    # ---- the graph ------------------------------------------------------------------------------------------------

    def target(self, value: Any) -> str:
        """The name of a registered operation; nothing is looked up before the name is known to be one."""
        text = value if isinstance(value, str) else ""
        if text.startswith("_operator.") and text.removeprefix("_operator.") in _OPERATORS:
            return text
        match = _TARGET.match(text)
        space, operation, overload = match.groups() if match else ("", "", "")
        internal = operation.startswith("_") and operation not in _INTERNAL
        if not match or operation in _FORBIDDEN or internal or "sparse" in operation:
            raise Refused(f"{self.name} calls {str(value)[:80]!r}, which is not a plain tensor operation")
        schemas = torch._C._jit_get_schemas_for_operator(f"{space}::{operation}")
        if (overload if overload != "default" else "") not in {s.overload_name for s in schemas}:
            raise Refused(f"{self.name} calls {text!r}, which is not a plain tensor operation of this PyTorch")
        return text

    def node(self, value: Any) -> dict[str, Any]:
        node = self.mapping(value, "node")
        known = ("target", "inputs", "outputs", "metadata", "is_hop_single_tensor_return", "name")
        self.only(node, known, "nodes")
        inputs = []
        for item in self.items(node.get("inputs"), "inputs"):
            given = self.mapping(item, "argument")
            kind = given.get("kind")
            if kind not in (None, 0, 1, 2) or not isinstance(given.get("name"), str):
                raise self.wrong("a strange argument", given)
            name = given["name"] if given["name"] == "" else self.name_of_argument(given["name"])
            inputs.append({"name": name, "arg": self.argument(given.get("arg")), "kind": kind})
        name = node.get("name")
        return {
            "target": self.target(node.get("target")),
            "inputs": inputs,
            "outputs": [self.argument(v) for v in self.items(node.get("outputs"), "outputs")],
            "metadata": self.metadata(node.get("metadata")),
            "is_hop_single_tensor_return": None,
            "name": None if name is None else self.identifier(name),
        }

    def name_of_argument(self, value: str) -> str:
        if not NAME.match(value):
            raise Refused(f"{self.name} has an argument {value[:80]!r}, which is no name: names become code")
        return value

    def metadata(self, value: Any) -> dict[str, str]:
        """Where the node comes from, for messages: the modules around it and the line; the rest is left behind."""
        document = self.mapping(value if value is not None else {}, "metadata")
        for item in document.values():
            if not isinstance(item, str):
                raise (
                    self.symbolic()
                    if isinstance(item, dict) and "expr_str" in item
                    else self.wrong("strange metadata", item)
                )
        kept = {}
        frames = document.get("nn_module_stack", "").split(";")
        if all(f.count(",") >= 2 and all(_FRAME.match(part) for part in f.split(",")[:2]) for f in frames):
            kept["nn_module_stack"] = ";".join(",".join([*f.split(",")[:2], "module"]) for f in frames)
        trace = document.get("stack_trace", "")
        if trace and len(trace) <= 20_000:
            kept["stack_trace"] = "\n".join("".join(c for c in line if c.isprintable()) for line in trace.split("\n"))
        return kept

    def graph(self, value: Any) -> dict[str, Any]:
        graph = self.mapping(value, "graph")
        for key in ("sym_int_values", "sym_bool_values", "sym_float_values"):
            if graph.get(key):
                raise self.symbolic()
        if graph.get("custom_obj_values"):
            raise self.pickled()
        self.only(graph, ("inputs", "outputs", "nodes", "tensor_values", "is_single_tensor_return"), "graph")
        metas = self.mapping(graph.get("tensor_values"), "descriptions of tensors")
        return {
            "inputs": [self.argument(v) for v in self.items(graph.get("inputs"), "inputs")],
            "outputs": [self.argument(v) for v in self.items(graph.get("outputs"), "outputs")],
            "nodes": [self.node(v) for v in self.items(graph.get("nodes"), "nodes")],
            "tensor_values": {self.identifier(k): self.tensor_meta(v) for k, v in metas.items()},
            "sym_int_values": {}, "sym_bool_values": {}, "sym_float_values": {}, "custom_obj_values": {},
            "is_single_tensor_return": self.boolean(graph.get("is_single_tensor_return", False)),
        }  # fmt: skip

    # ---- inputs and outputs ---------------------------------------------------------------------------------------

    def constant(self, value: Any) -> dict[str, Any]:
        checks: dict[str, Check] = {
            "as_none": self.boolean, "as_int": self.integer, "as_float": self.number, "as_string": self.text,
            "as_bool": self.boolean,
        }  # fmt: skip
        return self.one_of(value, checks, "a constant")

    def signature(self, value: Any) -> dict[str, Any]:
        document, tensor = self.mapping(value, "signature"), self.tensor
        inputs: dict[str, Check] = {
            "user_input": self.fields(arg=self.argument),
            "parameter": self.fields(arg=tensor, parameter_name=self.path),
            "buffer": self.fields(arg=tensor, buffer_name=self.path, persistent=self.boolean),
            "tensor_constant": self.fields(arg=tensor, tensor_constant_name=self.path),
            "constant_input": self.fields(name=self.identifier, value=self.constant),
        }
        outputs: dict[str, Check] = {
            "user_output": self.fields(arg=self.argument),
            "buffer_mutation": self.fields(arg=tensor, buffer_name=self.path),
        }
        self.only(document, ("input_specs", "output_specs"), "signature")
        return {
            "input_specs": [
                self.one_of(v, inputs, "an input") for v in self.items(document.get("input_specs"), "inputs")
            ],
            "output_specs": [
                self.one_of(v, outputs, "an output") for v in self.items(document.get("output_specs"), "outputs")
            ],
        }

    def tree(self, value: Any) -> str:
        """A tree specification: a JSON text of tuples, lists and dictionaries, and of nothing that would be imported."""
        if not isinstance(value, str):
            raise self.wrong("no tree specification", value)
        found = parse_json(value, f"{self.name}: a tree specification")
        if not (isinstance(found, list) and len(found) == 2 and found[0] == 1):
            raise self.wrong("an unknown kind of tree specification", value)
        return json.dumps([1, self._tree(found[1], 20)])

    def _tree(self, value: Any, depth: int) -> dict[str, Any]:
        document = self.mapping(value, "tree specification")
        self.only(document, ("type", "context", "children_spec"), "tree specification")
        kind, context = document.get("type"), document.get("context")
        children = self.items(document.get("children_spec"), "children")
        if depth == 0 or kind not in (None, "builtins.tuple", "builtins.list", "builtins.dict"):
            raise Refused(
                f"{self.name} passes its inputs or outputs in a {str(kind)[:80]!r}: use tuples, lists and dicts"
            )
        if kind == "builtins.dict":
            keys = parse_json(context, f"{self.name}: the keys of a dictionary") if isinstance(context, str) else None
            context = json.dumps([self.identifier(key) for key in self.items(keys, "keys")])
        elif context not in (None, "null"):
            raise Refused(f"{self.name} has the context {str(context)[:80]!r} in a tree specification")
        return {"type": kind, "context": context, "children_spec": [self._tree(c, depth - 1) for c in children]}

    def call(self, value: Any) -> dict[str, Any]:
        entry = self.mapping(value, "list of modules")
        self.only(entry, ("fqn", "signature"), "list of modules")
        fqn, found = entry.get("fqn"), entry.get("signature")
        signature = None
        if found is not None:
            known = ("inputs", "outputs", "in_spec", "out_spec", "forward_arg_names")
            self.only(self.mapping(found, "signature"), known, "signature of a module")
            names = found.get("forward_arg_names")
            signature = {
                "inputs": [self.argument(v) for v in self.items(found.get("inputs"), "inputs")],
                "outputs": [self.argument(v) for v in self.items(found.get("outputs"), "outputs")],
                "in_spec": self.tree(found.get("in_spec")),
                "out_spec": self.tree(found.get("out_spec")),
                "forward_arg_names": None
                if names is None
                else [self.identifier(n) for n in self.items(names, "names")],
            }
        return {"fqn": "" if fqn == "" else self.path(fqn), "signature": signature}

    def program(self, value: Any) -> dict[str, Any]:
        document = self.mapping(value, "description")
        known = (
            "graph_module", "opset_version", "range_constraints", "schema_version", "verifiers", "torch_version", "guards_code",
        )  # fmt: skip
        self.only(document, known, "description")
        if document.get("range_constraints"):
            raise self.symbolic()
        module = self.mapping(document.get("graph_module"), "graph")
        self.only(module, ("graph", "signature", "module_call_graph", "metadata"), "graph")
        version = self.mapping(document.get("schema_version"), "version")
        opset = self.mapping(document.get("opset_version"), "operations")
        verifiers = self.items(document.get("verifiers", []), "verifiers")
        if not all(v in _VERIFIERS for v in verifiers) or not verifiers:
            raise self.wrong("unknown verifiers", verifiers)
        return {
            "graph_module": {
                "graph": self.graph(module.get("graph")),
                "signature": self.signature(module.get("signature")),
                "module_call_graph": [self.call(v) for v in self.items(module.get("module_call_graph"), "modules")],
                "metadata": {},
                "treespec_namedtuple_fields": {},
            },
            "opset_version": {self.identifier(k): self.integer(v) for k, v in opset.items()},
            "range_constraints": {},
            "schema_version": {k: self.integer(version.get(k)) for k in ("major", "minor")},
            "verifiers": verifiers,
            "torch_version": self.text(document.get("torch_version", "unknown")),
            "guards_code": [checked_guard(v, self.name) for v in self.items(document.get("guards_code", []), "guards")],
        }


def check_program(document: Any, name: str) -> dict[str, Any]:
    """The description of a program, written anew from what was understood."""
    return _Reader(name).program(document)


def check_payloads(document: Any, sizes: Mapping[str, int], name: str) -> dict[str, Any]:
    """The list of weights or constants, each a view of stored bytes that are there; `sizes` are the stored lengths."""
    reader = _Reader(name)
    found = {}
    reader.only(reader.mapping(document, "list of weights"), ("config",), "list of weights")
    for key, value in reader.mapping(document.get("config"), "list of weights").items():
        payload = reader.mapping(value, "weight")
        reader.only(payload, ("path_name", "is_param", "use_pickle", "tensor_meta"), "list of weights")
        stored = payload.get("path_name")
        if payload.get("use_pickle") is not False:
            raise reader.pickled()
        if not (isinstance(stored, str) and _PATH.match(stored)):
            raise Refused(
                f"{name} stores {str(stored)[:80]!r}, an object rather than a tensor, which would be unpickled: export tensors"
            )
        if stored not in sizes:
            raise InputError(f"{name} lacks the stored numbers {stored!r} of {reader.path(key)!r}: it is damaged")
        meta = reader.tensor_meta(payload.get("tensor_meta"))
        _check_view(meta, sizes[stored], reader.path(key), name)
        parameter = reader.boolean(payload.get("is_param"))
        found[key] = {"path_name": stored, "is_param": parameter, "use_pickle": False, "tensor_meta": meta}
    return {"config": found}


def _check_view(meta: Mapping[str, Any], stored: int, weight: str, name: str) -> None:
    """Sizes, strides and offset stay inside the stored bytes, and cannot ask for much more memory than they take."""
    sizes, strides = ([s["as_int"] for s in meta[k]] for k in ("sizes", "strides"))
    offset = meta["storage_offset"]["as_int"]
    if len(sizes) != len(strides) or min([0, offset, *sizes, *strides]) < 0:
        raise InputError(
            f"{name}: the weight {weight!r} has the sizes {sizes} and the strides {strides}: it is damaged"
        )
    count = math.prod(sizes)
    last = offset + sum((s - 1) * t for s, t in zip(sizes, strides, strict=True)) if count else -1
    if last >= stored or count > 1024 * max(stored, 1):
        raise InputError(f"{name}: the weight {weight!r} reaches beyond the {stored:,} bytes stored for it")
