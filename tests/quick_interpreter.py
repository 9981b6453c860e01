"""Speeds up Triton's interpreter, and makes its dot products the same on every CPU.

A launch patches the interpreter's functions into the language, and every device function that a
kernel calls would patch again. Every tensor would wrap its shape in new objects and write the name
of its type, and every operation would list numpy's types for Triton's. Every integer addition and
multiplication would be repeated in 64 bits, for a check that only debugged kernels make. A
reduction or scan with a custom function runs element by element, each wrapped in a tensor: a
hundred thousand Python calls for one state of a DeltaNet head, where whole slices can be combined
in the same order. If an interpreter has other internals, nothing is replaced, and the tests only
take longer.

A dot product would be numpy's, whose BLAS rounds an element by its position in the tile on some
CPUs (OpenBLAS with AVX2), whereas tensor cores sum every element of a tile in one order. Here it is
a sum in the order of K, so batch invariance of a kernel can be tested bit for bit on every machine.
E4M3, which the interpreter rounds in its own way, is rounded and read by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _once_a_type(interpreter._get_np_dtype)
    tl.tensor.__init__ = _once_a_shape(tl.tensor.__init__)
    tl.block_type.__init__ = _once_a_block(tl.block_type.__init__)
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


def _once_a_shape(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_with_known_shape(tensor: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if shape in known:
            tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
            tensor.shape, tensor.numel = known[shape]
            return
        init(tensor, handle, type)
        if vars(tensor).keys() == {"handle", "type", "dtype", "shape", "numel"}:
            known[shape] = tensor.shape, tensor.numel

    return init_with_known_shape


def _once_a_block(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    known: dict[tuple[str, tuple[int, ...]], tuple[Any, Any, str]] = {}

    def init_with_known_block(block: Any, element: Any, shape: Any) -> None:
        key = None
        if type(element) is tl.dtype and all(type(size) is int for size in shape):
            key = element.name, tuple(shape)
            if key in known:
                block.element_ty = element
                block.shape, block.numel, block.name = known[key]
                return
        init(block, element, shape)
        if key is not None and vars(block).keys() == {"element_ty", "shape", "numel", "name"}:
            known[key] = block.shape, block.numel, block.name

    return init_with_known_block


def _running(ops: Any, parts: tuple[Any, ...], axis: int) -> list[tuple[np.ndarray, ...]]:
    """What is combined up to each place of the axis: one slice of every part, in the order of the
    axis.
    """
    slices = [np.moveaxis(part.handle.data, axis, 0) for part in parts]
    shape = slices[0].shape[1:]
    seen: list[tuple[np.ndarray, ...]] = [tuple(part[0] for part in slices)]
    for i in range(1, len(slices[0])):
        before, new = (
            tuple(
                ops.to_tensor(np.ascontiguousarray(one), part.dtype)
                for one, part in zip(group, parts)
            )
            for group in (seen[-1], tuple(part[i] for part in slices))
        )
        combined = ops.combine_fn.fn(*before, *new)
        combined = combined if isinstance(combined, tuple) else (combined,)
        seen.append(tuple(one.handle.data.reshape(shape) for one in combined))
    return seen


def _reduce_slices(ops: Any, parts: tuple[Any, ...]) -> list[Any]:
    num_dims = parts[0].handle.data.ndim
    parts, axis = ops.unravel(parts, ops.axis)
    results = []
    for data, part in zip(_running(ops, parts, axis)[-1], parts):
        if ops.keep_dims:
            data = data.reshape((1,) * num_dims) if ops.axis is None else np.expand_dims(data, axis)
        results.append(ops.to_tensor(data, part.dtype))
    return results


def _scan_slices(ops: Any, parts: tuple[Any, ...]) -> list[Any]:
    columns = zip(*_running(ops, parts, ops.axis))
    return [
        ops.to_tensor(np.stack(column, axis=ops.axis), part.dtype)
        for column, part in zip(columns, parts)
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
    """What is multiplied: E4M3 codes are bytes in the interpreter."""
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
