"""Named tuples of arrays as compiled functions pass them: one pointer to where the arrays lie, and how long they are.

numba passes a tuple of arrays as all that the arrays consist of, a hundred values for the machine's state, and every
function begins and ends with them. `views` makes a record of addresses and shapes in the frame of the function that
calls it, and functions that it calls get a pointer to this. Where they are inlined LLVM sees that nobody else has the
record, and keeps it in registers.

A view has of an array what the machine uses: an item by its whole index, a row by the first ones, `shape`, `size` and
`flat`. Indices are not looked at: no negative ones, none beyond the end.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, imputils
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.extending import intrinsic


class ArrayView(types.Type):
    """A contiguous array without an owner: where it lies and its shape."""

    def __init__(self, dtype: Any, ndim: int) -> None:
        self.dtype, self.ndim = dtype, ndim
        super().__init__(name=f"ArrayView({dtype}, {ndim})")


class ArrayViews(types.Type):
    """A pointer to the views of the arrays of a named tuple."""

    def __init__(self, arrays: Any) -> None:
        self.names = tuple(arrays.fields)
        self.types = tuple(ArrayView(array.dtype, array.ndim) for array in arrays)
        super().__init__(name=f"ArrayViews({', '.join(map(str, self.types))})")


@register_default(ArrayView)
class _ViewModel(models.StructModel):
    def __init__(self, manager: Any, one: ArrayView) -> None:
        members = [("data", types.CPointer(one.dtype)), ("shape", types.UniTuple(types.intp, one.ndim))]
        super().__init__(manager, one, members)


@register_default(ArrayViews)
class _ViewsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, one: ArrayViews) -> None:
        record = ir.LiteralStructType([manager.lookup(view).get_value_type() for view in one.types])
        super().__init__(manager, one, record.as_pointer())


@intrinsic
def views(_: Any, arrays: Any) -> Any:
    """Return views of the contiguous arrays of a named tuple, for as long as the function runs that calls this."""
    from numba.np.arrayobj import make_array  # which what is in the cache does not need

    assert all(array.layout == "C" for array in arrays)
    result = ArrayViews(arrays)

    def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
        record = cgutils.alloca_once(builder, context.get_value_type(result).pointee)
        for number, (array, view) in enumerate(zip(arrays, result.types, strict=True)):
            value = builder.extract_value(given[0], number)
            array = make_array(array)(context, builder, value)
            builder.store(_packed(context, builder, view, array.data, array.shape), _at(builder, record, number))
        return record

    return signature(result, arrays), generate


def _packed(context: Any, builder: Any, one: ArrayView, data: Any, shape: Any) -> Any:
    made = cgutils.create_struct_proxy(one)(context, builder)
    made.data = builder.bitcast(data, context.get_value_type(types.CPointer(one.dtype)))
    made.shape = shape
    return made._getvalue()


def _at(builder: Any, record: Any, number: int) -> Any:
    return cgutils.gep_inbounds(builder, record, 0, number)


# -- attributes


@infer_getattr
class _OfViews(AttributeTemplate):
    key = ArrayViews

    def generic_resolve(self, one: Any, name: str) -> Any:  # type: ignore[override]
        return one.types[one.names.index(name)]


@imputils.lower_getattr_generic(ArrayViews)
def _view_of(_: Any, builder: Any, one: ArrayViews, value: Any, name: str) -> Any:
    return builder.load(_at(builder, value, one.names.index(name)))


@infer_getattr
class _OfView(AttributeTemplate):
    key = ArrayView

    def generic_resolve(self, one: Any, name: str) -> Any:  # type: ignore[override]
        known = {"shape": types.UniTuple(types.intp, one.ndim), "size": types.intp, "flat": ArrayView(one.dtype, 1)}
        return known.get(name)


@imputils.lower_getattr_generic(ArrayView)
def _attribute(context: Any, builder: Any, one: ArrayView, value: Any, name: str) -> Any:
    data, shape = (builder.extract_value(value, number) for number in range(2))
    if name == "shape":
        return shape
    size = context.get_constant(types.intp, 1)
    for length in cgutils.unpack_tuple(builder, shape):
        size = builder.mul(size, length)
    if name == "size":
        return size
    return _packed(context, builder, ArrayView(one.dtype, 1), data, cgutils.pack_array(builder, [size]))


# -- items


def _axes(index: Any) -> tuple[Any, ...]:
    return tuple(index) if hasattr(index, "__iter__") else (index,)


@infer_global(operator.getitem)
class _Get(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        one, index = args
        if not isinstance(one, ArrayView) or not all(isinstance(axis, types.Integer) for axis in _axes(index)):
            return None
        left = one.ndim - len(_axes(index))
        return signature(ArrayView(one.dtype, left) if left else one.dtype, one, index)


@infer_global(operator.setitem)
class _Set(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        one, index, _ = args
        if not isinstance(one, ArrayView) or len(_axes(index)) != one.ndim:
            return None
        return signature(types.none, one, index, one.dtype)


def _item(context: Any, builder: Any, one: ArrayView, value: Any, kind: Any, index: Any) -> tuple[Any, list[Any]]:
    """Return the address of an item or of a row, and the shape of the row."""
    data, shape = builder.extract_value(value, 0), cgutils.unpack_tuple(builder, builder.extract_value(value, 1))
    given = cgutils.unpack_tuple(builder, index) if isinstance(kind, types.BaseTuple) else [index]
    place = None
    for axis, length in enumerate(shape):
        if place is not None:
            place = builder.mul(place, length)
        if axis < len(given):
            number = context.cast(builder, given[axis], _axes(kind)[axis], types.intp)
            place = number if place is None else builder.add(place, number)
    return builder.gep(data, [place], inbounds=True), shape[len(given) :]


@imputils.lower_builtin(operator.getitem, ArrayView, types.Any)
def _get(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    place, left = _item(context, builder, sig.args[0], args[0], sig.args[1], args[1])
    if left:
        return _packed(context, builder, sig.return_type, place, cgutils.pack_array(builder, left))
    return context.unpack_value(builder, sig.return_type, place)


@imputils.lower_builtin(operator.setitem, ArrayView, types.Any, types.Any)
def _set(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    place, _ = _item(context, builder, sig.args[0], args[0], sig.args[1], args[1])
    value = context.cast(builder, args[2], sig.args[2], sig.args[0].dtype)
    context.pack_value(builder, sig.args[0].dtype, value, place)
    return context.get_dummy_value()
