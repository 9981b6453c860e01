"""Speeds up Triton's interpreter, and makes its dot products the same on every CPU.

A launch patches the interpreter's functions into the language, and every device function that a
kernel calls would patch again. Every tensor would wrap its shape in new objects and write the name
of its type, and every operation would list numpy's types for Triton's, and compare types and shapes
that are the same object, number by number. Every integer addition and multiplication would be
repeated in 64 bits, for a check that only debugged kernels make. A reduction or scan with a custom
function runs element by element, each wrapped in a tensor: a hundred thousand Python calls for one
state of a DeltaNet head, where whole slices can be combined. If an interpreter has other internals,
nothing is replaced, and the tests only take longer.

A dot product would be numpy's, whose BLAS rounds an element by its position in the tile on some
CPUs (OpenBLAS with AVX2), whereas tensor cores sum every element of a tile in one order. Here it is
a sum in the order of K, so batch invariance of a kernel can be tested bit for bit on every machine.
E4M3, which the interpreter rounds in its own way, is rounded and read by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken() -> None:
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
        if hasattr(interpreter, "_patch_attr") and hasattr(interpreter, "interpreter_semantic"):
            interpreter._patch_attr = _call_at_once(interpreter._patch_attr)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _once_a_type(interpreter._get_np_dtype)
    tl.tensor.__init__ = _once_a_shape(tl.tensor.__init__)
    tl.block_type.__init__ = _once_a_block(tl.block_type.__init__)
    tl.dtype.__eq__ = _if_not_itself(tl.dtype.__eq__)
    if hasattr(tl.core, "_unwrap_if_constexpr"):
        tl.core._unwrap_if_constexpr = _if_wrapped(tl.core._unwrap_if_constexpr)
    if hasattr(tl, "tuple"):
        tl.tuple.__eq__ = _compare_numbers(tl.tuple.__eq__)
    for name, quick in (
        ("broadcast_impl_value", _if_shapes_differ),
        ("binary_op_type_checking_impl", _if_types_differ),
    ):
        if hasattr(TritonSemantic, name):
            setattr(TritonSemantic, name, quick(getattr(TritonSemantic, name)))
    builder = getattr(interpreter, "interpreter_builder", None)
    if (
        hasattr(getattr(builder, "options", None), "sanitize_overflow")
        and not builder.options.debug
    ):
        builder.options = replace(builder.options, sanitize_overflow=False)
    for name, slow, quick in (
        ("ReduceOps", "generic_reduce", _reduce_slices),
        ("ScanOps", "generic_scan", _scan_slices),
    ):
        owner = getattr(interpreter, name, None)
        if hasattr(owner, slow):
            setattr(owner, slow, quick)
    builder = getattr(interpreter, "InterpreterBuilder", None)
    if hasattr(builder, "create_dot"):
        builder.create_dot = _dot_in_order
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = _round_e4m3(interpreter._convert_float)


def _once_a_launch(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def patch_what_is_not(fn: Any) -> Any:
        modules = [
            module for module in fn.__globals__.values() if module is tl or module is tl.core
        ]
        functions = [tl.tensor.__add__, *(module.load for module in modules)]
        if any(tl.core.is_builtin(function) for function in functions):
            return patch(fn)
        return interpreter._LangPatchScope()  # empty: the launch itself restores its patches

    return patch_what_is_not


def _once_a_type(numpy_type: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    known: dict[str, np.dtype] = {}

    def known_or_found(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_type(dtype)
        return known[name]

    return known_or_found


def _call_at_once(patch: Callable[..., None]) -> Callable[..., None]:
    if list(signature(patch).parameters) != ["obj", "name", "member", "builder", "scope"]:
        return patch

    def patch_plainly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return member(*given, **named)

        scope.set_attr(obj, name, call)

    return patch_plainly


def _once_a_shape(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_with_known_shape(tensor: Any, handle: Any, type: Any) -> None:
        shape = _plain(type.shape) if type.is_block() else ()
        if shape in known:
            tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
            tensor.shape, tensor.numel = known[shape]
            return
        init(tensor, handle, type)
        if vars(tensor).keys() == {"handle", "type", "dtype", "shape", "numel"}:
            known[shape] = tensor.shape, tensor.numel

    return init_with_known_shape


def _once_a_block(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Blocks of one shape share one shape object, whatever their type."""
    known: dict[tuple[str, tuple[int, ...]], tuple[Any, Any, str]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def init_with_known_block(block: Any, element: Any, shape: Any) -> None:
        key, sizes = None, _plain(shape)
        if type(element) in (tl.dtype, tl.pointer_type) and {int}.issuperset(map(type, sizes)):
            key = element.name, sizes
            if key in known:
                block.element_ty = element
                block.shape, block.numel, block.name = known[key]
                return
        init(block, element, shape)
        if key is not None and vars(block).keys() == {"element_ty", "shape", "numel", "name"}:
            block.shape = shapes.setdefault(sizes, block.shape)
            known[key] = block.shape, block.numel, block.name

    return init_with_known_block


def _plain(shape: Any) -> tuple[Any, ...]:
    """A plain tuple: comparing and hashing Triton's own tuples takes many calls."""
    return tuple(getattr(shape, "values", shape))


def _if_not_itself(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda own, other: own is other or compare(own, other)


def _if_wrapped(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = {tl.tensor, tl.dtype, tl.block_type, int, float, bool, str, type(None)}
    return lambda one: one if type(one) in plain else unwrap(one)


def _compare_numbers(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare_or_unwrap(own: Any, other: Any) -> Any:
        if isinstance(other, list | tuple | tl.tuple):
            left, right = _plain(own), _plain(other)
            if {int}.issuperset(map(type, left + right)):
                return tl.constexpr(left == right)
        return compare(own, other)

    return compare_or_unwrap


def _if_shapes_differ(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_others(semantic: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(semantic, lhs, rhs)

    return broadcast_others


def _if_types_differ(check: Callable[..., Any]) -> Callable[..., Any]:
    """Skips the check if both types are equal, except for quotients: the result has that type."""
    names = ["self", "lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check"]
    if list(signature(check).parameters) != [*names, "div_or_mod"]:
        return check

    def check_others(semantic: Any, lhs: Any, rhs: Any, *given: Any, **named: Any) -> Any:
        are_tensors = type(lhs) is tl.tensor and type(rhs) is tl.tensor
        is_quotient = len(given) == 4 or named
        if are_tensors and lhs.dtype is rhs.dtype and not (is_quotient or lhs.dtype.is_ptr()):
            return semantic.broadcast_impl_value(lhs, rhs)
        return check(semantic, lhs, rhs, *given, **named)

    return check_others


def _combined(ops: Any, types: list[Any], left: list[Any], right: list[Any]) -> list[np.ndarray]:
    """Applies the custom function to two arrays, or to two of every part."""
    arrays = zip([*left, *right], [*types, *types], strict=True)
    given = [ops.to_tensor(np.ascontiguousarray(array), dtype) for array, dtype in arrays]
    made = ops.combine_fn.fn(*given)
    made = made if isinstance(made, tuple) else (made,)
    return [one.handle.data.reshape(np.shape(array)) for one, array in zip(made, left, strict=True)]


def _reduce_slices(ops: Any, parts: tuple[Any, ...]) -> list[Any]:
    """Combines neighbours first, then pairs of these, as threads do: zeros at the end change no
    sum.
    """
    num_dims = parts[0].handle.data.ndim
    parts, axis = ops.unravel(parts, ops.axis)
    types = [part.dtype for part in parts]
    slices = [np.moveaxis(part.handle.data, axis, 0) for part in parts]
    while (length := len(slices[0])) > 1:
        pairs = _combined(
            ops, types, [part[: length - 1 : 2] for part in slices], [part[1::2] for part in slices]
        )
        alone = [part[length - length % 2 :] for part in slices]
        slices = [np.concatenate(both) for both in zip(pairs, alone, strict=True)]
    results = []
    for (data,), dtype in zip(slices, types, strict=True):
        if ops.keep_dims:
            data = data.reshape((1,) * num_dims) if ops.axis is None else np.expand_dims(data, axis)
        results.append(ops.to_tensor(data, dtype))
    return results


def _scan_slices(ops: Any, parts: tuple[Any, ...]) -> list[Any]:
    """Combines one slice of every part after the other, in the order of the axis."""
    types = [part.dtype for part in parts]
    slices = [np.moveaxis(part.handle.data, ops.axis, 0) for part in parts]
    seen = [[part[0] for part in slices]]
    for i in range(1, len(slices[0])):
        seen.append(_combined(ops, types, seen[-1], [part[i] for part in slices]))
    columns = zip(*seen, strict=True)
    return [
        ops.to_tensor(np.stack(column, axis=ops.axis), dtype)
        for column, dtype in zip(columns, types, strict=True)
    ]


def _dot_in_order(
    builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    """a [.., M, K] @ b [.., K, N] + d: K comes first, so whole slices [.., M, N] are added one by
    one.
    """
    dtype = d.data.dtype
    a, b = _values_of(a), _values_of(b)
    rows, columns = np.moveaxis(a, -1, 0), np.moveaxis(b, -2, 0)  # [K, .., M], [K, .., N]
    products = rows[..., :, None].astype(dtype) * columns[..., None, :].astype(dtype)
    return interpreter.TensorHandle(np.add.reduce(products, axis=0) + d.data, d.dtype.scalar)


def _values_of(operand: Any) -> np.ndarray:
    """The values that are multiplied: E4M3 codes are bytes in the interpreter."""
    if operand.dtype.scalar != tl.float8e4nv:
        return operand.data
    codes = torch.from_numpy(np.ascontiguousarray(operand.data))
    return codes.view(torch.float8_e4m3fn).float().numpy()


def _round_e4m3(convert: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def convert_or_round(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(data, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    return convert_or_round
